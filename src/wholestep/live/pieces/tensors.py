"""The tensors of one run: which of them are values of recorded calls, and which come from outside."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from operator import is_
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture.guards.fast_guards import have_gradients
from wholestep.ir.dtensor.layouts import local_tensor
from wholestep.ir.dtensor.shards import is_dtensor
from wholestep.live.opaque.modules import OpaqueModule
from wholestep.live.pieces.frozen import FlagChanges
from wholestep.live.recording.fast_match import BLOCK, FastRecord
from wholestep.live.recording.handle import Handle
from wholestep.live.recording.path import Path
from wholestep.live.recording.record import (
    CONSTANT,
    EXTERNAL,
    NUMBER,
    VALUE,
    Description,
    Operand,
    Value,
    is_number,
)
from wholestep.live.recording.snapshot import OptimizerSnapshot
from wholestep.util.gradient_node import gradient_node, is_leaf


class TensorTable:
    """Tensors and numbers of one run, in the order in which recorded calls first use them."""

    def __init__(self, arguments: Iterable[Any]) -> None:
        """`arguments` are the flat arguments of the step, which are other tensors at every call."""
        self.externals: list[torch.Tensor] = []
        self.had_grad: list[bool] = []
        """Of each tensor from outside, whether it had a gradient when a call first used it."""
        self.numbers: list[int | float] = []
        self.flags = FlagChanges()
        self._arguments = [one for one in arguments if isinstance(one, torch.Tensor)]
        self._alive: list[torch.Tensor] = []
        """The tensors from outside themselves, so that their ids stay theirs."""
        self._index: dict[int, int] = {}
        self._storages: set[int] = set()
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], Value]] = {}
        self._references: dict[Value, weakref.ref[torch.Tensor]] = {}
        self._fresh: dict[int, torch.Tensor] = {}
        self.exposed: list[tuple[weakref.ref[Any] | None, set[int]]] = []
        """Things that may be on the memory of tensors, None for what has no weak references, and that memory."""
        self._state: list[torch.Tensor] = []
        """What the steps of optimizers that were recorded read and write."""
        self._state_storages: set[int] | None = None
        self._meant: tuple[object, set[int]] | None = None
        self._blocks: list[tuple[int, tuple[torch.Tensor, ...]]] = []
        """The tensors of each module among those from outside, with the number of the first."""
        self._blocks_looked_at = 0
        """Of how many of them the memory is in `_storages`."""
        self.copies_shared = False
        """Whether tensors on memory of others are copied when a call is recorded, since others may write there."""
        for one in self._arguments:
            self.note_fresh(one)

    # Values.

    def note_value(self, tensor: torch.Tensor, value: Value) -> torch.Tensor:
        """Notes that a tensor is a value of a recorded call. It is not kept alive."""
        self._references[value] = reference = weakref.ref(tensor)
        self._values[id(tensor)] = (reference, value)
        return tensor

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """The value that a tensor is; None if it is none."""
        found = self._values.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def tensor_of(self, value: Value) -> torch.Tensor:
        """A value that a call is given now, so that it is alive."""
        found = self.if_alive(value)
        if found is None:
            raise KeyError(value)
        return found

    def if_alive(self, value: Value) -> torch.Tensor | None:
        """A value, if somebody holds it, and it has become no other one."""
        reference = self._references.get(value)
        tensor = None if reference is None else reference()
        return tensor if tensor is not None and self.value_of(tensor) == value else None

    def handles(self) -> dict[Value, torch.Tensor]:
        """The handles that somebody holds, in the order of their calls."""
        return {value: one for value, one in self.alive().items() if type(one) is Handle}

    def alive(self) -> dict[Value, torch.Tensor]:
        """The values that somebody holds, in the order of their calls."""
        alive = ((value, reference()) for reference, value in self._values.values())
        return dict(sorted(((value, one) for value, one in alive if one is not None), key=lambda item: item[0]))

    def expect(self, path: Path, count: int) -> bool:
        """Takes the next tensors from outside that a path has, up to `count` of them: state, or arguments of the call.

        False if one is neither, or of another kind; then none is taken.
        """
        length = self.length()
        for index in range(len(self.externals), count):
            known, source = path.externals[index], path.sources[index]
            if source is not None and source < len(self._arguments):
                known = self._arguments[source]
            if isinstance(known, Description) or id(known) in self._index or not self._is_taken(path, index, known):
                self.forget_since(length)
                return False
            self._external(known)
        return True

    def sources(self) -> list[int | None]:
        """Which argument of the step each tensor from outside is, by number; None if it is none."""
        places = {id(one): place for place, one in enumerate(self._arguments)}
        return [places.get(id(one)) for one in self._alive]

    # Operands.

    def is_involved(self, leaves: Iterable[Any]) -> bool:
        """Whether a call with these leaves has to do with parameters, or with what is recorded."""
        return any(isinstance(leaf, Optimizer) or self._concerns(leaf) for leaf in leaves)

    def is_known(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether calls have been given any of these parameters, or step them."""
        stepped = set(map(id, self._state))
        return any(id(param) in self._index or id(param) in stepped for param in params)

    def _concerns(self, leaf: Any) -> bool:
        if not isinstance(leaf, torch.Tensor):
            return False
        if type(leaf) is Handle or leaf.requires_grad or isinstance(leaf, nn.Parameter):
            return True
        if id(leaf) in self._index or self.value_of(leaf) is not None:
            return True
        if leaf.layout is not torch.strided or not (self._alive or self._state):
            return False
        try:
            return _storage(leaf) in self._memory() or self._is_state(leaf)
        except NotImplementedError:  # a wrapper of torch.func, which may be one of anything
            return True

    def is_other_name(self, leaf: Any, moment: object) -> bool:
        """Whether a leaf is another name for memory that recorded calls may read or write without being given it.

        A backward means the gradients of parameters, and the step of an optimizer its parameters and state. A shard
        means its part. No piece is given both. `moment`: another one where any of them may be other tensors.
        """
        if not isinstance(leaf, torch.Tensor) or leaf.requires_grad or not is_plain(leaf) or is_dtensor(leaf):
            return False
        if self.value_of(leaf) is not None or not (self._alive or self._state):
            return False
        if self._meant is None or self._meant[0] != moment:
            self._meant = moment, set(map(_storage, self._meant_by_others()))
        try:
            return _storage(leaf) in self._meant[1] and all(leaf is not one for one in self._state)
        except NotImplementedError:  # it is involved anyway
            return False

    def gradients(self) -> list[torch.Tensor]:
        """Those of the tensors from outside."""
        alive = tuple(self._alive)
        found = (one.grad for one, has in zip(alive, have_gradients(alive), strict=True) if has)
        return [grad for grad in found if grad is not None and is_plain(grad)]

    def _meant_by_others(self) -> Iterator[torch.Tensor]:
        yield from self._state
        for one in chain(self._alive, self._state):
            if is_dtensor(one):
                yield one
            if is_leaf(one) and one.grad is not None and is_plain(one.grad):
                yield one.grad

    def note_state(self, optimizer: OptimizerSnapshot) -> None:
        """Notes the tensors that a recorded step of an optimizer reads and writes."""
        self._state += (*optimizer.params, *optimizer.tensors)
        self._state_storages = None

    def _is_state(self, tensor: torch.Tensor) -> bool:
        if self._state_storages is None:
            self._state_storages = set(map(_storage, self._state))
        return _storage(tensor) in self._state_storages

    # Memory that others may write to.

    def note_result(self, result: Any, leaves: Iterable[Any]) -> None:
        """Notes what a call has given that is not recorded: tensors, or something that may share their memory."""
        if any(result is leaf for leaf in leaves):
            return
        self.note_fresh(result)
        if not isinstance(result, (torch.Tensor, tuple, list, bool, int, float, complex, str, NoneType)):
            memory = {_storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and is_plain(leaf)}
            self.exposed.append((weakref.ref(result) if isinstance(result, np.ndarray) else None, memory))

    def is_exposed(self, tensor: torch.Tensor) -> bool:
        """Whether an array, or something else that is no tensor, may be on the memory of a tensor."""
        if not self.exposed or not is_plain(tensor):
            return False
        memory = _storage(tensor)
        return any(memory in held and (who is None or who() is not None) for who, held in self.exposed)

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on memory that is not torch's own: of an array, of another process."""
        if not is_plain(tensor) or tensor.requires_grad or tensor.device.type != "cpu":
            return False
        return not tensor.untyped_storage().resizable() or self.is_exposed(tensor)

    def operand(self, leaf: Any) -> Operand:
        """A leaf of the arguments of a call, as a record holds it."""
        if isinstance(leaf, torch.Tensor):
            value = self.value_of(leaf)
            return Operand(VALUE, *value) if value is not None else Operand(EXTERNAL, self._external(leaf))
        if is_number(leaf):
            self.numbers.append(leaf)
            return Operand(NUMBER, len(self.numbers) - 1)
        return Operand(CONSTANT, leaf, type(leaf))

    def module_operand(self, leaf: Any) -> Operand:
        """A leaf of the arguments of a module that is one record: its Python may ask a number anything."""
        return Operand(CONSTANT, leaf, type(leaf)) if type(leaf) in (int, float) else self.operand(leaf)

    def add_module(self, module: OpaqueModule) -> int:
        """Takes up the tensors of a module whose call is recorded. Returns how many from outside there are then."""
        new, start = module.tensors, len(self.externals)
        if self._index.keys().isdisjoint(module.ids):
            self._index.update(module.places_from(start))
        else:
            new = tuple(one for one in new if id(one) not in self._index)
            self._index.update(zip(map(id, new), count(start), strict=False))
        self.externals += new
        self._alive += new
        self.had_grad += have_gradients(new)
        self._blocks.append((start, new))
        return len(self.externals)

    @property
    def loose(self) -> list[torch.Tensor]:
        """The tensors from outside that are not a module's."""
        found, end = [], 0
        for start, block in self._blocks:
            found += self.externals[end:start]
            end = start + len(block)
        return found + self.externals[end:]

    def _memory(self) -> set[int]:
        """What memory the tensors from outside are on."""
        for _, block in self._blocks[self._blocks_looked_at :]:
            self._storages.update(map(_storage, block))
        self._blocks_looked_at = len(self._blocks)
        return self._storages

    def _external(self, tensor: torch.Tensor) -> int:
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self.externals)
            copies = self.copies_shared and not tensor.requires_grad and self.is_shared(tensor)
            self.externals.append(tensor.clone() if copies else tensor)
            self._alive.append(tensor)
            self.had_grad.append(is_leaf(tensor) and tensor.grad is not None)
            self._storages.add(_storage(tensor))
        return index

    def own(self, index: int) -> torch.Tensor:
        """The tensor from outside with this number itself, and not the copy that calls are given."""
        return self._alive[index]

    def matches(self, path: Path, fast: FastRecord, leaves: Sequence[Any]) -> bool:
        """Whether leaves are the operands of a record; takes them up if they are. False where it is not sure."""
        num_externals, numbers, asked = len(self.externals), len(self.numbers), path.had_grad
        for operand, leaf in zip(fast.operands, leaves, strict=True):
            kind, key = operand.kind, operand.key
            if kind is BLOCK:
                if type(leaf) is not operand.detail or not self._is_block(key, leaf):
                    break
            elif kind is VALUE:
                found = self._values.get(id(leaf))
                if found is None or found[1] != (key, operand.detail) or type(leaf) is not Handle:
                    break
            elif kind is EXTERNAL:
                if key < len(self.externals):
                    had = self.had_grad[key]
                    if self._alive[key] is not leaf:
                        break
                elif id(leaf) in self._index or not self._is_new(path, key, leaf):
                    break
                else:
                    self.copies_shared = True
                    self._external(leaf)
                    had = self.had_grad[key]
                if asked and asked.get(key, had) is not had:
                    break
            elif kind is NUMBER:
                if type(leaf) not in (float, int) or not path.takes_number(key, leaf):
                    break
                self.numbers.append(leaf)
            elif leaf is not key and (type(leaf) is not operand.detail or leaf != key):
                break
        else:
            return True
        self.forget_since((num_externals, numbers))
        return False

    def _is_new(self, path: Path, number: int, leaf: Any) -> bool:
        """Whether this is the tensor from outside with this number, which the run has not met before."""
        known = path.externals[number]
        if type(known) is not Description:  # what comes in its place may be no tensor
            return leaf is known and known.requires_grad and self._is_taken(path, number, known)
        is_data = type(leaf) is torch.Tensor and gradient_node(leaf) is None and leaf.layout is torch.strided
        return is_data and self.value_of(leaf) is None and self._is_taken(path, number, leaf)

    def _is_taken(self, path: Path, number: int, tensor: torch.Tensor) -> bool:
        return path.takes_external(number, tensor, self.flags.kind_at_first(tensor))

    def _is_block(self, numbers: tuple[int, ...], leaves: Sequence[Any]) -> bool:
        """Whether tensors are those from outside with these numbers, which this run has met before."""
        if len(numbers) != len(leaves) or max(numbers) >= len(self._alive):
            return False
        return all(map(is_, leaves, map(self._alive.__getitem__, numbers)))

    def length(self) -> tuple[int, int]:
        """How many tensors from outside and numbers there are; for `forget_since`."""
        return len(self.externals), len(self.numbers)

    def forget_since(self, length: tuple[int, int]) -> None:
        """Takes back the operands of a call that is not recorded."""
        num_externals, num_numbers = length
        while self._blocks and self._blocks[-1][0] >= num_externals:
            self._blocks.pop()
        self._blocks_looked_at = min(self._blocks_looked_at, len(self._blocks))
        for tensor in self._alive[num_externals:]:
            del self._index[id(tensor)]
            self._storages.discard(_storage(tensor))
        del self.externals[num_externals:], self._alive[num_externals:], self.had_grad[num_externals:]
        del self.numbers[num_numbers:]

    def fits(self, path: Path, operand: Operand) -> bool:
        """Whether an operand of this run may stand where a path has its own."""
        if operand.kind == EXTERNAL:
            index = operand.key
            had = self.had_grad[index]
            return self._is_taken(path, index, self.externals[index]) and path.had_grad.get(index, had) is had
        return operand.kind != NUMBER or path.takes_number(operand.key, self.numbers[operand.key])

    def on_memory_of(self, tensors: Sequence[torch.Tensor]) -> tuple[Operand, ...]:
        """The values that somebody holds and the tensors from outside that are on the memory of these, or are these."""
        if not tensors:
            return ()
        memory = {_storage(one) for one in tensors if is_plain(one)}

        def is_on_it(tensor: torch.Tensor) -> bool:
            return any(tensor is one for one in tensors) or (is_plain(tensor) and _storage(tensor) in memory)

        values = [Operand(VALUE, *value) for value, one in self.alive().items() if is_on_it(one)]
        return (*values, *(Operand(EXTERNAL, index) for index, one in enumerate(self._alive) if is_on_it(one)))

    def is_gradient(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether any of these is on the memory of a gradient of a tensor that the run knows."""
        memory = {_storage(one) for one in tensors if is_plain(one)}
        if not memory:
            return False
        leaves = (one for one in chain(self._alive, self.alive().values()) if is_leaf(one))
        grads = (leaf.grad for leaf in leaves)
        return any(grad is not None and is_plain(grad) and _storage(grad) in memory for grad in grads)

    # Tensors that are others at every call.

    def note_fresh(self, result: Any) -> None:
        """Notes tensors that this call has made, or was given. They are kept, so that their ids stay theirs."""
        if isinstance(result, torch.Tensor):
            self._fresh[id(result)] = result
        elif isinstance(result, (tuple, list)):
            for item in result:
                self.note_fresh(item)

    def described(self) -> list[torch.Tensor | Description]:
        """The tensors from outside as a path holds them: state by itself, fresh ones by their kind."""
        return [
            Description.of(one) if id(one) in self._fresh or self.is_shared(one) else one for one in self._alive
        ]  # fmt: skip


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own kind."""
    return type(tensor) is not Handle and tensor.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    """What tells memory apart: where it begins, as DLPack gives it another storage. A DTensor is where its part is."""
    storage = local_tensor(tensor).untyped_storage()
    return int(storage.data_ptr() or storage._cdata)
