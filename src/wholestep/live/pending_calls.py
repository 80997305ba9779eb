"""Recorded calls that have not run yet: they run as a compiled piece, ahead of a backward, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from wholestep.capture.python.user_frame import current_line
from wholestep.live.observation import execute
from wholestep.live.piece import PieceSpec
from wholestep.live.recorded_calls import RecordedCalls
from wholestep.live.recording.handle import fulfil, with_freed_graph
from wholestep.live.recording.path import Path
from wholestep.live.recording.record import Record, Value
from wholestep.live.recording.structure import unflatten
from wholestep.live.speculation import Before, SpeculativeBackward, num_externals, plan_speculation

_NO_PIECE = "and what is recorded is no piece"


class Launcher(Protocol):
    """Runs records as a compiled piece."""

    def __call__(self, run: PendingCalls, spec: PieceSpec) -> list[torch.Tensor] | None:
        """What the piece gives; None where these records can be no piece, and nothing has run."""


class PendingCalls(RecordedCalls):
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
        self._speculation: SpeculativeBackward | None = None
        self._started = 0
        """Records before this one have run."""

    def _run_pending(self, why: str) -> None:
        """Runs what is recorded as a compiled piece, or else one by one."""
        span = (self._started, len(self.records))
        if span[0] == span[1]:
            return
        alive = self.tensors.handles()
        if self._holds_graph(alive):
            why_not = self._speculate(span, alive)
        else:
            results = self._launched(PieceSpec(span, tuple(alive)))
            why_not = _NO_PIECE if results is None else ""
            if results is not None:
                self._fulfil(alive, results)
        if why_not:
            self._flush(f"{why}, {why_not}")
            return
        self._started = span[1]
        self._given.clear()
        self.pieces.append(span)

    def _launched(self, spec: PieceSpec) -> list[torch.Tensor] | None:
        results: list[torch.Tensor] | None = execute(self._launch, (self, spec), {})
        return results

    def _fulfil(self, alive: dict[Value, torch.Tensor], results: list[torch.Tensor]) -> None:
        """Gives the handles the last of the results."""
        while alive:
            (number, output), handle = alive.popitem()
            meta = self.records[number].outputs[output]
            assert meta is not None
            fulfil(handle, with_freed_graph(results.pop(), meta))

    def _holds_graph(self, alive: dict[Value, torch.Tensor]) -> bool:
        """Whether somebody may still ask for gradients of what is recorded, through a tensor that is alive."""
        freed = self.candidates[0].freed[len(self.records)]
        return any(value not in freed and tensor.requires_grad for value, tensor in alive.items())

    def _speculate(self, span: tuple[int, int], alive: dict[Value, torch.Tensor]) -> str:
        """Runs what is recorded and the backward behind it, whose gradients are held back. Returns why not."""
        path, tensors = self.candidates[0], self.tensors
        length = tensors.length()
        plan = plan_speculation(path, *span, tensors)
        if isinstance(plan, str):
            return f"where the graph is still needed, and no backward can run ahead: {plan}"
        leaves = [tensors.externals[index] for index in plan.leaves]
        later = plan.wanted(path)
        before = Before.of(path.records[slice(*span)], tensors)
        results = None
        has_grads = any(leaf.grad is not None for leaf in leaves)
        if self._agree_on_gradients is None or not has_grads:  # those of several ranks may be reduced already, or not
            results = self._launched(PieceSpec(plan.span, (*later, *alive), plan.skipped, plan.leaves))
        if results is None:
            tensors.forget_since(length)
            return "where there are gradients already, which other ranks may have reduced" if has_grads else _NO_PIECE
        speculation = SpeculativeBackward(plan, path, before, length)
        for leaf in reversed(leaves):
            grad = results.pop()
            if grad is not None:
                speculation.grads.insert(0, (leaf, grad))
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
        """A record behind the read that has run already. The backward puts the gradients in place."""
        number = len(self.records) - 1
        if number == speculation.plan.span[1] - 1:
            if self._agree_on_gradients is not None and not self._agree_on_gradients():
                self.records.pop()
                self._flush("another rank went another way")
                self.make_no_path("another rank did not come to the backward that ran ahead")
                return execute(record.key.function, args, kwargs)
            self._started, self._speculation = number + 1, None
            speculation.put()
            return None
        self._started = number + 1
        if number in speculation.plan.skipped:
            return execute(record.key.function, args, kwargs)
        results: list[torch.Tensor | None] = []
        for output, meta in enumerate(record.outputs):
            if meta is None or meta.alias is not None:
                results.append(None if meta is None or meta.alias is None else leaves[meta.alias])
            else:
                value = with_freed_graph(speculation.values.pop((number, output)), meta)
                results.append(self.tensors.note_value(value, (number, output)))
        return unflatten(record.output_structure, results)

    def _end_speculation(self) -> None:
        """Python went another way: gradients are dropped, and what somebody may still need has a graph again."""
        speculation, self._speculation = self._speculation, None
        if speculation is None:
            return
        self.tensors.forget_since((num_externals(self.records, speculation.length[0]), len(self.tensors.numbers)))
        span = (speculation.plan.span[0], len(self.records))
        freed = speculation.path.freed[speculation.plan.position]
        alive = {value: one for value, one in self.tensors.alive().items() if value[0] >= span[0]}
        if not any(one.requires_grad and value not in freed for value, one in alive.items()):
            return
        states = speculation.before.put_back()
        results: dict[Value, torch.Tensor] = {}
        for number in range(*span):
            self.replay(number, alive, results)
        for generator, state in states:
            generator.set_state(state)

    def _flush(self, why: str) -> None:
        """Runs what is recorded, one by one and in order; the run observes from here on."""
        if self.candidates:
            self.departure = f"{why} ({current_line()})"
        self.candidates = []
        self._end_speculation()
        handles = self.tensors.handles()
        results: dict[Value, torch.Tensor] = dict(handles)
        for number in range(self._started, len(self.records)):
            self.replay(number, handles, results)
        self._started = len(self.records)
        self._given.clear()
