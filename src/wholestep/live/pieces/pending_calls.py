"""Recorded calls that have not run yet: they run as a compiled piece, ahead of a backward, or one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from wholestep.capture.python.user_frame import current_line
from wholestep.live.pieces import own_leaves
from wholestep.live.pieces.forward import Before, Forward, cannot_be_repeated, clears_gradients
from wholestep.live.pieces.piece import PieceSpec
from wholestep.live.pieces.recorded_calls import RecordedCalls
from wholestep.live.pieces.speculation import SpeculativeBackward, gradients_set_aside, num_externals, plan_speculation
from wholestep.live.recording.handle import as_eager_gives, execute, fulfil, with_torch_functions
from wholestep.live.recording.modes import PendingDraws, modes_off, under
from wholestep.live.recording.path import BACKWARDS, Path
from wholestep.live.recording.record import VALUE, OutputMeta, Record, Value
from wholestep.live.recording.structure import unflatten

_NO_PIECE = "and what is recorded is no piece"
_DRAWN = "and something else has drawn random numbers since then"


class Launcher(Protocol):
    """Runs records as a compiled piece."""

    def __call__(self, run: PendingCalls, spec: PieceSpec) -> list[torch.Tensor] | None:
        """What the piece gives; None where these records can be no piece, and nothing has run."""


class PendingCalls(RecordedCalls, ABC):
    """The recorded calls of one run, of which the last ones have not run."""

    def __init__(
        self,
        paths: Iterable[Path],
        arguments: Iterable[Any],
        launch: Launcher,
        agree_on_gradients: Callable[[], bool] | None = None,
    ) -> None:
        """`arguments` are the flat arguments of the step. `launch` compiles and runs pieces.

        `agree_on_gradients`, where pieces reduce gradients over ranks: whether all ranks have come to the backward
        whose gradients they hold.
        """
        super().__init__(arguments)
        self.candidates = list(paths)
        """Known paths that agree with this run so far, while it follows them."""
        self.refused = ""
        """Why records of this run could be no piece."""
        self.pieces: list[tuple[int, int]] = []
        """Spans of records that ran as pieces."""
        self._launch = launch
        self._given: list[torch.Tensor] = []
        """Tensors that calls which have not run are given. (Handles are held by Python alone: those that nobody holds
        when the calls run are no results.)"""
        self._agree_on_gradients = agree_on_gradients
        self._draws = PendingDraws()
        self._speculation: SpeculativeBackward | None = None
        self._forward: Forward | None = None
        """What has run without its graph, and may run again with a backward."""
        self._started = 0
        """Records before this one have run."""
        self._stops = False

    def stop(self, why: str) -> None:
        """What is recorded can be no piece, nor can what comes after it."""
        self.refused, self._stops = why, True
        self.make_no_path(why)

    @property
    def is_stopped(self) -> bool:
        """Whether the rest of this call is eager code, of which nothing is noted: there is nothing to be learned.

        Not before what is recorded has run, and what Python holds has its graph.
        """
        return self._stops and not self.candidates

    @property
    def waits_for_backward(self) -> bool:
        """Whether Python holds tensors whose graph is to come with a later piece."""
        return self._forward is not None or self._speculation is not None

    def _run_pending(self, why: str) -> None:
        """Runs what is recorded as compiled pieces, or else one by one."""
        if self._started < len(self.records):
            with self._draws.in_place(), modes_off():
                if why_not := self._run_pieces(len(self.records)):
                    self._flush(f"{why}, {why_not}")

    def _is_cut_here(self) -> bool:
        """Whether other ranks ask for a value before this call, and what they run for it has not run."""
        last = self.candidates[0].cuts.get(len(self.records)) if self.candidates else None
        return last is not None and last >= self._started and self._speculation is None

    def _run_pieces(self, end: int) -> str:
        """Runs the records before `end` as pieces. Returns why not; then nothing of them may have run."""
        forward, span = self._forward, (self._started, end)
        if why_not := own_leaves.why_no_piece(self, span, span[0] if forward is None else forward.since):
            return why_not
        brings = any(record.brings for record in self.records[slice(*span)])
        if brings and any(map(self.is_view_of_one_brought, self._wanted(span))):  # results do not share memory
            return "where a view is held through which a tensor came into a graph"
        if forward is not None and self._goes_back_through(forward, span):
            return self._run_again(forward, span)
        if self._holds_graph(self._handles(end), end):
            return self._run_forward(end)
        if forward is not None and self._holds_graph(self.tensors.alive(), span[0]):
            return self._run_for_values(span, "")
        self._forward = None
        return self._run_piece(span, span)

    def _run_piece(self, span: tuple[int, int], new: tuple[int, int]) -> str:
        """Runs one piece, of whose records the `new` ones have not run yet. Returns why not."""
        alive, written = self._wanted(span), self._written_again(span, new)
        asking = own_leaves.given_gradients(self, self.records[slice(*span)])
        results = self._launched(PieceSpec(span, (*written, *alive), leaves=tuple(asking)))
        if results is None:
            return _NO_PIECE
        gradients, results = results[: len(asking)], results[len(asking) :]
        self._fulfil(alive, results)
        with torch.no_grad():
            for tensor, result in zip(written.values(), results, strict=True):
                tensor.copy_(result)
        for tensor, gradient in zip(asking.values(), gradients, strict=True):
            tensor.grad = gradient
        self._has_run(new)
        return ""

    def _written_again(self, span: tuple[int, int], new: tuple[int, int]) -> dict[Value, torch.Tensor]:
        """Values of records that run again, held with what they were, to which the `new` records write."""
        if span == new:
            return {}
        written = {(one.key, one.detail) for record in self.records[slice(*new)] for one in record.writes_to}
        alive = self.tensors.alive().items()
        return {value: one for value, one in alive if value in written and span[0] <= value[0] < new[0]}

    def _has_run(self, span: tuple[int, int]) -> None:
        self._started = span[1]
        if self._forward is None and self._started == len(self.records):
            self._given.clear()
        self.pieces.append(span)

    def _handles(self, end: int) -> dict[Value, torch.Tensor]:
        """The handles of records before `end` that somebody holds."""
        return {value: one for value, one in self.tensors.handles().items() if value[0] < end}

    def _wanted(self, span: tuple[int, int]) -> dict[Value, torch.Tensor]:
        """The handles that a piece fulfils: of what somebody holds, and of what that is a view of.

        Nobody may hold ``p.grad`` of ``row = p.grad[0]``, and a write to the row is one to the gradient.
        """
        handles = self._handles(span[1])
        for value, meta in self.viewed(list(handles), span[0]).items():
            if self.tensors.if_alive(value) is None:
                handles[value] = self.tensors.note_value(self._made(meta), value)
        return dict(sorted(handles.items(), key=lambda item: item[0]))

    def _run_forward(self, end: int) -> str:
        """Runs records whose graph is still needed after them. Returns why not."""
        path, started = self.candidates[0], self._started
        start = 1 + max((n for n in range(started, end) if cannot_be_repeated(path.records[n])), default=started - 1)
        if start > started:  # those run first, as a piece of their own
            self._given += self._needed_from(started, start, end)
            if start == end or self._holds_graph(self._handles(start), start):
                return "where the graph is still needed of what changes gradients or state, and could not be repeated"
            if all(map(clears_gradients, self.records[started:start])):
                for number in range(started, start):  # quicker than a graph of nothing
                    self.act(number, {})
                self._started = start
            elif why_not := self._run_pieces(start):
                return why_not
        span = (start, end)
        why_not = "a read before this one has run its forward"
        if self._forward is None:
            why_not = self._speculate(span, self._wanted(span))
            if not why_not:
                self._has_run(span)
                return ""
        return self._run_for_values(span, why_not)

    def _needed_from(self, first: int, start: int, end: int) -> list[torch.Tensor]:
        """Handles of values of the records from `first` to `start` that those from there to `end` are given."""
        alive, found = self.tensors.alive(), {}
        for record in self.records[start:end]:
            for operand in record.operands:
                value = (operand.key, operand.detail)
                if operand.kind == VALUE and first <= operand.key < start and value not in found:
                    meta = self.records[operand.key].outputs[operand.detail]
                    assert meta is not None
                    found[value] = alive[value] if value in alive else self.tensors.note_value(self._made(meta), value)
        return list(found.values())

    def _run_for_values(self, span: tuple[int, int], why_not: str) -> str:
        """Runs a forward without its graph: a backward that comes later runs it again. Returns why not."""
        path, forward = self.candidates[0], self._forward
        if path.keeps_graph and not any(record.key.function in BACKWARDS for record in path.records[span[1] :]):
            return why_not
        records = path.records[slice(*span)]
        if any(map(cannot_be_repeated, records)):
            return "where the graph of what was read before is still needed"
        if forward is not None and not forward.draws_go_on(records):
            return _DRAWN
        longer = Forward(span[0], path) if forward is None else forward
        longer.take(records, path, self.tensors)
        self._forward = longer
        why_not = self._run_piece(span, span)
        if why_not:
            self._forward = forward
        longer.has_run(records)
        return why_not

    def _goes_back_through(self, forward: Forward, span: tuple[int, int]) -> bool:
        """Whether there is a backward among records, and they are given values with a graph of the forward."""
        records = self.records[slice(*span)]
        if not any(record.key.function in BACKWARDS for record in records):
            return False
        values = (one for record in records for one in record.operands if one.kind == VALUE)
        metas = (self.records[one.key].outputs[one.detail] for one in values if forward.since <= one.key < span[0])
        return any(meta is not None and meta.requires_grad for meta in metas)

    def _run_again(self, forward: Forward, span: tuple[int, int]) -> str:
        """Runs a forward with the backward that has come after it, as one piece. Returns why not."""
        self._given = [one for one in self._given if (self.tensors.value_of(one) or (-1, 0))[0] < forward.since]
        stays, records = self._holds_graph(self.tensors.alive(), span[1]), self.records[slice(*span)]
        if stays and any(map(cannot_be_repeated, records)):
            return "where the graph is still needed after its backward"
        if not forward.draws_go_on(records):
            return _DRAWN
        forward.take(records, self.candidates[0], self.tensors)
        now = forward.before.put_back()
        self._forward = forward if stays else None
        why_not = self._run_piece((forward.since, span[1]), span)
        if why_not or not any(record.drawn for record in records):
            for generator, state in now:
                generator.set_state(state)
        if why_not:
            self._forward = forward
        forward.has_run(records)
        return why_not

    @abstractmethod
    def _made(self, meta: OutputMeta) -> torch.Tensor:
        """A handle that this run will fulfil."""

    def _launched(self, spec: PieceSpec) -> list[torch.Tensor] | None:
        with self.tensors.flags.before(spec.span[0]):
            results: list[torch.Tensor] | None = with_torch_functions(self._launch, (self, spec), {})
        return results

    def _fulfil(self, alive: dict[Value, torch.Tensor], results: list[torch.Tensor]) -> None:
        """Gives the handles the last of the results; a view comes after what it is a view of."""
        taken, made = results[len(results) - len(alive) :][::-1], dict[int, list[Any]]()
        held = list(alive.values())  # what is a view of another is made when that has been
        del results[len(results) - len(alive) :]
        for value in list(alive):
            fulfil(alive.pop(value), self._given_back(value, taken.pop(), made))
        del held

    def _given_back(self, value: Value, result: torch.Tensor, made: dict[int, list[Any]]) -> torch.Tensor:
        """A result of a piece as eager code would have it. For `made` see `view_again`."""
        meta = self.records[value[0]].outputs[value[1]]
        assert meta is not None
        view = self.view_again(value, made)
        return as_eager_gives(result, meta) if view is None else view

    def _holds_graph(self, alive: dict[Value, torch.Tensor], end: int) -> bool:
        """Whether somebody may still ask for gradients of records before `end`, through a tensor that is alive.

        Where records before these have run, that is those of the forward that may run again.
        """
        freed = self.candidates[0].freed[end]
        since = self._started if self._forward is None else self._forward.since
        return any(
            since <= value[0] < end and value not in freed and tensor.requires_grad and self.has_graph(value)
            for value, tensor in alive.items()
        )

    def _speculate(self, span: tuple[int, int], alive: dict[Value, torch.Tensor]) -> str:
        """Runs what is recorded and the backward after it, whose gradients are held back. Returns why not."""
        path, tensors = self.candidates[0], self.tensors
        if own_leaves.given_gradients(self, path.records[span[0] :]):
            return "where the graph is still needed, and a backward leaves a gradient at a tensor of the step's own"
        length = tensors.length()
        plan = plan_speculation(path, *span, tensors)
        if isinstance(plan, str):
            return f"where the graph is still needed, and no backward can run ahead: {plan}"
        leaves = [tensors.externals[index] for index in plan.leaves]
        later = plan.wanted(path)
        before = Before()
        before.take(path.records[slice(*span)], span[0], tensors)
        for record in path.records[span[1] : plan.span[1]]:
            before.hold(record, span[0], tensors)
        results = None
        has_grads = any(leaf.grad is not None for leaf in leaves)
        if self._agree_on_gradients is None or not has_grads:  # those of several ranks may be reduced already, or not
            with gradients_set_aside(leaves) as grads:
                results = self._launched(PieceSpec(plan.span, (*later, *alive), plan.skipped))
        if results is None:
            tensors.forget_since(length)
            return "where there are gradients already, which other ranks may have reduced" if has_grads else _NO_PIECE
        speculation = SpeculativeBackward(plan, path, before, length, grads=grads)
        self._fulfil(alive, results)
        speculation.values = dict(zip(later, results, strict=True))
        self._speculation = speculation
        return ""

    def _from_speculation(
        self,
        speculation: SpeculativeBackward,
        record: Record,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
    ) -> Any:
        """A record after the read that has run already. The backward puts the gradients in place."""
        number = len(self.records) - 1
        if number == speculation.plan.span[1] - 1:
            if self._agree_on_gradients is not None and not self._agree_on_gradients():
                self.records.pop()
                self._flush("another rank went another way")
                self.make_no_path("another rank did not come to the backward that ran ahead")
                with under(record.key.modes):  # what it reduces was noted as reduced when it was recorded
                    return execute(record.key.function, args, kwargs)
            self._started, self._speculation = number + 1, None
            speculation.put()
            return None
        self._started = number + 1
        if number in speculation.plan.skipped:
            return execute(record.key.function, args, kwargs)
        results: list[torch.Tensor | None] = []
        made: dict[int, list[Any]] = {}
        for output, meta in enumerate(record.outputs):
            if meta is None or meta.alias is not None:
                results.append(None if meta is None or meta.alias is None else leaves[meta.alias])
            else:
                given = speculation.values.pop((number, output))
                twice = next((results[place] for place in record.earlier_places(output, number)), None)
                tensor = self._given_back((number, output), given, made) if twice is None else twice
                results.append(self.tensors.note_value(tensor, (number, output)))
        return unflatten(record.output_structure, results)

    def _give_graphs(self) -> dict[Value, torch.Tensor]:
        """Python went another way: gradients are dropped, and what somebody may still need has a graph again.

        Returns what the records have given that nobody holds.
        """
        speculation, self._speculation = self._speculation, None
        forward, self._forward = self._forward, None
        if speculation is not None:
            self.tensors.forget_since((num_externals(self.records, speculation.length[0]), len(self.tensors.numbers)))
            since, position = speculation.plan.span[0], speculation.plan.position
            before, path = speculation.before, speculation.path
        elif forward is not None:
            since, position, before, path = forward.since, self._started, forward.before, forward.path
        else:
            return {}
        alive = {value: one for value, one in self.tensors.alive().items() if since <= value[0] < self._started}
        is_needed = any(one.requires_grad and value not in path.freed[position] for value, one in alive.items())
        if not is_needed and self._started == len(self.records):
            return {}
        exposed = [(one, one.detach()) for one in alive.values() if self.tensors.is_exposed(one)]
        states = before.put_back()
        results: dict[Value, torch.Tensor] = {}
        self.replay_all(range(since, self._started), alive, results)
        for tensor, on_memory in exposed:  # of an array, which goes on to see what is written there
            tensor.data = on_memory
        for generator, state in states:
            generator.set_state(state)
        return results

    def _flush(self, why: str) -> None:
        """Runs what is recorded, one by one and in order; the run observes from here on."""
        if self.candidates:
            self.departure = f"{why} ({current_line()})"
        self.candidates = []
        with self._draws.in_place(), modes_off():
            results = self._give_graphs()
            handles = self.tensors.handles()
            results |= handles
            self.replay_all(range(self._started, len(self.records)), handles, results)
        self._started = len(self.records)
        self._given.clear()
