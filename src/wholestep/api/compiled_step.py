"""CompiledStep: what a user calls and asks. The stages of a first call are in `wholestep.api.stages`, the page."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.fx as fx

from wholestep.api.call_stats import CallStats
from wholestep.api.dispatch import Dispatcher
from wholestep.api.padding import Padding
from wholestep.api.report.explain import explain
from wholestep.api.report.live_explanation import LiveExplanation, explain_live
from wholestep.api.report.records import CacheInfo, Explanation
from wholestep.api.report.size_report import size_report
from wholestep.api.stages import Entry, Stages
from wholestep.capture.guards.fast_guards import FastCall
from wholestep.capture.python.tracing_thread import is_capturing
from wholestep.capture.reach.unwrap_compiled import left_alone
from wholestep.config import DDP
from wholestep.errors import (
    ArtifactError,
    CaptureError,
    ConfigError,
    LazyParameterError,
    PeerRefusedError,
    RetraceLimitError,
    WholestepError,
)
from wholestep.ir.ops.assertions import is_of_check
from wholestep.ir.program import InputKind, MeshAxis, Program, Stage
from wholestep.live.live_step import LiveStep
from wholestep.live.ranks.peers import Peers
from wholestep.live.recording.handle import CURRENT
from wholestep.runtime.checkpoint.optimizers import LayoutOf, cut_like_parameter
from wholestep.runtime.distributed.world import init
from wholestep.runtime.options import Options, data_axes
from wholestep.runtime.verify.kernel_check import Kernels
from wholestep.runtime.verify.verification import Verification
from wholestep.runtime.verify.verify import Subject, Trial, verify
from wholestep.util.forget_frames import forget_frames

log = logging.getLogger("wholestep")


class CompiledStep:
    """A training step that runs as one graph. Made by `wholestep.compile`; called like the function it was made of."""

    def __init__(
        self,
        step: Callable[..., Any],
        options: Options,
        saved: Path | None = None,
        *,
        stages: Callable[..., Stages] = Stages,
    ) -> None:
        """`saved`: a trusted file that holds the step for its first call. `stages` makes the stages of the step."""
        functools.update_wrapper(self, step, updated=())
        self._step = step
        self._stats = CallStats()
        self._stages = stages(step, options, self._stats, saved)
        self._padding = Padding(step, options.pad) if options.pad else None
        self._dispatcher = Dispatcher(self._stages, self._stats, self._padding)
        self._fast_call: FastCall | None = None
        """`Dispatcher.fast_call`, one attribute nearer; None where arguments are padded first."""
        self._bound: WeakKeyDictionary[Any, CompiledStep] = WeakKeyDictionary()
        self._live: LiveStep | None = None
        """How calls run once the step was refused as one graph."""

    @property
    def _options(self) -> Options:
        """What the user chose, and what wrapped modules were told."""
        return self._stages.options

    @left_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step: on a captured graph if one holds for this call, else the step is captured first."""
        fast_call = self._fast_call
        try:
            if fast_call is not None and (result := fast_call(args, kwargs)) is not fast_call:
                return result  # the usual case: as in the last call
            return self._dispatched(args, kwargs)
        except Exception as error:
            if not is_of_check(error) or self._options.fullgraph or init().size > 1:
                raise
        # The step raises an error for a value. Nothing was written, so it may run again, and says it in its own words.
        return LiveStep(self._step, self._stages.name, "", self._compile_piece)(args, kwargs)

    def call_if_unchanged(self, *args: Any) -> Any:
        """As a call, if everything is as in the last one; else None, and nothing has run. Of a piece of a live step."""
        fast_call = self._fast_call
        result = None if fast_call is None else fast_call(args, {})
        return None if result is fast_call else result

    def _dispatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._padding is not None:
            return self._padding.call(self._dispatched_padded, args, kwargs)
        return self._dispatched_as_is(args, kwargs)

    def _dispatched_padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fast_call = self._dispatcher.fast_call if self._live is None else None
        if fast_call is not None and (result := fast_call(args, kwargs)) is not fast_call:
            return result
        return self._dispatched_as_is(args, kwargs)

    def _dispatched_as_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_capturing() or CURRENT.run is not None:  # one compiled step inside another: part of the outer one
            return self._step(*args, **kwargs)
        if self._live is not None:
            return self._live(args, kwargs)
        self._fast_call = None
        try:
            result = self._dispatcher.call(args, kwargs)
        except (CaptureError, PeerRefusedError, RetraceLimitError) as error:
            if self._options.fullgraph:
                raise
            refusal = error
        else:
            self._fast_call = self._dispatcher.fast_call if self._padding is None else None
            return result
        forget_frames(refusal)  # of a trace, which knows tensors of the user's
        if isinstance(refusal, LazyParameterError) and self._stages.is_alone():
            log.info("this call of %s is eager code: its lazy modules make their parameters", self._stages.name)
            return self._step(*args, **kwargs)
        return self._go_live(refusal, args, kwargs)

    def _go_live(self, refusal: WholestepError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs this call and all later ones with the step's own Python, since it was refused as one graph."""
        try:
            peers, why = self._stages.peers(args, kwargs), self._stages.runs_eagerly
        except CaptureError as error:
            raise refusal from error
        reason = str(refusal)
        compile_piece = functools.partial(self._compile_piece, peers=peers)
        live = LiveStep(self._step, self._stages.name, reason, compile_piece, peers, runs_eagerly=why)
        result = live(args, kwargs)  # an error of the step's own leaves it as it was
        self._live = live
        log.warning("%s is live, its Python runs at every call: %s", self._stages.name, reason)
        return result

    def _compile_piece(self, function: Callable[..., Any], number: int, peers: Peers | None = None) -> CompiledStep:
        strategy = self._options.strategy if peers is None else peers.piece_strategy
        stages = functools.partial(
            PieceStages, left_alone=frozenset if peers is None else peers.left_alone, number=number
        )
        return CompiledStep(function, replace(self._options, fullgraph=True, strategy=strategy, pad={}), stages=stages)

    def __get__(self, instance: Any, owner: type | None = None) -> CompiledStep:
        """A decorated method: one compiled step per instance."""
        if instance is None:
            return self
        try:
            bound = self._bound.get(instance)
        except TypeError as error:
            raise ConfigError(
                f"{self._stages.name} is a compiled method of {type(instance).__name__}, whose instances cannot be "
                f"held in a weak dictionary ({error}). Make the class hashable, or compile a function that takes the "
                f"object."
            ) from error
        if bound is None:
            bound = self._bound[instance] = CompiledStep(types.MethodType(self._step, instance), self._options)
        return bound

    def cache_info(self) -> CacheInfo:
        """Traces, hits, and the reasons of the retraces; of a decorated method, those of all instances."""
        steps = [self, *self._bound.values()]
        steps += [piece for step in steps if step._live is not None for piece in step._live.compiled_pieces]
        return CacheInfo(
            traces=sum(step._stats.traces for step in steps),
            hits=sum(step._stats.hits for step in steps),
            reasons=tuple(reason for step in steps for reason in step._stages.retraces.reasons),
            loaded=sum(step._stats.loaded for step in steps),
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

    def explain(self) -> Explanation | LiveExplanation:
        """Describes the last signature used: collectives, buckets, reasons; predicted and measured times, memory.

        Of a step that is live: its pieces, where its Python asks for values, and what runs call by call, and why.
        """
        if self._live is not None:
            return explain_live(self._live, str(self._options.backend))
        entry, stages = self._last(), self._stages
        strategy = stages.strategy_name(entry)
        mode = stages.backend.execution_mode(entry.executable.runner)
        return explain(
            self.program(), step=stages.name, strategy=strategy, backend=mode.description,
            one_launch=mode.is_one_launch, cost=stages.cost(), measured=entry.executable.measured,
            loaded_from=str(entry.loaded_from or ""),
            sizes=size_report(self.program(), entry.captured.guards, stages.retraces.constant_sizes),
        )  # fmt: skip

    def measure(self, num_calls: int = 20) -> None:
        """Times your next calls with the last signature used, `num_calls` of them after a first one, for `explain`.

        Nothing runs besides your calls, and they compute what they would have. On a GPU the device is waited for around
        each of them, and they run without a CUDA graph, inside of which no wait could be seen.

        Raises ConfigError before the first call, and for fewer than one.
        """
        entry, lower, self._fast_call = self._last(), self._stages.backend.lower, None
        entry.executable.measure(num_calls, lambda wait: lower(entry.programs[Stage.SCHEDULED], wait))

    def save(self, path: str | Path) -> None:
        """Writes the last signature used to a file, which `wholestep.load` reads in another process.

        With several ranks each writes a file of its own beside `path`, since a step may look at its rank. Raises
        ArtifactError for a step that means nothing in another process, with the reason, and ConfigError before the
        first call.
        """
        if self._live is not None:
            raise ArtifactError(f"{self._stages.name} is live and cannot be saved: {self._live.reason}")
        self._stages.save(self._last(), Path(path))

    def state_dict(self) -> dict[str, Any]:
        """The state of `PowerSGD` on this rank, for checkpoints; tensors are the step's own. {} without it."""
        compression = self._stages.compression
        return compression.state_dict() if compression is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`, copying tensors. Raises ConfigError for what is none of this strategy."""
        if self._stages.compression is not None:
            self._stages.compression.load_state_dict(state)
        elif state:
            raise ConfigError(f"{self._stages.name} compresses nothing and has no state to load, got {sorted(state)}.")

    @property
    def is_method_of_many(self) -> bool:
        """Whether it is a decorated method that instances have called, each as a compiled step of its own."""
        return len(self._bound) > 0

    @property
    def calls(self) -> int:
        """How many calls it has run; after `wholestep.load_checkpoint`, with those before the checkpoint."""
        live_calls = max(0, self._live.stats.calls - 1) if self._live is not None else 0  # the first was counted before
        return self._stats.calls + live_calls

    def resume_at(self, calls: int) -> None:
        """Goes on counting calls there, as `wholestep.load_checkpoint` does."""
        self._stats.resumed_calls += calls - self.calls

    def load_memory(self, memory: dict[str, Any]) -> None:
        """Loads a `state_dict` if the step compresses gradients, as `wholestep.load_checkpoint` does, else nothing."""
        self._stages.load_memory(memory)

    def state_layout(self) -> LayoutOf:
        """How its strategy cuts new state of optimizers: what `wholestep.load_checkpoint` asks."""
        return cut_like_parameter if self._live is not None else self._stages.state_layout()

    def verify(
        self, *args: Any, ranks: int | tuple[int, int] = 4, steps: int = 3, whole_batch: bool = True, **kwargs: Any
    ) -> Verification:
        """Runs `steps` steps as `ranks` ranks would, in this process, and compares them with what they should be.

        Args:
            args, kwargs: those of a call. The rows of the batch are divided among the virtual ranks.
            ranks: how many virtual ranks; each needs memory for the state, twice. Two numbers are those of a mesh
                with the axes "dp_replicate" and "dp_shard".
            steps: how many steps, one upon another.
            whole_batch: compare with the eager step on the whole batch, too. It should give the same where the loss is
                a mean over rows that are independent of each other; say False where it is not.

        Nothing of the user's is changed. Raises what a first call raises, and ConfigError for a batch that does not
        divide; a difference is no error here: ask the record, or let its `raise_if_failed` raise.
        """
        stages = self._stages
        subject = Subject(
            name=stages.name, step=self._step, capture=stages.capture, passes=stages.passes,
            strategy=self._options.strategy or DDP(), axes=self._virtual_axes(ranks), comm_state=self.state_dict(),
            kernels=Kernels(stages.backend.passes, stages.backend.compile_segments) if init().size == 1 else None,
        )  # fmt: skip
        return verify(subject, args, kwargs, Trial(num_steps=steps, whole_batch=whole_batch))

    def _virtual_axes(self, ranks: int | tuple[int, int]) -> tuple[MeshAxis, ...]:
        """The axes of virtual ranks: the real one, whose group the step may know, where it has as many ranks."""
        if isinstance(ranks, tuple):
            replicas, shards = ranks
            return (
                MeshAxis(name="stride 1", size=shards, group="virtual shards"),
                MeshAxis(name=f"stride {shards}", size=replicas, group="virtual replicas"),
            )
        axes = data_axes(init(), self._options.mesh)
        is_real = len(axes) == 1 and axes[0].size == ranks
        return axes if is_real else (MeshAxis(name="data", size=ranks, group="virtual"),)

    def _last(self) -> Entry:
        if self._live is None:
            return self._dispatcher.last()
        piece = self._live.last_piece
        if piece is None:
            raise ConfigError(
                f"{self._stages.name} is live and no piece of it is compiled yet, so there is no graph to look at: "
                f"{self._live.reason}"
            )
        last: Entry = piece._last()
        return last


class PieceStages(Stages):
    """The stages of a piece of a live step. Its function is made anew in every process, so nothing is cached."""

    uses_cache = False
    is_piece = True

    def __init__(self, *args: Any, left_alone: Callable[[], frozenset[int]], **kwargs: Any) -> None:
        """`left_alone`: ids of the tensors that the strategy of the live step leaves to each rank."""
        super().__init__(*args, **kwargs)
        self._left_alone = left_alone

    def _leave_alone(self, state: Iterable[tuple[InputKind, str, Any]]) -> None:
        if self.options.strategy is not None:
            left = self._left_alone()
            names = tuple(name for _, name, one in state if id(one) in left)
            self.options = replace(self.options, strategy=replace(self.options.strategy, ignore=names))
