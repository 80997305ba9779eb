"""Paths: the sequences of records that earlier runs of a step have shown, and what may differ on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from wholestep.live.recording.fast_match import FastRecord, fast_records
from wholestep.live.recording.record import (
    EXTERNAL,
    NUMBER,
    VALUE,
    Description,
    Operand,
    Read,
    Record,
    StateKind,
    Value,
)

MAX_PATHS = 8
"""Of one step. The one that was used longest ago goes."""

VARIES, SIZE_VARIES = object(), object()
"""In the place of a float, and of an int, that is another one in every call."""

BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


_ATTRIBUTES: Any = torch.Tensor
GRADIENT_OF = (_ATTRIBUTES.grad.__get__, _ATTRIBUTES._grad.__get__)


def reads_gradient(record: Record) -> bool:
    """Whether it is ``tensor.grad``, and there was one."""
    return record.key.function in GRADIENT_OF and record.outputs[0] is not None


def asked_grads(records: Sequence[Record], had_grad: Sequence[bool]) -> dict[int, bool]:
    """By number of the tensors from outside whose ``.grad`` records ask for, whether they had one at first."""
    asked = (one.operands[0] for one in records if one.key.function in GRADIENT_OF)
    return {one.key: had_grad[one.key] for one in asked if one.kind == EXTERNAL}


@dataclass(slots=True, eq=False)
class Path:
    """Records of one run, and what later runs with equal records have shown to vary."""

    records: tuple[Record, ...]
    externals: list[torch.Tensor | Description]
    """Tensors from outside, in the order of their first use: state of the step, or what is another tensor each time."""
    numbers: list[Any]
    """Floats among the arguments, in order; VARIES where calls differ."""
    reads: set[Read]
    sources: list[int | None]
    """Which tensor among the arguments of the step each one from outside is; None if it is none."""
    kinds: list[StateKind | None]
    """Of the tensors from outside that are state: what else than their numbers decided what calls gave, at first."""
    alive: set[Value] = field(default_factory=set)
    """Values with a graph that somebody held after a call of the step."""
    had_grad: dict[int, bool] = field(default_factory=dict)
    """Of the tensors from outside whose ``.grad`` Python looks at, and finds None or not by what it was when the call
    began: whether they had one then."""
    sized: frozenset[int] = field(init=False, default=frozenset())
    """The records whose outputs have sizes that follow from sizes or numbers which are others in every call."""
    all_sizes: dict[int, Any] = field(init=False, default_factory=dict)
    """By record its `AllSizes`, None where there are none; see `live/pieces/shape_inference.py`."""
    seen_outputs: dict[Any, Record | str] = field(init=False, default_factory=dict)
    """Such records for sizes that were met, or why there is none; see `live/pieces/shape_inference.py`."""
    freed: list[set[Value]] = field(init=False)
    """By number of records: the values whose graph a backward among them was seen to free, and what was computed of
    those."""

    cuts: dict[int, int] = field(init=False, default_factory=dict)
    """Records before which other ranks ask for a value, each with the one up to which calls have to run then."""
    fast_records: list[FastRecord | None] = field(init=False)
    """The records for quick comparison, and None after the last one."""
    _reads_by_place: dict[tuple[int, Any], Read] = field(init=False)

    def __post_init__(self) -> None:
        self.freed = _freed(self.records)
        self._note_records()

    def _note_records(self) -> None:
        self.fast_records = fast_records(self.records, BACKWARDS)
        for number in self.cuts:
            self.fast_records[number] = None
        self._reads_by_place = {(read.position, read.function): read for read in self.reads}

    def _note_sizes(self, sized: frozenset[int]) -> None:
        self.sized = sized
        self.all_sizes.clear()
        self.seen_outputs.clear()

    def merge(self, other: Path) -> bool | None:
        """Takes up what is different in a run with equal records; whether anything was. None: it is another path."""
        others = _of_other_sizes(self.records, other.records)
        if others is None or len(self.externals) != len(other.externals):
            return None
        if any(None not in pair and pair[0] != pair[1] for pair in zip(self.kinds, other.kinds, strict=True)):
            return None
        externals = [_common(mine, theirs) for mine, theirs in zip(self.externals, other.externals, strict=True)]
        if None in [one for one in externals if not isinstance(one, torch.Tensor)]:
            return None
        numbers = list(map(_common_number, self.numbers, other.numbers))
        sized = _sized(self.records, externals, numbers)
        if None in numbers or not others <= sized:
            return None
        records = tuple(map(Record.joined, self.records, other.records))
        changed = not all(
            map(is_, [*self.externals, *self.numbers, *self.records], [*externals, *numbers, *records])
        )  # fmt: skip
        if changed:
            self._note_sizes(sized)
        self.externals = [one for one in externals if one is not None]
        self.kinds = [
            kind if isinstance(one, torch.Tensor) else None
            for kind, one in zip(self.kinds, self.externals, strict=True)
        ]
        self.numbers = numbers
        self.had_grad = {one: had for one, had in self.had_grad.items() if other.had_grad[one] is had}
        self.reads |= other.reads
        self.records = records
        self._note_records()
        self.alive |= other.alive
        self.sources = [
            mine if mine == theirs else None for mine, theirs in zip(self.sources, other.sources, strict=True)
        ]
        return changed

    def cut_before(self, cuts: Mapping[int, int]) -> None:
        """Ends pieces before these records too; see `cuts`."""
        self.cuts.update(cuts)
        self._note_records()

    def vary(self, indices: Iterable[int]) -> None:
        """Has these numbers be others in every call."""
        for index in indices:
            self.numbers[index] = SIZE_VARIES if type(self.numbers[index]) is int else VARIES
        self._note_sizes(_sized(self.records, self.externals, self.numbers))

    def takes_external(self, index: int, tensor: torch.Tensor, kind: StateKind) -> bool:
        """Whether a tensor that was of a kind when the call began may be the one from outside with this number."""
        known = self.externals[index]
        if type(known) is Description:
            return known.takes(Description.of(tensor))
        return known is tensor and self.kinds[index] == kind

    def read_at(self, position: int, function: Any) -> Read | None:
        """Where Python asked for a value with this function, after that many records; None if it did not."""
        return self._reads_by_place.get((position, function))

    @property
    def keeps_graph(self) -> bool:
        """Whether the graph of a call was still there after it."""
        return not self.alive <= self.freed[-1]

    def is_varying(self, index: int) -> bool:
        """Whether a number is another one in every call."""
        return self.numbers[index] in (VARIES, SIZE_VARIES)

    def takes_number(self, index: int, number: float) -> bool:
        """Whether a number may be the one with this number."""
        known = self.numbers[index]
        if known is VARIES or known is SIZE_VARIES:
            return (known is SIZE_VARIES) is (type(number) is int)
        return type(known) is type(number) and bool(known == number)


def _common(mine: torch.Tensor | Description, theirs: torch.Tensor | Description) -> torch.Tensor | Description | None:
    """What both are: the same tensor, or tensors of one kind; None if they are of different kinds."""
    if mine is theirs:
        return mine
    described = [one if isinstance(one, Description) else Description.of(one) for one in (mine, theirs)]
    return described[0].common(described[1])


def _common_number(mine: Any, theirs: Any) -> Any:
    """What both are: the same number, or one that varies; None for an int and a float."""
    if type(mine) is type(theirs) and mine == theirs:
        return mine
    is_size = [one is SIZE_VARIES or type(one) is int for one in (mine, theirs)]
    if is_size[0] is not is_size[1]:
        return None
    return SIZE_VARIES if is_size[0] else VARIES


def _of_other_sizes(mine: Sequence[Record], theirs: Sequence[Record]) -> set[int] | None:
    """The records whose outputs have other sizes; None where records differ in more than that."""
    if len(mine) != len(theirs):
        return None
    found = {number for number, (one, other) in enumerate(zip(mine, theirs, strict=True)) if one != other}
    return found if all(mine[number].is_of_other_size(theirs[number]) for number in found) else None


def _sized(
    records: Sequence[Record], externals: Sequence[torch.Tensor | Description | None], numbers: Sequence[Any]
) -> frozenset[int]:
    """The records that are given a size, or a number that may decide one, which is another one in every call."""
    found: set[int] = set()
    for number, record in enumerate(records):
        if any(_moves(record, one, externals, numbers, found) for one in record.operands):
            found.add(number)
    return frozenset(found)


def _moves(
    record: Record,
    operand: Operand,
    externals: Sequence[torch.Tensor | Description | None],
    numbers: Sequence[Any],
    sized: Collection[int],
) -> bool:
    """Whether an operand has, or decides, a size that is another one in other calls."""
    if operand.kind == EXTERNAL:
        external = externals[operand.key]
        return isinstance(external, Description) and external.has_moving_dims
    if operand.kind == NUMBER:
        return not record.is_pointwise and numbers[operand.key] in (VARIES, SIZE_VARIES)
    return operand.kind == VALUE and operand.key in sized


def moving_operands(path: Path, record: Record) -> list[int]:
    """The places of such operands among those of a record of a path."""
    return [
        place
        for place, one in enumerate(record.operands)
        if _moves(record, one, path.externals, path.numbers, path.sized)
    ]


def _freed(records: Sequence[Record]) -> list[set[Value]]:
    freed: set[Value] = set()
    found = [set(freed)]
    for number, record in enumerate(records):
        freed |= record.frees
        if any((operand.key, operand.detail) in freed for operand in _with_graph(records, record)):
            freed |= {(number, output) for output in range(len(record.outputs))}
        found.append(set(freed) if freed != found[-1] else found[-1])
    return found


def _with_graph(records: Sequence[Record], record: Record) -> list[Operand]:
    """The values that a call is given through which gradients may flow."""
    values = [operand for operand in record.operands if operand.kind == VALUE]
    metas = [records[operand.key].outputs[operand.detail] for operand in values]
    return [operand for operand, meta in zip(values, metas, strict=True) if meta is not None and meta.requires_grad]


class Paths:
    """The paths of one step, the one used last first."""

    def __init__(self) -> None:
        self.all: list[Path] = []

    def add(self, path: Path) -> Path | None:
        """A run in which something was new. Returns the path that was given another meaning, if one was."""
        for known in self.all:
            changed = known.merge(path)
            if changed is not None:
                self.used(known)
                return known if changed else None
        self.all.insert(0, path)
        del self.all[MAX_PATHS:]
        return None

    def used(self, path: Path) -> None:
        """Moves a path to the front."""
        self.all.remove(path)
        self.all.insert(0, path)
