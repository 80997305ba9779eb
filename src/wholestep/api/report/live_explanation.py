"""What explain() says of a live step: its pieces, where Python asks for values, what runs call by call, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from wholestep.live.live_step import LiveStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceLine:
    """One piece of a live step."""

    lines: str
    """``train.py:12 to train.py:19``: the calls of torch in it."""
    num_calls: int
    launches: int
    """How often it ran compiled."""
    refused: str
    """Why it is no graph; empty if it is one."""
    source: str
    """The piece as a Python function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLine:
    """A line of the user's that asks for a value."""

    line: str
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReport:
    """The description of a live step."""

    reason: str
    """Why it is no single graph."""
    calls: int
    launches: int
    executed: int
    """Calls of torch that were executed one by one, over all calls of the step."""
    is_recorded: bool
    """False once too many calls in a row had no piece: the step then runs as eager code."""
    note: str
    """What the strategy does in a live step; empty where that is what it always does."""
    piece_lines: tuple[PieceLine, ...]
    reads: tuple[ReadLine, ...]
    eager_reasons: tuple[str, ...]
    """Why calls of torch were executed one by one."""
    open_modules: tuple[tuple[str, str], ...]
    """Classes of modules whose own Python runs at every call, and why."""

    @property
    def pieces(self) -> int:
        """How many pieces are compiled."""
        return sum(not one.refused for one in self.piece_lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveExplanation:
    """What `CompiledStep.explain` returns for a live step. Prints as a table; `to_json` for machines."""

    step: str
    backend: str
    live: LiveReport

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)

    def __rich__(self) -> Group:
        return _rendered(self)

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def explain_live(step: LiveStep, backend: str) -> LiveExplanation:
    """Describes a live step as its calls so far have shown it."""
    pieces = []
    for one in step.pieces:
        first, last = one.path.records[one.spec.span[0]], one.path.records[one.spec.span[1] - 1]
        pieces.append(
            PieceLine(
                lines=f"{first.line} to {last.line}",
                num_calls=one.spec.span[1] - one.spec.span[0],
                launches=one.launches,
                refused=one.refused,
                source=one.piece.source,
            )
        )
    report = LiveReport(
        reason=step.reason, calls=step.stats.calls, launches=step.stats.launches, executed=step.stats.executed,
        is_recorded=step.is_recorded, note=step.note, piece_lines=tuple(pieces),
        reads=tuple(ReadLine(line=read.line, function=read.name) for read in step.reads),
        eager_reasons=tuple(why for why, _ in step.stats.reasons.most_common()),
        open_modules=tuple(step.learned.modules.open.items()),
    )  # fmt: skip
    return LiveExplanation(step=step.name, backend=backend, live=report)


def _rendered(explanation: LiveExplanation) -> Group:
    live = explanation.live
    head = Text.assemble(
        (explanation.step, "bold"),
        f": live, its Python runs at every call; {live.calls} calls, {live.launches} launches of pieces, "
        f"{live.executed} calls of torch executed one by one\nWhy it is no single graph: {live.reason}",
    )
    table = Table(title="Pieces", title_justify="left")
    for column in ("calls of torch", "from line", "launches", "why it is no graph"):
        table.add_column(column, justify="right" if column in ("calls of torch", "launches") else "left")
    for one in live.piece_lines:
        table.add_row(str(one.num_calls), one.lines, str(one.launches), one.refused)
    parts: list[Any] = [head, table] if live.piece_lines else [head]
    if live.reads:
        parts.append(
            Text("Python asks for values at " + ", ".join(f"{one.line} ({one.function})" for one in live.reads))
        )
    if live.eager_reasons:
        parts.append(Text("Executed one by one, since\n" + "\n".join(f"- {why}" for why in live.eager_reasons)))
    if live.open_modules:
        rows = (f"- {name}: {why}" for name, why in live.open_modules)
        parts.append(Text("Modules whose own Python runs at every call\n" + "\n".join(rows)))
    if live.note:
        parts.append(Text(live.note))
    elif not live.is_recorded:
        parts.append(Text("Too many calls in a row had no piece: the step runs as eager code."))
    return Group(*parts)
