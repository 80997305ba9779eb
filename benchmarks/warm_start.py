"""What a new process pays until its first step is done: one that captures, and ones that find the step saved.

    python benchmarks/warm_start.py --backend inductor
    python benchmarks/warm_start.py --training W2 --nproc 2
    torchrun --nproc-per-node 2 benchmarks/warm_start.py --one --training W2

Each start is a process of its own (with `--nproc` one per rank), which imports torch and wholestep, makes a model, an
optimizer and a batch, and makes one call of the compiled step. The first start finds empty caches and captures; it
saves the step, which all others load. Those come in two kinds, by turns: the caches of the compilers (Inductor,
Triton) are as the first start has left them, or empty. `--one` is one such start in the processes that run this, with
the caches that they have; started by torchrun it has no `interpreter`, and does not say what torchrun took.

Parts, seconds by the wall clock on rank 0:
  interpreter    from the start of the process to the first line of this script
  torch          import torch
  wholestep      import wholestep
  trainings      import of the models of the suites, with the command line around them: none of a user's
  world          device and process group
  model          weights, optimizer (which imports torch._dynamo where nobody has) and batch, on the device
  first call     of the compiled step, until its result is there
Beside them: how many steps were loaded, modules imported, those of them without bytecode on disk, which Python compiles
at every start (``python -m compileall`` ends that), and whether the compiler of segments was imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BEGUN = time.time()
PARTS = ("interpreter", "torch", "wholestep", "trainings", "world", "model", "first call")
COMPILER = "torch._inductor.compile_fx"
NARROW = {"num_layers": 12, "width": 128, "num_heads": 4, "vocabulary": 512, "length": 64, "rows": 2}
"""The model for any machine: as deep as GPT-2 small, and little to compute."""


@dataclass(slots=True, kw_only=True)
class Start:
    """One start, on rank 0."""

    parts_s: dict[str, float] = field(default_factory=dict)
    loaded: int = 0
    """Steps that were loaded and not captured."""
    modules: int = 0
    without_bytecode: int = 0
    compiler: bool = False
    """Whether the compiler of segments was imported."""
    torch: str = ""
    device: str = ""

    @property
    def total_s(self) -> float:
        """Seconds from the start of the process to the end of the first step."""
        return sum(self.parts_s.values())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Takes the time of what is done inside."""
        start_s = time.perf_counter()
        yield
        self.parts_s[name] = time.perf_counter() - start_s


