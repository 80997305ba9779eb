"""Numbers of parameter groups are inputs: what changes between calls is read, and nothing is traced again for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn

from tests.unit.capture.steps import Make, calls, differing, names, program_of, run_both, train, twins
from wholestep.ir.program import InputKind


def adamw(**options: Any) -> Make:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        settings = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, **options}
        return model, torch.optim.AdamW(model.parameters(), **settings)

    return make


VARIANTS = [{"foreach": True}, {"foreach": False}, {"fused": True}]
CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "lr": lambda group: group.update(lr=group["lr"] * 3),
    "betas": lambda group: group.update(betas=(0.5, 0.7)),
    "weight_decay": lambda group: group.update(weight_decay=0.4),
    "eps": lambda group: group.update(eps=0.5),
}


@pytest.mark.parametrize("key", CHANGES)
@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: next(iter(options.items()))[0] + str(options))
def test_a_changed_number_is_read_without_a_retrace(options: dict[str, Any], key: str) -> None:
    step = run_both(adamw(**options), 4, lambda call, opt: CHANGES[key](opt.param_groups[0]) if call == 2 else None)
    assert step.cache_info().traces == 1, step.cache_info().reasons


@pytest.mark.parametrize("key", CHANGES)
def test_a_changed_number_changes_the_training(key: str) -> None:
    """The numbers above would not show a frozen value if it made no difference."""
    (a, opt_a), (b, opt_b) = twins(adamw(fused=True))
    x = torch.ones(6, 4)
    for call in range(3):
        train(a, opt_a, x)
        train(b, opt_b, x)
        if call == 1:
            CHANGES[key](opt_b.param_groups[0])
    assert differing(a, b) != []


def test_every_number_of_a_group_is_an_input() -> None:
    model, opt = adamw()()
    program = program_of(train, model, opt, torch.ones(6, 4))
    wanted = {f"opt.groups.0.{key}" for key in ("lr", "betas.0", "betas.1", "eps", "weight_decay")}
    assert set(names(program, InputKind.HYPER)) == wanted


def fused_nodes(*models_and_more: Any) -> list[fx.Node]:
    program = program_of(train, *models_and_more)
    return [node for node in calls(program) if "_fused_" in str(node.target)]


def floats_in(node: fx.Node) -> list[float]:
    found: list[float] = []
    fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda a: found.append(a) if isinstance(a, float) else a)
    return found


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD])
def test_no_number_stays_in_a_fused_kernel(kind: Any) -> None:
    model = nn.Linear(4, 2)
    options = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.Adagrad: {"lr_decay": 0.1}}.get(kind, {})
    opt = kind(model.parameters(), lr=0.0123, weight_decay=0.0456, fused=True, **options)
    nodes = fused_nodes(model, opt, torch.ones(6, 4))
    assert nodes
    left = [number for node in nodes for number in floats_in(node)]
    assert [number for number in left if number != 0.0] == []


def test_equal_numbers_of_two_groups_are_two_inputs() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        groups = [{"params": list(layer.parameters())} for layer in model]
        return model, torch.optim.AdamW(groups, lr=0.5, betas=(0.5, 0.5), weight_decay=0.5, fused=True)

    def change(call: int, opt: torch.optim.Optimizer) -> None:
        if call == 2:
            opt.param_groups[1].update(lr=0.01, betas=(0.5, 0.9))

    assert run_both(make, 4, change).cache_info().traces == 1
    nodes = fused_nodes(*make(), torch.ones(6, 4))
    assert len(nodes) == 2
    assert not {arg for arg in nodes[0].all_input_nodes if "lr" in arg.name} & set(nodes[1].all_input_nodes)


def test_a_zero_of_a_fused_kernel_is_watched_by_value() -> None:
    def change(call: int, opt: torch.optim.Optimizer) -> None:
        opt.param_groups[0]["weight_decay"] = 0.3 if call >= 2 else 0.0

    info = run_both(adamw(weight_decay=0.0, fused=True), 4, change).cache_info()
    assert info.traces == 2
    assert info.reasons == ("opt.groups.0.weight_decay was 0.0, is 0.3",)


def test_factors_of_muons_products_are_watched_by_value() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 2, bias=False)
        return model, torch.optim.Muon(model.parameters(), lr=0.1)

    def change(call: int, opt: torch.optim.Optimizer) -> None:
        if call == 2:
            opt.param_groups[0].update(lr=0.05, ns_coefficients=(3.0, -4.0, 2.0))

    info = run_both(make, 4, change).cache_info()
    assert info.traces == 2
    assert len(info.reasons) == 1
    assert "ns_coefficients" in info.reasons[0]
    products = [
        node
        for node in calls(program_of(train, *make(), torch.ones(6, 4)))
        if node.target in (torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)
    ]
    assert products
    assert all(isinstance(number, float | int) for node in products for number in node.kwargs.values())


def test_a_rate_that_becomes_a_tensor_is_traced_again() -> None:
    def change(call: int, opt: torch.optim.Optimizer) -> None:
        if call == 2:
            opt.param_groups[0]["lr"] = torch.tensor(0.05, dtype=torch.float64)

    (reason,) = run_both(adamw(foreach=False), 4, change).cache_info().reasons
    assert "opt.groups.0.lr" in reason
    assert "Tensor" in reason


def test_groups_hold_plain_numbers_after_a_trace() -> None:
    model, opt = adamw(fused=True)()
    before = dict(opt.param_groups[0])
    program_of(train, model, opt, torch.ones(6, 4))
    assert all(opt.param_groups[0][key] is held for key, held in before.items())
