"""What DistributedDataParallel reduces and synchronizes, and what stays with each rank: a compiled step does the same.

Each case is a loop of a user. It runs twice, eager and with its step compiled, on the same data of each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws

pytestmark = pytest.mark.ranks

CALLS = 5
Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles a step, or gives it as it is."""


def batches(count: int = CALLS) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    return [(torch.randn(6, 8, generator=draw), torch.randint(0, 4, (6,), generator=draw)) for _ in range(count)]


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


READ: list[float] = []
READS_GRADIENTS: list[bool] = []
"""Not empty where Python asks for a gradient's sum before each update."""


class Loop:
    """A wrapped model, its optimizer, and what a test compares."""

    def __init__(self, inner: nn.Module, **settings: Any) -> None:
        self.model = DistributedDataParallel(inner, **settings)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.seen: list[Tensor] = []

    def update(self) -> None:
        if READS_GRADIENTS:
            READ.append(next(float(one.grad.sum()) for one in self.model.parameters() if one.grad is not None))
        self.opt.step()
        self.opt.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.seen.append(self.model(batches(1)[0][0]))
        self.model.train()

    def trained(self, step: Callable[..., Any]) -> list[Tensor]:
        """What is left after a call for each batch."""
        for x, y in batches():
            step(x, y)
        return self.results()

    def see_buffers(self) -> None:
        self.seen += [one.clone() for one in self.model.buffers()]

    def results(self) -> list[Tensor]:
        return [*self.seen, *(one.detach().clone() for one in self.model.module.state_dict().values())]


def the_module_inside(make: Make) -> list[Tensor]:
    """A forward that goes past the wrapper, as ``model.module.loss(...)`` does."""
    loop = Loop(plain())

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model.module, x, y).backward()
        loop.update()

    return loop.trained(make(step))


def reduced_by_hand(make: Make) -> list[Tensor]:
    """The same, and the user sums gradients over the ranks."""
    loop = Loop(plain())

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model.module, x, y).backward()
        for param in loop.model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
        loop.update()

    return loop.trained(make(step))


def a_second_backward(make: Make) -> list[Tensor]:
    """After one forward the first backward is reduced and the second one is not."""
    loop = Loop(plain())

    def step(x: Tensor, y: Tensor) -> None:
        out = loop.model(x)
        nn.functional.cross_entropy(out, y).backward(retain_graph=True)
        out.pow(2).mean().backward()
        loop.update()

    return loop.trained(make(step))


def gradients_that_are_returned(make: Make) -> list[Tensor]:
    """``torch.autograd.grad`` calls no hook of a wrapper."""
    loop = Loop(plain())

    def step(x: Tensor, y: Tensor) -> None:
        params = list(loop.model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss_of(loop.model, x, y), params), strict=True):
            param.grad = grad
        loop.update()

    return loop.trained(make(step))


def unfrozen_later(make: Make) -> list[Tensor]:
    """The reducer has no parameter that did not train when the module was wrapped."""
    inner = plain()
    inner[0].requires_grad_(False)
    loop = Loop(inner)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model, x, y).backward()
        loop.update()

    step = make(step)
    for number, (x, y) in enumerate(batches()):
        inner[0].requires_grad_(number != 1)  # the first call meets it trained
        step(x, y)
    return loop.results()


def added_later(make: Make) -> list[Tensor]:
    inner = plain()
    loop = Loop(inner)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model, x, y).backward()
        loop.update()

    step = make(step)
    for number, (x, y) in enumerate(batches()):
        if number == 2:
            inner.append(nn.Linear(4, 4))
            loop.opt.add_param_group({"params": [*inner[-1].parameters()]})
        step(x, y)
    return loop.results()


def an_ignored_buffer(make: Make) -> list[Tensor]:
    inner = normed()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["1.running_mean"])
    loop = Loop(inner)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model, x, y).backward()
        loop.update()

    return loop.trained(make(step))


def evaluations_between(make: Make) -> list[Tensor]:
    """A forward without gradients has the next one give buffers no values of rank 0; evaluations see what they see."""
    loop = Loop(normed())

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model, x, y).backward()
        loop.update()

    step = make(step)
    for x, y in batches():
        step(x, y)
        loop.evaluate()
    return loop.results()


