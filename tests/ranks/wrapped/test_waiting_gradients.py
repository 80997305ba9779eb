"""Gradients and parameters that eager code of ``fully_shard`` has left: what a compiled call does with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import wholestep as ws
from tests.ranks.wrapped.test_fully_shard import SETTINGS, batches, net, sharded, train, whole

pytestmark = pytest.mark.ranks

Step = Callable[..., Tensor]


def on_own_device(check: Callable[..., None]) -> Callable[..., None]:
    """Tensors of the check are made on the device of its rank."""

    @functools.wraps(check)
    def run(*args: Any) -> None:
        with ws.init().device:
            check(*args)

    return run


def close(found: Tensor, wanted: Tensor, settings: dict[str, Any]) -> None:
    """Inductor leaves out roundings to bfloat16 between two operators."""
    rounds = "mp_policy" in settings and found.is_cuda
    torch.testing.assert_close(found, wanted, **({"rtol": 2**-7, "atol": 2**-9} if rounds else {}))


def reads_its_loss(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x).float(), y)
    assert loss.item() > 0
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


STEPS: dict[str, Step] = {"one graph": train, "reads its loss": reads_its_loss}


def eager_micro_batch(model: Any, x: Tensor, y: Tensor) -> None:
    """Its gradients wait for the next backward."""
    model.set_requires_gradient_sync(False)
    nn.functional.cross_entropy(model(x).float(), y).backward()
    model.set_requires_gradient_sync(True)


@on_own_device
def as_eager_training(step: Step, settings: dict[str, Any], strategy: ws.FSDP | None) -> None:
    """One call as it is, then two after a micro-batch of eager code, then one as it is."""
    eager, ours = sharded(**settings), sharded(**settings)
    if strategy is not None:
        model = net()
        ours = model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = ws.compile(step, strategy=strategy)
    for number, (x, y) in enumerate(batches()):
        if number in (2, 3):
            eager_micro_batch(eager[0], x[:3], y[:3])
            eager_micro_batch(ours[0], x[:3], y[:3])
        close(compiled(*ours, x, y), step(*eager, x, y), settings)
    for want, came in zip(whole(eager[0]), whole(ours[0]), strict=True):
        close(came, want, settings)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", STEPS)
def test_an_eager_micro_batch_counts_in_the_next_call(ranks2: Any, name: str, settings: str, may_go_live: bool) -> None:
    ranks2.run(as_eager_training, STEPS[name], SETTINGS[settings], None)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("name", STEPS)
def test_it_counts_under_a_strategy(ranks2: Any, name: str, may_go_live: bool) -> None:
    ranks2.run(as_eager_training, STEPS[name], {}, ws.FSDP())


@on_own_device
def met_late(step: Step, frozen: bool) -> None:
    """A micro-batch of eager code before the first call, and one for a layer that is frozen until then."""
    eager, ours, compiled = sharded(**SETTINGS["again"]), sharded(**SETTINGS["again"]), ws.compile(step)
    for number, (x, y) in enumerate(batches()):
        for model, _ in (eager, ours):
            model[0].requires_grad_(not frozen or number > 1)
            if number in (0, 2):
                eager_micro_batch(model, x[:3], y[:3])
        close(compiled(*ours, x, y), step(*eager, x, y), {})
    for want, came in zip(whole(eager[0]), whole(ours[0]), strict=True):
        close(came, want, {})


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_it_counts_for_what_no_call_has_trained(ranks2: Any, name: str, frozen: bool, may_go_live: bool) -> None:
    ranks2.run(met_late, STEPS[name], frozen)


class EveryOther:
    """Reduces and updates in every other call. In the first calls its micro-batches are eager code."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        model.set_requires_gradient_sync(self.calls % 2 == 0)
        loss = nn.functional.cross_entropy(model(x).float(), y)
        for _ in range(self.calls % 3):
            assert loss.item() > 0
        (loss / 2).backward()
        if self.calls % 2 == 0:
            opt.step()
            opt.zero_grad()
        return loss.detach()


@on_own_device
def accumulates_from_call_to_call(settings: dict[str, Any]) -> None:
    eager, ours, theirs = sharded(**settings), sharded(**settings), EveryOther()
    compiled = ws.compile(EveryOther())
    for x, y in batches(8):
        torch.testing.assert_close(compiled(*ours, x, y), theirs(*eager, x, y))
    for want, came in zip(whole(eager[0]), whole(ours[0]), strict=True):
        torch.testing.assert_close(came, want)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("settings", ["again", "keep"])
