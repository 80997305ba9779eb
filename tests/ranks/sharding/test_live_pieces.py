"""Pieces of live steps whose parameters are shards: one graph between two reads, and the numbers of eager code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws

pytestmark = pytest.mark.ranks

CALLS = 7
TOLERANCE = 2**5 * torch.finfo(torch.float32).eps


class Net(nn.Module):
    """Layers of odd widths, running statistics, and one parameter without dims, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x)))) * self.scale
        return out


@dataclass
class Training:
    """One training, with what its Python has noted."""

    net: Net
    model: nn.Module
    opt: torch.optim.Optimizer
    notes: list[float] = field(default_factory=list)

    @classmethod
    def new(cls, kind: type[Net] = Net) -> Training:
        torch.manual_seed(0)
        net = kind()
        return cls(net, net, torch.optim.AdamW(net.parameters(), lr=1e-2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(x), y)


Step = Callable[[Training, Tensor, Tensor], None]


def notes_its_loss(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(t.net.parameters(), 0.5)
    t.opt.step()
    t.opt.zero_grad()
    t.notes += [loss.item(), norm.item()]


def notes_and_updates(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    loss.backward()
    t.opt.step()
    t.opt.zero_grad()
    t.notes.append(loss.item())


def keeps_gradients(t: Training, x: Tensor, y: Tensor) -> None:
    """They stay after the step, as shards."""
    t.opt.zero_grad()
    loss = t.loss(x, y)
    loss.backward()
    t.opt.step()
    t.notes.append(loss.item())


def looks_before_its_update(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    loss.backward()
    if math.isfinite(loss.item()) and len(t.notes) != 4:
        t.opt.step()
    t.opt.zero_grad()
    t.notes.append(loss.item())


def looks_before_its_backward(t: Training, x: Tensor, y: Tensor) -> None:
    """The backward runs ahead, and is dropped in one call."""
    loss = t.loss(x, y)
    t.notes.append(loss.item())
    if len(t.notes) == 5:
        return
    loss.backward()
    t.opt.step()
    t.opt.zero_grad()


def adds_up_gradients(t: Training, x: Tensor, y: Tensor) -> None:
    for half_x, half_y in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = t.loss(half_x, half_y) / 2
        loss.backward()
        t.notes.append(loss.item())
    t.opt.step()
    t.opt.zero_grad()


def scores_in_between(t: Training, x: Tensor, y: Tensor) -> None:
    out = t.model(x)
    t.notes.append(float(out.detach().argmax(1).numpy().mean()))
    loss = nn.functional.mse_loss(out, y)
    loss.backward()
    t.opt.step()
    t.opt.zero_grad()
    t.notes.append(float(loss))


def penalises_slopes(t: Training, x: Tensor, y: Tensor) -> None:
    """A tensor of the step asks for a gradient, which is of this rank's batch, and is held when the loss is noted."""
    near = (x * 1.0).requires_grad_()
    out = t.model(near)
    (slope,) = torch.autograd.grad(out.sum(), near, create_graph=True)
    loss = nn.functional.mse_loss(out, y) + slope.square().sum(1).mean()
    loss.backward()
    t.opt.step()
    t.opt.zero_grad()
    t.notes.append(loss.item())


STEPS: dict[str, Step] = {
    one.__name__: one
    for one in (
        notes_its_loss, keeps_gradients, looks_before_its_update, looks_before_its_backward, adds_up_gradients,
        scores_in_between, penalises_slopes,
    )
}  # fmt: skip


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def batch(call: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 * call + dist.get_rank())
    return torch.randn(6, 6), torch.randn(6, 3)


@dataclass(frozen=True)
class Outcome:
    """What differs from eager code, and what ran in the last call."""

    faults: list[str]
    launches: int
    executed: int
    reasons: tuple[str, ...]
    grads_are_shards: bool


def outcome(step: Any, write: Step, ours: Training, theirs: Training, calls: int = CALLS) -> Outcome:
    faults, counts = [], [(0, 0)]
    for call in range(calls):
        x, y = batch(call)
        step(ours, x, y)
        write(theirs, x, y)
        live = step.explain().live
        counts.append((live.launches, live.executed))
        if not torch.allclose(torch.tensor(ours.notes), torch.tensor(theirs.notes), rtol=TOLERANCE, atol=TOLERANCE):
            faults.append(f"call {call}: {ours.notes} for {theirs.notes}")
    wanted, came = [*theirs.net.named_parameters()], [*ours.net.parameters()]
    if dist.get_rank() == 0:  # a step starts from the buffers of rank 0, a forward of DistributedDataParallel, too
        wanted, came = [*wanted, *theirs.net.named_buffers()], [*came, *ours.net.buffers()]
    for (name, want), one in zip(wanted, came, strict=True):
        pairs = [(whole(want), whole(one))]
        if want.grad is not None or one.grad is not None:
            pairs.append((whole(want.grad), whole(one.grad)) if None not in (want.grad, one.grad) else (want, want + 1))
        if not all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in pairs):
            faults.append(name)
    shards = [isinstance(p.grad, DTensor) for p in ours.net.parameters() if p.grad is not None and p.dim()]
    return Outcome(
        faults, counts[-1][0] - counts[-2][0], counts[-1][1] - counts[-2][1], live.eager_reasons, all(shards)
    )


def beside_ddp(name: str, strategy: ws.FSDP, backend: str = "eager", mesh: Any = None) -> Outcome:
    ours, theirs = Training.new(), Training.new()
    theirs.model = DistributedDataParallel(theirs.net)
    step = ws.compile(STEPS[name], strategy=strategy, backend=backend, mesh=mesh)
    return outcome(step, STEPS[name], ours, theirs)


PIECES = {"adds_up_gradients": 3, "looks_before_its_update": 2, "scores_in_between": 2, "looks_before_its_backward": 2}
"""Of those that ask for a value in the middle."""


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("reshard", [True, False])
def test_what_lies_between_two_reads_is_one_graph(pool2: Any, name: str, reshard: bool) -> None:
    """Once its way is known, no call of torch is executed by itself, and numbers are those of eager code."""
    for found in pool2.run(beside_ddp, name, ws.FSDP(reshard_after_forward=reshard), "eager"):
        assert found.faults == []
        assert (found.launches, found.executed) == (PIECES.get(name, 1), 0), found.reasons
        assert found.grads_are_shards


@pytest.mark.parametrize("name", ["notes_its_loss", "looks_before_its_backward"])
def test_pieces_on_shards_are_compiled(pool2: Any, name: str) -> None:
    """By Inductor."""
    for found in pool2.run(beside_ddp, name, ws.FSDP(), "inductor"):
        assert found.faults == []
        assert (found.launches, found.executed) == (PIECES.get(name, 1), 0), found.reasons


def on_two_axes(name: str) -> Outcome:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return beside_ddp(name, ws.FSDP(), mesh=mesh)


@pytest.mark.parametrize("name", ["notes_its_loss", "looks_before_its_backward"])
def test_pieces_on_a_mesh_of_two_axes(pool4: Any, name: str) -> None:
    for found in pool4.run(on_two_axes, name):
        assert found.faults == []
        assert (found.launches, found.executed) == (PIECES.get(name, 1), 0), found.reasons


class Counts(Net):
    """Its Python runs at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def with_a_forward_that_counts() -> tuple[Outcome, int]:
    ours, theirs = Training.new(Counts), Training.new(Counts)
    theirs.model = DistributedDataParallel(theirs.net)
    step = ws.compile(notes_its_loss, strategy=ws.FSDP(), backend="eager")
    return outcome(step, notes_its_loss, ours, theirs), ours.net.calls  # type: ignore[attr-defined]


def test_a_sharded_module_whose_python_runs_is_executed_whole(pool2: Any) -> None:
    """What its hooks gather is gone after it, so a later piece could not read it."""
    for found, calls in pool2.run(with_a_forward_that_counts):
        assert (found.faults, calls) == ([], CALLS)
        assert "gathers its parameters for its own time" in " ".join(found.reasons)


def update(opt: torch.optim.Optimizer) -> None:
    opt.step()
    opt.zero_grad()


def updates_beside_eager_code() -> list[bool]:
    trainings = []
    for write in (ws.compile(update, backend="eager", fullgraph=True), update):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        for module in (model[0], model[2], model):
            fully_shard(module)
        trainings.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2), write))
    for call in range(3):
        x, y = batch(call)
        for model, opt, write in trainings:
            nn.functional.mse_loss(model(x), y).backward()
            write(opt)
    pairs = zip(*(model.parameters() for model, _, _ in trainings), strict=True)
    return [torch.equal(whole(one), whole(other)) for one, other in pairs]


def test_a_step_may_have_shards_of_an_optimizer_alone(pool2: Any) -> None:
    """Parts of several sizes among them: nine rows on two ranks."""
    assert pool2.run(updates_beside_eager_code) == [[True] * 4, [True] * 4]


def sharded_by_hand() -> tuple[Training, Training]:
    """Two trainings of a model that its user has sharded: Python sees shards, as in eager code."""
    ours, theirs = Training.new(), Training.new()
    for one in (ours, theirs):
        state = one.net.state_dict()
        one.net = one.model = Net()
        one.net.load_state_dict(state)
        one.net.scale.requires_grad_(False)
        for module in (one.net.first, one.net.last, one.net):
            fully_shard(module, ignored_params={one.net.scale})
        one.opt = torch.optim.AdamW([p for p in one.net.parameters() if p.requires_grad], lr=1e-2)
    return ours, theirs


def beside_its_own_eager_code(name: str) -> Outcome:
    return outcome(ws.compile(STEPS[name], backend="eager"), STEPS[name], *sharded_by_hand())


def evaluates_between_calls() -> Outcome:
    ours, theirs = sharded_by_hand()
    compiled = ws.compile(notes_and_updates, backend="eager")

    def evaluated(step: Any) -> Any:
        @torch.no_grad()
        def call(t: Training, x: Tensor, y: Tensor) -> None:
            with torch.enable_grad():
                step(t, x, y)
            t.notes.append(float(t.net.eval()(x).sum()))
            t.net.train()

        call.explain = compiled.explain  # type: ignore[attr-defined]
        return call

    return outcome(evaluated(compiled), evaluated(notes_and_updates), ours, theirs)


def test_parameters_that_an_evaluation_has_gathered_are_not_stale(pool2: Any) -> None:
    """Torch leaves those of the outermost module gathered after a forward without a backward."""
    for found in pool2.run(evaluates_between_calls):
        assert found.faults == []
        assert found.launches == 1


@pytest.mark.parametrize("name", [one for one in STEPS if one not in ("notes_its_loss", "penalises_slopes")])
def test_modules_that_their_user_has_sharded_run_in_pieces(pool2: Any, name: str) -> None:
    """Without a penalty on slopes: eager FSDP2 has dropped what the second backward goes through."""
    for found in pool2.run(beside_its_own_eager_code, name):
        assert found.faults == []
        assert (found.launches, found.executed) == (PIECES.get(name, 1), 0), found.reasons
        assert found.grads_are_shards
