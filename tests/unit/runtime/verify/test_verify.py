"""verify: sound steps pass, planted faults are found and named, and nothing of the user's is changed."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

import wholestep as ws
from tests.behaviour.small_models import FEATURES
from tests.behaviour.untouched import assert_untouched, everything, warm_up
from tests.behaviour.untouched import net as net_with_everything
from tests.unit.builders import aten, c10d
from tests.unit.capture.steps import Block
from wholestep.api.stages import Stages
from wholestep.capture.bind.captured import Captured
from wholestep.capture.reach.reachability import find_reachable
from wholestep.capture.reach.train_state import collect
from wholestep.cli.workloads.gpt import GPT, GPTConfig, train_step
from wholestep.config import PowerSGD
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import InputKind, MeshAxis, Program
from wholestep.passes.memory.reinplace import reinplace
from wholestep.place.strategies import DataParallel
from wholestep.runtime.options import checked_options
from wholestep.runtime.verify import verify as verifying
from wholestep.runtime.verify.rank_state import Batch
from wholestep.runtime.verify.verification import Difference, Outcome, Verification
from wholestep.runtime.verify.verify import Subject, _VirtualRanks

WIDTH = 6
SMALL_BUCKETS = ws.DDP(bucket_bytes=200)


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(3, (rows,), generator=generator)


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def verified(
    passes: Any = None,
    *,
    step: Callable[..., Any] = train,
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]] = net,
    strategy: ws.DDP = SMALL_BUCKETS,
    **options: Any,
) -> Verification:
    return ws.compile(step, strategy=strategy, passes=passes).verify(*make(), *batch(), **{"ranks": 2, **options})


def with_stages(stages: type[Stages], step: Callable[..., Any]) -> ws.CompiledStep:
    return ws.CompiledStep(step, checked_options(SMALL_BUCKETS, None, "auto", None, 8), stages=stages)


def difference(found: Verification) -> Difference:
    assert found.difference is not None, str(found)
    return found.difference


def outcomes(found: Verification) -> list[Outcome]:
    """Of programs; what is compiled is for `test_kernel_check`."""
    return [check.outcome for check in found.checks[:4]]


PASSED = [Outcome.PASSED] * 4

# ---- sound steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_step_of_the_demo_passes(ranks: int) -> None:
    torch.manual_seed(0)
    config = GPTConfig(num_layers=2, width=32, context=16)
    model = GPT(config)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    x, y = torch.randint(256, (2, 8, config.context))
    found = ws.compile(train_step, strategy=ws.DDP(bucket_bytes=20_000)).verify(model, opt, x, y, ranks=ranks)
    assert outcomes(found) == PASSED, str(found)
    assert (found.ok, found.difference, found.num_ranks, found.num_steps) == (True, None, ranks, 3)
    assert found.raise_if_failed() is found


def test_it_prints_and_turns_into_json() -> None:
    found = verified()
    text = str(found)
    assert "train on 2 virtual ranks, 3 steps" in text
    assert "Each rank got 4 of 8 rows of 2 arguments." in text
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["ok"] is True
    assert [check["outcome"] for check in plain["checks"]] == ["passed"] * 4 + ["not compared"]


def keeps_gradients(
    model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, reduction: str = "mean"
) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y, reduction=reduction)
    loss.backward()
    opt.step()
    return loss


def no_clip(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    loss = keeps_gradients(model, opt, x, y, reduction)
    opt.zero_grad()
    return loss


def with_dampening() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


def test_a_second_call_that_is_another_graph_is_another_graph() -> None:
    # The first call creates the momentum and the gradients, the second adds to both.
    captured: list[Captured] = []

    class Counting(Stages):
        def capture(self, *args: Any) -> Captured:
            captured.append(super().capture(*args))
            return captured[-1]

    found = with_stages(Counting, keeps_gradients).verify(*with_dampening(), *batch(), ranks=4)
    assert outcomes(found) == PASSED, str(found)
    assert len(captured) == 2


def test_an_optimizer_that_changes_its_rule_with_the_steps_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    # RAdam looks at its step counter: with these betas it rectifies from the sixth step on.
    monkeypatch.setattr(verifying, "FACTOR", 1.0)
    model, _ = net()
    opt = torch.optim.RAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.9))
    found = verified(make=lambda: (model, opt), steps=7)
    assert outcomes(found) == PASSED, str(found)


def test_passes_may_be_told_that_the_batch_is_no_reference() -> None:
    def summed(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return no_clip(model, opt, x, y, reduction="sum")

    found = verified(step=summed)
    assert outcomes(found) == [*PASSED[:3], Outcome.FAILED]
    assert difference(found).op == "gradient"
    assert difference(found).wanted == pytest.approx(2 * difference(found).got, rel=1e-4)
    assert "whole_batch=False" in found.checks[3].text
    assert verified(step=summed, whole_batch=False).ok


def test_arguments_without_the_rows_of_the_batch_are_given_whole() -> None:
    def weighted(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return train(model, opt, x * weight, y)

    step = ws.compile(weighted, strategy=SMALL_BUCKETS)
    found = step.verify(*net(), *batch(), weight=torch.ones(WIDTH) * 2, ranks=4)
    assert outcomes(found) == PASSED, str(found)
    assert found.notes[0] == "Each rank got 2 of 8 rows of 2 arguments. 1 other tensors were given whole."


class Noisy(nn.Module):
    """Dropout, whose masks differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(WIDTH, dropout=0.3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def made(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "strategy", "why"),
    [
        (lambda: made(Noisy()), SMALL_BUCKETS, "random numbers"),
        (lambda: made(nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))), SMALL_BUCKETS, "batch norm (1, "),
        (net, replace(SMALL_BUCKETS, reduce="sum"), "summed, not averaged"),
        (net, replace(SMALL_BUCKETS, ignore=("0.bias",)), "gradients of 0.bias stay local"),
    ],
    ids=["dropout", "batch norm", "sum", "ignore"],
)
def test_where_the_whole_batch_is_no_reference_it_says_so(make: Any, strategy: ws.DDP, why: str) -> None:
    step = no_clip if strategy.ignore else train  # a norm over local gradients would let the ranks drift apart
    found = verified(make=make, strategy=strategy, step=step)
    assert outcomes(found) == [*PASSED[:3], Outcome.SKIPPED], str(found)
    assert why in found.checks[3].text
    assert found.ok


