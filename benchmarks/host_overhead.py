"""Host time that a compiled step costs per call beyond its generated code, and the eager loop beside it.

    python benchmarks/host_overhead.py
    python benchmarks/host_overhead.py --parameters 10 100 --optimizer sgd --json

What is timed: one process, one thread, a stack of Linear(4, 4) layers on two rows, `loss.backward()`,
`optimizer.step()`, `optimizer.zero_grad()`. The tensors are so small that time is host time.
Compiled calls, the generated code alone, and eager calls take turns in blocks of ten, so that a machine that slows
down slows all of them, and each runs with the caches that its own last call left.

The native guards are built first if need be (it takes some twenty seconds, once per machine); the title says which
guards were timed. WHOLESTEP_NATIVE=0 in the environment gives the comparisons in Python.

Columns, microseconds per call, medians:
  tensors        parameters and optimizer state, each looked at in every call
  beyond         the compiled call less its generated code, by two clocks inside the same call, less `clocks`. It
                 charges to the checks every cache miss on a tensor that the generated code would have met next
  clocks         what those two clocks themselves show where nothing is between them: the generated code called by the
                 same wrapper from the same kind of lambda, with the caches that its last call left
  whole - code   the compiled call less the generated code called alone, block by block: what a call really costs
                 more. A small difference of large numbers, so it wanders by some percent of `code`
  state          of `beyond`: torch's modes, attributes, containers, hooks, groups of the optimizer; and dtype, shape,
                 strides, device, requires_grad and .grad of every tensor. The native guard is timed where a call would
                 begin, with the caches that the last one left: a call from Python and a clock are in it
  branches       of `beyond`: conditions of the optimizer over its numbers
  other          what is left of `beyond`: arguments compared with the signature of the trace, the list of inputs filled
                 in, results put back, and Python on the way
  code           the generated code: operators, called one after another
  eager          the same step without wholestep: all of it is host time, and its operators cannot be told apart
  zero_grad      of `eager`: optimizer.zero_grad() alone, as a measure of what looking at every parameter costs
The parts are measured in calls of their own, since each clock adds about 0.1 us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import wholestep as ws
from wholestep.api.compiled_step import CompiledStep
from wholestep.capture.guards.state_guards import LayoutGuard
from wholestep.capture.guards.value_guards import BranchGuard
from wholestep.capture.native import build as native

TARGET_US = 100.0
"""What a call should cost at most beyond the generated code, at 1,000 parameters."""

WIDTH, ROWS, BLOCK = 4, 2, 10
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, fused=True),
}
PARTS = ("state", "branches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: times in microseconds."""

    parameters: int
    tensors: int
    beyond_us: float
    clocks_us: float
    """Already taken from `beyond_us`."""
    difference_us: float
    """Compiled calls less the generated code alone."""
    parts_us: dict[str, float]
    code_us: float
    eager_us: float
    zero_grad_us: float
    capture_s: float


class Clock:
    """Wraps functions so that their time adds up until it is read."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, part: str) -> Callable[[], None]:
        """Times ``owner.name`` under `part`; returns what takes the wrapper off again."""
        inner = getattr(owner, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args)
            finally:
                self.spent_s[part] = self.spent_s.get(part, 0.0) + time.perf_counter() - start

        replaced = owner.__dict__.get(name)
        setattr(owner, name, timed)
        return lambda: setattr(owner, name, inner) if replaced is not None else delattr(owner, name)

    def read(self) -> dict[str, float]:
        """Seconds since the last reading."""
        spent, self.spent_s = self.spent_s, {}
        return spent


def seconds(call: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def take_up(step: CompiledStep, x: Tensor) -> None:
    """Has the step notice what was exchanged in its executable, which its shortcut holds: a call the long way."""
    for entry in step._dispatcher.entries:
        entry.fast_call = None
    step._fast_call = None
    step(x)


def build(num_parameters: int, optimizer: str) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    """A step over `num_parameters` parameters (an even number), and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_parameters // 2)))
    opt = OPTIMIZERS[optimizer](model.parameters())

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return train, opt


