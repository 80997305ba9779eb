"""The recorded calls of one run of a live step, and their execution one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from wholestep.live.recording.record import EXTERNAL, NUMBER, VALUE, Operand, OutputMeta, Read, Record, Value
from wholestep.live.recording.snapshot import AsRecorded, OptimizerSnapshot, as_recorded
from wholestep.live.recording.structure import unflatten
from wholestep.util.gradient_node import gradient_node

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
        tensors = self.tensors
        return Path(
            tuple(self.records), tensors.described(), list(tensors.numbers), set(self.reads), tensors.sources(),
            {value for value, one in tensors.alive().items() if one.requires_grad},
            asked_grads(self.records, tensors.had_grad),
        )  # fmt: skip

    def take(self, record: Record) -> None:
        """A call that follows a path is recorded, to run later. What it will reduce is awaited no more."""
        self.records.append(record)
        ddp.note_reduced(record.reduces)

    def replay_all(
        self, numbers: Iterable[int], handles: dict[Value, torch.Tensor], results: dict[Value, torch.Tensor]
    ) -> None:
        """Executes records one by one, those of a block of autocast with the same casts."""
        for block, group in groupby(numbers, lambda number: block_of(self.records[number].key.modes)):
            with casts_kept(block):
                for number in group:
                    self.replay(number, handles, results)

    def replay(self, number: int, handles: dict[Value, torch.Tensor], results: dict[Value, torch.Tensor]) -> None:
        record, result = self.records[number], self.act(number, results)
        self.executed += 1
        found, _ = flat_result(record.key.function, result)
        del result  # whoever holds a result is told from us by the number of references
        for output in range(len(found) - 1, -1, -1):
            meta, value = record.outputs[output], (number, output)
            if meta is not None and meta.becomes is not None:
                joined = record.operands[meta.becomes]
                results.pop((joined.key, joined.detail), None)
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

    def joins_others(self, joined: Sequence[torch.Tensor], writes_to: Sequence[Operand]) -> bool:
        """Whether a call that put these tensors into a graph did so with others, too: a view brings what it views.

        `writes_to` are all on the memory to which it wrote. A record says of its arguments alone what they become, and
        of those that are values.
        """
        if not all(self.tensors.value_of(one) for one in joined):
            return True
        others = self._others(writes_to, joined) if joined else ()
        return any(gradient_node(one) is not None and not was_in_graph for one, was_in_graph in others)

    def _others(self, found: Sequence[Operand], joined: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, bool]]:
        """Tensors of the run that are none of `joined`, and whether they were in a graph when they came into it."""
        for kind, key, detail in found:
            tensor = self.tensors.tensor_of((key, detail)) if kind == VALUE else self.tensors.externals[key]
            if not any(tensor is one for one in joined):
                meta = self.records[key].outputs[detail] if kind == VALUE else None
                yield tensor, meta is not None and meta.requires_grad

    def make_no_path(self, why: str) -> None:
        """Says why this run can be no path for later ones."""
        self.reason = self.reason or f"{why} ({current_line()})"
