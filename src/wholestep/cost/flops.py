"""Work of a node: kinds of kernels, FLOPs and bytes. Formulas only; no times here.

[Note: roofline]
A kernel takes as long as the slower of two things: its arithmetic, against what the device reaches in kernels of that
kind, and its bytes, against the bandwidth of its memory; and never less than the floor of a kernel. Source: Williams,
Waterman, Patterson, "Roofline: An Insightful Visual Performance Model", 2009. Both ceilings are curves
(`wholestep.cost.curve`), because small kernels reach less of either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import node_meta, op_info
from wholestep.ir.sizes import hints, is_same

Shape = Sequence[int]


CHANNELS = 16
"""Kernels of convolutions compute channels in blocks: those that fill a vector register of 64 bytes on a CPU, a tile of
a tensor core on a GPU. A convolution of 3 channels takes as long as one of 16."""


class Kind(StrEnum):
    """Kinds of kernels, each with its own ceiling. The amount of work that the ceiling is a function of:"""

    MATMUL = "matmul"  # FLOPs
    CONVOLUTION = "convolution"  # FLOPs
    CONVOLUTION_BACKWARD = "convolution_backward"  # FLOPs
    ATTENTION = "attention"  # FLOPs
    ATTENTION_BACKWARD = "attention_backward"  # FLOPs
    FUNCTION = "function"  # elements of four bytes, others in proportion: exp, tanh, gelu, random numbers, ...
    NORM = "norm"  # elements
    BATCH_NORM = "batch_norm"  # elements: sums go across the samples, not along the memory
    NORM_BACKWARD = "norm_backward"  # elements, of either
    SOFTMAX = "softmax"  # elements
    SOFTMAX_BACKWARD = "softmax_backward"  # elements
    REDUCTION = "reduction"  # bytes read
    POINTWISE = "pointwise"  # bytes read and written; results in new memory
    IN_PLACE = "in_place"  # bytes read and written
    VIEW = "view"  # none: only the host works
    NUMBER = "number"  # none: arithmetic of Python, and the number in a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel."""

    kind: Kind
    amount: float = 0.0
    """In the unit of the kind."""
    num_bytes: int = 0
    """Bytes read and written, each tensor once."""
    dtype: torch.dtype | None = None
    """What the arithmetic is in, where the ceiling depends on it."""
    within: tuple[Work, ...] = ()
    """Arithmetic of a kernel that a compiler has made of several, by kinds."""


def matmul_flops(out: Shape, inner: int) -> float:
    """FLOPs of a product whose result has the shape `out` and whose sums have `inner` terms."""
    return 2.0 * math.prod(out) * inner


def convolution_flops(weight: Shape, data: Shape, groups_of: int = 1) -> float:
    """FLOPs that a convolution or one of its two gradients takes, channels in whole blocks (`CHANNELS`).

    Args:
        weight: (out channels, in channels / groups, *kernel); of a transposed convolution the channels change places.
        data: what the kernel is applied at: the output, or the input of a transposed convolution.
        groups_of: how many such results there are.
    """
    channels, inner = (CHANNELS * math.ceil(one / CHANNELS) for one in (data[1], weight[1]))
    return 2.0 * groups_of * data[0] * channels * math.prod(data[2:]) * inner * math.prod(weight[2:])


def attention_flops(query: Shape, key: Shape, value: Shape, *, causal: bool, backward: bool) -> float:
    """FLOPs of scaled dot product attention; shapes (batch, heads, length, width).

    Forward two products, backward five (the scores are computed again); a causal mask leaves half of them.
    Source: Dao et al., "FlashAttention", 2022.
    """
    pairs = math.prod(query[:-1]) * key[-2] * (0.5 if causal else 1.0)
    return 2.0 * pairs * (3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1])


_PRODUCTS = {
    name: position
    for position, names in enumerate((
        "mm bmm mv dot linear matmul _scaled_mm product_gelu_backward", "addmm baddbmm addmv addbmm product_gelu"
    ))
    for name in names.split()
}  # fmt: skip
"""Products of matrices -> position of the left matrix among the arguments. An activation on the way costs nothing."""

_CONVOLUTIONS = frozenset("convolution _convolution cudnn_convolution mkldnn_convolution".split())

