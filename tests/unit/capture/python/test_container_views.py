"""Values without names: sets, deques, arrays, slots. What a step reads of them is looked at before every call."""

from __future__ import annotations

import array
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.capture.python.container_views import ContentView
from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.reach import reachability
from wholestep.errors import CaptureError


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Half(Slotted):
    """One attribute in a slot of the base, others in a dict."""


BEHIND = {"scale": 1.0}
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], float]]] = {
    "set, length": (lambda: {1}, lambda s: s.add(2), lambda s: float(len(s))),
    "set, members": (lambda: {1}, lambda s: s.add(2), lambda s: 3.0 if 2 in s else 1.0),
    "deque": (lambda: deque([1.0]), lambda d: d.append(3.0), lambda d: d[-1]),
    "bytearray": (lambda: bytearray(b"\1"), lambda b: b.__setitem__(0, 3), lambda b: float(b[0])),
    "memoryview": (lambda: memoryview(bytearray(b"\1")), lambda b: b.__setitem__(0, 3), lambda b: float(b[0])),
    "array.array": (lambda: array.array("d", [1.0]), lambda a: a.__setitem__(0, 3.0), lambda a: a[0]),
    "ndarray": (lambda: np.array([1.0, 2.0]), lambda a: a.__setitem__(0, 3.0), lambda a: float(a[0])),
    "ndarray, 0-d": (lambda: np.array(1.0), lambda a: a.__setitem__((), 3.0), lambda a: float(a)),
    "ndarray of objects": (lambda: np.array([1.0], object), lambda a: a.__setitem__(0, 3.0), lambda a: a[0]),
    "ndarray, part": (lambda: np.ones((3, 3))[:, 1], lambda a: a.__setitem__(2, 3.0), lambda a: float(a[2])),
    "slots": (Slotted, lambda c: setattr(c, "scale", 3.0), lambda c: c.scale),
    "slots of a base": (Half, lambda c: setattr(c, "scale", 3.0), lambda c: c.scale),
    "long list": (lambda: [1.0] * 5000, lambda a: a.__setitem__(0, 3.0), lambda a: a[0]),
    "view of a dict": (
        lambda: types.MappingProxyType(BEHIND), lambda v: BEHIND.update(scale=3.0), lambda v: v["scale"]
    ),
    "UserDict": (lambda: UserDict(a=1.0), lambda d: d.update(a=3.0), lambda d: d["a"]),
    "UserList": (lambda: UserList([1.0]), lambda d: d.__setitem__(0, 3.0), lambda d: d[0]),
    "ChainMap": (lambda: ChainMap({}, {"a": 1.0}), lambda d: d.update(a=3.0), lambda d: d["a"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_change_between_calls_is_seen(name: str) -> None:
    make, change, read = CASES[name]
    BEHIND.update(scale=1.0)
    held = make()

    def scaled(x: Tensor) -> Tensor:
        return x * read(held)

    step = ws.compile(scaled, backend="eager")
    x = torch.ones(2)
    assert [float(step(x)[0]) for _ in range(2)] == [1.0, 1.0]
    assert step.cache_info().traces == 1
    change(held)
    assert [float(step(x)[0]) for _ in range(2)] == [float(scaled(x)[0])] * 2 != [1.0, 1.0]
    assert step.cache_info().traces == 2


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: {1}, lambda held, x: held.add(len(held) + 10)),
        (lambda: deque([0, 1, 2], maxlen=3), lambda held, x: held.append(5)),
        (lambda: deque(), lambda held, x: held.append(x.sum())),
        (lambda: bytearray(b"\1\2"), lambda held, x: held.__setitem__(1, held[1] + 1)),
        (lambda: array.array("d", [1.0]), lambda held, x: held.__setitem__(0, held[0] + 1)),
        (lambda: np.arange(6.0).reshape(2, 3).T, lambda held, x: held.__setitem__((0, 1), held[0, 1] + 1)),
        (lambda: np.array([1, "a"], object), lambda held, x: held.__setitem__(0, held[0] + 1)),
    ],
    ids=["set", "deque", "deque of tensors", "bytearray", "array.array", "ndarray", "ndarray of objects"],
)
def test_a_step_that_writes_is_refused_and_leaves_all_as_it_was(make: Any, write: Any) -> None:
    held = make()
    before = repr(held)

    def step(x: Tensor) -> Tensor:
        write(held, x)
        return x * 2

    with pytest.raises(CaptureError, match="The step changes Python state"):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(2))
    assert repr(held) == before


@pytest.mark.parametrize("asks", [False, True], ids=["the tensor", "Python, too"])
def test_what_is_written_to_an_array_is_read_by_its_tensor_and_by_python(asks: bool) -> None:
    """Nobody sees whether Python reads an array as well, so another content is another trace."""
    held = np.ones(2)

    def scaled(x: Tensor) -> Any:
        return x * torch.from_numpy(held), float(held[1]) if asks else None

    step = ws.compile(scaled, backend="eager", fullgraph=True)
    for scale in (1.0, 3.0, 5.0):
        held[:] = scale
        product, number = step(torch.ones(2, dtype=torch.float64))
        assert product.tolist() == [scale] * 2
        assert number == (scale if asks else None)


def test_a_large_array_is_refused() -> None:
    held = np.zeros(1 << 18)

    def step(x: Tensor) -> Tensor:
        return x * float(held[0])

    with pytest.raises(ws.CaptureError, match="held, a ndarray, of 2,097,152 bytes, too many to be compared"):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(2))


def test_an_ordinary_model_has_nothing_that_python_has_to_compare() -> None:
    """Every call would pay for it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        model(x).sum().backward()
        opt.step()
        return x

    found = reachability.find_reachable(step, (model, torch.optim.AdamW(model.parameters()), torch.ones(2, 2)), {})
    assert not [watch.path for watch in found.snapshots if isinstance(watch.container, ContentView)]


@pytest.mark.parametrize("held", [{1, 2}, deque([1, 2]), bytearray(b"ab"), np.arange(4.0), np.array([1, "a"], object)])
def test_what_a_watch_puts_back_is_what_it_held(held: Any) -> None:
    before = repr(held)
    watch = Snapshot(ContentView(held), "held", None)
    watch.held = watch.now()
    if isinstance(held, (set, deque)):
        held.clear()
    else:
        held[0] = 7
    assert [path for path, *_ in watch.changes()]
    watch.restore()
    assert repr(held) == before
    assert not list(watch.changes())