def test_batch_norm_that_takes_no_statistics_couples_no_rows() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    assert outcomes(verified(make=lambda: made(model))) == PASSED


class Shifted(nn.Module):
    """Logits with a shift that has no influence on the loss: its gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(WIDTH, 3), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


def test_updates_made_of_rounding_are_not_compared() -> None:
    torch.manual_seed(5)
    module = Shifted()
    # With so small an eps a gradient of 1e-9 moves the shift as far as any other one.
    assert outcomes(verified(make=lambda: (module, torch.optim.Adam(module.parameters(), eps=1e-20)))) == PASSED


def test_compressed_gradients_have_memory_on_every_rank() -> None:
    found = verified(strategy=ws.DDP(compress=PowerSGD(start_iter=2, min_compression_rate=0.5)), steps=4)
    assert outcomes(found) == [Outcome.PASSED, Outcome.SKIPPED, Outcome.PASSED, Outcome.PASSED], str(found)
    assert "compression" in found.checks[1].text


# ---- planted faults ----------------------------------------------------------------------------------------------


def reductions(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if op_info.is_collective(node) and node_meta.bucket(node) is not None]


def wait_of(start: fx.Node) -> fx.Node:
    (wait,) = op_info.waits(start)
    return wait


def without_a_reduction(program: Program) -> Program:
    start = reductions(program)[1]
    graph_edit.replace_node(wait_of(start), start.args[0])  # type: ignore[arg-type]
    program.graph.erase_node(start)
    return program


def with_a_wrong_divisor(program: Program) -> Program:
    size = program.mesh[0].size
    scaled = next(n for n in program.graph.nodes if n.target is aten.mul.Tensor and n.args[1] == 1 / size)
    scaled.update_arg(1, 1 / (size + 1))
    return program


def reduced_twice(program: Program) -> Program:
    first = reductions(program)[0]
    wait = wait_of(first)
    with program.graph.inserting_after(wait):
        again = program.graph.call_function(first.target, (wait, *first.args[1:]))
    node_meta.copy_meta(first, again)
    with program.graph.inserting_after(again):
        done = program.graph.call_function(op_info.WAIT, (again,))
    node_meta.copy_meta(wait, done)
    wait.replace_all_uses_with(done, delete_user_cb=lambda user: user is not again)
    return program


def with_a_stale_rate(program: Program) -> Program:
    pairs = zip(program.inputs, program.placeholders, strict=True)
    (rate,) = (node for record, node in pairs if record.kind is InputKind.HYPER and record.name.endswith(".lr"))
    for user in list(rate.users):
        user.args = fx.map_arg(user.args, lambda arg: 1e-2 if arg is rate else arg)
        user.kwargs = fx.map_arg(user.kwargs, lambda arg: 1e-2 if arg is rate else arg)
    return program


def with_a_late_wait(program: Program) -> Program:
    """On the scheduled program, whose rules cannot see it: the reader reads the memory that the collective is in."""
    program = reinplace(program)
    start = next(n for n in program.graph.nodes if n.target is c10d.all_reduce_.default)
    wait = wait_of(start)
    wait.replace_all_uses_with(start.args[0])  # type: ignore[arg-type]
    program.graph.output_node().prepend(wait)
    return program


def check_named(found: Verification, name: str) -> Any:
    (check,) = (check for check in found.checks if check.name == name)
    return check


@pytest.mark.parametrize(
    ("fault", "step"),
    [(without_a_reduction, 1), (with_a_wrong_divisor, 1), (reduced_twice, 1), (with_a_stale_rate, 2)],
    ids=lambda one: getattr(one, "__name__", ""),
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_fault_of_a_pass_is_found(fault: Callable[[Program], Program], step: int, ranks: int) -> None:
    found = verified(fault, ranks=ranks)
    check = check_named(found, "optimised = unoptimised")
    assert not found.ok
    assert check.outcome is Outcome.FAILED
    assert found.difference is check.difference
    assert check.difference.step == found.num_steps == step
    assert "test_verify.py:" in check.difference.source
    with pytest.raises(ws.VerificationError, match=f"first difference: step {step}, rank 0"):
        found.raise_if_failed()


def test_the_first_difference_is_the_first_value_that_differs() -> None:
    found = difference(verified(with_a_stale_rate))
    assert found.region == "optimizer"
    # the rate of the first step instead of 0.7 of it, in what is computed from the rate alone
    assert found.index == ()
    assert found.got == pytest.approx(found.wanted / 0.7)


def test_what_passes_made_before_the_first_difference_is_told() -> None:
    found = difference(verified(reduced_twice))
    twice = [one for one in found.made_by if "all_reduce" in one and "4.bias" in one]
    assert len(twice) == 2
    assert found.got == pytest.approx(2 * found.wanted, rel=1e-4)  # two ranks: the mean, added up


def test_a_fault_in_a_call_in_place_has_the_name_of_what_it_replaced() -> None:
    def other_average(program: Program) -> Program:
        program = reinplace(program)
        lerp = next(node for node in program.graph.nodes if node.target is aten.lerp_.Scalar)
        lerp.update_arg(2, 0.5)
        return program

    found = difference(verified(other_average))
    assert (found.name, found.op, found.region) == ("lerp", "aten.lerp_.Scalar", "optimizer")


def test_a_missing_reduction_leaves_the_ranks_unequal() -> None:
    check = check_named(verified(without_a_reduction), "ranks end equal")
    assert check.outcome is Outcome.FAILED
    assert "rank 1 holds other values of " in check.text


def test_a_wait_behind_its_reader_is_found() -> None:
    found = verified(with_a_late_wait)
    check = check_named(found, "order of collectives")
    assert check.outcome is Outcome.FAILED
    assert re.search(r"reads the result of all_reduce\w+ before the wait for it", check.text)
    assert "test_verify.py:" in check.text
    assert outcomes(found)[1:] == [Outcome.SKIPPED] * 3
    with pytest.raises(ws.VerificationError, match="before the wait"):
        found.raise_if_failed()


def test_a_fault_of_placement_is_found_by_the_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = DataParallel.reduce_gradient

    def unscaled(self: DataParallel, placer: Any, grad: fx.Node, name: str) -> fx.Node:
        config = replace(self.config, reduce="sum") if name == "2.weight" else self.config
        return sound(replace(self, config=config), placer, grad, name)

    monkeypatch.setattr(DataParallel, "reduce_gradient", unscaled)
    found = verified()
    assert outcomes(found) == [*PASSED[:3], Outcome.FAILED], str(found)
    assert (difference(found).name, difference(found).op) == ("2.weight", "gradient")


def test_a_number_that_capture_froze_is_found_by_the_eager_step() -> None:
    class Freezing(Stages):
        def capture(self, *args: Any) -> Captured:
            captured = super().capture(*args)
            with_a_stale_rate(captured.program)
            return captured

    found = with_stages(Freezing, train).verify(*net(), *batch(), ranks=2)
    assert outcomes(found) == [*PASSED[:3], Outcome.FAILED], str(found)
    assert (difference(found).op, difference(found).step) == ("update", 2)


def one_rounding_off(program: Program) -> Program:
    """Every norm is larger by one part in 2**23, as it may be when its terms are added in another order."""
    norms = [node for node in program.graph.nodes if node.target is aten._foreach_norm.Scalar]
    for item in [item for norm in norms for item in norm.users]:
        with program.graph.inserting_after(item):
            off = program.graph.call_function(aten.mul.Tensor, (item, 1 + 2.0**-23))
        node_meta.copy_meta(item, off)
        item.replace_all_uses_with(off, delete_user_cb=lambda user, off=off: user is not off)
    return program


def test_another_order_of_additions_is_no_fault_but_is_told() -> None:
    check = check_named(verified(one_rounding_off), "optimised = unoptimised")
    assert check.outcome is Outcome.PASSED
    assert "outputs differ as another order of additions explains" in check.text


def test_rounding_does_not_grow_over_the_steps() -> None:
    run, params = virtually(Case(train, net, SMALL_BUCKETS), passes=one_rounding_off, num_steps=1)
    for rank, param in itertools.product(range(2), params):
        assert torch.equal(run._optimised.of_rank(rank, param), run._unoptimised.of_rank(rank, param))


# ---- the same as real ranks --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A training that virtual and real ranks go through."""

    step: Callable[..., Any]
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    strategy: ws.DDP


