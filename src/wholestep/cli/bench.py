"""`wholestep bench`: step times of small trainings, compiled against eager."""

from __future__ import annotations

import json
import math
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import wholestep as ws
from wholestep.api.report.prediction import Prediction
from wholestep.api.report.records import Explanation
from wholestep.cli.common.options import AsJson, Nproc, choose_nproc, num_cores, threads_per_rank
from wholestep.cli.suite.contenders import Kind
from wholestep.cli.suite.results import as_json as suite_as_json
from wholestep.cli.suite.runner import SuiteSettings, parse_kinds, parse_trainings, run_suite
from wholestep.cli.workloads.interleaved import (
    Batch,
    Contender,
    ContenderKind,
    Ratio,
    Recipe,
    Timing,
    compiled_step,
    open_contender,
    ratio,
    run_interleaved,
    timing,
)
from wholestep.cli.workloads.small_models import WORKLOADS, WorkloadName
from wholestep.errors import ConfigError

BLOCK_STEPS = 10
"""Steps of one contender before the next takes over."""
FIRST_BLOCKS = 4
"""Blocks that are run in any case, and say how long a step takes."""
CONTENDERS = tuple(kind.name.lower() for kind in Kind)
MOST_STEPS = 2000
"""Steps of a contender, however short they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    workload: WorkloadName = WorkloadName.MLP
    seconds: float = 20.0
    """About how long all contenders take together, first calls apart. Short steps are many, so that their median is
    firm."""
    steps: int | None = None
    """Steps of each contender, if that is to be decided by the number and not by the time."""
    contenders: tuple[ContenderKind, ...] = (ContenderKind.WHOLESTEP, ContenderKind.EAGER_DDP)

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 2:
            raise ConfigError(f"--steps wants at least 2 (the first one compiles and is not timed), got {self.steps}.")
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"--seconds wants a time above 0, got {self.seconds}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderFigures:
    """One contender over all ranks."""

    timing: Timing
    ratio: Ratio
    """Eager DDP over this contender, block by block: above one, this contender is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Step times of every contender, over all ranks."""

    settings: BenchSettings
    steps: int
    """Steps that each contender ran."""
    nproc: int
    device: str
    torch_version: str
    machine: str
    predicted_ms: float
    """The compiled step, as `explain()` predicts it."""
    cost_source: str
    contenders: dict[ContenderKind, ContenderFigures]

    @property
    def predicted_over_measured(self) -> float:
        """Predicted step over the median of those measured."""
        return self.predicted_ms / self.contenders[ContenderKind.WHOLESTEP].timing.median_ms

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "workload": self.settings.workload.value,
            "steps": self.steps,
            "nproc": self.nproc,
            "device": self.device,
            "torch": self.torch_version,
            "machine": self.machine,
            "predicted_ms": self.predicted_ms,
            "predicted_over_measured": self.predicted_over_measured,
            "cost_source": self.cost_source,
            "contenders": {
                kind.value: {**asdict(one.timing), "eager_ddp_over_contender": asdict(one.ratio)}
                for kind, one in self.contenders.items()
            },
        }

    def __rich__(self) -> Table:
        title = f"{self.settings.workload.value}: {self.steps} steps, {self.nproc} ranks, {self.device}"
        caption = (
            f"torch {self.torch_version}, {self.machine}; blocks of {BLOCK_STEPS} steps in turn; ms per step; "
            f"ratios block by block: median (10% to 90%). Costs of the prediction: {self.cost_source}"
        )
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        table.add_column("contender")
        for column in ("median", "10%", "90%", "first call", "eager DDP / contender", "predicted"):
            table.add_column(column, justify="right")
        for kind, figures in self.contenders.items():
            timing = figures.timing
            times_ms = (timing.median_ms, timing.p10_ms, timing.p90_ms, timing.first_ms)
            compared = f"{figures.ratio.median:.3f} ({figures.ratio.p10:.2f} to {figures.ratio.p90:.2f})"
            predicted = f"{self.predicted_ms:.2f} ({self.predicted_over_measured:.2f} x)"
            is_ours = kind is ContenderKind.WHOLESTEP
            table.add_row(
                kind.value, *(f"{time_ms:.2f}" for time_ms in times_ms), compared, predicted if is_ours else ""
            )
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankResult:
    device: str
    predicted: Prediction
    times_ms: dict[ContenderKind, list[float]]


def run_bench(settings: BenchSettings, *, nproc: int) -> BenchReport:
    """Time all contenders of `settings` on `nproc` new processes."""
    ranks: list[_RankResult] = ws.run(_measure_on_rank, nproc, settings, nproc)
    times_ms = {kind: [rank.times_ms[kind] for rank in ranks] for kind in settings.contenders}
    eager_ms = times_ms[ContenderKind.EAGER_DDP]
    return BenchReport(
        settings=settings,
        steps=len(eager_ms[0]),
        nproc=nproc,
        device=ranks[0].device,
        torch_version=torch.__version__,
        machine=f"{platform.machine()}, {num_cores()} cores",
        predicted_ms=1e-3 * ranks[0].predicted.step_us,
        cost_source=ranks[0].predicted.cost_source,
        contenders={
            kind: ContenderFigures(timing=timing(mine_ms), ratio=ratio(eager_ms, mine_ms, block_steps=BLOCK_STEPS))
            for kind, mine_ms in times_ms.items()
        },
    )


def _measure_on_rank(settings: BenchSettings, nproc: int) -> _RankResult:
    world = ws.init()
    torch.set_num_threads(threads_per_rank(nproc))
    workload = WORKLOADS[settings.workload]
    most = settings.steps or MOST_STEPS
    recipe = Recipe(build=workload.build, step=workload.step, num_steps=most, learning_rate=1e-3)
    contenders = {kind: open_contender(kind, recipe, world) for kind in settings.contenders}
    drawn = workload.batches(steps=most, rank=world.rank)
    batches: Iterator[Batch] = ((x.to(world.device), y.to(world.device)) for x, y in drawn)
    if settings.steps is None:
        run_interleaved(list(contenders.values()), islice(batches, FIRST_BLOCKS * BLOCK_STEPS), block_steps=BLOCK_STEPS)
        batches = islice(batches, _remaining_steps(settings.seconds, contenders.values(), world))
    run_interleaved(list(contenders.values()), batches, block_steps=BLOCK_STEPS)
    explained = compiled_step(contenders[ContenderKind.WHOLESTEP]).explain()
    assert isinstance(explained, Explanation)  # the contender asks for a full graph
    return _RankResult(
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else str(world.device),
        predicted=explained.predicted,
        times_ms={kind: contender.times_ms for kind, contender in contenders.items()},
    )


def _remaining_steps(seconds: float, contenders: Iterable[Contender], world: ws.World) -> int:
    """Steps of each contender that fill the rest of the time; the same on every rank."""
    typical_ms = sum(statistics.median(contender.times_ms) for contender in contenders)
    blocks = min(MOST_STEPS, int(1e3 * seconds / typical_ms)) // BLOCK_STEPS - FIRST_BLOCKS
    num_steps = torch.tensor(max(0, blocks) * BLOCK_STEPS, device=world.device)
    if world.size > 1:
        dist.broadcast(num_steps, 0)
    return int(num_steps)


class Suite(StrEnum):
    """Trainings that are timed in every stock way."""

    GPU = "gpu"
    """Language models at full size: W1, W2 and W3."""
    CPU = "cpu"
    """The small trainings, and a language model that takes milliseconds."""


def _in_suite(settings: SuiteSettings, *, nproc: int, as_json: bool, with_breakdown: bool) -> None:
    """Runs a suite and prints its reports."""
    # Leaves with status 1 for a wrong loss or a contender that failed.
    reports = run_suite(settings, nproc=nproc)
    if as_json:
        print(suite_as_json(reports))
    else:
        out = Console()
        if not out.is_terminal:
            out.width = 160  # whole tables in a file
        for report in reports:
            out.print(report)
            if with_breakdown:
                out.print(report.breakdowns())
    if not all(report.is_sound for report in reports):
        raise typer.Exit(1)


def _run_small(names: Sequence[str], *, nproc: int, as_json: bool, **options: Any) -> None:
    """Races the small trainings one after another."""
    if unknown := [name for name in names if name not in list(WorkloadName)]:
        raise ConfigError(f"--workload wants some of {', '.join(WorkloadName)}, got {', '.join(unknown)}.")
    reports = []
    for name in map(WorkloadName, names or WorkloadName):
        report = run_bench(BenchSettings(workload=name, **options), nproc=nproc)
        reports.append(report.to_json())
        if not as_json:
            Console().print(report)
    if as_json:
        print(json.dumps(reports, indent=2))


def _listed(values: list[str] | None) -> list[str]:
    """Names that may be separated by commas."""
    return [name for value in values or () for name in value.split(",") if name]


def command(
    *,
    suite: Annotated[
        Suite | None, typer.Option(help="gpu: W1, W2, W3, W4 on request; cpu: mlp, gpt, conv, tiny; all contenders.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="mlp: mostly launches; gpt: mostly arithmetic; conv: batch norm. Default: all, in turn."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long each training is timed.")] = BenchSettings().seconds,
    steps: Annotated[
        int | None, typer.Option(help="Steps of each contender, in place of a time; 60 with --suite.")
    ] = None,
    contenders: Annotated[
        list[str] | None, typer.Option(help=f"With --suite, some of {', '.join(CONTENDERS)}.")
    ] = None,
    budget_s: Annotated[
        float, typer.Option(help="With --suite: what does not fit into so many seconds is left.")
    ] = 540,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="With --suite: time by kernel class.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --suite: JSON, written as soon as a contender is done.")
    ] = None,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Time the compiled step against eager DDP on small trainings, or with --suite against every stock way.

    Predictions are those of `wholestep calibrate`, if it has run on this host. Contenders of a suite take turns in one
    process group; the same graph without communication is the limit, and JAX follows where it is installed.
    """
    names, processes = _listed(workload), choose_nproc(nproc)
    if suite is not None:
        settings = SuiteSettings(
            suite=suite.value, trainings=parse_trainings(suite.value, names), kinds=parse_kinds(_listed(contenders)),
            num_steps=steps or 60, budget_s=budget_s, path=out, command=shlex.join(["wholestep", *sys.argv[1:]]),
        )  # fmt: skip
        _in_suite(settings, nproc=processes, as_json=as_json, with_breakdown=breakdown)
        return
    if contenders or breakdown or out:
        raise ConfigError("--contenders, --breakdown and --out go with --suite.")
    _run_small(names, nproc=processes, as_json=as_json, seconds=seconds, steps=steps)
