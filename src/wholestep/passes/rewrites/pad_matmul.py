"""Products of matrices in half precision have sizes of whole vectors of memory.

Rows of 50,257 or 1,022 numbers in half precision begin anywhere, and libraries of products have kernels for that which
take three to eight times as long. They go by the sizes that they are told, so a distance between rows is not enough:
zeros are added up besides, and what comes of them is cut off. Before and after, for a size N of which W >= N is whole::

    out = mm(x, w.t())                     wide = pad(w, W - N);  out = mm(x, wide.t())[:, :N]
    ...                             ->
    dx = mm(grad, w)                       rows = pad(grad, W - N);  dx = mm(rows, wide)
    dw = mm(grad.t(), x)                   dw = mm(rows.t(), x)[:N]

A tensor gets its zeros once for all products that read it, a weight in the forward and the backward, a gradient for
both products after it. Numbers are the same, up to the order of sums. torch.compile pads products as well (`pad_mm`).

Note: which sizes count
    Those along rows in memory, of both factors and of the result: for ``mm(a, b)`` with a (M, K) and b (K, N) always N,
    M where `a` is a transposed view, and K unless `a` is one and `b` is none, as in the gradient of a weight.

Note: gradients that are reduced
    Such a product is written into its bucket, where there is no room for zeros, so its result keeps its size. If only
    its left factor has odd rows, as for a vocabulary of an odd size, it reads them out of padded ones that are there
    for another product: that is slower than zeros, and several times as fast as odd rows.

Note: values that are computed again
    A call that repeats one of the forward to save memory is padded if and only if that one is, so both give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import Program, Stage
from wholestep.ir.sizes import are_same
from wholestep.passes.rewrites import padded_cross_entropy, padded_views

_LINE_BYTES = 128
"""A line of a GPU's cache, which large sizes are a multiple of."""
_FEWEST_IN_LINES = 512
"""Elements, of which fewer get to a multiple of `meta.ALIGNMENT_BYTES` alone: zeros would be more than a tenth."""

_HALF = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
_TRANSPOSES = frozenset({_aten.t.default, _aten.transpose.int, _aten.permute.default})
_MOVES = frozenset({
    _aten._to_copy.default, _aten.mul.Tensor, _aten.div.Tensor, _aten.cat.default, _aten.clone.default,
    _aten.constant_pad_nd.default,
})  # fmt: skip
"""What a gradient goes through on its way into a bucket, besides views."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does in a second. As they are: one H200, bfloat16."""

    unaligned_flops: float = 200e12
    """Of products with rows that begin anywhere. Between 100 and 225 were seen."""
    aligned_flops: float = 600e12
    """Of products with rows of whole vectors. Between 600 and 800 were seen."""
    num_bytes: float = 4e12
    """That a kernel reads and writes which puts zeros at the end of rows, or copies."""
    launch_s: float = 2e-6
    """What such a kernel takes besides."""


def pad_matmul(program: Program, *, pads: Callable[[fx.Node], bool], rates: Rates = Rates()) -> Program:
    """The program with products of odd sizes padded, where that pays.

    `pads` says of a product, ``mm`` or ``addmm``, whether its device is one that is slow with odd sizes. It pays where
    the product takes so much less at the `rates` that its factors can be padded meanwhile, by kernels of
    their own. What another product has had padded costs nothing any more, nor what writes its zeros itself
    (`wholestep.passes.rewrites.padded_cross_entropy`). Cutting off costs nothing, but for readers that need a copy
    (`wholestep.passes.rewrites.padded_views`).

    The note says how many products are padded and how many tensors for them.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    padding, kept, count = _Padding(program.graph, rates), list[_Product](), 0
    for node in list(program.graph.nodes):
        product = _product(node)
        if product is None or not any(product.padding()) or not pads(node):
            continue
        keeps_size = _is_reduced(node)
        if keeps_size:
            kept.append(product)
        count += padding.pad(product, keeps_size=keeps_size)
    apart = sum(padding.read_strided(product) for product in kept)
    if not count:
        return program
    graph_edit.remove_dead_code(program.graph)
    return program.with_notes(
        f"{count} products of odd sizes are padded with zeros, and {padding.num_made} tensors for them",
        *([f"{apart} gradients to be reduced are products of rows that stand apart"] if apart else []),
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A factor of a product."""

    base: fx.Node
    """The matrix as its rows lie in memory."""
    transposed: bool
    """Whether the factor is that one transposed."""

    def padded(self, rows: int, columns: int) -> _Padded:
        """The base with zeros at the end of rows and columns of the factor."""
        return _Padded(self.base, columns, rows) if self.transposed else _Padded(self.base, rows, columns)


