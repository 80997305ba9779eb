"""Sums over the rows of matrices, several at once: gradients of biases.

Backward of a layer, the gradient of each bias is the sum over the rows of a matrix that a product reads as well.
Inductor makes two kernels of each: parts, and sums of parts. For a layer of W1 those are eight kernels, each of which
takes 2 or 3 us whatever it does. Here they are two for up to eight matrices of a segment, after the last of them::

    b0 = sum(x0, [0]); mm(x0, w0)               mm(x0, w0)
    b1 = sum(x1, [0]); mm(x1, w1)       ->      mm(x1, w1)
                                                b0, b1 = sum_rows([x0, x1], rows, [columns of x0, of x1], ...)

Sums are made in float32 and rounded once to the type of the matrix, as torch does it; in which order they are added
depends on nothing but the shapes.

Note: what is taken
    Matrices that lie in memory anyway, since they are arguments or something other than a kernel of Inductor reads
    them, and whose sums the segment gives back. In other sums Inductor may compute the matrix on the way.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir.ops.library import LIBRARY
from wholestep.lower.codecache import triton_cache

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs come without it
    triton = tl = None


@dataclass(frozen=True, slots=True)
class _Cut:
    """How programs share what has to be read."""

    block: tuple[int, int]
    """Rows and columns that a program reads at once."""
    programs: int
    """How many there should be."""
    warps: int


# Measured on an H200 with two matrices of 3,072 or 2,304 and of 768 columns. 1,024 rows lie in its cache: 5.0 us, and
# 7.3 the other way; 8,192 rows do not: 20.7 us, and 26.1.
_FEW_ROWS = _Cut(block=(64, 32), programs=3168, warps=2)
_MANY_ROWS = _Cut(block=(32, 64), programs=1584, warps=4)
_MANY = 4096
_MOST_PARTS = 32
_END, _END_WARPS = (_MOST_PARTS, 32), 4
"""Parts and columns that a program adds up, and its warps."""
_MOST_MATRICES = 8
"""Of one call, until which all of them are held; a segment may be a whole backward."""
_LEAST_ROWS = 256
"""Below, one kernel of Inductor does it."""
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_aten, _prims = torch.ops.aten, torch.ops.prims

_CALL = re.compile(r"\bsum_rows\.default\(\[.+\], (\d+), \[([\d, ]+)\], (torch\.\w+), (torch\.\w+)\)")
"""As Inductor writes it."""


def _add_rows(matrices, parts, size, columns, block: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, share, all_columns = size
    height: tl.constexpr = block[0]
    width: tl.constexpr = block[1]
    number, part = tl.program_id(0), tl.program_id(1)
    matrix, own_columns, place = matrices[0], columns[0], 0
    end = (columns[0] + width - 1) // width
    first_block, end_columns = 0, columns[0]
    for one in tl.static_range(1, len(columns)):
        if number >= end:
            matrix, own_columns, place, first_block = matrices[one], columns[one], end_columns, end
        end += (columns[one] + width - 1) // width
        end_columns += columns[one]
    column = (number - first_block) * width + tl.arange(0, width)
    inside = column < own_columns
    row = part * share + tl.arange(0, height)[:, None]
    at = matrix + row.to(tl.int64) * own_columns + column[None, :]
    total = tl.full([height, width], 0.0, tl.float32)
    for first in range(0, share, height):
        total += tl.load(at, mask=(first + row < rows) & inside[None, :], other=0.0).to(tl.float32)
        at += height * own_columns
    tl.store(parts + part * all_columns + place + column, tl.sum(total, 0), mask=inside)


def _add_parts(parts, results, size, columns, block: tl.constexpr):  # type: ignore[no-untyped-def]
    count, all_columns = size
    like = results[len(columns)]  # what sums are rounded to is what it points to
    height: tl.constexpr = block[0]
    width: tl.constexpr = block[1]
    number = tl.program_id(0)
    result, own_columns, place = results[0], columns[0], 0
    end = (columns[0] + width - 1) // width
    first_block, end_columns = 0, columns[0]
    for one in tl.static_range(1, len(columns)):
        if number >= end:
            result, own_columns, place, first_block = results[one], columns[one], end_columns, end
        end += (columns[one] + width - 1) // width
        end_columns += columns[one]
    column = (number - first_block) * width + tl.arange(0, width)
    inside = column < own_columns
    part = tl.arange(0, height)[:, None]
    at = parts + part * all_columns + place + column[None, :]
    sums = tl.sum(tl.load(at, mask=(part < count) & inside[None, :], other=0.0), 0)
    tl.store(result + column, sums.to(like.dtype.element_ty).to(result.dtype.element_ty), mask=inside)


# What both begin with is no function of its own: Triton's interpreter knows no kernel that calls another one.
_rows_kernel: Any = triton.jit(_add_rows) if triton is not None else None
_parts_kernel: Any = triton.jit(_add_parts) if triton is not None else None


@dataclass(frozen=True, slots=True)
class _Layout:
    """How matrices are cut up."""

    rows: int
    columns: tuple[int, ...]

    @property
    def cut(self) -> _Cut:
        """Of this many rows."""
        return _MANY_ROWS if self.rows >= _MANY else _FEW_ROWS

    def num_blocks(self, width: int) -> int:
        """Of so many columns, in all matrices."""
        return sum(-(-one // width) for one in self.columns)

    @property
    def share(self) -> int:
        """Rows of a part, a multiple of what a program reads at once."""
        height, width = self.cut.block
        wanted = min(_MOST_PARTS, -(-self.cut.programs // self.num_blocks(width)))
        return -(-self.rows // (wanted * height)) * height

    @property
    def num_parts(self) -> int:
        """In how many parts the rows of a matrix are added."""
        return -(-self.rows // self.share)

    @property
    def grids(self) -> tuple[tuple[int, int], tuple[int]]:
        """Programs of either kernel."""
        return (self.num_blocks(self.cut.block[1]), self.num_parts), (self.num_blocks(_END[1]),)

    @property
    def sizes(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """What they are told besides the columns."""
        return (self.rows, self.share, sum(self.columns)), (self.num_parts, sum(self.columns))


def sum_rows(
    matrices: Sequence[Tensor], rows: int, columns: Sequence[int], dtype: torch.dtype, result: torch.dtype
) -> list[Tensor]:
    """The sums over the rows of matrices.

    Args:
        matrices: contiguous, on one GPU, of shapes ``(rows, one of columns)``.
        rows: of all of them.
        columns: of each.
        dtype: of all of them, to which a sum is rounded.
        result: the type that sums are given in.

    Gives a vector per matrix.
    """
    device = matrices[0].device
    layout = _Layout(rows, tuple(columns))
    parts = torch.empty(layout.num_parts * sum(columns), dtype=torch.float32, device=device)
    results = tuple(torch.empty(one, dtype=result, device=device) for one in columns)
    (of_rows, of_parts), (every, last) = layout.sizes, layout.grids
    triton_cache.wait()
    add_rows, add_parts, cut = _rows_kernel[every], _parts_kernel[last], layout.cut
    triton_cache.keep(add_rows(tuple(matrices), parts, of_rows, layout.columns, cut.block, num_warps=cut.warps))
    triton_cache.keep(add_parts(parts, (*results, matrices[0]), of_parts, layout.columns, _END, num_warps=_END_WARPS))
    return list(results)


def builds(module: str) -> Iterator[triton_cache.Job]:
    """What has Triton compile the kernels for the calls in text of Inductor's modules, as launches would."""
    for call in dict.fromkeys(_CALL.findall(module)):
        rows, columns = int(call[0]), tuple(map(int, call[1].split(",")))
        dtype, result = (getattr(torch, name.removeprefix("torch.")) for name in call[2:])
        layout = _Layout(rows, columns)
        (of_rows, of_parts), cut = layout.sizes, layout.cut
        (parts,) = triton_cache.addresses([torch.float32])
        matrices, results = (triton_cache.addresses([one] * len(columns)) for one in (dtype, result))
        add_rows, add_parts = (partial(kernel.warmup, grid=(1,)) for kernel in (_rows_kernel, _parts_kernel))
        yield partial(add_rows, matrices, parts, of_rows, columns, cut.block, num_warps=cut.warps)
        yield partial(add_parts, parts, (*results, matrices[0]), of_parts, columns, _END, num_warps=_END_WARPS)


