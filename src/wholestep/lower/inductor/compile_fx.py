"""The compiler of segments, called: nothing here is imported where all segments come from another process.

Note: what Inductor is told
    A segment becomes a graph of the operators that Inductor lowers (`torch._inductor.decomposition`), in which writes
    to inputs are ``copy_`` at the end; those become stores of the kernel that computes the value. Results keep the
    strides that the rest of the step was captured with. The order of kernels is left as it is: Inductor's own
    reorderings look at one segment and not at the plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta

from wholestep.errors import WholestepError
from wholestep.ir import node_meta, op_info
from wholestep.ir.lazy_graph_module import unwritten
from wholestep.ir.segment import Compiled, Segment
from wholestep.ir.sizes import hint, is_same
from wholestep.lower.base.eager_backend import first_line
from wholestep.lower.decompositions import interpolate
from wholestep.lower.decompositions.tensor_scalars import Numbers
from wholestep.lower.gemm import cpu_matmul, onednn
from wholestep.lower.inductor import dependent_launch, post_grad_passes, wrapper_patch
from wholestep.lower.inductor.config_fallback import config_fallback, is_missing_compiler, is_triton_error
from wholestep.lower.inductor.deferred_wait import defer_waits
from wholestep.lower.inductor.segment_sizes import Asked, NotForAllSizes, SegmentSizes
from wholestep.lower.inductor.war_order import keep_write_order
from wholestep.lower.kernels import row_sum
from wholestep.util.log_once import log_once

log = logging.getLogger("wholestep")

_SETTINGS: dict[str, dict[str, object]] = {
    # What stands where is the plan's affair.
    "cpu": {"reorder_for_peak_memory": False, "reorder_for_locality": False},
    # Many small kernels at once: the casts of weights, updates that are no calls on lists. Reductions that share their
    # block sizes with others are several times slower.
    "cuda": {
        "reorder_for_peak_memory": False, "reorder_for_locality": False,
        "combo_kernels": True, "combo_kernels_pointwise_only": True,
    },
}  # fmt: skip

_NO_FUSION: dict[str, object] = {"max_fusion_size": 1}
"""For what Triton compiles with no block size: the kernels it has failed at add up what they store on their way, with
whole rows at a time or parts of them."""

_ANALYSIS = "coalesce_tiling_analysis"
_FOR_ALL_SIZES: dict[str, object] = {f"triton.{_ANALYSIS}": False} if hasattr(inductor_config.triton, _ANALYSIS) else {}
"""For sizes that move: torch says that the analysis is for constant ones, and 2.11 fails in it where they move."""

_POST_PASS = "post_grad_custom_post_pass"
_IN_ONE = "mix_order_reduction"
_LENIENT = "triton.mix_order_reduction_non_strict_mode"
_ROWS_OF_PROGRAM = "triton.mix_order_reduction_split_size"
_FEWEST_ROWS, _MANY_ROWS = 512, 4096
_PROGRAMS = 512
"""As many as Inductor has for 8,192 rows."""
_NARROW_COLUMNS, _FEWEST_NARROW = 512, 4
"""Inductor's programs take 4 rows at a time where a row is no longer, and fail if they are given fewer."""


def start_workers() -> None:
    """Starts the processes that compile kernels of GPUs.

    They take seconds to come up, and until then a process compiles its kernels itself, one by one. ``torch.compile``
    starts them where it begins; so do we, before there is anything to compile.
    """
    if hasattr(async_compile, "maybe_warm_pool"):
        async_compile.maybe_warm_pool()


@dataclass(frozen=True, slots=True)
class PendingSegment:
    """A segment whose kernels are being compiled."""

    graph: Compiled
    """As Inductor has written it; not to be called yet."""
    finish: Callable[[], Compiled]
    """Waits for the kernels. Another graph where Triton could not compile those of this one."""
    asked: Asked | None = None
    """What the graph counts on, of sizes that move; None where no size does."""
    why_none: str = ""
    """Why Inductor has written nothing, so that the graph is the segment itself, which runs its calls one by one."""


def begin_compile(segment: Segment, *, early_launches: bool, own_products: bool) -> PendingSegment:
    """Has a segment written, and its kernels compiled.

    `early_launches` as for `wholestep.Inductor`; `own_products` says whether matrix products are those of
    `wholestep.lower.gemm`. A segment that Inductor cannot compile, or for the sizes of one call alone, runs its calls
    one by one. Raises what a missing compiler raises, and InternalError for faults of ours.
    """
    begin = partial(_begin_compile, segment, early_launches=early_launches, own_products=own_products)
    try:
        found, rest, asked = begin({})
    except NotForAllSizes as error:
        log.warning("%s is not compiled, its calls run one by one: %s", segment.name, error)
        return PendingSegment(segment, lambda: segment, why_none=str(error))
    except Exception as error:
        if isinstance(error, WholestepError) or is_missing_compiler(error):
            raise
        if not is_triton_error(error):
            why = f"{type(error).__name__}: {first_line(error)}"
            log.warning("%s could not be compiled, its calls run one by one: %s", segment.name, why)
            return PendingSegment(segment, lambda: segment, why_none=why)
        found, rest, asked = begin(_NO_FUSION)

    def finish() -> Compiled:
        try:
            rest()
            return found
        except Exception as error:
            if not is_triton_error(error):
                raise
        other, other_rest, _ = begin(_NO_FUSION)
        other_rest()
        return other

    return PendingSegment(found, finish, asked if segment.symbols else None)


