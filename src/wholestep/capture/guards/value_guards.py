"""Guards that are asked at every call: varying numbers, branches, sizes of storages, placements of gradients."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep.capture.functionalize.storage_resize import StorageSizes
from wholestep.capture.guards.guards import Call, Guard
from wholestep.capture.reach.train_state import Slot
from wholestep.capture.scalars.varying_numbers import VaryingNumbers
from wholestep.capture.sizes.size_symbols import memory_of
from wholestep.ir.dtensor.layouts import DTensorLayout
from wholestep.ir.dtensor.shards import is_dtensor


@dataclass(frozen=True, slots=True)
class VaryingNumberGuard(Guard):
    """Numbers that are inputs of the graph: each is a number of the same type still."""

    numbers: VaryingNumbers
    arguments: dict[int, Any]
    """Where those are read that stand among the arguments, by leaf: written at every call."""
    leaves: tuple[int, ...]
    """The leaves of these."""

    def why_not(self, call: Call) -> str | None:
        for leaf in self.leaves:
            self.arguments[leaf] = call.leaves[leaf]
        return self.numbers.why_not()


@dataclass(frozen=True, slots=True)
class BranchGuard(Guard):
    """Conditions on host numbers that decided what Python did in the trace."""

    function: Callable[..., Any]
    """Gives all conditions, of what `sources` read: floats as 0-d tensors."""
    sources: tuple[Callable[[], Any], ...]
    truths: tuple[bool, ...]
    lines: tuple[str, ...]
    """The user's lines."""
    _known: list[bytes] = field(default_factory=list, init=False, repr=False)
    """The bits of the numbers of the last call for which all was as in the trace: most calls have the same again."""

    def truths_for(self, numbers: Sequence[Any]) -> Sequence[bool]:
        """The conditions for what `sources` have read."""
        with torch.no_grad():
            found: Sequence[bool] = self.function(*map(_boxed, numbers))
        return found

    def why_not(self, call: Call) -> str | None:
        numbers = [source() for source in self.sources]
        bits = None if any(isinstance(one, torch.Tensor) for one in numbers) else array("d", numbers).tobytes()
        if bits is not None and bits in self._known:
            return None
        for before, after, line in zip(self.truths, self.truths_for(numbers), self.lines, strict=True):
            if before != after:
                return f"the condition at {line} was {before}, is {after}"
        if bits is not None:
            self._known[:] = [bits]
        return None


def _boxed(number: Any) -> Any:
    """A number of a parameter group as conditions on it were traced."""
    return torch.tensor(number, dtype=torch.float64, device="cpu") if type(number) is float else number


@dataclass(frozen=True, slots=True)
class StorageGuard(Guard):
    """Sizes of storages, where the step resizes some or asks for them."""

    sizes: StorageSizes

    def why_not(self, call: Call) -> str | None:
        return self.sizes.why_not(call.leaves)


@dataclass(frozen=True, slots=True)
class MemoryGuard(Guard):
    """Arguments that the step writes to: no other tensor of the graph lies in their memory, or those of the trace."""

    written: tuple[int, ...]
    """By leaf, as the next."""
    data: tuple[int, ...]
    state: tuple[torch.Tensor, ...]
    shared: frozenset[tuple[int, int]]
    """Pairs of what is written and what else lies there: leaves, and after them the places in `state`."""

    def why_not(self, call: Call) -> str | None:
        if not call.leaves:  # the state alone is asked for
            return None
        for leaf, other in sorted(sharing(self.written, self.data, call.leaves, self.state) ^ self.shared):
            of = f"argument {other}" if other < len(call.leaves) else "a tensor of the state"
            return f"argument {leaf}, which the step writes to, shares memory with {of} in one of two calls"
        return None


@dataclass(frozen=True, slots=True)
class GradientLayoutGuard(Guard):
    """Gradients at entry that are DTensors: how they are placed, of which the native guards know nothing."""

    layouts: tuple[tuple[Slot, DTensorLayout], ...]

    def why_not(self, call: Call) -> str | None:
        for slot, then in self.layouts:
            grad = slot.tensor.grad
            if is_dtensor(grad) and (now := DTensorLayout.of(grad)) != then:
                return f"the gradient of {slot.name} at entry was placed as {then.placements}, is {now.placements}"
        return None


def sharing(
    written: Sequence[int], data: Sequence[int], leaves: Sequence[Any], state: Sequence[torch.Tensor]
) -> frozenset[tuple[int, int]]:
    """See `MemoryGuard.shared`."""
    own = {leaf: memory_of(leaves[leaf]) for leaf in written}
    others = [(leaf, memory_of(leaves[leaf])) for leaf in data]
    others += [(len(leaves) + place, memory_of(one)) for place, one in enumerate(state)]
    return frozenset(
        (leaf, other) for other, memory in others for leaf, its in own.items() if memory == its and other != leaf
    )
