"""StepContext: everything live that one call of a step involves, named and in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from wholestep.capture.python.attribute_access import AttributeAccess, is_observable
from wholestep.capture.python.code_names import written_past_classes
from wholestep.capture.python.snapshot import Snapshot, only_reached
from wholestep.capture.reach import reachability
from wholestep.capture.reach import train_state as stating
from wholestep.capture.reach.arguments import Arguments
from wholestep.capture.reach.traced_inputs import TracedInput, traced_inputs
from wholestep.capture.reach.train_state import CutState, LazyState, TrainState
from wholestep.capture.scalars.hyperparameters import HyperparameterLifter
from wholestep.capture.scalars.varying_numbers import ScalarLocation, VaryingNumbers, VaryingValue, fits_a_box, identity
from wholestep.capture.sizes.size_symbols import SMALLEST, may_move, memory_of
from wholestep.capture.wrappers import ddp, tensor_parallel
from wholestep.capture.wrappers.fully_shard_settings import sharded_by_user, sharded_modules
from wholestep.errors import CaptureError
from wholestep.ir.program import InputKind


class StepContext:
    """What the walk found for one call, and the optimizer state that its first run would create.

    A context: an error inside takes that state back, so that a call which fails leaves nothing behind.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        varying: Collection[VaryingValue] = (),
        *,
        observed: Collection[str | type] = (),
        read: Collection[int] = (),
        cut_state: CutState | None = None,
    ) -> None:
        """Finds everything and creates the optimizer state that is missing.

        Args:
            varying: numbers and texts that change between calls; one that is not found in this call is left out.
            observed: attributes that a trace has used, as `reachability.Walker` takes them.
            read: as `read_arguments` has given them for a trace of this call.
            cut_state: of a strategy that shards the state of optimizers.

        Raises ConfigError, CaptureError and HyperparameterError for what no step may hold.
        """
        self.arguments = Arguments(args, kwargs)
        self.leaves, self.spec = self.arguments.leaves, self.arguments.spec
        self._walk = partial(reachability.find_reachable, step, args, kwargs, observed)
        self.reachable = self._walk()
        self.read, self._held = read, self._held_arguments() - {*read}
        for one in self._held:
            del self.reachable.tensors[one]
        self.attributes = AttributeAccess(self.reachable.objects, self.reachable.hidden)
        self.lazy = LazyState(list(self.reachable.optimizers.values()), cut_state)
        try:
            self.state: TrainState = stating.collect(self.reachable)
            self.managed = ddp.managed(wrapper for _, wrapper in self.reachable.wrappers.values())
            """ids of the parameters whose gradients DistributedDataParallel reduces."""
            self.unhooked = sharded_by_user(root for _, root in self.reachable.modules.values())
            """ids of parameters whose hooks eager code does not call."""
            self.sees_parts = bool(stating.parallel_parameters(self.reachable, self.state))
            """Whether a trace sees this rank's parts of DTensors, and not whole tensors in their place."""
            self.outside, self.varying = self._places_of(varying), VaryingNumbers(())
            self.count(self.outside)
            self.is_data = [isinstance(leaf, torch.Tensor) and id(leaf) not in self.state.index for leaf in self.leaves]
            """Per leaf of the arguments: whether it is a tensor that is data of this call."""
            data = [leaf for leaf, is_data in zip(self.leaves, self.is_data, strict=True) if is_data]
            self.user: list[torch.Tensor] = list({id(one): one for one in data}.values())
            """Tensors that are data, once each."""
            self.moving = self._moving_dims(varying)
            """By id of a tensor that is data, its dims that are symbols."""
            stating.check_devices(self.state, self.user)
            if self.sees_parts:
                self._check_parts()
        except BaseException:
            self.lazy.discard()
            raise

    def _check_parts(self) -> None:
        """Raises CaptureError for what no graph of parts of DTensors holds."""
        if self.reachable.wrappers or sharded_modules(root for _, root in self.reachable.modules.values()):
            raise CaptureError(
                "The step has modules of parallelize_module, and others that DistributedDataParallel or fully_shard "
                "has wrapped. A graph holds the one or the other: leave those plain, or make two steps of it."
            )
        tensor_parallel.check_parts(((slot.name, slot.tensor) for slot in self.state.slots), self.user)

    def count(self, places: Sequence[ScalarLocation]) -> None:
        """Makes inputs of the numbers in these places. Once: their boxes are the last of the state."""
        assert not self.varying.numbers
        self.varying = VaryingNumbers(places)
        self.varying.mark(self.reachable.snapshots)
        for number in self.varying.numbers:
            self.state.add(InputKind.OPTIMIZER, number.place.path, number.box)
        self.lifter = HyperparameterLifter(self.state.optimizers)

    def guarded(self, asks_tensors: bool) -> list[Snapshot]:
        """What calls are compared by: all that the trace may have read, and of objects what it has.

        `asks_tensors`: whether it has asked tensors for attributes that they do not have, and may have in a later call.
        """
        tensors = [slot.tensor for slot in self.state.slots] + [one for _, one in self.reachable.tensors.values()]
        asked = {id(vars(one)) for one in tensors} if asks_tensors else set()
        every = self.reachable.snapshots
        found = [one for one in every if one.guard]
        found += [replace(one, guard=True) for one in every if not one.guard and id(one.container) in asked]
        read = self.attributes.read
        if not read:
            return found
        unseen = written_past_classes(self.reachable.codes)
        walked = self._walk({key: names | unseen for key, names in read.items()}).snapshots
        compared = [one for one in walked if one.guard or id(one.container) in asked]
        return [*only_reached(found, compared), *self.reachable.late]

    def _held_arguments(self) -> set[int]:
        """By id the tensors among the arguments to which the walk comes as well, by way of attributes alone.

        ``trainer.batch = batch`` before ``step(batch)``. They are data of the call, unless a trace reads them there.
        """
        found = {id(one) for one in self.leaves if isinstance(one, torch.Tensor)} & self.reachable.tensors.keys()
        if not found:
            return found
        objects = self.reachable.objects.items()
        nothing: dict[int, Collection[str]] = {key: () for key, one in objects if is_observable(type(one.thing))}
        return found - self._walk(nothing).tensors.keys()

    def read_arguments(self) -> frozenset[int]:
        """By id those of them that the trace has read where they are held: they are state of the step."""
        read = self.attributes.read
        return frozenset(self._held & self._walk(read).tensors.keys()) if self._held and read else frozenset()

    def _places_of(self, varying: Collection[VaryingValue]) -> list[ScalarLocation]:
        """Where those numbers are. (A step that moves nothing is spared the search.)"""
        known = (
            set(map(identity, self.containers())) if any(isinstance(one, ScalarLocation) for one in varying) else set()
        )
        found = self.arguments.mark_varying(varying)
        found += [one for one in varying if isinstance(one, ScalarLocation) and identity(one.container) in known]
        return [place for place in found if type(place.read()) is place.kind and fits_a_box(place.read())]

    def _moving_dims(self, varying: Collection[VaryingValue]) -> dict[int, list[int]]:
        """Of plain tensors, dims whose size may be one of many."""
        found: dict[int, set[int]] = {}
        for leaf, dims in self.arguments.moving_dims(varying).items():
            tensor = self.leaves[leaf]
            if self.is_data[leaf] and may_move(tensor):
                found.setdefault(id(tensor), set()).update(dim for dim in dims if tensor.shape[dim] >= SMALLEST)
        return {key: sorted(dims) for key, dims in found.items() if dims}

    def move(self, dims: Mapping[str, Collection[int]]) -> None:
        """Has these dims be symbols, by the name of the input, and no others. Raises KeyError for one that is none."""
        named = {row.name: row.tensor for row in self.traced_inputs() if id(row.tensor) not in self.state.index}
        self.moving = {id(named[name]): sorted(some) for name, some in dims.items()}

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor lies in the memory of one with dims that move: a trace does not see it there."""
        if id(tensor) not in self.moving:
            return False
        others = (one for one in (*self.user, *(slot.tensor for slot in self.state.slots)) if one is not tensor)
        return memory_of(tensor) in map(memory_of, others)

    def containers(self) -> list[Any]:
        """Everything that may hold a number which varies, in an order that is the same in every process."""
        return [self.arguments.numbers, *(watch.container for watch in self.reachable.snapshots)]

    def __enter__(self) -> StepContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.lazy.discard()

    def module_names(self) -> dict[int, str]:
        """id of a module -> its fully qualified name."""
        return {id(m): n for root, top in self.reachable.modules.values() for n, m in _named(root, top)}

    def traced_inputs(self) -> list[TracedInput]:
        """The inputs of a trace of this call, but for the numbers of ranks."""
        return traced_inputs(self.state, self.lifter.hypers, self.user, parts=self.sees_parts)


def _named(root: str, top: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name or root, module) for name, module in top.named_modules()]
