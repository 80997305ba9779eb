"""OpaqueValue: raises when a trace looks at it, so that the trace holds for any value."""

from __future__ import annotations

from typing import Any

from wholestep.errors import CaptureError


class OpaqueValue:
    """Raises CaptureError where anybody asks it anything. No ``str``: C would read what is in it, and ask nobody."""

    __slots__ = ("_kind", "_sentence")

    def __init__(self, sentence: str, kind: type | None = None) -> None:
        """`sentence`: what the error says. `kind`: the class that `isinstance` may know, if any."""
        object.__setattr__(self, "_sentence", sentence)
        object.__setattr__(self, "_kind", kind)

    def __getattribute__(self, name: str) -> Any:
        kind = object.__getattribute__(self, "_kind")
        if name == "__class__" and kind is not None:
            return kind
        raise CaptureError(object.__getattribute__(self, "_sentence"))


def _asked(name: str) -> Any:
    def asked(self: OpaqueValue, *args: Any) -> Any:
        return getattr(self, name)

    return asked


for _name in (
    "__str__", "__repr__", "__format__", "__hash__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "__len__", "__iter__", "__contains__", "__getitem__", "__setitem__", "__delitem__", "__call__", "__add__",
    "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__mod__", "__rmod__",
    "__or__", "__ror__", "__neg__", "__abs__", "__int__", "__float__", "__index__", "__bool__",
):  # fmt: skip
    setattr(OpaqueValue, _name, _asked(_name))
