"""What the user's own Python costs in a live step, beside the same step as one graph.

    python benchmarks/live.py                # host microseconds a call beyond the pure step, on the CPU
    python benchmarks/live.py --workload W1  # milliseconds a step of a reference training, on a GPU
    python benchmarks/live.py --workload W1 --nproc 2 --strategy fsdp  # on two, with sharded parameters
    python benchmarks/live.py --json

The pure step returns its loss, whose value is asked for after the call. The live steps ask for it themselves. All are
called by turns in one run, a block of calls each; a figure is the median of its calls. Below the table stands what
`explain` says of each live step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import wholestep as ws
from wholestep.cli.suite.workloads import draw_tokens
from wholestep.cli.workloads.reference_lm import REFERENCE, LanguageModelSize, build
from wholestep.config import Strategy

SMALL_GPT = LanguageModelSize(num_layers=12, width=16, num_heads=2, vocabulary=64, length=8, rows=1)
BLOCK = 10
STRATEGIES: dict[str, Strategy] = {
    "ddp": ws.DDP(), "zero": ws.ZeRO(), "fsdp": ws.FSDP(reshard_after_forward=True),
}  # fmt: skip

Forward = Callable[..., Tensor]
"""The loss of a model and a batch."""


def forward_of_model(model: nn.Module, *batch: Tensor) -> Tensor:
    """The model's own, in bfloat16 where it has autocast on a GPU."""
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=batch[0].is_cuda):
        loss: Tensor = model(*batch)
    return loss


def thirty_calls(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Some thirty small calls of torch by the step itself, on one weight."""
    (weight,) = model.parameters()
    for _ in range(9):
        x = torch.tanh(x * weight) + 0.1
    return F.mse_loss(x, y)


def one_weight() -> nn.Module:
    """A model of eight numbers."""
    return nn.ParameterList([torch.ones(8)])


@dataclass
class Contender:
    """One way to write the step, with a model of its own."""

    name: str
    call: Callable[[], Any]
    step: ws.CompiledStep
    times_us: list[float] = field(default_factory=list)

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)


def contenders(
    make: Callable[[], nn.Module], batch: tuple[Tensor, ...], forward: Forward, backend: str, strategy: Strategy
) -> list[Contender]:
    """The step as one graph, and live with reads after the update and before it."""
    options: dict[str, Any] = {"backend": backend, "strategy": strategy}

    def training() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def plain(model: nn.Module, opt: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
        loss = forward(model, *batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    model, opt = training()
    pure = ws.compile(lambda *batch: plain(model, opt, *batch), fullgraph=True, **options)

    met, met_opt = training()
    losses: list[float] = []

    def metered(*batch: Tensor) -> None:
        losses.append(plain(met, met_opt, *batch).item())
        if len(losses) % 10 == 0:
            print(end="")  # a line of a log, without the noise

    guarded_model, guarded_opt = training()

    def guarded(*batch: Tensor) -> float | None:
        loss = forward(guarded_model, *batch)
        loss.backward()
        if not torch.isfinite(loss.detach()):
            return None
        guarded_opt.step()
        guarded_opt.zero_grad()
        return float(loss.detach())

    one_model, one_opt = training()
    rank = ws.init().rank

    def logged(*batch: Tensor) -> None:
        loss = plain(one_model, one_opt, *batch)
        if rank == 0:
            losses.append(loss.item())

    live = [ws.compile(metered, **options), ws.compile(guarded, **options), ws.compile(logged, **options)]
    return [
        Contender("pure, the value asked for after it", lambda: float(pure(*batch)), pure),
        Contender("append(loss.item()), print", lambda: live[0](*batch), live[0]),
        Contender("isfinite between backward and update", lambda: live[1](*batch), live[1]),
        Contender("append(loss.item()) on rank 0 alone", lambda: live[2](*batch), live[2]),
    ]


def measure(group: list[Contender], blocks: int, progress: Progress) -> None:
    """Times blocks of calls by turns, after enough calls to know the paths."""
    task = progress.add_task("calls", total=blocks + 1)
    for number in range(blocks + 1):
        for one in group:
            for _ in range(BLOCK):
                start = time.perf_counter()
                one.call()
                if number:
                    one.times_us.append((time.perf_counter() - start) * 1e6)
        progress.advance(task)


def groups(workload: str | None, strategy: Strategy) -> dict[str, list[Contender]]:
    """What is measured, by name."""
    if workload is not None:
        world = ws.init()
        size, device = REFERENCE[workload], world.device
        x, y = (one.to(device) for one in draw_tokens(size, world.rank))
        return {workload: contenders(lambda: build(size, device), (x, y), forward_of_model, "inductor", strategy)}
    x, y = draw_tokens(SMALL_GPT, 0)
    gpt = contenders(lambda: build(SMALL_GPT, torch.device("cpu")), (x, y), forward_of_model, "eager", strategy)
    small = contenders(one_weight, (torch.randn(8), torch.randn(8)), thirty_calls, "eager", strategy)
    return {"GPT of 12 layers": gpt, "30 small calls": small}


def measured(workload: str | None, blocks: int, strategy: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The figures, a row for each contender, and what the live ones say of themselves. On every rank."""
    found = groups(workload, STRATEGIES[strategy])
    with Progress(console=Console(stderr=True), disable=ws.init().rank > 0) as progress:
        for group in found.values():
            measure(group, blocks, progress)
    rows = [
        {
            "training": name, "step": one.name, "median_us": one.median_us,
            "beyond_us": one.median_us - group[0].median_us, "ratio": one.median_us / group[0].median_us,
        }
        for name, group in found.items() for one in group
    ]  # fmt: skip
    return rows, [str(one.step.explain()) for group in found.values() for one in group[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(REFERENCE), help="a reference training, on a GPU")
    parser.add_argument("--blocks", type=int, default=20, help=f"blocks of {BLOCK} calls (default 20)")
    parser.add_argument("--nproc", type=int, default=1, help="ranks (default 1); figures are of the first")
    parser.add_argument("--strategy", choices=sorted(STRATEGIES), default="ddp", help="of several ranks (default ddp)")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args()
    asked = (options.workload, options.blocks, options.strategy)
    rows, told = measured(*asked) if options.nproc == 1 else ws.run(measured, options.nproc, *asked)[0]
    if options.json:
        print(json.dumps(rows))
        return 0
    table = Table(title=f"Live steps, torch {torch.__version__}")
    for column in ("training", "step", "median us", "beyond the pure step, us", "ratio"):
        table.add_column(column, justify="left" if column in ("training", "step") else "right")
    for row in rows:
        table.add_row(
            str(row["training"]), str(row["step"]), f"{row['median_us']:,.0f}", f"{row['beyond_us']:,.0f}",
            f"{row['ratio']:.3f}",
        )  # fmt: skip
    Console().print(table)
    for text in told:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
