"""The passes that Inductor's backend adds to a plan, in one list, with the reasons for their order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch.fx as fx

from wholestep.ir import node_meta
from wholestep.ir.ops.collectives import averages
from wholestep.lower.foreach import multi_tensor
from wholestep.lower.gemm import matmul_autotune
from wholestep.lower.kernels import copy_all_reduce, cross_entropy, sparse_all_reduce
from wholestep.passes.comm.fold_mean import fold_mean
from wholestep.passes.comm.use_copy_engine import use_copy_engine
from wholestep.passes.comm.wire_dtype import SupportsOutDtype, narrow_dtype, narrow_wire_dtype
from wholestep.passes.comm.wire_format import WireFormat
from wholestep.passes.pass_manager import Pass
from wholestep.passes.rewrites.decompose_batch_norm import decompose_batch_norm
from wholestep.passes.rewrites.fuse_cross_entropy import fuse_cross_entropy
from wholestep.passes.rewrites.fuse_gelu import fuse_gelu
from wholestep.passes.rewrites.matmul_out_dtype import widen_matmul_out_dtype
from wholestep.passes.rewrites.pad_matmul import pad_matmul
from wholestep.passes.rewrites.padded_cross_entropy import pad_cross_entropy
from wholestep.passes.schedule.batch_host_reads import batch_host_reads
from wholestep.passes.schedule.defer_host_reads import defer_host_reads
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars
from wholestep.passes.schedule.sink_waits import sink_waits
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from wholestep.lower.inductor import segment_compiler
else:
    segment_compiler = lazy_import("wholestep.lower.inductor.segment_compiler")


def inductor_passes(
    device_type: str, *, fuses_activations: bool, uses_copy_engines: bool, multi_tensor_notes: Pass
) -> list[Pass]:
    """The passes for a device, in order.

    Args:
        device_type: "cpu" or "cuda".
        fuses_activations: whether a library of matrix products computes activations, too.
        uses_copy_engines: whether copies may stand in for collectives.
        multi_tensor_notes: on a GPU, notes how lists of tensors will be updated.
    """
    on_gpu = device_type == "cuda"
    return [
        decompose_batch_norm,
        partial(fuse_cross_entropy, fuses=_fuses_cross_entropy),
        # After the pass that says by whom logits are read, before those that look for products as they will be.
        partial(pad_matmul, pads=segment_compiler.widens),
        pad_cross_entropy,
        *([partial(fuse_gelu, fuses=matmul_autotune.activates)] if fuses_activations else []),
        # Before products are widened: the path from a gradient to its reduction is shorter then.
        partial(fold_mean, averages=averages),
        *([partial(use_copy_engine, why_not=copy_all_reduce.why_not)] if uses_copy_engines else []),
        partial(narrow_wire_dtype, supports=segment_compiler.widens),
        partial(widen_matmul_out_dtype, widens=segment_compiler.widens),
        *([batch_host_reads] if on_gpu else []),
        # Before segments are formed, whose calls read packed numbers.
        partial(pack_scalars, reads=partial(segment_compiler.only_on, device_type, segment_compiler.reads_packed)),
        *([defer_host_reads] if on_gpu else []),
        # A segment ends where a wait stands.
        sink_waits,
        form_inductor_segments(device_type),
        *([multi_tensor_notes] if on_gpu else []),
    ]


def form_inductor_segments(device_type: str) -> Pass:
    """The pass that forms the segments which Inductor compiles."""
    on_gpu = device_type == "cuda"
    return partial(
        form_segments,
        compiles=partial(segment_compiler.only_on, device_type, segment_compiler.compiles),
        separate_nodes=multi_tensor.apart,
        may_postpone=segment_compiler.may_follow,
        pays_single=segment_compiler.pays_alone,
        by_library=segment_compiler.is_library_call,
        # Calls cost nothing within a CUDA graph. On a CPU they do, and Inductor compiles equal kernels of a segment
        # once anyway, and its different ones side by side.
        cuts_repeats=on_gpu,
        # A core takes longer for a tanh than for reading one.
        is_pointwise=segment_compiler.is_pointwise if on_gpu else None,
    )


def copy_engine_wire_format(grad: fx.Node, ranks: int, *, supports: SupportsOutDtype) -> WireFormat:
    """How copies send a placed gradient among so many ranks; `supports` as for `narrow_dtype`."""
    own = node_meta.tensor(grad)
    dtype = narrow_dtype(grad, supports=supports) or own.dtype
    return WireFormat(dtype=dtype, max_rows=sparse_all_reduce.most_rows(own.shape, own.dtype, ranks))


def _fuses_cross_entropy(product: fx.Node) -> bool:
    """Whether logits go to our own kernel: where a library has written them to memory anyway."""
    return segment_compiler.is_library_call(product) and cross_entropy.takes(product)
