"""Forwards that can run again: with their graph, where Python needs it after a value that it has asked for.

[Note: a forward that runs again]
A value may be asked for between forward and backward, and decide what comes next: an assignment by scipy, an action of
a policy. Where no backward can run ahead (`speculation.py`), the forward runs as a piece for its values alone. When
Python comes to the backward, one piece runs all from that forward on, as eager code would have: with the same random
numbers, from the same buffers. So nothing that autograd saves has to cross the cut. If Python never comes there, or the
piece is refused, the records are executed again one by one, so that what Python holds has a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from wholestep.live.opaque.functions import clear_grads
from wholestep.live.opaque.modules import OpaqueModule
from wholestep.live.pieces.tensors import TensorTable
from wholestep.live.recording.path import BACKWARDS, Path
from wholestep.live.recording.record import EXTERNAL, VALUE, Record

States = tuple[tuple[torch.Generator, torch.Tensor], ...]
"""Generators and where they stand."""


def cannot_be_repeated(record: Record) -> bool:
    """Whether a record leaves what `Before` does not put back."""
    steps = any(isinstance(operand.key, Optimizer) for operand in record.operands)
    return steps or record.writes_grads or record.key.function in BACKWARDS[:2]


def clears_gradients(record: Record) -> bool:
    """Whether a record is ``zero_grad()``."""
    return record.key.function is clear_grads


@dataclass(slots=True)
class Before:
    """What records change that may run again, as it was before them, and what earlier ones have given them."""

    _generators: dict[torch.Generator, torch.Tensor] = field(default_factory=dict)
    _written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)
    _given: list[torch.Tensor | None] = field(default_factory=list)
    """Values of earlier records, which Python may let go of meanwhile."""

    def take(self, records: Iterable[Record], since: int, tensors: TensorTable) -> None:
        """Takes up records that are about to run. Copies what they write to; buffers of norms, usually.

        Values of the records from `since` on are no part of that: those records make them again.
        """
        for record in records:
            for generator in record.drawn:
                if generator not in self._generators:
                    self._generators[generator] = generator.get_state()
            self.hold(record, since, tensors)
            written = list(record.key.function.written) if isinstance(record.key.function, OpaqueModule) else []
            for operand in record.writes_to:
                if operand.kind == EXTERNAL:
                    written.append(tensors.externals[operand.key])
                elif operand.key < since and (found := tensors.if_alive((operand.key, operand.detail))) is not None:
                    written.append(found)
            for memory in (tensor.untyped_storage() for tensor in written):
                if memory._cdata not in self._written:
                    self._written[memory._cdata] = (memory, memory.clone())

    def hold(self, record: Record, since: int, tensors: TensorTable) -> None:
        """Keeps what a record is given by those before `since` until it may have run again."""
        earlier = ((one.key, one.detail) for one in record.operands if one.kind == VALUE and one.key < since)
        self._given.extend(map(tensors.if_alive, earlier))

    def states(self) -> States:
        """Where the generators stand now."""
        return tuple((one, one.get_state()) for one in self._generators)

    def put_back(self) -> States:
        """Everything as it was. Returns where the generators stand now, for afterwards."""
        now = self.states()
        for one, state in self._generators.items():
            one.set_state(state)
        for memory, content in self._written.values():
            memory.copy_(content)
        return now


@dataclass(slots=True)
class Forward:
    """Records that have run without their graph."""

    since: int
    """The first of them."""
    path: Path
    before: Before = field(default_factory=Before)
    _after: States = ()
    """Where the generators stood after them."""

    def take(self, records: Iterable[Record], path: Path, tensors: TensorTable) -> None:
        """Takes up records of a path that are about to run, too."""
        self.path = path
        self.before.take(records, self.since, tensors)

    def has_run(self, records: Iterable[Record]) -> None:
        """What was taken up has run, these records last. Only draws move what the next ones go on from."""
        if any(record.drawn for record in records):
            self._after = self.before.states()

    def draws_go_on(self, records: Iterable[Record]) -> bool:
        """Whether records after these draw, if they do, the numbers that come right after those of these."""
        if not any(record.drawn for record in records):
            return True
        return all(torch.equal(one.get_state(), state) for one, state in self._after)
