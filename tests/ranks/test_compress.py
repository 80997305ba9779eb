"""Compressed gradients on two ranks, against DistributedDataParallel with PyTorch's communication hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.harness.training import backward_and_step

pytestmark = pytest.mark.ranks

Batch = tuple[Tensor, Tensor]
ONE_BUCKET = 100 << 20
WIDTH, HIDDEN, CLASSES, ROWS = 12, 32, 10, 6
CAST_HOOKS = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}
OPTIONS = {
    "rank": "matrix_approximation_rank", "start_iter": "start_powerSGD_iter", "seed": "random_seed",
    "error_feedback": "use_error_feedback", "warm_start": "warm_start",
}  # fmt: skip
"""Our names and those of PyTorch."""

Weights = list[dict[str, Tensor]]
"""The parameters after every call."""


class Net(nn.Module):
    """A convolution, linear layers of which two have one shape, a norm; biases and small weights travel whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 8, 3, padding=1)
        self.up = nn.Linear(8 * WIDTH, HIDDEN)
        self.mid = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.twin = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(F.relu(self.conv(x)).flatten(1)))
        x = x + self.twin(self.norm(torch.tanh(self.mid(x))))
        return self.head(x)


def batches(calls: int, rows: Callable[[int], int] = lambda call: ROWS) -> Iterator[Batch]:
    """Different data on every rank."""
    draw = torch.Generator().manual_seed(100 + dist.get_rank())
    for call in range(calls):
        yield torch.randn(rows(call), 2, WIDTH, generator=draw), torch.randint(CLASSES, (rows(call),), generator=draw)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def compiled(*, loss_scale: float = 1.0, **options: Any) -> Any:
    @ws.compile(strategy=ws.DDP(**{"bucket_bytes": ONE_BUCKET, **options}), backend="eager", fullgraph=True)
    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(F.cross_entropy(model(x), y) * loss_scale, opt)

    return step


def hooked(data: Iterable[Batch], hook: Any, state: Any = None, bucket_bytes: int = ONE_BUCKET) -> Weights:
    """DistributedDataParallel with a communication hook."""

    def renamed(state, bucket):  # the one for bfloat16 is refused away from NCCL because of what it is called
        return hook(state, bucket)

    model, opt = make()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20)
    wrapped.register_comm_hook(state, renamed)
    seen = []
    for x, y in data:
        backward_and_step(F.cross_entropy(wrapped(x), y), opt)
        seen.append(weights(model))
    return seen


def by_the_hook(data: Iterable[Batch], **options: Any) -> Weights:
    state = powerSGD_hook.PowerSGDState(None, **{OPTIONS[name]: value for name, value in options.items()})
    return hooked(data, powerSGD_hook.powerSGD_hook, state)


def trained(data: Iterable[Batch], step: Any) -> Weights:
    model, opt = make()
    seen = []
    for x, y in data:
        step(model, opt, x, y)
        seen.append(weights(model))
    return seen


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def equal_calls(a: Weights, b: Weights) -> list[bool]:
    """Per call, whether all parameters are the same, bit by bit."""
    return [all(map(torch.equal, one.values(), other.values())) for one, other in zip(a, b, strict=True)]


def cast(dtype: torch.dtype) -> tuple[list[bool], bool]:
    found = trained(batches(5), compiled(compress=ws.CastCompress(dtype)))
    plain = hooked(batches(5), default_hooks.allreduce_hook)
    return equal_calls(found, hooked(batches(5), CAST_HOOKS[dtype])), any(equal_calls(found, plain))


@pytest.mark.parametrize("dtype", CAST_HOOKS, ids=str)
def test_a_cast_equals_the_hook_bit_by_bit(pool2: Any, dtype: torch.dtype) -> None:
    assert pool2.run(cast, dtype) == [([True] * 5, False)] * 2


def low_rank(options: dict[str, Any]) -> tuple[list[bool], list[bool]]:
    step = compiled(compress=ws.PowerSGD(**options))
    found = trained(batches(8), step)
    plain = hooked(batches(8), default_hooks.allreduce_hook)
    return equal_calls(found, by_the_hook(batches(8), **options)), equal_calls(found, plain)


