"""Records: the tensor calls of one run of a step, by function and operands. Two runs on one path have equal records."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from wholestep.live.recording.modes import Modes
from wholestep.live.recording.structure import Structure
from wholestep.util.gradient_node import gradient_node

Value = tuple[int, int]
"""One result of a recorded call: the number of the record, and which of its outputs."""


class Operand(NamedTuple):
    """One leaf of the arguments of a call. Plain tuples, since they are made and compared at every call of torch."""

    kind: str
    """VALUE, EXTERNAL, NUMBER or CONSTANT."""
    key: Any
    """The number of the record, of the external tensor or of the number; or the constant itself."""
    detail: Any = None
    """Which output of the record; the type of the constant, since ``1 == True``."""


VALUE, EXTERNAL, NUMBER, CONSTANT = "value", "external", "number", "constant"

_ATTRIBUTES: Any = torch.Tensor
SETS_REQUIRES_GRAD = (torch.Tensor.requires_grad_, _ATTRIBUTES.requires_grad.__set__)

_CONSTANTS = (
    types.NoneType, bool, int, complex, str, bytes, types.EllipsisType, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Generator, enum.Enum, Optimizer, dist.ProcessGroup,
)  # fmt: skip
"""What a record may hold as it is: equal ones make a call do the same, and none is changed by anybody meanwhile.
(Of an optimizer, which is, the record takes a snapshot.)"""


def is_constant(leaf: Any) -> bool:
    """Whether a record may hold this leaf of arguments as it is."""
    return isinstance(leaf, _CONSTANTS) or is_enumerator(leaf)


def is_enumerator(leaf: Any) -> bool:
    """Whether it is one of an enumeration in C++, as pybind11 shows them: ``dist.ReduceOp.MAX``."""
    members = getattr(type(leaf), "__members__", None)
    return isinstance(members, dict) and any(leaf is one for one in members.values())


def is_number(leaf: Any) -> bool:
    """Whether a leaf of arguments is a number that may be another one in every call."""
    return type(leaf) is int or isinstance(leaf, float)


@dataclass(frozen=True, slots=True)
class OutputMeta:
    """One tensor that a call has given."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    requires_grad: bool
    graph: str
    """The class of its ``grad_fn``, such as MeanBackward0, which its text shows; empty without one."""
    alias: int | None = None
    """The leaf of the arguments that it is, of a call in place."""
    becomes: int | None = None
    """The same where the call has put the leaf into a graph, or has it ask for a gradient, so that it is another value
    from there on."""
    views: int | None = None
    """The leaf of the arguments on whose memory it is, of a tensor of its own."""
    again: Value | None = None
    """What it was known as before: ``param.grad``, asked for twice, is one object."""

    @classmethod
    def of(
        cls, tensor: torch.Tensor, leaves: Sequence[Any], joined: Sequence[torch.Tensor], known_as: Value | None
    ) -> OutputMeta:
        """Of a tensor that a call with these arguments has returned, which has put those in `joined` into a graph."""
        alias = next((number for number, leaf in enumerate(leaves) if leaf is tensor), None)
        becomes = alias if any(tensor is one for one in joined) else None
        graph = type(node).__name__ if (node := gradient_node(tensor)) is not None else ""
        became_leaf = becomes is not None and not graph  # on the memory that it had
        return cls(
            tensor.shape, tensor.dtype, tensor.device, tuple(tensor.stride()), tensor.requires_grad, graph,
            alias if becomes is None else None, becomes,
            becomes if became_leaf else _viewed(tensor, leaves) if alias is None else None,
            known_as if alias is None else None,
        )  # fmt: skip

    def of_size(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> OutputMeta | None:
        """This one with other sizes and strides; None where it has another number of dims, dtype or device."""
        if (len(self.shape), self.dtype, self.device) != (len(shape), dtype, device):
            return None
        return replace(self, shape=torch.Size(shape), stride=tuple(stride))

    def is_of_other_size(self, other: OutputMeta) -> bool:
        """Whether both are the same but for their sizes, or the same."""
        return self.of_size(other.shape, other.stride, other.dtype, other.device) == other


def _viewed(tensor: torch.Tensor, leaves: Sequence[Any]) -> int | None:
    """The first of the leaves that is a tensor on the memory of this one."""
    if tensor.layout is not torch.strided:
        return None
    memory = tensor.untyped_storage()._cdata
    strided = (
        (n, one) for n, one in enumerate(leaves) if isinstance(one, torch.Tensor) and one.layout is tensor.layout
    )
    return next((number for number, one in strided if one.untyped_storage()._cdata == memory), None)


class Key(NamedTuple):
    """What makes two calls the same."""

    function: Callable[..., Any]
    structure: Structure
    operands: tuple[Operand, ...]
    modes: Modes


@dataclass(frozen=True, slots=True)
class Record:
    """One call, as it was seen when it ran."""

    key: Key
    outputs: tuple[OutputMeta | None, ...]
    output_structure: Structure
    drawn: tuple[torch.Generator, ...] = field(compare=False)
    """The generators of which it drew random numbers."""
    state_entries: int = field(compare=False)
    """Of the step of an optimizer: how many things the optimizer's state held after it; else 0."""
    writes: tuple[int, ...] = field(compare=False)
    """Leaves of its arguments that it has written to."""
    writes_to: tuple[Operand, ...] = field(compare=False)
    """The values and tensors from outside on the memory of those leaves, as a parameter is of its ``data``."""
    writes_grads: bool = field(compare=False)
    """Whether it has changed the gradients of its arguments or written to a gradient, and is no backward."""
    line: str = field(compare=False)
    """``train.py:12``, where the user's code made it."""
    frees: frozenset[Value] = field(default=frozenset(), compare=False)
    """Of a backward: the values whose graph it was seen to free, of those that somebody held."""
    reduces: frozenset[int] = field(default=frozenset(), compare=False)
    """Of a backward: ids of the parameters whose gradients a DistributedDataParallel was seen to reduce in it."""
    is_pointwise: bool = field(default=False, compare=False)
    """Whether it was seen to be pointwise, so that its numbers decide no shape."""
    joins: tuple[int, ...] = ()
    """Leaves of its arguments that it has put into a graph and does not return, as ``out[i] = value`` does. They come
    after what it returns in `outputs`."""
    brings: tuple[Value, ...] = ()
    """Values that are none of its arguments and came into a graph with one, which is a view of them or on the same
    memory: that of `out` in ``out[i].copy_(value)``. The last ones of `outputs`."""
    num_externals: int = field(default=0, compare=False)
    """Of a module that is one record: how many tensors from outside there are after it, its own ones among them."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The leaves of its arguments."""
        return self.key.operands

    @property
    def num_returned(self) -> int:
        """How many of `outputs` it returns."""
        return len(self.outputs) - len(self.joins) - len(self.brings)

    def before(self, output: int) -> Value | None:
        """What an output was before the call put it into a graph; None if it is new, or no value was."""
        if output >= len(self.outputs) - len(self.brings):
            return self.brings[output - len(self.outputs)]
        meta = self.outputs[output]
        operand = None if meta is None or meta.becomes is None else self.operands[meta.becomes]
        return None if operand is None or operand.kind != VALUE else (operand.key, operand.detail)

    def earlier_places(self, output: int, number: int) -> Iterator[int]:
        """The outputs before one that are the same tensor, of the record with this number."""
        meta = self.outputs[output]
        while meta is not None and meta.again is not None and meta.again[0] == number:
            yield meta.again[1]
            meta = self.outputs[meta.again[1]]

    def joined(self, other: Record) -> Record:
        """This one, which may also do what an equal call was seen to do: drop out nothing at first, and some later."""
        drawn = tuple(dict.fromkeys((*self.drawn, *other.drawn)))
        return self if drawn == self.drawn else replace(self, drawn=drawn)

    @property
    def freezes(self) -> bool:
        """Whether it sets what a tensor from outside has of ``requires_grad``, which Python may look at."""
        return self.key.function in SETS_REQUIRES_GRAD and self.operands[0].kind == EXTERNAL

    @property
    def only_views(self) -> bool:
        """Whether it may be called again for a view of what it is given: it is no module, and leaves nothing."""
        return not (self.writes or self.drawn or self.writes_grads or self.num_externals)

    def is_of_other_size(self, other: Record) -> bool:
        """Whether both are the same call, on tensors of other sizes."""
        if self.key != other.key or self.output_structure != other.output_structure:
            return False
        if (self.joins, self.brings) != (other.joins, other.brings):
            return False
        pairs = zip(self.outputs, other.outputs, strict=True)
        return all(a == b or (a is not None and b is not None and a.is_of_other_size(b)) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Description:
    """A tensor from outside that may be another one at every call."""

    shape: tuple[int | None, ...]
    """None for a dim that has another size in every call."""
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None
    """None where a dim has another size in every call."""
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Description:
        """Of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tuple(tensor.stride()), tensor.requires_grad)

    @property
    def has_moving_dims(self) -> bool:
        """Whether any dim has another size in every call."""
        return self.stride is None

    def takes(self, other: Description) -> bool:
        """Whether a tensor that the other one describes may stand here."""
        return self.common(other) is self

    def common(self, other: Description) -> Description | None:
        """What describes both, itself where it does; None where they differ in more than sizes."""
        if self == other:
            return self
        kind = len(self.shape), self.dtype, self.device, self.requires_grad
        if kind != (len(other.shape), other.dtype, other.device, other.requires_grad):
            return None
        shape = tuple(one if one == size else None for one, size in zip(self.shape, other.shape, strict=True))
        if shape == self.shape:
            return self if self.has_moving_dims else None
        return replace(self, shape=shape, stride=None)


class StateKind(NamedTuple):
    """What Python may have changed of a parameter or a buffer between calls, besides its numbers."""

    requires_grad: bool
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StateKind:
        """Of a tensor from outside. Asked once a call of the step for each."""
        return cls(tensor.requires_grad, tensor.shape, tensor.dtype, tensor.stride())


@dataclass(frozen=True, slots=True)
class Read:
    """A place of a path where Python asked for a value."""

    position: int
    """How many records there were before."""
    function: Callable[..., Any]
    line: str = field(compare=False)

    @property
    def name(self) -> str:
        """``item``, as messages call the function."""
        return name_of(self.function)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function of torch; of one that reads or writes an attribute, the attribute's."""
    name = str(getattr(function, "__name__", type(function).__name__))
    if name in ("__get__", "__set__"):
        name = str(getattr(getattr(function, "__self__", None), "__name__", name))
    return name
