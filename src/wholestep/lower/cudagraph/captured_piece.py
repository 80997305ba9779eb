"""One piece of a step as a CUDA graph: the tensors that it reads, when it is captured again, and what it gives.

Note: static inputs
    What lies elsewhere in every call is copied to where the graph reads it. The copy has the strides of what was there
    when the graph was captured, since compiled code counts on them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.ir.printer import Step
from wholestep.ir.program import InputKind, Program
from wholestep.lower.cudagraph import output_copies, rng_replay
from wholestep.lower.cudagraph.graph_pool import Pool
from wholestep.lower.cudagraph.partition import Partition, Piece

_MOST_MOVES = 3
"""Once gradients that were there before a step have moved so often, they are copied as arguments are."""


def captured_pieces(
    program: Program, parts: Partition, lower: Callable[[Program], Step], pool: Pool
) -> list[CapturedPiece]:
    """The pieces of a program; each knows which values lie somewhere else in every call."""
    moving = {place for place, number in enumerate(parts.inputs) if program.inputs[number].kind is InputKind.USER}
    moving |= set(range(len(parts.inputs), len(parts.inputs) + parts.num_host_values))
    grads = {place for place, number in enumerate(parts.inputs) if program.inputs[number].kind is InputKind.GRAD}
    loose, found = set[int](), []
    for piece in parts.pieces:
        step, num_inputs = lower(piece.program), len(parts.inputs)
        found.append(CapturedPiece(piece, step, pool, num_inputs=num_inputs, moving=moving, grads=grads, loose=loose))
        if piece.captured:  # which copies what moves, for those after it too
            moving, loose = moving - {*piece.inputs}, loose - {*piece.inputs}
        else:
            loose = loose | {*piece.outputs}
    return found


def _static_copy(source: Tensor) -> Tensor:
    """A tensor in memory of its own, with the sizes, strides and values of `source`."""
    made = source.clone()
    if made.stride() == source.stride():
        return made
    # A slice, or a row that is there many times.
    reach = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    made = torch.empty(reach if source.numel() else 0, dtype=source.dtype, device=source.device)
    made = made.as_strided(source.shape, source.stride())
    _apart(made).copy_(_apart(source))
    return made


def _apart(tensor: Tensor) -> Tensor:
    """The elements of a tensor that lie in different places: one of those along a dim of stride 0."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class CapturedPiece:
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
        self._static: dict[int, Tensor] = {}
        self._addresses: list[int] = []
        self._outputs: Sequence[Any] = ()
        self._rng_replay = rng_replay.RngReplay.of(piece.program, pool.device) if piece.captured else None

    @property
    def is_observed(self) -> bool:
        """Whether a capture has to know how a plain run has set the random generator."""
        return self._rng_replay is not None

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
            sources = [_apart(values[self._piece.inputs[place]]) for place in self._static]
            torch.ops.aten._foreach_copy_.default(list(map(_apart, self._static.values())), sources, True)
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
        if self.graph is not None:  # else something has moved before this piece
            pairs = zip(self._read_in_place, self._addresses, addresses, strict=True)
            self._count_moves({place for place, then, now in pairs if then != now}, values)
        self.graph, self._outputs = None, ()
        for places in (self._copied, self._loose):  # a size is the same in every call of the graph
            places -= {place for place in places if not isinstance(inputs[place], Tensor)}
        # The memory of something else, seen in another way: a copy would be apart from it.
        sharing = Counter(output_copies.storage_of(value) for value in values if output_copies.has_storage(value))
        self._copied -= {place for place in self._loose if sharing[output_copies.storage_of(inputs[place])] > 1}
        self._static = {place: _static_copy(inputs[place]) for place in sorted(self._copied)}
        self._read_in_place = [
            place for place, one in enumerate(inputs) if place not in self._copied and isinstance(one, Tensor)
        ]
        self._addresses = [inputs[place].data_ptr() for place in self._read_in_place]
        own = [self._static.get(place, one) for place, one in enumerate(inputs)]
        self.graph, self._outputs = self._pool.capture(lambda: self._step(list(own)), self._rng_replay)
        return True

    def _count_moves(self, places: Collection[int], values: Sequence[Any]) -> None:
        """Counts that values read in place lie elsewhere now. Gradients that often do are copied from then on."""
        inputs = {
            output_copies.storage_of(value) for value in values[: self._num_inputs] if output_copies.has_storage(value)
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
