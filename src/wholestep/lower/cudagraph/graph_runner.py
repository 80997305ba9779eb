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
    is captured again may give it elsewhere: all after it are captured again, too.

Note: warm-up
    The first calls run the body as it is: libraries set themselves up and kernels are tuned in ordinary steps of the
    training. Then a call is captured and replayed. Capturing computes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from wholestep.ir.printer import Step
from wholestep.ir.program import InputKind, OutputKind, Program
from wholestep.lower.base import eager_backend
from wholestep.lower.cudagraph import grad_ownership, output_copies
from wholestep.lower.cudagraph.captured_piece import captured_pieces
from wholestep.lower.cudagraph.graph_pool import Pool, is_linear_algebra
from wholestep.lower.cudagraph.partition import Partition, partition
from wholestep.runtime.distributed import process_group

log = logging.getLogger("wholestep")

WARM_UP_CALLS = 2

_MOST_REFUSED = 8
"""Kinds of calls that cut a step after they could not be captured. With more there is something else the matter."""


def _cause(error: BaseException) -> str:
    """What went wrong, in a line, with the node that it happened in, where that is known."""
    first = eager_backend.first_error(error)
    return ", ".join([eager_backend.first_line(first), *getattr(first, "__notes__", [])[:1]])


def _uncapturable_call(error: BaseException) -> tuple[Any, str] | None:
    """The target of the call that cannot be captured, and what was said; None if the error is of another kind."""
    first = eager_backend.first_error(error)
    node = eager_backend.failing_node(first)
    if node is None or isinstance(first, torch.OutOfMemoryError):
        return None
    if "captur" not in str(first) and not is_linear_algebra(error):
        return None
    return node.target, eager_backend.first_line(first)


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
        room_bytes: int = 0,
        warm_up_calls: int = WARM_UP_CALLS,
        keeps_grads: bool = True,
    ) -> None:
        """
        Args:
            refused: the targets of calls by which `parts` are cut, with what was said. Those that turn out to be none
                for a graph here are added, for other programs.
            room_bytes: the most that the step is to need at once.
            warm_up_calls: how many run as they are before one is captured. At least one does where a graph has to know
                how the step sets the random generator.
            keeps_grads: whether gradients may stay in the memory of graphs, which drops those of all other runners.
        """
        self._program, self._lower, self._pool = program, lower, pool
        self._refused, self._cut_by = refused, {*refused}
        self._error: Exception | None = None
        """Why a capture has failed in the call that is running."""
        self.why_none = ""
        """Why all runs as it is, where a capture has failed for good."""
        self._kept_grads: grad_ownership.GradOwnership | None = None
        """The gradients that stay in the memory of graphs."""
        self._warm_up_calls = warm_up_calls
        self._may_keep_grads = keeps_grads and grad_ownership.is_supported()
        self._output_copies: dict[int, output_copies.OutputCopy] | None = None
        """How to copy results out of the graphs that there are."""
        self._device, self._groups = pool.device, {axis.group for axis in program.mesh}
        self._use(parts)
        pool.add(self, room_bytes)
        process_group.release_before_teardown(self)

    def _use(self, parts: Partition) -> None:
        """Begins with some parts: they run as they are at first."""
        self._parts, self._calls = parts, 0
        self._host = self._lower(parts.host)
        self._pieces = captured_pieces(self._program, parts, self._lower, self._pool)
        self._plain_calls = max(self._warm_up_calls, any(piece.is_observed for piece in self._pieces))
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
        if group in self._groups:
            self.retire()

    def retire(self) -> None:
        """Drops the graphs once they have run. The next call captures again."""
        if any(piece.graph is not None for piece in self._pieces):
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
        replays = self._calls > self._plain_calls and not self.why_none
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
        in_graphs = {number: found[number] for number in self._on_device if output_copies.has_storage(found[number])}
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
            if output_copies.has_storage(values[place])
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
