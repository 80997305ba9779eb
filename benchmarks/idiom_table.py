"""Every idiom of everyday training steps, compiled against eager code: which hold, in how many pieces, and why.

    python -m benchmarks.idiom_table > docs/idioms.md
    python -m benchmarks.idiom_table --group schedulers containers
    python -m benchmarks.idiom_table --idiom list_of_numbers mixup --json
    python -m benchmarks.idiom_table --strategy fsdp   # on two gloo processes

An idiom is a small training loop of `benchmarks/idioms/`. Its step is called ten times eagerly and ten times compiled
for the eager backend, from the same start; after every call everything is compared that somebody can look at. The exit
status is 1 if an idiom is refused or wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.idioms import CALLS, GROUPS, IDIOMS
from benchmarks.idioms.compare import Outcome, outcome
from benchmarks.idioms.on_ranks import STRATEGIES, Ranks, outcome_under

INTRODUCTION = (
    "What people write inside of a training step, each compiled and compared with eager code: results, parameters,",
    "buffers, gradients, optimizer state, prints, logs, containers and random streams, bit for bit on the eager",
    "backend. *Pure* steps are one graph. *Live* ones run with their own Python, and their tensor calls as compiled",
    "*pieces*; the reason says why they are no graph, and 0 pieces that their calls ran one by one (`docs/steps.md`).",
    "`python -m benchmarks.idiom_table` prints this page, and `tests/tables/test_idiom_table.py` compares it.",
)
MAX_COLUMNS = 120
"""Of a line of the table: the reason is cut."""


def row(found: Outcome) -> str:
    """One line of the table."""
    pieces = "-" if found.pieces is None else str(found.pieces)
    begin = f"| {found.name} | {found.kind} | {pieces} | "
    reason = found.reason.replace("|", "\\|").replace("\n", " ")
    return begin + textwrap.shorten(reason, MAX_COLUMNS - len(begin) - 2, placeholder=" ...") + " |"


def table(found: Mapping[str, Outcome]) -> Iterator[str]:
    """The lines of the page: a table for each group."""
    yield from ("# Idioms of training steps", "", *INTRODUCTION, "")
    counts = Counter(one.kind for one in found.values())
    told = ", ".join(f"{counts[kind]} {kind}" for kind in ("pure", "live", "refused", "wrong") if counts[kind])
    yield f"{len(found)} idioms, {CALLS} calls each, torch {torch.__version__.partition('+')[0]}: {told}."
    for group, what in GROUPS.items():
        ours = [one for one in found.values() if IDIOMS[one.name].group == group]
        if ours:
            yield from ("", f"## {group}", "", what, "", "| idiom | runs | pieces | reason |", "|---|---|---|---|")
            yield from map(row, ours)


def main() -> int:
    """Prints the table or, with `--json`, a list of outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idiom", nargs="+", choices=IDIOMS, metavar="NAME", help="only these (default: all)")
    parser.add_argument("--group", nargs="+", choices=GROUPS, help="only those of these groups")
    parser.add_argument("--strategy", choices=STRATEGIES, help="train on two processes (default: on one, with none)")
    parser.add_argument("--json", action="store_true", help="a list of records, with everything that differs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("wholestep").setLevel(logging.CRITICAL)
    wanted = [
        one
        for name, one in IDIOMS.items()
        if name in (options.idiom or IDIOMS) and one.group in (options.group or GROUPS)
    ]
    found: dict[str, Outcome] = {}
    with Progress(console=Console(stderr=True)) as progress, Ranks() as ranks:
        task = progress.add_task("training", total=len(wanted))
        for one in wanted:
            progress.update(task, description=one.name)
            strategy = options.strategy
            found[one.name] = outcome_under(ranks, one.name, strategy) if strategy else outcome(one)
            progress.advance(task)
    if options.json:
        json.dump([asdict(one) for one in found.values()], sys.stdout, indent=1)
        print()
    else:
        print("\n".join(table(found)))
    return 0 if all(one.holds for one in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