_ELEMENTWISE: Mapping[str, Kind] = {
    name: kind
    for kind, names in {
        Kind.FUNCTION: """acos acosh asin asinh atan atan2 atanh bernoulli binary_cross_entropy
            binary_cross_entropy_with_logits celu cos cosh digamma elu elu_backward erf erfc erfinv exp exp2 expm1
            exponential gelu gelu_backward hardswish lgamma log log10 log1p log2 logaddexp log_sigmoid_forward
            log_sigmoid_backward logit mish mish_backward native_dropout normal pow rand rand_like randn randn_like
            random rrelu_with_noise sigmoid silu silu_backward sin sinh softplus softplus_backward special_entr tan
            tanh uniform""",
        Kind.NORM: "native_layer_norm native_group_norm _fused_rms_norm",
        Kind.BATCH_NORM: """native_batch_norm _native_batch_norm_legit _batch_norm_with_update _batch_norm_no_update
            cudnn_batch_norm""",
        Kind.NORM_BACKWARD: """native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward
            native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward""",
        Kind.SOFTMAX: "_softmax _log_softmax logsumexp cumsum cumprod logcumsumexp sort topk",
        Kind.SOFTMAX_BACKWARD: "_softmax_backward_data _log_softmax_backward_data",
    }.items()
    for name in names.split()
}
"""Operators whose ceiling counts the elements of their largest tensor; those of two bytes count half."""

_REDUCTIONS = frozenset("""all amax amin any argmax argmin aminmax linalg_vector_norm max mean min mse_loss nansum norm
    prod std std_mean sum var var_mean _foreach_norm _foreach_max""".split())  # fmt: skip

_ALLOCATIONS = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())
"""Operators that touch no memory."""

ROWS = frozenset("embedding index index_select gather nll_loss_forward take".split())
"""Operators that read of their first tensor no more than they write."""

_OVERWRITES = frozenset("copy fill zero zeros ones".split())
"""Operators that write to an argument without a look at it."""


def works(node: fx.Node) -> tuple[Work, ...]:
    """The kernels of a node, from the fake values of its arguments and results.

    An operator on lists of tensors gives one for every index of the lists. A collective, a wait, and what is no call
    give none. A tensor whose size is data counts as empty.
    """
    if node.op != "call_function" or op_info.is_collective(node) or node.target is op_info.WAIT:
        return ()
    if not op_info.is_op(node):
        return (Work(kind=Kind.NUMBER),)
    name = base_name(node.target)
    if name == "_local_scalar_dense":
        return (Work(kind=Kind.NUMBER),)
    if name in _ALLOCATIONS or (op_info.viewed_args(node.target) and not op_info.mutated_args(node.target)):
        return (Work(kind=Kind.VIEW),)
    if name in _PRODUCTS:
        return (_product(node, _PRODUCTS[name]),)
    if name in _CONVOLUTIONS:
        return (_convolution(node),)
    if name == "convolution_backward":
        return (_convolution_backward(node),)
    if "dot_product" in name or "_attention_" in name:
        return (_attention(node, backward=name.endswith("backward")),)
    return tuple(_streamed(node, name))


def num_listed(node: fx.Node) -> int:
    """How many tensors there are in the longest list that a node is given, or gives as its only result; 0 without."""
    lists = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, (list, tuple))]
    if op_info.is_op(node) and [str(one.type) for one in node.target._schema.returns] == ["List[Tensor]"]:  # type: ignore[union-attr]
        lists.append(node_meta.value(node))
    return max((sum(isinstance(_values(one), torch.Tensor) for one in items) for items in lists), default=0)


_TWIN = re.compile(r"aten__(.+)__[A-Za-z]\w*?(?:__\d+)*")


@cache
def base_name(op: Any) -> str:
    """The name of an operator without namespace, overload and the underscore of an in-place variant.

    The functional twin of an operator that writes (``aten__native_batch_norm__default__3__4``) goes by the name of
    that operator.
    """
    name: str = op._schema.name.split("::")[1]
    if twin := _TWIN.fullmatch(name):
        name = twin[1]
    return name.removesuffix("_")


def _product(node: fx.Node, matrix: int) -> Work:
    a, (out, *_) = _values(node.args[matrix]), node_meta.tensors(node)
    return Work(
        kind=Kind.MATMUL, amount=matmul_flops(_sizes(out), _sizes(a)[-1]), num_bytes=_traffic_bytes(node), dtype=a.dtype
    )


def _convolution(node: fx.Node) -> Work:
    data, weight = (_values(node.args[position]) for position in (0, 1))
    at = data if _argument(node, "transposed") else next(node_meta.tensors(node))
    return Work(
        kind=Kind.CONVOLUTION,
        amount=convolution_flops(_sizes(weight), _sizes(at)),
        num_bytes=_traffic_bytes(node),
        dtype=weight.dtype,
    )


