"""Micro-benchmark of collectives from 1 KiB to 64 MiB, alone and next to compute."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from wholestep.cost.calibration.outliers import LATENCY_FACTOR, Points, curve_of, in_doubt, quickest, shows_rate, sweep
from wholestep.cost.link_model import OPS, Links
from wholestep.errors import ConfigError
from wholestep.ir.ops.collectives import group_named
from wholestep.ir.printer import bytes_text

c10d = torch.ops._c10d_functional
log = logging.getLogger("wholestep")

BUDGET_US = 6e4
"""What the calls of one operation at one size may take together."""
FEWEST_CALLS, MOST_CALLS = 3, 30
"""Of one operation at one size; of three the median leaves out one that was disturbed."""
OVERLAP_BYTES = {"cpu": 2**24, "cuda": 2**28}
"""Message of the probe of compute and communication at the same time: large beside what ranks start apart."""
ROUNDS, BETWEEN, PRODUCTS_BETWEEN = 9, 8, 6
"""How often the price of a collective is measured, over how many, and the products from one to the next."""
LARGEST_SLOWDOWN = 10.0
"""Compute and a collective that share a machine take turns at worst; beyond this something else has had it."""
_OVERLAP_DOUBTS = (
    "the start of a collective took {:,.0f} us",
    "compute beside a collective took {:.1f} times as long",
    "a collective beside compute took {:.1f} times as long",
)
"""What is measured of compute and communication at the same time, in words."""
BLOCKING_PRODUCTS = 20
"""Products that keep a GPU busy until the host has launched all that is to be timed."""

Call = Callable[[], torch.Tensor]


def probe_links(
    group: str,
    device: torch.device,
    sizes_bytes: Sequence[int],
    *,
    usual: Links,
    report: Callable[[str], None] = lambda what: None,
) -> tuple[Links, str]:
    """Measures the process group of that name; every rank of it must call. All ranks get the same numbers.

    Args:
        group: the name of the group, as functional collectives write it.
        device: where the messages are.
        sizes_bytes: sizes of messages, rising; fewer are taken on a slow link.
        usual: what such links take by the defaults; what takes many times that is measured again.
        report: called with the name of each measurement.

    Returns:
        The links, and in words what of them is in doubt, if anything (note *stalls*); it is in the log of rank 0, too.

    Raises:
        ConfigError: the group has one rank only, which has nobody to talk to.
    """
    ranks = dist.get_world_size(group_named(group))
    if ranks < 2:
        raise ConfigError("Links are measured between at least 2 ranks, and this group has one.")
    clock = _Clock(group, device)

    def measure(op: str, num_bytes: int) -> float:
        report(f"{op}, {bytes_text(num_bytes)}")
        return clock.us(_call(op, num_bytes, group, device))

    def with_compute() -> Sequence[float]:
        report("communication beside compute")
        small = _call("all_reduce", sizes_bytes[0], group, device)
        return _launch_us(clock, small), *_slowdowns(clock, min(OVERLAP_BYTES[device.type], 4 * sizes_bytes[-1]))

    latencies_us = {op: usual.us(op, sizes_bytes[0], ranks) for op in OPS}
    found = sweep(measure, sizes_bytes, latencies_us)
    limits = (LATENCY_FACTOR * usual.launch_us, LARGEST_SLOWDOWN, LARGEST_SLOWDOWN)
    launch_us, compute, collective = numbers = quickest(with_compute, limits)
    tables = {op: {ranks: curve_of(points, partial(usual.us, op, ranks=ranks))} for op, points in found.items()}
    links = Links(tables=tables, launch_us=launch_us, compute_slowdown=compute, collective_slowdown=collective)
    doubts = [
        text.format(one) for text, one, limit in zip(_OVERLAP_DOUBTS, numbers, limits, strict=True) if one > limit
    ]
    doubt = _in_one_line([*_doubts(found, latencies_us), *doubts])
    if doubt and dist.get_rank(group_named(group)) == 0:
        log.warning("the calibration of links is in doubt: %s", doubt)
    return links, doubt


def _doubts(found: Mapping[str, Points], latencies_us: Mapping[str, float]) -> Iterator[str]:
    """What is in doubt about the times of the operations, in words."""
    for op, points in found.items():
        for size in in_doubt(points, latencies_us[op]):
            yield f"{op} of {bytes_text(size)} took {points[size]:,.0f} us"
        if not shows_rate(points):
            yield f"{op} of more than {bytes_text(max(points))} is as the defaults say"


def _in_one_line(doubts: Sequence[str]) -> str:
    """The first of the doubts, and what to do about them; empty where there are none."""
    more = f" and {len(doubts) - 1} more like it" if len(doubts) > 1 else ""
    return f"{doubts[0]}{more}; calibrate again when nothing else runs" if doubts else ""


def _call(op: str, num_bytes: int, group: str, device: torch.device) -> Call:
    """Starts the collective `op` with a message of about `num_bytes` in all."""
    ranks = dist.get_world_size(group_named(group))
    length = max(1, num_bytes // 4 // ranks)
    part, whole, gathered = (torch.zeros(size, device=device) for size in (length, length * ranks, length * ranks))
    splits = [length] * ranks
    # Into a tensor, as the functional gather breaks memory under gloo: decision 157.
    calls: dict[str, Call] = {
        "all_reduce": lambda: c10d.all_reduce_.default(whole, "sum", group),
        "all_gather": lambda: c10d.all_gather_into_tensor_out.default(part, ranks, group, out=gathered),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor.default(whole, "sum", ranks, group),
        "broadcast": lambda: c10d.broadcast_.default(whole, 0, group),
        "all_to_all": lambda: c10d.all_to_all_single.default(whole, splits, splits, group),
    }
    return calls[op]


class _Clock:
    """Times that all ranks of a group agree on: the slowest rank's."""

    def __init__(self, group: str, device: torch.device) -> None:
        rows, dtype = (192, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
        self.group = group
        self.device = device
        self.matrix = torch.ones(rows, rows, device=device, dtype=dtype) / rows

    def us(self, call: Call) -> float:
        """Time of one collective from its start to its end, typical of several."""
        self._each_us(call, 1)  # connections are made, buffers registered
        first_us = self.slowest(self._each_us(call, 1))
        return self.slowest(self._each_us(call, max(FEWEST_CALLS, min(MOST_CALLS, int(BUDGET_US / first_us)))))

    def slowest(self, us: float) -> float:
        """The largest of what the ranks measured. After it all ranks go on at once."""
        found = torch.tensor([us], dtype=torch.float64, device=self.device)
        return float(c10d.wait_tensor.default(c10d.all_reduce.default(found, "max", self.group)))

    def multiply(self, count: int) -> None:
        """Gives the device `count` products to compute."""
        for _ in range(count):
            self.matrix.mm(self.matrix)

    def finish(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _each_us(self, call: Call, count: int) -> float:
        """Time of one of `count` calls, each waited for before the next. On a GPU the host runs ahead of them."""
        if self.device.type == "cuda":
            self.multiply(BLOCKING_PRODUCTS)
            start = _event()
            for _ in range(count):
                c10d.wait_tensor.default(call())
            return _us_between(start, _event()) / count
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            c10d.wait_tensor.default(call())
            times.append(1e6 * (time.perf_counter() - begin))
        return _median(times)


def _median(times: Sequence[float]) -> float:
    """A collective waits for its slowest rank, and so do those of a step: what disturbs one of them is no noise."""
    return sorted(times)[len(times) // 2]


def _event() -> torch.cuda.Event:
    """The current place of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _us_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def _launch_us(clock: _Clock, call: Call) -> float:
    """What one collective more costs the computation, however short it is.

    On a GPU the time of the host for its start and its wait, which comes back at once. On the CPU the threads of the
    backend need a core, which the ranks have: so small messages are sent between pieces of computation, and what those
    take longer for it is the price.
    """
    times = []
    if clock.device.type == "cuda":
        for _ in range(MOST_CALLS):
            start = time.perf_counter()
            c10d.wait_tensor.default(call())
            times.append(1e6 * (time.perf_counter() - start))
            clock.finish()
        return clock.slowest(_median(times))
    for _ in range(ROUNDS):
        clock.slowest(0.0)
        start = time.perf_counter()
        clock.multiply(BETWEEN * PRODUCTS_BETWEEN)
        alone_s = time.perf_counter() - start
        clock.slowest(0.0)
        start = time.perf_counter()
        for _ in range(BETWEEN):
            result = call()
            clock.multiply(PRODUCTS_BETWEEN)
            c10d.wait_tensor.default(result)
        times.append(1e6 * (time.perf_counter() - start - alone_s) / BETWEEN)
    return clock.slowest(max(0.0, _median(times)))


def _slowdowns(clock: _Clock, num_bytes: int) -> tuple[float, float]:
    """Factors on the time of compute, and of a collective, while the other runs. At least 1 each."""
    message = torch.zeros(num_bytes // 4, device=clock.device)
    alone_us = clock.us(lambda: c10d.all_reduce_.default(message, "sum", clock.group))
    overlap = _overlap_on_cpu if clock.device.type == "cpu" else _overlap_on_gpu
    found = [overlap(clock, message, alone_us) for _ in range(5)]
    compute, collective = (clock.slowest(_median(one)) for one in zip(*found, strict=True))
    return max(1.0, compute), max(1.0, collective)


def _overlap_on_cpu(clock: _Clock, message: torch.Tensor, alone_us: float) -> tuple[float, float]:
    """Products until the collective has ended; how long they take and it takes, against either alone."""
    clock.slowest(0.0)
    start = time.perf_counter()
    clock.multiply(20)
    product_us = 1e6 * (time.perf_counter() - start) / 20
    clock.slowest(0.0)
    start, done = time.perf_counter(), 0
    work = dist.all_reduce(message, group=group_named(clock.group), async_op=True)
    while not work.is_completed():
        clock.multiply(1)
        done += 1
    flight_us = 1e6 * (time.perf_counter() - start)
    work.wait()
    return flight_us / (max(1, done) * product_us), flight_us / alone_us


def _overlap_on_gpu(clock: _Clock, message: torch.Tensor, alone_us: float) -> tuple[float, float]:
    """Products beside the collective and beyond it: what they take longer than alone was lost beside it."""
    clock.slowest(0.0)
    clock.multiply(BLOCKING_PRODUCTS)
    start = _event()
    clock.multiply(5)
    product_us = _us_between(start, _event()) / 5
    count = math.ceil(2 * alone_us / product_us) + 1
    clock.slowest(0.0)
    clock.multiply(BLOCKING_PRODUCTS)
    start = _event()
    work = dist.all_reduce(message, group=group_named(clock.group), async_op=True)
    with torch.cuda.stream(torch.cuda.Stream(clock.device)):
        work.wait()
        landed = _event()
    clock.multiply(count)
    ended = _event()
    flight_us, busy_us = _us_between(start, landed), _us_between(start, ended)
    useful_us = flight_us - max(0.0, busy_us - count * product_us)
    return flight_us / max(useful_us, 0.1 * flight_us), flight_us / alone_us
