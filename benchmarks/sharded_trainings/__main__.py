"""Small trainings under every sharded strategy, against eager DistributedDataParallel on the same data.

    python -m benchmarks.sharded_trainings                       # all 420, some seconds each
    python -m benchmarks.sharded_trainings --only "HSDP" BERT    # those whose name has all of these words
    python -m benchmarks.sharded_trainings --every 7 --json

Each is five steps of a model with an optimizer, clipped or not, of one or two micro-batches, on 2 gloo processes and
with several buckets; HSDP has 4. Compared are all losses, parameters, buffers and the state of the optimizer. "Bitwise"
counts those without a bit of difference. The others are within rounding: sums of norms and of four ranks have another
order, and fused kernels round the ends of a shard otherwise. The exit status is 1 if one is farther away.
"""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.sharded_trainings.cell import CELLS, WAYS, Cell, Outcome, run
from benchmarks.sharded_trainings.models import MODELS
from wholestep.runtime.distributed.launch import Workers
from wholestep.runtime.distributed.world import close_current, enter

_TIMEOUT_S = 300.0


def outcomes(cells: list[Cell]) -> dict[Cell, Outcome]:
    """Of each training, as rank 0 has it, with the faults of all ranks. Errors are faults; new processes go on."""
    found: dict[Cell, Outcome] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("trainings", total=len(cells))
        for way in WAYS:
            workers = None
            for cell in (one for one in cells if one.way == way):
                progress.update(task, description=str(cell))
                if workers is None:
                    workers = Workers(WAYS[way].num_ranks, functools.partial(enter, "gloo", _TIMEOUT_S), close_current)
                try:
                    found[cell] = _outcome(workers, cell)
                except Exception as error:  # whatever a rank raised, or that one has gone
                    found[cell] = Outcome((f"{type(error).__name__}: {error}",), False, {})
                    workers.close(orderly=False)
                    workers = None
                progress.advance(task)
            if workers is not None:
                workers.close()
    return found


def _outcome(workers: Workers, cell: Cell) -> Outcome:
    ranks: list[Outcome] = workers.call(run, (cell,), timeout_s=_TIMEOUT_S)
    faults = [f"rank {rank}: {fault}" for rank, one in enumerate(ranks) for fault in one.faults]
    return Outcome(tuple(faults), all(one.is_bitwise for one in ranks), ranks[0].collectives)


def table(found: dict[Cell, Outcome]) -> Table:
    """Models by strategies: how many of the trainings are equal, and how many of those in every bit."""
    shown = Table("", *WAYS, title="trainings equal to eager DistributedDataParallel (of those, bitwise)")
    for model in MODELS:
        row = []
        for way in WAYS:
            here = [one for cell, one in found.items() if (cell.way, cell.model) == (way, model)]
            equal = [one for one in here if not one.faults]
            row.append(f"{len(equal)} of {len(here)} ({sum(one.is_bitwise for one in equal)})" if here else "")
        shown.add_row(model, *row)
    return shown


def main() -> None:
    """Runs the trainings that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words that a training has in its name")
    parser.add_argument("--every", type=int, default=1, help="take one of so many (default: all)")
    parser.add_argument("--json", action="store_true", help="each training with its faults and collectives")
    given = parser.parse_args()
    cells = [cell for cell in CELLS if all(word.lower() in str(cell).lower() for word in given.only)][:: given.every]
    if not cells:
        raise SystemExit(f"No training has {' and '.join(given.only)} in its name. One of them: {CELLS[0]}.")
    found = outcomes(cells)
    if given.json:
        print(json.dumps([{"training": str(cell), **asdict(one)} for cell, one in found.items()], indent=1))
    else:
        Console().print(table(found))
        for cell, one in found.items():
            if one.faults:
                print(f"{cell}: {'; '.join(one.faults)}")
    raise SystemExit(any(one.faults for one in found.values()))


if __name__ == "__main__":
    main()
