"""The text of a Triton kernel that computes one expression for every row of a table of pointers.

A row is one index of some lists: the addresses of the tensors that the expression reads, of those that it writes, and
their number of elements, which all of a row have in common and in the same order. A program computes `CHUNK` elements
of one row; a second table says which::

    table   [rows, width] int64    a, b, ..., results ..., size
    blocks  [programs, 2] int32    row, chunk in that row

Numbers (tensors without dimensions that the row reads) are loaded and computed with once per program. Where all
addresses of a row are multiples of 16 bytes, whole blocks are read and written without masks, in vectors.

The arithmetic is ATen's: a call is computed in the type of its result, half-sized types in float32, and rounded to
that type; quotients and roots are exact to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from wholestep.ir import node_meta

BLOCK = 1024
CHUNK = 8 * BLOCK
"""Enough elements to pay for the numbers of a row, few enough that the last programs end together."""

TYPES = {
    torch.float32: "tl.float32", torch.float64: "tl.float64", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"
}  # fmt: skip
"""What tensors may hold."""

_HALF = (torch.bfloat16, torch.float16)


class NotPointwise(Exception):
    """Why something is no expression that a kernel here can compute."""


def _div(a: str, b: str, dtype: torch.dtype) -> str:
    return f"tl.div_rn({a}, {b})" if dtype is torch.float32 else f"{a} / {b}"


def _sqrt(a: str, dtype: torch.dtype) -> str:
    return f"tl.sqrt_rn({a})" if dtype is torch.float32 else f"tl.sqrt({a})"


def _larger(a: str, b: str, sign: str) -> str:
    return f"tl.where(({a} {sign} {b}) | ({a} != {a}), {a}, {b})"  # what is no number stays none


_UNARY: dict[str, Callable[[str, torch.dtype], str]] = {
    "neg": lambda a, t: f"-{a}",
    "abs": lambda a, t: f"tl.abs({a})",
    "sqrt": _sqrt,
    "rsqrt": lambda a, t: _div(_constant(1, t), _sqrt(a, t), t),
    "reciprocal": lambda a, t: _div(_constant(1, t), a, t),
    "sign": lambda a, t: f"({a} > 0).to({TYPES[t]}) - ({a} < 0).to({TYPES[t]})",
    "exp": lambda a, t: f"libdevice.exp({a})",
    "log": lambda a, t: f"libdevice.log({a})",
    "clone": lambda a, t: a,
    "_to_copy": lambda a, t: a,
}
_BINARY: dict[str, Callable[[str, str, torch.dtype], str]] = {
    "add": lambda a, b, t: f"{a} + {b}",
    "sub": lambda a, b, t: f"{a} - {b}",
    "rsub": lambda a, b, t: f"{b} - {a}",
    "mul": lambda a, b, t: f"{a} * {b}",
    "div": _div,
    "pow": lambda a, b, t: f"libdevice.pow({a}, {b})",
    "maximum": lambda a, b, t: _larger(a, b, ">"),
    "minimum": lambda a, b, t: _larger(a, b, "<"),
    "copy": lambda a, b, t: b,
}
_COMPARISONS = {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!="}
_FILLED = {"full": 1, "full_like": 1, "scalar_tensor": 0, "zeros_like": None, "ones_like": None}
"""Operators that give one number everywhere, and the place of that argument."""

_IGNORED = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"}
"""Options that show in the value of a call, or that mean nothing for numbers."""


def has_text(name: str) -> bool:
    """Whether there is text for the operator with this name."""
    return name == "where" or any(name in table for table in (_UNARY, _BINARY, _COMPARISONS, _FILLED))


def kernel(name: str, graph: fx.Graph, *, elementwise: Sequence[bool]) -> str:
    """The module that holds the kernel `name`, a function of (table, blocks).

    Args:
        graph: operators on floating-point tensors with fake values; a placeholder per tensor that a row reads.
        elementwise: per placeholder, whether it has the size of the row; otherwise it is one number.

    The columns of the table are the placeholders, the results and the size. Raises NotPointwise.
    """
    return _Writer(graph, elementwise).module(name)


class _Writer:
    def __init__(self, graph: fx.Graph, elementwise: Sequence[bool]) -> None:
        self._names: dict[fx.Node, str] = {}
        self._numbers: set[fx.Node] = set()
        self._head: list[str] = []
        """What a program does once."""
        self._body: list[str] = []
        """What it does for every block; ``@`` stands before the number of a pointer, ``?`` for the mask."""
        self._pointers: list[int] = []
        placeholders = graph.find_nodes(op="placeholder")
        for column, (node, is_whole) in enumerate(zip(placeholders, elementwise, strict=True)):
            self._placeholder(node, column, is_whole)
        for node in graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op not in ("placeholder", "output"):
                raise NotPointwise(f"{node.op} {node.target}")
        results = graph.output_node().args[0]
        assert isinstance(results, (list, tuple))
        for column, node in enumerate(results, len(placeholders)):
            assert isinstance(node, fx.Node)
            self._pointer(column, _type(node))
            self._body.append(f"tl.store(@{column} + at, {self._names[node]}?)")
        self._width = len(placeholders) + len(results) + 1

    def _placeholder(self, node: fx.Node, column: int, is_whole: bool) -> None:
        self._names[node] = f"v{column}"
        if is_whole:
            self._pointer(column, _type(node))
            self._body.append(f"v{column} = tl.load(@{column} + at?)")
        else:
            self._numbers.add(node)
            self._head.append(f"v{column} = tl.load(tl.load(cells + {column}).to(tl.pointer_type({_type(node)})))")

    def _pointer(self, column: int, kind: str) -> None:
        self._pointers.append(column)
        self._head.append(f"a{column} = tl.load(cells + {column})")
        self._head.append(f"p{column} = a{column}.to(tl.pointer_type({kind}))")

    def _call(self, node: fx.Node) -> None:
        name = f"v{len(self._names)}"
        text = self._text(node)
        if all(arg in self._numbers for arg in node.all_input_nodes):
            self._numbers.add(node)
            self._head.append(f"{name} = {text}")
        else:
            self._body.append(f"{name} = {text}")
        self._names[node] = name

    def _text(self, node: fx.Node) -> str:
        """The value of a call, in the type of its result."""
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NotPointwise(f"{node.target}")
        op = node.target._schema.name.removeprefix("aten::")
        options = {key: value for key, value in node.kwargs.items() if key not in _IGNORED and value is not None}
        value, args = node_meta.tensor(node), node.args
        if options:
            raise NotPointwise(f"{op} with {', '.join(options)}")
        if op in _COMPARISONS:
            left, right = self._operands(args, _compared_in(args))
            return f"{left} {_COMPARISONS[op]} {right}"
        kind = _type(node)
        if op in _FILLED:
            place = _FILLED[op]
            return _constant(float(op == "ones_like") if place is None else args[place], value.dtype)
        dtype = torch.float32 if value.dtype in _HALF else value.dtype
        if op == "where":
            condition = self._names[args[0]]  # type: ignore[index]
            text = f"tl.where({condition}, {', '.join(self._operands(args[1:], dtype))})"
        elif op in _UNARY and len(args) == 1:
            text = _UNARY[op](self._operand(args[0], dtype), dtype)
        elif op in _BINARY and len(args) == 2:
            left, right = self._operands(args, dtype)
            text = _BINARY[op](left, right, dtype)
        else:
            raise NotPointwise(f"{op} of {len(args)} arguments")
        return text if value.dtype is dtype else f"({text}).to({kind})"

    def _operands(self, args: Sequence[object], dtype: torch.dtype) -> list[str]:
        return [self._operand(arg, dtype) for arg in args]

    def _operand(self, arg: object, dtype: torch.dtype) -> str:
        if not isinstance(arg, fx.Node):
            return _constant(arg, dtype)
        name = self._names[arg]
        return name if node_meta.tensor(arg).dtype is dtype else f"{name}.to({TYPES[dtype]})"

    def module(self, name: str) -> str:
        """The whole text."""
        addresses = " | ".join(f"a{column}" for column in self._pointers)
        hints = [f"q{column} = tl.multiple_of(p{column}, 16)" for column in self._pointers]
        lines = [
            "import triton",
            "import triton.language as tl",
            "from triton.language.extra import libdevice",
            "",
            "",
            "@triton.jit",
            f"def {name}(table, blocks):",
            "    block = blocks + 2 * tl.program_id(0)",
            f"    cells = table + tl.load(block).to(tl.int64) * {self._width}",
            f"    first = tl.load(block + 1).to(tl.int64) * {CHUNK}",
            f"    size = tl.minimum(tl.load(cells + {self._width - 1}) - first, {CHUNK})",
            *(f"    {line}" for line in self._head),
            "    whole = 0",
            f"    if (({addresses}) & 15) == 0:",
            f"        whole = (size // {BLOCK}).to(tl.int32)",
            *(f"        {line}" for line in hints),
            "        for number in range(0, whole):",
            f"            at = first + number * {BLOCK} + tl.arange(0, {BLOCK})",
            *(f"            {line.replace('@', 'q').replace('?', '')}" for line in self._body),
            f"    for number in range(whole, ((size + {BLOCK - 1}) // {BLOCK}).to(tl.int32)):",
            f"        near = number * {BLOCK} + tl.arange(0, {BLOCK})",
            "        at = first + near",
            *(f"        {line.replace('@', 'p').replace('?', ', mask=near < size')}" for line in self._body),
            "",
        ]
        return "\n".join(lines)


def _type(node: fx.Node) -> str:
    dtype = node_meta.tensor(node).dtype
    if dtype not in TYPES:
        raise NotPointwise(f"tensors of {dtype}")
    return TYPES[dtype]


def _compared_in(args: Sequence[object]) -> torch.dtype:
    """The type that a comparison of two values is made in."""
    left, right = (node_meta.tensor(arg) if isinstance(arg, fx.Node) else arg for arg in args)
    dtype = torch.result_type(left, right)  # type: ignore[call-overload]
    if dtype not in TYPES:
        raise NotPointwise(f"a comparison in {dtype}")
    return torch.float32 if dtype in _HALF else dtype


def _constant(value: object, dtype: torch.dtype) -> str:
    """A number with a type of its own: Triton would take it for float32 beside float64."""
    if not isinstance(value, (int, float)):
        raise NotPointwise(f"{value!r} for a number")
    number = float(value)
    text = repr(number) if abs(number) < float("inf") else f'float("{number}")'
    return f"tl.full((), {text}, {TYPES[dtype]})"
