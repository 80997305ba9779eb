"""Predicted exposed communication of three reference trainings, with our buckets and with those of others.

    python benchmarks/overlap_model.py
    python benchmarks/overlap_model.py --workloads W1 --ranks 4 --links nvlink --json
    python benchmarks/overlap_model.py --workloads W3 --ranks 4 --links nvlink --strategy zero

Nothing is trained and no GPU is needed: each training is captured at its full size, in memory that is reserved and
never touched, placed for N ranks, and every variant runs through the same passes with the default costs of an H200 and
of the link. What is simulated is the scheduled graph, on the device's clock (what the host needs to launch kernels is
not in it).

Variants, which differ in nothing but the buckets, but for the last one:
  ours        the buckets with the shortest predicted step
  25 MB       the rule of DistributedDataParallel: a first bucket of 1 MiB, then of 25 MiB
  one bucket  all gradients of one type together
  as placed   neither buckets nor a schedule: one reduction per gradient, waited for at once

  compiled    ours, planned for and lowered to segments of which a compiler makes kernels, as the backend for GPUs
              does it; each kernel's time is reckoned from what it reads and writes (`wholestep.cost.fusion_model`). On
              NVLink, up to 8 ranks, large reductions go by copies, as they would among the GPUs of a host

Under ZeRO the second and third are left out, and there is another one:
  gathers last  ours, with all gathers of updated parameters after the last reduction

Exit status 1 if ours exposes more than one of the others; if ours takes longer by more than the schedule's own
tolerance (`list_scheduler.ABOUT_AS_FAST`: of orders about as fast the one with the least memory is taken); or if more
than 2 % of the step are exposed for W2 or W3 on NVLink at 4 ranks under DDP. All rows take some five minutes on one
core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.fx as fx
from rich.console import Console
from rich.table import Table

from wholestep.api.report.prediction import predict
from wholestep.capture.capture import capture
from wholestep.cli.suite.workloads import autocast_step
from wholestep.cli.workloads.reference_lm import REFERENCE, LanguageModel, LanguageModelSize
from wholestep.config import DDP, Strategy, ZeRO
from wholestep.cost.cost_model import CostModel
from wholestep.cost.link_model import with_copies
from wholestep.ir import node_meta, op_info
from wholestep.ir.program import MeshAxis, Program
from wholestep.lower.inductor import segment_compiler
from wholestep.lower.inductor_passes import copy_engine_wire_format, form_inductor_segments
from wholestep.passes.comm.bucket_planner import Cuts, fixed_cuts
from wholestep.passes.comm.bucketing import DDP_LIMITS_BYTES
from wholestep.passes.comm.early_gathers import start_gathers_early
from wholestep.passes.comm.fold_mean import fold_mean
from wholestep.passes.comm.use_copy_engine import MIN_BYTES, use_copy_engine
from wholestep.passes.comm.wire_dtype import narrow_wire_dtype
from wholestep.passes.comm.wire_format import WireFormat, unchanged
from wholestep.passes.default_passes import passes_of
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import Pass, pass_name, run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.rewrites.fuse_cross_entropy import fuse_cross_entropy
from wholestep.passes.rewrites.fuse_gelu import fuse_gelu
from wholestep.passes.rewrites.matmul_out_dtype import widen_matmul_out_dtype
from wholestep.passes.schedule.list_scheduler import ABOUT_AS_FAST
from wholestep.passes.schedule.pack_scalars import pack_scalars
from wholestep.passes.schedule.sink_waits import sink_waits
from wholestep.place.shard_inputs import shard_inputs
from wholestep.place.strategies import place

LINKS = ("nvlink", "pcie", "ethernet25")
RANKS = (2, 4, 8, 64)
GPUS_OF_A_HOST = 8
OURS, AS_PLACED, COMPILED, GATHERS_LAST = "ours", "as placed", "compiled", "gathers last"
STRATEGIES: dict[str, Strategy] = {"ddp": DDP(), "zero": ZeRO()}
LARGEST_SHARE = {("W2", 4, "nvlink"): 0.02, ("W3", 4, "nvlink"): 0.02}
"""What may be exposed at most, as a share of the step."""


WORKLOADS = {name: size for name, size in REFERENCE.items() if name != "tiny"}


def captured(size: LanguageModelSize) -> Program:
    """The step as one graph. Parameters and states are reserved and never written to, so the system gives no memory."""
    with torch.device("meta"):
        model = LanguageModel(size)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for param in model.parameters():
        moments = {name: torch.empty_like(param) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(0.0), **moments}
    tokens = torch.zeros(size.rows, size.length, dtype=torch.int64)
    return capture(autocast_step, (model, optimizer, tokens, tokens.clone()), {}).program


def can(product: fx.Node) -> bool:
    """A GPU can. Tensors here are on a CPU, of which the backend would not ask so much."""
    return True


def lowering(*, by_copies: bool) -> list[Pass]:
    """The passes of the backend for a GPU."""
    why_not = "" if by_copies else "ranks are on several hosts"
    return [
        partial(fuse_cross_entropy, fuses=can),
        partial(fuse_gelu, fuses=can),
        partial(fold_mean, averages=lambda group, device: True),
        partial(use_copy_engine, why_not=lambda group, device: why_not),
        partial(narrow_wire_dtype, supports=can),
        partial(widen_matmul_out_dtype, widens=can),
        partial(pack_scalars, reads=segment_compiler.reads_packed),
        sink_waits,
        partial(form_inductor_segments("cuda"), compiles=segment_compiler.compiles),  # of a program on a CPU
    ]


def compiled(cost: CostModel, ranks: int, *, by_copies: bool) -> tuple[CostModel, list[Pass]]:
    """Costs and passes of a step that a GPU runs."""

    def choose_wire_format(grad: fx.Node, group: str) -> WireFormat:
        return copy_engine_wire_format(grad, ranks, supports=can) if by_copies else unchanged(grad, group)

    links = with_copies(cost.links, ranks=ranks, least_bytes=MIN_BYTES) if by_copies else cost.links
    cost = replace(cost, compiles=segment_compiler.may_compile, links=links)
    return cost, passes_of(cost=cost, choose_wire_format=choose_wire_format, lowering=lowering(by_copies=by_copies))


def variants(placed: Program, cost: CostModel, *, by_copies: bool) -> dict[str, tuple[CostModel, list[Pass]]]:
    """The costs and the passes of each variant, by its name."""
    reductions = [
        node for node in placed.graph.nodes if op_info.is_collective(node) and node_meta.bucket(node) is not None
    ]
    dtypes = [node_meta.tensor(node).dtype for node in reductions]
    ddp = fixed_cuts(list(map(node_meta.num_bytes, reductions)), dtypes, DDP_LIMITS_BYTES)

    def with_cuts(cuts: Cuts) -> tuple[CostModel, list[Pass]]:
        return cost, passes_of(cost=cost, choose=lambda gradients, plan: cuts)

    by_size = {"25 MB": with_cuts(ddp), "one bucket": with_cuts({})}
    last = [one for one in passes_of(cost=cost) if pass_name(one) != start_gathers_early.__name__]
    return {
        OURS: (cost, passes_of(cost=cost)),
        **({GATHERS_LAST: (cost, last)} if _is_sharded(placed) else by_size),
        AS_PLACED: (cost, [eliminate_dead_code, partial(reinplace, hold_updates=False)]),
        COMPILED: compiled(cost, placed.mesh[0].size, by_copies=by_copies),
    }


def _is_sharded(placed: Program) -> bool:
    return any(record.shard is not None for record in placed.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant of one workload on one kind of link; microseconds."""

    workload: str
    ranks: int
    link: str
    variant: str
    num_collectives: int
    step_us: float
    exposed_us: float
    peak_bytes: int

    @property
    def share(self) -> float:
        """The exposed part of the step."""
        return self.exposed_us / self.step_us


