"""The page: an ordinary training step, compiled. Reads top to bottom as the stages of wholestep.

step ──capture──▶ CAPTURED ──place──▶ PLACED ──passes──▶ SCHEDULED ──lower──▶ Executable ──run──▶ numbers
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.fx as fx

from wholestep.api.cache.records import CacheContext, CachedStep, CacheLookup, StepToSave
from wholestep.api.cache.warm_start import StepCache
from wholestep.api.report.explain import explain
from wholestep.api.report.records import CacheInfo, Explanation
from wholestep.capture.bind.binding import Binding
from wholestep.capture.bind.captured import Captured
from wholestep.capture.capture import capture
from wholestep.capture.functionalize.storage_resize import is_freed
from wholestep.capture.guards.fast_guards import FastCall
from wholestep.capture.python import tree_util
from wholestep.capture.python.user_frame import naming
from wholestep.capture.retrace_policy import RetracePolicy
from wholestep.capture.tracing.tracer import is_capturing
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.errors import ConfigError
from wholestep.ir.printer import plan_text
from wholestep.ir.program import MeshAxis, Program, Stage
from wholestep.lower.auto_backend import Backend as Lowering
from wholestep.lower.auto_backend import backend_for
from wholestep.passes.comm.bucket_planner import Cuts
from wholestep.passes.comm.bucketing import Choose
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.place.strategies import place
from wholestep.runtime.compression_state import CompressionBuffers, CompressionState
from wholestep.runtime.distributed import nccl_connect
from wholestep.runtime.distributed.failure_report import named_failures
from wholestep.runtime.distributed.rendezvous import Rendezvous
from wholestep.runtime.distributed.world import World, init
from wholestep.runtime.executable import BufferSync, Executable, broadcast_tensors, describe_state
from wholestep.runtime.options import Options, data_axis
from wholestep.runtime.shared_costs import agreed_costs
from wholestep.runtime.verify.verification import Verification
from wholestep.runtime.verify.verify import Subject, Trial, verify
from wholestep.util.gc_pause import gc_paused
from wholestep.util.progress import progress_shown, report_stage

log = logging.getLogger("wholestep")


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One signature of the step: the program at each stage and what runs it."""

    captured: Captured
    programs: Mapping[Stage, Program]
    executable: Executable
    plan: str
    held: CompressionBuffers | None
    """The state of compressed communication that it reads."""
    look: CacheLookup
    """What was seen before it was captured."""
    shortcut: FastCall | None = None


