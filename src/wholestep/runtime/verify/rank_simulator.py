"""Runs a program for several virtual ranks in one process, node by node, all ranks in step.

Every rank has values of its own; a collective is computed across the values of its group (`across`).
What a real group does behind the back of the program is checked here, and never happens to be right:

[Note: under way]
From its start to its wait a collective is under way. Its result must not be read before the wait, by whatever name;
a collective in place also owns the memory of its argument, and one that reads its argument late (an all-gather) must
find it unchanged. A virtual rank computes at the start, so a program that breaks this would get right numbers here
and wrong ones on a real group. So a result is a `Pending` until its wait, memory that is under way is known by
address, and each call is looked at before it runs.

Not ``LocalTensorMode`` of torch: ordinary tensors in a list per node, so each rank has its own random numbers, and
what runs is what a real rank would run.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from wholestep.errors import ConfigError, InternalError, VerificationError
from wholestep.ir import node_meta, op_info, printer
from wholestep.ir.ops.collectives import BARRIER
from wholestep.ir.ops.dispatch_guard import without_autocast
from wholestep.ir.program import MeshAxis, Program
from wholestep.passes.analysis.alias_analysis import COPY_FIRST
from wholestep.runtime.verify.collective_semantics import RULES

Observer = Callable[[fx.Node, list[Any], list[Any]], None]
"""Is told of each call that has run: the node, its positional arguments and what it gave, by rank."""

_SILENT = frozenset({"aten", "prims", "_c10d_functional"})
"""Namespaces whose operators draw random numbers only where their tags say so."""


class RankGenerators:
    """A stream of random numbers per virtual rank: that of a process which called ``torch.manual_seed(seeds[rank])``.

    The generators of the CPU, and of `device` where it is a GPU, are those of a rank while it draws.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        devices = [torch.device("cpu"), *([device] if device.type == "cuda" else [])]
        self._devices = devices
        self._states = [[torch.Generator(one).manual_seed(seed).get_state() for one in devices] for seed in seeds]
        self._first = list(self._states)

    def copy(self) -> RankGenerators:
        """Generators in the same state, which advance independently."""
        made = copy.copy(self)
        made._states = list(self._states)  # a state is replaced, never written to
        return made

    @property
    def have_advanced(self) -> bool:
        """Whether any rank has drawn since the beginning."""
        pairs = zip(self._states, self._first, strict=True)
        return any(not torch.equal(a, b) for now, then in pairs for a, b in zip(now, then, strict=True))

    @contextmanager
    def active(self, rank: int) -> Iterator[None]:
        """While open, the global generators are those of `rank`; afterwards they are as they were."""
        before = [_generator_state(device) for device in self._devices]
        _set_generators(self._devices, self._states[rank])
        try:
            yield
        finally:
            self._states[rank] = [_generator_state(device) for device in self._devices]
            _set_generators(self._devices, before)


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generators(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> None:
    for device, state in zip(devices, states, strict=True):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


def rank_blocks(axis: MeshAxis, num_ranks: int) -> list[list[int]]:
    """The groups that `axis` divides the virtual ranks into, each in rank order; see *names of groups* in
    `wholestep.capture.scalars.rank_symbols`.

    Raises:
        ConfigError: for a group that is no block of such a division: ranks outside of it run another program.
    """
    everyone = list(range(num_ranks))
    if axis.size == num_ranks:
        return [everyone]
    stride = axis.name.removeprefix("stride ").split(" ")[0]
    if axis.ranks is None and stride != axis.name and num_ranks % (axis.size * int(stride)) == 0:
        step, span = int(stride), axis.size * int(stride)
        firsts = [first for first in everyone if first % span < step]
        return [[first + i * step for i in range(axis.size)] for first in firsts]
    raise ConfigError(
        f"The step communicates over the group {axis.name!r} of {axis.size} ranks, which does not divide {num_ranks} "
        f"virtual ranks. Virtual ranks run the program of this process, so every rank must be in such a group: ask for "
        f"as many virtual ranks as there are processes, and leave out groups that some ranks are not in."
    )


@dataclass(slots=True, eq=False)
class Pending:
    """A result on one rank, from the start of its collective to its wait."""

    start: fx.Node
    value: torch.Tensor
    exclusive: tuple[tuple[int, int], ...]
    """Memory that nobody may read or write: from one address up to another."""
    read_only: tuple[tuple[int, int], ...]
    """Memory that nobody may write."""
    sent: Any = None
    """What is read until the wait: it lives as long, so that nothing else gets its memory."""
    arrived: bool = False


def run(
    program: Program,
    inputs: Sequence[Sequence[Any]],
    blocks: Mapping[str, list[list[int]]],
    streams: RankGenerators,
    observer: Observer | None = None,
) -> list[tuple[Any, ...]]:
    """Runs a placed or a scheduled program; gives the results of each rank, in the order of the program's records.

    Args:
        program: what each rank runs. A scheduled program writes to its inputs.
        inputs: per rank, the flat inputs.
        blocks: per process group in the program, the ranks of each group of that name.
        streams: the random numbers of each rank; they move on.
        watch: is told of each call.

    Raises:
        VerificationError: for a value that is used before its wait, with the node and the user's line.
    """
    with without_autocast():
        return _Run(program, inputs, blocks, streams).run(observer)


class _Run:
    def __init__(
        self,
        program: Program,
        inputs: Sequence[Sequence[Any]],
        blocks: Mapping[str, list[list[int]]],
        streams: RankGenerators,
    ) -> None:
        self.program, self.inputs, self.blocks, self.streams = program, inputs, blocks, streams
        self.ranks = range(len(inputs))
        self.values: dict[fx.Node, list[Any]] = {}
        self.under_way: list[Pending] = []
        """Of rank 0: all ranks make the same calls on the same places."""

    def run(self, observer: Observer | None) -> list[tuple[Any, ...]]:
        for index, node in enumerate(self.program.placeholders):
            self.values[node] = [flat[index] for flat in self.inputs]
        num_readers = {node: len(node.users) for node in self.program.graph.nodes}
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = [printer.attribute(self.program.module, str(node.target))] * len(self.ranks)
            elif node.op == "call_function":
                calls = [self._arguments(node, rank) for rank in self.ranks]
                found = self._call(node, calls)
                if observer is not None:
                    observer(node, [args for args, _ in calls], found)
                if num_readers[node]:
                    self.values[node] = found
                for arg in node.all_input_nodes:
                    num_readers[arg] -= 1
                    if not num_readers[arg]:
                        del self.values[arg]
        self._check_all_waited()
        results = self.program.results
        return [tuple(self._result(one, rank) for one in results) for rank in self.ranks]

    def _call(self, node: fx.Node, calls: list[Any]) -> list[Any]:
        if node.target is op_info.WAIT:
            return [self._complete(args[0]) for args, _ in calls]
        self._check_access(node, *calls[0])
        if node.target is BARRIER:
            return [None for _ in calls]
        if op_info.is_collective(node):
            return self._start(node, calls)
        draws = isinstance(node.target, torch._ops.OpOverload) and (
            op_info.is_random(node.target) or node.target.namespace not in _SILENT
        )
        found = []
        for rank, (args, kwargs) in enumerate(calls):
            try:
                if draws:
                    with self.streams.active(rank):
                        found.append(node.target(*args, **kwargs))  # type: ignore[operator]
                else:
                    found.append(node.target(*args, **kwargs))  # type: ignore[operator]
            except Exception as error:
                error.add_note(f"on virtual rank {rank}, while running {node_text(node)}")
                raise
        return found

    def _arguments(self, node: fx.Node, rank: int) -> Any:
        """Positional and named arguments of one rank. Only waits, and items of a list, see what is under way."""
        may_wait = node.target in (op_info.WAIT, operator.getitem)

        def value(arg: fx.Node) -> Any:
            found = self.values[arg][rank]
            return found if may_wait else _waited_value(found, node)

        return fx.map_arg((node.args, node.kwargs), value)

    def _complete(self, value: Any) -> Any:
        if isinstance(value, Pending):
            value.arrived, value.sent = True, None
            self.under_way = [one for one in self.under_way if one is not value]
            return value.value
        return value

    def _start(self, node: fx.Node, calls: Sequence[Any]) -> list[Any]:
        rule = RULES.get(node.target)
        if rule is None:
            raise InternalError(f"virtual ranks have no arithmetic for {node.target} ({node.name})")
        group = str(node.args[-1])
        if group not in self.blocks:
            raise InternalError(f"{node.name} ({node.target}) uses the group {group!r}, which is no axis of the mesh")
        found: list[Any] = [None for _ in calls]
        for block in self.blocks[group]:
            for rank, result in zip(block, rule([calls[rank][0] for rank in block]), strict=True):
                found[rank] = _pending(node, result, calls[rank][0][0])
        self.under_way += found[0] if isinstance(found[0], list) else [found[0]]
        return found

    def _check_access(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """Refuses a call that reads or writes what is under way."""
        if not self.under_way or not isinstance(node.target, torch._ops.OpOverload):
            return
        if op_info.reads_no_values(node.target):
            return
        named = op_info.argument_names(node.target)
        written = {named[i] for i in op_info.written_by(node.target, node.kwargs)}
        for name, arg in [*zip(named, args, strict=False), *kwargs.items()]:
            for tensor in node_meta.tensors_in(arg):
                span = _span(tensor)
                for one in self.under_way:
                    if any(map(_overlaps(span), one.exclusive)):
                        raise _access_before_wait(node, one.start, "writes to" if name in written else "reads")
                    if name in written and any(map(_overlaps(span), one.read_only)):
                        raise _access_before_wait(node, one.start, "writes to what is sent by", is_input=True)

    def _result(self, one: Any, rank: int) -> Any:
        value = self.values[one][rank] if isinstance(one, fx.Node) else one
        return value.value if isinstance(value, Pending) else value  # the caller waits

    def _check_all_waited(self) -> None:
        returned = {id(self.values[one][0]) for one in self.program.results if isinstance(one, fx.Node)}
        for one in self.under_way:
            if one.exclusive and id(one) not in returned:
                raise VerificationError(
                    f"{node_text(one.start)} is never waited for, so the step ends while it may still write. "
                    f"A pass has dropped its wait."
                )


def _pending(node: fx.Node, result: Any, given: Any) -> Any:
    in_place, late = bool(op_info.mutated_args(node.target)), node.target not in COPY_FIRST

    def one(value: torch.Tensor, sources: Any) -> Pending:
        read_only = tuple(map(_span, node_meta.tensors_in(sources))) if late and not in_place else ()
        exclusive = (_span(value),) if in_place else ()
        return Pending(node, value, exclusive, read_only, sent=sources if read_only else None)

    if not isinstance(result, list):
        return one(result, given)
    return [one(value, source) for value, source in zip(result, given, strict=True)]


def _waited_value(value: Any, reader: fx.Node) -> Any:
    if isinstance(value, Pending):
        if not value.arrived:
            raise _access_before_wait(reader, value.start, "reads")
        return value.value
    if isinstance(value, list) and any(isinstance(one, Pending) for one in value):
        return [_waited_value(one, reader) for one in value]
    return value


def _access_before_wait(reader: fx.Node, start: fx.Node, does: str, *, is_input: bool = False) -> VerificationError:
    what = f"{does} {start.name}" if is_input else f"{does} the result of {start.name}"
    return VerificationError(
        f"{node_text(reader)} {what} before the wait for it: on a real group it would meet memory that is still under "
        f"way. {start.name} is {node_text(start)}. A pass has moved the wait after a reader, or the reader before it."
    )


def node_text(node: fx.Node) -> str:
    """``add_3 (aten.add.Tensor, backward, blocks.0.norm, train.py:12)``: a node for people."""
    origin = node_meta.origin(node)
    bucket = node_meta.bucket(node)
    carries = f"gradients of {', '.join(bucket.members)}" if bucket else ""
    parts = [str(node.target), carries, origin.region.value, origin.module, origin.source]
    return f"{node.name} ({', '.join(part for part in parts if part)})"


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor covers. One without strides (sparse), or without elements, covers none."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return (0, 0)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return (start, start + (reach + 1) * tensor.element_size())


def _overlaps(a: tuple[int, int]) -> Callable[[tuple[int, int]], bool]:
    """Whether another span shares an address with `a`."""
    return lambda b: a[0] < b[1] and b[0] < a[1]
