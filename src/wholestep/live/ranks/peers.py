"""What data parallelism does in a live step: gradients are reduced after each backward, ranks take the same way.

[Note: ranks of a live step]
A piece brings its collectives with it. Where calls run one by one, the gradients that a backward has left are reduced
right after it, so that parameters stay equal on all ranks. Both need all ranks to do the same, and Python may decide
otherwise on one of them. So ranks meet before each backward and each piece, and at the end of each call, and say what
they are about to do. If all pieces have the same shared calls they run; if not, call by call. If one rank ends its
call where others go on, that is an error on every rank, with the line of each, before anything has been reduced. What
one rank may run alone it does, and the others wait.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from wholestep.capture.python.tracing_thread import is_capturing
from wholestep.capture.python.user_frame import current_line
from wholestep.capture.reach.train_state import TrainState
from wholestep.capture.tracing.backward_engine import Engine, backward_replaced
from wholestep.capture.wrappers import ddp
from wholestep.capture.wrappers.fully_shard_hooks import before_forwards, reduced_alike
from wholestep.capture.wrappers.fully_shard_settings import again_through, gathered_leaves, settle, sharded_modules
from wholestep.config import DDP, FSDP, CastCompress, Strategy
from wholestep.errors import CaptureError, RankMismatchError
from wholestep.ir.dtensor.shards import is_sharded
from wholestep.ir.ops.collectives import group_named
from wholestep.ir.program import InputKind, MeshAxis
from wholestep.live.pieces.piece import Piece
from wholestep.live.ranks.cached_walk import CachedWalk
from wholestep.live.ranks.gradient_sums import SPARSE, GradientSums, is_sparse
from wholestep.live.ranks.path_facts import ToldPaths, from_json, to_json
from wholestep.live.ranks.sharded_parameters import (
    ShardedParameters,
    all_reduced,
    from_all_ranks,
    texts_of_all_ranks,
)
from wholestep.live.recording.events import (
    DOES,
    ENDS,
    GATHERS,
    PUTS_GRADIENTS,
    RUNS_BACKWARD,
    RUNS_FORWARD,
    RUNS_ON_SHARDS,
    RUNS_PIECE,
    Event,
)
from wholestep.live.recording.path import Path
from wholestep.runtime.buffer_sync import broadcast_over, may_differ
from wholestep.runtime.distributed.failure_report import named_failures
from wholestep.runtime.distributed.process_group import carries_host_tensors
from wholestep.runtime.distributed.world import World
from wholestep.runtime.wrapped_strategy import WrappedStrategy

_LINE_BYTES = 96
_meetings = itertools.count(1)


def next_meeting() -> int:
    """The number of the next meeting at which pieces are compiled, of all live steps: all ranks hold them in one order,
    and agree on plans there."""
    return next(_meetings)


class Peers:
    """The other ranks of a live step."""

    def __init__(
        self, step: Callable[..., Any], strategy: Strategy, axes: tuple[MeshAxis, ...], world: World,
        *, note: str = "", wrapped: WrappedStrategy | None = None,
    ) -> None:  # fmt: skip
        """`strategy`: as `live_strategy` gives it. Parameters that it shards are left to the hooks of torch. `axes`: of
        the mesh, as `data_axes` gives them.

        `note`: what a reader should know of the strategy in a live step. `wrapped`: the strategy that modules bring
        with them. Without, the step was written for whole tensors, and not for modules that its user has sharded.
        """
        self.strategy = strategy
        self.computes_whole = isinstance(strategy, FSDP) and wrapped is None
        """Whether Python computes with whole tensors in the place of shards."""
        self.note, self.wrapped = note, wrapped
        self._axes, self._world = axes, world
        on_host = all(carries_host_tensors(group_named(axis.group)) for axis in axes)
        self._meets_on = torch.device("cpu") if on_host else world.device
        """Where it can be the host: a message of a GPU waits for all that it computes."""
        self.walk = CachedWalk(step)
        self._sums = GradientSums(strategy, axes)
        self._state = TrainState()
        self._roots: list[nn.Module] = []
        self._made_graph = False
        """Whether a backward of this call has made a graph, which goes through gathered parameters."""
        self._call_name: Callable[[], str] = lambda: ""
        self._is_equal = not strategy.sync_at_start
        self._runs: WeakKeyDictionary[Callable[..., Any], tuple[TrainState, int]] = WeakKeyDictionary()
        """By functions of pieces what their runs are, with the state that it was told for."""
        self.have_compiled = False
        """Of the piece that all ranks run now: whether all have compiled it, with the same plans."""
        self._parted: RankMismatchError | None = None
        """What was raised in this call, of which the other ranks know: they come to no other meeting of it."""
        self.shards = ShardedParameters(axes)
        self._found: torch.Tensor | None = None
        """The whole tensor that this rank has asked for."""
        self.told = ToldPaths()
        self._has_news = False
        """Whether any rank has learned something in the call that ends."""

    @staticmethod
    def why_not(strategy: Strategy) -> str:
        """Why only a single graph can carry out a strategy; empty if a live step can."""
        compress = strategy.compress if isinstance(strategy, DDP) else None
        if compress is None or isinstance(compress, CastCompress):
            return ""
        return f"{type(compress).__name__} works on the buckets of a single graph."

    @property
    def managed(self) -> frozenset[int]:
        """ids of the parameters whose gradients DistributedDataParallel reduces."""
        return frozenset() if self.wrapped is None else self.wrapped.managed

    def run_of(self, piece: Piece, plans: int, *, is_ahead: bool) -> Event:
        """The run of a piece: the same on ranks that take part in the same calls of it, on the same state.

        `is_ahead`: whether it runs a backward before Python comes to it, and holds the gradients back.
        """
        state, number = self._runs.get(piece.function, (None, 0))
        if state is not self._state:
            number = zlib.crc32(piece.shared.text(self._name_of).encode())
            self._runs[piece.function] = self._state, number
        return Event(RUNS_PIECE, 2 * number + is_ahead, plans, piece.shared.is_empty)

    def number_of_plans(self, plan: str) -> int:
        """A number of the plans that all ranks have for the piece that they have just compiled, the same on all."""
        with self._failures_named():
            own = torch.tensor([zlib.crc32(plan.encode())], device=self._meets_on)
            return 1 + zlib.crc32(repr([int(one) for one in from_all_ranks(own, self._axes)]).encode())

    def _name_of(self, tensor: torch.Tensor) -> str:
        return self._state.name_of(tensor) if id(tensor) in self._state.index else ""

    def left_alone(self) -> frozenset[int]:
        """ids of the parameters and buffers that stay those of each rank, whatever they are called in a piece."""
        if self.wrapped is not None and isinstance(self.strategy, DDP):
            return frozenset(id(one.tensor) for one in self._state.params) - self.managed
        return frozenset(id(one.tensor) for one in self._state.slots if one.name in self.strategy.ignore)

    @property
    def piece_strategy(self) -> Strategy:
        """That of pieces: what ranks have to have alike at the start of a call they have by then."""
        return replace(self.strategy, sync_at_start=False, broadcast_buffers=False)

    @property
    def runs_pieces(self) -> bool:
        """Whether recorded calls may run as graphs: those of DDP reduce over one axis."""
        return isinstance(self.strategy, FSDP) or len(self._axes) == 1

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], call_name: str) -> None:
        """The start of a call: finds parameters and buffers, and makes equal what the strategy wants equal."""
        self._call_name, self._parted = (lambda: call_name), None
        reached = self.walk.reached(args, kwargs)
        self._state, self._roots, self._made_graph = reached.state, reached.roots, False
        wrappers = [wrapper for _, wrapper in reached.found.wrappers.values()]
        if self.wrapped is not None and isinstance(self.strategy, DDP):
            self.wrapped = replace(self.wrapped, reduced=ddp.managed(wrappers))
        self.shards.begin(self._state.params)
        settle(reached.sharded)
        kinds = [] if self._is_equal else [InputKind.PARAM, InputKind.BUFFER]
        kinds += [InputKind.BUFFER] if self.strategy.broadcast_buffers and self._is_equal else []
        chosen = [slot for slot in self._state.of_kind(*kinds) if not is_sharded(slot.tensor)]
        own = self.strategy.ignore if self._is_equal else ()
        tensors = [slot.tensor for slot in chosen if slot.name not in own]
        if wrappers:
            synced = (one for wrapper in wrappers for one in ddp.synced_buffers(wrapper))
            tensors = [*{id(one): one for one in synced}.values()]
        if tensors:
            with self._failures_named():
                broadcast_over(tensors, self._axes)
        if self.strategy.broadcast_buffers:
            may_differ(one.tensor for one in self._state.of_kind(InputKind.BUFFER) if not is_sharded(one.tensor))
        self._is_equal = True

    def meet(self, event: Event) -> bool:
        """Tells the others what this rank is about to do; whether all are about to do the same.

        Where a rank runs a backward or a forward by itself and others a piece, it waits until all run it; and where
        others run what one rank may run alone, until they have, which is not as a piece then. Where a rank
        wants a whole tensor, all give their parts, and meet again. Raises RankMismatchError where some ranks end their
        call, or run what communicates by itself, and others do not, and again for what is run after that. Of a piece
        `have_compiled` says afterwards whether all have compiled it, with the same plans: one may have forgotten a
        piece that another one kept, or have run it beside another.
        """
        if self._parted is not None:
            raise self._parted
        while True:
            events, lines = self._exchange(event)
            if wanted := [one for one in events if one.kind == GATHERS]:
                with torch.no_grad(), self._failures_named():
                    self._found = self.shards.gathered(wanted[0].what)
                if self._found is None:
                    self._parted = RankMismatchError(self._without_gradient(events, lines))
                    raise self._parted
                if wanted[0] == event:
                    return True
                continue
            if len(set(events)) == 1:
                self.have_compiled = event.detail > 0 and len({one.detail for one in events}) == 1
                self._has_news = event.kind == ENDS and any(one.detail for one in events)
                return True
            if any(one.is_local for one in events):
                if event.is_local:
                    return False
                continue  # until those who compute by themselves are back
            kinds = {one.kind for one in events}
            if ENDS in kinds or not kinds & {RUNS_PIECE, PUTS_GRADIENTS}:
                self._parted = RankMismatchError(self._mismatch(events, lines))
                raise self._parted
            if event.kind in (RUNS_PIECE, PUTS_GRADIENTS):
                return False

    def end(self) -> list[Path]:
        """The end of a call. Ranks tell each other what they know of their paths where any has news. Returns those on
        which a number varies by now that was a constant on this rank."""
        self.meet(Event(ENDS, detail=self.told.has_news))
        if not self._has_news:
            return []
        with self._failures_named():
            texts = texts_of_all_ranks(to_json(self.told.facts(self._name_of)), self._meets_on, self._axes)
        return self.told.take([one for text in texts for one in from_json(text)], self._name_of)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """While open, gradients that a backward of this thread leaves are reduced; ranks meet before forwards, too."""
        with ExitStack() as stack:
            stack.enter_context(backward_replaced(self._reducing_backward))
            if isinstance(self.strategy, FSDP):
                stack.enter_context(before_forwards(lambda: self.meet(Event(RUNS_FORWARD))))
            yield

    def whole(self, shard: DTensor) -> torch.Tensor:
        """The whole of a tensor. One rank may ask for that of a parameter or its gradient, all have to for any other.

        Raises RankMismatchError where a rank has no such gradient, or does not come.
        """
        number = self.shards.number_of(shard)
        if number is None:
            self.meet(Event(RUNS_ON_SHARDS, zlib.crc32(f"{tuple(shard.shape)} {shard.placements}".encode())))
            return shard.full_tensor().detach()
        self.meet(Event(GATHERS, number))
        found, self._found = self._found, None
        assert found is not None
        return found

    def leaves_of_forwards(self) -> dict[int, torch.Tensor]:
        """By id of sharded parameters what stands for them in the graphs of forwards."""
        return gathered_leaves(self._roots)

    def mean(self, grads: list[torch.Tensor | None], like: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients averaged over all ranks, of which some may have none. `like`: tensors of their shapes and dtypes.

        None where no rank has one.
        """
        with torch.no_grad(), self._failures_named():
            has = torch.tensor([one is not None for one in grads], dtype=torch.int32, device=self._world.device)
            anywhere = all_reduced(has, dist.ReduceOp.MAX, self._axes).tolist()
            pairs = zip(grads, like, anywhere, strict=True)
            found = [
                None if not any_has else torch.zeros(one.shape, dtype=one.dtype, device=one.device)
                if grad is None else grad.detach().to(one.dtype, copy=True)
                for grad, one, any_has in pairs
            ]  # fmt: skip
            self._sums.reduce([one for one in found if one is not None])
        return found

    def _reducing_backward(self, engine: Engine) -> Engine:
        def run(tensors: Any, grads: Any, keep: Any, create: Any, inputs: Any, *rest: Any, **kw: Any) -> Any:
            if is_capturing():  # a piece has its own collectives
                return engine(tensors, grads, keep, create, inputs, *rest, **kw)
            self.meet(Event(RUNS_BACKWARD))
            result = functools.partial(engine, tensors, grads, keep, create, inputs, *rest, **kw)
            if self._made_graph:
                result = functools.partial(again_through, sharded_modules(self._roots), result)
            self._made_graph |= bool(create)
            if kw.get("accumulate_grad"):
                with ddp.a_backward():
                    return self._accumulated(result)
            return result() if create else self._returned(result(), inputs)

        return run

    def _accumulated(self, backward: Callable[[], Any]) -> Any:
        """A backward that adds to ``.grad``: the sums are reduced, of every parameter that any rank has used."""
        params = [slot.tensor for slot in self._reduced_params()]
        before = [(param.grad, param.grad._version if param.grad is not None else 0) for param in params]
        if self.strategy.reduce == "sum" and any(grad is not None for grad, _ in before):
            raise CaptureError(
                "Gradients are summed over the ranks and there are some already, of which nobody knows whether they "
                'are sums. Use DDP(reduce="mean"), or clear them before each backward.'
            )
        shards = [slot.tensor for slot in self._state.params if is_sharded(slot.tensor)]
        fresh = [shard for shard in shards if shard.grad is None]
        with self.shards.gradients_kept(), reduced_alike() as used_here:
            result = backward()
        used = [
            param.grad is not None and (param.grad is not grad or param.grad._version != version)
            for param, (grad, version) in zip(params, before, strict=True)
        ]
        kinds = [is_used + (is_used and is_sparse(param.grad)) for param, is_used in zip(params, used, strict=True)]
        kinds += [id(shard) in used_here for shard in fresh]
        kinds += self.shards.has_gradient if self.computes_whole else []
        with torch.no_grad(), self._failures_named():
            anywhere = torch.tensor(kinds, dtype=torch.int32, device=self._world.device)
            all_reduced(anywhere, dist.ReduceOp.MAX, self._axes)
            found = [(param, kind) for param, kind in zip(params, anywhere.tolist(), strict=False) if kind]
            told = anywhere.tolist()[len(params) :]
            for shard, is_used in zip(fresh, told, strict=False):
                if not is_used:  # it has zeros, so that all ranks sent the same
                    shard.grad = None
            self.shards.reduce(told[len(fresh) :], self._sums.reduce)
            for param, kind in found:
                ddp.note_gradient(param)
                if param.grad is None:
                    param.grad = torch.zeros_like(param, layout=torch.sparse_coo if kind == SPARSE else torch.strided)
            self._sums.reduce([param.grad for param, _ in found if param.grad is not None])
        return result

    def _returned(self, grads: tuple[Any, ...], inputs: Any) -> tuple[Any, ...]:
        """``torch.autograd.grad``: those of parameters are final, and reduced."""
        known = {id(slot.tensor) for slot in self._reduced_params() if not ddp.is_managed(slot.tensor)}
        of_params = [grad for grad, one in zip(grads, inputs, strict=True) if grad is not None and id(one) in known]
        with torch.no_grad(), self._failures_named():
            self._sums.reduce(of_params)
        return grads

    def _reduced_params(self) -> list[Any]:
        trained = [one for one in self._state.params if one.tensor.requires_grad and not is_sharded(one.tensor)]
        if self.wrapped is not None and isinstance(self.strategy, DDP):  # what is in no wrapper stays local
            return [one for one in trained if id(one.tensor) in self.managed and not ddp.stays_local(one.tensor)]
        return [one for one in trained if one.name not in self.strategy.ignore]

    def _exchange(self, event: Event) -> tuple[list[Event], list[str]]:
        line = current_line().encode()[-_LINE_BYTES:].ljust(_LINE_BYTES)
        numbers = [event.kind, event.what, event.detail, event.is_local, *line]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._meets_on)
        with self._failures_named():
            rows = torch.stack(from_all_ranks(mine, self._axes)).tolist()
        return [Event(*row[:4]) for row in rows], [bytes(row[4:]).decode(errors="replace").strip() for row in rows]

    def _mismatch(self, events: list[Event], lines: list[str]) -> str:
        ranks = "\n".join(
            f"  rank {rank} {DOES[event.kind]}{' at ' + line if line else ''}"
            for rank, (event, line) in enumerate(zip(events, lines, strict=True))
        )
        return (
            f"The ranks do not run the same calls in {self._call_name()}:\n{ranks}\nGradients are reduced over all "
            f"ranks, so all have to come. Decide on all ranks alike (reduce what the decision depends on first), or "
            f"multiply the loss by 0 where a batch is to be skipped. Nothing was reduced."
        )

    def _without_gradient(self, events: list[Event], lines: list[str]) -> str:
        rank = next(rank for rank, event in enumerate(events) if event.kind == GATHERS)
        return (
            f"Rank {rank} reads {self.shards.name_of(events[rank].what)} at {lines[rank]}, in {self._call_name()}. It "
            f"is cut over the ranks, and some of them have none. Read it where every rank has run its backward."
        )

    def _failures_named(self) -> Any:
        return named_failures(self._world, self._call_name)
