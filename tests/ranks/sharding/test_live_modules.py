"""Modules of a live step whose parameters are cut over the ranks: they do what whole ones do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import wholestep as ws
from tests.ranks.sharding.test_live_shards import Net, Step, Training, compared, whole

pytestmark = pytest.mark.ranks


class Writes(Net):
    """A forward that moves parameters: a slow copy of one, a bound, a row that stays zero."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(9, 3).requires_grad_(False)
        self.slow.load_state_dict(self.last.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.last.parameters(), strict=True):
                slow.data = slow.data * 0.5 + fast.data * 0.5
            self.first.weight.clamp_(-0.3, 0.3)
        self.first.bias.data[2] = 0.0
        out: Tensor = super().forward(x) + self.slow(self.hidden(x))
        return out


def trains(t: Training, x: Tensor, y: Tensor) -> None:
    t.loss(x, y).backward()
    t.update()


def bounds_gradients(t: Training, x: Tensor, y: Tensor) -> None:
    """Hooks of parameters: one from before the first call, one for two calls."""
    call = len(t.notes)
    if call == 1:
        t.handle = t.net.last.weight.register_hook(lambda grad: grad * 4)  # type: ignore[attr-defined]
    if call == 3:
        t.handle.remove()  # type: ignore[attr-defined]
    trains(t, x, y)


def makes_weights_anew(t: Training, x: Tensor, y: Tensor) -> None:
    torch.manual_seed(3)  # the ranks of eager code would go ways of their own otherwise
    if len(t.notes) == 1:
        nn.init.xavier_uniform_(t.net.first.weight)
        t.net.last.bias.data.normal_()
    with torch.no_grad():
        t.net.last.weight.add_(torch.randn_like(t.net.last.weight), alpha=0.01)
        nn.init.trunc_normal_(t.net.first.bias, std=0.01)
    trains(t, x, y)


def learns_from_a_copy(t: Training, x: Tensor, y: Tensor) -> None:
    call = len(t.notes)
    loss = t.loss(x, y)
    if call:
        with torch.no_grad():
            wanted = t.teacher(x)  # type: ignore[attr-defined]
        loss = loss + nn.functional.mse_loss(t.model(x), wanted)
    loss.backward()
    t.update()
    if call % 2 == 0:
        t.teacher = copy.deepcopy(t.net)  # type: ignore[attr-defined]


def training(step: Step) -> Training:
    torch.manual_seed(0)
    made = Training(Writes() if step is trains else Net())
    if step is bounds_gradients:
        made.net.first.weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))  # type: ignore[no-untyped-call]
    return made


class Weighted(Training):
    """Its loss counts several times."""

    weight = 1.0


def sums(t: Training, x: Tensor, y: Tensor) -> None:
    assert isinstance(t, Weighted)
    (t.loss(x, y) * t.weight).backward()
    nn.utils.clip_grad_norm_(t.net.parameters(), 0.5)
    t.update()


def beside_twice_the_mean(axes: bool) -> list[str]:
    torch.manual_seed(0)
    ours, theirs = Weighted(Net()), Weighted(Net())
    theirs.net.load_state_dict(ours.net.state_dict())
    theirs.weight = float(dist.get_world_size())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")) if axes else None
    return compared(sums, ours, theirs, ws.FSDP(reduce="sum"), mesh=mesh)


def test_gradients_are_summed_where_the_strategy_says_so(pool2: Any, pool4: Any) -> None:
    assert pool2.run(beside_twice_the_mean, False) == [[], []]
    assert pool4.run(beside_twice_the_mean, True) == [[]] * 4


