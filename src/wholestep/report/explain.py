"""explain(): which collectives a step runs, what each carries, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from wholestep.program import edit, meta, ops
from wholestep.program.collectives import SCATTER
from wholestep.program.meta import Region
from wholestep.program.program import InputKind, Program
from wholestep.program.show import bytes_text

_BUFFERS = "buffers of rank 0 before the step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of the step, in the order of execution."""

    number: int
    op: str
    dtype: str
    num_bytes: int
    """Bytes that one rank puts in."""
    axis: str
    overlapped_ops: int
    """Operators between the start of the collective and the wait for it: what can hide it."""
    members: tuple[str, ...]
    """Parameters whose gradients it carries; empty for other collectives."""
    reason: str
    """Why it carries what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLine:
    """One pass of the pipeline: its time and its decisions."""

    name: str
    time_ms: float
    num_nodes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a compiled step does. Prints as a table; `to_json` for machines."""

    step: str
    strategy: str
    backend: str
    num_ranks: int
    num_params: int
    """Parameter tensors."""
    param_bytes: int
    num_nodes: int
    nodes_by_region: dict[str, int]
    collectives: tuple[Collective, ...]
    passes: tuple[PassLine, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)

    def bucket_of(self, param: str) -> int | None:
        """The number of the collective that carries the gradient of `param`; None if none does."""
        return next((c.number for c in self.collectives if param in c.members), None)

    def __rich__(self) -> Group:
        head = Text.assemble(
            (self.step, "bold"),
            f": {self.num_nodes} operators in one graph, {self.num_params} parameters, {bytes_text(self.param_bytes)}; "
            f"{self.strategy} on {self.num_ranks} rank{'s' if self.num_ranks != 1 else ''}, backend {self.backend}\n",
            ", ".join(f"{region} {count}" for region, count in self.nodes_by_region.items()),
        )
        parts: list[Any] = [head, self._collective_table()]
        if any(c.members for c in self.collectives):
            parts.append(self._member_table())
        notes = [f"{line.name}: {note}" for line in self.passes for note in line.notes]
        if notes:
            parts.append(Text("\n".join(notes), style="dim"))
        return Group(*parts)

    def _collective_table(self) -> Table | Text:
        if not self.collectives:
            return Text("No collectives: the step runs on one rank.")
        table = Table(title="Collectives, in order", title_justify="left")
        for column in ("#", "operation", "dtype", "bytes", "axis", "ops until wait", "carries", "why"):
            right = column in ("#", "bytes", "ops until wait")
            whole = column in ("#", "operation", "bytes")
            table.add_column(column, justify="right" if right else "left", no_wrap=whole)
        for c in self.collectives:
            carries = f"{len(c.members)} gradients" if c.members else ""
            table.add_row(
                str(c.number), c.op, c.dtype, bytes_text(c.num_bytes), c.axis, str(c.overlapped_ops), carries, c.reason
            )
        return table

    def _member_table(self) -> Table:
        table = Table(title="Which bucket each parameter is in", title_justify="left")
        table.add_column("bucket (#)", justify="right")
        table.add_column("parameters, in order of gradient readiness")
        for c in self.collectives:
            if c.members:
                table.add_row(str(c.number), ", ".join(c.members))
        return table

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def explain(program: Program, *, step: str, strategy: str, backend: str) -> Explanation:
    """Describes a program of any stage; collectives appear from PLACED on."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    regions = {region.value: sum(meta.origin(node).region is region for node in nodes) for region in Region}
    params = [
        (record, node)
        for record, node in zip(program.inputs, program.placeholders, strict=True)
        if record.kind is InputKind.PARAM
    ]
    return Explanation(
        step=step,
        strategy=strategy,
        backend=backend,
        num_ranks=max((axis.size for axis in program.mesh), default=1),
        num_params=len(params),
        param_bytes=sum(meta.num_bytes(node) for _, node in params),
        num_nodes=len(nodes),
        nodes_by_region={name: count for name, count in regions.items() if count},
        collectives=tuple(_collectives(program)),
        passes=tuple(
            PassLine(name=r.name or "place", time_ms=r.time_ms, num_nodes=r.num_nodes, notes=r.notes)
            for r in program.history
        ),
    )


def _collectives(program: Program) -> list[Collective]:
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    axes = {axis.group: axis.name for axis in program.mesh}
    found: list[Collective] = []
    for node in program.graph.nodes:
        if not ops.is_collective(node):
            continue
        waits = [order[wait] for wait in ops.waits(node)]
        carried = list(edit.nodes_of(node.args[1] if node.target is SCATTER else node.args[0]))
        bucket, source = meta.bucket(node), meta.origin(node).source
        found.append(
            Collective(
                number=len(found),
                op=node.target._schema.name.split("::")[1].removesuffix("_"),
                dtype=str(meta.tensor(carried[0]).dtype).removeprefix("torch."),
                num_bytes=sum(map(meta.num_bytes, carried)),
                axis=axes.get(str(node.args[-1]), str(node.args[-1])),
                overlapped_ops=min(waits, default=order[node] + 1) - order[node] - 1,
                members=bucket.members if bucket else (),
                reason=bucket.reason if bucket else f"called at {source}" if source else _BUFFERS,
            )
        )
    return found
