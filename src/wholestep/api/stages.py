"""The page: how a call that nothing was compiled for becomes an entry. Reads top to bottom as the arrow of wholestep.

call ──capture──▶ CAPTURED ──place──▶ PLACED ──passes──▶ SCHEDULED ──agree, lower, bind──▶ Executable
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from wholestep.api.cache.records import CacheContext, CachedStep, CacheLookup, StepToSave
from wholestep.api.cache.warm_start import StepCache
from wholestep.api.call_stats import CallStats
from wholestep.api.reshard_choice import place_and_choose
from wholestep.capture.bind.binding import Binding
from wholestep.capture.bind.captured import Captured
from wholestep.capture.capture import capture
from wholestep.capture.guards.fast_guards import FastCall
from wholestep.capture.python.user_frame import naming
from wholestep.capture.reach.arguments import marked_sizes
from wholestep.capture.reach.reachability import find_reachable
from wholestep.capture.reach.train_state import collect
from wholestep.capture.retrace_policy import RetracePolicy
from wholestep.capture.wrappers.fully_shard_settings import gather_once, settle
from wholestep.config import DDP, FSDP, Compress, Strategy, ZeRO
from wholestep.cost.cost_model import CostModel
from wholestep.errors import CaptureError, RankMismatchError
from wholestep.ir.printer import plan_text
from wholestep.ir.program import InputKind, Program, Stage
from wholestep.live.ranks.peers import Peers
from wholestep.lower.auto_backend import backend_for
from wholestep.lower.base.protocol import Backend
from wholestep.passes.comm.bucket_planner import Cuts
from wholestep.passes.comm.bucketing import Choose
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.runtime import wrapped_strategy
from wholestep.runtime.buffer_sync import BufferSync, StateBroadcast
from wholestep.runtime.checkpoint.optimizers import LayoutOf, cut_like_parameter
from wholestep.runtime.compression_state import CompressionBuffers, CompressionState
from wholestep.runtime.distributed import nccl_connect
from wholestep.runtime.distributed.rendezvous import Rendezvous
from wholestep.runtime.distributed.world import World, init
from wholestep.runtime.executable import Executable, describe_state
from wholestep.runtime.options import Options, data_axes
from wholestep.runtime.sharding import shard_values
from wholestep.runtime.sharding.live_strategy import live_note, live_strategy
from wholestep.runtime.sharding.shard_live import LiveSharding, layout_of_state
from wholestep.runtime.shared_costs import agreed_costs
from wholestep.runtime.step_timer import Runner
from wholestep.runtime.wrapped_strategy import WrappedStrategy
from wholestep.util.progress import report_stage

log = logging.getLogger("wholestep")


@dataclass(slots=True, kw_only=True)
class Entry:
    """One signature of a step: the program at each stage and what runs it."""

    captured: Captured
    programs: Mapping[Stage, Program]
    executable: Executable
    plan: str
    """The text that all ranks agreed on."""
    compression: CompressionBuffers | None
    """The state of compressed communication that the program reads."""
    lookup: CacheLookup
    """The lookup in the step cache before the step was captured."""
    fast_call: FastCall | None = None
    """The native call, once there is one."""

    @property
    def loaded_from(self) -> Path | None:
        """The file it was loaded from; None if it was captured."""
        return self.lookup.step.path if self.lookup.step is not None else None


def _compress(strategy: Strategy | None) -> Compress | None:
    return strategy.compress if isinstance(strategy, DDP) else None


def _compression(strategy: Strategy | None) -> CompressionState | None:
    compress = _compress(strategy)
    return CompressionState(compress) if compress is not None else None


class Stages:
    """Makes the entries of one step; holds what they share: backend, compression state, agreed choices."""

    uses_cache = True
    """Whether steps are looked up in, and written to, the cache on disk."""
    is_piece = False
    """Whether it is a piece of a live step: that has adopted the settings of wrapped modules, shards plain ones, and
    knows through which results a backward goes on."""

    def __init__(
        self, step: Callable[..., Any], options: Options, stats: CallStats | None = None, saved: Path | None = None,
        *, number: int | None = None,
    ) -> None:  # fmt: skip
        """`stats` number calls in messages. `saved`: a trusted file with the step. `number`: see `Rendezvous`."""
        self.step, self.options = step, options
        self.name = getattr(step, "__name__", type(step).__name__)
        self.rendezvous = Rendezvous(self.name, lambda: stats.calls if stats is not None else 0, number)
        self.retraces = RetracePolicy(step, options.max_retraces, options.dynamic)
        self.cache, self.compression = StepCache(step, saved), _compression(options.strategy)
        self._broadcast = StateBroadcast(self.name)
        self._sharding = LiveSharding(step)
        self._given = options
        """What the user chose, where modules bring a strategy with them: `wrapped`."""
        self.wrapped: WrappedStrategy | None = None
        self._fully_sharded, self._is_adopted = list[FSDPModule](), False  # whether modules were asked what they bring
        self._memory: dict[str, Any] | None = None
        """Of compressed communication, read before it was known whether modules bring a strategy that has any."""
        self._kept_by_modules = ""  # what no graph keeps, in words
        self.is_parallel = False
        """Whether modules communicate by themselves, so that no strategy does; and a live step has no pieces then."""

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_first: bool) -> Entry:
        """Every stage in order, for one signature. `is_first`: the step has no other entry."""
        world = init()
        with naming(self.step):
            if not self._adopt(args, kwargs, world) and not self.is_piece:
                self._shard_live(args, kwargs, world)
        lookup = self._lookup(args, kwargs, self.rendezvous if is_first else None)
        if lookup.step is not None:
            with lookup.step.captured.undone_on_error():
                return self._load(lookup, lookup.step)
        self.backend.prepare()
        with self.rendezvous.abandoned_on_error(world), naming(self.step):
            report_stage("capturing")
            captured = self.capture(args, kwargs)
            captured.check_results(self.is_piece)
        with captured.undone_on_error():
            try:
                return self.plan(captured, lookup)
            except RankMismatchError as error:
                if self.is_parallel or self.wrapped is not None:  # all ranks know, and modules can do without
                    raise CaptureError(f"{self.name} is another graph on each rank.") from error
                raise

    def settle(self) -> None:
        """Puts in order what eager code has left in modules of ``fully_shard``."""
        settle(self._fully_sharded)

    def plan(self, captured: Captured, lookup: CacheLookup) -> Entry:
        """Every stage after capture, in order."""
        world, axes = init(), data_axes(init(), self.options.mesh)
        rows = zip(captured.program.inputs, captured.binding.tensors, strict=True)
        self._leave_alone((one.kind, one.name, it) for one, it in rows if one.shard is None)
        with self.rendezvous.abandoned_on_error(world):
            report_stage("planning")
            choose = functools.partial(self.rendezvous.choose, world=world)
            placed = place_and_choose(captured.program, self._strategy(world), axes, world.device, choose)
            passes = self.passes(captured, self.compression, self._choose_cuts, self.backend.passes(placed))
            scheduled = run_passes(placed, passes)
        programs = {program.stage: program for program in (captured.program, placed, scheduled)}
        nccl_connect.begin(axes, world.device)  # ranks connect while kernels are compiled
        return self._lower(captured, programs, lookup, self.compile_and_share)

    def _lower(
        self,
        captured: Captured,
        programs: Mapping[Stage, Program],
        lookup: CacheLookup,
        compile_before: Callable[[Program], Runner | None],
    ) -> Entry:
        """Makes a scheduled program run: compiles, agrees, compiles what is missing, broadcasts the state, binds.

        `compile_before` compiles before the ranks agree, or returns None where the backend compiles afterwards.
        """
        world, scheduled = init(), programs[Stage.SCHEDULED]
        with self.rendezvous.abandoned_on_error(world):
            compression = self.compression.buffers_for(scheduled) if self.compression is not None else None
            runner = compile_before(scheduled)
        plan = self._agree(scheduled, world)
        binding = shard_values.with_rank(captured.binding, scheduled, self._mesh(world))
        binding = binding if compression is None else binding.with_constants(compression.tensors)
        # Before anything travels: who compiles for all needs its device, which would wait for ranks that wait for it.
        runner = runner or self.backend.lower(scheduled)
        buffer_sync = self._broadcast_state(scheduled, binding, world)
        runner = shard_values.around(scheduled, captured.spec, runner, self._mesh(world))
        executable = Executable(scheduled, binding, runner, world, call=self.rendezvous.call, buffer_sync=buffer_sync)
        return Entry(
            captured=captured, programs=programs, executable=executable, plan=plan, compression=compression,
            lookup=lookup,
        )  # fmt: skip

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """One call as a functional graph, with inputs in the place of numbers and sizes that retraces have shown."""
        cut, sizes = self._sharding.cut_state, marked_sizes(args, kwargs, self.options.dynamic)
        return self.retraces.captured(lambda moving: capture(self.step, args, kwargs, moving, cut_state=cut), sizes)

    def passes(
        self, captured: Captured, compression: CompressionState | None, choose: Choose, lowering: Sequence[Pass] = ()
    ) -> list[Pass]:
        """The passes for a captured program. `lowering` are those of the backend."""
        strategy = self.options.strategy or DDP()
        return passes_of(
            self.options.passes, cost=self.backend.costs(self.cost()), bucket_bytes=strategy.limit_bytes,
            hold_updates=strategy.hold_updates, choose=choose, choose_wire_format=self.backend.wire_format,
            lowering=lowering, compress=compression.as_pass() if compression is not None else None,
        )  # fmt: skip

    def compile_and_share(self, scheduled: Program) -> Runner | None:
        """Compiles on rank 0, whose kernels the other ranks find after they agreed; None on those."""
        return self.backend.lower(scheduled) if init().rank == 0 or not self.backend.shares_kernels else None

    def _agree(self, scheduled: Program, world: World) -> str:
        """Compares the plan of all ranks; returns its text. Raises RankMismatchError, RankMissingError."""
        state = describe_state(scheduled) + (f"{self.compression}\n" if self.compression is not None else "")
        plan = plan_text(scheduled) + state
        self.rendezvous.agree(plan, lambda: plan_text(scheduled, by_rank=True) + state, world)
        return plan

    def _broadcast_state(self, program: Program, binding: Binding, world: World) -> BufferSync | None:
        """Makes parameters and buffers equal on all ranks; returns what keeps buffers so. None for a single rank."""
        axes, strategy = data_axes(world, self.options.mesh), self._strategy(world)
        if strategy is None or all(axis.size == 1 for axis in axes):
            return None
        nccl_connect.wait()
        if strategy.sync_at_start:
            self._broadcast(binding.synced(program), axes, world)
        return BufferSync(program, binding.tensors, axes, strategy)

    def peers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Peers | None:
        """What the strategy does in a step that is live; all ranks have agreed that it is. None for a single rank.

        Raises CaptureError for a strategy that needs a single graph, RankMissingError where other ranks do not come.
        """
        world, axes = init(), data_axes(init(), self.options.mesh)
        self._leave_alone((s.kind, s.name, s.tensor) for s in collect(find_reachable(self.step, args, kwargs)).slots)
        strategy = self._strategy(world)
        if strategy is not None and (why_not := Peers.why_not(strategy)) and self.wrapped is None:
            raise CaptureError(why_not)
        if self.runs_eagerly:
            log.warning("%s is live. %s", self.name, self.runs_eagerly)
            return None
        if strategy is None or all(axis.size == 1 for axis in axes):
            return None
        self.rendezvous.agree(f"{self.name} is live", lambda: "", world)
        nccl_connect.wait()
        live, note = live_strategy(self.step, args, kwargs, strategy), live_note(strategy, axes)
        peers = Peers(self.step, live, axes, world, note=note, wrapped=self.wrapped)
        if peers.note:
            log.warning("%s is live. %s", self.name, peers.note)
        return peers

    def is_alone(self) -> bool:
        """Whether nothing travels: there is one rank along each axis of data, or no strategy."""
        return self._strategy(init()) is None or all(axis.size == 1 for axis in data_axes(init(), self.options.mesh))

    @property
    def runs_eagerly(self) -> str:
        """Why the modules of a live step communicate by themselves; empty if pieces do."""
        hook = "" if self.wrapped is None else Peers.why_not(self.wrapped.strategy)
        why = "It has DTensors." if self.is_parallel else self._kept_by_modules or hook
        return f"{why} It runs as eager code, and its modules communicate." if why else ""

    # What an entry is planned with.

    @functools.cached_property
    def backend(self) -> Backend:
        """The backend, made when it is first needed: before that the device is not known."""
        world, meeting = init(), f"the choice of a backend for {self.name}"
        objection = functools.partial(self.rendezvous.objection, world=world, what=meeting)
        costs = functools.partial(agreed_costs, self.rendezvous, world)
        blob_store = self.rendezvous.blob_store(world)
        return backend_for(self.options.backend, world.device, costs, objection, blob_store)

    def cost(self) -> CostModel:
        """The costs that all ranks plan with."""
        return agreed_costs(self.rendezvous, init())

    def strategy_name(self, entry: Entry) -> str:
        """What reports call the strategy of an entry."""
        is_alone = all(axis.size == 1 for axis in entry.programs[Stage.PLACED].mesh[:1])
        if self.is_parallel:
            return "tensor parallel"
        return "no communication" if is_alone else type(self._strategy(init()) or DDP()).__name__

    def load_memory(self, memory: dict[str, Any]) -> None:
        """Compressed communication goes on from this memory, if there is any. Modules that bring their strategy tell in
        the first call what it is: the memory waits for them."""
        if self.compression is not None:
            self.compression.load_state_dict(memory)
        elif not self.is_piece and not self._is_adopted:
            self._memory = memory

    def state_layout(self) -> LayoutOf:
        """How the strategy cuts new state of optimizers, before the first call too."""
        mesh, strategy = self._mesh(init()), self._strategy(init())
        if mesh is None or mesh.size() == 1 or not isinstance(strategy, ZeRO):
            return cut_like_parameter
        return functools.partial(layout_of_state, strategy, mesh)

    def _mesh(self, world: World) -> DeviceMesh | None:
        return world.mesh if self.options.mesh is None else self.options.mesh

    def _adopt(self, args: tuple[Any, ...], kwargs: dict[str, Any], world: World) -> bool:
        """Takes over what wrapped modules were told, again before each trace; whether there are any."""
        if self.is_piece:
            return False
        self._is_adopted = True
        found = find_reachable(self.step, args, kwargs)
        self._fully_sharded = gather_once(root for _, root in found.modules.values())
        self.settle()
        self.is_parallel = wrapped_strategy.is_tensor_parallel(found, self._given.strategy)
        if self.is_parallel:
            return True
        try:
            wrapped = wrapped_strategy.wrapped_strategy(found, self._given.strategy, world)
        except CaptureError as error:
            self._kept_by_modules = str(error)
            raise
        if wrapped is None:
            return False
        if self.wrapped is None or _compress(wrapped.strategy) != _compress(self.wrapped.strategy):
            self.compression = _compression(wrapped.strategy)
            if self.compression is not None and self._memory is not None:
                self.compression.load_state_dict(self._memory)
            self._memory = None
        self.wrapped = wrapped
        self.options = replace(self._given, strategy=wrapped.strategy, mesh=wrapped.mesh)
        return True

    def _leave_alone(self, state: Iterable[tuple[InputKind, str, Any]]) -> None:
        """Has what no wrapper reduces or synchronizes stay that of each rank, and names parameters among it."""
        if self.wrapped is None or self.options.strategy is None:
            return
        strategy, names = wrapped_strategy.leaving_alone(self.options.strategy, self.wrapped, state)
        self.options = replace(self.options, strategy=strategy)
        if names:
            log.warning("%s: no wrapper reduces the gradients of %s: they stay local to each rank.", self.name, names)

    def _shard_live(self, args: tuple[Any, ...], kwargs: dict[str, Any], world: World) -> None:
        """Shards what the strategy wants sharded of all that the step can reach."""
        mesh, strategy = self._mesh(world), self._strategy(world)
        if mesh is not None and mesh.size() > 1 and isinstance(strategy, (FSDP, ZeRO)):
            nccl_connect.wait()
            self._fully_sharded = self._sharding(args, kwargs, strategy, mesh, data_axes(world, mesh))

    def _strategy(self, world: World) -> Strategy | None:
        is_given = self.options.strategy is not None or world.size == 1 or self.is_parallel
        return self.options.strategy if is_given else DDP()

    def _choose_cuts(self, gradients: str, plan: Callable[[], Cuts]) -> Cuts:
        """The buckets for these gradients, as rank 0 has planned them."""
        chosen = self.rendezvous.choose(gradients, lambda: list(plan().items()), init())
        return {int(item): str(why) for item, why in chosen}

    def is_outdated(self, entry: Entry) -> bool:
        """Whether compressed communication wants another program for the next call than that of this entry."""
        held = entry.compression
        return self.compression is not None and held is not None and self.compression.is_outdated(held)

    def _lookup(self, args: tuple[Any, ...], kwargs: dict[str, Any], first: Rendezvous | None) -> CacheLookup:
        """The lookup of this call in the cache of earlier processes."""
        if not self.uses_cache or self.is_parallel:
            why = "steps of DTensors" if self.is_parallel else "those of the older surface"
            return CacheLookup(fingerprint=None, step=None, why_not=f"{why} are captured in every process")
        moving = self.retraces.moving_sizes(marked_sizes(args, kwargs, self.options.dynamic))
        return self.cache.lookup(args, kwargs, self._cache_context(), first, moving)

    def _load(self, lookup: CacheLookup, cached: CachedStep) -> Entry:
        """Makes an entry of a saved step, without capture, placement and passes."""
        world, scheduled = init(), cached.programs[Stage.SCHEDULED]
        self.rendezvous.recall(cached.choices)
        nccl_connect.begin(data_axes(world, self.options.mesh), world.device)
        self.backend.load_kernels(scheduled, cached.kernels)
        log.info("%s is not captured: it was loaded from %s", self.name, cached.path)
        return self._lower(cached.captured, cached.programs, lookup.without_kernels(), self.backend.lower)

    def keep(self, entry: Entry) -> None:
        """Writes an entry to the cache, for other processes, if it can be written."""
        if self.uses_cache and not self.is_parallel:
            self.cache.store(lambda: self._to_save(entry))

    def save(self, entry: Entry, path: Path) -> None:
        """Writes an entry to a file of the user's. Raises ArtifactError."""
        self.cache.save(path, self._to_save(entry), self._cache_context())

    def _cache_context(self) -> CacheContext:
        return CacheContext(
            options=self.options, world=init(), backend=self.backend, compression=self.compression,
            choices=self.rendezvous.choices, cut_state=self._sharding.cut_state,
        )  # fmt: skip

    def _to_save(self, entry: Entry) -> StepToSave:
        return StepToSave(
            lookup=entry.lookup, captured=entry.captured, programs=entry.programs, plan=entry.plan,
            choices=self.rendezvous.choices, kernels=self.backend.dump_kernels(entry.programs[Stage.SCHEDULED]),
        )  # fmt: skip