def _convolution_backward(node: fx.Node) -> Work:
    grad, data, weight = (_values(_argument(node, name)) for name in ("grad_output", "input", "weight"))
    at = data if _argument(node, "transposed") else grad
    wanted = sum(map(bool, _argument(node, "output_mask")[:2]))
    return Work(
        kind=Kind.CONVOLUTION_BACKWARD,
        amount=convolution_flops(_sizes(weight), _sizes(at), wanted),
        num_bytes=_traffic_bytes(node),
        dtype=weight.dtype,
    )


def _attention(node: fx.Node, *, backward: bool) -> Work:
    query, key, value = (_values(_argument(node, name)) for name in ("query", "key", "value"))
    return Work(
        kind=Kind.ATTENTION_BACKWARD if backward else Kind.ATTENTION,
        amount=attention_flops(
            _sizes(query), _sizes(key), _sizes(value), causal=bool(_argument(node, "is_causal")), backward=backward
        ),
        num_bytes=_traffic_bytes(node),
        dtype=query.dtype,
    )


def _argument(node: fx.Node, name: str) -> Any:
    """The argument of that name in the schema, given or not."""
    target: Any = node.target
    for position, declared in enumerate(target._schema.arguments):
        if declared.name == name:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
            return declared.default_value if given is None else given
    return None


def _streamed(node: fx.Node, name: str) -> Iterator[Work]:
    """What is bound by memory, or counts elements."""
    usual = Kind.IN_PLACE if op_info.mutated_args(node.target) else Kind.POINTWISE
    kind = _ELEMENTWISE.get(name, Kind.REDUCTION if name in _REDUCTIONS else usual)
    for read, written in _pieces(node, name):
        num_bytes = _unique_bytes(read) + _unique_bytes(written)
        if name in ROWS and read and written:
            num_bytes -= max(0, memory_bytes(read[0]) - memory_bytes(written[0]))
        amount = num_bytes
        if name in _ELEMENTWISE:
            amount = max(map(memory_bytes, (*read, *written)), default=0) // 4
        yield Work(kind=kind, amount=amount, num_bytes=num_bytes)


_Tensors = list[torch.Tensor]


def _pieces(node: fx.Node, name: str) -> Iterator[tuple[_Tensors, _Tensors]]:
    """(tensors read, tensors written) of every kernel, where a device takes the lists of an operator one by one."""
    read, written = _traffic(node, name)
    if not name.startswith(("_foreach_", "_fused_")):
        yield list(node_meta.tensors_in(read)), list(node_meta.tensors_in(written))
        return
    alone = [one for one in read if isinstance(one, torch.Tensor)]
    lists = [[one for one in group if isinstance(one, list)] for group in (read, written)]
    for index in range(max((len(one) for group in lists for one in group), default=0)):
        mine, made = ([one[index] for one in group if index < len(one)] for group in lists)
        yield list(node_meta.tensors_in([*mine, *alone])), list(node_meta.tensors_in(made))


def _traffic(node: fx.Node, name: str) -> tuple[list[Any], list[Any]]:
    """Tensors and lists of tensors that a call reads, and those that it writes."""
    mutated = op_info.written_by(node.target, node.kwargs)
    given = [_values(arg) for arg in (*node.args, *node.kwargs.values())]
    overwrites = name.removeprefix("_foreach_") in _OVERWRITES
    read = [one for position, one in enumerate(given) if not (overwrites and position in mutated)]
    written = [one for position, one in enumerate(given) if position in mutated]
    return read, written or _lists(node_meta.value(node))


def _values(arg: Any) -> Any:
    """An argument with the fake value in place of every node."""
    if isinstance(arg, fx.Node):
        return _values(node_meta.value(arg))
    return [_values(one) for one in arg] if isinstance(arg, (list, tuple)) else arg


def _lists(value: Any) -> list[Any]:
    """The results of a call: one, several, a list, or several lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    found = _values(value) if isinstance(value, (list, tuple)) else []
    return found if any(isinstance(one, list) for one in found) else [found]


def _traffic_bytes(node: fx.Node) -> int:
    read, written = _traffic(node, "")
    return _unique_bytes(node_meta.tensors_in(read)) + _unique_bytes(node_meta.tensors_in(written))


def _unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(memory_bytes(one) for one in {id(one): one for one in tensors}.values())


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape, as in the traced call."""
    return hints(tensor.shape)


def memory_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory behind a tensor, where what is expanded is there once."""
    sizes = zip(_sizes(tensor), tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in sizes if not is_same(stride, 0) or size == 0)
