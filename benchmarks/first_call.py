"""Where the time of a first call goes, stage by stage: from the user's function to the first result.

    python benchmarks/first_call.py
    python benchmarks/first_call.py --layers 6 12 24 --backend inductor --json
    wholestep run benchmarks/first_call.py --nproc 2

What is timed: the training W2 of the suites (a language model with biases and LayerNorm, bfloat16 autocast, fused
AdamW) with its depth and its number of parameters, but narrow and with few words, so that nearly all time is the
compiler's. The graphs have as many nodes as those of the full size; what kernels take, and what Inductor does for
larger shapes, is not seen here.
On several ranks the table is that of rank 0. Saved steps are off, so that every call captures; caches of Inductor are
those that it finds. A small model is compiled first, so that imports and torch's own first times are not in the rows.

Stages, seconds by the wall clock, each without the stages inside of it:
  look           the search for a saved step: objects of the call are walked, named and described
  trace          the step runs on fake tensors under make_fx
  functional     the graph made functional
  capture        the rest of a capture: state found, inputs and outputs described, guards
  place          collectives of the strategy put into the graph
  passes         those from placed to scheduled, the backend's own among them (`--passes` for each of them)
  lower          the scheduled program as a function; with Inductor, its decompositions and compilation
  verify         the rules of each stage, checked after every stage and pass
  python         texts of graphs written by torch.fx and compiled by Python
  collector      Python's garbage collector
  agree          plans, costs and buckets compared with other ranks; parameters made equal
  run            the first run
  other          what is left
Counts beside them: nodes of the captured and the scheduled graph, modules of torch.fx that were turned into Python,
and checks of whole programs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import wholestep as ws
from wholestep.capture.native import build as native
from wholestep.cli.suite.workloads import autocast_step, draw_tokens
from wholestep.cli.workloads.reference_lm import LanguageModelSize, build
from wholestep.ir.program import Stage
from wholestep.runtime.distributed.world import init

STAGES = (
    "look", "trace", "functional", "capture", "place", "passes", "lower", "verify", "python", "collector", "agree",
    "run", "other",
)  # fmt: skip
WRAPPED = (
    ("wholestep.api.cache.warm_start:StepCache.lookup", "look"),
    ("wholestep.capture.tracing.tracer:Tracer.run", "trace"),
    ("wholestep.capture.capture:functionalize", "functional"),
    ("wholestep.api.stages:capture", "capture"),
    ("wholestep.api.stages:place", "place"),
    ("wholestep.api.stages:run_passes", "passes"),
    ("wholestep.api.stages:Stages._lower", "lower"),
    ("wholestep.capture.capture:verify", "verify"),
    ("wholestep.place.strategies:verify", "verify"),
    ("wholestep.passes.pass_manager:verify", "verify"),
    ("torch.fx:GraphModule.recompile", "python"),
    ("wholestep.runtime.distributed.rendezvous:Rendezvous.objection", "agree"),
    ("wholestep.runtime.distributed.rendezvous:Rendezvous.agree", "agree"),
    ("wholestep.api.stages:Stages._broadcast_state", "agree"),
    ("wholestep.api.dispatch:Dispatcher._run", "run"),
)
"""Functions by where they are looked up, and the stage that their time belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One first call."""

    layers: int
    total_s: float
    stages_s: dict[str, float]
    passes_ms: dict[str, float]
    """Each pass in order, as the program's history has it: with the Python of its modules, without its check."""
    captured_nodes: int
    scheduled_nodes: int
    modules: int
    """Modules of torch.fx turned into Python."""
    checks: int
    """Programs verified."""


