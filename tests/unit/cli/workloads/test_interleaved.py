"""Fair turns, honest times, and the schedule; what a contender computes is tested by the demo itself."""

import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from wholestep.cli.workloads import interleaved
from wholestep.cli.workloads.interleaved import (
    Batch,
    Contender,
    ContenderKind,
    compiled_step,
    largest_difference,
    ratio,
    run_interleaved,
    timing,
    warmup_cosine,
)
from wholestep.errors import InternalError


def make_contender(kind: ContenderKind, seen: list[tuple[ContenderKind, int]]) -> Contender:
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        seen.append((kind, int(x)))
        optimizer.step()
        return x + y

    scheduler = LambdaLR(optimizer, lambda done: 1 / (done + 1))
    return Contender(kind=kind, step=step, module=module, model=module, optimizer=optimizer, scheduler=scheduler)


def make_batches(number: int) -> list[Batch]:
    return [(torch.tensor(float(i)), torch.tensor(0.5)) for i in range(number)]


def test_contenders_take_turns_that_reverse_and_see_the_same_batches() -> None:
    seen: list[tuple[ContenderKind, int]] = []
    one, other = make_contender(ContenderKind.WHOLESTEP, seen), make_contender(ContenderKind.EAGER_DDP, seen)
    run_interleaved([one, other], make_batches(5), block_steps=2)
    groups = itertools.groupby(seen, key=lambda pair: pair[0])
    turns = [(kind, [number for _, number in group]) for kind, group in groups]
    assert turns == [
        (ContenderKind.WHOLESTEP, [0, 1]),
        (ContenderKind.EAGER_DDP, [0, 1, 2, 3]),  # the end of one turn and the start of the next
        (ContenderKind.WHOLESTEP, [2, 3, 4]),
        (ContenderKind.EAGER_DDP, [4]),
    ]
    assert one.losses == other.losses == [0.5, 1.5, 2.5, 3.5, 4.5]


def test_every_step_is_timed_and_the_schedule_moves_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(interleaved.time, "perf_counter", lambda: float(next(clock)))
    contender = make_contender(ContenderKind.EAGER_DDP, [])
    called: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_interleaved(
            [contender],
            make_batches(3),
            block_steps=10,
            on_step=lambda contender: called.append(len(contender.times_ms)),
        )
    assert contender.times_ms == [1000.0, 1000.0, 1000.0]
    assert called == [1, 2, 3]
    assert contender.optimizer.param_groups[0]["lr"] == pytest.approx(1 / 4)


def test_a_step_is_as_slow_as_its_slowest_rank() -> None:
    measured = timing([[900.0, 1.0, 5.0, 3.0], [100.0, 2.0, 4.0, 9.0]])
    assert measured.first_ms == 900.0
    assert measured.median_ms == 5.0  # of 2, 5, 9
    assert (measured.p10_ms, measured.p90_ms) == (2.0, 9.0)


def test_blocks_are_compared_side_by_side() -> None:
    """Steps of two ranks in blocks of two. The machine is twice as slow in the second block, for both contenders."""
    ours = [[900.0, 2.0, 4.0, 4.0, 2.0], [0.0, 1.0, 3.0, 3.0, 1.0]]
    eager = [[800.0, 3.0, 6.0, 6.0, 2.0], [0.0, 2.0, 5.0, 5.0, 4.0]]
    found = ratio(eager, ours, block_steps=2)
    assert (found.p10, found.median, found.p90) == (1.5, 1.5, 2.0)


def test_the_rate_climbs_to_the_peak_and_falls_to_the_floor() -> None:
    factors = [warmup_cosine(done, num_steps=100, warmup=0.1, floor=0.1) for done in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == pytest.approx(1.0)
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.1)
    assert 0 < warmup_cosine(0, num_steps=2) <= 1


def test_the_largest_difference_counts_buffers_too() -> None:
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    assert largest_difference(one, other) == 0.0
    with torch.no_grad():
        other.weight[1] += 0.25
    assert largest_difference(one, other) == 0.25
    other.running_mean += 2.0
    assert largest_difference(one, other) == 2.0


def test_an_eager_contender_has_no_compiled_step() -> None:
    with pytest.raises(InternalError, match="eager DDP"):
        compiled_step(make_contender(ContenderKind.EAGER_DDP, []))