def compiled_evaluations(make: Make) -> list[Tensor]:
    loop = Loop(normed())

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model, x, y).backward()
        loop.update()

    def evaluation(x: Tensor) -> Any:
        with torch.no_grad():
            return loop.model(x)

    step, evaluation = make(step), make(evaluation)
    for x, y in batches():
        step(x, y)
        loop.model.eval()
        loop.seen.append(evaluation(x).clone())
        loop.model.train()
    return loop.results()


def micro_batches_by_call(make: Make) -> list[Tensor]:
    """After a forward in ``no_sync()`` buffers stay those of each rank, once."""
    loop = Loop(normed())

    def step(x: Tensor, y: Tensor, is_last: bool) -> None:
        loop.model.require_backward_grad_sync = is_last  # what no_sync() does
        loss_of(loop.model, x, y).backward()
        loop.model.require_backward_grad_sync = True
        if is_last:
            loop.update()

    step = make(step)
    for number, (x, y) in enumerate(batches(6)):
        step(x, y, number % 2 == 1)
    return loop.results()


def wrappers_with_other_buffers(make: Make) -> list[Tensor]:
    """One wrapper synchronizes its buffers, another one does not."""
    loop, other = Loop(normed()), Loop(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), broadcast_buffers=False)

    def step(x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(other.model(loop.model(x)), y).backward()
        loop.update()
        other.update()

    step = make(step)
    for x, y in batches():
        step(x, y)
    return [*loop.results(), *other.results()]


def two_backwards(make: Make) -> list[Tensor]:
    """Each after a forward of its own."""
    loop = Loop(plain())

    def step(x: Tensor, y: Tensor) -> None:
        other = 2 * x
        loss_of(loop.model, x, y).backward()
        loss_of(loop.model, other, y).backward()
        loop.update()

    return loop.trained(make(step))


def cleared_first(make: Make) -> list[Tensor]:
    """With a value in between, the backward runs ahead of it."""
    loop = Loop(plain())

    def step(x: Tensor, y: Tensor) -> None:
        loop.opt.zero_grad()
        loss = loss_of(loop.model, x, y)
        if READS_GRADIENTS:
            READ.append(loss.item())
        loss.backward()
        loop.opt.step()

    return loop.trained(make(step))


def two_forwards(make: Make) -> list[Tensor]:
    """The second gives buffers the values of the first rank, which the graph of the first has saved."""
    loop = Loop(normed())

    def step(x: Tensor, y: Tensor) -> None:
        (loss_of(loop.model, x, y) + loss_of(loop.model, 2 * x, y)).backward()
        loop.update()

    step = make(step)
    for x, y in batches():
        step(x, y)
        loop.see_buffers()
    return loop.results()


def past_the_wrapper_behind_it(make: Make) -> list[Tensor]:
    loop = Loop(plain())

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model, x, y).backward()
        loss_of(loop.model.module, x, y).backward()
        loop.update()

    return loop.trained(make(step))


def evaluations_in_the_step(make: Make) -> list[Tensor]:
    loop = Loop(normed())

    def step(x: Tensor, y: Tensor) -> Any:
        loss_of(loop.model, x, y).backward()
        loop.update()
        loop.model.eval()
        with torch.no_grad():
            out = loop.model(x)
        loop.model.train()
        return out

    step = make(step)
    for x, y in batches():
        loop.seen.append(step(x, y).clone())
        loop.see_buffers()
    return loop.results()


def wrapped_anew(make: Make) -> list[Tensor]:
    """What was frozen when the module was wrapped trains later, and is reduced when the module is wrapped again."""
    inner = plain()
    inner[0].requires_grad_(False)
    loop = Loop(inner)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model, x, y).backward()
        loop.update()

    step = make(step)
    for number, (x, y) in enumerate(batches(9)):
        inner[0].requires_grad_(number >= 3)
        if number == 6:
            loop.model = DistributedDataParallel(inner)
        step(x, y)
    return loop.results()


