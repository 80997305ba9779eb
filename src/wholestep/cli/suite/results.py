"""Results of contenders as plain values, saved to a file and shown as tables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wholestep.cli.suite.contenders import Kind
from wholestep.cli.suite.kernel_profile import Breakdown

LOSS_STEPS = 20
"""Steps that each contender is opened with; the loss after the last of them is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    """One contender. What was not measured is None."""

    outcome: str = "ok"
    """"ok", "differs" (its loss is not that of a stock contender), "failed" or "not run"."""
    note: str = ""
    median_ms: float | None = None
    """Of blocks of steps that took turns with the other contenders, or ran alone where the note says so; the slowest
    rank of each block counts."""
    p10_ms: float | None = None
    p90_ms: float | None = None
    tokens_per_s: float | None = None
    """Of all ranks together, from the median; rows where the training has no tokens."""
    first_s: float | None = None
    """The first call, which compiles."""
    loss: float | None = None
    """Mean over the ranks, of the last of `LOSS_STEPS` steps."""
    loss_difference: float | None = None
    """From eager DDP, relative to it; of FSDP of ours, where that did not run, from FSDP2."""
    predicted_ms: float | None = None
    """What `explain` says of a step of ours, by the costs that it names."""
    peak_bytes: int | None = None
    """Most that was allocated at once, by this contender alone; the rank with most."""
    predicted_bytes: int | None = None
    """What `explain` says of the peak, on rank 0."""
    reserved_bytes: int | None = None
    """What was held from the device after these steps, memory of CUDA graphs included."""
    exposed_ms: float | None = None
    """Of a step: nothing but communication runs. The largest over the ranks."""
    exposed_ms_by_rank: tuple[float, ...] = ()
    breakdown: Breakdown | None = None
    """Of rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One aim and what came of it."""

    what: str
    wanted: str
    found: str
    reached: bool | None
    """None: not measured."""

    def __str__(self) -> str:
        word = {True: "reached", False: "not reached", None: "not measured"}[self.reached]
        return f"{word}: {self.what}: wanted {self.wanted}, found {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """One training in all contenders."""

    training: str
    nproc: int
    device: str
    torch_version: str
    date: str
    command: str
    floor: str = ""
    loss_tolerance: float = 0.0
    contenders: Mapping[str, ContenderResult] = field(default_factory=dict)
    """By the name of the kind, in the order of the run."""
    checks: tuple[Check, ...] = ()

    def contender(self, kind: Kind) -> ContenderResult:
        """The result of a contender; one that was not run where there is none."""
        return self.contenders.get(kind.name.lower(), ContenderResult(outcome="not run"))

    @property
    def is_sound(self) -> bool:
        """Whether no contender failed and no loss is wrong. Speed is no matter of soundness."""
        return all(one.outcome in ("ok", "not run") for one in self.contenders.values())

    def __rich__(self) -> RenderableType:
        caption = (
            f"torch {self.torch_version}, {self.date}, {self.command}. Blocks of steps in turn, the slowest rank "
            f"counts; memory is that of the contender alone; first: the first call, which compiles, with an empty "
            f"cache; loss after {LOSS_STEPS} steps, no further than {self.loss_tolerance:.1g} of it from eager DDP "
            "or, without that, from FSDP2."
        )
        table = Table(title=f"{self.training}: {self.nproc} x {self.device}", title_justify="left")
        table.add_column("contender", no_wrap=True)
        columns = ("ms", "10% to 90%", "x ours", "tokens/s", "peak GiB", "held GiB", "first s", "exposed ms", "loss")
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        ours = self.contender(Kind.OURS).median_ms
        for name, one in self.contenders.items():
            table.add_row(Kind[name.upper()].value, *_cells(one, ours))
        notes = [
            f"{Kind[name.upper()].value}: {said}" for name, one in self.contenders.items() if (said := _note_text(one))
        ]
        lines = filter(None, (caption, *notes, self.floor, *map(str, self.checks)))
        return Group(table, *(Text(line) for line in lines))

    def breakdowns(self) -> Table | str:
        """Where the time of a step goes, by kernel class, a column per contender; ms of rank 0."""
        by_contender = {name: one.breakdown for name, one in self.contenders.items() if one.breakdown is not None}
        title = (
            f"{self.training}: ms of a step by kernel class (rank 0, profiled; kernels beside each other count twice)"
        )
        if not by_contender:
            return f"{self.training}: no kernels of a device were seen."
        table = Table(title=title, title_justify="left")
        table.add_column("class", no_wrap=True)
        for name in by_contender:
            table.add_column(Kind[name.upper()].value, justify="right")
        for kernel_class in next(iter(by_contender.values())).busy_ms:
            table.add_row(kernel_class, *(f"{profile.busy_ms[kernel_class]:.2f}" for profile in by_contender.values()))
        table.add_section()
        for label, attribute in (
            ("nothing but communication", "exposed_ms"), ("nothing", "idle_ms"), ("step", "step_ms"),
            ("kernels, number", "kernels"),
        ):  # fmt: skip
            table.add_row(label, *(f"{getattr(profile, attribute):.2f}" for profile in by_contender.values()))
        return table


def _note_text(result: ContenderResult) -> str:
    predicted = "" if result.predicted_ms is None else f"predicted {result.predicted_ms:.2f} ms"
    if result.predicted_bytes is not None:
        predicted += f" and {result.predicted_bytes / 2**30:.2f} GiB"
    return "; ".join(filter(None, (result.outcome if result.outcome != "ok" else "", result.note, predicted)))


def _cells(result: ContenderResult, ours_ms: float | None) -> list[str]:
    def shown(value: float | None, form: str = ".2f", unit: float = 1.0) -> str:
        return "" if value is None else format(value / unit, form)

    spread = (
        f"{result.p10_ms:.2f} to {result.p90_ms:.2f}" if result.p10_ms is not None and result.p90_ms is not None else ""
    )
    compared = result.median_ms / ours_ms if result.median_ms is not None and ours_ms else None
    return [
        shown(result.median_ms), spread, shown(compared), shown(result.tokens_per_s, ",.0f"),
        shown(result.peak_bytes, unit=2**30), shown(result.reserved_bytes, unit=2**30), shown(result.first_s, ".1f"),
        shown(result.exposed_ms), shown(result.loss, ".4f"),
    ]  # fmt: skip


def save(path: Path, reports: Sequence[SuiteReport]) -> None:
    """Writes `reports` to `path` atomically."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(as_json(reports) + "\n")
    os.replace(temporary, path)


def as_json(reports: Sequence[SuiteReport]) -> str:
    """The reports as JSON."""
    return json.dumps([asdict(one) for one in reports], indent=2)


def load(path: Path) -> list[SuiteReport]:
    """What `save` wrote."""
    return [_report(one) for one in json.loads(path.read_text())]


def _report(fields: dict[str, Any]) -> SuiteReport:
    contenders = {name: _contender(one) for name, one in fields["contenders"].items()}
    checks = tuple(Check(**one) for one in fields["checks"])
    return SuiteReport(**{**fields, "contenders": contenders, "checks": checks})


def _contender(fields: dict[str, Any]) -> ContenderResult:
    profile = breakdown_from(fields["breakdown"])
    return ContenderResult(
        **{**fields, "breakdown": profile, "exposed_ms_by_rank": tuple(fields["exposed_ms_by_rank"])}
    )


def breakdown_from(fields: dict[str, Any] | None) -> Breakdown | None:
    """A breakdown that travelled as JSON."""
    if fields is None:
        return None
    longest = tuple((str(name), float(ms)) for name, ms in fields["longest"])
    return Breakdown(**{**fields, "longest": longest})
