"""`wholestep suite`: reference language models, ours against every stock way, in one process group, by turns.

One step is a forward in bfloat16 autocast, cross-entropy on float32 logits, backward, gradients averaged over the
ranks, and fused AdamW on float32 parameters. Every lane starts from the same weights and trains on the same random
tokens; it is opened alone, so that its memory is its own, and then all lanes take turns in blocks of steps.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from wholestep.cli.models import REFERENCE, LanguageModel, LanguageModelSize, build
from wholestep.cli.options import AsJson, Nproc, choose_nproc
from wholestep.errors import ConfigError

LOSS_STEPS = 20
"""Steps that each lane is opened with; the loss behind the last of them is compared."""
BLOCK_STEPS = 5


class Kind(Enum):
    """Who runs the step. The value is what a reader sees."""

    OURS = "wholestep"
    OURS_BF16 = "wholestep, gradients in bf16"
    LIMIT = "wholestep, no communication"
    EAGER = "eager DDP"
    EAGER_BF16 = "eager DDP, gradients in bf16"
    COMPILED_DDP = "torch.compile(DDP)"
    DDP_COMPILED = "DDP(torch.compile)"
    FSDP = "FSDP2 + compile"


OWN = (Kind.OURS, Kind.OURS_BF16, Kind.LIMIT)
STOCK = (Kind.EAGER, Kind.EAGER_BF16, Kind.COMPILED_DDP, Kind.DDP_COMPILED, Kind.FSDP)

Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFigures:
    """One lane, on the slowest rank."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    first_s: float
    """The first call, which compiles."""
    loss: float
    """Of rank 0 behind `LOSS_STEPS` steps."""
    peak_bytes: int
    """Allocated at the peak, by this lane alone."""
    reserved_bytes: int
    """Held from the device at the end, memory of CUDA graphs included."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """One workload."""

    workload: str
    nproc: int
    device: str
    torch_version: str
    lanes: dict[str, LaneFigures]

    def __rich__(self) -> Table:
        caption = f"torch {self.torch_version}; blocks of {BLOCK_STEPS} steps in turn; the slowest rank counts"
        title = f"{self.workload}: {self.nproc} x {self.device}"
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        columns = ("ms", "10% to 90%", "x ours", "peak GiB", "reserved", "first s", f"loss at {LOSS_STEPS}")
        table.add_column("lane")
        for column in columns:
            table.add_column(column, justify="right")
        ours = self.lanes.get(Kind.OURS.value)
        for name, one in self.lanes.items():
            compared = f"{one.median_ms / ours.median_ms:.2f}" if ours is not None else ""
            table.add_row(
                f"{name}{f' ({one.note})' if one.note else ''}", f"{one.median_ms:.2f}",
                f"{one.p10_ms:.2f} to {one.p90_ms:.2f}", compared, f"{one.peak_bytes / 2**30:.2f}",
                f"{one.reserved_bytes / 2**30:.2f}", f"{one.first_s:.1f}", f"{one.loss:.4f}",
            )  # fmt: skip
        return table


def _call(kind: Kind, model: LanguageModel, batch: tuple[Tensor, Tensor], world: ws.World) -> tuple[Call, Any]:
    """The step of a lane, and what has to be asked about it."""
    tokens, targets = batch
    wrapped: nn.Module = model
    if kind in OWN:
        names = tuple(name for name, _ in model.named_parameters())
        strategy = {
            Kind.OURS: ws.DDP(),
            Kind.OURS_BF16: ws.DDP(compress=ws.CastCompress(torch.bfloat16)),
            Kind.LIMIT: ws.DDP(ignore=names),
        }[kind]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = ws.compile(_train_step, strategy=strategy, backend="inductor")
        return lambda: step(model, optimizer, tokens, targets), step
    if kind is Kind.FSDP:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.blocks:
            block.compile()
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        inner: nn.Module = torch.compile(model) if kind is Kind.DDP_COMPILED else model  # type: ignore[assignment]
        ids = [world.device] if world.device.type == "cuda" else None
        ddp = DistributedDataParallel(inner, device_ids=ids, gradient_as_bucket_view=True)
        if kind is Kind.EAGER_BF16:
            ddp.register_comm_hook(None, bf16_compress_hook)
        wrapped = torch.compile(ddp) if kind is Kind.COMPILED_DDP else ddp  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    return lambda: _train_step(wrapped, optimizer, tokens, targets), None


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss: Tensor = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@dataclass(slots=True, kw_only=True)
class _Lane:
    kind: Kind
    call: Call
    step: Any
    figures: LaneFigures
    times_ms: list[float]


def _open(kind: Kind, size: LanguageModelSize, world: ws.World) -> _Lane:
    """Builds a lane and runs its first steps, alone."""
    torch.manual_seed(0)
    batch = _batch(size, world)
    _settle(world)
    before = _memory(world)
    model = build(size, world.device)
    call, step = _call(kind, model, batch, world)
    start = time.perf_counter()
    losses = [float(call())]
    first_s = time.perf_counter() - start
    losses += [float(call()) for _ in range(LOSS_STEPS - 1)]
    if world.rank == 0:
        told = f"{kind.value}: first call {first_s:.1f} s, loss {losses[-1]:.4f} behind {LOSS_STEPS} steps"
        Console(stderr=True).print(told, highlight=False)
    _settle(world)
    peak, reserved = (now - then for now, then in zip(_memory(world), before, strict=True))
    figures = LaneFigures(
        median_ms=0.0, p10_ms=0.0, p90_ms=0.0, first_s=first_s, loss=losses[-1], peak_bytes=peak,
        reserved_bytes=reserved,
    )  # fmt: skip
    return _Lane(kind=kind, call=call, step=step, figures=figures, times_ms=[])


def _batch(size: LanguageModelSize, world: ws.World) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(world.rank)
    shape = (size.rows, size.length)
    drawn = [torch.randint(size.vocabulary, shape, generator=draw).to(world.device) for _ in range(2)]
    return drawn[0], drawn[1]


def _memory(world: ws.World) -> tuple[int, int]:
    """Peak of allocated bytes since the last call, and bytes reserved now."""
    if world.device.type != "cuda":
        return 0, 0
    peak = torch.cuda.max_memory_allocated(world.device)
    torch.cuda.reset_peak_memory_stats(world.device)
    return peak, torch.cuda.memory_reserved(world.device)


def _settle(world: ws.World) -> None:
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    if world.size > 1:
        dist.barrier()


def _take_turns(lanes: list[_Lane], num_blocks: int, world: ws.World) -> None:
    """Times all lanes, a block of steps at a time, in an order that turns round."""
    order = list(lanes)
    for _ in range(num_blocks):
        for lane in order:
            lane.call()
            _wait(world)
            start = time.perf_counter()
            for _ in range(BLOCK_STEPS):
                lane.call()
            _wait(world)
            lane.times_ms.append(1e3 * (time.perf_counter() - start) / BLOCK_STEPS)
        order.reverse()


def _wait(world: ws.World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    if world.size > 1:
        dist.barrier()


def _on_rank(name: str, kinds: tuple[Kind, ...], num_blocks: int) -> dict[str, LaneFigures]:
    """Every lane of one workload on this rank. Large models are opened and timed one after another."""
    world, size = ws.init(), REFERENCE[name]
    torch.set_float32_matmul_precision("high")
    together = size.num_layers * size.width**2 < 50_000_000
    groups = [kinds] if together else [(kind,) for kind in kinds]
    found: dict[str, LaneFigures] = {}
    for group in groups:
        lanes = [_open(kind, size, world) for kind in group]
        _take_turns(lanes, num_blocks, world)
        for lane in lanes:
            found[lane.kind.value] = _figures(lane, world)
        del lanes
        torch.compiler.reset()
        _settle(world)
    return found


def _figures(lane: _Lane, world: ws.World) -> LaneFigures:
    gathered: list[Any] = [None] * world.size
    if world.size > 1:
        dist.all_gather_object(gathered, lane.times_ms)
    else:
        gathered = [lane.times_ms]
    slowest = sorted(max(block) for block in zip(*gathered, strict=True))
    note = f"backend {lane.step.explain().backend}" if lane.step is not None else ""
    return replace(
        lane.figures, median_ms=statistics.median(slowest), p10_ms=slowest[len(slowest) // 10],
        p90_ms=slowest[(9 * len(slowest)) // 10], note=note,
    )  # fmt: skip


def run_suite(name: str, kinds: tuple[Kind, ...], *, nproc: int, num_blocks: int) -> SuiteReport:
    """One workload on `nproc` new processes. Raises ConfigError for unknown workloads."""
    if name not in REFERENCE:
        raise ConfigError(f"--workload wants one of {', '.join(REFERENCE)}, got {name!r}.")
    ranks = ws.run(_on_rank, nproc, name, kinds, num_blocks)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return SuiteReport(
        workload=name, nproc=nproc, device=device, torch_version=torch.__version__, lanes=ranks[0],
    )  # fmt: skip


def command(
    *,
    workload: Annotated[list[str] | None, typer.Option(help="W1, W2, W3 or tiny. Default: W1, W2 and W3.")] = None,
    lanes: Annotated[
        list[str] | None, typer.Option(help="Names of lanes, in lower case, such as ours or fsdp.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=2, help=f"Blocks of {BLOCK_STEPS} steps of each lane.")] = 8,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Time reference language models against DistributedDataParallel, torch.compile and FSDP2, on GPUs."""
    names = {kind.name.lower(): kind for kind in Kind}
    if unknown := [name for name in lanes or () if name not in names]:
        raise ConfigError(f"--lanes wants some of {', '.join(names)}, got {', '.join(unknown)}.")
    kinds = tuple(names[name] for name in lanes) if lanes else tuple(Kind)
    reports = []
    for name in workload or ("W1", "W2", "W3"):
        report = run_suite(name, kinds, nproc=choose_nproc(nproc), num_blocks=blocks)
        reports.append(asdict(report))
        if not as_json:
            Console().print(report)
    if as_json:
        print(json.dumps(reports, indent=2))
