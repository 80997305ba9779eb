"""`wholestep demo`: a small GPT on real text, compiled and eager, side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

import wholestep as ws
from wholestep.cli.common.options import AsJson, Nproc, choose_nproc, threads_per_rank
from wholestep.cli.workloads.gpt import GPT, next_byte_loss, sample
from wholestep.cli.workloads.gpt_demo import DemoSettings, demo_batches, demo_recipe
from wholestep.cli.workloads.interleaved import (
    Contender,
    ContenderKind,
    Timing,
    compiled_step,
    largest_difference,
    open_contender,
    run_interleaved,
    timing,
)
from wholestep.cli.workloads.text_data import Text, standard_library

FINAL_STEPS = 10
"""The training loss is the mean over this many last steps: a single batch is noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    """One contender on one rank."""

    losses: tuple[float, ...]
    times_ms: tuple[float, ...]
    held_out: float
    """Nats per byte on text that no rank trained on."""
    fingerprint: str
    """SHA-256 of all parameters: equal on all ranks, or data parallelism is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank brings home; all but the contenders comes from rank 0 alone."""

    contenders: dict[ContenderKind, ContenderResult]
    difference: float = 0.0
    num_parameters: int = 0
    num_files: int = 0
    device: str = ""
    sample: str = ""
    traces: int = 0
    explain: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderSummary:
    """One contender over all ranks."""

    train_loss: float
    """Nats per byte, mean over ranks and the last steps."""
    held_out_loss: float
    """Nats per byte."""
    timing: Timing
    bytes_per_s: float
    """Bytes of text per second over all ranks, from the median step. A byte is a token here."""
    ranks_equal: bool
    """The parameters are the same, bit for bit, on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The outcome of a demo."""

    settings: DemoSettings
    nproc: int
    device: str
    num_parameters: int
    num_files: int
    wholestep: ContenderSummary
    eager_ddp: ContenderSummary
    speed_ratio: float
    """Median step time of eager DDP over that of the compiled step: above one, compiled is faster."""
    largest_difference: float
    """Largest absolute difference of a parameter or buffer between the two models at the end."""
    traces: int
    sample: str
    explain: Any
    """What `CompiledStep.explain()` returned on rank 0."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "explain"}
        for name in ("settings", "wholestep", "eager_ddp"):
            plain[name] = asdict(plain[name])
        return {**plain, "explain": self.explain.to_json()}

    def __rich__(self) -> Table:
        table = Table(title=f"{self.settings.steps} steps, {self.nproc} ranks, {self.device}", title_justify="left")
        for column in ("", ContenderKind.WHOLESTEP.value, ContenderKind.EAGER_DDP.value):
            table.add_column(column, justify="left" if not column else "right")
        rows: dict[str, Callable[[ContenderSummary], str]] = {
            "train loss (nats per byte)": lambda contender: f"{contender.train_loss:.6f}",
            "held-out loss (nats per byte)": lambda contender: f"{contender.held_out_loss:.6f}",
            "median step (ms)": lambda contender: f"{contender.timing.median_ms:.1f}",
            "step, 10% to 90% (ms)": lambda contender: (
                f"{contender.timing.p10_ms:.1f} to {contender.timing.p90_ms:.1f}"
            ),
            "tokens per second": lambda contender: f"{contender.bytes_per_s:,.0f}",
            "first call (ms)": lambda contender: f"{contender.timing.first_ms:.0f}",
            "parameters equal on all ranks": lambda contender: "yes" if contender.ranks_equal else "NO",
        }
        for label, show in rows.items():
            table.add_row(label, show(self.wholestep), show(self.eager_ddp))
        return table


def run_demo(settings: DemoSettings, *, nproc: int) -> DemoReport:
    """Train both contenders on `nproc` new processes and compare them."""
    ranks: list[RankResult] = ws.run(train_on_rank, nproc, settings, nproc)
    first = ranks[0]
    contenders = {kind: _summarise([rank.contenders[kind] for rank in ranks], settings) for kind in first.contenders}
    compiled, eager = contenders[ContenderKind.WHOLESTEP], contenders[ContenderKind.EAGER_DDP]
    return DemoReport(
        settings=settings,
        nproc=nproc,
        device=first.device,
        num_parameters=first.num_parameters,
        num_files=first.num_files,
        wholestep=compiled,
        eager_ddp=eager,
        speed_ratio=eager.timing.median_ms / compiled.timing.median_ms,
        largest_difference=first.difference,
        traces=first.traces,
        sample=first.sample,
        explain=first.explain,
    )


def _summarise(ranks: Sequence[ContenderResult], settings: DemoSettings) -> ContenderSummary:
    measured = timing([rank.times_ms for rank in ranks])
    bytes_per_step = len(ranks) * settings.rows * settings.model.context
    return ContenderSummary(
        train_loss=fmean(fmean(rank.losses[-FINAL_STEPS:]) for rank in ranks),
        held_out_loss=ranks[0].held_out,
        timing=measured,
        bytes_per_s=1e3 * bytes_per_step / measured.median_ms,
        ranks_equal=len({rank.fingerprint for rank in ranks}) == 1,
    )


def train_on_rank(settings: DemoSettings, nproc: int) -> RankResult:
    """What every process of the demo does. Rank 0 also shows the progress and draws the sample."""
    world = ws.init()
    torch.set_num_threads(threads_per_rank(nproc))
    text = standard_library(max_bytes=settings.text_bytes)
    recipe = demo_recipe(settings)
    contenders = [open_contender(kind, recipe, world) for kind in (ContenderKind.WHOLESTEP, ContenderKind.EAGER_DDP)]
    batches = (
        (x.to(world.device), y.to(world.device))
        for x, y in demo_batches(text.train, settings, rank=world.rank, num_batches=settings.steps)
    )
    run_interleaved(contenders, islice(batches, 1), block_steps=1)  # compiles, which has a display of its own
    with _progress(contenders, settings, world) as on_step:
        run_interleaved(contenders, batches, block_steps=settings.block_steps, on_step=on_step)
    results = {contender.kind: _contender_result(contender, text, settings, world) for contender in contenders}
    if world.rank != 0:
        return RankResult(contenders=results)
    compiled, eager = contenders
    module = compiled.module
    return RankResult(
        contenders=results,
        difference=largest_difference(compiled.module, eager.module),
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        num_files=text.num_files,
        device=str(world.device),
        sample=_draw(module, settings),
        traces=compiled_step(compiled).cache_info().traces,
        explain=compiled_step(compiled).explain(),
    )


def _contender_result(contender: Contender, text: Text, settings: DemoSettings, world: ws.World) -> ContenderResult:
    digest = hashlib.sha256()
    for parameter in contender.module.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    with torch.inference_mode():
        held_out = [
            float(next_byte_loss(contender.module, x.to(world.device), y.to(world.device)))
            for x, y in demo_batches(text.held_out, settings, rank=0, num_batches=settings.held_out_batches)
        ]
    return ContenderResult(
        losses=tuple(contender.losses),
        times_ms=tuple(contender.times_ms),
        held_out=fmean(held_out),
        fingerprint=digest.hexdigest(),
    )


def _draw(module: nn.Module, settings: DemoSettings) -> str:
    if not isinstance(module, GPT):
        raise TypeError(f"The demo samples from its own GPT, got {type(module).__name__}.")
    return sample(
        module, b"def ", num_bytes=settings.sample_bytes, temperature=settings.temperature, seed=settings.seed
    )


@contextmanager
def _progress(
    contenders: Sequence[Contender], settings: DemoSettings, world: ws.World
) -> Iterator[Callable[[Contender], None] | None]:
    """On rank 0, a progress bar per contender; yields what to call after every step."""
    if world.rank != 0 or settings.quiet:
        yield None
        return
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:>8,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    bytes_per_step = world.size * settings.rows * settings.model.context
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {
            contender.kind: progress.add_task(
                contender.kind.value, total=settings.steps, completed=len(contender.losses), loss=0.0, speed=0.0
            )
            for contender in contenders
        }

        def on_step(contender: Contender) -> None:
            recent_ms = fmean(contender.times_ms[-settings.block_steps :])
            speed = 1e3 * bytes_per_step / recent_ms
            progress.update(tasks[contender.kind], advance=1, loss=fmean(contender.losses[-FINAL_STEPS:]), speed=speed)

        yield on_step


def command(
    *,
    steps: Annotated[int, typer.Option(help="Steps of each contender.")] = DemoSettings().steps,
    seed: Annotated[int, typer.Option(help="Decides the weights, the batches and the sample.")] = 0,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level GPT on the text of Python's standard library: one compiled graph against eager DDP."""
    report = run_demo(DemoSettings(steps=steps, seed=seed, quiet=as_json), nproc=choose_nproc(nproc))
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
        return
    console = Console()
    console.print(
        f"\nGPT with {report.num_parameters:,} parameters on {report.num_files} files of Python's standard library. "
        f"The two contenders took turns, {report.settings.block_steps} steps at a time."
    )
    console.print(report)
    console.print(_verdict(report), markup=False)
    console.print(f"\nText drawn at temperature {report.settings.temperature} from the compiled model:", style="bold")
    console.print(report.sample, markup=False, highlight=False)
    console.print("\nThe compiled step, as `explain()` tells it:", style="bold")
    console.print(report.explain)


def _verdict(report: DemoReport) -> str:
    difference = report.largest_difference
    told = "0: the same bits" if difference == 0 else f"{difference:.3g}: the order of additions, grown over the steps"
    return (
        f"speed ratio, compiled / eager DDP: {report.speed_ratio:.3f}  (medians, the first call apart)\n"
        f"largest parameter difference:      {told}\n"
        f"traces of the step:                {report.traces}"
    )