LIBRARY.define("sum_rows(Tensor[] matrices, int rows, int[] columns, ScalarType dtype, ScalarType result) -> Tensor[]")
LIBRARY.impl("sum_rows", sum_rows, "CompositeExplicitAutograd")


def _fake_sum_rows(
    matrices: Sequence[Tensor], rows: int, columns: Sequence[int], dtype: torch.dtype, result: torch.dtype
) -> list[Tensor]:
    return [matrices[0].new_empty(one, dtype=result) for one in columns]


torch.library.register_fake("wholestep::sum_rows", _fake_sum_rows, lib=LIBRARY)
SUM_ROWS = torch.ops.wholestep.sum_rows.default


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """A sum that is taken."""

    matrix: fx.Node
    end: fx.Node
    """What the segment gives back: the sum, seen as a vector or cast."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for sums that one call may make."""
        matrix, end = self.matrix.meta["val"], self.end.meta["val"]
        return matrix.device, matrix.shape[0], matrix.dtype, end.dtype


def gather_sums(graph: fx.Graph) -> int:
    """Has one call make the sums over rows of a segment's graph, in operators of Inductor, that have one kind.

    Nodes know their fake tensors (``meta["val"]``). Gives how many sums were taken.
    """
    if triton is None:
        return 0
    groups: dict[tuple[Any, ...], list[_Sum]] = {}
    for one in _sums(graph, graph.output_node()):
        groups.setdefault(one.kind, []).append(one)
    for sums in groups.values():
        for start in range(0, len(sums), _MOST_MATRICES):
            _replace(graph, sums[start : start + _MOST_MATRICES])
    if groups:
        graph.eliminate_dead_code()
    return sum(map(len, groups.values()))


