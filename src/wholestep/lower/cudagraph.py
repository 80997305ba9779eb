"""A whole step as one CUDA graph: launched by one call, its collectives inside.

Note: two parts
    What the host computes (rates, bias corrections, counters) runs before every replay, as Python; it reaches the
    device in tensors whose place does not change. All else is captured: as one graph or, where calls cannot be, as the
    pieces between those (`lower/pieces.py`).

Note: who owns which memory
    Parameters and state are read and written where they live; if one has moved since (``param.data = ...``), the step
    is captured again. So are gradients from the step before, as long as they stay where they are. Arguments are copied
    into tensors of the graph. What the step returns is copied out of the graph's memory, so results may be kept; that
    memory is shared by all signatures of a step, which never run side by side.

Note: pieces share their memory
    What a piece gives a later one is kept while those between are captured, so none of them writes there. A piece that
    is captured again may give it elsewhere: all behind it are captured again, too.

Note: warm-up
    The first calls run the body as it is: libraries set themselves up and kernels are tuned in ordinary steps of the
    training. Then a call is captured and replayed. Capturing computes nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from wholestep.lower import captures, eager, memsets, rewinds
from wholestep.lower.pieces import Parts, Piece, split
from wholestep.program.program import InputKind, OutputKind, Program
from wholestep.program.show import Step
from wholestep.run import teardown
from wholestep.run.collector import uncollected

WARM_UP_CALLS = 2

_MOST_MOVES = 3
"""Once gradients that were there before a step have moved so often, they are copied as arguments are."""


_MOST_REFUSED = 8
"""Kinds of calls that cut a step after they could not be captured. With more there is something else the matter."""


class Pool:
    """The memory that the CUDA graphs of a device share. Nothing uses the device before the first capture.

    [Note: what keeps a pool]
    The allocator gives a pool up when its last graph goes, and captures into it fail from then on: so does a step's
    second capture, before which its only graph goes. A graph that does next to nothing stays in the pool therefore.

    [Note: a capture that failed]
    torch leaves its stream current then, the allocator waiting for the end and, up to 2.11, the random generator in the
    belief that a capture goes on, which only one that succeeds takes from it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    def capture(
        self, body: Callable[[], Sequence[Any]], rewound: rewinds.Rewinds | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """What `body` does, as a graph, and the tensors in which that leaves the results of `body`. `rewound` are its
        settings of the random generator, if there are any.

        Raises what `body` raises, or RuntimeError for what CUDA cannot capture. Nothing has run then, and torch is as
        it was before.
        """
        gc.collect()  # and nothing meanwhile: to destroy a graph, a kernel or a group ends a capture
        with torch.cuda.device(self.device), uncollected():
            if self._keeper is None:
                self._renew()
            graph, results = self._captured(body, rewound)
            memsets.as_kernels(graph, lambda fill: self._captured(fill)[0], self.device)
            graph.instantiate()
            return graph, results

    def _captured(
        self, body: Callable[[], Any], rewound: rewinds.Rewinds | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """What `body` does, as a graph that cannot run yet, and what `body` gives."""
        graph, before = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.current_stream()
        try:
            rewinding = rewound.captured(graph) if rewound is not None else contextlib.nullcontext()
            with captures.settled(), rewinding, self._capturing(graph):
                results = body()
        except BaseException:
            self._mend(graph, before)
            raise
        return graph, results

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Any:
        # The threads of NCCL go on with their own calls meanwhile.
        return torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local")

    def _renew(self) -> None:
        """A pool that nobody uses, with the graph that keeps it, and a stream to capture on."""
        self._handle, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        number, keeper = torch.zeros(1, device=self.device), torch.cuda.CUDAGraph()
        with self._capturing(keeper):
            number.zero_()
        self._keeper = keeper

    def _mend(self, graph: torch.cuda.CUDAGraph, before: torch.cuda.Stream) -> None:
        """Makes torch usable after a capture that failed, wherever that was."""
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._stream):
            graph.capture_end()  # where it was not come to
        torch.cuda.set_stream(before)
        graph.reset()
        index = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # raised by the first where the allocator knows that it has ended
            torch._C._cuda_endAllocateToPool(index, self._handle)
            torch._C._cuda_releasePool(index, self._handle)
        self._keeper = None
        self._renew()


def _first(error: BaseException) -> BaseException:
    """The error that made a capture fail: one within a node ends in a second one, which knows no node."""
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    return next((one for one in chain if getattr(one, "__notes__", ())), error)


def _said(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cause(error: BaseException) -> str:
    """What went wrong, in a line, with the node that it happened in, where that is known."""
    first = _first(error)
    return ", ".join([_said(first), *getattr(first, "__notes__", [])[:1]])


def _culprit(error: BaseException) -> tuple[Any, str] | None:
    """The target of the call that cannot be captured, and what was said; None if the error is of another kind."""
    first = _first(error)
    node = eager.failing_node(first)
    if node is None or isinstance(first, torch.OutOfMemoryError) or "captur" not in str(first):
        return None
    return node.target, _said(first)


class Graphed:
    """Runs a scheduled program as CUDA graphs, mostly one: a function from flat inputs to flat results.

    A call that turns out to wait for the GPU (a custom operator does so inside) cuts the step from then on.
    """

    def __init__(
        self,
        program: Program,
        parts: Parts,
        lower: Callable[[Program], Step],
        pool: Pool,
        tell: Callable[[Parts | str], None],
    ) -> None:
        """`tell` is given the parts where they are others than `parts`, or the reason why all runs as it is from then
        on."""
        self._program, self._lower, self._pool, self._tell = program, lower, pool, tell
        self._refused: dict[Any, str] = {}
        self._error: Exception | None = None
        """Why a capture has failed in the call that is running."""
        self._gave_up = False
        self._device, self._groups = pool.device, {axis.group for axis in program.mesh}
        self._use(parts)
        teardown.goes_first(self)

    def _use(self, parts: Parts) -> None:
        """Begins with some parts: they run as they are at first."""
        self._parts, self._calls = parts, 0
        self._host = self._lower(parts.host)
        self._pieces = _pieces(self._program, parts, self._lower, self._pool)
        written = {o.target for o in self._program.outputs if o.kind is OutputKind.WRITE}
        self._written = [(place, number) for place, number in enumerate(parts.inputs) if number in written]
        self._replaced = [o.target for o in self._program.outputs if o.kind is OutputKind.GRAD and o.target is not None]

    def let_go(self, group: str) -> None:
        """Gives up the graphs if they may hold collectives of the group. The next call captures again."""
        if group in self._groups and any(piece.graph is not None for piece in self._pieces):
            torch.cuda.synchronize(self._device)
            for piece in self._pieces:
                piece.let_go()

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """One step. Results are the caller's own."""
        home, num_handed = self._host(list(inputs)), self._parts.num_handed
        values = [*(inputs[number] for number in self._parts.inputs), *home[:num_handed]]
        values += [None] * (self._parts.num_values - len(values))
        self._calls += 1
        by_graphs = self._calls > WARM_UP_CALLS and not self._gave_up
        for number, piece in enumerate(self._pieces):
            if not by_graphs or not self._replayed(number, values):
                piece.run(values)
        for place, written in self._written:
            if values[place] is not inputs[written]:  # but a copy of it
                inputs[written].copy_(values[place])
        if by_graphs:  # gradients from before give their memory to the copies of those that come in their place
            for param in (inputs[number] for number in self._replaced):
                if isinstance(param, torch.Tensor):
                    param.grad = None
        results = self._results(home[num_handed:], values, copy=by_graphs)
        if self._error is not None:
            self._do_without(self._error)
        return results

    def _replayed(self, number: int, values: list[Any]) -> bool:
        """Whether a piece has run as a graph."""
        piece = self._pieces[number]
        if not piece.is_captured or self._error is not None:
            return False
        try:
            if piece.capture(values):
                for later in self._pieces[number + 1 :]:
                    later.let_go()
        except Exception as error:
            self._error = error
            return False
        piece.replay(values)
        return True

    def _do_without(self, error: Exception) -> None:
        """Has the call that could not be captured cut the step, or gives up where that is not known."""
        self._error = None
        for piece in self._pieces:
            piece.let_go()
        found = _culprit(error)
        if found is not None and found[0] not in self._refused and len(self._refused) < _MOST_REFUSED:
            self._refused[found[0]] = found[1]
            parts = split(self._program, self._refused)
            if isinstance(parts, Parts):
                self._use(parts)
                self._tell(parts)
                return
        self._gave_up = True
        self._tell(_cause(error))

    def _results(self, home: Sequence[Any], values: Sequence[Any], *, copy: bool) -> tuple[Any, ...]:
        """The results in their order; where `copy`, copies of what may lie in the memory of graphs."""
        found = []
        for in_pieces, place in self._parts.places:
            source = values if in_pieces else home
            value = source[place] if place < len(source) else None  # trailing results that are None are left out
            if copy and in_pieces and isinstance(value, torch.Tensor) and place not in self._parts.on_host:
                value = value.clone()
            found.append(value)
        return tuple(found)


def _pieces(program: Program, parts: Parts, lower: Callable[[Program], Step], pool: Pool) -> list[_Piece]:
    """The pieces of a program; each knows which values lie somewhere else in every call."""
    moving = {place for place, number in enumerate(parts.inputs) if program.inputs[number].kind is InputKind.USER}
    moving |= set(range(len(parts.inputs), len(parts.inputs) + parts.num_handed))
    grads = {place for place, number in enumerate(parts.inputs) if program.inputs[number].kind is InputKind.GRAD}
    loose, found = set[int](), []
    for piece in parts.pieces:
        step, num_inputs = lower(piece.program), len(parts.inputs)
        found.append(_Piece(piece, step, pool, num_inputs=num_inputs, moving=moving, grads=grads, loose=loose))
        if piece.captured:  # which copies what moves, for those behind it too
            moving, loose = moving - {*piece.takes}, loose - {*piece.takes}
        else:
            loose = loose | {*piece.gives}
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
        self._loose = {place for place, number in enumerate(piece.takes) if number in loose}
        self._moving = {place for place, number in enumerate(piece.takes) if number in moving} | self._loose
        self._grads = {place for place, number in enumerate(piece.takes) if number in grads}
        self._resting, self._moves = list[int](), 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self._static: dict[int, torch.Tensor] = {}
        self._addresses: list[int] = []
        self._outputs: Sequence[Any] = ()
        self._rewinds = rewinds.Rewinds.of(piece.program, pool.device) if piece.captured else None

    def let_go(self) -> None:
        """Gives up the graph, which nothing may be running of."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self._outputs = None, ()

    def run(self, values: list[Any]) -> None:
        """Runs the calls one by one, on `values` that it adds to."""
        given = [values[number] for number in self._piece.takes]
        with self._rewinds.seen() if self._rewinds is not None else contextlib.nullcontext():
            self._put(values, self._step(given))

    def replay(self, values: list[Any]) -> None:
        """Runs the graph, which there is, on `values` that it adds to."""
        if self._static:
            targets, sources = [*self._static.values()], [values[self._piece.takes[place]] for place in self._static]
            torch.ops.aten._foreach_copy_.default(targets, sources, True)
            for place, static in self._static.items():
                values[self._piece.takes[place]] = static
        assert self.graph is not None
        if self._rewinds is not None:
            self._rewinds.begin()
        self.graph.replay()
        self._put(values, self._outputs)

    def capture(self, values: Sequence[Any]) -> bool:
        """Captures the calls on tensors that stay where they are, unless that was done and they are still there.
        Whether it was done now.

        Raises whatever kept it from being captured; nothing has run then.
        """
        given = [values[number] for number in self._piece.takes]
        addresses = [given[place].data_ptr() for place in self._resting]
        if self.graph is not None and addresses == self._addresses:
            return False
        if self.graph is not None:  # else something has moved in front of this piece
            pairs = zip(self._resting, self._addresses, addresses, strict=True)
            self._have_moved({place for place, then, now in pairs if then != now}, values)
        self.graph, self._outputs = None, ()
        # The memory of something else, seen in another way: a copy would be apart from it.
        sharing = Counter(_storage(value) for value in values if isinstance(value, torch.Tensor))
        self._moving -= {place for place in self._loose if sharing[_storage(given[place])] > 1}
        self._static = {place: given[place].clone() for place in sorted(self._moving)}
        self._resting = [place for place in range(len(given)) if place not in self._moving]
        self._addresses = [given[place].data_ptr() for place in self._resting]
        own = [self._static.get(place, one) for place, one in enumerate(given)]
        self.graph, self._outputs = self._pool.capture(lambda: self._step(list(own)), self._rewinds)
        return True

    def _have_moved(self, places: Collection[int], values: Sequence[Any]) -> None:
        """Some values that rested lie elsewhere now. Gradients that do so again and again are copied from then on."""
        inputs = {_storage(value) for value in values[: self._num_inputs] if isinstance(value, torch.Tensor)}
        wander = any(_storage(values[self._piece.takes[place]]) not in inputs for place in places)
        self._moves += wander or not self._grads.isdisjoint(places)
        if self._moves < _MOST_MOVES:
            return
        if wander:
            raise RuntimeError("what is computed outside of a graph lies elsewhere in every call")
        self._moving |= self._grads

    def _put(self, values: list[Any], found: Sequence[Any]) -> None:
        for number, value in zip(self._piece.gives, found, strict=True):
            values[number] = value
        for number in self._piece.drops:
            values[number] = None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
