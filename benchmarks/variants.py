"""One training of the suites, run in several ways that take turns in one process group.

    python benchmarks/variants.py --training gpt --steps 200 ddp eager inductor
    python benchmarks/variants.py --training W3 --nproc 2 inductor inductor:tune_products=false
    python benchmarks/variants.py --training W1 --nproc 4 inductor inductor:copy_engines=false,early_launches=true
    python benchmarks/variants.py --training W1 --nproc 2 --clip 1 ddp inductor inductor:optimizer=auto

A variant is `ddp` (eager, in DistributedDataParallel), or a backend of `wholestep.compile`: `eager`, `auto` or
`inductor`. After a colon stand `optimizer=fused` (as it is without), `foreach`, `loop` or `auto`, the form of AdamW's
update (auto is torch's own choice), and options of `wholestep.Inductor` for `inductor`. The first variant is what
others are held against. All start from the same weights and see the same batch, one per rank.

Each variant makes its first call (with empty caches of the compilers, but kernels of variants before it are found) and
some more steps, by itself. Then blocks of ten steps take turns, in an order that turns round; a block counts as long as
it takes on the slowest rank.

Columns:
  first s     the first call, which compiles
  loss        mean over the ranks, after the first steps
  ms          of a step, median of all blocks
  10% to 90%  of all blocks
  x first     time of the first variant over that of this one, median of the rounds, with their 10% and 90%
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from wholestep.api.cache.warm_start import CACHE
from wholestep.cli.common.options import choose_nproc, threads_per_rank
from wholestep.cli.suite.workloads import SUITES, training
from wholestep.errors import ConfigError

BLOCK_STEPS = 10
FIRST_STEPS = 20
LEARNING_RATE = 1e-4
BACKENDS = ("eager", "auto", "inductor")
OPTIMIZERS: Mapping[str, Mapping[str, bool]] = {
    "fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}, "auto": {},
}  # fmt: skip
_VALUES = {"true": True, "false": False, "auto": "auto"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What the name of a variant says."""

    backend: str | ws.Inductor | None
    """None for DistributedDataParallel."""
    optimizer: str = "fused"
    """One of `OPTIMIZERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What takes turns."""

    training: str
    variants: tuple[str, ...]
    num_steps: int
    clip: float
    """Largest norm of all gradients, 0 for none: a hook before the optimizer's step, the same in all variants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of a variant; times of a step."""

    variant: str
    first_s: float
    loss: float
    median_ms: float
    p10_ms: float
    p90_ms: float
    ratio: float
    """Time of the first variant over this one's."""
    ratio_p10: float
    ratio_p90: float


def variant_of(text: str) -> Variant:
    """What `text`, the name of a variant, says. Raises ConfigError."""
    name, _, told = text.partition(":")
    if name not in ("ddp", *BACKENDS):
        raise ConfigError(
            f"a variant is ddp, {', '.join(BACKENDS)}, with OPTION=VALUE,... after a colon; got {text!r}."
        )
    optimizer = "fused"
    options: dict[str, Any] = {}
    for one in told.split(",") if told else ():
        option, _, value = one.partition("=")
        if option == "optimizer" and value in OPTIMIZERS:
            optimizer = value
        elif name == "inductor" and option in ws.Inductor.__dataclass_fields__ and value in _VALUES:
            options[option] = _VALUES[value]
        else:
            raise ConfigError(
                f"options are optimizer={'|'.join(OPTIMIZERS)}, and for inductor "
                f"{', '.join(ws.Inductor.__dataclass_fields__)}, each =true, =false or =auto; got {one!r} in {text!r}."
            )
    backend = ws.Inductor(**options) if options else None if name == "ddp" else name
    return Variant(backend=backend, optimizer=optimizer)


def prepare(variant: Variant, race: Race, world: ws.World) -> Callable[[], Tensor]:
    """A function that makes one step and gives its loss. All ranks have to call this."""
    torch.manual_seed(0)
    chosen = training(race.training)
    x, y = (one.to(world.device) for one in chosen.draw(world.rank))
    model = chosen.build(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **OPTIMIZERS[variant.optimizer])
    parameters = list(model.parameters())

    def clip_gradients(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, race.clip)

    if race.clip:
        optimizer.register_step_pre_hook(clip_gradients)
    if variant.backend is not None:
        step = ws.compile(chosen.step, backend=variant.backend, fullgraph=True)
        return lambda: step(model, optimizer, x, y)
    devices = [world.device] if world.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    return lambda: chosen.step(wrapped, optimizer, x, y)


