"""The records that `CompiledStep.verify` returns; they print as tables."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from wholestep.errors import VerificationError


class Outcome(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "not compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first value that is not what it should be."""

    step: int
    """Number of the step, from 1."""
    rank: int
    """The virtual rank, or the first one that differs from rank 0."""
    name: str
    """The node of the graph; an output or a parameter where no node of that name is in both programs."""
    op: str
    region: str
    """Part of the step: forward, backward, ..."""
    module: str
    source: str
    """The user's ``file.py:line``."""
    index: tuple[int, ...]
    """The element that differs most; empty for a number."""
    got: float
    wanted: float
    made_by: tuple[str, ...] = ()
    """Collectives between the last equal values and this one, which the passes made."""

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.op, self.region, self.module, self.source) if part)
        lines = [
            f"first difference: step {self.step}, rank {self.rank}, {self.name} ({where})",
            f"  at {list(self.index)}: {self.got!r}, should be {self.wanted!r}",
        ]
        if self.made_by:
            lines.append("  it comes from: " + "; ".join(self.made_by))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison over all steps that were run."""

    name: str
    outcome: Outcome
    text: str
    """What was found, or why nothing was compared."""
    difference: Difference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome of `CompiledStep.verify`. Prints as a table; `to_json` for machines."""

    step: str
    num_ranks: int
    """Virtual ranks."""
    num_steps: int
    """Steps that were run; fewer than asked for where one of them failed."""
    notes: tuple[str, ...]
    """How the arguments were divided, and what was changed between steps."""
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.outcome is not Outcome.FAILED for check in self.checks)

    @property
    def difference(self) -> Difference | None:
        """The first value that is not what it should be; None if there is none."""
        return next((check.difference for check in self.checks if check.difference is not None), None)

    def raise_if_failed(self) -> Verification:
        """Itself. Raises VerificationError with everything that was found if a check failed."""
        if not self.ok:
            raise VerificationError(str(self))
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        plain = asdict(self)
        for check in plain["checks"]:
            check["outcome"] = check["outcome"].value
        return {**plain, "ok": self.ok}

    def __rich__(self) -> Group:
        title = f"{self.step} on {self.num_ranks} virtual ranks, {self.num_steps} step{'s' * (self.num_steps != 1)}"
        table = Table(title=title, title_justify="left")
        table.add_column("check", no_wrap=True)
        table.add_column("outcome", no_wrap=True)
        table.add_column("what was found")
        for check in self.checks:
            table.add_row(check.name, check.outcome.value, Text(check.text))
        found = [Text(f"{check.name}\n{check.difference}") for check in self.checks if check.difference is not None]
        return Group(table, *found, Text("\n".join(self.notes), style="dim"))

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()
