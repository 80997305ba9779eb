"""Runs random programs compiled and as eager code, and tells what differs, with the smallest program that shows it.

    python -m benchmarks.random_programs --programs 10000
    python -m benchmarks.random_programs --first 4711 --programs 1 --json
    python -m benchmarks.random_programs --strategy fsdp          # on two gloo processes
    python -m benchmarks.random_programs --strategy wrapped_ddp   # a wrapped network, compared with itself

The exit status is 1 if a program differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import sys
import time
from collections import Counter

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.random_programs.judge import Verdict, judged, shrunk
from benchmarks.random_programs.on_ranks import STRATEGIES, Ranks, judged_under
from benchmarks.random_programs.program import random_program
from benchmarks.random_programs.wrapped import WRAPPERS


def main() -> int:
    """Prints counts and failures or, with `--json`, a record of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none later (default: no limit)")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first (default: %(default)s)")
    parser.add_argument(
        "--json", action="store_true", help="counts, and of each failure its seed, text and differences"
    )
    parser.add_argument("--keep-size", action="store_true", help="do not shrink what fails")
    parser.add_argument(
        "--strategy", choices=[*STRATEGIES, *WRAPPERS], help="train on two processes (default: on one, with none)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("wholestep").setLevel(logging.CRITICAL)
    counts: Counter[str] = Counter()
    failures: list[Verdict] = []
    end = time.monotonic() + options.seconds
    with Progress(console=Console(stderr=True)) as progress, contextlib.ExitStack() as ranks:
        judge = judged
        if options.strategy:
            judge = functools.partial(judged_under, ranks.enter_context(Ranks()), options.strategy)
        task = progress.add_task("training", total=options.programs)
        for seed in range(options.first, options.first + options.programs):
            if time.monotonic() > end:
                break
            found = judge(random_program(seed))
            counts[found.kind] += 1
            if not found.holds:
                failures.append(found if options.keep_size else shrunk(found, judge))
                print(f"seed {seed}: {found.complaints[0]}", file=sys.stderr, flush=True)
            progress.advance(task)
    if options.json:
        told = [
            {"seed": one.program.seed, "complaints": one.complaints[:5], "text": one.program.text} for one in failures
        ]
        print(json.dumps({"counts": dict(counts), "failures": told}, indent=1))
    else:
        print("\n".join([f"{count} {kind}" for kind, count in counts.items()] + [one.told for one in failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
