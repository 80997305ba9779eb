"""`wholestep bench`: step times of a small reference training, compiled and eager, in alternating blocks."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from wholestep.cli.demo import DemoSettings, demo_batches
from wholestep.cli.gpt import GPT, GPTConfig, train_step
from wholestep.cli.lanes import Batch, LaneKind, Recipe, Timing, open_lane, race, timing
from wholestep.cli.options import AsJson, Nproc, choose_nproc, threads_per_rank
from wholestep.cli.text import standard_library
from wholestep.errors import ConfigError

BLOCK_STEPS = 10
"""Steps of one lane before the next takes over."""


class WorkloadName(StrEnum):
    """What is trained."""

    GPT = "gpt"
    """The model, step and data of the demo: mostly arithmetic."""
    DEEP = "deep"
    """Sixty-four narrow layers: mostly launches and small collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    workload: WorkloadName = WorkloadName.GPT
    steps: int = 60
    lanes: tuple[LaneKind, ...] = (LaneKind.WHOLESTEP, LaneKind.EAGER_DDP)

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ConfigError(f"--steps wants at least 2 (the first one compiles and is not timed), got {self.steps}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Step times of every lane, over all ranks."""

    settings: BenchSettings
    nproc: int
    device: str
    torch_version: str
    machine: str
    timings: dict[LaneKind, Timing]

    def ratio(self, kind: LaneKind) -> float:
        """Median step of eager DDP over that of `kind`: above one, `kind` is faster."""
        return self.timings[LaneKind.EAGER_DDP].median_ms / self.timings[kind].median_ms

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "workload": self.settings.workload.value,
            "steps": self.settings.steps,
            "nproc": self.nproc,
            "device": self.device,
            "torch": self.torch_version,
            "machine": self.machine,
            "lanes": {
                kind.value: {**asdict(measured), "ratio_to_eager_ddp": self.ratio(kind)}
                for kind, measured in self.timings.items()
            },
        }

    def __rich__(self) -> Table:
        title = f"{self.settings.workload.value}: {self.settings.steps} steps, {self.nproc} ranks, {self.device}"
        caption = f"torch {self.torch_version}, {self.machine}; blocks of {BLOCK_STEPS} steps in turn; ms per step"
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        table.add_column("lane")
        for column in ("median", "10%", "90%", "first call", "eager DDP / lane"):
            table.add_column(column, justify="right")
        for kind, one in self.timings.items():
            figures = (one.median_ms, one.p10_ms, one.p90_ms, one.first_ms)
            table.add_row(kind.value, *(f"{figure:.2f}" for figure in figures), f"{self.ratio(kind):.3f}")
        return table


class DeepNet(nn.Module):
    """(B, 64) -> (B, 64) through `num_layers` residual layers of width 64."""

    def __init__(self, num_layers: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def deep_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One ordinary regression step; returns the loss, 0-d."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _gpt_batches(*, steps: int, rank: int) -> Iterator[Batch]:
    settings = DemoSettings()
    return demo_batches(
        standard_library(max_bytes=settings.text_bytes).train, settings, rank=rank, num_batches=steps
    )


def _deep_batches(*, steps: int, rank: int) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(32, 64, generator=draw)
        yield x, x.roll(1, dims=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its step and its data."""

    build: Callable[[], nn.Module]
    step: Callable[..., Tensor]
    batches: Callable[..., Iterator[Batch]]
    """`batches(steps=..., rank=...)`, on the CPU."""


WORKLOADS = {
    WorkloadName.GPT: Workload(build=partial(GPT, GPTConfig()), step=train_step, batches=_gpt_batches),
    WorkloadName.DEEP: Workload(build=DeepNet, step=deep_step, batches=_deep_batches),
}


def run_bench(settings: BenchSettings, *, nproc: int) -> BenchReport:
    """Time all lanes of `settings` on `nproc` new processes."""
    ranks: list[tuple[str, dict[LaneKind, list[float]]]] = ws.run(_measure_on_rank, nproc, settings, nproc)
    device, _ = ranks[0]
    return BenchReport(
        settings=settings,
        nproc=nproc,
        device=device,
        torch_version=torch.__version__,
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        timings={kind: timing([times[kind] for _, times in ranks]) for kind in settings.lanes},
    )


def _measure_on_rank(settings: BenchSettings, nproc: int) -> tuple[str, dict[LaneKind, list[float]]]:
    world = ws.init()
    torch.set_num_threads(threads_per_rank(nproc))
    workload = WORKLOADS[settings.workload]
    recipe = Recipe(build=workload.build, step=workload.step, num_steps=settings.steps, learning_rate=1e-3)
    lanes = [open_lane(kind, recipe, world) for kind in settings.lanes]
    batches = (
        (x.to(world.device), y.to(world.device)) for x, y in workload.batches(steps=settings.steps, rank=world.rank)
    )
    race(lanes, batches, block_steps=BLOCK_STEPS)
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else str(world.device)
    return device, {lane.kind: lane.times_ms for lane in lanes}


def command(
    *,
    workload: Annotated[
        WorkloadName, typer.Option(help="gpt: mostly arithmetic; deep: mostly launches.")
    ] = WorkloadName.GPT,
    steps: Annotated[int, typer.Option(help="Steps of each lane.")] = BenchSettings().steps,
    torch_compile: Annotated[bool, typer.Option("--torch-compile", help="A third lane: torch.compile + DDP.")] = False,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Time the compiled step against eager DDP, and if asked against torch.compile + DDP, on a small training."""
    lanes = BenchSettings().lanes + ((LaneKind.TORCH_COMPILE_DDP,) if torch_compile else ())
    report = run_bench(BenchSettings(workload=workload, steps=steps, lanes=lanes), nproc=choose_nproc(nproc))
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        Console().print(report)
