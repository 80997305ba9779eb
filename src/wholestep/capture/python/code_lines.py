"""Finds the lines of code that write to something or use a name, from its instructions."""

from __future__ import annotations

import dis
import re
from collections.abc import Collection, Iterable
from types import CodeType

_WRITERS = frozenset({
    "append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "popleft", "remove",
    "clear", "discard", "move_to_end", "sort", "reverse", "rotate", "fill",
    "register_buffer", "__setitem__", "__setattr__", "setattr", "train", "eval", "step",
})  # fmt: skip
_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF"})


def writer_of(path: str, codes: Iterable[CodeType]) -> str:
    """``file.py:12 in count``: the line that writes to ``model.calls``, ``log[0]`` or ``closure.n``; "" if unknown.

    Read from the instructions of each line: one that stores the last name of `path`, or else an item of, or a call
    that changes, something of a name in `path`.
    """
    *holders, last = [part for part in re.split(r"[.\[\]()]", path) if part]
    item = ""
    for code in codes:
        for line, instructions in _lines(code):
            names = {one.argval for one in instructions if isinstance(one.argval, str)}
            where = f"{code.co_filename}:{line} in {code.co_name}"
            if any(one.opname in _STORES and one.argval == last for one in instructions):
                return where
            if all(one.opname not in ("STORE_SUBSCR", "DELETE_SUBSCR") for one in instructions):
                names = set() if names.isdisjoint(_WRITERS) else names - _WRITERS
            if not item and not names.isdisjoint({*holders[-1:], last}):
                item = where
    return item


def user_of(names: Collection[str], codes: Iterable[CodeType]) -> str:
    """``at file.py:12 in count``: the first line with one of these names; "" if there is none."""
    for code in codes:
        for line, instructions in _lines(code):
            if any(one.argval in names for one in instructions if isinstance(one.argval, str)):
                return f" at {code.co_filename}:{line} in {code.co_name}"
    return ""


def _lines(code: CodeType) -> Iterable[tuple[int, list[dis.Instruction]]]:
    found: dict[int, list[dis.Instruction]] = {}
    for one in dis.get_instructions(code):
        if one.positions is not None and one.positions.lineno is not None:
            found.setdefault(one.positions.lineno, []).append(one)
    return found.items()
