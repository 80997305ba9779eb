"""A memory budget on compiled steps: the same bits in less memory, on one process and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.ir import node_meta
from wholestep.ir.node_meta import Region

BUDGET, CALLS = 0.6, 3


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return backward_and_step(model(x).square().mean(), opt).detach()


def seen(program: Any) -> Any:
    seen_passes.append(len(program.graph.nodes))
    return program


seen_passes: list[int] = []


def trained(passes: Any) -> tuple[list[Tensor], ws.CompiledStep]:
    """What some calls with dropout leave: losses, parameters, optimizer state, the generator; and the step."""
    world = ws.init()
    torch.manual_seed(5 + world.rank)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3))]
    model = nn.Sequential(*layers).to(world.device)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = ws.compile(train, passes=passes, backend="eager", fullgraph=True)
    losses = [step(model, opt, torch.randn(400, 32, device=world.device)) for _ in range(CALLS)]
    state = [value for one in opt.state.values() for value in one.values()]
    tensors = [*losses, *model.parameters(), *state]
    return [*(one.detach().cpu() for one in tensors), torch.get_rng_state()], step


def bytes_without_inputs(step: ws.CompiledStep) -> int:
    """The predicted peak without the bytes of the inputs."""
    program = step.program()
    return step.explain().peak.num_bytes - sum(map(node_meta.num_bytes, program.placeholders))


def repeated(step: ws.CompiledStep) -> int:
    return sum(node_meta.origin(node).region is Region.RECOMPUTE for node in step.graph.graph.nodes)


def check() -> tuple[int, int]:
    plain, free = trained(None)
    seen_passes.clear()
    bound, tight = trained(ws.default_passes(memory_budget=BUDGET, extra=seen))
    assert len(plain) == len(bound)
    assert all(map(torch.equal, plain, bound))
    assert repeated(free) == 0 < repeated(tight)
    assert len(seen_passes) == tight.cache_info().traces
    return bytes_without_inputs(free), bytes_without_inputs(tight)


def test_one_process_keeps_the_budget_bit_by_bit() -> None:
    before, after = check()
    assert after <= BUDGET * before


@pytest.mark.ranks
def test_two_processes_keep_the_budget_bit_by_bit(ranks2: Any) -> None:
    for before, after in ranks2.run(check):
        assert after <= BUDGET * before


def test_bytes_that_cannot_be_kept_name_the_smallest_number_that_can() -> None:
    with pytest.raises(ws.ConfigError, match=r"memory_budget=1000 wants at most .* Give as much") as caught:
        trained(ws.default_passes(memory_budget=1000))
    smallest = int(str(caught.value).split("(")[1].split(" bytes")[0])
    _, step = trained(ws.default_passes(memory_budget=smallest))
    assert bytes_without_inputs(step) <= smallest


def refused() -> tuple[int, int]:
    """The bound that an error names, and what a step needs with it."""
    with pytest.raises(ws.ConfigError, match=r"bound_bytes=1000 wants at most .* set memory_budget instead") as caught:
        trained(ws.default_passes(bound_bytes=1000))
    smallest = int(str(caught.value).split("(")[1].split(" bytes")[0])
    return smallest, bytes_without_inputs(trained(ws.default_passes(bound_bytes=smallest))[1])


def test_an_order_that_cannot_keep_its_bound_is_refused() -> None:
    smallest, needed = refused()
    assert needed <= smallest


@pytest.mark.ranks
def test_two_processes_refuse_a_bound_that_cannot_be_kept(ranks2: Any) -> None:
    for smallest, needed in ranks2.run(refused):
        assert needed <= smallest


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"memory_budget": 0}, "memory_budget wants bytes"),
    "more than all": ({"memory_budget": 1.5}, "fraction of at most 1.0"),
    "text": ({"memory_budget": "8 GiB"}, "memory_budget wants bytes"),
    "flag": ({"memory_budget": True}, "memory_budget wants bytes"),
    "bound": ({"bound_bytes": 0.5}, "bound_bytes wants a positive number of bytes"),
    "no bound": ({"bound_bytes": 0}, "bound_bytes wants a positive number of bytes"),
    "extra": ({"extra": [3]}, r"default_passes\(extra=...\) wants functions"),
    "options in options": ({"extra": [ws.default_passes()]}, r"passes=ws.default_passes\(..., extra=\[my_pass\]\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_options_that_cannot_be_used(name: str) -> None:
    options, said = BAD[name]
    with pytest.raises(ws.ConfigError, match=said):
        ws.default_passes(**options)


def test_options_in_a_list_of_passes_are_refused_with_the_way_to_say_it() -> None:
    with pytest.raises(ws.ConfigError, match=r"compile\(passes=...\) wants .* extra=\[my_pass\]"):
        ws.compile(train, passes=[ws.default_passes(memory_budget=0.6), seen], fullgraph=True)
