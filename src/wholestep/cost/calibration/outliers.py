"""Finds measured times that look like a stall of the machine, and measures them again.

[Note: stalls]
A calibration shares the machine with whatever else runs. While another process has the cores, the threads of gloo wait,
and 1 KiB may take as long as 64 MiB. In doubt is what no link does:

- the smallest message takes many times what the defaults say, which are orders of magnitude;
- a message takes much longer than the next smaller one does in proportion, though a latency and a rate make it shorter;
- a message takes much longer than the next larger one.

What is in doubt is measured again, a bounded number of times, and the quickest counts: a stall makes a message longer,
and never shorter. What stays in doubt is kept, and said. All ranks take part in a collective, so they must agree on
what is measured again: whoever measures here returns a time that ranks have exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from wholestep.cost.curve import Curve, fitted

REPEATS = 3
"""How often what is in doubt is measured again."""
LATENCY_FACTOR = 50.0
"""In doubt: the smallest message takes so many times what the defaults say. Where ranks outnumber cores it is 30."""
GROWTH_FACTOR = 4.0
"""In doubt: a message takes so many times what the smaller one does in proportion. Where a cache ends it is 2.5."""
FALL_FACTOR = 3.0
"""In doubt: a message takes so many times what the next larger one does."""
LONGEST_US = 2e5
"""No larger message is measured once one takes this long."""

Points = dict[int, float]
"""us by bytes."""


def sweep(
    measure: Callable[[str, int], float], sizes: Sequence[int], usual_us: Mapping[str, float]
) -> dict[str, Points]:
    """The times of messages of rising `sizes`, for every operation in `usual_us`; see the note *stalls*.

    Args:
        measure: us of an operation on so many bytes, the same on every rank.
        sizes: bytes, rising. Larger ones are left out once a message takes `LONGEST_US`.
        usual_us: what the smallest message takes by the defaults.
    """
    found: dict[str, Points] = {op: {} for op in usual_us}
    # Rounds over all operations: between two measurements of one message a stall has some time to end.
    for _ in range(1 + REPEATS):
        for op, points in found.items():
            doubtful = in_doubt(points, usual_us[op])
            for size in sizes:
                if size not in points or size in doubtful:
                    points[size] = min(measure(op, size), points.get(size, math.inf))
                if points[size] > LONGEST_US:
                    break
    return found


def in_doubt(points: Mapping[int, float], usual_us: float) -> list[int]:
    """The sizes whose times look like a stall; `usual_us` is what the smallest takes by the defaults."""
    sizes = sorted(points)
    found = {size for size in sizes[:1] if points[size] > LATENCY_FACTOR * usual_us}
    for small, large in pairwise(sizes):
        if points[large] > GROWTH_FACTOR * points[small] * large / small:
            found.add(large)
        if points[small] > FALL_FACTOR * points[large]:
            found.add(small)
    return sorted(found)


def quickest(measure: Callable[[], Sequence[float]], limits: Sequence[float]) -> Sequence[float]:
    """Several numbers that are measured at once: again while one is above its limit, and of each the least counts."""
    best = measure()
    for _ in range(REPEATS):
        if all(one <= limit for one, limit in zip(best, limits, strict=True)):
            break
        best = list(map(min, best, measure()))
    return best


def shows_rate(points: Mapping[int, float]) -> bool:
    """Whether the points say what more bytes cost.

    They do not where they span a factor of less than 64, or where the largest takes less than twice the quickest: then
    they are latencies, and the difference of two latencies is noise, over few bytes.
    """
    smallest, largest = min(points), max(points)
    return largest >= 64 * smallest and points[largest] >= 2 * min(points.values())


def curve_of(points: Mapping[int, float], like: Callable[[int], float]) -> Curve:
    """The curve through the points; where these say nothing of the rate, it goes on as `like` does.

    A sweep ends early on a link that is slow, and also in a stall. One point in proportion is then off without bound:
    200 ms for 1 KiB, nearly all of it latency, would make 10 minutes of 3 MiB. The defaults know the rate of such links
    to an order of magnitude, and the latency that was measured is kept.
    """
    if shows_rate(points):
        return fitted(points.items())
    last = max(points)
    further = (last * 4**power for power in range(1, 8))
    return fitted([*points.items(), *((size, points[last] + like(size) - like(last)) for size in further)])