def _begin_compile(
    segment: Segment, more: dict[str, object], *, early_launches: bool, own_products: bool
) -> tuple[Compiled, Callable[[], None], Asked]:
    """What Inductor makes of a segment with some options more, not to be called before the second is; and what it
    counts on."""
    # Inductor's cache on disk wants a shape environment, and a mode that nothing else has touched.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = SegmentSizes(segment, mode)
    inputs = sizes.inputs()
    graph = decompose(segment, inputs, mode, sizes)
    device = _device(segment)
    more = more | (_FOR_ALL_SIZES if segment.symbols else {})
    settings = settings_for(graph.graph, device.type) | more | _own_passes(device, own_products)
    context = TracingContext(mode)
    ways = inductor_patches(device, early_launches=early_launches, own_products=own_products)
    with (
        tracing(context), mode, _symbols_described(segment), inductor_config.patch(settings), ways, config_fallback(),
        defer_waits() as rest,
    ):  # fmt: skip
        found = compile_fx_inner(graph, inputs)

    def finish() -> None:
        with tracing(context), mode, inductor_config.patch(settings), config_fallback():
            rest()

    return found, finish, sizes.asked()


def _symbols_described(segment: Segment) -> contextlib.AbstractContextManager[object]:
    """While it is open, operators are described by their Python forms where sizes move: much C++ takes numbers."""
    return enable_python_dispatcher() if segment.symbols else contextlib.nullcontext()


def _device(segment: Segment) -> torch.device:
    given: Any = segment.graph.output_node().args[0]
    return node_meta.tensor(given[0]).device  # there may be no input: a mask, positions