def _replace(graph: fx.Graph, sums: Sequence[_Sum]) -> None:
    """Has one call make sums of one kind, after the last of them."""
    _, rows, dtype, result = sums[0].kind
    matrices = [one.matrix for one in sums]
    columns = [matrix.meta["val"].shape[1] for matrix in matrices]
    with graph.inserting_after(max(one.end for one in sums)):
        call = graph.call_function(SUM_ROWS, (matrices, rows, columns, dtype, result))
    call.meta["val"] = [one.end.meta["val"].new_empty(size) for one, size in zip(sums, columns, strict=True)]
    last = call
    for place, one in enumerate(sums):
        with graph.inserting_after(last):
            item = graph.call_function(operator.getitem, (call, place))
        with graph.inserting_after(item):
            last = graph.call_function(_aten.view.default, (item, list(one.end.meta["val"].shape)))
        item.meta["val"], last.meta["val"] = call.meta["val"][place], one.end.meta["val"]
        one.end.replace_all_uses_with(last)


def _sums(graph: fx.Graph, output: fx.Node) -> Iterator[_Sum]:
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        matrix, end = node.args[0], _end(node)
        plain = node.args[1] == [0] and not node.kwargs  # a type of its own would be another rounding
        if plain and _is_taken(matrix) and set(end.users) == {output}:
            yield _Sum(matrix=matrix, end=end)


def _end(node: fx.Node) -> fx.Node:
    """The last of the views and casts to float32 that a sum goes through."""
    while len(node.users) == 1:
        (user,) = node.users
        is_cast = user.target is _prims.convert_element_type.default and user.args[1] is torch.float32
        if user.target is not _aten.view.default and not is_cast:
            break
        node = user
    return node


def _is_taken(matrix: fx.Node) -> bool:
    value = matrix.meta["val"]
    if not all(isinstance(size, int) for size in value.shape):
        return False  # how programs share the rows is decided for one number of them
    if value.device.type != "cuda" or value.dtype not in _TYPES or value.ndim != 2 or not value.is_contiguous():
        return False
    return value.shape[0] >= _LEAST_ROWS and _is_in_memory(matrix)


def _is_in_memory(node: fx.Node) -> bool:
    """Whether a value has to be stored, whoever else reads it."""
    while node.op == "call_function" and node.target is _aten.view.default:
        node = node.all_input_nodes[0]
    if node.op == "placeholder":
        return True
    readers = list(node.users)
    while readers:
        reader = readers.pop()
        if reader.op == "output" or reader.target in (_aten.mm.default, _aten.addmm.default):
            return True
        if reader.target in (_aten.view.default, _aten.permute.default):
            readers += reader.users
    return False
