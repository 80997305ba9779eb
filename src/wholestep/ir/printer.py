"""Prints programs as Python that runs, their differences, and schedules of collectives.

The same text serves people and the eager backend. A node is one line::

    def step(inputs):
        (
            w,  # param net.0.weight float32[16, 4]
            x,  # user args.0 float32[8, 16]
        ) = inputs
        mm = torch.ops.aten.mm.default(x, w)  # float32[8, 4] 128 B, forward, net.0, train.py:12
        del w, x
        return (
            mm,  # user out
        )

A name is deleted right after its last reader, so memory goes back as early as it can. Constants of the
graph (``get_attr``) are names of the namespace in which the text runs.
"""

from __future__ import annotations

import builtins
import difflib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from wholestep.errors import InternalError
from wholestep.ir import graph_edit, node_meta, op_info, sizes
from wholestep.ir.ops.collectives import BARRIER, EXCHANGE, SCATTER, group_named
from wholestep.ir.program import Input, MeshAxis, Program
from wholestep.ir.segment import Segment

_INFIX: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
    operator.eq: "==", operator.ne: "!=", operator.and_: "&", operator.or_: "|",
}  # fmt: skip
_MODULES = {"torch": torch, "operator": operator, "math": math}
_RESERVED = frozenset({*_MODULES, "step", "inputs", "boxed"})
_NAMES_PER_LINE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The text of a program, what it needs to run, and which node each line came from."""

    text: str
    namespace: dict[str, Any]
    nodes: dict[int, fx.Node]
    """Line number, counted from 1, to node."""


def source(program: Program, *, comments: bool = True) -> str:
    """The program as Python. It defines ``step(inputs)`` and runs in `namespace(program)`.

    Comments give dtype, shape, bytes, part of the step, module and the user's line of each node.
    """
    return render(program, comments=comments).text


def namespace(program: Program) -> dict[str, Any]:
    """The globals that `source(program)` needs: torch, operator, math, and the graph's constants by name."""
    return render(program, comments=False).namespace


def render(program: Program, *, comments: bool = False, short_names: bool = False) -> Rendered:
    """`source` and `namespace` in one.

    With `short_names` an operator is one global name (``aten_mm_default``) bound to the C++ function below
    the operator object, which saves four attribute look-ups and a Python frame per node; and results that are None
    at the end (writes that are done: as many as the step has state) are not returned.
    """
    return _Writer(program, comments=comments, short_names=short_names).write()


def diff(a: Program, b: Program) -> str:
    """Unified difference of the text of two programs; empty if they are the same."""
    lines = difflib.unified_diff(source(a).splitlines(), source(b).splitlines(), "before", "after", lineterm="", n=2)
    return "\n".join(lines)


def plan_text(program: Program, *, by_rank: bool = False) -> str:
    """The schedule of collectives, the same text on every rank that runs the same plan.

    One line per start, in order, with mesh axes in the place of process groups, below a header with the version of
    torch and the mesh. Ranks compare it before they talk to each other. Where a rank waits is its own affair: with
    a smaller batch there is less to do in the meantime.

    What concerns some ranks only stands in lines that begin with them, and their order counts by beginning:
    ``[0,2] all_reduce float32[8] sum`` for a group outside of which there are ranks, ``[0>1 ...]`` for a message.
    With `by_rank` every group but the world is written so: the form in which ranks are
    compared whose texts are not the same.
    """
    axes = {axis.group: axis for axis in program.mesh}
    named = program.mesh[:1] if by_rank else [axis for axis in program.mesh if axis.ranks is None]
    mesh = ", ".join(f"{axis.name}={axis.size}" for axis in named) or "none"
    lines = [f"torch {torch.__version__}", f"mesh {mesh}"]
    count = 0
    for node in program.graph.nodes:
        if node.target is EXCHANGE:
            lines += _message_lines(node, axes)
        elif op_info.is_collective(node) or node.target is BARRIER:
            axis = axes.get(str(node.args[-1]))
            where = f"axis={axis.name} size={axis.size}" if axis else f"group={node.args[-1]}"
            text = f"{_collective_text(node)} {where}{_members_text(node)}"
            ranks = axis.ranks if axis is not None else None
            if axis is not None and by_rank and axis.size < dist.get_world_size():
                ranks = tuple(dist.get_process_group_ranks(group_named(axis.group)))
            if ranks is not None:
                lines.append(f"[{','.join(map(str, ranks))}] {text}")
            else:
                lines.append(f"#{count} {text}")
                count += 1
    return "\n".join(lines) + "\n"


