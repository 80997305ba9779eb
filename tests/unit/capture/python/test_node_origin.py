"""Every node says where it comes from: part of the step, module, the user's line. Checkpointing really saves memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit.capture.steps import Blocks, calls, captured, differing, peak_bytes, program_of, train, twins
from wholestep.ir import node_meta
from wholestep.ir.node_meta import Region
from wholestep.ir.program import Program

HERE = Path(__file__).name


def clipped(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    out = model(x)
    loss = out.square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    opt.zero_grad()
    return loss


FIRST = clipped.__code__.co_firstlineno
LINES = {"forward": FIRST + 1, "loss": FIRST + 2, "backward": FIRST + 3, "clip": FIRST + 4, "update": FIRST + 5}


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    model = Blocks()
    return program_of(clipped, model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(4, 8))


def of_region(program: Program, region: Region) -> list[Any]:
    return [node_meta.origin(node) for node in calls(program) if node_meta.origin(node).region is region]


def test_forward_nodes_carry_their_module(program: Program) -> None:
    loss, backward = (f"{HERE}:{LINES[part]}" for part in ("loss", "backward"))
    origins = [origin for origin in of_region(program, Region.FORWARD) if origin.source != backward]
    assert [origin.source for origin in origins if not origin.module] == [loss, loss]  # a power and a mean
    parts = [f"blocks.{i}.{part}" for i in range(2) for part in ("norm", "up", "act", "down")]
    assert {origin.module for origin in origins} == {*parts, "blocks.0", "blocks.1", "stem", "head", ""}


def test_every_operator_of_the_forward_is_in_the_forward(program: Program) -> None:
    by_target = {str(n.target): node_meta.origin(n) for n in calls(program)}
    for target in ("aten.addmm.default", "aten.native_layer_norm.default", "aten.gelu.default"):
        assert by_target[target].region is Region.FORWARD, target
    for target in ("aten.gelu_backward.default", "aten.native_layer_norm_backward.default"):
        assert by_target[target].region is Region.BACKWARD, target


def test_backward_nodes_carry_the_module_of_the_forward(program: Program) -> None:
    origins = of_region(program, Region.BACKWARD)
    assert len(origins) > 30
    named = [origin for origin in origins if origin.module]
    assert {origin.module for origin in named} <= {o.module for o in of_region(program, Region.FORWARD) if o.module}
    assert len(named) >= 0.9 * len(origins), f"{len(named)} of {len(origins)}"


def test_gradient_products_belong_to_the_layer_they_differentiate(program: Program) -> None:
    products = [n for n in calls(program) if n.target is torch.ops.aten.mm.default]
    modules = Counter(node_meta.origin(node).module for node in products)
    layers = [f"blocks.{i}.{part}" for i in range(2) for part in ("up", "down")]
    assert modules == {**dict.fromkeys([*layers, "head"], 2), "stem": 1}  # nobody wants the gradient of x


def test_the_update_is_the_optimizers(program: Program) -> None:
    regions: dict[str, set[Region]] = {}
    for node in calls(program):
        regions.setdefault(str(node.target).partition("_foreach_")[2].partition(".")[0], set()).add(
            node_meta.origin(node).region
        )
    for name in ("lerp", "addcmul", "addcdiv"):
        assert regions[name] == {Region.OPTIMIZER}
    assert {origin.source for origin in of_region(program, Region.OPTIMIZER)} == {f"{HERE}:{LINES['update']}"}


def test_clipping_is_neither_backward_nor_optimizer(program: Program) -> None:
    aten = torch.ops.aten
    norms = [n for n in calls(program) if n.target in (aten._foreach_norm.Scalar, aten.linalg_vector_norm.default)]
    assert len(norms) == 2  # that of every parameter in one call, as eager code has it, and the norm of the norms
    assert {node_meta.origin(n).region for n in norms} == {Region.OTHER}
    assert {origin.source for origin in of_region(program, Region.OTHER)} == {f"{HERE}:{LINES['clip']}"}


def test_nodes_carry_the_source_lines_of_the_step(program: Program) -> None:
    square = next(n for n in calls(program) if n.target is torch.ops.aten.pow.Tensor_Scalar)
    assert node_meta.origin(square).source == f"{HERE}:{LINES['loss']}"
    # What has no forward operation behind it, such as the first gradient, carries the line of the backward.
    lonely = [o.source for o in of_region(program, Region.BACKWARD) if not o.module]
    assert set(lonely) == {f"{HERE}:{LINES['loss']}", f"{HERE}:{LINES['backward']}"}
    in_model = {o.source for region in Region for o in of_region(program, region) if o.module}
    # Gradients belong to the module of their parameter; they are accumulated where the backward is called.
    assert {source.partition(":")[0] for source in in_model - {f"{HERE}:{LINES['backward']}"}} == {"steps.py"}


def test_nothing_is_without_a_line(program: Program) -> None:
    assert [node.name for node in calls(program) if not node_meta.origin(node).source] == []


def test_the_second_forward_of_an_accumulation_is_forward() -> None:
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def twice(x: Tensor) -> None:
        model(x).sum().backward()
        model(2 * x).square().sum().backward()
        opt.step()
        opt.zero_grad()

    nodes = [n for n in calls(program_of(twice, torch.randn(3, 4))) if n.target is torch.ops.aten.addmm.default]
    assert [node_meta.origin(n).region for n in nodes] == [Region.FORWARD] * 2


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointed_blocks_are_recomputed(reentrant: bool) -> None:
    model = Blocks(reentrant=reentrant)
    program = program_of(train, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8))
    again = [n for n in calls(program) if node_meta.origin(n).region is Region.RECOMPUTE]
    wanted = {f"blocks.{i}.{part}" for i in range(2) for part in ("norm", "up", "act")}
    assert {node_meta.origin(n).module for n in again} >= wanted
    assert [n for n in calls(program) if n.target is torch.ops.aten.native_layer_norm.default and n in again]
    products = [n for n in calls(program) if n.target is torch.ops.aten.mm.default]
    assert all(node_meta.origin(n).region is Region.BACKWARD and node_meta.origin(n).module for n in products)


def test_nothing_is_recomputed_without_checkpointing(program: Program) -> None:
    assert of_region(program, Region.RECOMPUTE) == []


DEPTH, WIDTH, ROWS = 6, 16, 64


def deep(reentrant: bool | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks(DEPTH, WIDTH, dropout=0.3, reentrant=reentrant)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointing_lowers_the_peak_and_draws_the_same_masks(reentrant: bool) -> None:
    plain, plain_opt = deep(None)
    step = ws.compile(train, backend="eager")
    step(plain, plain_opt, torch.randn(ROWS, WIDTH))
    without = peak_bytes(step.program())

    eager, ours = twins(lambda: deep(reentrant))
    x = torch.randn(ROWS, WIDTH)
    checkpointed = ws.compile(train, backend="eager")
    for call in range(3):
        torch.manual_seed(call)
        want = train(*eager, x)
        after = torch.get_rng_state()
        torch.manual_seed(call)
        came = checkpointed(*ours, x)
        assert torch.equal(want, came)
        assert differing(eager[0], ours[0]) == []
        assert torch.equal(after, torch.get_rng_state())
    # 396,496 bytes without and 150,416 with checkpointing when this was written.
    assert peak_bytes(checkpointed.program()) < 0.5 * without
    assert checkpointed.cache_info().traces == 1


def test_the_masks_of_the_recompute_matter() -> None:
    """Other masks in the recompute than in the forward would give other gradients: dropout is really on."""
    model, opt = deep(False)
    found = captured(train, model, opt, torch.randn(ROWS, WIDTH)).program
    drawn = [n for n in calls(found) if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    regions = Counter(node_meta.origin(n).region for n in drawn)
    assert regions[Region.FORWARD] == 2 * DEPTH
    assert regions[Region.RECOMPUTE] >= DEPTH


def test_what_a_closure_runs_is_no_part_of_the_update() -> None:
    """An optimizer calls it in the middle of its step: its forward and its backward are those of other steps."""

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        def closure() -> Tensor:
            opt.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        return opt.step(closure)

    model = Blocks()
    found = program_of(step, model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(4, 8))
    by_target = {str(n.target): node_meta.origin(n).region for n in calls(found)}
    assert by_target["aten.addmm.default"] is Region.FORWARD
    assert by_target["aten.gelu_backward.default"] is Region.BACKWARD
    assert {region for target, region in by_target.items() if "_foreach" in target} == {Region.OPTIMIZER}
