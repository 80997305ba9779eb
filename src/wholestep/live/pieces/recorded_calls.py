"""The recorded calls of one run of a live step, and their execution one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from wholestep.capture.python.user_frame import current_line
from wholestep.capture.wrappers import ddp
from wholestep.live.opaque.modules import OpaqueModule
from wholestep.live.pieces.observation import flat_result
from wholestep.live.pieces.tensors import TensorTable
from wholestep.live.recording.handle import execute, fulfil
from wholestep.live.recording.modes import block_of, casts_kept, under
from wholestep.live.recording.path import Path, asked_grads
from wholestep.live.recording.record import (
    EXTERNAL,
    NUMBER,
    SETS_REQUIRES_GRAD,
    VALUE,
    Operand,
    OutputMeta,
    Read,
    Record,
    Value,
)
from wholestep.live.recording.snapshot import AsRecorded, OptimizerSnapshot, as_recorded
from wholestep.live.recording.structure import unflatten

_NOT_HELD = object()
"""In the place of an operand that nobody holds."""


class RecordedCalls:
    """Calls in order, with what they were given."""

    def __init__(self, arguments: Iterable[Any]) -> None:
        """`arguments` are the flat arguments of the step."""
        self.records: list[Record] = []
        """Of all calls so far."""
        self.reads: set[Read] = set()
        self.snapshots: dict[int, OptimizerSnapshot] = {}
        """Of the optimizers that recorded calls step, by record."""
        self.tensors = TensorTable(arguments)
        self.reason = ""
        """Why this run makes no path, if it does not."""
        self.departure = ""
        """Why this run went off the known paths, and at what line of the user's; empty while it follows one."""
        self.executed = 0
        """How many calls were executed one by one."""

    def path(self) -> Path:
        """What this run has shown, for later ones."""
        tensors, described = self.tensors, self.tensors.described()
        return Path(
            tuple(self.records), described, list(tensors.numbers), set(self.reads), tensors.sources(),
            [tensors.flags.kind_at_first(one) if isinstance(one, torch.Tensor) else None for one in described],
            {value for value, one in tensors.alive().items() if one.requires_grad and self.has_graph(value)},
            asked_grads(self.records, tensors.had_grad),
        )  # fmt: skip

    def take(self, record: Record) -> None:
        """A call that follows a path is recorded, to run later. What it will reduce is awaited no more."""
        self.records.append(record)
        ddp.note_reduced(record.reduces)

    def replay_all(
        self, numbers: range, handles: dict[Value, torch.Tensor], results: dict[Value, torch.Tensor]
    ) -> None:
        """Executes records one by one, those of a block of autocast with the same casts."""
        with self.tensors.flags.before(numbers.start):
            for block, group in groupby(numbers, lambda number: block_of(self.records[number].key.modes)):
                with casts_kept(block):
                    for number in group:
                        self.replay(number, handles, results)

    def replay(self, number: int, handles: dict[Value, torch.Tensor], results: dict[Value, torch.Tensor]) -> None:
        record, result = self.records[number], self.act(number, results)
        self.executed += 1
        found, _ = flat_result(record.key.function, result)
        found += [self._leaf(record.operands[leaf], results) for leaf in record.joins]
        found += [results.get(value, self.tensors.if_alive(value)) for value in record.brings]
        del result  # whoever holds a result is told from us by the number of references
        for output in range(len(found) - 1, -1, -1):
            meta, value = record.outputs[output], (number, output)
            if (was := record.before(output)) is not None:
                results.pop(was, None)
            for place in record.earlier_places(output, number):  # of a tensor in several places the last one is known
                found[place] = None
            if found[-1] is None:  # nobody holds what an argument is a view of
                meta = None
            if meta is None or meta.alias is not None:
                found.pop()
            elif value in handles:
                fulfil(handles[value], found.pop())
            else:
                results[value] = self.tensors.note_value(found.pop(), value)

    def act(self, number: int, results: dict[Value, torch.Tensor]) -> Any:
        """What a record gives. By itself: of one that gives nothing, and that is no reason to observe the run."""
        record = self.records[number]
        args, kwargs = unflatten(record.key.structure, [self._leaf(one, results) for one in record.operands])
        with under(record.key.modes), as_recorded(self.read_by(self.records, [number])):
            return execute(record.key.function, args, kwargs)

    def view_again(self, value: Value, made: dict[int, list[Any]]) -> torch.Tensor | None:
        """A value that is a view, by its own call of the tensor that it is a view of; None if it is none.

        A graph gives it on whatever memory it likes, as if it was new: on that of a parameter from before the update,
        or of a forward that ran again. So what Python holds would no longer see what is written to the other. `made`
        holds what calls have given meanwhile that was not asked for. None, too, if nobody holds what it is a view of.
        """
        number, output = value
        record = self.records[number]
        meta = record.outputs[output]
        if meta is None or meta.views is None or not record.only_views:
            return None
        if number not in made:
            leaves = [self._held(one, made) for one in record.operands]
            if any(leaf is _NOT_HELD for leaf in leaves):
                return None
            args, kwargs = unflatten(record.key.structure, leaves)
            grad, _, *others = record.key.modes  # tensors of pieces are none of inference mode, nor may their views be
            with under((grad, False, *others)):
                made[number] = flat_result(record.key.function, execute(record.key.function, args, kwargs))[0]
                made[number] += [leaves[leaf] for leaf in record.joins]
        view: torch.Tensor | None = made[number][output]
        made[number][output] = None  # whoever holds a result is told from us by the number of references
        is_same = view is not None and (view.shape, view.stride(), view.dtype) == (meta.shape, meta.stride, meta.dtype)
        return view if is_same else None

    def viewed(self, views: Iterable[Value], since: int) -> dict[Value, OutputMeta]:
        """The values of records from `since` on that these values are views of, each at the end of its views."""
        found: dict[Value, OutputMeta] = {}
        for value in views:
            record, meta = self.records[value[0]], self.records[value[0]].outputs[value[1]]
            start = value
            while meta is not None and meta.views is not None and record.only_views:
                operand = record.operands[meta.views]
                if operand.kind != VALUE or operand.key < since:
                    break
                value = (operand.key, operand.detail)
                record, meta = self.records[value[0]], self.records[value[0]].outputs[value[1]]
            else:
                if value != start and meta is not None:
                    found[value] = meta
        return found

    def _held(self, operand: Operand, made: dict[int, list[Any]]) -> Any:
        """An operand as somebody holds it, or as a view of such a one; `_NOT_HELD` if there is none."""
        if operand.kind == EXTERNAL:
            return self.tensors.own(operand.key)
        if operand.kind != VALUE:
            return self._leaf(operand, {})
        value = (operand.key, operand.detail)
        found = self.tensors.if_alive(value)
        found = self.view_again(value, made) if found is None else found
        return _NOT_HELD if found is None else found

    def read_by(self, records: Sequence[Record], numbers: Iterable[int]) -> list[AsRecorded]:
        """What some of `records` read of Python, as it was when they were recorded. Some may be still to come."""
        found: dict[int, AsRecorded] = {}
        for number in numbers:
            function = records[number].key.function
            if isinstance(function, OpaqueModule):
                found[id(function)] = function
            elif number in self.snapshots:
                found[number] = self.snapshots[number]
        return list(found.values())

    def _leaf(self, operand: Operand, results: dict[Value, torch.Tensor]) -> Any:
        if operand.kind == VALUE:
            value = (operand.key, operand.detail)
            return results[value] if value in results else self.tensors.tensor_of(value)
        if operand.kind == EXTERNAL:
            return self.tensors.externals[operand.key]
        return self.tensors.numbers[operand.key] if operand.kind == NUMBER else operand.key

    def has_graph(self, value: Value) -> bool:
        """Whether a value was seen with a graph: what only asks for a gradient has none."""
        meta = self.records[value[0]].outputs[value[1]]
        return meta is not None and bool(meta.graph)

    def is_view_of_one_brought(self, value: Value) -> bool:
        """Whether a value came into a graph with what it is a view of, or on whose memory it is."""
        record = self.records[value[0]]
        was = record.before(value[1]) if record.brings else None
        meta = None if was is None else self.records[was[0]].outputs[was[1]]
        return meta is not None and meta.views is not None

    def leaves_views_out(self, record: Record) -> bool:
        """Whether a view of what a call puts into a graph is held that was not when the call was observed."""
        if record.key.function in SETS_REQUIRES_GRAD:  # no view comes into a graph with what asks for a gradient
            return False
        befores = (record.before(output) for output in range(len(record.outputs)))
        joining = {value for value in befores if value is not None}
        if not joining:
            return False
        bases = set(map(self._base, joining))
        alive = (value for value, one in self.tensors.alive().items() if not one.requires_grad)
        return any(value not in joining and self._base(value) in bases for value in alive)

    def _base(self, value: Value) -> Value:
        """What a value is a view of, at the end of all views that are known."""
        while True:
            record, meta = self.records[value[0]], self.records[value[0]].outputs[value[1]]
            operand = None if meta is None or meta.views is None else record.operands[meta.views]
            viewed = (operand.key, operand.detail) if operand is not None and operand.kind == VALUE else None
            before = record.before(value[1]) or viewed
            if before is None:
                return value
            value = before

    def make_no_path(self, why: str) -> None:
        """Says why this run can be no path for later ones."""
        self.reason = self.reason or f"{why} ({current_line()})"