@pytest.mark.parametrize(("error_feedback", "warm_start"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(("rank", "start_iter"), [(1, 2), (2, 3)])
def test_low_rank_equals_the_hook_bit_by_bit(
    pool2: Any, rank: int, start_iter: int, error_feedback: bool, warm_start: bool
) -> None:
    check_low_rank(
        pool2, rank=rank, start_iter=start_iter, error_feedback=error_feedback, warm_start=warm_start, seed=3
    )


def test_three_columns_and_more_are_made_orthogonal_by_qr(pool2: Any) -> None:
    check_low_rank(pool2, rank=4, start_iter=2)


def test_compression_without_memory_may_start_at_once(pool2: Any) -> None:
    # From the first call on, but for the one in which DistributedDataParallel has its buckets in another order.
    check_low_rank(pool2, rank=2, start_iter=1, error_feedback=False, warm_start=False)


def check_low_rank(pool: Any, *, start_iter: int, **options: Any) -> None:
    for to_hook, to_plain in pool.run(low_rank, {"start_iter": start_iter, **options}):
        assert to_hook == [True] * 8
        assert to_plain == [call < start_iter for call in range(8)]


def several_buckets(bucket_bytes: int) -> tuple[list[bool], list[bool], int]:
    """The cast, low rank whose factors are drawn at every call, and the number of buckets."""
    data, size = list(batches(5)), {"bucket_bytes": bucket_bytes}
    step = compiled(compress=ws.CastCompress(torch.bfloat16), **size)
    casts = equal_calls(trained(data, step), hooked(data, CAST_HOOKS[torch.bfloat16], **size))
    state = powerSGD_hook.PowerSGDState(None, 1, 2, warm_start=False)
    packed = trained(data, compiled(compress=ws.PowerSGD(rank=1, start_iter=2, warm_start=False), **size))
    return casts, equal_calls(packed, hooked(data, one_by_one, state, **size)), len(step.explain().collectives)


def one_by_one(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook, done before the next bucket starts: over gloo its messages of several buckets get mixed up."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(powerSGD_hook.powerSGD_hook(state, bucket).wait())
    return done


def test_several_buckets_are_compressed_as_the_hook_does_it(pool2: Any) -> None:
    assert pool2.run(several_buckets, 4096) == [([True] * 5, [True] * 5, 4)] * 2


def low_rank_of_sums() -> bool:
    """A loss divided by the number of ranks and gradients summed: the same numbers as a mean, as 2 is a power of 2."""
    how = ws.PowerSGD(rank=1, start_iter=2)
    total = trained(batches(5), compiled(compress=how, reduce="sum", loss_scale=0.5))
    return all(equal_calls(total, by_the_hook(batches(5), rank=1, start_iter=2)))


def test_sums_are_compressed_like_means(pool2: Any) -> None:
    assert pool2.run(low_rank_of_sums) == [True, True]


def two_halves(warm_start: bool) -> tuple[list[bool], list[str]]:
    """Seven calls, and the last three of them once more: built anew, gone back to, and without what was remembered."""
    options = {"rank": 2, "start_iter": 2, "warm_start": warm_start}
    data, (model, opt), step = list(batches(7)), make(), compiled(compress=ws.PowerSGD(**options))
    last = by_the_hook(data, **options)[-1]
    for batch in data[:4]:
        step(model, opt, *batch)
    kept = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict(), "step": step.state_dict()})
    for batch in data[4:]:
        step(model, opt, *batch)  # what is saved is not what goes on

    def resumed(again: Any, state: dict[str, Any]) -> bool:
        again.load_state_dict(state)
        model.load_state_dict(kept["model"])
        opt.load_state_dict(copy.deepcopy(kept["opt"]))
        for batch in data[4:]:
            again(model, opt, *batch)
        return all(map(torch.equal, weights(model).values(), last.values()))

    forgotten = {**kept["step"], "tensors": {}}
    new = compiled(compress=ws.PowerSGD(**options))
    return [resumed(new, kept["step"]), resumed(step, kept["step"]), resumed(step, forgotten)], list(
        kept["step"]["tensors"]
    )


@pytest.mark.parametrize("warm_start", [True, False], ids=["warm", "cold"])
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(pool2: Any, warm_start: bool) -> None:
    for same, names in pool2.run(two_halves, warm_start):
        assert same == [True, True, False]  # without the state of the step it is another training
        assert "powersgd.error.norm.weight" in names
        assert ("powersgd.q.twin.weight" in names) == warm_start


def smaller_last_batches() -> tuple[list[bool], int, int]:
    """Rank 1 has fewer rows in three calls, and captures again alone; another capture crosses the start of PowerSGD."""
    rank = dist.get_rank()

    def rows(call: int) -> int:
        return ROWS - 2 if rank and call in (1, 4, 5) else ROWS

    step = compiled(compress=ws.PowerSGD(rank=1, start_iter=3))
    found = trained(batches(8, rows), step)
    info = step.cache_info()
    return equal_calls(found, by_the_hook(batches(8, rows), rank=1, start_iter=3)), info.traces, info.hits


def test_a_retrace_keeps_the_state(pool2: Any) -> None:
    assert pool2.run(smaller_last_batches) == [([True] * 8, 1, 7), ([True] * 8, 2, 6)]


def failing_call(warm_start: bool) -> bool:
    """A call that fails leaves what compression remembers as it was, also where factors are drawn at every call."""
    options = {"rank": 1, "start_iter": 2, "warm_start": warm_start}
    data, (model, opt), step = list(batches(6)), make(), compiled(compress=ws.PowerSGD(**options))
    seen = []
    for call, (x, y) in enumerate(data):
        if call == 4:
            before = leaves(copy.deepcopy((step.state_dict(), model.state_dict())))
            with pytest.raises(IndexError):
                step(model, opt, x, torch.full_like(y, CLASSES))
            after = leaves((step.state_dict(), model.state_dict()))
            assert before.keys() == after.keys()
            assert all(same(one, after[name]) for name, one in before.items())
        step(model, opt, x, y)
        seen.append(weights(model))
    return all(equal_calls(seen, by_the_hook(data, **options)))


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, (dict, tuple)):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {name: leaf for key, one in items for name, leaf in leaves(one, f"{path}/{key}").items()}


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@pytest.mark.parametrize("warm_start", [True, False], ids=["warm", "cold"])
def test_an_error_leaves_the_state_as_it_was(pool2: Any, warm_start: bool) -> None:
    assert pool2.run(failing_call, warm_start) == [True] * 2


