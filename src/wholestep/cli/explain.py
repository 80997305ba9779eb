"""`wholestep explain`: prints what a compiled step does and what it takes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import wholestep as ws
from wholestep.api.report.live_explanation import LiveExplanation
from wholestep.api.report.records import Explanation
from wholestep.cli.common.options import AsJson, Nproc, choose_nproc, threads_per_rank
from wholestep.cli.workloads.gpt_demo import DemoSettings, demo_batches, demo_recipe
from wholestep.cli.workloads.interleaved import ContenderKind, compiled_step, open_contender
from wholestep.cli.workloads.text_data import standard_library
from wholestep.errors import ConfigError

Target = Callable[[], Any]

USAGE = (
    "Name the step as `demo`, or as FILE.py:FUNCTION where the function takes no arguments and returns "
    "(compiled_step, args): the step made by wholestep.compile, and a tuple it can be called with."
)


def explain_target(target: str, *, nproc: int, measure: int = 0) -> Explanation | LiveExplanation:
    """Run the step named by `target` once on `nproc` new processes; return rank 0's `explain()`.

    With `measure` the step runs so many times more, timed. Raises ConfigError where the target is neither `demo` nor a
    function that returns a compiled step and its arguments.
    """
    if measure < 0:
        raise ConfigError(f"--measure wants a number of calls, got {measure}.")
    if target != "demo":
        split_target(target)  # a wrong name is told before processes are started
    explained: Explanation | LiveExplanation = ws.run(_explain_on_rank, nproc, target, nproc, measure)[0]
    return explained


def split_target(target: str) -> tuple[Path, str]:
    """`path/to/file.py:function` -> its two halves, the file being there."""
    file, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier() or not file.endswith(".py"):
        raise ConfigError(f"`wholestep explain` cannot read the target {target!r}. {USAGE}")
    if not Path(file).is_file():
        raise ConfigError(f"`wholestep explain` found no file {file!r}. {USAGE}")
    return Path(file).resolve(), function


def load_target(target: str) -> Target:
    """Import the file and return the function; its folder comes first on the path, as when Python runs a script."""
    path, function = split_target(target)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"Python cannot import {path} as a module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        names = sorted(name for name, thing in vars(module).items() if callable(thing) and not name.startswith("_"))
        raise ConfigError(f"{path.name} has no function {function!r}; it has: {', '.join(names) or 'none'}. {USAGE}")
    result: Target = found
    return result


def step_and_args(made: object, target: str) -> tuple[ws.CompiledStep, tuple[Any, ...]]:
    """Check what the function of a target returned."""
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError(f"{target} returned {type(made).__name__}, no pair. {USAGE}")
    step, args = made
    if not isinstance(step, ws.CompiledStep):
        raise ConfigError(f"{target} returned a pair that starts with {type(step).__name__}, no compiled step. {USAGE}")
    if not isinstance(args, tuple):
        raise ConfigError(f"{target} returned its arguments as {type(args).__name__}, no tuple. {USAGE}")
    return step, args


def _explain_on_rank(target: str, nproc: int, measure: int) -> Explanation | LiveExplanation | None:
    world = ws.init()
    torch.set_num_threads(threads_per_rank(nproc))
    step, args = _demo_step(world) if target == "demo" else step_and_args(load_target(target)(), target)
    step(*args)
    if measure:
        step.measure(measure)
        for _ in range(measure + 1):
            step(*args)
    return step.explain() if world.rank == 0 else None


def _demo_step(world: ws.World) -> tuple[ws.CompiledStep, tuple[Any, ...]]:
    settings = DemoSettings()
    contender = open_contender(ContenderKind.WHOLESTEP, demo_recipe(settings), world)
    text = standard_library(max_bytes=settings.text_bytes)
    (x, y), *_ = demo_batches(text.train, settings, rank=world.rank, num_batches=1)
    return compiled_step(contender), (contender.model, contender.optimizer, x.to(world.device), y.to(world.device))


def command(
    target: Annotated[
        str, typer.Argument(help="`demo`, or FILE.py:FUNCTION returning (compiled_step, args).")
    ] = "demo",
    *,
    measure: Annotated[int, typer.Option(help="Calls to time besides, to compare with what is predicted.")] = 0,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Compile a step, run it once, and print its collectives, what hides them, its memory and its predicted time."""
    explained = explain_target(target, nproc=choose_nproc(nproc), measure=measure)
    if as_json:
        print(json.dumps(explained.to_json(), indent=2))
    else:
        Console().print(explained)