def thawed_in_the_step(make: Make) -> list[Tensor]:
    """What was frozen when it was wrapped stays local; what was frozen later is reduced."""
    inner = plain()
    inner[0].requires_grad_(False)
    loop = Loop(inner)
    loop.opt = torch.optim.SGD(inner.parameters(), lr=0.1)
    inner[2].requires_grad_(False)

    def step(x: Tensor, y: Tensor) -> None:
        inner.requires_grad_(True)
        loss_of(loop.model, x, y).backward()
        loop.update()
        inner.requires_grad_(False)

    return loop.trained(make(step))


def two_wrappers(make: Make) -> list[Tensor]:
    """As in adversarial training: the second one goes back twice, and what it learns from the first is cleared."""
    first, second = Loop(plain()), Loop(nn.Sequential(nn.Linear(4, 4)))

    def step(x: Tensor, y: Tensor) -> None:
        hidden = first.model(x)
        loss_of(second.model, hidden.detach(), y).backward()
        second.update()
        (hidden.square().mean() + loss_of(second.model, hidden, y)).backward()
        first.update()
        second.opt.zero_grad()

    step = make(step)
    for x, y in batches():
        step(x, y)
    return [*first.results(), *second.results()]


LOOPS = {
    loop.__name__: loop
    for loop in (
        the_module_inside, reduced_by_hand, a_second_backward, gradients_that_are_returned, unfrozen_later, added_later,
        an_ignored_buffer, evaluations_between, compiled_evaluations, micro_batches_by_call,
        wrappers_with_other_buffers, two_backwards, two_forwards, past_the_wrapper_behind_it, evaluations_in_the_step,
        wrapped_anew, two_wrappers, cleared_first, thawed_in_the_step,
    )
}  # fmt: skip
if torch.__version__ < "2.13":  # torch's own second forward ends the graph of the first there
    del LOOPS["two_forwards"]


def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    return ws.compile(step, backend="eager", fullgraph=True)


def both(name: str) -> tuple[list[Tensor], list[Tensor]]:
    found = []
    for make in (lambda step: step, compiled):
        torch.manual_seed(0)
        found.append(LOOPS[name](make))
    return found[0], found[1]


@pytest.mark.parametrize("name", LOOPS)
def test_each_rank_has_what_it_has_in_eager_code(pool2: Any, name: str) -> None:
    for eager, ours in pool2.run(both, name):
        assert len(eager) == len(ours)
        for number, (one, other) in enumerate(zip(eager, ours, strict=True)):
            if name == "two_backwards":  # the sum of two gradients is reduced once
                torch.testing.assert_close(one, other)
            else:
                assert torch.equal(one, other), number


