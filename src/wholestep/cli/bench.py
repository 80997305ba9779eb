"""`wholestep bench`: step times of a small reference training, compiled and eager, in alternating blocks."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import islice, pairwise
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from wholestep.cli.demo import DemoSettings, demo_batches
from wholestep.cli.gpt import GPT, GPTConfig, train_step
from wholestep.cli.lanes import (
    Batch,
    Lane,
    LaneKind,
    Ratio,
    Recipe,
    Timing,
    compiled_step,
    open_lane,
    race,
    ratio,
    timing,
)
from wholestep.cli.options import AsJson, Nproc, choose_nproc, num_cores, threads_per_rank
from wholestep.cli.text import standard_library
from wholestep.errors import ConfigError
from wholestep.report.prediction import Prediction

BLOCK_STEPS = 10
"""Steps of one lane before the next takes over."""
FIRST_BLOCKS = 4
"""Blocks that are run in any case, and say how long a step takes."""
MOST_STEPS = 2000
"""Steps of a lane, however short they are."""


class WorkloadName(StrEnum):
    """What is trained."""

    MLP = "mlp"
    """Sixty-four narrow layers: mostly launches and small collectives."""
    GPT = "gpt"
    """The step and the text of the demo, and a model of three times the size: mostly arithmetic."""
    CONV = "conv"
    """Convolutions with batch norm: buffers that are broadcast at every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    workload: WorkloadName = WorkloadName.MLP
    seconds: float = 20.0
    """About how long all lanes take together, first calls apart. Short steps are many, so that their median is firm."""
    steps: int | None = None
    """Steps of each lane, if that is to be decided by the number and not by the time."""
    lanes: tuple[LaneKind, ...] = (LaneKind.WHOLESTEP, LaneKind.EAGER_DDP)

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 2:
            raise ConfigError(f"--steps wants at least 2 (the first one compiles and is not timed), got {self.steps}.")
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"--seconds wants a time above 0, got {self.seconds}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFigures:
    """One lane over all ranks."""

    timing: Timing
    ratio: Ratio
    """Eager DDP over this lane, block by block: above one, this lane is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Step times of every lane, over all ranks."""

    settings: BenchSettings
    steps: int
    """Steps that each lane ran."""
    nproc: int
    device: str
    torch_version: str
    machine: str
    predicted_ms: float
    """The compiled step, as `explain()` predicts it."""
    cost_source: str
    lanes: dict[LaneKind, LaneFigures]

    @property
    def predicted_over_measured(self) -> float:
        """Predicted step over the median of those measured."""
        return self.predicted_ms / self.lanes[LaneKind.WHOLESTEP].timing.median_ms

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
            "lanes": {
                kind.value: {**asdict(one.timing), "eager_ddp_over_lane": asdict(one.ratio)}
                for kind, one in self.lanes.items()
            },
        }

    def __rich__(self) -> Table:
        title = f"{self.settings.workload.value}: {self.steps} steps, {self.nproc} ranks, {self.device}"
        caption = (
            f"torch {self.torch_version}, {self.machine}; blocks of {BLOCK_STEPS} steps in turn; ms per step; "
            f"ratios block by block: median (10% to 90%). Costs of the prediction: {self.cost_source}"
        )
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        table.add_column("lane")
        for column in ("median", "10%", "90%", "first call", "eager DDP / lane", "predicted"):
            table.add_column(column, justify="right")
        for kind, one in self.lanes.items():
            figures = (one.timing.median_ms, one.timing.p10_ms, one.timing.p90_ms, one.timing.first_ms)
            compared = f"{one.ratio.median:.3f} ({one.ratio.p10:.2f} to {one.ratio.p90:.2f})"
            told = f"{self.predicted_ms:.2f} ({self.predicted_over_measured:.2f} x)"
            is_ours = kind is LaneKind.WHOLESTEP
            table.add_row(kind.value, *(f"{figure:.2f}" for figure in figures), compared, told if is_ours else "")
        return table


