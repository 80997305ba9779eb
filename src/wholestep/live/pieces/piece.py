"""A piece: records of a path between two reads, as the source of an ordinary step that the stages compile."""

from __future__ import annotations

import functools
import linecache
import operator
import re
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from wholestep.live.opaque.modules import OpaqueModule
from wholestep.live.pieces.shared_calls import SharedCalls
from wholestep.live.recording.modes import block_of, casts_kept, has_casts, under
from wholestep.live.recording.path import BACKWARDS, SIZE_VARIES, VARIES, Path
from wholestep.live.recording.record import CONSTANT, EXTERNAL, NUMBER, VALUE, Operand, Record, Value
from wholestep.live.recording.structure import LEAF, Structure, rebuilt

_LITERALS = (bool, int, str, type(None))


@dataclass(frozen=True, slots=True)
class Piece:
    """A function ``(inputs, numbers, sizes) -> wanted values`` and what it is called with."""

    function: Callable[[list[torch.Tensor], list[float], list[torch.Tensor]], list[torch.Tensor]]
    source: str
    earlier: tuple[Value, ...]
    """Values of earlier pieces among the inputs; they come first."""
    externals: tuple[int, ...]
    """Tensors from outside among the inputs, after those."""
    numbers: tuple[int, ...]
    """Floats that vary, in the order of the argument."""
    sizes: tuple[int, ...]
    """Ints that vary. Each comes as the size of a tensor without elements, see `size_carrier`: sizes are symbols of a
    graph, ints that shapes depend on are constants."""
    shared: SharedCalls
    """What of it other ranks take part in."""


@dataclass(frozen=True, slots=True)
class PieceSpec:
    """Which records of a path are a piece, and what it gives."""

    span: tuple[int, int]
    wanted: tuple[Value, ...]
    skipped: frozenset[int] = frozenset()
    """Records in between that are no part of it."""
    leaves: tuple[Value, ...] = ()
    """Values whose ``.grad`` it gives, before what is wanted."""


def size_carrier(number: int) -> torch.Tensor:
    """A tensor without elements from whose shape ``shape[0] - shape[1]`` a piece reads an int that varies."""
    return torch.empty((max(number, 0), max(-number, 0)))


def make_piece(name: str, path: Path, spec: PieceSpec) -> Piece:
    """Writes records of a path as a function. It has this name, so that ranks whose pieces differ meet by it."""
    return _Writer(name, path, spec).write()