class Coarse:
    """A compressor as users write them: whole multiples of 1/64, in eight bits each."""

    def compress(self, flat: Tensor) -> Tensor:
        return (flat * 64).round().clamp(-60, 60).to(torch.int8)

    def decompress(self, wire: Tensor, size: int) -> Tensor:
        return wire.float()[:size] / 64


def coarse_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The same by hand, as a communication hook."""
    flat = bucket.buffer()
    wire = Coarse().compress(flat * (1 / dist.get_world_size()))
    done = dist.all_reduce(wire, async_op=True).get_future()
    return done.then(lambda future: Coarse().decompress(future.value()[0], flat.numel()))


def own_compressor() -> tuple[list[bool], str, int, int]:
    step = compiled(compress=Coarse())
    same_calls = equal_calls(trained(batches(4), step), hooked(batches(4), coarse_hook))
    (sent,) = step.explain().collectives
    return same_calls, sent.dtype, sent.num_bytes, step.explain().param_bytes


def test_a_compressor_of_ones_own_is_two_functions(pool2: Any) -> None:
    for same_calls, dtype, num_bytes, param_bytes in pool2.run(own_compressor):
        assert same_calls == [True] * 4
        assert (dtype, num_bytes) == ("int8", param_bytes // 4)


def what_it_tells() -> tuple[list[tuple[Any, ...]], list[str], str, str]:
    step = compiled(compress=ws.PowerSGD(rank=2, start_iter=2))
    data, (model, opt) = list(batches(3)), make()
    step(model, opt, *data[0])
    early = [note for line in step.explain().passes if line.name == "compress" for note in line.notes]
    for batch in data[1:]:
        step(model, opt, *batch)
    told = step.explain()
    sent = [(one.reason.split(";")[0], one.num_bytes, one.members) for one in told.collectives]
    late = [note for line in told.passes if line.name == "compress" for note in line.notes]
    return sent, early, late[0], step.plan


def test_explain_shows_what_travels(pool2: Any) -> None:
    sent, early, late, plan = pool2.run(what_it_tells)[0]
    whole, packed = (
        ("head.bias", "twin.bias", "norm.weight", "norm.bias", "up.bias", "conv.weight", "conv.bias"),
        ("head.weight", "twin.weight", "mid.weight", "up.weight"),
    )
    shapes = [tuple(param.shape) for name, param in Net().named_parameters() if name in packed]
    factors = {"P": sum(rows for rows, _ in shapes), "Q": sum(cols for _, cols in shapes)}
    assert {name: num_bytes for name, num_bytes, _ in sent[1:]} == {k: 4 * 2 * v for k, v in factors.items()}
    assert sorted(sent[0][2]) == sorted(whole)
    assert [sorted(members) for _, _, members in sent[1:]] == [sorted(packed)] * 2
    assert "the first 2 calls reduce gradients as they are; then PowerSGD of rank 2 takes 4 of 11 gradients" in early
    assert "travel for" in late
    assert "PowerSGD(rank=2" in plan