def rows_of(
    name: str, program: Program, ranks: Sequence[int], links: Sequence[str], strategy: Strategy
) -> Iterator[Row]:
    """Every variant of a captured workload."""
    for size in ranks:
        axes = (MeshAxis(name="data", size=size, group="data"),)
        placed = place(shard_inputs(program, strategy, axes), strategy, axes)
        for link in links:
            cost = CostModel.default(f"h200+{link}")
            by_copies = link == "nvlink" and size <= GPUS_OF_A_HOST and not _is_sharded(placed)
            for variant, (own, passes) in variants(placed, cost, by_copies=by_copies).items():
                found = predict(run_passes(placed, passes), own)
                yield Row(
                    workload=name, ranks=size, link=link, variant=variant, num_collectives=len(found.comm_intervals),
                    step_us=found.step.device_us, exposed_us=found.step.exposed_us, peak_bytes=found.peak.num_bytes,
                )  # fmt: skip


def faults(rows: Iterable[Row]) -> list[str]:
    """What is not as it should be, a sentence each."""
    cells: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.workload, row.ranks, row.link), {})[row.variant] = row
    found = []
    for cell, by_variant in cells.items():
        ours, where = by_variant[OURS], f"{cell[0]}, {cell[1]} ranks, {cell[2]}"
        for other in (row for row in by_variant.values() if row.variant != COMPILED):
            if ours.exposed_us > other.exposed_us + 0.5:
                found.append(f"{where}: ours exposes {ours.exposed_us:.0f} us, {other.variant} {other.exposed_us:.0f}")
            if ours.step_us > ABOUT_AS_FAST * other.step_us:
                found.append(f"{where}: ours takes {ours.step_us:.0f} us, {other.variant} {other.step_us:.0f}")
        for row in by_variant.values() if GATHERS_LAST not in by_variant else ():
            if row.variant in (OURS, COMPILED) and row.share > LARGEST_SHARE.get(cell, 1.0):
                found.append(
                    f"{where}: {row.share:.1%} of the step are exposed ({row.variant}), {LARGEST_SHARE[cell]:.0%} are "
                    f"allowed"
                )
    return found