def virtually(case: Case, *, passes: Any = None, num_steps: int = 3) -> tuple[_VirtualRanks, list[Tensor]]:
    """Two virtual ranks after the training, before the comparison with the eager step; the user's parameters."""
    stages = ws.compile(case.step, strategy=case.strategy, passes=passes)._stages
    model, opt = case.make()
    subject = Subject(
        kernels=None,
        name="step", step=case.step, capture=stages.capture, passes=stages.passes, strategy=case.strategy,
        axes=(MeshAxis(name="data", size=2, group="virtual"),),
        comm_state=stages.compression.state_dict() if stages.compression is not None else {},
    )  # fmt: skip
    args = (model, opt, *batch())
    torch.manual_seed(11)
    run = _VirtualRanks(subject, Batch(args, {}, collect(find_reachable(case.step, args, {})), 2))
    run.run(num_steps)
    return run, list(model.parameters())


def noisy() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    return made(Noisy())


CASES = {
    "gradients and momentum from the first call": Case(keeps_gradients, with_dampening, SMALL_BUCKETS),
    "local gradients": Case(keeps_gradients, with_dampening, ws.DDP(ignore=("0.weight", "4.bias"))),
    "errors of compression": Case(train, net, ws.DDP(compress=PowerSGD(start_iter=2, min_compression_rate=0.5))),
    "dropout": Case(no_clip, noisy, SMALL_BUCKETS),
}


