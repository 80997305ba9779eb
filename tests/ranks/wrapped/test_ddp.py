"""A DistributedDataParallel given to a compiled step: one graph with its settings, equal to its eager training."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from wholestep.capture.wrappers.ddp import silent_forwards

pytestmark = pytest.mark.ranks

NUM_STEPS = 5


def net(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def wrapped(model: nn.Module, **settings: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    module = DistributedDataParallel(copy.deepcopy(model), **settings)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def train(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def accumulating(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two micro-batches, of which the first stays local."""
    with model.no_sync():
        nn.functional.cross_entropy(model(x[:3]), y[:3]).backward()
    return train(model, opt, x[3:], y[3:])


def batches(count: int = NUM_STEPS) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1 + dist.get_rank())
    return [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(count)]


def expect_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, one), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def trained(
    step: Callable[..., Any], model: nn.Module, eager_at: int | None = None, **settings: Any
) -> ws.CompiledStep:
    """Trains a compiled and an eager copy, compared after each step; both run step `eager_at` in eager code."""
    eager, ours = wrapped(model, **settings), wrapped(model, **settings)
    compiled = ws.compile(step)
    for number, (x, y) in enumerate(batches()):
        expected = step(*eager, x, y)
        given = (step if number == eager_at else compiled)(*ours, x, y)
        assert torch.equal(expected, given), number
    expect_equal(eager[0], ours[0])
    return compiled


def equal_to_eager(step: Callable[..., Any], settings: dict[str, Any]) -> tuple[int, str]:
    compiled = trained(step, net(), eager_at=2, **settings)
    return compiled.cache_info().traces, compiled.plan


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True},
        {"broadcast_buffers": True, "bucket_cap_mb": 1}, {"bucket_cap_mb": 0.001},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)  # fmt: skip
def test_settings_give_the_numbers_of_eager_training(pool2: Any, settings: dict[str, Any]) -> None:
    """With an eager step among the compiled ones: the wrapper works there as ever, and no gradient is reduced twice."""
    first, second = pool2.run(equal_to_eager, train, settings)
    assert first[0] == second[0] == 1


def test_micro_batches_in_no_sync_are_reduced_once(pool2: Any) -> None:
    for traces, _ in pool2.run(equal_to_eager, accumulating, {}):
        assert traces == 1


def plans() -> tuple[str, str]:
    wrapper, opt = wrapped(net())
    plain = net()
    x, y = batches(1)[0]
    ours, other = ws.compile(train), ws.compile(train, strategy=ws.DDP())
    ours(wrapper, opt, x, y)
    other(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), x, y)
    return ours.plan, other.plan


def test_the_plan_is_that_of_the_plain_module_with_the_strategy(pool2: Any) -> None:
    for ours, other in pool2.run(plans):
        assert ours == other
        assert "module." not in ours


