"""Overrides on one process: which modules are asked about, what stands in, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from wholestep.errors import ConfigError
from wholestep.spmd import Override, compile


class Hole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("nothing to trace")


class Fills(Override):
    def __init__(self, make: Callable[[nn.Module], nn.Module]) -> None:
        self.make, self.asked = make, []

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        self.asked.append(fqn)
        return self.make(orig_submodule) if isinstance(orig_submodule, Hole) else orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        return gm


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(Hole(), nn.Linear(3, 3)))


def step(mod: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = mod(x).sum()
    loss.backward()
    opt.step()
    return loss.detach()


def test_every_submodule_is_asked_about_and_the_model_is_left_as_it_was() -> None:
    override, mod = Fills(lambda hole: nn.Identity()), model()
    compiled = compile(module_override=[override])(step)
    opt = torch.optim.SGD(mod.parameters(), lr=0.1)
    compiled(mod, opt, torch.ones(2, 3))
    assert override.asked == ["0", "1", "1.0", "1.1"]
    assert isinstance(mod[1][0], Hole)
    graph = compiled._compiled_obj.gm
    compiled(mod, opt, torch.ones(2, 3))
    assert compiled._compiled_obj.gm is graph, "the guards hold with the originals in place"


def test_a_change_of_the_model_is_still_seen() -> None:
    override, mod = Fills(lambda hole: nn.Identity()), model()
    compiled = compile(module_override=[override])(step)
    opt = torch.optim.SGD(mod.parameters(), lr=0.1)
    compiled(mod, opt, torch.ones(2, 3))
    graph = compiled._compiled_obj.gm
    mod[1][0] = nn.ReLU()
    compiled(mod, opt, torch.ones(2, 3))
    assert compiled._compiled_obj.gm is not graph
    assert "relu" in compiled._compiled_obj.gm.code


def test_a_replacement_keeps_its_parameters_over_retraces() -> None:
    made: list[nn.Module] = []

    def make(hole: nn.Module) -> nn.Module:
        made.append(nn.Linear(3, 3))
        return made[-1]

    mod = model()
    compiled = compile(module_override=[Fills(make)])(step)
    opt = torch.optim.SGD(mod.parameters(), lr=0.1)
    for rows in (2, 4):
        compiled(mod, opt, torch.ones(rows, 3))
    assert len(made) == 1
    assert made[0].weight.grad is None


def test_overrides_see_what_the_one_before_chose() -> None:
    class Second(Fills):
        def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
            return nn.Tanh() if isinstance(orig_submodule, nn.Identity) else orig_submodule

    compiled = compile([Fills(lambda hole: nn.Identity()), Second(lambda hole: hole)])(step)
    mod = model()
    compiled(mod, torch.optim.SGD(mod.parameters(), lr=0.1), torch.ones(2, 3))
    assert "tanh" in compiled._compiled_obj.gm.code


def test_the_model_is_left_as_it_was_when_the_capture_fails() -> None:
    mod = model()
    compiled = compile([Fills(lambda hole: Hole())])(step)
    with pytest.raises(Exception, match="nothing to trace"):
        compiled(mod, torch.optim.SGD(mod.parameters(), lr=0.1), torch.ones(2, 3))
    assert isinstance(mod[1][0], Hole)


def test_a_replacement_that_is_no_module() -> None:
    mod = model()
    compiled = compile([Fills(lambda hole: torch.tanh)])(step)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"replacement\('1.0'"):
        compiled(mod, torch.optim.SGD(mod.parameters(), lr=0.1), torch.ones(2, 3))