@dataclass(frozen=True, slots=True)
class _Padded:
    """A tensor padded with zeros."""

    base: fx.Node
    rows: int
    """How many of zeros."""
    columns: int

    @property
    def has_zeros(self) -> bool:
        """Whether there are any."""
        return self.rows > 0 or self.columns > 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are read and written for it."""
        value = node_meta.tensor(self.base)
        rows = value.shape[0] + self.rows if value.dim() == 2 else 1
        return node_meta.num_bytes(self.base) + rows * (value.shape[-1] + self.columns) * value.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """``mm(a, b)`` of a (M, K) and b (K, N), or ``addmm`` with a bias (N)."""

    node: fx.Node
    a: _Matrix
    b: _Matrix
    sizes: tuple[int, int, int]
    """M, K and N."""

    def padding(self) -> tuple[int, int, int]:
        """How many zeros M, K and N want where they lie along rows of memory."""
        in_memory = (self.a.transposed, not self.a.transposed or self.b.transposed, True)
        item_bytes = node_meta.tensor(self.node).element_size()
        padding = zip(self.sizes, in_memory, strict=True)
        m, k, n = (_padding_to_whole(size, item_bytes) if along_rows else 0 for size, along_rows in padding)
        return m, k, n

    def places(self) -> Iterator[_Padded]:
        """What is read in the place of bias, a and b."""
        m, k, n = self.padding()
        for bias in self.node.args[:-2]:
            assert isinstance(bias, fx.Node)  # a tensor
            yield _Padded(bias, 0, n)
        yield self.a.padded(m, k)
        yield self.b.padded(k, n)

    def flops(self, *, padded: bool) -> int:
        """Additions and multiplications."""
        m, k, n = (size + more * padded for size, more in zip(self.sizes, self.padding(), strict=True))
        return 2 * m * k * n

    def cut(self) -> torch.Tensor:
        """The value of its result as a part of the padded one."""
        value, (m, _, n) = node_meta.tensor(self.node), self.padding()
        rows, columns = value.shape
        return value.new_empty(rows + m, columns + n)[:rows, :columns]


class _Padding:
    """Padded tensors, each made once."""

    def __init__(self, graph: fx.Graph, rates: Rates) -> None:
        self._graph, self._rates = graph, rates
        self._made: dict[_Padded, fx.Node] = {}
        self._decided: dict[str, bool] = {}
        """By the names of products."""

    @property
    def num_made(self) -> int:
        """How many tensors are padded with zeros."""
        return len(self._made)

    def pad(self, product: _Product, *, keeps_size: bool) -> bool:
        """Pads a product, where it pays.

        With `keeps_size`, only if its result has the same size then.
        """
        node, (m, _, n) = product.node, product.padding()
        fit = {} if keeps_size and (m or n) else self._fit(product)
        self._decided[node.name] = bool(fit)
        if not fit:
            return False
        shape = node_meta.tensor(node).shape
        *bias, a, b = (self._padded(place, node) for place in product.places())
        node.args = (*bias, self._transpose(a, product.a, node), self._transpose(b, product.b, node))
        graph_edit.evaluate(node)
        if m or n:
            padded_views.replace_readers(node, padded_views.leading_slice(node, shape), fit)
        return True

    def _fit(self, product: _Product) -> dict[fx.Node, bool]:
        """The readers of a product, and which may read a slice; empty if it is not padded."""
        node = product.node
        repeated = self._decided.get(node_meta.repeats(node) or "")
        if not (self._pays(product, copies=False) if repeated is None else repeated):
            return {}
        fit = padded_views.readers_that_fit(node, product.cut())
        return fit if repeated or self._pays(product, copies=not all(fit.values())) else {}

    def read_strided(self, product: _Product) -> bool:
        """Lets a product read odd rows of its left factor out of padded ones, if it lacks nothing else and there are
        some."""
        node, (m, k, n) = product.node, product.padding()
        wide = self._made.get(product.a.padded(m, 0)) if m and not k and not n else None
        if wide is None or not wide < node:
            return False
        with self._graph.inserting_before(node):
            part = graph_edit.emit(self._graph, _aten.slice.Tensor, wide, 1, 0, product.sizes[0], like=node)
        node.args = (*node.args[:-2], self._transpose(part, product.a, node), node.args[-1])
        return True

    def _pays(self, product: _Product, *, copies: bool) -> bool:
        """Whether a product takes so much less. `copies`: whether its result is copied."""
        rates = self._rates
        new = {place for place in product.places() if place.has_zeros and place not in self._made}
        new = {place for place in new if not padded_cross_entropy.writes_zeros(place.base)}
        num_bytes, launches = sum(place.num_bytes for place in new), len(new)
        if copies:
            num_bytes, launches = num_bytes + 2 * node_meta.num_bytes(product.node), launches + 1
        saved_s = product.flops(padded=False) / rates.unaligned_flops - product.flops(padded=True) / rates.aligned_flops
        return saved_s > num_bytes / rates.num_bytes + launches * rates.launch_s

    def _padded(self, place: _Padded, reader: fx.Node) -> fx.Node:
        if not place.has_zeros:
            return place.base
        if place not in self._made:
            sides = [0, place.columns, 0, place.rows] if place.rows else [0, place.columns]
            with _insertion_point(self._graph, place.base, reader):
                self._made[place] = graph_edit.emit(
                    self._graph, _aten.constant_pad_nd.default, place.base, sides, like=reader
                )
        return self._made[place]

    def _transpose(self, matrix: fx.Node, factor: _Matrix, reader: fx.Node) -> fx.Node:
        """The matrix as the factor is seen, right before who reads it."""
        if not factor.transposed:
            return matrix
        with self._graph.inserting_before(reader):
            return graph_edit.emit(self._graph, _aten.t.default, matrix, like=reader)


def _product(node: fx.Node) -> _Product | None:
    """The node as a half-precision product of known sizes; None for anything else."""
    if node.target not in (_aten.mm.default, _aten.addmm.default) or node_meta.tensor(node).dtype not in _HALF:
        return None
    tensors = [one for one in node.args if isinstance(one, fx.Node)]
    *bias, left, right = tensors
    (m, k), n = node_meta.tensor(left).shape, node_meta.tensor(right).shape[1]
    if not all(isinstance(size, int) and size > 1 for size in (m, k, n)):
        return None  # a vector is read at the speed of memory, whatever its size
    if any(not are_same(node_meta.tensor(one).shape, (n,)) for one in bias):
        return None
    a, b = _matrix(left), _matrix(right)
    return None if a is None or b is None else _Product(node=node, a=a, b=b, sizes=(m, k, n))


def _matrix(factor: fx.Node) -> _Matrix | None:
    """The factor as rows in memory; None where it has neither rows nor columns in one piece."""
    base, transposed = factor, False
    while base.target in _TRANSPOSES and _is_transpose(base):
        base, transposed = base.all_input_nodes[0], not transposed
    base = padded_views.through_reshapes(base)
    return _Matrix(base, transposed) if node_meta.tensor(base).stride(1) == 1 else None


def _is_transpose(view: fx.Node) -> bool:
    seen, own = node_meta.tensor(view.all_input_nodes[0]), node_meta.tensor(view)
    return are_same(own.shape, seen.shape[::-1]) and are_same(own.stride(), seen.stride()[::-1])


def _padding_to_whole(size: int, item_bytes: int) -> int:
    """How many elements a row of `size` lacks to be whole."""
    if size * item_bytes % node_meta.ALIGNMENT_BYTES == 0:
        return 0
    return -size % ((_LINE_BYTES if size >= _FEWEST_IN_LINES else node_meta.ALIGNMENT_BYTES) // item_bytes)


def _is_reduced(node: fx.Node) -> bool:
    """Whether a value goes into a collective, as it is or with others, in whatever type."""
    return any(
        op_info.is_collective(user) or ((op_info.is_view(user) or user.target in _MOVES) and _is_reduced(user))
        for user in node.users
    )


def _insertion_point(graph: fx.Graph, base: fx.Node, reader: fx.Node) -> AbstractContextManager[None]:
    """Where a tensor is padded: as it is written, so that a compiler makes that one kernel. Not where
    nothing is written then: that would keep both for long, or wait for what arrives."""
    written = base.op == "call_function" and base.target is not op_info.WAIT and not op_info.is_view(base)
    behind = written and node_meta.origin(base).region is node_meta.origin(reader).region
    point: AbstractContextManager[None] = graph.inserting_after(base) if behind else graph.inserting_before(reader)
    return point
