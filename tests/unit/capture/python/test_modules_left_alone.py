"""A capture leaves the methods of modules as they are; other traces of fx, beside it or within it, do as always."""

from __future__ import annotations

import threading
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import _symbolic_trace, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep.capture.python.modules_left_alone import modules_left_alone

CALL = nn.Module.__call__
TWO = torch.ones(2)


class Doubled(nn.Module):
    """Has a module that a symbolic trace keeps as one call, and a function of `math` in reach."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * sqrt(4.0)


def ops(module: torch.fx.GraphModule) -> list[str]:
    return [node.op for node in module.graph.nodes]


def test_one_trace_patches_nothing():
    seen = []

    def traced(x: Tensor) -> Tensor:
        seen.append((nn.Module.__call__, sqrt))
        return x.exp()

    with modules_left_alone():
        make_fx(traced)(TWO)
        make_fx(traced)(TWO)
    assert seen[0] == (CALL, sqrt)
    assert seen[1][0] is not CALL
    assert nn.Module.__call__ is CALL


def test_a_symbolic_trace_within_it_does():
    found = []

    def traced(x: Tensor) -> Tensor:
        found.append(ops(symbolic_trace(Doubled())))
        return x.exp()

    with modules_left_alone():
        make_fx(traced)(TWO)
    assert found == [["placeholder", "call_module", "call_function", "output"]]


def test_a_symbolic_trace_on_another_thread_does():
    found: list[Any] = []
    with modules_left_alone():
        thread = threading.Thread(target=lambda: found.append(ops(symbolic_trace(Doubled()))))
        thread.start()
        thread.join()
        make_fx(lambda x: found.append(nn.Module.__call__) or x.exp())(TWO)
    assert found == [["placeholder", "call_module", "call_function", "output"], CALL]


@pytest.mark.parametrize("writes", [False, True])
def test_a_capture_exchanges_no_method(writes: bool, monkeypatch: pytest.MonkeyPatch):
    """Also where the graph is traced again, since it writes through views."""
    exchanged, patch_method = [], _symbolic_trace._Patcher.patch_method

    def counted(patcher: Any, cls: type, name: str, *args: Any, **kwargs: Any) -> None:
        exchanged.append(name)
        patch_method(patcher, cls, name, *args, **kwargs)

    monkeypatch.setattr(_symbolic_trace._Patcher, "patch_method", counted)
    model = Doubled()

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        y = model(x).detach().clone()
        if writes:
            y[0].mul_(3.0)
        return y

    x = torch.randn(3, 2)
    wanted = model(x).detach()
    if writes:
        wanted[0] *= 3
    assert torch.equal(step(x), wanted)
    assert exchanged == []
