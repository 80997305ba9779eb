"""The page: an ordinary training step, compiled. Reads top to bottom as the stages of wholestep.

step ──capture──▶ CAPTURED ──place──▶ PLACED ──passes──▶ SCHEDULED ──lower──▶ Executable ──run──▶ numbers
"""

from __future__ import annotations

import functools
import itertools
import logging
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh

from wholestep.capture import tree
from wholestep.capture.blame import naming, place_of
from wholestep.capture.capture import Captured, capture
from wholestep.capture.storage import is_freed
from wholestep.capture.trace import is_capturing
from wholestep.config import DDP, Strategy
from wholestep.errors import ConfigError, RetraceLimitError
from wholestep.lower.eager import lower
from wholestep.passes.default import default_passes
from wholestep.passes.pipeline import Pass, run_passes
from wholestep.place.strategies import place
from wholestep.program.program import MeshAxis, Program, Stage
from wholestep.program.show import plan_text
from wholestep.report.explain import Explanation, explain
from wholestep.run.agree import abandon, agree
from wholestep.run.executable import Buffers, Executable, describe_state, make_equal
from wholestep.run.watch import named_failures
from wholestep.run.world import World, init

log = logging.getLogger("wholestep")
_made: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # compiled steps of each name


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """How often a step was captured and how often a captured graph was used again."""

    traces: int
    hits: int
    reasons: tuple[str, ...]
    """Why each trace after the first was needed."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One signature of the step: the program at each stage and what runs it."""

    captured: Captured
    programs: dict[Stage, Program]
    executable: Executable
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `compile` was asked for, checked."""

    strategy: Strategy | None
    mesh: DeviceMesh | None
    passes: tuple[Pass, ...]
    max_retraces: int


class CompiledStep:
    """A training step that runs as one graph. Made by `wholestep.compile`; called like the function it was made of."""

    def __init__(self, step: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step, self._options = step, options
        self._name = getattr(step, "__name__", type(step).__name__)
        # Ranks hold the meetings of one step in the same order; a step that fails does not disturb another one.
        self._number, self._meetings = next(_made[self._name]), itertools.count()
        self._entries: list[_Entry] = []
        self._reasons: list[str] = []
        self._hits = self._traces = self._calls = 0
        self._agreed: set[str] = set()
        self._equal: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._bound: WeakKeyDictionary[Any, CompiledStep] = WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step: on a captured graph if one holds for this call, else the step is captured first."""
        if is_capturing():  # one compiled step inside another: part of the outer graph
            return self._step(*args, **kwargs)
        self._calls += 1
        if self._entries:  # the usual case: as in the last call
            entry = self._entries[0]
            if (known := entry.captured.guards.leaves_of(args, kwargs)) is not None:
                self._hits += 1
                return entry.executable(known, self._call)
        leaves, spec = tree.flatten((args, kwargs))
        reason = None
        for position, entry in enumerate(self._entries):
            why_not = entry.captured.guards.why_not(leaves, spec)
            if why_not is None:
                if position:
                    self._entries.insert(0, self._entries.pop(position))
                self._hits += 1
                return entry.executable(leaves, self._call)
            reason = reason or why_not
        entry = self._compile(args, kwargs, reason)
        with _undone_on_error(entry.captured):
            result = entry.executable(leaves, self._call)
        self._entries.insert(0, entry)
        self._traces += 1
        return result

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str | None) -> _Entry:
        """Every stage, in order, for one signature."""
        world = init()
        axis, strategy = _axis(world, self._options.mesh), self._strategy(world)
        self._allow_retrace(reason)
        try:
            with naming(self._step):
                captured = self._capture(args, kwargs)
        except Exception as error:
            self._abandon(error, world)
            raise
        with _undone_on_error(captured):
            try:
                placed = place(captured.program, strategy, axis)
                scheduled = run_passes(placed, self._passes(captured))
                runner = lower(scheduled)
            except Exception as error:
                self._abandon(error, world)
                raise
            plan = plan_text(scheduled) + describe_state(captured.program)
            self._agree(plan, lambda: plan_text(scheduled, by_rank=True) + describe_state(captured.program), world)
            buffers = self._meet(captured, strategy, axis, world)
        executable = Executable(scheduled, captured.binding, runner, world, buffers)
        programs = {program.stage: program for program in (captured.program, placed, scheduled)}
        return _Entry(captured=captured, programs=programs, executable=executable, plan=plan)

    def _meet(self, captured: Captured, strategy: DDP | None, axis: MeshAxis | None, world: World) -> Buffers | None:
        """Makes parameters and buffers equal on all ranks; what keeps the buffers so."""
        if strategy is None or axis is None or axis.size == 1:
            return None
        if strategy.sync_at_start:
            synced = captured.binding.synced(captured.program)
            fresh = [t for t in synced if id(t) not in self._equal and not is_freed(t)]
            with named_failures(world, lambda: f"the first broadcast of {self._name}"):
                make_equal(fresh, axis)
            self._equal.update({id(t): t for t in fresh})
        return Buffers(captured.program, captured.binding.tensors, axis) if strategy.broadcast_buffers else None

    def _allow_retrace(self, reason: str | None) -> None:
        if reason is None:
            return
        if len(self._reasons) >= self._options.max_retraces:
            reasons = enumerate([*self._reasons, reason], 1)
            listing = "\n".join(f"  {number}. {text}" for number, text in reasons)
            raise RetraceLimitError(
                f"{place_of(self._step)} needs another trace, and max_retraces={self._options.max_retraces} are used "
                f"up. The reasons were:\n{listing}\n"
                f"Keep what changes out of the step or make it a tensor, or raise max_retraces."
            )
        self._reasons.append(reason)
        log.warning("%s is captured again: %s", self._name, reason)

    def _strategy(self, world: World) -> DDP | None:
        return DDP() if self._options.strategy is None and world.size > 1 else self._options.strategy

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        return capture(self._step, args, kwargs)

    def _passes(self, captured: Captured) -> list[Pass]:
        strategy = self._options.strategy or DDP()
        return default_passes(cap_bytes=strategy.cap_bytes, extra=self._options.passes)

    def _call(self) -> str:
        """``train_step, call 7``: which call of which compiled step this is, in the same words on every rank."""
        number = f" ({self._number + 1})" if self._number else ""
        return f"{self._name}{number}, call {self._calls}"

    def _next_meeting(self) -> str:
        return f"plan/{self._name}/{self._number}/{next(self._meetings)}"

    def _abandon(self, error: Exception, world: World) -> None:
        if world.size > 1:
            abandon(
                error, store=world.store, rank=world.rank, key=self._next_meeting(), size=world.size,
                what=f"the plan of {self._name}",
            )  # fmt: skip

    def _agree(self, plan: str, by_rank: Callable[[], str], world: World) -> None:
        # A plan that all ranks agreed on before needs no second meeting, to which the others might not come:
        # a rank whose last batch is smaller captures again, with the same schedule.
        if world.size > 1 and plan not in self._agreed:
            agree(
                plan, store=world.store, rank=world.rank, size=world.size, key=self._next_meeting(),
                timeout_s=world.timeout_s, what=f"the plan of {self._name}", call=self._call(), peers=world,
                detail=by_rank,
            )  # fmt: skip
            self._agreed.add(plan)

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
            hits=sum(step._hits for step in steps),
            reasons=tuple(reason for step in steps for reason in step._reasons),
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
        """What the last signature used runs: collectives, bytes, buckets, reasons."""
        strategy = "DDP" if self._last().programs[Stage.PLACED].mesh[0].size > 1 else "no communication"
        return explain(self.program(), step=self._name, strategy=strategy, backend="eager")

    def _last(self) -> _Entry:
        if not self._entries:
            raise ConfigError(f"{self._name} has not been called yet, so there is nothing to look at. Call it once.")
        return self._entries[0]