class CompiledStep:
    """A training step that runs as one graph. Made by `wholestep.compile`; called like the function it was made of."""

    _starts_warm = True

    def __init__(self, step: Callable[..., Any], options: Options, saved: Path | None = None) -> None:
        """`saved`: a file that holds the step for its first call, and that may be trusted."""
        functools.update_wrapper(self, step, updated=())
        self._step, self._options = step, options
        self._name = getattr(step, "__name__", type(step).__name__)
        self._rendezvous = Rendezvous(self._name, lambda: self._calls + self._short())
        self._entries: list[_Entry] = []
        self._shortcut: FastCall | None = None
        """That of the first entry, if it has one and may use it now."""
        self._retraces = RetracePolicy(step, options.max_retraces)
        self._calls = self._hits = self._traces = self._loaded = 0
        """Without those that took a shortcut, which counts its own."""
        self._step_cache = StepCache(step, saved)
        compress = options.strategy.compress if options.strategy is not None else None
        self._comm = CompressionState(compress) if compress is not None else None
        self._backend: Lowering | None = None
        self._equal: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._bound: WeakKeyDictionary[Any, CompiledStep] = WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step: on a captured graph if one holds for this call, else the step is captured first."""
        shortcut = self._shortcut
        if shortcut is not None and (result := shortcut(args, kwargs)) is not shortcut:
            return result  # the usual case: as in the last call
        if is_capturing():  # one compiled step inside another: part of the outer graph
            return self._step(*args, **kwargs)
        self._calls += 1
        leaves, spec = tree_util.flatten((args, kwargs))
        reason = None
        for position, entry in enumerate(self._entries):
            why_not = entry.captured.guards.why_not(leaves, spec)
            if why_not is None:
                if position:
                    self._entries.insert(0, self._entries.pop(position))
                    self._shortcut = None
                self._hits += 1
                return entry.captured.returned(self._run(entry, leaves), args, kwargs)
            reason = reason or why_not
            self._retraces.compared(entry.captured.guards, leaves)
        with gc_paused():
            with progress_shown(self._name, init().rank):
                entry = self._compile(args, kwargs, reason)
            with entry.captured.undone_on_error():
                result = entry.captured.returned(self._run(entry, leaves), args, kwargs)
            self._entries.insert(0, entry)
            loaded = entry.look.ready is not None
            self._traces, self._loaded = self._traces + (not loaded), self._loaded + loaded
            if not loaded and self._starts_warm:
                self._step_cache.keep(lambda: self._saved(entry))
        return result

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str | None) -> _Entry:
        """Every stage, in order, for one signature."""
        world = init()
        self._retraces.allow(reason)
        look = self._look(args, kwargs, world)
        if look.ready is not None:
            with look.ready.captured.undone_on_error():
                return self._resume(look, look.ready, world)
        self._lowering(world).prepare()
        try:
            report_stage("capturing")
            with naming(self._step):
                captured = self._capture(args, kwargs)
        except Exception as error:
            self._rendezvous.abandon(error, world)
            raise
        with captured.undone_on_error():
            return self._plan(captured, look, world)

    def _plan(self, captured: Captured, look: CacheLookup, world: World) -> _Entry:
        """Every stage behind capture, in order."""
        axis, strategy, lowering = data_axis(world, self._options.mesh), self._strategy(world), self._lowering(world)
        try:
            report_stage("planning")
            placed = place(captured.program, strategy, axis)
            scheduled = run_passes(placed, self._passes(captured, self._comm, self._choose, lowering.passes(placed)))
        except Exception as error:
            self._rendezvous.abandon(error, world)
            raise
        programs = {program.stage: program for program in (captured.program, placed, scheduled)}
        nccl_connect.begin(axis, world.device)
        return self._lower(captured, programs, look, world)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any], world: World) -> CacheLookup:
        """What there is of this step from earlier processes."""
        if not self._starts_warm:
            return CacheLookup(fingerprint=None, ready=None, why_not="the older surface captures in every process")
        return self._step_cache.agreed(args, kwargs, self._setting(world), None if self._entries else self._rendezvous)

    def _resume(self, look: CacheLookup, ready: CachedStep, world: World) -> _Entry:
        """What follows capture and plan, for a step that was saved."""
        self._rendezvous.recall(ready.choices)
        nccl_connect.begin(data_axis(world, self._options.mesh), world.device)
        self._lowering(world).give(ready.programs[Stage.SCHEDULED], ready.kernels)
        log.info("%s is not captured: it was loaded from %s", self._name, ready.path)
        return self._lower(ready.captured, ready.programs, look.given(), world)

    def _lower(self, captured: Captured, programs: Mapping[Stage, Program], look: CacheLookup, world: World) -> _Entry:
        """A scheduled program as something that runs, once all ranks have the same plan."""
        scheduled, lowering, comm = programs[Stage.SCHEDULED], self._lowering(world), self._comm
        try:
            held = comm.hold(scheduled) if comm is not None else None
            # Rank 0 compiles before it meets the others, who find what it has made. What was loaded is compiled.
            loaded = look.ready is not None and look.ready.programs is programs
            runner = lowering.lower(scheduled) if loaded or world.rank == 0 or not lowering.shares_kernels else None
        except Exception as error:
            self._rendezvous.abandon(error, world)
            raise
        state = describe_state(scheduled) + (f"{comm}\n" if comm is not None else "")
        plan = plan_text(scheduled) + state
        self._rendezvous.agree(plan, lambda: plan_text(scheduled, by_rank=True) + state, world)
        binding = captured.binding if held is None else captured.binding.with_tensors(held.tensors)
        buffers = self._meet(scheduled, binding, world)
        runner = runner or lowering.lower(scheduled)
        executable = Executable(scheduled, binding, runner, world, call=self._rendezvous.call, buffers=buffers)
        return _Entry(captured=captured, programs=programs, executable=executable, plan=plan, held=held, look=look)

    def _run(self, entry: _Entry, leaves: list[Any]) -> Any:
        """One call of the first entry, or of a new one."""
        comm, held = self._comm, entry.held
        if comm is None or held is None:
            result = entry.executable(leaves)
            self._shorten(entry)
            return result
        if comm.is_outdated(held):
            self._entries[0] = self._plan(entry.captured, entry.look, init())
            return self._run(self._entries[0], leaves)
        with comm.call(held):
            return entry.executable(leaves)

    def _shorten(self, entry: _Entry) -> None:
        """Has the next call try the way of this entry, where it is native all along and nothing is measured."""
        run = entry.executable.run() if entry.captured.only_returns else None
        if run is not None and entry.shortcut is None:
            entry.shortcut = entry.captured.guards.shortcut(run)
        self._shortcut = entry.shortcut if run is not None else None

    def _short(self) -> int:
        """Calls that took a shortcut."""
        return sum(entry.shortcut.hits for entry in self._entries if entry.shortcut is not None)

    def state_dict(self) -> dict[str, Any]:
        """What `PowerSGD` remembers on this rank, for checkpoints; tensors are the step's own. {} without it."""
        return self._comm.state_dict() if self._comm is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`, copying tensors. Raises ConfigError for what is none of this strategy."""
        if self._comm is not None:
            self._comm.load_state_dict(state)
        elif state:
            raise ConfigError(f"{self._name} compresses nothing and has no state to load, got {sorted(state)}.")

    def _meet(self, program: Program, binding: Binding, world: World) -> BufferSync | None:
        """Makes parameters and buffers equal on all ranks; what keeps the buffers so."""
        axis, strategy = data_axis(world, self._options.mesh), self._strategy(world)
        if strategy is None or axis is None or axis.size == 1:
            return None
        nccl_connect.wait()
        if strategy.sync_at_start:
            fresh = [t for t in binding.synced(program) if id(t) not in self._equal and not is_freed(t)]
            with named_failures(world, lambda: f"the first broadcast of {self._name}"):
                broadcast_tensors(fresh, axis)
            self._equal.update({id(t): t for t in fresh})
        return BufferSync(program, binding.tensors, axis) if strategy.broadcast_buffers else None

    def _strategy(self, world: World) -> DDP | None:
        return DDP() if self._options.strategy is None and world.size > 1 else self._options.strategy

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        moved = self._retraces.moved
        return self._retraces.captured(lambda moving: capture(self._step, args, kwargs, moving, moved))

    def _setting(self, world: World) -> CacheContext:
        return CacheContext(
            options=self._options, world=world, backend=self._lowering(world), comm=self._comm,
            choices=self._rendezvous.choices, moved=self._retraces.moved,
        )  # fmt: skip

    def _saved(self, entry: _Entry) -> StepToSave:
        return StepToSave(
            look=entry.look, captured=entry.captured, programs=entry.programs, plan=entry.plan,
            choices=self._rendezvous.choices, kernels=self._lowering(init()).kernels(entry.programs[Stage.SCHEDULED]),
        )  # fmt: skip

    def _lowering(self, world: World) -> Lowering:
        """The backend, made when it is first needed: before that the device is not known."""
        if self._backend is None:
            what = f"the choice of a backend for {self._name}"
            objection = functools.partial(self._rendezvous.objection, world=world, what=what)
            costs = functools.partial(agreed_costs, self._rendezvous, world)
            blob_store = self._rendezvous.blob_store(world)
            self._backend = backend_for(self._options.backend, world.device, costs, objection, blob_store)
        return self._backend

    def _passes(
        self, captured: Captured, comm: CompressionState | None, choose: Choose, lowering: Sequence[Pass] = ()
    ) -> list[Pass]:
        strategy, backend = self._options.strategy or DDP(), self._lowering(init())
        return passes_of(
            self._options.passes, cost=backend.costs(self._cost()), bucket_bytes=strategy.limit_bytes,
            hold_updates=strategy.hold_updates, choose=choose, travels_as=backend.travels_as, lowering=lowering,
            compress=comm.as_pass() if comm is not None else None,
        )  # fmt: skip

    def _choose(self, gradients: str, plan: Callable[[], Cuts]) -> Cuts:
        """The buckets for these gradients, as rank 0 has planned them."""
        found = self._rendezvous.choose(gradients, lambda: list(plan().items()), init())
        return {int(item): str(why) for item, why in found}

    def _cost(self) -> CostModel:
        return agreed_costs(self._rendezvous, init())

    def __get__(self, instance: Any, owner: type | None = None) -> CompiledStep:
        """A decorated method: one compiled step per instance."""
        if instance is None:
            return self
        try:
            bound = self._bound.get(instance)
        except TypeError as error:
            raise ConfigError(
                f"{self._name} is a compiled method of {type(instance).__name__}, whose instances cannot be held in a "
                f"weak dictionary ({error}). Make the class hashable, or compile a function that takes the object."
            ) from error
        if bound is None:
            bound = self._bound[instance] = CompiledStep(types.MethodType(self._step, instance), self._options)
        return bound

    def cache_info(self) -> CacheInfo:
        """Traces, hits, and the reasons of the retraces; of a decorated method, those of all instances."""
        steps = [self, *self._bound.values()]
        return CacheInfo(
            traces=sum(step._traces for step in steps),
            hits=sum(step._hits + step._short() for step in steps),
            reasons=tuple(reason for step in steps for reason in step._retraces.reasons),
            loaded=sum(step._loaded for step in steps),
        )

    def program(self, stage: Stage = Stage.SCHEDULED) -> Program:
        """The program of the last signature used, as it was at the end of `stage`."""
        return self._last().programs[stage]

    @property
    def graph(self) -> fx.GraphModule:
        """The graph that runs."""
        return self.program().module

    @property
    def plan(self) -> str:
        """The text that all ranks agreed on: the schedule of collectives and the parameters."""
        return self._last().plan

    def explain(self) -> Explanation:
        """What the last signature used runs: collectives, buckets, reasons; predicted and measured times, memory."""
        last, lowering = self._last(), self._lowering(init())
        strategy = "DDP" if last.programs[Stage.PLACED].mesh[0].size > 1 else "no communication"
        form = lowering.form(last.executable.runner)
        return explain(
            self.program(), step=self._name, strategy=strategy, backend=form.told,
            one_launch=form.is_one_launch, cost=self._cost(), measured=last.executable.measured,
            loaded_from=str(last.look.ready.path) if last.look.ready is not None else "",
        )  # fmt: skip

    def measure(self, num_calls: int = 20) -> None:
        """Times your next calls with the last signature used, `num_calls` of them behind a first one, for `explain`.

        Nothing runs besides your calls, and they compute what they would have. On a GPU the device is waited for around
        each of them, and they run without a CUDA graph, inside of which no wait could be seen.

        Raises ConfigError before the first call, and for fewer than one.
        """
        last, lower, self._shortcut = self._last(), self._lowering(init()).lower, None
        last.executable.measure(num_calls, lambda wait: lower(last.programs[Stage.SCHEDULED], wait))

    def save(self, path: str | Path) -> None:
        """Writes the last signature used to a file, which `wholestep.load` reads in another process.

        With several ranks each writes a file of its own beside `path`, since a step may look at its rank. Raises
        ArtifactError for a step that means nothing in another process, with the reason, and ConfigError before the
        first call.
        """
        entry, world = self._last(), init()
        self._step_cache.write(Path(path), self._saved(entry), self._setting(world))

    def verify(
        self, *args: Any, ranks: int = 4, steps: int = 3, whole_batch: bool = True, **kwargs: Any
    ) -> Verification:
        """Runs `steps` steps as `ranks` ranks would, in this process, and compares them with what they should be.

        Args:
            args, kwargs: those of a call. The rows of the batch are divided among the virtual ranks.
            ranks: how many virtual ranks; each needs memory for the state, twice.
            steps: how many steps, one upon another.
            whole_batch: compare with the eager step on the whole batch, too. It should give the same where the loss is
                a mean over rows that are independent of each other; say False where it is not.

        Nothing of the user's is changed. Raises what a first call raises, and ConfigError for a batch that does not
        divide; a difference is no error here: ask the record, or let its `raise_if_failed` raise.
        """
        axis = data_axis(init(), self._options.mesh)
        if axis is None or axis.size != ranks:
            axis = MeshAxis(name="data", size=ranks, group="virtual")
        subject = Subject(
            name=self._name, step=self._step, capture=self._capture, passes=self._passes,
            strategy=self._options.strategy or DDP(), axis=axis, comm_state=self.state_dict(),
        )  # fmt: skip
        return verify(subject, args, kwargs, Trial(num_steps=steps, whole_batch=whole_batch))

    def _last(self) -> _Entry:
        if not self._entries:
            raise ConfigError(f"{self._name} has not been called yet, so there is nothing to look at. Call it once.")
        return self._entries[0]
