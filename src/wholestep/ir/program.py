"""Program: the graph of a step, what each of its inputs and outputs means, and how far it has come."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from wholestep.errors import InternalError
from wholestep.ir import node_meta
from wholestep.ir.sizes import Sizes, are_same


class Stage(enum.Enum):
    """How far a program has come. `wholestep.ir.verifier` holds the rules of each stage."""

    CAPTURED = "captured"  # functional, one rank's view, gradients carry markers, knows no strategy
    PLACED = "placed"  # every collective that the strategy needs is a node; no marker is left
    SCHEDULED = "scheduled"  # the order of the nodes is the order of execution; in-place operations may exist


class InputKind(enum.Enum):
    """What a graph input means."""

    PARAM = "param"  # a parameter of a module or of an optimizer
    BUFFER = "buffer"  # a buffer of a module
    GRAD = "grad"  # the .grad that a parameter already has when the step is called
    OPTIMIZER = "optimizer"  # a tensor of optimizer.state, or a tensor in a parameter group
    TENSOR = "tensor"  # a loose tensor found in a closure, a global or an attribute
    HYPER = "hyper"  # a number of a parameter group, as a 0-d float64 CPU tensor until it is lowered
    RNG = "rng"  # state of a random generator
    RANK = "rank"  # the number of this process in a process group, as a Python int
    COMM = "comm"  # state of the communication, owned by the compiled step: what compression remembers
    USER = "user"  # a tensor in the arguments of the call


class OutputKind(enum.Enum):
    """What a graph output means."""

    USER = "user"  # a leaf of what the step returns
    WRITE = "write"  # the new value of the input numbered `target`
    GRAD = "grad"  # the .grad of the parameter numbered `target` after the call
    STATE = "state"  # optimizer state that the step created; `name` says where it goes


class Placement(enum.Enum):
    """Where the values of an input live on the mesh."""

    REPLICATE = "replicate"  # the same values on every rank
    SHARD = "shard"  # each rank has its part of the whole tensor, as `Input.shard` says
    LOCAL = "local"  # each rank has values of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """A tensor that is cut along one of its dims into as many parts as a mesh axis has ranks: DTensor's ``Shard(dim)``.

    Parts are padded at their end to the length of the first one, so that shapes are the same on every rank.
    """

    axis: str
    """Name of the mesh axis. Over all others the parts are equal."""
    num_ranks: int
    dim: int
    whole_shape: tuple[int, ...]

    @property
    def shard_length(self) -> int:
        """Length of a part along `dim`, padding included."""
        return -(-self.whole_shape[self.dim] // self.num_ranks)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of a part, padding included."""
        return (*self.whole_shape[: self.dim], self.shard_length, *self.whole_shape[self.dim + 1 :])

    def is_whole(self, shape: Sequence[Any]) -> bool:
        """Whether a tensor of this shape, whose sizes may move between calls, has the shape of the whole one."""
        return are_same(shape, self.whole_shape)

    @property
    def padding(self) -> int:
        """How much longer all parts together are along `dim` than the whole tensor."""
        return self.shard_length * self.num_ranks - self.whole_shape[self.dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One graph input, described by meaning and never by position."""

    kind: InputKind
    name: str
    """Fully qualified: ``layers.3.mlp.w1``, ``opt.exp_avg.layers.3.mlp.w1``, ``opt.groups.0.lr``, ``args.0``."""
    shape: Sizes
    """Shape of the value that the graph gets, with a `Size` for each dim of an argument that moves between calls. A
    sharded one is whole in a captured program, a part in a placed one."""
    dtype: torch.dtype
    placement: Placement = Placement.LOCAL
    shard: ShardSpec | None = None
    """How the live tensor is cut, if it is sharded."""
    trainable: bool = False
    """Whether a parameter takes part in training (``requires_grad``)."""
    freed: bool = False
    """Whether it comes without memory: its storage has 0 bytes, and nothing may read it."""
    bucket: int | None = None
    """The bucket whose communication state it is."""

    @property
    def constant_shape(self) -> tuple[int, ...]:
        """The shape of what no call moves, which is all but arguments. Raises InternalError for those that move."""
        sizes = tuple(size for size in self.shape if isinstance(size, int))
        if len(sizes) != len(self.shape):
            raise InternalError(f"{self.name} has sizes that move: {list(self.shape)}")
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One graph output. ``target`` numbers the input that a WRITE or a GRAD belongs to, else it is None."""

    kind: OutputKind
    name: str
    target: int | None = None
    shard: ShardSpec | None = None
    """How a GRAD or a STATE is cut of which the graph gives this rank's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of the device mesh as a graph sees it: a size and a group name, and no rank number."""

    name: str
    size: int
    group: str
    """Name of the process group, as functional collectives take it."""
    ranks: tuple[int, ...] | None = None
    """The ranks of the world in the group, where the axis does not divide the whole world into such groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFallback:
    """Calls of an operator outside of forward and backward that run on whole tensors, gathered for them."""

    operator: str
    count: int
    num_bytes: int
    """Of the parts that are gathered, on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """What one pass did to the program."""

    name: str
    time_ms: float
    num_nodes: int
    notes: tuple[str, ...] = ()
    """Decisions of the pass with their reasons, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A whole training step. Functional up to the last pass: it reads inputs and ends in writes.

    The graph's output node holds one flat tuple, an entry per record in `outputs`; an entry is a node or
    a plain Python constant. Nothing about a program lives anywhere else.
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    stage: Stage
    mesh: tuple[MeshAxis, ...] = ()
    """First the axis of the strategy, once the program is placed; then those that the step itself communicates over."""
    history: tuple[PassRecord, ...] = ()
    fallbacks: tuple[PlacementFallback, ...] = ()
    """What placement found no rule for that keeps tensors in parts."""

    @property
    def graph(self) -> fx.Graph:
        """The fx graph of the program."""
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        """Input nodes, in the order of `inputs`."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def host_buffers(self) -> frozenset[int]:
        """Inputs that are buffers on the CPU where parameters are on a GPU: counters, which every rank keeps itself.

        No communication between GPUs reaches them.
        """
        kinds = [(record.kind, node) for record, node in zip(self.inputs, self.placeholders, strict=True)]
        at_home = {node_meta.tensor(node).device.type for kind, node in kinds if kind is InputKind.PARAM} - {"cpu"}
        return frozenset(
            index
            for index, (kind, node) in enumerate(kinds)
            if kind is InputKind.BUFFER and at_home and node_meta.tensor(node).device.type == "cpu"
        )

    @property
    def results(self) -> tuple[Any, ...]:
        """Nodes and constants returned by the graph, in the order of `outputs`."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def with_notes(self, *notes: str) -> Program:
        """The same program with notes for the pass that is running; the runner moves them to its record."""
        return replace(self, history=(*self.history, PassRecord(name="", time_ms=0.0, num_nodes=0, notes=notes)))