def live(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that asks for a number first."""

    def asks(x: Tensor, *others: Any) -> Any:
        READ.append((2 * x).sum().item())
        return step(x, *others)

    return ws.compile(step if step.__name__ == "evaluation" else asks, backend="eager")


def live_loop(name: str, asks_before_the_update: bool) -> tuple[list[Tensor], list[Tensor]]:
    found = []
    READS_GRADIENTS[:] = [True] if asks_before_the_update else []
    try:
        for make in (lambda step: step, live):
            torch.manual_seed(0)
            found.append(LOOPS[name](make))
    finally:
        READS_GRADIENTS.clear()
    return found[0], found[1]


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize(
    ("name", "asks_before_the_update"),
    [
        *((name, False) for name in LOOPS),
        ("a_second_backward", True),
        ("two_backwards", True),
        ("two_wrappers", True),
        ("cleared_first", True),
    ],
)
def test_a_live_step_does_the_same(pool2: Any, name: str, asks_before_the_update: bool, may_go_live: bool) -> None:
    """But for rounding: gradients that came in two backwards are reduced together in a piece."""
    for eager, ours in pool2.run(live_loop, name, asks_before_the_update):
        assert len(eager) == len(ours)
        for one, other in zip(eager, ours, strict=True):
            torch.testing.assert_close(one, other)


def routed(make: Make) -> list[Tensor]:
    """Each rank uses another part of its module, as ``find_unused_parameters`` allows."""
    loop = Loop(Routed(), find_unused_parameters=True)

    def step(x: Tensor, y: Tensor, route: int) -> None:
        nn.functional.cross_entropy(loop.model(x, route), y).backward()
        loop.update()

    step = make(step)
    for number, (x, y) in enumerate(batches(6)):
        step(x, y, (number + dist.get_rank()) % 2)
    return loop.results()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: Tensor, route: int) -> Any:
        return self.parts[route](x)


def half_and_summed(bucket: Any) -> Any:
    reduced = dist.all_reduce(bucket.buffer() / 4, async_op=True).get_future()
    return reduced.then(lambda done: done.value()[0])


def hooked(make: Make) -> list[Tensor]:
    loop = Loop(normed())
    loop.model.register_comm_hook(None, lambda _, bucket: half_and_summed(bucket))

    def step(x: Tensor, y: Tensor) -> None:
        loss = loss_of(loop.model, x, y)
        loss.backward()
        READ.append(loss.item())
        loop.update()

    step = make(step)
    for x, y in batches():
        step(x, y)
        loop.see_buffers()
    return loop.results()


def as_eager_code(loop: Callable[[Make], list[Tensor]]) -> tuple[list[Tensor], list[Tensor], str]:
    steps, found = list[Any](), []

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        steps.append(ws.compile(step))
        return steps[-1]

    for one in (lambda step: step, make):
        torch.manual_seed(0)
        found.append(loop(one))
    return found[0], found[1], str(steps[0].explain())


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize(
    ("loop", "why"),
    [(routed, "another graph on each rank"), (hooked, "its modules communicate")],
)
def test_what_no_graph_can_do_makes_a_step_live(pool2: Any, loop: Any, why: str, may_go_live: bool) -> None:
    for eager, ours, explained in pool2.run(as_eager_code, loop):
        assert why in " ".join(explained.split())
        for one, other in zip(eager, ours, strict=True):
            torch.testing.assert_close(one, other)


def delayed() -> str:
    """torch's own numbers differ from run to run: what its hook reduces may have been used by then."""
    inner = plain()
    late = [("2.weight", inner[2].weight), ("2.bias", inner[2].bias)]
    loop = Loop(inner, delay_all_reduce_named_params=late, param_to_hook_all_reduce=inner[0].weight)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(loop.model, x, y).backward()
        loop.update()

    compiled = ws.compile(step)
    for x, y in batches():
        compiled(x, y)
    return str(compiled.explain())


@pytest.mark.parametrize("may_go_live", [True])
def test_delayed_reductions_are_those_of_the_wrapper(pool2: Any, may_go_live: bool) -> None:
    for explained in pool2.run(delayed):
        assert "delay_all_reduce_named_params" in explained
        assert "0 calls of torch executed one by one" in " ".join(explained.split())


def averaged(around: bool) -> list[tuple[list[Tensor], int]]:
    """Parameters and calls counted, of eager code and of a compiled step, with torch's optimizer around another one."""
    found = []
    for make in (lambda step: step, ws.compile):
        torch.manual_seed(0)
        loop = Loop(plain())
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        if around:
            loop.opt = PostLocalSGDOptimizer(loop.opt, averager)

        def step(x: Tensor, y: Tensor, loop: Loop = loop, averager: Any = averager) -> None:
            loss_of(loop.model, x, y).backward()
            loop.opt.step()
            if not around:
                averager.average_parameters(loop.model.parameters())
            loop.opt.zero_grad()

        called: Any = make(step)
        for x, y in batches():
            called(x, y)
        found.append((loop.results(), averager.step))
    return found


@pytest.mark.parametrize("around", [True, False], ids=["around an optimizer", "behind an optimizer"])
def test_objects_of_torch_go_on_counting(pool2: Any, around: bool) -> None:
    for (eager, calls), (ours, also) in pool2.run(averaged, around):
        assert (calls, also) == (CALLS, CALLS)
        for number, (one, other) in enumerate(zip(eager, ours, strict=True)):
            assert torch.equal(one, other), number