def test_gradients_wait_from_one_live_call_to_the_next(ranks2: Any, settings: str, may_go_live: bool) -> None:
    ranks2.run(accumulates_from_call_to_call, SETTINGS[settings])


def with_penalty(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    out = model(x).float()
    loss = nn.functional.cross_entropy(out, y)
    if out.detach().mean() < 100:
        loss = loss + 0.01 * sum(param.square().sum() for param in model.parameters())
    loss.backward()
    opt.step()
    return loss.detach()


@on_own_device
def penalised() -> None:
    settings = SETTINGS["keep"]
    eager, ours, compiled = sharded(**settings), sharded(**settings), ws.compile(with_penalty)
    for x, y in batches():
        torch.testing.assert_close(compiled(*ours, x, y), with_penalty(*eager, x, y))
    for want, came in zip(whole(eager[0]), whole(ours[0]), strict=True):
        torch.testing.assert_close(came, want)


@pytest.mark.parametrize("may_go_live", [True])
def test_a_penalty_on_parameters_that_stay_gathered(ranks2: Any, may_go_live: bool) -> None:
    """After a read of the loss: a forward that is recorded has gathered nothing yet."""
    ranks2.run(penalised)


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: model[0][0].weight.norm().item(),
    "largest": lambda model: float(model[3].weight.detach().abs().max()),
    "row": lambda model: model[3].weight[0].tolist(),
    "on rank 0": lambda model: dist.get_rank() == 0 and model[3].weight.sum().item(),
    "penalty": lambda model: sum(param.square().sum() for param in model.parameters()),
}


class LooksLate:
    """Uses parameters between a forward and its backward from the fourth call on, after a read of what it computes."""

    def __init__(self, look: Callable[[nn.Module], Any]) -> None:
        self.calls, self.look, self.seen = 0, look, list[Any]()

    def __call__(self, model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        opt.zero_grad()
        out = model(x).float()
        loss = nn.functional.cross_entropy(out, y)
        if out.detach().mean() < 100 and self.calls > 3:
            found = self.look(model)
            self.seen.append(found.item() if isinstance(found, Tensor) else found)
            loss = loss + 0.01 * found if isinstance(found, Tensor) else loss
        loss.backward()
        opt.step()
        return loss.detach()


@on_own_device
def looked_at(name: str, settings: dict[str, Any]) -> None:
    eager, ours = sharded(**settings), sharded(**settings)
    theirs, own = LooksLate(LOOKS[name]), LooksLate(LOOKS[name])
    compiled = ws.compile(own)
    for x, y in batches(6):
        torch.testing.assert_close(compiled(*ours, x, y), theirs(*eager, x, y))
    torch.testing.assert_close(own.seen, theirs.seen)
    for want, came in zip(whole(eager[0]), whole(ours[0]), strict=True):
        torch.testing.assert_close(came, want)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("name", LOOKS)
def test_gathered_parameters_are_whole_where_a_forward_is_recorded(ranks2: Any, name: str, may_go_live: bool) -> None:
    """They are DTensors there, whose own norm is that of this rank's part."""
    ranks2.run(looked_at, name, SETTINGS["keep"])


def updates_by_hand(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    """Its backward is no record."""
    out = model(x).float()
    loss = nn.functional.cross_entropy(out, y) + out[:, torch.randperm(3)[0]].mean()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
    opt.zero_grad()
    return loss.detach()


def writes_behind_an_evaluation(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    """Which has dropped again what it has gathered."""
    loss = train(model, opt, x, y)
    for _ in range(2):
        with torch.no_grad():
            scores = model(x)
        if scores.mean() > 100:
            break
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        model[3].weight.data.mul_(0.9)
    return loss


@on_own_device
def written(step: Step, settings: dict[str, Any]) -> None:
    eager, ours, compiled = sharded(**settings), sharded(**settings), ws.compile(step)
    for number, (x, y) in enumerate(batches()):
        torch.manual_seed(number)
        came = compiled(*ours, x, y)
        torch.manual_seed(number)
        torch.testing.assert_close(came, step(*eager, x, y))
    for want, came in zip(whole(eager[0]), whole(ours[0]), strict=True):
        torch.testing.assert_close(came, want)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("step", [updates_by_hand, writes_behind_an_evaluation])
def test_what_is_written_to_shards_stays(ranks2: Any, step: Step, may_go_live: bool) -> None:
    """Nothing is gathered after a backward, nor after ``reshard()``."""
    ranks2.run(written, step, SETTINGS["keep"])
