"""Models of `zoo.py` as people train them: eager, torch.compile and wholestep, by turns in one process group.

    python -m benchmarks.models bert resnet50
    python -m benchmarks.models --nproc 2 gpt_accuracy t5
    python -m benchmarks.models --list

On several ranks the first two stand in DistributedDataParallel, and torch.compile is given what that makes of the
model. All start from the same weights and see the same batch. Each makes its first call, with empty caches of the
compilers, and nine more steps; then blocks of ten steps take turns, in an order that turns round. Ratios are those of
blocks beside each other. Models of torchvision and timm want those installed.

Columns:
  first s         the first call, which compiles
  loss            after the first ten steps
  ms              of a step, median of seven blocks, on the slowest rank
  over eager, over compile
                  time of those over ours, median of the rounds
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from benchmarks.zoo import CASES
from wholestep.api.cache.warm_start import CACHE
from wholestep.cli.common.options import choose_nproc, threads_per_rank
from wholestep.errors import ConfigError

CONTENDERS = ("eager", "compile", "ours")
FIRST_STEPS, BLOCK_STEPS, ROUNDS = 9, 10, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one model; contender by contender, in the order of `CONTENDERS`."""

    model: str
    first_s: tuple[float, ...]
    loss: tuple[float, ...]
    ms: tuple[float, ...]
    over_eager: float
    over_compile: float


def prepare(name: str, contender: str, world: ws.World, *, tiny: bool) -> Callable[[], Tensor]:
    """A function that makes one step and gives its loss."""
    torch.manual_seed(0)
    case = CASES[name](tiny, world.device)
    model: Any = case.model.to(world.device).train()
    optimizer, step = case.optimizer(model), case.step
    if contender == "ours":
        step = ws.compile(step, backend="eager" if tiny else "inductor", fullgraph=True)
    elif world.size > 1:
        devices = [world.device] if world.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    if contender == "compile":
        model = torch.compile(model, backend="eager" if tiny else "inductor")

    def run() -> Tensor:
        given = step(model, optimizer, case.batch)
        return given[0] if isinstance(given, tuple) else given  # type: ignore[no-any-return]

    return run


def on_rank(name: str, caches: str, tiny: bool) -> Row:
    """One model on this rank; the same row on every rank."""
    world = ws.init()
    os.environ.update({CACHE: "0", "TORCHINDUCTOR_CACHE_DIR": caches})
    torch.set_float32_matmul_precision("high")
    if world.device.type == "cpu":
        torch.set_num_threads(threads_per_rank(world.size))
    runs, first_s, losses = [], [], []
    for contender in CONTENDERS:
        runs.append(prepare(name, contender, world, tiny=tiny))
        first_s.append(_slowest(_block(runs[-1], 1, world)[0], world))
        losses.append(_block(runs[-1], FIRST_STEPS, world)[1])
        if world.rank == 0:
            print(f"{name}: {contender}: first call {first_s[-1]:.1f} s", file=sys.stderr)
    times_ms: list[list[float]] = [[] for _ in CONTENDERS]
    order = list(range(len(CONTENDERS)))
    for _ in range(2 if tiny else ROUNDS):
        for place in order:
            _block(runs[place], 1, world)
            steps = 1 if tiny else BLOCK_STEPS
            times_ms[place].append(1e3 * _slowest(_block(runs[place], steps, world)[0], world) / steps)
        order.reverse()
    eager, compiled = (
        statistics.median(a / b for a, b in zip(one, times_ms[-1], strict=True)) for one in times_ms[:-1]
    )
    return Row(
        model=name, first_s=tuple(first_s), loss=tuple(losses), ms=tuple(map(statistics.median, times_ms)),
        over_eager=eager, over_compile=compiled,
    )  # fmt: skip


def _block(run: Callable[[], Tensor], steps: int, world: ws.World) -> tuple[float, float]:
    """Seconds, and the loss after the last step. Waits for the device before and after."""
    _wait(world)
    begun = time.perf_counter()
    for _ in range(steps):
        loss = run()
    _wait(world)
    return time.perf_counter() - begun, float(loss)


def _wait(world: ws.World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _slowest(mine: float, world: ws.World) -> float:
    heard: list[Any] = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(heard, mine)
    return max(heard)


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows as a table."""
    made = Table(title=title, title_justify="left")
    made.add_column("model", no_wrap=True)
    contenders = [f"{what}, {contender}" for what in ("first s", "loss", "ms") for contender in CONTENDERS]
    for column in (*contenders, "over eager", "over compile"):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(
            row.model, *(f"{one:.1f}" for one in row.first_s), *(f"{one:.5g}" for one in row.loss),
            *(f"{one:.2f}" for one in row.ms), f"{row.over_eager:.2f}", f"{row.over_compile:.2f}",
        )  # fmt: skip
    return made


def main() -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="what is trained, one after another (default: all)")
    parser.add_argument("--list", action="store_true", help="the names of the models, and nothing else")
    parser.add_argument("--nproc", type=int, help="ranks (default: one per local GPU, or 2 on the CPU)")
    parser.add_argument("--tiny", action="store_true", help="small ones without a compiler, to see that they run")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args()
    if options.list:
        print(*CASES, sep="\n")
        return 0
    unknown = [name for name in options.models if name not in CASES]
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(CASES)}.")
    try:
        nproc = choose_nproc(options.nproc)
    except ConfigError as error:
        parser.error(str(error))
    rows = []
    for name in options.models or CASES:
        with TemporaryDirectory() as caches:
            rows.append(ws.run(on_rank, nproc, name, caches, options.tiny)[0])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if options.json:
        told = {"nproc": nproc, "device": device, "torch": torch.__version__, "contenders": CONTENDERS}
        print(json.dumps({**told, "rows": [asdict(row) for row in rows]}))
    else:
        title = f"{nproc} x {device}, torch {torch.__version__}"
        Console(width=None if sys.stdout.isatty() else 190).print(table(rows, title))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