_SPLITS: dict[Any, tuple[int, int]] = {op_info.c10d.all_to_all_single.default: (1, 2)}
"""Arguments that say how much this rank sends and receives."""


def _collective_text(node: fx.Node) -> str:
    name = node.target._schema.name.split("::")[1].removesuffix("_")  # type: ignore[union-attr]
    own, carried = _SPLITS.get(node.target, ()), ""
    if node.target is SCATTER:
        carried = _carried_text(node.args[1])
    elif own:
        tensor = node_meta.tensor(node.args[0])  # type: ignore[arg-type]
        carried = f"{_dtype(tensor.dtype)} rows of {sizes.shape_text(tensor.shape[1:])}"
    elif node.target is not BARRIER:
        carried = "+".join(map(_carried_text, graph_edit.nodes_of(node.args[0])))
    options = (str(arg) for index, arg in enumerate(node.args[:-1]) if index and index not in own)
    words = [name, carried, *([str(node.args[2])] if node.target is SCATTER else options)]
    return " ".join(word for word in words if word)


def _carried_text(arg: Any) -> str:
    tensor = node_meta.tensor(arg)
    return f"{_dtype(tensor.dtype)}[{sizes.text(tensor.numel())}]"


def _message_lines(node: fx.Node, axes: Mapping[str, MeshAxis]) -> Iterator[str]:
    """A line per message, the same for the rank that sends it and the one that receives it."""
    tensors, sends, peers, tags, name = node.args
    group, axis = group_named(str(name)), axes.get(str(name))
    ranks = dist.get_process_group_ranks(group)
    own = ranks[group.rank()]
    for tensor, send, peer, tag in zip(tensors, sends, peers, tags, strict=True):  # type: ignore[arg-type]
        other = ranks[int(node_meta.value(peer)) if isinstance(peer, fx.Node) else peer]
        way = f"{own}>{other}" if send else f"{other}>{own}"
        yield f"[{way} {axis.name if axis else name} tag {tag}] {_carried_text(tensor)}"


def _members_text(node: fx.Node) -> str:
    bucket = node_meta.bucket(node)
    return f" members: {', '.join(bucket.members)}" if bucket else ""


