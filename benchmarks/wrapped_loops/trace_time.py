"""How long a trace takes whose sizes are symbols, beside one of constants.

    python -m benchmarks.wrapped_loops.trace_time
    python -m benchmarks.wrapped_loops.trace_time --layers 2 --runs 3

One process on the CPU, one thread: a GPT of width 64 with clipping and AdamW, traced by turns. Seconds, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks.wrapped_loops.measure import make_step
from wholestep.capture.capture import capture
from wholestep.capture.reach.arguments import marked_sizes
from wholestep.cli.workloads.reference_lm import LanguageModelSize, build


def seconds(step: Any, batch: tuple[Any, ...], dynamic: bool) -> float:
    """Of one trace."""
    start = time.perf_counter()
    capture(step, batch, {}, marked_sizes(batch, {}, dynamic)).undo()
    return time.perf_counter() - start


def main() -> None:
    """Prints three figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = LanguageModelSize(num_layers=options.layers, width=64, num_heads=4, vocabulary=128, length=32, rows=4)
    model = build(size, torch.device("cpu"))
    step = make_step(model, torch.optim.AdamW(model.parameters()), casts=False)
    batch = tuple(torch.randint(size.vocabulary, (size.rows, size.length)) for _ in range(2))
    step(*batch)  # the optimizer's state is there, as in later traces
    times = [(seconds(step, batch, dynamic=False), seconds(step, batch, dynamic=True)) for _ in range(options.runs + 1)]
    constant, symbolic = (statistics.median(one) for one in zip(*times[1:], strict=True))
    print(f"constants {constant:.2f} s, symbols {symbolic:.2f} s, ratio {symbolic / constant:.2f}")


if __name__ == "__main__":
    main()
