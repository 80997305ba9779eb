"""A step with its state: run eagerly and compiled from one start, all that it leaves is compared after each call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.harness.equality import equal
from wholestep.errors import CaptureError

CALLS = 4
row = functools.partial(pytest.mark.row, "S7")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
keep_version = torch.autograd._unsafe_preserve_version_counter


def set_version(tensor: Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and equal(a, b)


def plain(tree: Any) -> Any:
    """A copy that later calls do not change."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {"type": type(tree), **plain(vars(tree))}
    return [plain(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


class Pattern:
    """A step with its state; `seen` is what a user can look at after a call."""

    device = "cpu"

    def arguments(self, call: int) -> tuple[Any, ...]:
        return ()

    def step(self, *args: Any) -> Any:
        raise NotImplementedError

    def seen(self) -> dict[str, Any]:
        return {}


def run(pattern: Pattern, step: Callable[..., Any], calls: int = CALLS) -> list[Any]:
    found = []
    for call in range(calls):
        args = pattern.arguments(call)
        result = step(*args)
        sizes = [arg.untyped_storage().size() for arg in args if isinstance(arg, Tensor)]
        values = [arg for arg in args if isinstance(arg, Tensor) and arg.untyped_storage().size()]
        found.append(plain({"result": result, "sizes": sizes, "arguments": values, "seen": pattern.seen()}))
    return found


def check(make: Callable[[], Pattern], traces: int = 1, calls: int = CALLS) -> ws.CompiledStep:
    """Eager and compiled agree after every call, in every bit. Gives the compiled step."""
    torch.manual_seed(0)
    eager = make()
    wanted = run(eager, eager.step, calls)
    torch.manual_seed(0)
    pattern = make()
    step = ws.compile(pattern.step, fullgraph=True)
    for call, (want, got) in enumerate(zip(wanted, run(pattern, step, calls), strict=True)):
        for key in want:
            assert same(got[key], want[key]), f"call {call}, {key}: {got[key]} instead of {want[key]}"
    assert step.cache_info().traces == traces, step.cache_info().reasons
    return step


def lines(step: ws.CompiledStep) -> list[Any]:
    return [node.target for node in step.graph.graph.nodes if node.op == "call_function"]


def refused(step: Callable[..., Any], *args: Any, text: str) -> None:
    """The step is refused with `text` and a line of the user's, and its arguments are as they were."""
    before = [(arg.untyped_storage().size(), arg._version, tuple(arg.shape)) for arg in args]
    values = [arg.clone() if arg.untyped_storage().size() else None for arg in args]
    try:
        with pytest.raises(CaptureError, match=text) as caught:
            ws.compile(step, fullgraph=True)(*args)
        assert any(f"{Path(file).name}:" in str(caught.value) for file in (step.__code__.co_filename, __file__))
        assert before == [(arg.untyped_storage().size(), arg._version, tuple(arg.shape)) for arg in args]
        assert all(value is None or torch.equal(arg, value) for arg, value in zip(args, values, strict=True))
    finally:
        for arg in args:  # a report of pytest would read it
            arg.untyped_storage().resize_(arg.numel() * arg.element_size())


def free(x: Tensor) -> None:
    x.untyped_storage().resize_(0)