class _Writer:
    """Writes one program. Collects the names that the text needs while it writes."""

    def __init__(self, program: Program, *, comments: bool, short_names: bool) -> None:
        self.program = program
        self.comments = comments
        self.short_names = short_names
        self.namespace: dict[str, Any] = dict(_MODULES)
        self.lines: list[str] = []
        self.nodes: dict[int, fx.Node] = {}
        self.names: dict[fx.Node, str] = {}
        self.locals = {node.name for node in program.graph.nodes if node.op == "call_function"}

    def write(self) -> Rendered:
        graph = self.program.graph
        self.lines.append("def step(inputs):")
        self._take_inputs()
        dying = _last_reads(graph)
        for node in graph.nodes:
            if node.op == "get_attr":
                self.namespace[self._name(node)] = attribute(self.program.module, str(node.target))
            elif node.op == "call_function":
                self._call(node, dying.get(node, []))
        self._return()
        text = "\n".join(self.lines) + "\n"
        return Rendered(text=text, namespace=self.namespace, nodes=self.nodes)

    def _take_inputs(self) -> None:
        names = [self._name(node) for node in self.program.placeholders]
        if self.comments:
            records = zip(names, self.program.inputs, strict=True)
            rows = [f"{name},  # {_input_text(record)}" for name, record in records]
        else:
            starts = range(0, len(names), _NAMES_PER_LINE)
            rows = [f"{', '.join(names[start : start + _NAMES_PER_LINE])}," for start in starts]
        self.lines += ["    (", *(f"        {row}" for row in rows), "    ) = inputs"]

    def _return(self) -> None:
        if not self.comments:
            results = list(self.program.results)
            while self.short_names and results and results[-1] is None:
                results.pop()
            self.lines.append(f"    return {self._value(tuple(results))}")
            return
        pairs = zip(self.program.results, self.program.outputs, strict=True)
        rows = [f"        {self._value(result)},  # {output.kind.value} {output.name}" for result, output in pairs]
        self.lines += ["    return (", *rows, "    )"]

    def _call(self, node: fx.Node, dying: Sequence[fx.Node]) -> None:
        release = [f"    del {', '.join(map(self._name, dying))}"] if dying else []
        if isinstance(node.target, Segment):  # it alone holds what dies in it, and lets it go
            self.lines += [f"    boxed = {self._value(list(node.args))}", *release]
            text, release = f"{self._callable(node.target)}(boxed)", []
        else:
            text = self._call_text(node)
        line = f"    {self._name(node)} = {text}" if node.users else f"    {text}"
        self.lines.append(line + (f"  # {_comment(node)}" if self.comments else ""))
        self.nodes[len(self.lines)] = node
        self.lines += release

    def _call_text(self, node: fx.Node) -> str:
        args = [self._value(arg) for arg in node.args]
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        if node.target in _INFIX and len(args) == 2:
            return f"{_operand(args[0])} {_INFIX[node.target]} {_operand(args[1])}"
        if node.target is operator.neg:
            return f"-{_operand(args[0])}"
        args += [f"{key}={self._value(arg)}" for key, arg in node.kwargs.items()]
        return f"{self._callable(node.target)}({', '.join(args)})"

    def _callable(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.split("::")[1]
            if self.short_names:
                return self._bind(f"{target.namespace}_{name}_{target._overloadname}", target._op)
            return f"torch.ops.{target.namespace}.{name}.{target._overloadname}"
        name = getattr(target, "__name__", "")
        for module_name, module in _MODULES.items():
            if name and getattr(module, name, None) is target:
                return f"{module_name}.{name}"
        if name and getattr(builtins, name, None) is target:
            return name
        return self._bind(name if name.isidentifier() else type(target).__name__, target)

    def _bind(self, name: str, thing: Any) -> str:
        """A global name for `thing`: `name`, with underscores after it while something else has that name."""
        while (
            name in _RESERVED
            or name in self.locals
            or self.namespace.get(name, thing) is not thing
            or hasattr(builtins, name)
        ):
            name += "_"
        self.namespace[name] = thing
        return name

    def _name(self, node: fx.Node) -> str:
        if node not in self.names:
            name = node.name
            while name in _RESERVED:
                name += "_"
            self.names[node] = name
        return self.names[node]

    def _value(self, value: Any) -> str:
        """An argument as Python. What Python cannot spell becomes a name of the namespace."""
        if isinstance(value, fx.Node):
            return self._name(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._value(one)}, ' for one in value).rstrip()})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._value(one)}' for key, one in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        return _plain(value) or self._bind(f"_{type(value).__name__}_{len(self.namespace)}", value)


def _plain(value: Any) -> str | None:
    """A number, a string, or one of torch's constants as Python; None for anything else."""
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        name = "nan" if math.isnan(value) else "inf"
        return repr(value) if math.isfinite(value) else f"{'-' if value < 0 else ''}math.{name}"
    if isinstance(value, complex):
        return f"complex({_plain(value.real)}, {_plain(value.imag)})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise InternalError(f"the symbolic number {value} stands in a graph as itself, not as a node")
    return None


def _operand(text: str) -> str:
    """Parentheses where a minus would bind less tightly than the operator: ``(-2) ** x``."""
    return f"({text})" if text.startswith("-") else text


def _last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each call, the values that nobody reads after it, in order of appearance."""
    seen: set[fx.Node] = set(graph.output_node().all_input_nodes)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        last = [arg for arg in node.all_input_nodes if arg not in seen and arg.op != "get_attr"]
        seen.update(last)
        dying[node] = last
    return dying


def attribute(module: fx.GraphModule, path: str) -> Any:
    """What a ``get_attr`` node gives: a constant of the graph."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _input_text(record: Input) -> str:
    return f"{record.kind.value} {record.name} {_dtype(record.dtype)}{sizes.shape_text(record.shape)}"


def _comment(node: fx.Node) -> str:
    origin = node_meta.origin(node)
    parts = [_value_text(node_meta.value(node)), origin.region.value, origin.module, origin.source]
    return ", ".join(part for part in parts if part)


def _value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return (
            f"{_dtype(value.dtype)}{sizes.shape_text(value.shape)} {bytes_text(value.numel() * value.element_size())}"
        )
    if isinstance(value, (list, tuple)):
        tensors = list(node_meta.tensors_in(value))
        return f"{len(tensors)} tensors {bytes_text(sum(one.numel() * one.element_size() for one in tensors))}"
    return "" if value is None else "number"


def bytes_text(num_bytes: int) -> str:
    """``1234`` -> ``1.2 KiB``; a size that is data stays the expression it is."""
    if not isinstance(num_bytes, int):
        return f"{sizes.text(num_bytes)} B"
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Step = Callable[[list[Any]], tuple[Any, ...]]
"""What `source` defines: inputs in the order of ``program.inputs``, results in that of ``program.outputs``."""