class MLP(nn.Module):
    """(B, 64) -> (B, 64) through `num_layers` residual layers of width 64."""

    def __init__(self, num_layers: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class ConvNet(nn.Module):
    """(B, 3, 32, 32) -> (B, 64): three stages of residual convolutions with batch norm, each half as wide in space."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), num_blocks: int = 2) -> None:
        super().__init__()
        stages = []
        for before, width in pairwise((3, *widths)):
            stages += [nn.Conv2d(before, width, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            stages += [ConvBlock(width) for _ in range(num_blocks)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], 64)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.head(self.stages(x).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class ConvBlock(nn.Module):
    """(B, C, H, W) -> the same: x + norm(conv(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x + F.relu(self.norm(self.conv(x)))


def regression_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One ordinary regression step; returns the loss, 0-d."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _gpt_batches(*, steps: int, rank: int) -> Iterator[Batch]:
    settings = DemoSettings(model=GPTConfig(), rows=8)
    return demo_batches(standard_library(max_bytes=settings.text_bytes).train, settings, rank=rank, num_batches=steps)


def _drawn(shape: tuple[int, ...], *, steps: int, rank: int) -> Iterator[Batch]:
    """Random inputs of `shape`, and 64 numbers for each."""
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(shape, generator=draw), torch.randn(shape[0], 64, generator=draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its step and its data."""

    build: Callable[[], nn.Module]
    step: Callable[..., Tensor]
    batches: Callable[..., Iterator[Batch]]
    """`batches(steps=..., rank=...)`, on the CPU."""


WORKLOADS = {
    WorkloadName.MLP: Workload(build=MLP, step=regression_step, batches=partial(_drawn, (32, 64))),
    WorkloadName.GPT: Workload(build=partial(GPT, GPTConfig()), step=train_step, batches=_gpt_batches),
    WorkloadName.CONV: Workload(build=ConvNet, step=regression_step, batches=partial(_drawn, (8, 3, 32, 32))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankResult:
    device: str
    predicted: Prediction
    times_ms: dict[LaneKind, list[float]]


def run_bench(settings: BenchSettings, *, nproc: int) -> BenchReport:
    """Time all lanes of `settings` on `nproc` new processes."""
    ranks: list[_RankResult] = ws.run(_measure_on_rank, nproc, settings, nproc)
    times_ms = {kind: [rank.times_ms[kind] for rank in ranks] for kind in settings.lanes}
    eager_ms = times_ms[LaneKind.EAGER_DDP]
    return BenchReport(
        settings=settings,
        steps=len(eager_ms[0]),
        nproc=nproc,
        device=ranks[0].device,
        torch_version=torch.__version__,
        machine=f"{platform.machine()}, {num_cores()} cores",
        predicted_ms=1e-3 * ranks[0].predicted.step_us,
        cost_source=ranks[0].predicted.cost_source,
        lanes={
            kind: LaneFigures(timing=timing(mine_ms), ratio=ratio(eager_ms, mine_ms, block_steps=BLOCK_STEPS))
            for kind, mine_ms in times_ms.items()
        },
    )


def _measure_on_rank(settings: BenchSettings, nproc: int) -> _RankResult:
    world = ws.init()
    torch.set_num_threads(threads_per_rank(nproc))
    workload = WORKLOADS[settings.workload]
    most = settings.steps or MOST_STEPS
    recipe = Recipe(build=workload.build, step=workload.step, num_steps=most, learning_rate=1e-3)
    lanes = {kind: open_lane(kind, recipe, world) for kind in settings.lanes}
    drawn = workload.batches(steps=most, rank=world.rank)
    batches: Iterator[Batch] = ((x.to(world.device), y.to(world.device)) for x, y in drawn)
    if settings.steps is None:
        race(list(lanes.values()), islice(batches, FIRST_BLOCKS * BLOCK_STEPS), block_steps=BLOCK_STEPS)
        batches = islice(batches, _steps_left(settings.seconds, lanes.values(), world))
    race(list(lanes.values()), batches, block_steps=BLOCK_STEPS)
    return _RankResult(
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else str(world.device),
        predicted=compiled_step(lanes[LaneKind.WHOLESTEP]).explain().predicted,
        times_ms={kind: lane.times_ms for kind, lane in lanes.items()},
    )


def _steps_left(seconds: float, lanes: Iterable[Lane], world: ws.World) -> int:
    """How many steps of each lane fill the rest of the time, in whole blocks; the same on every rank."""
    typical_ms = sum(statistics.median(lane.times_ms) for lane in lanes)
    blocks = min(MOST_STEPS, int(1e3 * seconds / typical_ms)) // BLOCK_STEPS - FIRST_BLOCKS
    found = torch.tensor(max(0, blocks) * BLOCK_STEPS, device=world.device)
    if world.size > 1:
        dist.broadcast(found, 0)
    return int(found)


def command(
    *,
    workload: Annotated[
        list[WorkloadName] | None,
        typer.Option(help="mlp: mostly launches; gpt: mostly arithmetic; conv: batch norm. Default: all, in turn."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long each training is timed.")] = BenchSettings().seconds,
    steps: Annotated[int | None, typer.Option(help="Steps of each lane, in place of a time.")] = None,
    torch_compile: Annotated[bool, typer.Option("--torch-compile", help="A third lane: torch.compile + DDP.")] = False,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Time the compiled step against eager DDP, and if asked against torch.compile + DDP, on small trainings.

    Predictions are those of `wholestep calibrate`, if it has run on this host.
    """
    lanes = BenchSettings().lanes + ((LaneKind.TORCH_COMPILE_DDP,) if torch_compile else ())
    reports = []
    for name in workload or WorkloadName:
        settings = BenchSettings(workload=name, seconds=seconds, steps=steps, lanes=lanes)
        report = run_bench(settings, nproc=choose_nproc(nproc))
        reports.append(report.to_json())
        if not as_json:
            Console().print(report)
    if as_json:
        print(json.dumps(reports, indent=2))
