"""A whole step as one CUDA graph: launched by one call, its collectives inside.

Note: two parts
    What the host computes (rates, bias corrections, counters) runs before every replay, as Python; it reaches the
    device in tensors whose place does not change. All else is captured: as one graph or, where calls cannot be, as the
    pieces between those (`lower/cudagraph/partition.py`).

Note: who owns which memory
    Parameters and state are read and written where they live; if one has moved since (``param.data = ...``), the step
    is captured again. So are gradients from the step before, as long as they stay where they are. Arguments are copied
    into tensors of the graph. What the step returns is copied out of the graph's memory, so results may be kept; that
    memory is shared by all signatures of a step, which never run side by side. Gradients that nobody looks at before
    they are replaced stay there (`lower/cudagraph/grad_ownership.py`).

Note: pieces share their memory
    What a piece gives a later one is kept while those between are captured, so none of them writes there. A piece that
    is captured again may give it elsewhere: all behind it are captured again, too.

Note: warm-up
    The first calls run the body as it is: libraries set themselves up and kernels are tuned in ordinary steps of the
    training. Then a call is captured and replayed. Capturing computes nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from wholestep.ir.printer import Step
from wholestep.ir.program import InputKind, OutputKind, Program
from wholestep.lower.base import eager_backend
from wholestep.lower.cudagraph import grad_ownership, output_copies, rng_replay
from wholestep.lower.cudagraph.graph_pool import Pool
from wholestep.lower.cudagraph.partition import Partition, Piece, partition
from wholestep.passes.analysis.task_graph import live_bytes
from wholestep.runtime.distributed import process_group

log = logging.getLogger("wholestep")

WARM_UP_CALLS = 2

_MOST_MOVES = 3
"""Once gradients that were there before a step have moved so often, they are copied as arguments are."""


_MOST_REFUSED = 8
"""Kinds of calls that cut a step after they could not be captured. With more there is something else the matter."""


def _first(error: BaseException) -> BaseException:
    """The error that made a capture fail: one within a node ends in a second one, which knows no node."""
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    return next((one for one in chain if getattr(one, "__notes__", ())), error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cause(error: BaseException) -> str:
    """What went wrong, in a line, with the node that it happened in, where that is known."""
    first = _first(error)
    return ", ".join([_first_line(first), *getattr(first, "__notes__", [])[:1]])


def _uncapturable_call(error: BaseException) -> tuple[Any, str] | None:
    """The target of the call that cannot be captured, and what was said; None if the error is of another kind."""
    first = _first(error)
    node = eager_backend.failing_node(first)
    if node is None or isinstance(first, torch.OutOfMemoryError) or "captur" not in str(first):
        return None
    return node.target, _first_line(first)


class GraphRunner:
    """Runs a scheduled program as CUDA graphs, mostly one: a function from flat inputs to flat results.

    A call that turns out to wait for the GPU (a custom operator does so inside) cuts the step from then on.
    """

    def __init__(
        self,
        program: Program,
        parts: Partition,
        lower: Callable[[Program], Step],
        pool: Pool,
        *,
        refused: dict[Any, str],
    ) -> None:
        """`refused` are the targets of calls by which `parts` are cut, with what was said; those that turn out to be
        none for a graph here are added, for other programs."""
        self._program, self._lower, self._pool = program, lower, pool
        self._refused, self._cut_by = refused, {*refused}
        self._error: Exception | None = None
        """Why a capture has failed in the call that is running."""
        self.why_none = ""
        """Why all runs as it is, where a capture has failed for good."""
        self._kept_grads: grad_ownership.GradOwnership | None = None
        """The gradients that stay in the memory of graphs."""
        self._may_keep_grads = grad_ownership.is_supported()
        self._output_copies: dict[int, output_copies.OutputCopy] | None = None
        """How to copy results out of the graphs that there are."""
        self._device, self._groups = pool.device, {axis.group for axis in program.mesh}
        self._use(parts)
        pool.add(self, max(live_bytes(program).values(), default=0))
        process_group.release_before_teardown(self)

    def _use(self, parts: Partition) -> None:
        """Begins with some parts: they run as they are at first."""
        self._parts, self._calls = parts, 0
        self._host = self._lower(parts.host)
        self._pieces = _pieces(self._program, parts, self._lower, self._pool)
        written = {o.target for o in self._program.outputs if o.kind is OutputKind.WRITE}
        self._written = [(place, number) for place, number in enumerate(parts.inputs) if number in written]
        self._on_device = [
            number
            for number, (in_pieces, place) in enumerate(parts.result_places)
            if in_pieces and place not in parts.on_host
        ]
        self._grads = {
            output.target: number
            for number, output in enumerate(self._program.outputs)
            if output.kind is OutputKind.GRAD and output.target is not None
        }
        """From the number of a parameter to that of the result which is its new gradient."""
        given = {place for piece in parts.pieces if piece.captured for place in piece.outputs}
        reads = any(self._program.inputs[number].kind is InputKind.GRAD for number in parts.inputs)
        in_graphs = {number for number in self._on_device if parts.result_places[number][1] in given}
        self._keepable = set() if reads else in_graphs
        """Results that may stay in the memory of graphs if they are gradients; none where old gradients are read."""
        self._results_stay = all(
            n in in_graphs or parts.result_places[n][1] < len(parts.inputs) for n in self._on_device
        )
        """Whether results lie in the same memory in every call."""

    @property
    def description(self) -> str:
        """How many graphs the step is, and why it is cut, for people."""
        return self._parts.description

    def release_group(self, group: str) -> None:
        """Drops the graphs if they may hold collectives of a group. The next call captures again."""
        if group in self._groups and any(piece.graph is not None for piece in self._pieces):
            torch.cuda.synchronize(self._device)
            self.give_up()

    def give_up(self) -> None:
        """Drops the graphs, none of which may be running. The next call captures again."""
        self._kept_grads = self._output_copies = None
        for piece in self._pieces:
            piece.reset()

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """One step. Results are the caller's own."""
        host_results, num_host_values = self._host(list(inputs)), self._parts.num_host_values
        values = [*(inputs[number] for number in self._parts.inputs), *host_results[:num_host_values]]
        values += [None] * (self._parts.num_values - len(values))
        self._calls += 1
        replays = self._calls > WARM_UP_CALLS and not self.why_none
        if replays and self._kept_grads is not None and not self._kept_grads.are_unshared(inputs):
            self._may_keep_grads = False
            self._pool.release_results_of(self)
            self.give_up()
        for number, piece in enumerate(self._pieces):
            if not replays or not self._replay(number, values):
                piece.run(values)
        for place, written in self._written:
            if values[place] is not inputs[written]:  # but a copy of it
                inputs[written].copy_(values[place])
        found = self._results(host_results[num_host_values:], values)
        if replays:
            found = self._copied_out(inputs, found, values)
        if self._error is not None:
            self._fall_back(self._error)
        return found

    def _replay(self, number: int, values: list[Any]) -> bool:
        """Runs a piece as a graph if that is possible; whether it was."""
        piece = self._pieces[number]
        if not piece.is_captured or self._error is not None:
            return False
        try:
            if piece.capture(values):
                self._kept_grads = self._output_copies = None
                for later in self._pieces[number + 1 :]:
                    later.reset()
        except Exception as error:
            self._error = error
            return False
        piece.replay(values)
        return True

    def _fall_back(self, error: Exception) -> None:
        """Cuts the step at the call that could not be captured, or drops all graphs if that call is not known."""
        self._error = None
        self.give_up()
        found = _uncapturable_call(error)
        if found is not None and found[0] not in self._cut_by and len(self._cut_by) < _MOST_REFUSED:
            self._refused.setdefault(*found)
            self._cut_by = {*self._refused}
            parts = partition(self._program, self._refused)
            if isinstance(parts, Partition):
                self._use(parts)
                log.info("the step runs as %s", self.description)
                return
        self.why_none = f"its capture failed: {_cause(error)}"
        log.warning("the step runs without a CUDA graph, since %s", self.why_none)

    def _results(self, host_results: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
        """The results in their order. Trailing ones of the host that are None have been left out."""
        return tuple(
            values[place] if in_pieces else host_results[place] if place < len(host_results) else None
            for in_pieces, place in self._parts.result_places
        )

    def _copied_out(self, inputs: Sequence[Any], found: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
        """The results `found`, with copies of what lies in the memory of graphs, except gradients that stay there.

        Gradients of the step before give up their memory."""
        for target in self._grads:
            inputs[target].grad = None
        in_graphs = {number: found[number] for number in self._on_device if isinstance(found[number], torch.Tensor)}
        copies = self._output_copies
        if copies is None or self._error is not None:
            static_inputs = self._static_inputs(inputs, values)
            copies = output_copies.plan_copies(in_graphs, static_inputs, new=self._grads.values())
            if self._error is None:
                self._keep_grads(in_graphs, taken=static_inputs)
                self._output_copies = copies if self._results_stay else None
        kept = {} if self._kept_grads is None else self._kept_grads.fresh()
        kept_by_number = {self._grads[target]: grad for target, grad in kept.items()}
        call, taken = output_copies.Call(inputs, in_graphs), list(found)
        for number in in_graphs:
            taken[number] = kept_by_number[number] if number in kept_by_number else copies[number](call)
        return tuple(taken)

    def _static_inputs(self, inputs: Sequence[Any], values: Sequence[Any]) -> dict[int, output_copies.StaticInput]:
        return {
            output_copies.storage_of(values[place]): output_copies.StaticInput(
                number, values[place], inputs[number].stride()
            )
            for place, number in enumerate(self._parts.inputs)
            if isinstance(values[place], torch.Tensor)
        }

    def _keep_grads(self, in_graphs: Mapping[int, torch.Tensor], taken: Collection[int]) -> None:
        """Leaves gradients in the memory of graphs where they may stay. `taken`: where storages of inputs begin."""
        if self._kept_grads is not None or not self._may_keep_grads or not self._pool.may_keep_results_of(self):
            return
        alone = output_copies.unshared(in_graphs)
        own = {target: in_graphs[number] for target, number in self._grads.items() if number in alone & self._keepable}
        self._kept_grads = grad_ownership.GradOwnership(grad_ownership.keepable(own, taken))
        if self._kept_grads.fresh():  # else the graphs of others stay as they are
            self._pool.keep_results_of(self)


def _pieces(program: Program, parts: Partition, lower: Callable[[Program], Step], pool: Pool) -> list[_Piece]:
    """The pieces of a program; each knows which values lie somewhere else in every call."""
    moving = {place for place, number in enumerate(parts.inputs) if program.inputs[number].kind is InputKind.USER}
    moving |= set(range(len(parts.inputs), len(parts.inputs) + parts.num_host_values))
    grads = {place for place, number in enumerate(parts.inputs) if program.inputs[number].kind is InputKind.GRAD}
    loose, found = set[int](), []
    for piece in parts.pieces:
        step, num_inputs = lower(piece.program), len(parts.inputs)
        found.append(_Piece(piece, step, pool, num_inputs=num_inputs, moving=moving, grads=grads, loose=loose))
        if piece.captured:  # which copies what moves, for those behind it too
            moving, loose = moving - {*piece.inputs}, loose - {*piece.inputs}
        else:
            loose = loose | {*piece.outputs}
    return found


class _Piece:
    """One piece of a step: runs as it is and, where it is for a graph, as one."""

    def __init__(
        self,
        piece: Piece,
        step: Step,
        pool: Pool,
        *,
        num_inputs: int,
        moving: Collection[int],
        grads: Collection[int],
        loose: Collection[int],
    ) -> None:
        """The first `num_inputs` values are the step's. Of those that the piece takes, `moving` ones are copied to
        where the graph reads them; so are `loose` ones, which a piece without a graph has given, if they have memory of
        their own, and `grads` once they have moved often."""
        self._piece, self._step, self._pool, self._num_inputs = piece, step, pool, num_inputs
        self.is_captured = piece.captured
        self._loose = {place for place, number in enumerate(piece.inputs) if number in loose}
        self._copied = {place for place, number in enumerate(piece.inputs) if number in moving} | self._loose
        self._grads = {place for place, number in enumerate(piece.inputs) if number in grads}
        self._read_in_place, self._num_moves = list[int](), 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self._static: dict[int, torch.Tensor] = {}
        self._addresses: list[int] = []
        self._outputs: Sequence[Any] = ()
        self._rng_replay = rng_replay.RngReplay.of(piece.program, pool.device) if piece.captured else None

    def reset(self) -> None:
        """Drops the graph, which may not be running."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self._outputs = None, ()

    def run(self, values: list[Any]) -> None:
        """Runs the calls one by one, on `values` that it adds to."""
        inputs = [values[number] for number in self._piece.inputs]
        with self._rng_replay.observed() if self._rng_replay is not None else contextlib.nullcontext():
            self._store_outputs(values, self._step(inputs))

    def replay(self, values: list[Any]) -> None:
        """Runs the graph, which there is, on `values` that it adds to."""
        if self._static:
            targets, sources = [*self._static.values()], [values[self._piece.inputs[place]] for place in self._static]
            torch.ops.aten._foreach_copy_.default(targets, sources, True)
            for place, static in self._static.items():
                values[self._piece.inputs[place]] = static
        assert self.graph is not None
        if self._rng_replay is not None:
            self._rng_replay.begin()
        self.graph.replay()
        self._store_outputs(values, self._outputs)

    def capture(self, values: Sequence[Any]) -> bool:
        """Captures the calls on tensors that stay where they are, unless that was done and they are still there.
        Whether it was done now.

        Raises whatever kept it from being captured; nothing has run then.
        """
        inputs = [values[number] for number in self._piece.inputs]
        addresses = [inputs[place].data_ptr() for place in self._read_in_place]
        if self.graph is not None and addresses == self._addresses:
            return False
        if self.graph is not None:  # else something has moved in front of this piece
            pairs = zip(self._read_in_place, self._addresses, addresses, strict=True)
            self._count_moves({place for place, then, now in pairs if then != now}, values)
        self.graph, self._outputs = None, ()
        # The memory of something else, seen in another way: a copy would be apart from it.
        sharing = Counter(output_copies.storage_of(value) for value in values if isinstance(value, torch.Tensor))
        self._copied -= {place for place in self._loose if sharing[output_copies.storage_of(inputs[place])] > 1}
        self._static = {place: inputs[place].clone() for place in sorted(self._copied)}
        self._read_in_place = [
            place for place, one in enumerate(inputs) if place not in self._copied and isinstance(one, torch.Tensor)
        ]
        self._addresses = [inputs[place].data_ptr() for place in self._read_in_place]
        own = [self._static.get(place, one) for place, one in enumerate(inputs)]
        self.graph, self._outputs = self._pool.capture(lambda: self._step(list(own)), self._rng_replay)
        return True

    def _count_moves(self, places: Collection[int], values: Sequence[Any]) -> None:
        """Counts that values read in place lie elsewhere now. Gradients that often do are copied from then on."""
        inputs = {
            output_copies.storage_of(value) for value in values[: self._num_inputs] if isinstance(value, torch.Tensor)
        }
        wander = any(output_copies.storage_of(values[self._piece.inputs[place]]) not in inputs for place in places)
        self._num_moves += wander or not self._grads.isdisjoint(places)
        if self._num_moves < _MOST_MOVES:
            return
        if wander:
            raise RuntimeError("what is computed outside of a graph lies elsewhere in every call")
        self._copied |= self._grads

    def _store_outputs(self, values: list[Any], found: Sequence[Any]) -> None:
        for number, value in zip(self._piece.outputs, found, strict=True):
            values[number] = value
        for number in self._piece.frees:
            values[number] = None