class _Writer:
    def __init__(self, name: str, path: Path, spec: PieceSpec) -> None:
        name = "".join(letter if letter.isalnum() else "_" for letter in name).strip("_") or "step"
        self._name, self._path, self._span = name, path, spec.span
        self._skipped = spec.skipped
        self._results = [*(f"{_name(value)}.grad" for value in spec.leaves), *map(_name, spec.wanted)]
        operands = (one for record in path.records[slice(*spec.span)] for one in record.operands)
        self._used = {*spec.leaves, *spec.wanted, *((one.key, one.detail) for one in operands if one.kind == VALUE)}
        self._earlier: dict[Value, None] = {}
        self._inputs: dict[int, None] = {}
        self._state: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        self._optimizers: list[Optimizer] = []
        self._numbers: dict[int, None] = {}
        self._sizes: dict[int, None] = {}
        self._scope: dict[str, Any] = {
            "rebuilt": rebuilt, "modes": under, "casts_kept": casts_kept, "leaves": pytree.tree_leaves,
        }  # fmt: skip
        self._lines: list[str] = []

    def write(self) -> Piece:
        first, last = self._span
        numbered = [(n, self._path.records[n]) for n in range(first, last) if n not in self._skipped]
        for _, block in groupby(numbered, lambda one: block_of(one[1].key.modes)):
            self._write_block(list(block))
        self._lines.append(f"    return [{', '.join(self._results)}]")
        header = [f"    {_name(value)} = inputs[{place}]" for place, value in enumerate(self._earlier)]
        start = len(self._earlier)
        header += [f"    x{index} = inputs[{place}]" for place, index in enumerate(self._inputs, start)]
        header += [f"    p{index} = state[{place}]" for index, place in self._state.items()]
        header += [f"    n{n} = sizes[{i}].shape[0] - sizes[{i}].shape[1]" for i, n in enumerate(self._sizes)]
        body = "\n".join([*header, *self._lines, ""])
        source = f"def {self._name}(inputs, numbers, sizes):\n{body}"
        return Piece(
            self._compiled(source), source, tuple(self._earlier), tuple(self._inputs), tuple(self._numbers),
            tuple(self._sizes), SharedCalls.of(self._path, (number for number, _ in numbered)),
        )  # fmt: skip

    def _write_block(self, records: list[tuple[int, Record]]) -> None:
        """Records of one block of autocast, or of none."""
        begin = "    "
        if any(has_casts(record.key.modes) for _, record in records):
            self._lines.append(f"{begin}with casts_kept(None):")
            begin += "    "
        backwards = accumulate((record.key.function in BACKWARDS for _, record in records), initial=0)
        numbered = zip(records, backwards, strict=False)
        # What a backward reduces is awaited no more, so the modes are set anew after it.
        for (modes, _), group in groupby(numbered, lambda one: (one[0][1].key.modes, one[1])):
            self._lines.append(f"{begin}with modes({self._constant(modes)}):")
            for (number, record), _ in group:
                self._lines.append(f"{begin}    {self._statement(number)}  # {record.line}")

    def _compiled(self, source: str) -> Callable[..., Any]:
        file = f"{self._name}_{zlib.crc32(source.encode()):08x}.py"
        lines = source.splitlines(keepends=True)
        linecache.cache[file] = (len(source), None, lines, file)  # so that tracebacks show it
        self._scope |= {"state": self._tensors, "optimizers": self._optimizers, "__name__": file.removesuffix(".py")}
        exec(compile(source, file, "exec"), self._scope)
        function: Callable[..., Any] = self._scope[self._name]
        return function

    def _statement(self, number: int) -> str:
        record = self._path.records[number]
        operands = iter(record.operands)
        _, (args, kwargs) = record.key.structure
        arguments = [self._expression(item, operands) for item in args[1]]
        for name, item in zip(kwargs[1], kwargs[2], strict=True):
            arguments.append(f"{name}={self._expression(item, operands)}")
        call = f"{self._function(record.key.function)}({', '.join(arguments)})"
        targets = [
            _name((number, output)) if meta is not None and meta.alias is None else "_"
            for output, meta in enumerate(record.outputs[: record.num_returned])
        ]
        for output, leaf in enumerate(record.joins, record.num_returned):
            call += f"; {_name((number, output))} = {self._operand(record.operands[leaf])}"
        for output, value in enumerate(record.brings, record.num_returned + len(record.joins)):
            if (number, output) in self._used:  # else nobody may hold it, nor what it was
                call += f"; {_name((number, output))} = {self._operand(Operand(VALUE, *value))}"
        if set(targets) <= {"_"}:
            return call
        if isinstance(record.key.function, OpaqueModule):
            return f"[{', '.join(targets)}] = leaves({call})"
        return f"{_target(record.output_structure, iter(targets))} = {call}"

    def _expression(self, structure: Structure, operands: Any) -> str:
        if structure is LEAF:
            return self._operand(next(operands))
        kind = structure[0]
        items = [self._expression(item, operands) for item in structure[-1]]
        if kind is dict:
            pairs = zip(structure[1], items, strict=True)
            return "{" + ", ".join(f"{self._constant(key)}: {item}" for key, item in pairs) + "}"
        if kind is tuple:
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if kind is list:
            return f"[{', '.join(items)}]"
        return f"rebuilt({self._constant(kind)}, [{', '.join(items)}])"

    def _operand(self, operand: Operand) -> str:
        if operand.kind == VALUE:
            value = (operand.key, operand.detail)
            if value[0] < self._span[0]:
                self._earlier[value] = None
            return _name(value)
        if operand.kind == EXTERNAL:
            return self._external(operand.key)
        if operand.kind == NUMBER:
            number = self._path.numbers[operand.key]
            if number is VARIES:
                self._numbers.setdefault(operand.key)
                return f"numbers[{list(self._numbers).index(operand.key)}]"
            if number is SIZE_VARIES:
                self._sizes.setdefault(operand.key)
                return f"n{operand.key}"
            return self._constant(number)
        assert operand.kind == CONSTANT
        return self._constant(operand.key)

    def _external(self, index: int) -> str:
        external = self._path.externals[index]
        if not isinstance(external, torch.Tensor):
            self._inputs[index] = None
            return f"x{index}"
        if index not in self._state:
            self._state[index] = len(self._tensors)
            self._tensors.append(external)
        return f"p{index}"

    def _constant(self, value: Any) -> str:
        if isinstance(value, Optimizer):
            if value not in self._optimizers:
                self._optimizers.append(value)
            return f"optimizers[{self._optimizers.index(value)}]"
        if type(value) in _LITERALS:
            return repr(value)
        return self._in_scope("c", value)

    def _function(self, function: Callable[..., Any]) -> str:
        called = function.module if isinstance(function, OpaqueModule) else _as_python_calls(function)
        return self._in_scope(_identifier(function), called)

    def _in_scope(self, stem: str, value: Any) -> str:
        name, count = stem, 0
        while name in self._scope and not _is_same(self._scope[name], value):
            count += 1
            name = f"{stem}_{count}"
        self._scope[name] = value
        return name


def _is_same(one: Any, other: Any) -> bool:
    """A number of numpy compares itself with each item of a tuple."""
    return one is other or (type(one) is type(other) and bool(one == other))


def _name(value: Value) -> str:
    return f"v{value[0]}_{value[1]}"


@functools.cache
def _attribute(name: str) -> Callable[..., Any]:
    return operator.attrgetter(name)


def _as_python_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call as the step makes it: an attribute is that of the tensor's class, at which a capture may look."""
    descriptor = getattr(function, "__self__", None)
    if isinstance(descriptor, types.GetSetDescriptorType) and function.__name__ == "__get__":
        return _attribute(descriptor.__name__)
    return function


def _identifier(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):  # of an attribute of tensors: which one stands on the descriptor
        name = f"{getattr(getattr(function, '__self__', None), '__name__', 'attribute')}{name}"
    return f"call_{re.sub(r'[^0-9A-Za-z]+', '_', name).strip('_')}"  # an operator of torch.ops has a dot in its name


def _target(structure: Structure, names: Any) -> str:
    if structure is LEAF:
        return str(next(names))
    items = [_target(item, names) for item in structure[-1]]
    return f"[{', '.join(items)}]"
