"""Runs a suite: starts the ranks, then JAX, saves results and judges them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

import wholestep as ws
from wholestep.cli.suite.contenders import DEFAULT, JAX_KINDS, ON_TWO_AXES, Kind
from wholestep.cli.suite.rank_session import Plan, on_rank
from wholestep.cli.suite.results import ContenderResult, SuiteReport, load, save
from wholestep.cli.suite.roofline import floors
from wholestep.cli.suite.targets import judge
from wholestep.cli.suite.workloads import ON_REQUEST, SUITES, training
from wholestep.errors import ConfigError

JAX_RESERVE_S = 90.0
"""What is kept of the time for each contender of JAX, which run last."""
GRACE_S = 120.0
"""How long the ranks may go on after the end of their time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    """What is run."""

    suite: str
    trainings: tuple[str, ...]
    kinds: tuple[Kind, ...] = DEFAULT
    num_steps: int = 60
    budget_s: float = 540.0
    path: Path | None = None
    """A file for all results, written whenever a contender has something new."""
    command: str = ""

    def __post_init__(self) -> None:
        if self.num_steps < 20:
            raise ConfigError(f"--steps wants at least 20 with --suite, two blocks of steps; got {self.num_steps}.")
        if not self.budget_s > 0:
            raise ConfigError(f"--budget-s wants a time above 0, got {self.budget_s}.")
        if self.path is not None and not self.path.parent.is_dir():
            raise ConfigError(f"--out wants a file in a folder that exists, got {str(self.path)!r}.")


def parse_kinds(names: Sequence[str]) -> tuple[Kind, ...]:
    """The contenders of these names; the default ones for no names.

    Raises ConfigError for unknown ones.
    """
    known = {kind.name.lower(): kind for kind in Kind}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--contenders wants some of {', '.join(known)}, got {', '.join(unknown)}.")
    return tuple(kind for kind in Kind if kind.name.lower() in names) or DEFAULT


def parse_trainings(suite: str, names: Sequence[str]) -> tuple[str, ...]:
    """The trainings of these names; all of the suite for no names.

    Raises ConfigError for unknown ones.
    """
    known = [*SUITES["gpu"], *ON_REQUEST, *SUITES["cpu"]]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--workload wants some of {', '.join(known)} with --suite, got {', '.join(unknown)}.")
    return tuple(names) or SUITES[suite]


def run_suite(settings: SuiteSettings, *, nproc: int) -> list[SuiteReport]:
    """Runs all trainings of `settings`, each on `nproc` new processes.

    Raises ConfigError for GPUs that are not there, and for HSDP on another number of ranks than 4, 6, 8 and so on.
    """
    if (nproc < 4 or nproc % 2) and (asked := [kind.name.lower() for kind in settings.kinds if kind in ON_TWO_AXES]):
        raise ConfigError(
            f"{', '.join(asked)}: two replicas want an even number of processes, at least 4; got --nproc {nproc}."
        )
    if settings.suite == "gpu" and not torch.cuda.is_available():
        raise ConfigError("--suite gpu wants a GPU that torch sees, and there is none. Use --suite cpu.")
    end = time.time() + settings.budget_s
    reports: list[SuiteReport] = []
    with TemporaryDirectory() as folder:
        path = settings.path or Path(folder) / "reports.json"
        for number, name in enumerate(settings.trainings):
            share_s = (end - time.time()) / (len(settings.trainings) - number)
            reports.append(
                _run_training(settings, name, nproc=nproc, end=time.time() + share_s, kept=(path, tuple(reports)))
            )
            save(path, reports)
    return reports


def _run_training(
    settings: SuiteSettings, name: str, *, nproc: int, end: float, kept: tuple[Path, tuple[SuiteReport, ...]]
) -> SuiteReport:
    path, earlier = kept
    chosen = training(name)
    report = SuiteReport(
        training=name, nproc=nproc, device="", torch_version=torch.__version__, command=settings.command,
        date=datetime.now(UTC).date().isoformat(), loss_tolerance=chosen.loss_tolerance,
        floor=str(floors(chosen.size, nproc=nproc)) if chosen.size is not None else "",
    )  # fmt: skip
    save(path, [*earlier, report])
    of_jax = [kind for kind in settings.kinds if kind in JAX_KINDS]
    kinds = tuple(kind for kind in settings.kinds if kind not in JAX_KINDS)
    deadline = end - (JAX_RESERVE_S * len(of_jax) if _has_jax() and torch.cuda.is_available() else 0)
    if kinds:
        with TemporaryDirectory() as caches:
            plan = Plan(
                report=report, earlier=earlier, kinds=kinds, num_steps=settings.num_steps, deadline=deadline, path=path,
                caches=Path(caches),
            )  # fmt: skip
            report = _on_ranks(plan, nproc)
    for kind in of_jax:
        found = _jax(kind, settings, name, nproc=nproc, end=end)
        report = replace(report, contenders={**report.contenders, kind.name.lower(): found})
    return judge(report)


def _on_ranks(plan: Plan, nproc: int) -> SuiteReport:
    """What the ranks have put into the file, also where they did not come to their end."""
    why = ""
    try:
        ws.run(on_rank, nproc, plan, timeout_s=max(1.0, plan.deadline - time.time()) + GRACE_S)
    except Exception as error:  # whatever class it has on the rank that failed
        why = f"{type(error).__name__}: {str(error).strip()[:600]}"
        Console(stderr=True).print(
            f"{plan.report.training}: the ranks ended early. {why}", highlight=False, markup=False
        )
    report = load(plan.path)[-1]
    contenders = dict(report.contenders)
    for kind in plan.kinds if why else ():
        contenders.setdefault(
            kind.name.lower(), ContenderResult(outcome="failed", note=f"the ranks ended early: {why}")
        )
    return replace(report, contenders=contenders)


def _has_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def _jax(kind: Kind, settings: SuiteSettings, name: str, *, nproc: int, end: float) -> ContenderResult:
    """A contender of JAX, in a process of its own after those of torch."""
    if not _has_jax():
        return ContenderResult(outcome="not run", note="not installed")
    if training(name).size is None:
        return ContenderResult(outcome="not run", note="there is no JAX version of this training")
    if (left_s := end - time.time()) < 10:
        return ContenderResult(outcome="not run", note="no time was left")
    Console(stderr=True).print(f"{name}: {kind.value}", highlight=False)
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not torch.cuda.is_available():
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={nproc}"}
    arguments = [kind.name.lower(), name, str(nproc), str(settings.num_steps)]
    command = [sys.executable, "-m", "wholestep.cli.suite.jax_baseline", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        return ContenderResult(outcome="not run", note=f"not done within the {left_s:.0f} s that were left")
    if done.returncode:
        message = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return ContenderResult(outcome="failed", note=message[0][:400])
    return ContenderResult(**json.loads(done.stdout.strip().splitlines()[-1]))