class OneByOne(Training):
    """An optimizer for each parameter, and what the gradients were that they have seen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_backward = False
        self.opts = {param: torch.optim.SGD([param], lr=0.1) for param in self.net.parameters()}
        self.names = {param: name for name, param in self.net.named_parameters()}
        self.seen: dict[str, float] = {}

    def update_one(self, param: Tensor) -> None:
        assert param.grad is not None
        self.seen[self.names[param]] = float(param.grad.norm())
        self.opts[param].step()
        self.opts[param].zero_grad()


def updates_one_by_one(t: Training, x: Tensor, y: Tensor) -> None:
    assert isinstance(t, OneByOne)
    t.loss(x, y).backward()
    for param in t.net.parameters():
        if not t.in_backward or param.dim() == 0:  # one without dims is whole, and reduced after the backward
            t.update_one(param)
    t.notes += [norm for _, norm in sorted(t.seen.items())]


def updates_in_the_backward() -> list[str]:
    torch.manual_seed(0)
    ours, theirs = OneByOne(Net()), OneByOne(Net())
    theirs.net.load_state_dict(ours.net.state_dict())
    ours.in_backward = True
    for param in (one for one in ours.net.parameters() if one.dim()):
        param.register_post_accumulate_grad_hook(ours.update_one)
    return compared(updates_one_by_one, ours, theirs)


def test_a_hook_behind_the_accumulation_sees_whole_reduced_gradients(pool2: Any) -> None:
    """Torch's DistributedDataParallel would update before it reduces: there the loop stands after the backward."""
    assert pool2.run(updates_in_the_backward) == [[], []]


STEPS = {one.__name__: one for one in (trains, bounds_gradients, makes_weights_anew, learns_from_a_copy)}


def beside_ddp(name: str) -> list[str]:
    return compared(STEPS[name], training(STEPS[name]), training(STEPS[name]))


@pytest.mark.parametrize("name", STEPS)
def test_modules_do_what_whole_ones_do(pool2: Any, name: str) -> None:
    assert pool2.run(beside_ddp, name) == [[], []]


def written_under_a_policy() -> list[tuple[float, ...]]:
    """What a forward writes to one value of a parameter that is gathered in another type, and what is beside it."""
    torch.manual_seed(0)
    net, seen = nn.Linear(3, 4, bias=False), []
    before = net.weight.detach().clone()

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net

        def forward(self, x: Tensor) -> Tensor:
            self.inner.weight.data[1, 1] = 0.5
            return self.inner(x)  # type: ignore[no-any-return]

    module = Module()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def step(x: Tensor) -> None:
        seen.append(module(x).sum().item())

    compiled = ws.compile(step, strategy=ws.FSDP(mp_policy=policy, units=()), backend="eager")
    for _ in range(2):
        compiled(torch.ones(2, 3))
    after = whole(module.inner.weight)
    before[1, 1] = 0.5
    return [tuple(row) for row in (after - before).tolist()]


def test_what_a_forward_does_not_write_to_is_not_rounded(pool2: Any) -> None:
    assert pool2.run(written_under_a_policy) == [[(0.0, 0.0, 0.0)] * 4] * 2


def copies() -> tuple[bool, float, str, str]:
    """A copy made between calls: whether it is plain, what it differs by, and what is said of a module that its user
    has sharded."""
    t = training(learns_from_a_copy)
    t.net.register_forward_hook(lambda module, args, output: output * 2)
    step = ws.compile(trains, strategy=ws.FSDP(), backend="eager")
    x, y = torch.randn(6, 6), torch.randn(6, 3)
    step(t, x, y)
    made = copy.deepcopy(t.net)
    is_plain = type(made) is Net and not any(isinstance(one, FSDPModule) for one in made.modules())
    is_plain = is_plain and all(type(one) is nn.Parameter and one.requires_grad for one in made.parameters())
    difference = float((made(x) - t.net(x)).detach().abs().max())
    made.state_dict()
    step(t, x, y)
    users = Net()
    fully_shard(users, mesh=ws.init().mesh, ignored_params={users.scale})
    try:
        copy.deepcopy(users)
    except AssertionError as error:
        return is_plain, difference, str(error), type(t.net).__name__
    return is_plain, difference, "", ""


def test_a_copy_of_a_module_that_a_strategy_has_sharded_is_plain(pool2: Any) -> None:
    for is_plain, difference, refused, name in pool2.run(copies):
        assert is_plain
        assert difference == 0.0
        assert "FSDP does not support deepcopy" in refused
        assert name == "FSDPNet"
