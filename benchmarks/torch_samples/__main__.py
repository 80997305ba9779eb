"""Trains with the samples that torch tests its operators and modules with, compiled and as eager code.

    python -m benchmarks.torch_samples                          # operators, bit by bit
    python -m benchmarks.torch_samples --kind modules --asks    # for the loss before the backward: live steps
    python -m benchmarks.torch_samples --backend inductor --samples 3 --part 1/8
    python -m benchmarks.torch_samples --device cuda --only linalg.qr cumsum --json

The exit status is 1 if anything differs. The tests of torch are no public part of it and may move.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.torch_samples.cases import Choice, module_cases, operator_cases, plain_random_state
from benchmarks.torch_samples.judge import judged


def main() -> int:
    """Prints what differs or, with `--json`, a record of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["operators", "modules"], default="operators")
    parser.add_argument(
        "--backend", choices=["eager", "inductor"], help="default: eager on the CPU, else the step's own"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, default=6, help="of each operator or module (default: %(default)s)")
    parser.add_argument("--part", default="1/1", help="such as 2/8: the second of eight equal parts")
    parser.add_argument("--only", nargs="+", default=(), help="names of operators or modules")
    parser.add_argument("--asks", action="store_true", help="for the loss before the backward, so that steps are live")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("wholestep").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    part, parts = map(int, options.part.split("/"))
    backend = options.backend or ("eager" if options.device == "cpu" else None)
    make = operator_cases if options.kind == "operators" else module_cases
    choice = Choice(options.device, options.samples, options.only, options.asks)
    count, found, left_out = 0, dict[str, str](), list[str]()
    with Progress(console=Console(stderr=True)) as progress, plain_random_state():
        task = progress.add_task("training", total=None)
        for number, case in enumerate(make(choice)):
            if number % parts != part - 1:
                continue
            verdict, count = judged(case, backend, options.device), count + 1
            if verdict.complaint:
                found[case.name] = verdict.complaint
                print(f"{case.name}: {verdict.complaint}", file=sys.stderr, flush=True)
            elif not verdict.compared:
                left_out.append(case.name)
            progress.update(task, advance=1, description=f"{count} {options.kind}, {len(found)} differ")
    if options.json:
        print(json.dumps({"count": count, "differ": found, "left_out": left_out}, indent=1))
    else:
        told = f"{count} {options.kind}, of which no call could be compared for {len(left_out)}: {' '.join(left_out)}"
        print("\n".join([told, *(f"{name}: {why}" for name, why in found.items())]))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