def really(name: str) -> list[Tensor]:
    """The training on a real rank: its parameters."""
    case = CASES[name]
    model, opt = case.make()
    compiled, rank = ws.compile(case.step, strategy=case.strategy), torch.distributed.get_rank()
    torch.manual_seed(11 + rank)
    for number in range(3):
        x, y = (one.roll(number, 0).chunk(2)[rank].clone() for one in batch())
        compiled(model, opt, x, y)
    return [param.detach() for param in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks_hold_the_bits_of_real_ones(pool2: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(verifying, "FACTOR", 1.0)
    run, params = virtually(CASES[name])
    real = pool2.run(really, name)
    for rank, theirs in enumerate(real):
        for here, there in zip(params, theirs, strict=True):
            assert torch.equal(run._optimised.of_rank(rank, here), there)
    apart = any(not torch.equal(a, b) for a, b in zip(*real, strict=True))
    assert apart is bool(CASES[name].strategy.ignore)


# ---- promises ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "with state and gradients"])
@pytest.mark.parametrize("passes", [None, with_a_late_wait], ids=["sound", "faulty"])
def test_nothing_of_the_users_is_changed(warm: bool, passes: Any) -> None:
    torch.manual_seed(4)
    model = net_with_everything()  # batch norm, dropout
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    if warm:
        warm_up(model, opt)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    model.register_buffer("calls", torch.zeros(()))
    x, y = batch()
    x = x[:, :FEATURES]

    def counting(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        model.calls.add_(1)
        x.mul_(0.5)
        return keeps_gradients(model, opt, x, y)

    held = {"model": model, "opt": opt, "x": x, "y": y, "scheduler": scheduler.state_dict()}
    before, versions = everything(**held), [p._version for p in model.parameters()]
    grads, places = [p.grad for p in model.parameters()], [p.data_ptr() for p in model.parameters()]
    attributes = {key: id(one) for key, one in vars(opt).items()}
    step = ws.compile(counting, strategy=SMALL_BUCKETS, passes=passes)
    assert step.verify(model, opt, x, y, ranks=4).ok is (passes is None)
    assert_untouched(before, everything(**held))
    assert [p._version for p in model.parameters()] == versions
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(now is then for now, then in zip((p.grad for p in model.parameters()), grads, strict=True))
    assert step.cache_info().traces == 0
    assert {key: id(one) for key, one in vars(opt).items()} == attributes


@pytest.mark.parametrize("whole_batch", [True, False])
def test_what_a_step_freezes_thaws_or_takes_into_a_graph_is_as_it_was(whole_batch: bool) -> None:
    model, opt = net()
    model.register_buffer("mean_loss", torch.zeros(()))
    first, last = model[0].weight, model[-1].bias
    last.requires_grad_(False)

    def freezing(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        first.requires_grad_(False)
        last.requires_grad_(True)
        model.mean_loss.mul_(0.9).add_(nn.functional.cross_entropy(model(x), y), alpha=0.1)
        return train(model, opt, x, y)

    assert ws.compile(freezing).verify(model, opt, *batch(), ranks=2, whole_batch=whole_batch).ok
    assert (first.requires_grad, last.requires_grad, model.mean_loss.requires_grad) == (True, False, False)
    assert model.mean_loss.is_leaf
    assert model.mean_loss == 0


def test_a_step_that_fails_leaves_everything_too() -> None:
    model, opt = net()
    x, y = batch()
    before = everything(model=model, opt=opt)
    with pytest.raises(IndexError):
        ws.compile(train, strategy=SMALL_BUCKETS).verify(model, opt, x, y + 7, ranks=2)
    assert_untouched(before, everything(model=model, opt=opt))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": 3}, "8 rows do not divide into 3 equal parts"),
        ({"ranks": 1}, "at least 2 virtual ranks and 1 step"),
        ({"steps": 0}, "at least 2 virtual ranks and 1 step"),
    ],
    ids=str,
)
def test_numbers_that_fit_nothing_are_refused(options: dict[str, int], told: str) -> None:
    with pytest.raises(ws.ConfigError, match=told):
        verified(**options)


def with_communication() -> list[str]:
    model, opt = net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, opt, x, y)
        total = loss + torch.distributed.get_rank()
        torch.distributed.all_reduce(total)
        return total

    compiled = ws.compile(step, strategy=SMALL_BUCKETS)
    found = compiled.verify(*batch(), ranks=2)
    with pytest.raises(ws.ConfigError, match="over the group 'world' of 2 ranks, which does not divide 4"):
        compiled.verify(*batch(), ranks=4)
    return [check.outcome.value for check in found.checks[:4]]


@pytest.mark.ranks
def test_collectives_of_the_step_run_on_as_many_virtual_ranks_as_processes(pool2: Any) -> None:
    assert pool2.run(with_communication) == [["passed", "passed", "passed", "not compared"]] * 2
