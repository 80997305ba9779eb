"""compile() of the older surface, on the stages of `wholestep.api.stages`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from wholestep.api.compiled_step import CompiledStep
from wholestep.api.stages import Stages
from wholestep.capture import module_override
from wholestep.capture.bind.captured import Captured
from wholestep.capture.capture import capture
from wholestep.capture.python.tracing_thread import is_capturing
from wholestep.capture.reach import reachability
from wholestep.errors import ConfigError
from wholestep.ir.program import InputKind, Stage
from wholestep.passes.comm.bucketing import Choose
from wholestep.passes.default_passes import DefaultPasses
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import Pass
from wholestep.runtime.compression_state import CompressionState
from wholestep.runtime.options import Options
from wholestep.spmd.data_parallel import DataParallel
from wholestep.spmd.gradients import LocalGradients
from wholestep.spmd.override import Override, Replacements
from wholestep.spmd.transforms import GraphModuleTransformation, Transformation, as_pass

COMPILED_OBJECT_KEY = "_compiled_obj"
"""Attribute of a compiled function that holds what its last call ran, a `Compiled`."""

MAX_RETRACES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The graph of a compiled function for one signature, and the state it reads."""

    gm: fx.GraphModule
    """The graph that runs."""
    modules: tuple[nn.Module, ...]
    """The modules among the arguments."""
    optimizers: tuple[Optimizer, ...]
    """The optimizers among the arguments."""
    flat_state: list[torch.Tensor]
    """Parameters, buffers and optimizer state: the first inputs of `gm`, in order."""

    @property
    def mod(self) -> nn.Module | None:
        """The first module."""
        return next(iter(self.modules), None)

    @property
    def opt(self) -> Optimizer | None:
        """The first optimizer."""
        return next(iter(self.optimizers), None)