@contextmanager
def _undone_on_error(captured: Captured) -> Iterator[None]:
    """A first call that fails leaves no optimizer state behind that was not there before it."""
    try:
        yield
    except BaseException:
        captured.undo()
        raise


def _axis(world: World, mesh: DeviceMesh | None) -> MeshAxis | None:
    """The mesh axis that data is spread over, as graphs see it."""
    mesh = world.mesh if mesh is None else mesh
    if mesh is None:
        return None
    if mesh.ndim != 1:
        raise ConfigError(f"wholestep.compile(mesh=...) wants one axis for DDP, got the axes {mesh.mesh_dim_names}.")
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "data"
    return MeshAxis(name=name, size=mesh.size(), group=mesh.get_group().group_name)


Backend = Literal["auto", "eager"]
Passes = Pass | Sequence[Pass] | None


@overload
def compile(
    fn: Callable[..., Any],
    *,
    strategy: Strategy | None = None,
    mesh: DeviceMesh | None = None,
    backend: Backend = "auto",
    passes: Passes = None,
    max_retraces: int = 8,
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
) -> Callable[[Callable[..., Any]], CompiledStep]: ...
def compile(
    fn: Callable[..., Any] | None = None,
    *,
    strategy: Strategy | None = None,
    mesh: DeviceMesh | None = None,
    backend: Backend = "auto",
    passes: Passes = None,
    max_retraces: int = 8,
) -> CompiledStep | Callable[[Callable[..., Any]], CompiledStep]:
    """Compiles a training step: forward, loss, backward, communication, clipping and optimizer as one graph.

    Args:
        fn: the step, written for one device. Without it a decorator is returned.
        strategy: `DDP(...)`; None means DDP over the world, and nothing on one process.
        mesh: a DeviceMesh with one axis; by default one axis over the world.
        backend: "eager" runs the graph's own text node by node; "auto" chooses it.
        passes: a function ``Program -> Program``, or several. They run behind the default ones, on a functional
            graph; only the pass that lets operations run in place comes after them.
        max_retraces: how many new signatures may be captured after the first.

    Raises:
        ConfigError: for options that cannot be used; what goes wrong in a call is listed in `wholestep.errors`.
    """
    options = _checked_options(strategy, mesh, backend, passes, max_retraces)
    if fn is None:
        return lambda step: compile(step, strategy=strategy, mesh=mesh, passes=passes, max_retraces=max_retraces)
    if not callable(fn):
        raise ConfigError(f"wholestep.compile wants a function, got {type(fn).__name__}.")
    if isinstance(fn, torch.nn.Module):
        raise ConfigError("wholestep.compile wants a whole step, got a module. Write a function that calls it.")
    return CompiledStep(fn, options)


def _checked_options(strategy: Any, mesh: Any, backend: Any, passes: Any, max_retraces: int) -> Options:
    """The options as a record. Raises ConfigError for those that cannot be used."""
    if strategy is not None and not isinstance(strategy, DDP):
        raise ConfigError(f"wholestep.compile(strategy=...) wants a strategy such as ws.DDP(), got {strategy!r}.")
    if backend not in ("auto", "eager"):
        raise ConfigError(f'wholestep.compile(backend=...) knows "auto" and "eager" so far, got {backend!r}.')
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"wholestep.compile(mesh=...) wants a torch.distributed.DeviceMesh, got {mesh!r}.")
    if (
        passes is not None
        and not callable(passes)
        and not (isinstance(passes, Sequence) and all(map(callable, passes)))
    ):
        raise ConfigError(f"wholestep.compile(passes=...) wants functions Program -> Program, got {passes!r}.")
    if max_retraces < 0:
        raise ConfigError(f"wholestep.compile(max_retraces=...) wants 0 or more, got {max_retraces}.")
    extra = () if passes is None else (passes,) if callable(passes) else tuple(passes)
    return Options(strategy=strategy, mesh=mesh, passes=extra, max_retraces=max_retraces)
