"""Training loops with a wrapped model as people have them, and the same loops with `ws.compile` around the step.

    python -m benchmarks.wrapped_loops                          # 2 ranks on the CPU, a small GPT
    python -m benchmarks.wrapped_loops --workload W1            # 2 GPUs, a reference training
    python -m benchmarks.wrapped_loops --float32                # without bfloat16, and losses beside those of float64
    python -m benchmarks.wrapped_loops --json

Of each wrapper: the loop in eager code, with the model under torch.compile, and as one compiled step. All take the same
50 batches by turns, a block each, in one run. A figure is the median of the steps after the first block, whose wall
time ends when the device is idle. Losses are compared with those of the eager loop. With --float32 each loop is also
compared with the same eager loop in float64: how far a loop is from that is its rounding, which a training amplifies.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from wholestep.cli.suite.workloads import draw_tokens
from wholestep.cli.workloads.reference_lm import REFERENCE, Block, LanguageModelSize, build

NUM_STEPS, BLOCK = 50, 10
SIZES = REFERENCE | {
    "small": LanguageModelSize(num_layers=4, width=128, num_heads=4, vocabulary=512, length=64, rows=2)
}
WAYS = ("eager", "torch.compile", "wholestep")
EXACT = "float64"
"""A way that is compared with, and not timed: the eager loop in float64."""


def wrapped(
    name: str, size: LanguageModelSize, device: torch.device, casts: bool, dtype: torch.dtype = torch.float32
) -> Any:
    """A model in one of the wrappers, the same on every rank. `casts`: it computes in bfloat16."""
    torch.manual_seed(0)
    model = build(size, device).to(dtype)
    if name == "ddp":
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if casts else MixedPrecisionPolicy()
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def make_step(model: Any, optimizer: torch.optim.Optimizer, casts: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of the loop. `casts`: under autocast, where the wrapper has no policy of its own."""

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=casts):
            loss: Tensor = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def contender(
    name: str, way: str, size: LanguageModelSize, device: torch.device, casts: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """One loop's step. Under torch.compile each block of a sharded model is compiled, as FSDP2's guide has it."""
    model = wrapped(name, size, device, casts, torch.float64 if way == EXACT else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    if way == "torch.compile" and name == "ddp":
        model = torch.compile(model)
    elif way == "torch.compile":
        for block in model.modules():
            if isinstance(block, Block):
                block.compile()
    step = make_step(model, optimizer, casts=name == "ddp" and casts)
    return ws.compile(step, fullgraph=True) if way == "wholestep" else step


def timed(step: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
    """Milliseconds of a step, and its loss."""
    start = time.perf_counter()
    loss = step(*batch)
    if batch[0].is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), loss


def largest_difference(losses: list[Tensor], others: list[Tensor]) -> float:
    """Of 0-d losses, step by step, in float64."""
    return float((torch.stack(losses).double() - torch.stack(others).double()).abs().max())


def measure(workload: str, ways: tuple[str, ...], float32: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Of each wrapper and way: median ms, and the largest difference of a loss from eager code, and from float64."""
    world = ws.init()
    casts = world.device.type == "cuda" and not float32
    ways += (EXACT,) if float32 else ()
    size = SIZES[workload]
    found: dict[str, dict[str, dict[str, float]]] = {}
    batch = tuple(one.to(world.device) for one in draw_tokens(size, world.rank))
    for name in ("ddp", "fsdp2"):
        steps = {way: contender(name, way, size, world.device, casts) for way in ways}
        times: dict[str, list[float]] = {way: [] for way in ways}
        losses: dict[str, list[Tensor]] = {way: [] for way in ways}
        for block in range(NUM_STEPS // BLOCK):
            for way in ways if block % 2 else reversed(ways):
                for _ in range(BLOCK):
                    ms, loss = timed(steps[way], batch)  # type: ignore[arg-type]
                    times[way] += [ms] if block else []
                    losses[way].append(loss)
        found[name] = {
            way: {
                "ms": statistics.median(times[way]),
                "difference": largest_difference(losses[way], losses["eager"]),
                **({"from_float64": largest_difference(losses[way], losses[EXACT])} if float32 else {}),
            }
            for way in ways
        }
        del steps
    return found


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(SIZES), default="small")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--float32", action="store_true", help="on GPUs, too (default: bfloat16 there)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    is_slow = not torch.cuda.is_available()  # Inductor needs minutes there
    ways = tuple(way for way in options.ways if not (is_slow and way == "torch.compile"))
    found = ws.run(functools.partial(measure, options.workload, ways, options.float32), options.nproc)[0]
    if options.json:
        print(json.dumps(found))
        return
    exact = ("largest difference from float64: " + ", ".join(ways),) if options.float32 else ()
    table = Table("loop", *(f"{way}, ms" for way in ways), "eager / wholestep", "largest difference of a loss", *exact)
    for name, rows in found.items():
        ratio = rows["eager"]["ms"] / rows["wholestep"]["ms"]
        cells = [f"{rows[way]['ms']:.2f}" for way in ways]
        rounding = (", ".join(f"{rows[way]['from_float64']:.1e}" for way in ways),) if options.float32 else ()
        table.add_row(name, *cells, f"{ratio:.2f}", f"{rows['wholestep']['difference']:.1e}", *rounding)
    Console().print(table)