def table(rows: Sequence[Row]) -> Table:
    """A line per workload, number of ranks and link; a column per variant."""
    names = list(dict.fromkeys(row.variant for row in rows))
    made = Table(
        title="Predicted exposed communication, us a step (share of the step; reductions)", title_justify="left"
    )
    for column in ("workload", "ranks", "link", "step, ours", "compiled"):
        made.add_column(column, justify="left" if column in ("workload", "link") else "right")
    for name in names:
        made.add_column(name, justify="right", no_wrap=True)
    for start in range(0, len(rows), len(names)):
        cell = rows[start : start + len(names)]
        one = cell[0]
        steps = [f"{row.step_us:,.0f}" for row in cell if row.variant in (OURS, COMPILED)]
        figures = [f"{row.exposed_us:,.0f} ({row.share:.1%}; {row.num_collectives})" for row in cell]
        made.add_row(one.workload, str(one.ranks), one.link, *steps, *figures)
    return made


def run(
    workloads: dict[str, LanguageModelSize],
    ranks: Sequence[int],
    links: Sequence[str],
    strategy: Strategy,
    *,
    tell: Callable[[str], None],
) -> list[Row]:
    """All rows; `tell` is told what is being done."""
    rows: list[Row] = []
    for name, size in workloads.items():
        tell(f"{name}: capturing")
        program = captured(size)
        for row in rows_of(name, program, ranks, links, strategy):
            tell(f"{row.workload}, {row.ranks} ranks, {row.link}: {row.variant}")
            rows.append(row)
    return rows


def main() -> int:
    """Prints the table, or JSON. Exit status 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=LINKS)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args()
    if min(options.ranks) < 2:
        parser.error("--ranks wants numbers of at least 2: one rank sends nothing")
    with Console(stderr=True).status("starting") as status:
        workloads = {name: WORKLOADS[name] for name in options.workloads}
        rows = run(workloads, options.ranks, options.links, STRATEGIES[options.strategy], tell=status.update)
    wrong = faults(rows)
    if options.json:
        plain = [{**asdict(row), "share": row.share} for row in rows]
        print(json.dumps({"torch": torch.__version__, "rows": plain, "faults": wrong}))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
        print("\n".join(wrong) or "Ours is nowhere worse.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
