"""What a call costs to find its trace among many, and with one.

    python -m benchmarks.wrapped_loops.many_traces
    python -m benchmarks.wrapped_loops.many_traces --traces 4 64 --json

One process, one thread, one Linear(4, 4) trained on two rows; `dynamic=False`, so that each size is a trace. Steps with
one trace and with many are called by turns. "in turn" calls with another size each time, so that no call is as the one
before; "again" calls each size ten times. Microseconds per call beyond a step with one trace, medians of blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import wholestep as ws

BLOCKS, AGAIN = 60, 10


def made_step() -> Callable[[torch.Tensor], Any]:
    """A small training step of its own model."""
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)

    @ws.compile(backend="eager", dynamic=False, max_retraces=1000)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def us_per_call(step: Callable[[torch.Tensor], Any], batches: list[torch.Tensor]) -> float:
    """Of one block of calls."""
    start = time.perf_counter_ns()
    for batch in batches:
        step(batch)
    return (time.perf_counter_ns() - start) / len(batches) / 1000


def measured(traces: int) -> dict[str, float]:
    """Medians for a step with so many traces, and for one with one."""
    one, many = made_step(), made_step()
    sizes = [torch.randn(2 + number, 4) for number in range(traces)]
    in_turn = sizes * AGAIN
    again = [batch for batch in sizes for _ in range(AGAIN)]
    same = [sizes[0]] * len(in_turn)
    for _ in range(3):
        us_per_call(one, same)
        us_per_call(many, in_turn)
    rows = [(us_per_call(one, same), us_per_call(many, in_turn), us_per_call(many, again)) for _ in range(BLOCKS)]
    single, turn, repeated = (statistics.median(row[column] for row in rows) for column in range(3))
    return {"traces": traces, "one_us": single, "in_turn_us": turn - single, "again_us": repeated - single}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, nargs="+", default=[2, 16, 64], help="how many traces")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [measured(count) for count in options.traces]
    if options.json:
        print(json.dumps(found))
        return
    table = Table("traces", "one trace (us)", "in turn (us more)", "again (us more)")
    for row in found:
        table.add_row(str(row["traces"]), *(f"{row[name]:.1f}" for name in ("one_us", "in_turn_us", "again_us")))
    Console().print(table)


if __name__ == "__main__":
    main()
