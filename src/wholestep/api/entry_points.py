"""The two ways to a compiled step: compile a function, or load what another process has saved."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from wholestep.api.cache import warm_start
from wholestep.api.compiled_step import CompiledStep
from wholestep.config import Pad, Strategy
from wholestep.errors import ArtifactError, ConfigError
from wholestep.runtime.distributed.world import announce, init
from wholestep.runtime.options import Backend, Passes, checked_options


@overload
def compile(
    fn: Callable[..., Any],
    *,
    strategy: Strategy | None = None,
    mesh: DeviceMesh | None = None,
    backend: Backend = "auto",
    passes: Passes = None,
    max_retraces: int = 8,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    pad: Mapping[str, Pad] | None = None,
) -> CompiledStep: ...
@overload
def compile(
    fn: None = None,
    *,
    strategy: Strategy | None = None,
    mesh: DeviceMesh | None = None,
    backend: Backend = "auto",
    passes: Passes = None,
    max_retraces: int = 8,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    pad: Mapping[str, Pad] | None = None,
) -> Callable[[Callable[..., Any]], CompiledStep]: ...
def compile(
    fn: Callable[..., Any] | None = None,
    *,
    strategy: Strategy | None = None,
    mesh: DeviceMesh | None = None,
    backend: Backend = "auto",
    passes: Passes = None,
    max_retraces: int = 8,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    pad: Mapping[str, Pad] | None = None,
) -> CompiledStep | Callable[[Callable[..., Any]], CompiledStep]:
    """Compiles a training step: forward, loss, backward, communication, clipping and optimizer as one graph.

    Args:
        fn: the step, written for one device. Without it a decorator is returned.
        strategy: `DDP(...)`, `ZeRO(...)` or `FSDP(...)`; None means DDP over the world, and nothing on one process.
        mesh: a DeviceMesh with one axis; by default one axis over the world. `ZeRO` and `FSDP` also take one with the
            axes "dp_replicate" and "dp_shard".
        backend: "eager" runs the graph's own text node by node; "inductor", or `Inductor(...)` for its options,
            compiles what stands between collectives and, on a GPU, makes one CUDA graph of the whole step; "auto" is
            "inductor" on a GPU, and on a CPU where the calibration of the host says that it pays, else "eager".
            `CompiledStep.explain` says which it is, and why.
        passes: a function ``Program -> Program``, or several. They run after the default ones, on a functional
            graph; only the passes that let operations run in place come after them. Or the default passes with
            options: ``ws.default_passes(memory_budget=0.6, extra=[my_pass])`` trades time for memory.
        max_retraces: how many new signatures may be captured after the first.
        fullgraph: whether a step that cannot be one graph is an error, which says why and what helps. By default such
            a step is live: its Python runs at every call, and what it does with tensors is compiled in pieces.
            `CompiledStep.explain` says which, and why.
        dynamic: whether sizes of arguments are symbols of the graph, as in ``torch.compile``. None: those that have
            moved between calls, and dims of ``torch._dynamo.mark_dynamic``. True: all from the first call on. False:
            none, and each size is a trace. Sizes 0 and 1 have traces of their own.
        pad: ``{"tokens": ws.Pad(dim=1, multiple=64), "batch.labels": ws.Pad(1, 64, value=-100)}``: tensors among the
            arguments that are made longer before each call, by the name of the parameter and keys in it. With
            ``dynamic=False`` each of the few sizes is a trace of its own. What the step returns is as long as that.

    Raises:
        ConfigError: for options that cannot be used; what goes wrong in a call is listed in `wholestep.errors`.
    """
    options = checked_options(
        strategy, mesh, backend, passes, max_retraces, fullgraph=fullgraph, dynamic=dynamic, pad=pad
    )
    if fn is None:
        return lambda step: compile(
            step, strategy=strategy, mesh=mesh, backend=backend, passes=passes, max_retraces=max_retraces,
            fullgraph=fullgraph, dynamic=dynamic, pad=pad,
        )  # fmt: skip
    if not callable(fn):
        raise ConfigError(f"wholestep.compile wants a function, got {type(fn).__name__}.")
    if isinstance(fn, torch.nn.Module):
        raise ConfigError("wholestep.compile wants a whole step, got a module. Write a function that calls it.")
    announce()
    return CompiledStep(fn, options)


def load(
    path: str | Path, fn: Callable[..., Any] | None = None, *, mesh: DeviceMesh | None = None, trusted: bool = False
) -> CompiledStep:
    """A step that `CompiledStep.save` has written, with its options. The first call traces and compiles nothing.

    Args:
        path: what was given to `save`. With several ranks each has a file of its own beside it.
        fn: the step. By default the function of the same module and name as the saved one, which is imported.
        mesh: the mesh of the saved step, if it was given one.
        trusted: a saved step is code, which runs with all that you may do. Say True for a file that you or somebody
            you trust has saved, and that nobody else could have changed; a file of your own cache needs no such word.

    Raises:
        ArtifactError: here for a file that is not trusted, not whole, or belongs to no function that can be found; by
            the first call for anything the step depends on that is not as it was when it was saved. It says what. Calls
            with other signatures after the first are captured as usual.
    """
    saved = warm_start.path_of_rank(Path(path), init())
    options, name = warm_start.saved_options(saved, trusted=trusted)
    step = _function_named(name, saved) if fn is None else fn
    step = step._step if isinstance(step, CompiledStep) else step
    checked = checked_options(
        options.strategy,
        mesh,
        options.backend,
        options.passes,
        options.max_retraces,
        fullgraph=options.fullgraph,
        dynamic=options.dynamic,
        pad=options.pad,
    )
    return CompiledStep(step, checked, saved)


def _function_named(name: str, path: Path) -> Any:
    module, _, qualified = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for attribute in qualified.split("."):
            function = getattr(function, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArtifactError(
            f"{path} is a step called {name}, which cannot be found from here ({error}). Pass the function: "
            f"wholestep.load(path, train_step, trusted=True)."
        ) from error
    return function
