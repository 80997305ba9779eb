"""compile_trainer(trainer): the loop of Lightning's ``Trainer``, with one compiled call for each of its batches.

[Note: where the step is]
The loop over an epoch gives each batch to a loop over one batch, for automatic or for manual optimization. In its place
runs a compiled function, in which a loop of the same class, made for this call alone, does what the class does: hooks,
``training_step``, backward, clipping, update, all in Lightning's own code and order. So the step changes no counter of
the Trainer: those of the loop that it has made are results, and are added after it.
``self.log`` keeps values in Python. What a step logs is among its results, too, and is logged after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from wholestep.adapters.method_swaps import MethodSwaps
from wholestep.api.compiled_step import CompiledStep
from wholestep.api.entry_points import compile
from wholestep.errors import ConfigError
from wholestep.runtime.options import Backend, Passes

LOOPS = {"automatic_optimization": "optim_progress", "manual_optimization": "optim_step_progress"}
"""The loops over one batch, of a Trainer, by what each of them counts in."""
NEEDED = (
    "fit_loop._should_accumulate", "strategy.handles_gradient_accumulation",
    *(f"fit_loop.epoch_loop.{loop}.{name}" for loop, progress in LOOPS.items() for name in ("run", progress)),
)  # fmt: skip


class _Logged(NamedTuple):
    """One call of ``self.log``."""

    hook: str
    """In which it stood."""
    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def compile_trainer(
    trainer: Any, *, backend: Backend = "auto", passes: Passes = None, max_retraces: int = 16, fullgraph: bool = False
) -> CompiledStep:
    """Has ``trainer.fit()`` train through one graph a step: forward, loss, backward, communication, clipping, update.

    Call it once, before ``fit()``. Everything else is Lightning's own: data, schedules, logs, callbacks, validation,
    checkpoints. Strategies come from what the Trainer wraps the model in.

    Args:
        trainer: a ``lightning.Trainer``.
        backend, passes, max_retraces, fullgraph: as `wholestep.compile` takes them. The number of a batch, that of an
            epoch and gradients that validation has cleared are a trace each.

    Returns the compiled step, for `CompiledStep.explain` and `CompiledStep.cache_info`.

    Raises ConfigError for what is no Trainer or an older one, and for a strategy that a compiled step cannot keep.
    """
    if missing := next((name for name in NEEDED if not _has(trainer, name)), None):
        raise ConfigError(
            f"compile_trainer wants a Trainer as Lightning 2.6 has it, got {type(trainer).__name__}, which has no "
            f"{missing}. Install lightning>=2.6. A loop of Fabric needs wholestep.compile alone."
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise ConfigError(
            f"compile_trainer cannot keep {type(trainer.strategy).__name__}, whose engine accumulates and updates "
            f'itself: use strategy="ddp", or "auto".'
        )
    loops = [getattr(trainer.fit_loop.epoch_loop, name) for name in LOOPS]
    if any("run" in vars(loop) for loop in loops):
        raise ConfigError("This Trainer is compiled already. Call compile_trainer once.")
    compiled = compile(_run_batch, backend=backend, passes=passes, max_retraces=max_retraces, fullgraph=fullgraph)
    swaps = MethodSwaps()
    for loop, name in zip(loops, LOOPS, strict=True):
        swaps.put(loop, "run", _Run(trainer, name, compiled))
    return compiled


def _has(thing: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


def _run_batch(module: Any, batch: tuple[Any, ...], *, loop: str, is_update: bool) -> tuple[Any, list[_Logged], Any]:
    """What the loop gives for one batch, what was logged in it, and how often the loop counted what.

    `module`: the LightningModule. `batch`: the arguments of the loop's ``run``.
    """
    trainer = module.trainer
    own = getattr(trainer.fit_loop.epoch_loop, loop)
    made = type(own)(trainer)
    if hasattr(own, "_skip_backward"):  # StochasticWeightAveraging sets it
        made._skip_backward = own._skip_backward
    logged: list[_Logged] = []
    log = partial(_note, logged, module)  # in which a walk finds the list: a module that logs does more than compute
    accumulates = _with_method(trainer.fit_loop, "_should_accumulate", lambda: not is_update)
    with accumulates, _with_method(module, "log", log):
        outputs = made.run(*batch)
    return outputs, logged, getattr(made, LOOPS[loop]).state_dict()


def _note(logged: list[_Logged], module: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of ``module.log``."""
    kept = value.detach().clone() if isinstance(value, torch.Tensor) else value  # an update may write to it
    logged.append(_Logged(module._current_fx_name, name, kept, args, kwargs))


@contextmanager
def _with_method(thing: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """While open, `thing` has a method of its own in the place of that of its class."""
    setattr(thing, name, method)
    try:
        yield
    finally:
        delattr(thing, name)


class _Run:
    """What stands in the place of the ``run`` of a Trainer's loop over one batch."""

    def __init__(self, trainer: Any, loop: str, compiled: CompiledStep) -> None:
        self._trainer, self._loop, self._compiled = trainer, loop, compiled

    def __call__(self, *batch: Any) -> Any:
        """One batch, and the update if it is the last one of it. Gives what the loop gives."""
        trainer = self._trainer
        module, is_update = trainer.lightning_module, not trainer.fit_loop._should_accumulate()
        outputs, logged, counted = self._compiled(module, batch, loop=self._loop, is_update=is_update)
        _add(getattr(getattr(trainer.fit_loop.epoch_loop, self._loop), LOOPS[self._loop]), counted)
        for one in logged:
            around, module._current_fx_name = module._current_fx_name, one.hook
            module.log(one.name, one.value, *one.args, **one.kwargs)
            module._current_fx_name = around
        return outputs


def _add(progress: Any, counted: Mapping[str, Any]) -> None:
    for name, number in counted.items():
        if isinstance(number, Mapping):
            _add(getattr(progress, name), number)
        else:
            setattr(progress, name, getattr(progress, name) + number)
