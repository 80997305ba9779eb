"""The bench on two ranks: however long a rank takes, all run the same number of steps."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.harness.rank_pools import Pool
from wholestep.cli.bench import BLOCK_STEPS, FIRST_BLOCKS, MOST_STEPS, _remaining_steps
from wholestep.cli.workloads.interleaved import Contender, ContenderKind
from wholestep.runtime.distributed import world


def steps_left(seconds: float, times_ms: list[float]) -> int:
    """What rank 0 decides, whose steps take so long; those of the others take ten times as long."""
    here = world.init()
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    contender = Contender(
        kind=ContenderKind.EAGER_DDP, step=module, module=module, model=module, optimizer=optimizer,
        scheduler=LambdaLR(optimizer, lambda done: 1.0), times_ms=[(1 + 9 * here.rank) * ms for ms in times_ms],
    )  # fmt: skip
    return _remaining_steps(seconds, [contender, contender], here)


def test_the_time_that_is_left_is_filled_with_the_same_steps_on_every_rank(ranks2: Pool) -> None:
    times_ms = [5000.0, 4.0, 5.0, 6.0]  # a first call is no typical one: two contenders of 5.5 ms
    assert ranks2.run(steps_left, 2.2, times_ms) == [200 - FIRST_BLOCKS * BLOCK_STEPS] * 2
    assert ranks2.run(steps_left, 0.1, times_ms) == [0, 0]
    assert ranks2.run(steps_left, 1e9, times_ms) == [MOST_STEPS - FIRST_BLOCKS * BLOCK_STEPS] * 2