def on_rank(race: Race, caches: str) -> list[Row]:
    """All variants on this rank, timed, with compilers' caches in the folder `caches`; the same rows on every rank."""
    world = ws.init()
    os.environ.update({CACHE: "0", "TORCHINDUCTOR_CACHE_DIR": caches})
    if world.device.type == "cpu":
        torch.set_num_threads(threads_per_rank(world.size))
    torch.set_float32_matmul_precision("high")

    def block(call: Callable[[], Tensor], length: int) -> tuple[float, float]:
        """Seconds, and the loss after the last step. Waits for the device before and after."""
        _wait(world)
        begun = time.perf_counter()
        for _ in range(length):
            loss = call()
        _wait(world)
        return time.perf_counter() - begun, float(loss)

    calls, first_s, losses = [], [], []
    for variant in race.variants:
        calls.append(prepare(variant_of(variant), race, world))
        first_s.append(max(_of_all(world, block(calls[-1], 1)[0])))
        losses.append(statistics.fmean(_of_all(world, block(calls[-1], FIRST_STEPS)[1])))
        if world.rank == 0:
            print(f"{race.training}: {variant}: first call {first_s[-1]:.1f} s", file=sys.stderr)
    times_ms: list[list[float]] = [[] for _ in race.variants]
    order = list(range(len(race.variants)))
    for _ in range(max(2, race.num_steps // BLOCK_STEPS)):
        for place in order:
            block(calls[place], 1)  # ranks begin together after a step, by its collectives
            times_ms[place].append(1e3 * block(calls[place], BLOCK_STEPS)[0] / BLOCK_STEPS)
        order.reverse()
    slowest = [[max(one) for one in zip(*_of_all(world, mine), strict=True)] for mine in times_ms]
    return [
        _row(variant, (first_s[place], losses[place]), slowest[place], slowest[0])
        for place, variant in enumerate(race.variants)
    ]


def _row(variant: str, first: tuple[float, float], times_ms: Sequence[float], base_ms: Sequence[float]) -> Row:
    ms, ratios = sorted(times_ms), sorted(base / own for base, own in zip(base_ms, times_ms, strict=True))
    low, high = len(ms) // 10, (9 * len(ms)) // 10
    return Row(
        variant=variant, first_s=first[0], loss=first[1], median_ms=statistics.median(ms), p10_ms=ms[low],
        p90_ms=ms[high], ratio=statistics.median(ratios), ratio_p10=ratios[low], ratio_p90=ratios[high],
    )  # fmt: skip


def _wait(world: ws.World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _of_all(world: ws.World, mine: Any) -> list[Any]:
    heard = [None] * world.size
    if world.size == 1:
        return [mine]
    dist.all_gather_object(heard, mine)
    return heard


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows as a table."""
    made = Table(title=title, title_justify="left")
    made.add_column("variant", no_wrap=True)
    for column in ("first s", "loss", "ms", "10% to 90%", "x first"):
        made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(
            row.variant, f"{row.first_s:.1f}", f"{row.loss:.7g}", f"{row.median_ms:.2f}",
            f"{row.p10_ms:.2f} to {row.p90_ms:.2f}", f"{row.ratio:.3f} ({row.ratio_p10:.3f} to {row.ratio_p90:.3f})",
        )  # fmt: skip
    return made


def main() -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", help="what takes turns; the first is what others are held against")
    parser.add_argument("--training", default="gpt", choices=[name for suite in SUITES.values() for name in suite])
    parser.add_argument("--nproc", type=int, help="ranks (default: one per local GPU, or 2 on the CPU)")
    parser.add_argument("--steps", type=int, default=60, help="steps that each variant is timed for, at least 20")
    parser.add_argument(
        "--clip", type=float, default=0.0, help="largest norm of all gradients (default: 0, not clipped)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args()
    try:
        for variant in options.variants:
            variant_of(variant)
        if len({*options.variants}) < len(options.variants) or options.steps < 2 * BLOCK_STEPS:
            raise ConfigError(f"variants want to differ, and --steps to be at least {2 * BLOCK_STEPS}.")
        nproc = choose_nproc(options.nproc)
        if options.clip < 0:
            raise ConfigError(
                f"--clip is the largest norm of all gradients, above 0, or 0 for none; got {options.clip}."
            )
    except ConfigError as error:
        parser.error(str(error))
    with TemporaryDirectory() as caches:
        folder = str(Path(caches) / "inductor")
        race = Race(
            training=options.training, variants=tuple(options.variants), num_steps=options.steps, clip=options.clip
        )
        rows = ws.run(on_rank, nproc, race, folder)[0]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if options.json:
        told = {"training": options.training, "nproc": nproc, "device": device, "torch": torch.__version__}
        print(json.dumps({**told, "steps": options.steps, "clip": options.clip, "rows": [asdict(row) for row in rows]}))
    else:
        title = f"{options.training}: {nproc} x {device}, torch {torch.__version__}, {options.steps} steps by turns"
        title += f", clipped to {options.clip:g}" if options.clip else ""
        Console(width=None if sys.stdout.isatty() else 140).print(table(rows, title))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
