"""Modules that are replaced while a step is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from tests.conformance.spmd.train_step import row, train_step
from wholestep.runtime.distributed.world import init
from wholestep.spmd import Override, compile

_LIBRARY = torch.library.Library("conformance_tracing", "DEF")

_LIBRARY.define("forward(Tensor x) -> Tensor")

_LIBRARY.define("backward(Tensor grad) -> Tensor")

_LIBRARY.impl("forward", lambda x: x.clone(), "CompositeExplicitAutograd")

_LIBRARY.impl("backward", lambda grad: grad.clone(), "CompositeExplicitAutograd")
FORWARD = torch.ops.conformance_tracing.forward.default
BACKWARD = torch.ops.conformance_tracing.backward.default


class Anchors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return FORWARD(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return BACKWARD(grad)


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("this module has no graph")


class Placeholder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Anchors.apply(x)


class Tripled(nn.Module):
    """What the rewritten graph computes in the place of the untraceable module."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3.0


class Rewrites(Override):
    """Puts a product in the place of each anchor: an operator forward, a function of torch backward."""

    def __init__(self, recompile: bool) -> None:
        self.recompile = recompile
        self.fqns: list[str] = []
        self.targets: list[Any] = []

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        self.fqns.append(fqn)
        return Placeholder() if isinstance(orig_submodule, Untraceable) else orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        products = {FORWARD: torch.ops.aten.mul.Tensor, BACKWARD: torch.mul}
        for node in gm.graph.nodes:
            if node.target in products:
                self.targets.append(node.target)
                with gm.graph.inserting_before(node):
                    product = gm.graph.call_function(products[node.target], args=(*node.args, 3.0))
                node.replace_all_uses_with(product)
        gm.graph.lint()
        gm.graph.eliminate_dead_code()
        if self.recompile:
            gm.recompile()
        return gm


class Chain(nn.Module):
    def __init__(self, holes: int, hole: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(10, 10) for _ in range(holes + 1)]
        self.inner = nn.ModuleList(layers)
        self.holes = nn.ModuleList(hole() for _ in range(holes))

    def forward(self, x: Tensor) -> Tensor:
        for layer, hole in zip(self.inner, self.holes, strict=False):
            x = hole(layer(x))
        return torch.relu(self.inner[-1](x))


def with_override(holes: int, recompile: bool) -> tuple[Any, ...]:
    """What the override saw, and whether the step left what the same step with real modules leaves."""
    device, override = init().device, Rewrites(recompile)
    mods = [Chain(holes, kind).to(device) for kind in (Untraceable, Tripled if recompile else nn.Identity)]
    plain = compile()(train_step)
    step = compile(module_override=[override])(train_step)
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(4, 10).to(device) for _ in range(2)]
    for mod, run in zip(mods, (step, plain), strict=True):
        opt = torch.optim.SGD(mod.parameters(), lr=0.01, foreach=False)
        for batch in batches:
            run(mod, opt, batch)
    pairs = zip(*(mod.parameters() for mod in mods), strict=True)
    equal = [torch.equal(a, b) for a, b in pairs]
    untouched = all(isinstance(hole, Untraceable) for hole in mods[0].holes)
    return [target.name() for target in override.targets], override.fqns, all(equal), untouched


@pytest.mark.parametrize("recompile", [False, True], ids=["edited", "recompiled"])
@pytest.mark.parametrize(
    "holes",
    [
        pytest.param(1, marks=row("S1", "module_override"), id="module_override"),
        pytest.param(2, marks=row("S1", "module_multi_fqn_override"), id="module_multi_fqn_override"),
    ],
)
def test_an_overridden_module_is_rewritten_in_the_graph(ranks2: Any, holes: int, recompile: bool) -> None:
    """As with every GraphModule, an edit counts when it was recompiled."""
    expected = ["conformance_tracing::forward"] * holes + ["conformance_tracing::backward"] * holes
    fqns = ["inner", *(f"inner.{i}" for i in range(holes + 1)), "holes", *(f"holes.{i}" for i in range(holes))]
    for targets, asked, equal, untouched in ranks2.run(with_override, holes, recompile):
        assert targets == expected
        assert asked == fqns
        assert equal
        assert untouched, "the replacement stands in while the step is captured, no longer"
