"""Time of collectives: a table of measured (bytes, us) per operation and number of ranks.

[Note: from one number of ranks to another]
A collective costs a latency and a transfer. What is measured on m ranks is split in the two: the time of the smallest
message is latency, what a larger one takes beyond it is transfer. Latency grows with the number of rounds of the
algorithms for short messages (recursive doubling and binomial trees: log2 n; pairwise exchange: n - 1), the transfer
with the bytes that the busiest link carries in those for long ones (ring: (n - 1)/n of the message per pass; two passes
in an all-reduce). Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
2005; the same factors turn algorithm bandwidth into bus bandwidth in the NCCL tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from wholestep.cost.curve import Curve, straight
from wholestep.errors import ConfigError

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
"""Collectives with a time of their own."""

_TRANSFER: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}
"""Bytes that the busiest link carries, as a share of the message."""

COPIES_GAIN = 1.22
"""Bytes that copy engines carry in the time in which NCCL carries one: 345 GB/s each way against 282 between H200s."""
COPIES_US, ROUND_US = 50.0, 9.0
"""What a reduction by copies takes besides, and each of its 2 (n - 1) rounds: meetings, and gaps between copies."""
COPIES_COMPUTE_SLOWDOWN, COPIES_SLOWDOWN = 1.25, 1.1
"""Beside products: they share memory, and no multiprocessors."""

_ROUNDS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": math.log2,
    "all_gather": math.log2,
    "reduce_scatter": math.log2,
    "broadcast": math.log2,
    "all_to_all": lambda n: n - 1.0,
}
"""Rounds of a short message, up to a constant factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Times of collectives over one kind of link."""

    tables: Mapping[str, Mapping[int, Curve]]
    """Operation -> number of ranks -> us by bytes. "all_reduce" must be there; an operation without a table is taken
    to be as fast as an all-reduce, less what its algorithm saves."""
    launch_us: float
    """What one collective costs, however short it is: on a GPU time of the host, to start it and to let the stream wait
    for it; on the CPU time of the computation, as the threads of the backend need the cores that ranks compute on."""
    compute_slowdown: float = 1.0
    """Factor on the time of compute while a collective is in flight: they share cores or memory. At least 1."""
    collective_slowdown: float = 1.0
    """Factor on the time of a collective while compute runs. At least 1."""

    def __post_init__(self) -> None:
        if not self.tables.get("all_reduce"):
            raise ConfigError(f'Links want at least one table of "all_reduce", got those of {sorted(self.tables)}.')
        if not (self.launch_us >= 0 and self.compute_slowdown >= 1 and self.collective_slowdown >= 1):
            raise ConfigError(f"Links want launch_us of at least 0 and slowdowns of at least 1, got {self!r}.")
        for op, by_ranks in self.tables.items():
            if op not in OPS or not by_ranks or min(by_ranks) < 2:
                raise ConfigError(
                    f"Links want tables of {', '.join(OPS)} on 2 ranks or more, got {op!r}: {by_ranks!r}."
                )

    def us(self, op: str, num_bytes: int, ranks: int) -> float:
        """Microseconds from the start of a collective to its end, all ranks starting at once.

        Args:
            op: one of `OPS`.
            num_bytes: bytes of the whole message: the tensor that is reduced or broadcast, the gathered result, the
                input of a reduce-scatter or an all-to-all.
            ranks: size of the group. One rank has nobody to talk to: 0.0.

        Raises:
            ConfigError: an operation that is not in `OPS`.
        """
        if op not in OPS:
            raise ConfigError(f"The time of a collective is known for {', '.join(OPS)}, and was asked for {op!r}.")
        if ranks < 2:
            return 0.0
        known = op if op in self.tables else "all_reduce"
        by_ranks = self.tables[known]
        # The closest by ratio; of two that are equally far the smaller.
        nearest = min(sorted(by_ranks), key=lambda n: abs(math.log(n / ranks)))
        curve = by_ranks[nearest]
        latency_us, whole_us = curve.floor_us, curve.us(num_bytes)
        rounds = _ROUNDS[op](ranks) / _ROUNDS[known](nearest)
        transfer = _TRANSFER[op](ranks) / _TRANSFER[known](nearest)
        return latency_us * rounds + (whole_us - latency_us) * transfer


def with_copies(links: Links, *, ranks: int, least_bytes: int) -> Links:
    """The same links where copy engines reduce messages of `least_bytes` and more of `ranks` ranks.

    The constants are of two and four H200s; others are taken to gain as much over their NCCL. The step up at
    `least_bytes` is that of the meetings, which NCCL does not need.
    """
    latency_us = links.us("all_reduce", 1, ranks)

    def us(num_bytes: int) -> float:
        nccl_us = links.us("all_reduce", num_bytes, ranks)
        if num_bytes < least_bytes:
            return nccl_us
        return COPIES_US + ROUND_US * 2 * (ranks - 1) + (nccl_us - latency_us) / COPIES_GAIN

    sizes = [least_bytes * 2**power for power in range(-12, 9)]
    times_us = accumulate(map(us, sizes), max)
    points = tuple((float(size), one_us) for size, one_us in zip(sizes, times_us, strict=True))
    table = {**links.tables["all_reduce"], ranks: Curve(points=points)}
    return replace(
        links, tables={**links.tables, "all_reduce": table}, compute_slowdown=COPIES_COMPUTE_SLOWDOWN,
        collective_slowdown=COPIES_SLOWDOWN,
    )  # fmt: skip


def uniform(
    *, latency_us: float, bus_bytes_per_us: float, launch_us: float, ranks: int = 2, slowdown: float = 1.0
) -> Links:
    """Links described by two numbers: the latency of a collective on `ranks` ranks, and the bus bandwidth."""
    tables = {
        op: {ranks: straight(floor_us=latency_us, per_us=bus_bytes_per_us / factor(ranks), largest=2**33)}
        for op, factor in _TRANSFER.items()
    }
    return Links(tables=tables, launch_us=launch_us, compute_slowdown=slowdown, collective_slowdown=slowdown)