def compile(
    module_override: Sequence[Override] | None = None,
    gm_transformation: Transformation | None = None,
    parallel_mode: DataParallel | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a training step as PyTorch's whole-step compile did until 2.4: data parallel, gradients summed.

    Modules and optimizers are found in the arguments, and wherever else `wholestep.compile` finds them. Other than
    there, gradients live inside of a call: each starts with none, and ``.grad`` of the user's parameters stays as it
    was. A step that wants them returns them. A call may pass ``last_train_step=True``, see GraphModuleTransformation.

    Args:
        module_override: other code for modules that cannot be captured; see `Override`.
        gm_transformation: rewrites the placed graph, once per captured graph, after the overrides. The default
            passes do not run by themselves: ``GraphModuleTransformation(n, enable_graph_optimization=True)`` runs them.
        parallel_mode: ``DataParallel("replicate")``, which is the default.

    Raises:
        ConfigError: for arguments of other types; what goes wrong in a call is listed in `wholestep.errors`.
    """
    overrides = _checked_overrides(module_override)
    if gm_transformation is not None and not callable(gm_transformation):
        raise ConfigError(f"compile(gm_transformation=...) wants a function, got {gm_transformation!r}.")
    if parallel_mode is not None and not isinstance(parallel_mode, DataParallel):
        raise ConfigError(f'compile(parallel_mode=...) wants DataParallel("replicate"), got {parallel_mode!r}.')

    def decorate(step: Callable[..., Any]) -> Callable[..., Any]:
        compiled = _Step(step, overrides, gm_transformation, parallel_mode or DataParallel())

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_capturing():
                return step(*args, **kwargs)
            last = bool(kwargs.pop("last_train_step", False))
            with compiled.gradients.hidden():
                result = compiled(*args, **kwargs)
            setattr(run, COMPILED_OBJECT_KEY, compiled.describe(pytree.tree_leaves((args, kwargs))))
            compiled.count_call(last=last)
            return result

        return run

    return decorate


def _checked_overrides(module_override: Any) -> tuple[Override, ...]:
    overrides = tuple(module_override or ())
    for one in overrides:
        if not isinstance(one, Override):
            raise ConfigError(f"compile(module_override=...) wants a list of Override objects, got {one!r} in it.")
    return overrides


class _Stages(Stages):
    """Stages whose capture sees replaced modules, and whose passes are the user's."""

    uses_cache = False

    def __init__(
        self,
        *args: Any,
        gradients: LocalGradients,
        overrides: tuple[Override, ...],
        transforms: Sequence[tuple[str, Transformation | None]],
    ) -> None:
        super().__init__(*args)
        self._gradients, self._transforms = gradients, transforms
        self._overrides, self._replacements = overrides, Replacements(overrides)
        self.transformations: list[GraphModuleTransformation] = []
        """The user's GraphModuleTransformation objects that the last passes ran."""

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        reachable = reachability.find_reachable(self.step, args, kwargs)
        stand_ins = module_override.choose([module for _, module in reachable.modules.values()], self._replacements)
        with module_override.overridden(stand_ins):
            self._gradients.add(reachability.find_reachable(self.step, args, kwargs) if stand_ins else reachable)
            captured = capture(self.step, args, kwargs)
        module_override.expect_originals(captured.guards, stand_ins)
        return captured

    def passes(
        self, captured: Captured, compression: CompressionState | None, choose: Choose, lowering: Sequence[Pass] = ()
    ) -> list[Pass]:
        flat_state = _flat_state(captured)
        self.transformations.clear()
        calls: list[tuple[str, Transformation | None]] = [
            (f"{type(one).__name__}.transform", _with_state(one, flat_state)) for one in self._overrides
        ]
        calls += self._transforms
        mine = [as_pass(call, name, self.transformations) for name, call in calls if call is not None]
        return [*mine, *lowering, reinplace]


class _Step(CompiledStep):
    """A compiled step that keeps its gradients to itself."""

    _stages: _Stages

    def __init__(
        self,
        step: Callable[..., Any],
        overrides: tuple[Override, ...],
        transformation: Transformation | None,
        mode: DataParallel,
    ) -> None:
        self.gradients = LocalGradients()
        options = Options(
            strategy=mode.strategy, mesh=None, backend="eager", passes=DefaultPasses(), max_retraces=MAX_RETRACES,
            fullgraph=True,
        )  # fmt: skip
        transforms = (("custom_passes", mode.custom_passes), ("gm_transformation", transformation))
        stages = functools.partial(_Stages, gradients=self.gradients, overrides=overrides, transforms=transforms)
        super().__init__(self.gradients.clearing_after(step), options, stages=stages)
        self._compiled: dict[int, Compiled] = {}

    def describe(self, leaves: list[Any]) -> Compiled:
        """Describes the last call; `leaves` are those of its arguments."""
        entry = self._last()
        known = self._compiled.get(id(entry))
        if known is None:
            gm = entry.programs[Stage.SCHEDULED].module
            gm.recompile()  # passes edit the graph; what runs is generated from it, and so is `gm.code` now
            known = self._compiled[id(entry)] = Compiled(
                gm=gm,
                modules=tuple(one for one in leaves if isinstance(one, nn.Module)),
                optimizers=tuple(one for one in leaves if isinstance(one, Optimizer)),
                flat_state=_flat_state(entry.captured),
            )
        return known

    def count_call(self, *, last: bool) -> None:
        """One call is over; `last`: of the training."""
        for one in self._stages.transformations:
            one.count(last=last)


def _with_state(override: Override, flat_state: list[torch.Tensor]) -> Transformation:
    return lambda gm: override.transform(gm, flat_state)


_STATE = (InputKind.PARAM, InputKind.BUFFER, InputKind.OPTIMIZER)


def _flat_state(captured: Captured) -> list[torch.Tensor]:
    pairs = zip(captured.program.inputs, captured.binding.tensors, strict=True)
    return [tensor for record, tensor in pairs if record.kind in _STATE and isinstance(tensor, torch.Tensor)]