def measure(num_parameters: int, *, calls: int, optimizer: str) -> Row:
    """Times compiled and eager calls in turn, then the parts of a compiled call."""
    x = torch.randn(ROWS, WIDTH)
    eager, eager_opt = build(num_parameters, optimizer)
    plain, _ = build(num_parameters, optimizer)
    step = ws.compile(plain, backend="eager", fullgraph=True)
    start = time.perf_counter()
    step(x)
    capture_s = time.perf_counter() - start
    step(x), eager(x)
    entry = step._last()
    guards, executable = entry.captured.guards, entry.executable
    clock = Clock()

    beyond, clocks, code, difference, whole, zero_grad = [], [], [], [], [], []
    leaves = [x]
    for _ in range(max(1, calls // BLOCK)):
        take_off = clock.wrap(executable, "runner", "code")
        take_up(step, x)
        mine = []
        clock.read()
        for _ in range(BLOCK):
            mine.append(seconds(lambda: step(x)))
            code.append(clock.read()["code"])
            beyond.append(mine[-1] - code[-1])
        inputs = executable.binding.fill(leaves)
        with torch.no_grad():
            for _ in range(BLOCK):
                spent = seconds(lambda inputs=inputs: executable.runner(inputs))
                clocks.append(spent - clock.read()["code"])
            take_off()
            alone = [seconds(lambda inputs=inputs: executable.runner(inputs)) for _ in range(BLOCK)]
        take_up(step, x)
        difference.append(statistics.median(mine[1:]) - statistics.median(alone[1:]))
        for _ in range(BLOCK):
            whole.append(seconds(lambda: eager(x)))
            zero_grad.append(seconds(eager_opt.zero_grad))

    native_guard = guards.fast.state
    undo = [clock.wrap(BranchGuard, "why_not", "branches")]
    if native_guard is None:
        undo += [clock.wrap(kind, "why_not", "state") for kind in {type(guard) for guard in guards.state}]
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(calls):
        if native_guard is not None:
            clock.spent_s["state"] = seconds(native_guard.changed)
        step(x)
        spent = clock.read()
        for part in PARTS:
            parts[part].append(spent.get(part, 0.0))
    for one in undo:
        one()
    info = step.cache_info()
    if info.traces + info.loaded != 1:
        raise SystemExit(f"the step was captured again while it was timed: {info.reasons}")
    parts_us = {part: 1e6 * statistics.median(times) for part, times in parts.items()}
    clocks_us = 1e6 * statistics.median(clocks)
    beyond_us = 1e6 * statistics.median(beyond) - clocks_us
    return Row(
        parameters=num_parameters,
        tensors=sum(len(guard.layouts) for guard in guards.state if isinstance(guard, LayoutGuard)),
        beyond_us=beyond_us,
        clocks_us=clocks_us,
        difference_us=1e6 * statistics.median(difference),
        parts_us={**parts_us, "other": beyond_us - sum(parts_us.values())},
        code_us=1e6 * statistics.median(code),
        eager_us=1e6 * statistics.median(whole),
        zero_grad_us=1e6 * statistics.median(zero_grad),
        capture_s=capture_s,
    )


def guards_timed() -> str:
    """Which guards are timed."""
    return f"comparisons in Python ({native.why_not()})" if native.why_not() else "native guards"


def table(rows: list[Row], options: argparse.Namespace) -> Table:
    """The rows for people."""
    made = Table(
        title=f"host microseconds per call, {options.optimizer}, {options.calls} calls, torch {torch.__version__}, "
        f"{guards_timed()}",
        caption="whole - code: compiled calls less the generated code alone; beyond: the same by clocks inside a call, "
        "less what they show with nothing between them (clocks); state, branches, other: parts of beyond; code: the "
        "generated code; eager: the whole step, not compiled; zero_grad: part of eager. See --help.",
        title_justify="left",
        caption_justify="left",
    )
    sums = ("parameters", "tensors", "whole - code", "beyond")
    for name in (*sums, *PARTS, "other", "clocks", "code", "eager", "zero_grad"):
        made.add_column(name, justify="right", style="bold" if name == "beyond" else "")
    for row in rows:
        figures = [row.difference_us, row.beyond_us, *row.parts_us.values()]
        figures += [row.clocks_us, row.code_us, row.eager_us, row.zero_grad_us]
        made.add_row(f"{row.parameters:,}", f"{row.tensors:,}", *(f"{figure:,.1f}" for figure in figures))
    return made


def main() -> int:
    """Prints the table, or JSON. Exit status 0 whether or not the target is met: this measures, and does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[10, 100, 1000], help="even numbers")
    parser.add_argument("--calls", type=int, default=100, help="timed calls of each kind")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="a fused one")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args()
    if any(number < 2 or number % 2 for number in options.parameters) or options.calls < 1:
        parser.error("--parameters wants even numbers (a layer has a weight and a bias), --calls at least 1")
    torch.set_num_threads(1)
    console, rows = Console(width=None if sys.stdout.isatty() else 200), []
    progress = Console(stderr=True)
    with progress.status("building the native guards, or waiting for it"):
        native.wait()
    for number in options.parameters:
        with progress.status(f"{number:,} parameters: capturing, then timing {options.calls} calls"):
            rows.append(measure(number, calls=options.calls, optimizer=options.optimizer))
    if options.json:
        machine = {"torch": torch.__version__, "optimizer": options.optimizer, "look": guards_timed()}
        print(json.dumps({**machine, "rows": [asdict(row) for row in rows]}))
        return 0
    console.print(table(rows, options))
    largest = rows[-1]
    met = "met" if largest.beyond_us <= TARGET_US else "not met"
    console.print(
        f"{largest.beyond_us:,.0f} us beyond the generated code at {largest.parameters:,} parameters; "
        f"the target at 1,000 is {TARGET_US:.0f} us: {met}."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