def start(options: argparse.Namespace) -> tuple[Start, int]:
    """A start in this process, and its rank."""
    made = Start()
    made.parts_s["interpreter"] = BEGUN - options.started if options.started else 0.0
    with made.part("torch"):
        torch: Any = importlib.import_module("torch")
    with made.part("wholestep"):
        ws: Any = importlib.import_module("wholestep")
    with made.part("trainings"):
        trainings: Any = importlib.import_module("wholestep.cli.suite.workloads")
    with made.part("world"):
        torch.set_num_threads(options.threads)
        world = ws.init()
        on_gpu = world.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(world.device)
            torch.cuda.synchronize()
    with made.part("model"):
        training = _narrow(trainings) if options.training == "narrow" else trainings.training(options.training)
        torch.manual_seed(0)
        model = training.build(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = [one.to(world.device) for one in training.draw(world.rank)]
        if on_gpu:
            torch.cuda.synchronize()
    step = ws.compile(training.step, backend=options.backend, fullgraph=True)
    with made.part("first call"):
        step(model, optimizer, *batch).item()
    modules = list(sys.modules.values())
    cached = [Path(path) for one in modules if (path := getattr(getattr(one, "__spec__", None), "cached", None))]
    made.loaded, made.modules, made.compiler = step.cache_info().loaded, len(modules), COMPILER in sys.modules
    made.without_bytecode = sum(not path.exists() for path in cached)
    made.torch, made.device = torch.__version__, str(world.device.type)
    world.barrier("the end of the benchmark")
    return made, world.rank


def _narrow(trainings: Any) -> Any:
    size = trainings.LanguageModelSize(**NARROW)
    build, draw = partial(trainings.build, size), partial(trainings.draw_tokens, size)
    return replace(trainings.training("tiny"), name="narrow", size=size, build=build, draw=draw)


def started(options: argparse.Namespace, caches: Path, compilers: Path) -> Start:
    """A start in processes of its own, with caches below these folders. Raises RuntimeError where a rank fails."""
    # As torchrun does, this process keeps the store in which ranks meet.
    store: Any = importlib.import_module("torch.distributed").TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    env = os.environ | {
        "XDG_CACHE_HOME": str(caches), "WHOLESTEP_CACHE": "1", "TORCHINDUCTOR_CACHE_DIR": str(compilers / "inductor"),
        "TRITON_CACHE_DIR": str(compilers / "triton"),
    }  # fmt: skip
    command = [
        sys.executable, __file__, "--one", "--json", "--training", options.training, "--backend", options.backend,
        "--threads", str(options.threads), "--started", repr(time.time()),
    ]  # fmt: skip
    ranks = []
    for rank in range(options.nproc):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.nproc, "MASTER_PORT": store.port}
        own = {name: str(one) for name, one in place.items()}
        own |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        of_rank = env | own if options.nproc > 1 else env
        ranks.append(subprocess.Popen(command, env=of_rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate() for rank in ranks]
    for number, rank in enumerate(ranks):
        if rank.returncode:
            raise RuntimeError(f"rank {number} ended with {rank.returncode}:\n{said[number][1][-4000:]}")
    return Start(**json.loads(said[0][0].splitlines()[-1]))


def middle(starts: list[Start]) -> Start:
    """Median parts; the rest is that of the last one."""
    parts = {part: statistics.median(one.parts_s[part] for one in starts) for part in PARTS}
    return replace(starts[-1], parts_s=parts)


def compared(options: argparse.Namespace) -> dict[str, Start]:
    """All starts that were asked for, by what they find."""
    with TemporaryDirectory() as folder:
        caches, full = Path(folder) / "own", Path(folder) / "compilers"
        found = {
            "cold": [started(options, caches, full)],
            "warm, compilers' caches full": [],
            "warm, they are empty": [],
        }
        for number in range(options.runs):
            found["warm, compilers' caches full"].append(started(options, caches, full))
            found["warm, they are empty"].append(started(options, caches, Path(folder) / f"compilers-{number}"))
    return {kind: middle(starts) for kind, starts in found.items()}


def show(starts: dict[str, Start], options: argparse.Namespace) -> None:
    """A table with a column per kind of start."""
    console: Any = importlib.import_module("rich.console").Console(width=None if sys.stdout.isatty() else 160)
    one = next(iter(starts.values()))
    table = importlib.import_module("rich.table").Table(
        title=f"seconds to the end of the first step: {options.training}, backend {options.backend}, "
        f"{options.nproc} rank(s), {one.device}, torch {one.torch}, median of {options.runs}",
        title_justify="left",
    )
    table.add_column("part")
    for kind in starts:
        table.add_column(kind, justify="right")
    for part in PARTS:
        table.add_row(part, *(f"{one.parts_s[part]:.2f}" for one in starts.values()))
    table.add_section()
    table.add_row("in all", *(f"{one.total_s:.2f}" for one in starts.values()), style="bold")
    table.add_section()
    for name in ("loaded", "modules", "without_bytecode", "compiler"):
        table.add_row(name.replace("_", " "), *(f"{getattr(one, name)}" for one in starts.values()))
    console.print(table)


def main() -> int:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", default="narrow", help="narrow (12 layers of width 128), or one of the suites")
    parser.add_argument("--backend", choices=("eager", "inductor", "auto"), default="auto")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of each start")
    parser.add_argument("--runs", type=int, default=3, help="warm starts of each kind, of which the median counts")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--one", action="store_true", help="one start in this process, with the caches that are there")
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args()
    if min(options.nproc, options.runs, options.threads) < 1:
        parser.error("--nproc, --runs and --threads want numbers of at least 1")
    if options.one:
        made, rank = start(options)
        if rank:
            return 0
        if options.started:  # by this script, which reads one record
            print(json.dumps(asdict(made)))
            return 0
        options.nproc, options.runs = int(os.environ.get("WORLD_SIZE", "1")), 1
        found = {"this start": made}
    else:
        found = compared(options)
    if options.json:
        rows = [{"start": kind, "total_s": one.total_s, **asdict(one)} for kind, one in found.items()]
        setting = {name: getattr(options, name) for name in ("training", "backend", "nproc", "runs", "threads")}
        print(json.dumps({**setting, "rows": rows}))
    else:
        show(found, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
