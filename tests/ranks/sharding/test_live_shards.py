"""Python of a live step that looks at parameters and gradients which are cut over the ranks: it sees whole tensors."""

from __future__ import annotations

import copy
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

CALLS = 4
TOLERANCE = 2**6 * torch.finfo(torch.float32).eps


class Net(nn.Module):
    """Layers of an odd width, and one parameter without dims, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.hidden(x)) * self.scale
        return out

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))


class Gated(Net):
    """Has parameters of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.gate = nn.ParameterList(torch.ones(9) for _ in range(3)), 0

    def hidden(self, x: Tensor) -> Tensor:
        gated: Tensor = super().hidden(x) * self.gates[self.gate]
        return gated


@dataclass
class Training:
    """One training, with what its Python has noted."""

    net: Net
    notes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model: nn.Module = self.net
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.average = [p.detach().clone() for p in self.net.parameters()]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.model(x), y)
        self.notes.append(loss.item())
        return loss

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


Step = Callable[[Training, Tensor, Tensor], None]


def reads_parameters_and_gradients(t: Training, x: Tensor, y: Tensor) -> None:
    t.loss(x, y).backward()
    params = list(t.net.parameters())
    t.notes.append(max(float(p.grad.abs().max()) for p in params if p.grad is not None))
    t.notes.append(float(torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()))
    t.notes += [float(t.net.first.weight.sum()), t.net.last.weight[2, 1].item(), *t.net.last.bias.tolist()]
    t.update()


def reads_on_one_rank(t: Training, x: Tensor, y: Tensor) -> None:
    if dist.get_rank() == 0:
        t.notes.append(float(t.net.last.weight.norm()))
    t.loss(x, y).backward()
    if dist.get_rank() == 1:
        t.notes += [float(t.net.first.weight.grad.norm()), float(t.net.last.bias.grad.sum())]  # type: ignore[union-attr]
    norm = nn.utils.clip_grad_norm_(t.net.parameters(), 0.1)
    if dist.get_rank() == 0:
        t.notes.append(norm.item())
    t.update()
    if dist.get_rank() == 1:
        t.notes += [float(p.abs().mean()) for p in t.net.parameters()]


def penalty_on_weights(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y) + 0.1 * sum(p.square().sum() for p in t.net.parameters())
    loss.backward()
    t.update()