def micro(model: Any, x: Tensor, y: Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()


def reductions(compiled: ws.CompiledStep) -> int:
    """How many messages of gradients the agreed plan has."""
    return len(re.findall(r"^#\d+ all_reduce ", compiled.plan, re.MULTILINE))


def accumulation_over_calls() -> tuple[tuple[int, int], int, int]:
    eager, ours = wrapped(net(), broadcast_buffers=False), wrapped(net(), broadcast_buffers=False)
    first, last = ws.compile(micro, fullgraph=True), ws.compile(train, fullgraph=True)
    for x, y in batches():
        with eager[0].no_sync(), ours[0].no_sync():
            micro(eager[0], x, y)
            first(ours[0], x, y)
        for one, other in zip(eager[0].parameters(), ours[0].parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        assert torch.equal(train(*eager, x, y), last(*ours, x, y))
    expect_equal(eager[0], ours[0])
    silent, spoken = reductions(first), reductions(last)
    first(ours[0], x, y)
    return (silent, spoken), first.cache_info().traces, last.cache_info().traces


def test_calls_in_no_sync_leave_local_gradients_that_a_later_call_reduces(pool2: Any) -> None:
    for counts, first, last in pool2.run(accumulation_over_calls):
        assert counts == (0, 1)
        assert (first, last) == (2, 1)  # outside of no_sync it is another graph


def buckets(layers: int, width: int, settings: dict[str, Any], ignored: list[str]) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapper = DistributedDataParallel(model, **settings)
    opt = torch.optim.SGD(wrapper.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        wrapper(x).sum().backward()
        opt.step()
        opt.zero_grad()

    compiled = ws.compile(step, fullgraph=True)
    compiled(torch.ones(2, width))
    return reductions(compiled)


@pytest.mark.parametrize(
    ("settings", "ignored", "count"),
    [
        ({"bucket_cap_mb": 0.25}, [], 4),
        ({"bucket_cap_mb": 0.5}, [], 2),
        ({"bucket_cap_mb": 250}, [], 1),
        ({"bucket_cap_mb": 0.25}, ["0.weight", "0.bias"], 3),
    ],
)
def test_buckets_are_those_of_the_wrapper(pool2: Any, settings: dict[str, Any], ignored: list[str], count: int) -> None:
    """Four layers of 256 KiB each."""
    assert pool2.run(buckets, 4, 256, settings, ignored) == [count, count]


def ignored_parameters() -> None:
    model = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["3.weight"])
    compiled = trained(train, model)
    inner = compiled.program().inputs
    assert any(one.name == "3.weight" for one in inner)


def test_ignored_parameters_stay_local(pool2: Any) -> None:
    pool2.run(ignored_parameters)


def plain_scale_beside() -> None:
    """A parameter outside of the wrapper: its gradient is local in eager code."""

    def make() -> tuple[Any, nn.Parameter, Any]:
        module = DistributedDataParallel(net())
        scale = nn.Parameter(torch.ones(4))
        return module, scale, torch.optim.SGD([*module.parameters(), scale], lr=0.1)

    def step(module: Any, scale: Tensor, opt: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(module(x) * scale, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    eager, ours, compiled = make(), make(), ws.compile(step, fullgraph=True)
    for x, y in batches():
        assert torch.equal(step(*eager, x, y), compiled(*ours, x, y))
    assert torch.equal(eager[1], ours[1])


def test_what_is_in_no_wrapper_stays_local(pool2: Any) -> None:
    pool2.run(plain_scale_beside)


def mean_hook(state, bucket):  # type: ignore[no-untyped-def] # DistributedDataParallel wants its own class or none
    flat = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])


def halving_hook(state, bucket):  # type: ignore[no-untyped-def]
    for grad in bucket.gradients():
        grad.mul_(0.5)
    return mean_hook(state, bucket)


class Counter:
    """What a hook counts in."""

    def __init__(self) -> None:
        self.buckets: list[tuple[int, bool]] = []


def counting_hook(state, bucket):  # type: ignore[no-untyped-def]
    state.buckets.append((bucket.index(), bucket.is_last()))
    return mean_hook(None, bucket)


HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "builtin_fp16": lambda: (dist.BuiltinCommHookType.FP16_COMPRESS, None),
    "builtin_allreduce": lambda: (dist.BuiltinCommHookType.ALLREDUCE, None),
    "wrapped": lambda: (None, default_hooks.fp16_compress_wrapper(mean_hook)),
    "own": lambda: (None, mean_hook),
    "gradients": lambda: (None, halving_hook),
    "stateful": lambda: (Counter(), counting_hook),
    "powersgd": lambda: (
        powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    ),
    "powersgd_in_fp16": lambda: (
        powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
}  # fmt: skip


def with_hook(name: str) -> tuple[list[str], list[Any]]:
    made = []
    for _ in range(2):
        # One bucket for PowerSGD: of several, its futures start collectives in another order on each rank.
        module, opt = wrapped(net(64), bucket_cap_mb=25 if "powersgd" in name else 0.001)
        state, hook = HOOKS[name]()
        if hook is None:
            module._register_builtin_comm_hook(state)
        else:
            module.register_comm_hook(state, hook)
        made.append((module, opt, state))
    (*eager, _), (*ours, state) = made
    compiled = ws.compile(train, fullgraph=True)
    for number, (x, y) in enumerate(batches()):
        assert torch.equal(train(*eager, x, y), compiled(*ours, x, y)), number
    expect_equal(eager[0], ours[0])
    notes = [note for one in compiled.program().history for note in one.notes if "is reduced by" in note]
    counts = [one.buckets for one in (state,) if isinstance(one, Counter)]
    return notes, counts


@pytest.mark.parametrize("name", HOOKS)
def test_a_communication_hook_gives_the_numbers_of_eager_training(pool2: Any, name: str) -> None:
    for notes, counts in pool2.run(with_hook, name):
        if name in ("wrapped", "own", "gradients"):
            assert notes
            assert all("is part of the graph" in note for note in notes)
        if name in ("stateful", "powersgd_in_fp16"):
            assert notes
            assert all("called at every run, since it reads its state" in note for note in notes)
        for called in counts:
            num_buckets = len(called) // NUM_STEPS
            assert num_buckets == len(notes) > 1
            assert called == [(index, index == num_buckets - 1) for index in range(num_buckets)] * NUM_STEPS


def wrong_hook() -> None:
    module, opt = wrapped(net())
    module.register_comm_hook(None, lambda state, bucket: bucket.buffer()[:3])
    x, y = batches(1)[0]
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ws.ConfigError, match=r"has to give a tensor of \d+ elements"):
        ws.compile(train)(module, opt, x, y)
    for name, one in module.state_dict().items():
        assert torch.equal(one, before[name])


def test_a_hook_that_gives_something_else_is_an_error(pool2: Any) -> None:
    pool2.run(wrong_hook)


READ: list[float] = []


def reading(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    """A live step: its Python reads the loss between the micro-batches."""
    with model.no_sync():
        loss = nn.functional.cross_entropy(model(x[:3]), y[:3])
        loss.backward()
    READ.append(loss.item())
    return train(model, opt, x[3:], y[3:])


def live() -> int:
    compiled = trained(reading, net(), eager_at=3, broadcast_buffers=False)
    assert compiled._live is not None
    return compiled._live.stats.launches


def test_a_live_step_reduces_as_the_wrapper_does(pool2: Any) -> None:
    assert all(launches > 0 for launches in pool2.run(live))


def on_two_threads() -> tuple[bool, bool]:
    """Whether a forward was the wrapper's own: on the thread that traces, and on another one meanwhile."""
    module = DistributedDataParallel(net())
    x, _ = batches(1)[0]
    with silent_forwards(frozenset()):
        module(x)
        here = module._lazy_init_ran
        thread = threading.Thread(target=module, args=(x,))
        thread.start()
        thread.join()
    return here, module._lazy_init_ran


def test_forwards_of_other_threads_are_those_of_the_wrapper(pool2: Any) -> None:
    assert pool2.run(on_two_threads) == [(False, True)] * 2


def subgroup() -> bool:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    compiled = trained(train, net(), process_group=groups[dist.get_rank() // 2])
    return "size=2" in compiled.plan


def test_the_group_of_the_wrapper_is_reduced_over(pool4: Any) -> None:
    assert pool4.run(subgroup) == [True] * 4


def two_wrappers(settings: dict[str, Any]) -> None:
    first, second = wrapped(net()), wrapped(net(), **settings)

    def step(x: Tensor, y: Tensor) -> None:
        train(*first, x, y)
        train(*second, x, y)

    ws.compile(step, fullgraph=True)(*batches(1)[0])


def refusals() -> None:
    x, y = batches(1)[0]
    module, opt = wrapped(net())
    with pytest.raises(ws.ConfigError, match=r"too\. Leave strategy out"):
        ws.compile(train, strategy=ws.DDP())(module, opt, x, y)
    two_wrappers({})
    with pytest.raises(ws.CaptureError, match="with other settings"):
        two_wrappers({"bucket_cap_mb": 1})


def test_what_contradicts_is_refused_by_name(pool2: Any) -> None:
    pool2.run(refusals)


def joined(starts_outside: bool) -> str:
    """Ranks with other numbers of batches."""
    eager, ours, compiled = wrapped(net()), wrapped(net()), ws.compile(train)
    mine = batches(4 - dist.get_rank())
    for (module, opt), step in ((eager, train), (ours, compiled)):
        if starts_outside:
            step(module, opt, *mine[0])
        with module.join():
            for x, y in mine:
                step(module, opt, x, y)
    expect_equal(eager[0], ours[0])
    return str(compiled.explain())


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("starts_outside", [False, True])
def test_a_step_inside_of_join_is_eager_code(pool2: Any, starts_outside: bool, may_go_live: bool) -> None:
    for explained in pool2.run(joined, starts_outside):
        assert "inside of join()" in explained


def as_its_wrappers_do() -> str:
    """Two wrappers that communicate in different ways."""
    found, compiled = [], None
    for make in (lambda step: step, ws.compile):
        first, second = wrapped(net()), wrapped(net(), bucket_cap_mb=1)

        def step(x: Tensor, y: Tensor, first: Any = first, second: Any = second) -> None:
            train(*first, x, y)
            train(*second, x, y)

        compiled = make(step)
        for x, y in batches():
            compiled(x, y)
        found.append([first[0], second[0]])
    for eager, ours in zip(*found, strict=True):
        expect_equal(eager, ours)
    assert compiled is not None
    return str(compiled.explain())


@pytest.mark.parametrize("may_go_live", [True])
def test_settings_that_no_graph_keeps_are_kept_by_eager_code(pool2: Any, may_go_live: bool) -> None:
    for explained in pool2.run(as_its_wrappers_do):
        assert "It runs as eager code, and its modules communicate" in " ".join(explained.split())
