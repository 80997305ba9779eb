"""The records that explain() returns; they print as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from wholestep.api.report.prediction import ConcurrentCompute, PeakMemory, Prediction
from wholestep.api.report.size_report import SizeReport, size_table
from wholestep.ir.printer import bytes_text
from wholestep.ir.program import PlacementFallback
from wholestep.passes.comm.bucketing import bucket_gradients
from wholestep.passes.comm.gather_buckets import bucket_gathers

_MAX_SHOWN = 3
"""Modules that are named in the column 'hidden by'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of the step, in the order of execution."""

    number: int
    op: str
    dtype: str
    num_bytes: int
    """Bytes that one rank puts in: what travels."""
    gradient_bytes: int
    """Bytes of the gradients that it carries: more than `num_bytes` where they are compressed, 0 if it carries none. Of
    a gather, bytes of the whole tensors that it brings."""
    axis: str
    members: tuple[str, ...]
    """Parameters whose gradients it carries, or that it gathers; empty for other collectives."""
    kind: str
    """"reduce" and "scatter" of gradients, "gather"; empty for other collectives."""
    phase: str
    """The part of the step that a gather is for."""
    reason: str
    """Why it carries what it does."""
    start_us: float
    """Predicted, from the start of the step."""
    predicted_us: float
    """How long it is under way, predicted."""
    exposed_us: float
    """How long the device stands still for it, predicted."""
    hidden_by: tuple[ConcurrentCompute, ...]
    """Computation of the device while it is under way, predicted; the longest first."""
    measured_exposed_us: float | None
    """How long its waits took, the median of the calls measured; None before `CompiledStep.measure` has seen enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLine:
    """One pass of the pipeline: its time and its decisions."""

    name: str
    time_ms: float
    num_nodes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Times that `CompiledStep.measure` saw on this rank, microseconds."""

    num_calls: int
    step_us: float
    """The median."""
    p10_us: float
    p90_us: float
    exposed_us: float
    """Time in waits per call, the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The description of a compiled step. Prints as a table; `to_json` for machines."""

    step: str
    strategy: str
    backend: str
    loaded_from: str
    """The file that the step was loaded from; empty if this process has captured it."""
    num_ranks: int
    num_params: int
    """Parameter tensors."""
    param_bytes: int
    num_nodes: int
    nodes_by_region: dict[str, int]
    collectives: tuple[Collective, ...]
    predicted: Prediction
    peak: PeakMemory
    measured: MeasuredStep | None
    sizes: SizeReport
    """Sizes that are no constants of the graph."""
    fallbacks: tuple[PlacementFallback, ...]
    """Operators that run on whole tensors, gathered for them, since placement has no rule for shards."""
    passes: tuple[PassLine, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        plain = asdict(self)
        plain["predicted"].update(step_us=self.predicted.step_us, device_us=self.predicted.device_us)
        return plain

    def bucket_of(self, param: str) -> int | None:
        """The number of the collective that carries the gradient of `param`; None if none does."""
        return next((c.number for c in self.collectives if c.kind != "gather" and param in c.members), None)

    def __rich__(self) -> Group:
        return _rendered(self)

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def _rendered(report: Explanation) -> Group:
    """Everything, from the whole to its parts."""
    head = Text.assemble(
        (report.step, "bold"),
        f": {report.num_nodes} operators in one graph, {report.num_params} parameters, "
        f"{bytes_text(report.param_bytes)}; {report.strategy} on {report.num_ranks} rank"
        f"{'s' * (report.num_ranks != 1)}, backend {report.backend}\n",
        ", ".join(f"{region} {count}" for region, count in report.nodes_by_region.items()),
        f"\nloaded from {report.loaded_from}" if report.loaded_from else "",
    )
    parts: list[Any] = [head, *_collective_table(report), _times(report), _memory(report)]
    if report.sizes:
        parts.append(size_table(report.sizes))
    if report.fallbacks:
        parts.append(_fallback_table(report.fallbacks))
    if any(c.members for c in report.collectives):
        parts.append(_member_table(report.collectives))
    notes = [
        f"{line.name}: {note}" for line in report.passes for note in line.notes if not _is_in_table(line.name, note)
    ]
    if notes:
        parts.append(Text("\n".join(notes), style="dim"))
    return Group(*parts)


def _is_in_table(name: str, note: str) -> bool:
    """Whether a table says the same."""
    starts = {bucket_gradients.__name__: "bucket ", bucket_gathers.__name__: "gather "}
    return name in starts and note.startswith(starts[name])


def _collective_table(explanation: Explanation) -> Iterable[Table | Text]:
    if not explanation.collectives:
        yield Text("No collectives: the step runs on one rank.")
        return
    table = Table(title="Collectives, in order; times predicted, in us", title_justify="left")
    measured = ("waited",) if explanation.measured is not None else ()
    for column in ("#", "collective", "bytes", "takes", "exposed", *measured):
        table.add_column(column, justify="left" if column == "collective" else "right", no_wrap=True)
    for column in ("hidden by", "carries", "why"):
        table.add_column(column)
    for c in explanation.collectives:
        waited = () if c.measured_exposed_us is None else (f"{c.measured_exposed_us:,.0f}",)
        table.add_row(
            str(c.number), f"{c.op} {c.dtype}", bytes_text(c.num_bytes), f"{c.predicted_us:,.0f}",
            f"{c.exposed_us:,.0f}", *waited, _hidden_text(c.hidden_by), _carried_text(c), c.reason,
        )  # fmt: skip
    yield table


def _carried_text(c: Collective) -> str:
    if not c.members:
        return f"axis {c.axis}"
    if c.kind == "gather":
        return f"{len(c.members)} tensor{'s' * (len(c.members) != 1)} for {c.phase}, {bytes_text(c.gradient_bytes)}"
    packed = f" of {bytes_text(c.gradient_bytes)}" if c.gradient_bytes != c.num_bytes else ""
    return f"{len(c.members)} gradient{'s' * (len(c.members) != 1)}{packed}"


def _hidden_text(hidden_by: Sequence[ConcurrentCompute]) -> str:
    shown = [f"{one.region}{' ' * bool(one.module)}{one.module} {one.us:,.0f}" for one in hidden_by[:_MAX_SHOWN]]
    rest = hidden_by[_MAX_SHOWN:]
    shown += [f"{len(rest)} more {sum(one.us for one in rest):,.0f}"] if rest else []
    return ", ".join(shown) or "nothing"


def _times(explanation: Explanation) -> Text:
    one = explanation.predicted
    parts = [f"{one.compute_us:,.0f} computing", f"{one.exposed_us:,.0f} exposed communication"]
    if one.slowdown_us >= 0.5:
        parts.insert(1, f"{one.slowdown_us:,.0f} slower beside communication")
    host = f"; the host needs {one.host_us:,.0f}" if one.host_us else ""
    lines = [f"Predicted step: {one.step_us:,.0f} us ({', '.join(parts)}{host}). Costs: {one.cost_source}."]
    if explanation.measured is None:
        lines.append("Measured: not yet; measure(n) times your next n calls.")
    else:
        seen = explanation.measured
        lines.append(
            f"Measured on this rank: {seen.step_us:,.0f} us (10% to 90%: {seen.p10_us:,.0f} to {seen.p90_us:,.0f}; "
            f"{seen.num_calls} calls), {seen.exposed_us:,.0f} of them in waits; predicted / measured: "
            f"{one.step_us / seen.step_us:.2f}."
        )
    return Text("\n".join(lines))


def _memory(explanation: Explanation) -> Text:
    peak = explanation.peak
    where = " of ".join(part for part in (peak.region, peak.module) if part)
    kinds = ", ".join(f"{name} {bytes_text(count)}" for name, count in peak.by_category.items() if count)
    return Text(f"Peak memory: {bytes_text(peak.num_bytes)} at {peak.node} ({where}): {kinds}.")


def _member_table(collectives: Sequence[Collective]) -> Table:
    table = Table(title="Which bucket each parameter is in", title_justify="left")
    table.add_column("bucket (#)", justify="right")
    has_gathers = any(c.kind == "gather" for c in collectives)
    if has_gathers:
        table.add_column("carries")
    what = "gradient readiness, or of use" if has_gathers else "gradient readiness"
    table.add_column(f"parameters, in order of {what}")
    for c in collectives:
        if c.members:
            kind = (f"gather, {c.phase}" if c.kind == "gather" else "gradients",) if has_gathers else ()
            table.add_row(str(c.number), *kind, ", ".join(c.members))
    return table


def _fallback_table(fallbacks: Sequence[PlacementFallback]) -> Table:
    table = Table(title="Operators that run on whole tensors, gathered for them", title_justify="left")
    for column in ("operator", "calls", "gathered, per rank"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    for one in fallbacks:
        table.add_row(one.operator, str(one.count), bytes_text(one.num_bytes))
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """How often a step was captured and how often a captured graph was used again."""

    traces: int
    hits: int
    reasons: tuple[str, ...]
    """Why each trace after the first was needed."""
    loaded: int = 0
    """How many graphs came from a file and were not captured here."""