class StageClock:
    """Seconds per stage; the time of a stage inside another one is not the outer one's."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.calls: Counter[str] = Counter()
        self._open: list[str] = ["other"]
        self._since_s = time.perf_counter()

    def enter(self, stage: str) -> None:
        """From now on time belongs to `stage`."""
        self._charge()
        self._open.append(stage)
        self.calls[stage] += 1

    def leave(self) -> None:
        """Time belongs to the stage around again."""
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now_s = time.perf_counter()
        self.spent_s[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    @contextmanager
    def on(self) -> Iterator[None]:
        """Takes the time of everything in `WRAPPED`, and of the collector, while it is open."""
        undo = [self._wrap(where, stage) for where, stage in WRAPPED]
        gc.callbacks.append(self._collector)
        try:
            yield
        finally:
            self._charge()
            gc.callbacks.remove(self._collector)
            for one in undo:
                one()

    def _collector(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.enter("collector")
        else:
            self.leave()

    def _wrap(self, where: str, stage: str) -> Callable[[], None]:
        module, _, path = where.partition(":")
        owner: Any = importlib.import_module(module)
        *holders, name = path.split(".")
        for holder in holders:
            owner = getattr(owner, holder)
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(stage)
            try:
                return inner(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, name, timed)
        return lambda: setattr(owner, name, inner)


def measure(layers: int, backend: str) -> Row:
    """The first call of a model of `layers` layers, in this process."""
    size = LanguageModelSize(num_layers=layers, width=64, num_heads=4, vocabulary=256, length=32, rows=1)
    torch.manual_seed(0)
    model = build(size, torch.device("cpu")).to(init().device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens, targets = (one.to(init().device) for one in draw_tokens(size, init().rank))
    step = ws.compile(autocast_step, backend=backend, fullgraph=True)  # type: ignore[arg-type]
    gc.collect()
    clock = StageClock()
    with clock.on():
        step(model, optimizer, tokens, targets)
    programs = step._last().programs
    captured, scheduled = programs[Stage.CAPTURED], programs[Stage.SCHEDULED]
    return Row(
        layers=layers,
        total_s=sum(clock.spent_s.values()),
        stages_s=clock.spent_s,
        passes_ms={record.name: record.time_ms for record in scheduled.history},
        captured_nodes=len(captured.graph.nodes),
        scheduled_nodes=len(scheduled.graph.nodes),
        modules=clock.calls["python"],
        checks=clock.calls["verify"],
    )


def middle(rows: list[Row]) -> Row:
    """The row with the median total; of an even number the quicker of the two in the middle."""
    return sorted(rows, key=lambda row: row.total_s)[(len(rows) - 1) // 2]


def table(rows: list[Row], options: argparse.Namespace) -> Table:
    """Stages as lines, a column per number of layers."""
    made = Table(
        title=f"seconds of a first call, backend {options.backend}, {init().size} rank(s), torch {torch.__version__}, "
        f"median of {options.runs}",
        caption="Stages do not hold each other. python: text of graphs made and compiled by torch.fx. See --help.",
        title_justify="left",
        caption_justify="left",
    )
    made.add_column("stage")
    for row in rows:
        made.add_column(f"{row.layers} layers", justify="right")
    for stage in STAGES:
        made.add_row(stage, *(f"{row.stages_s[stage]:.3f}" for row in rows))
    made.add_section()
    made.add_row("first call", *(f"{row.total_s:.3f}" for row in rows), style="bold")
    made.add_section()
    for name in ("captured_nodes", "scheduled_nodes", "modules", "checks"):
        made.add_row(name.replace("_", " "), *(f"{getattr(row, name):,}" for row in rows))
    if options.passes:
        made.add_section()
        for name in rows[0].passes_ms:
            made.add_row(f"{name}, ms", *(f"{row.passes_ms.get(name, 0.0):.1f}" for row in rows))
    return made


def main() -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24], help="one column each")
    parser.add_argument("--backend", choices=("eager", "inductor", "auto"), default="eager")
    parser.add_argument("--runs", type=int, default=3, help="first calls of each, of which the median counts")
    parser.add_argument("--passes", action="store_true", help="a line for each pass")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args()
    if min(options.layers) < 1 or options.runs < 1:
        parser.error("--layers and --runs want numbers of at least 1")
    os.environ["WHOLESTEP_CACHE"] = "0"
    torch.set_num_threads(1)
    world, progress = init(), Console(stderr=True)
    with progress.status("building the native guards, or waiting for it"):
        native.wait()
    measure(1, options.backend)
    found: dict[int, list[Row]] = {layers: [] for layers in options.layers}
    for number in range(options.runs):
        for layers in options.layers:
            with progress.status(f"{layers} layers, run {number + 1} of {options.runs}"):
                found[layers].append(measure(layers, options.backend))
    rows = [middle(found[layers]) for layers in options.layers]
    if world.rank == 0 and options.json:
        setting = {"torch": torch.__version__, "backend": options.backend, "ranks": world.size, "runs": options.runs}
        print(json.dumps({**setting, "rows": [asdict(row) for row in rows]}))
    elif world.rank == 0:
        Console(width=None if sys.stdout.isatty() else 160).print(table(rows, options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
