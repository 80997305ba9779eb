"""Aims of the suites against what was found: plain numbers in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from wholestep.cli.suite.contenders import JAX_KINDS, SHARDED_OURS, STOCK, Kind
from wholestep.cli.suite.results import Check, ContenderResult, SuiteReport

MAX_EXPOSED = 0.02
"""Communication that nothing hides, of the step."""
MAX_OVER_LIMIT = 1.05
"""The step over the same graph without communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What a training is to reach; None where nothing was promised."""

    most_ms: float | None = None
    over_stock: float | None = None
    """Median of the quickest stock contender over ours."""
    over_jax: float | None = None
    over_eager: float | None = None
    hides: bool = False
    """Communication is to be hidden."""
    no_more_memory: bool = False
    """The peak of memory is at most that of torch.compile(DDP)."""
    no_longer_compile: bool = False
    """The first call takes no longer than that of torch.compile(DDP)."""


AIMS: Mapping[str, Aim] = {
    "W1": Aim(most_ms=5.0, over_stock=5.0, over_jax=1.25),
    "W2": Aim(most_ms=15.5, over_stock=1.7, over_jax=1.25, hides=True, no_longer_compile=True),
    "W3": Aim(most_ms=105.0, over_stock=1.2, hides=True, no_more_memory=True),
    "mlp": Aim(over_eager=1.5),
    "gpt": Aim(over_eager=1.5),
}
"""By training: W1 to W3 on 4 H200s, the others on 2 CPU processes."""


def judge(report: SuiteReport) -> SuiteReport:
    """The report with losses compared, and with checks.

    Eager DDP says what a loss is. Where no GPU holds that, FSDP2 says it for FSDP of ours, which has its policy of
    types; under autocast the others round elsewhere.
    """
    eager_loss, fsdp_loss = report.contender(Kind.EAGER).loss, report.contender(Kind.FSDP).loss
    stock_loss = dict.fromkeys(SHARDED_OURS, fsdp_loss) if eager_loss is None else dict.fromkeys(Kind, eager_loss)
    contenders = {
        name: _compare(Kind[name.upper()], result, stock_loss.get(Kind[name.upper()]), report.loss_tolerance)
        for name, result in report.contenders.items()
    }
    report = replace(report, contenders=contenders)
    return replace(report, checks=tuple(_checks(report, AIMS.get(report.training, Aim()))))


def _compare(kind: Kind, result: ContenderResult, stock_loss: float | None, tolerance: float) -> ContenderResult:
    # The limit trains every rank on its own; JAX draws other weights; bfloat16 on the wire rounds gradients besides.
    if stock_loss is None or result.loss is None or kind in (Kind.LIMIT, *JAX_KINDS):
        return result
    difference = abs(result.loss - stock_loss) / abs(stock_loss)
    # Written so that a loss that is no number differs.
    outcome = result.outcome if difference <= tolerance or result.outcome != "ok" else "differs"
    return replace(result, loss_difference=difference, outcome=outcome)


def _checks(report: SuiteReport, aim: Aim) -> list[Check]:
    ours, limit, compiled = (report.contender(kind) for kind in (Kind.OURS, Kind.LIMIT, Kind.COMPILED_DDP))
    stock = min((ms for kind in STOCK if (ms := report.contender(kind).median_ms) is not None), default=None)
    difference = ours.loss_difference
    checks = [_at_most("loss from eager DDP's, relative", difference, report.loss_tolerance, form=".2g")]
    if aim.most_ms is not None:
        checks.append(_at_most("median step, ms", ours.median_ms, aim.most_ms))
    for what, least, other_ms in (
        ("the quickest stock contender over ours", aim.over_stock, stock),
        ("JAX over ours", aim.over_jax, report.contender(Kind.JAX).median_ms),
        ("eager DDP over ours", aim.over_eager, report.contender(Kind.EAGER).median_ms),
    ):
        if least is not None:
            checks.append(_at_least(what, _ratio(other_ms, ours.median_ms), least))
    if aim.hides:
        checks.append(
            _at_most("exposed communication, of the step", _ratio(ours.exposed_ms, ours.median_ms), MAX_EXPOSED)
        )
        over = _ratio(ours.median_ms, limit.median_ms)
        checks.append(_at_most("the step over the same graph without communication", over, MAX_OVER_LIMIT))
    if aim.no_more_memory:
        checks.append(_at_most("peak GiB, at most torch.compile(DDP)'s", *_gib(ours, compiled)))
    if aim.no_longer_compile:
        checks.append(_at_most("first call in s, at most torch.compile(DDP)'s", ours.first_s, compiled.first_s))
    return checks


def _gib(*contenders: ContenderResult) -> Sequence[float | None]:
    return [one.peak_bytes / 2**30 if one.peak_bytes is not None else None for one in contenders]


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _at_most(what: str, found: float | None, bound: float | None, *, form: str = ".3f") -> Check:
    reached = found <= bound if found is not None and bound is not None else None
    return Check(what=what, wanted=f"<= {_text(bound, form)}", found=_text(found, form), reached=reached)


def _at_least(what: str, found: float | None, bound: float, *, form: str = ".3f") -> Check:
    reached = found >= bound if found is not None else None
    return Check(what=what, wanted=f">= {_text(bound, form)}", found=_text(found, form), reached=reached)


def _text(value: float | None, form: str) -> str:
    return "nothing" if value is None else format(value, form)