def penalty_on_one_rank(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if dist.get_rank() == 0:
        loss = loss + t.net.first.weight.abs().sum()
    loss.backward()
    t.update()


def changes_gradients(t: Training, x: Tensor, y: Tensor) -> None:
    t.loss(x, y).backward()
    for p in t.net.parameters():
        assert p.grad is not None
        p.grad.mul_(0.5)
        p.grad.add_(p.detach(), alpha=0.1)
    t.net.last.weight.grad = torch.ones(3, 9)
    t.net.first.weight.grad[0] = 0.0  # type: ignore[index]
    t.update()


def changes_parameters(t: Training, x: Tensor, y: Tensor) -> None:
    t.loss(x, y).backward()
    with torch.no_grad():
        row = t.net.first.weight[1]
        row.mul_(0.9)
        t.net.first.weight.T[2] = 0.5
        t.notes += row.tolist()
        t.net.last.weight.data[2] = 0.25
        t.net.last.weight.clamp_(-0.3, 0.3)
        t.net.first.bias.copy_(torch.full((9,), 0.125))
    t.net.first.weight.data = t.net.first.weight.data * 0.75
    view = t.net.last.bias.data
    view.mul_(0.5)
    t.update()
    t.notes += [float(view.sum()), float(t.net.last.bias.sum())]


class Doubled(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.t() @ x


def functions_of_its_own(t: Training, x: Tensor, y: Tensor) -> None:
    (t.loss(x, y) + Doubled.apply(x, t.net.first.weight).square().mean()).backward()  # type: ignore[no-untyped-call]
    t.update()
    t.notes.append(float(t.net.first.weight.detach().flatten()[0]))


def asks_for_gradients(t: Training, x: Tensor, y: Tensor) -> None:
    """Of two losses, as methods that project conflicting gradients do; one parameter is in the second alone."""
    loss, params = t.loss(x, y), [t.net.first.weight, t.net.last.weight]
    outside = (t.net.last.weight * 0.1).sum()
    first = torch.autograd.grad(loss, params, retain_graph=True)
    second = torch.autograd.grad(loss.square() + outside, params, retain_graph=True)
    if dist.get_world_size() == 2 and isinstance(t.model, DistributedDataParallel):  # it averages none of them
        for grad in (*first, *second):
            dist.all_reduce(grad.div_(2))
    loss.backward()
    with torch.no_grad():
        for p, one, other in zip(params, first, second, strict=True):
            assert p.grad is not None
            p.grad.add_(one - 0.5 * other)
    t.notes += [float(one.sum()) for one in (*first, *second)]
    t.update()


def ranks_use_different_parameters(t: Training, x: Tensor, y: Tensor) -> None:
    """Of one module: a gate by the rank, and one by the call. AdamW leaves alone what no rank has used."""
    assert isinstance(t.net, Gated)
    t.net.gate = 1 + dist.get_rank() if len(t.notes) % 4 else 0
    t.loss(x, y).backward()
    t.notes.append(float(sum(p.grad is not None for p in t.net.parameters())))
    t.update()


def scales_the_loss(t: Training, x: Tensor, y: Tensor) -> None:
    t.scaler.scale(t.loss(x, y)).backward()
    t.scaler.unscale_(t.opt)
    t.notes.append(float(nn.utils.clip_grad_norm_(t.net.parameters(), 0.1)))
    t.scaler.step(t.opt)
    t.scaler.update()
    t.opt.zero_grad()


def averages(t: Training, x: Tensor, y: Tensor) -> None:
    t.loss(x, y).backward()
    t.update()
    with torch.no_grad():
        for average, p in zip(t.average, t.net.parameters(), strict=True):
            average.lerp_(p, 0.1)
        t.notes += [float(one.sum()) for one in t.average]


def updates_by_hand(t: Training, x: Tensor, y: Tensor) -> None:
    """At first what the last rank has alone, beside a view of another weight; and drops the gradients then."""
    t.loss(x, y).backward()
    with torch.no_grad():
        row = t.net.first.weight[1]
        assert t.net.last.bias.grad is not None
        t.net.last.bias.sub_(torch.tensor([0.0, 0.0, 0.1]) * t.net.last.bias.grad)
        for p in (t.net.first.weight, t.net.last.weight):
            assert p.grad is not None
            p.sub_(0.1 * p.grad)
        t.notes.append(float(row.sum()))
    t.opt.zero_grad()


def penalty_beside_views_of_data(t: Training, x: Tensor, y: Tensor) -> None:
    """The memory is known by another object then, which needs no gradient; and the other way round."""
    t.net.first.weight.data[0].mul_(0.9)
    with torch.no_grad():
        row = t.net.last.weight[1]
        row.mul_(0.9)
    loss = t.loss(x, y) + 0.1 * sum(p.square().sum() for p in t.net.parameters())
    t.net.last.weight.data[0].mul_(0.9)
    loss.backward()
    t.update()


def puts_state_into_optimizers(t: Training, x: Tensor, y: Tensor) -> None:
    t.loss(x, y).backward()
    if t.opt.state:
        t.opt.load_state_dict(copy.deepcopy(t.opt.state_dict()))
        t.opt.state[t.net.first.weight]["exp_avg"] = torch.full_like(t.net.first.weight, 0.25)
    t.update()


def evaluates_before_it_trains(t: Training, x: Tensor, y: Tensor) -> None:
    with torch.inference_mode():
        t.notes.append(float(t.net(x).square().mean()))
    t.loss(x, y).backward()
    t.update()


STEPS: dict[str, Step] = {
    one.__name__: one
    for one in (
        reads_parameters_and_gradients, reads_on_one_rank, penalty_on_weights, penalty_on_one_rank, changes_gradients,
        changes_parameters, functions_of_its_own, asks_for_gradients, averages,
        ranks_use_different_parameters, scales_the_loss, updates_by_hand, puts_state_into_optimizers,
        evaluates_before_it_trains, penalty_beside_views_of_data,
    )
}  # fmt: skip


def training(*, gated: bool = False) -> Training:
    torch.manual_seed(0)
    return Training(Gated() if gated else Net())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def beside_ddp(name: str, mesh: Any = None) -> list[str]:
    gated = name == "ranks_use_different_parameters"
    return compared(STEPS[name], training(gated=gated), training(gated=gated), mesh=mesh, unused=gated)


def compared(
    write: Step, ours: Training, theirs: Training, strategy: ws.FSDP | None = None, *, mesh: Any = None,
    unused: bool = False,
) -> list[str]:  # fmt: skip
    """Calls beside eager DistributedDataParallel: what differs."""
    theirs.model = DistributedDataParallel(theirs.net, find_unused_parameters=unused)
    step = ws.compile(write, strategy=strategy or ws.FSDP(), mesh=mesh, backend="eager")
    faults = []
    for call in range(CALLS):
        torch.manual_seed(10 * call + dist.get_rank())
        x, y = torch.randn(6, 6), torch.randn(6, 3)
        step(ours, x, y)
        write(theirs, x, y)
        if not torch.allclose(torch.tensor(ours.notes), torch.tensor(theirs.notes), rtol=TOLERANCE, atol=TOLERANCE):
            faults.append(f"call {call}: {ours.notes} for {theirs.notes}")
    for (fqn, want), came in zip(theirs.net.named_parameters(), ours.net.parameters(), strict=True):
        assert isinstance(came, DTensor) == (came.dim() > 0)
        if not torch.allclose(want, whole(came), rtol=TOLERANCE, atol=TOLERANCE):
            faults.append(fqn)
    assert step.explain().live is not None
    return faults


@pytest.mark.parametrize("name", STEPS)
def test_python_sees_whole_tensors(pool2: Any, name: str) -> None:
    assert pool2.run(beside_ddp, name) == [[], []]


def on_two_axes(name: str) -> list[str]:
    return beside_ddp(name, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


@pytest.mark.parametrize("name", ["reads_on_one_rank", "penalty_on_one_rank", "changes_gradients"])
def test_python_sees_whole_tensors_on_a_mesh_of_two_axes(pool4: Any, name: str) -> None:
    assert pool4.run(on_two_axes, name) == [[]] * 4


def gradient_of_one_rank() -> str:
    mine = training()

    def step(x: Tensor, y: Tensor) -> None:
        if mine.loss(x, y).item() > 0 and dist.get_rank() == 0:
            mine.notes.append(float(mine.net.first.weight.grad.norm()))  # type: ignore[union-attr]

    mine.net.first.weight.grad = torch.ones(9, 6) if dist.get_rank() == 0 else None
    try:
        ws.compile(step, strategy=ws.FSDP(), backend="eager")(torch.randn(2, 6), torch.randn(2, 3))
    except ws.RankMismatchError as error:
        return str(error)
    return ""


def test_a_gradient_that_one_rank_alone_has_is_an_error_on_both(pool2: Any) -> None:
    for text in pool2.run(gradient_of_one_rank):
        assert "Rank 0 reads the gradient of " in text
        assert "first.weight at test_live_shards.py" in text


def kinds_of_a_wrapped_step() -> set[str]:
    """What Python sees of the gradients of a module that its user has given to fully_shard."""
    net, seen = Net().first, []
    fully_shard(net, mesh=ws.init().mesh)

    def step(x: Tensor) -> None:
        net(x).square().mean().backward()
        seen.append(type(net.weight.grad.abs()).__name__)  # type: ignore[union-attr]

    compiled = ws.compile(step, backend="eager")
    for _ in range(2):
        compiled(torch.randn(2, 6))
    return set(seen)


def test_who_has_sharded_a_module_sees_what_torch_gives(pool2: Any) -> None:
    assert pool2.run(kinds_of_a_wrapped_step) == [{"DTensor"}] * 2


def recovers() -> list[str]:
    """A forward that raises an error, in a trace and in a live call, and the calls after it; what differs from DDP."""
    ours, theirs = training(), training()
    theirs.model = DistributedDataParallel(theirs.net)
    caught: list[int] = []

    def step(t: Training, x: Tensor, y: Tensor) -> None:
        try:
            loss = t.loss(x, y)
        except RuntimeError:
            caught.append(len(x))
            return
        loss.backward()
        t.update()

    compiled = ws.compile(step, strategy=ws.FSDP(), backend="eager")
    for call in range(5):
        torch.manual_seed(10 * call + dist.get_rank())
        x, y = torch.randn(6, 5 if call in (0, 3) else 6), torch.randn(6, 3)
        compiled(ours, x, y)
        step(theirs, x, y)
    assert caught == [6] * 4
    pairs = zip(theirs.net.parameters(), ours.net.parameters(), strict=True)
    return [str(want) for want, came in pairs if not torch.allclose(want, whole(came), rtol=TOLERANCE, atol=TOLERANCE)]


def test_a_forward_that_raises_an_error_leaves_modules_as_they_were(pool2: Any) -> None:
    assert pool2.run(recovers) == [[], []]


def trains_a_container(live: bool) -> list[str]:
    """A list of modules and a dict in it, with a parameter of its own; what differs from plain code on all data."""

    def make() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(0)
        heads = nn.ModuleDict({"a": nn.Linear(9, 3), "b": nn.Linear(9, 3)})
        parts = nn.ModuleList([nn.Linear(6, 9), heads, nn.ParameterList([torch.ones(9)])])
        return parts, torch.optim.AdamW(parts.parameters(), lr=1e-2)

    seen: list[float] = []

    def train(parts: Any, opt: Any, x: Tensor, y: Tensor) -> None:
        hidden = torch.tanh(parts[0](x)) * parts[2][0]
        loss = nn.functional.mse_loss(parts[1]["a"](hidden) + parts[1]["b"](hidden), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if live:
            seen.append(loss.item())

    ours, theirs = make(), make()
    step = ws.compile(train, strategy=ws.FSDP(), backend="eager", fullgraph=not live)
    for call in range(CALLS):
        torch.manual_seed(call)
        x, y = torch.randn(6, 6), torch.randn(6, 3)
        step(*ours, x, y)
        train(*theirs, x, y)
    pairs = zip(theirs[0].named_parameters(), ours[0].parameters(), strict=True)
    return [
        name for (name, want), came in pairs
        if isinstance(came, DTensor) == name.startswith("2.")
        or not torch.allclose(want, whole(came), rtol=TOLERANCE, atol=TOLERANCE)
    ]  # fmt: skip


@pytest.mark.parametrize("live", [False, True])
def test_modules_of_a_container_are_sharded_one_by_one(pool2: Any, live: bool) -> None:
    assert pool2.run(trains_a_container, live) == [[], []]