def settings_for(graph: fx.Graph, device_type: str) -> dict[str, object]:
    """Options of Inductor for a graph of its operators, whose nodes know their fake tensors (``meta["val"]``).

    The gradient of a norm adds up the same values along rows and down columns. Inductor does both in one kernel from
    4,096 rows on: its programs add up 16 rows each, and fewer programs would leave multiprocessors idle. With 2 or 4
    each it pays for 1,024 rows, too: 9 and 4 us in the place of 16 for four kernels (768 columns, H200; 20 with 16).
    Of rows whose number moves it asks how many they are, which would be a condition of the trace: it does it for all.
    In float64 it fails, as its programs begin their sums in float32.
    """
    settings = dict(_SETTINGS[device_type])
    if device_type != "cuda":
        return settings
    sums = (torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim)
    nodes = [node for target in sums for node in graph.find_nodes(op="call_function", target=target)]
    sizes, moves = [_size(node) for node in nodes], any(map(_moves, nodes))
    rows, columns = ({size[place] for size in sizes if size is not None} for place in (0, 1))
    can = all(hasattr(inductor_config.triton, name.removeprefix("triton.")) for name in (_LENIENT, _ROWS_OF_PROGRAM))
    if any(_summed(node).dtype is torch.float64 for node in nodes) and hasattr(inductor_config.triton, _IN_ONE):
        return settings | {f"triton.{_IN_ONE}": False}
    if not (can and rows and (moves or min(rows) >= _FEWEST_ROWS)):
        return settings
    if max(rows) < _MANY_ROWS:
        share = 1 << max(0, (max(rows) // _PROGRAMS).bit_length() - 1)
        fewest = _FEWEST_NARROW if min(columns) <= _NARROW_COLUMNS else 1
        settings |= {_LENIENT: True, _ROWS_OF_PROGRAM: max(share, fewest)}
    elif moves:
        settings[_LENIENT] = True
    return settings


def _own_passes(device: torch.device, own_products: bool) -> dict[str, object]:
    """Options with which Inductor runs our passes over a segment."""
    own: dict[object, post_grad_passes.GraphPass] = {"wholestep::keep_values": post_grad_passes.keep_values}
    if own_products and device.type == "cpu" and not torch.are_deterministic_algorithms_enabled():
        if reason := onednn.why_not():
            log_once(logging.INFO, f"products are left to torch, since oneDNN cannot be called: {reason}")
        else:
            own["wholestep::product", torch.get_num_threads()] = cpu_matmul.choose
    return {_POST_PASS: post_grad_passes.PostGradPasses(getattr(inductor_config, _POST_PASS), own)}


def _summed(node: fx.Node) -> torch.Tensor:
    """What a sum adds up."""
    value: torch.Tensor = node.all_input_nodes[0].meta["val"]
    return value


def _moves(node: fx.Node) -> bool:
    return not all(isinstance(size, int) for size in _summed(node).shape)


def _size(node: fx.Node) -> tuple[int, int] | None:
    """How many rows and columns a sum down the columns has; None if it is another one."""
    value, dims = _summed(node), node.args[1]
    if (
        not isinstance(dims, list)
        or value.ndim < 2
        or sorted(dims) != list(range(value.ndim - 1))
        or not hint(value.numel())
    ):
        return None
    return hint(value.numel()) // hint(value.shape[-1]), hint(value.shape[-1])


@contextlib.contextmanager
def inductor_patches(device: torch.device, *, early_launches: bool, own_products: bool) -> Iterator[None]:
    """While it is open, Inductor keeps the order of writes, and writes for a GPU what it would write otherwise."""
    with contextlib.ExitStack() as ways:
        ways.enter_context(keep_write_order())
        if device.type != "cpu":
            ways.enter_context(wrapper_patch.patch_sums())
            if own_products:
                ways.enter_context(wrapper_patch.patch_products())
            if early_launches:
                ways.enter_context(dependent_launch.launch_early())
        yield


class _CapturedLayouts(Numbers):
    """Runs a graph with every result in the layout that it was captured with.

    What operators are decomposed into may give other strides: ``cat`` of one tensor beside empty ones becomes a
    ``clone``, which keeps those of its input. Views and ``as_strided`` after it count on what was captured.
    """

    def __init__(self, segment: Segment, sizes: SegmentSizes) -> None:
        """`sizes`: those of the values that it computes with."""
        super().__init__(segment.module)
        self._sizes = sizes

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, copied where its layout is another one; mostly it is not."""
        found, wanted = super().run_node(n), node_meta.value(n)
        both = isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor)
        if not both or n.op != "call_function" or op_info.is_view(n):
            return found
        # Only the fake kernels of torch 2.11 give such strides: a copy that is written into has none of 0.
        if op_info.writes_into_copy(n.target) and _sees_places_twice(wanted):
            return found
        strides = list(map(self._sizes.of, wanted.stride()))
        if _are_taken_alike(found, strides):
            return found
        dims = sorted(range(wanted.ndim), key=lambda dim: -hint(strides[dim]))
        back = sorted(range(wanted.ndim), key=dims.__getitem__)
        copied = found.permute(dims).contiguous().permute(back)
        if not _are_taken_alike(copied, strides):
            raise NotForAllSizes(f"{n.name} has the strides {strides}, which are known for one size alone")
        return copied

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What a call gives. Where it writes a part into a copy of a tensor, the copy has a place for each element.

        The gradient of a sum is one number, seen as many; the backward of a view writes zeros into such a gradient.
        Inductor writes into a copy that is seen in the same way.
        """
        if op_info.writes_into_copy(target) and _sees_places_twice(args[0]):
            args = (args[0].contiguous(), *args[1:])
        return super().call_function(target, args, kwargs)


def _sees_places_twice(tensor: torch.Tensor) -> bool:
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return any(is_same(step, 0) and not is_same(size, 1) for size, step in dims)


def _are_taken_alike(tensor: torch.Tensor, strides: Sequence[Any]) -> bool:
    """Whether a tensor has these strides, as far as anybody takes them. The question is no part of the graph."""
    with disable_proxy_modes_tracing():
        if is_same(tensor.numel(), 0):
            return True
        own = zip(tensor.shape, tensor.stride(), strides, strict=True)
        return all(is_same(size, 1) or is_same(step, other) for size, step, other in own)


def decompose(segment: Segment, inputs: list[Any], mode: FakeTensorMode, sizes: SegmentSizes) -> fx.GraphModule:
    """The segment in the operators that Inductor lowers, with stores of its results as ``copy_`` after all else.

    `inputs` are fake tensors of `mode`, or sizes, one per argument; `sizes` has made them.
    """
    stored = {result: argument for argument, result in segment.stored}
    interpreter = _CapturedLayouts(segment, sizes)

    def run(*arguments: Any) -> list[Any]:
        results = list(interpreter.run(*arguments))
        for result, argument in stored.items():
            arguments[argument].copy_(results[result])
            results[result] = None
        return results

    described = _symbols_described(segment)
    # Metadata, so that kernels are named by what they compute.
    with mode, torch.no_grad(), described, unwritten(), preserve_node_meta():
        made = make_fx(run, decomposition_table=select_decomp_table() | interpolate.rules(_device(segment)))(*inputs)
    end, old = made.graph.output_node(), segment.graph.output_node().args[0]
    row_sum.gather_sums(made.graph)
    given = [index for index in range(len(old)) if index not in stored]  # type: ignore[arg-type]
    end.meta["user_visible_output_idxs"] = given
    end.meta["original_output_strides"] = [
        None if index in stored else tuple(map(sizes.of, node_meta.tensor(node).stride()))
        for index, node in enumerate(old)  # type: ignore[arg-type]
    ]
    return made
