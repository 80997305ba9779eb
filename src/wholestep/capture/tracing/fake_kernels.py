"""Fake tensors do what kernels do to strides and version counters, where torch's descriptions of them say otherwise.

What is traced depends on strides: ``reshape`` is a view of one layout and a copy of another. torch describes many
operators by arithmetic in Python, which finds other strides than their kernels do. Four kinds of kernels are told
apart: results in the layout of the operands, the first one first, as ATen's loops over elements have it; results that
are contiguous whatever the operands are; results that stay channels-last and are contiguous otherwise; and copies of
one operand's layout.

Products of groups, with which mixtures of experts compute, have rows that begin at multiples of 16 bytes. torch
describes them for bfloat16 alone, and without that in a build for CPUs; the kernels take float32 and float16 as well.

Memory of the host has one device: kernels take "cpu:1", and what they give is on "cpu".

Kernels over lists count what they write; their descriptions do not, and those of fused optimizers count nothing, as
their kernels. A number that was read of a fake tensor is remembered until its counter moves, so `.item()` after a
second update gave the number of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from wholestep.capture.functionalize.constants import computed_where_pure
from wholestep.capture.functionalize.version_counters import lists_counted, written_tensors
from wholestep.capture.python.user_frame import current_line
from wholestep.capture.sizes.python_forms import PythonForms
from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.errors import CaptureError
from wholestep.util.torch_switches import torch_switches

aten = torch.ops.aten

_OF_OPERANDS: dict[Any, tuple[int, int]] = {
    **dict.fromkeys(
        (
            aten.softplus_backward.default, aten.hardtanh_backward.default, aten.hardswish_backward.default,
            aten.hardsigmoid_backward.default, aten.logit_backward.default,
            aten.xlogy.Tensor, aten.special_xlog1py.default, aten.copysign.Tensor, aten.floor_divide.default,
            aten.div.Tensor_mode, aten.binary_cross_entropy.default,
        ),
        (0, 1),
    ),
    aten.elu_backward.default: (0, 5),
    aten.rrelu_with_noise_backward.default: (2, 0),
    aten.native_dropout_backward.default: (0, 1),  # on CPUs, see below
}  # fmt: skip
"""Operator -> places of the operands that its loop takes, in its order."""

_CONTIGUOUS = frozenset({
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten._log_softmax_backward_data.default, aten.native_layer_norm_backward.default, aten.pow.Scalar,
    aten.normal.Tensor_Tensor, aten._weight_norm_interface.default, aten.glu_backward.default,
})  # fmt: skip
_CONTIGUOUS_ON_CPU = _CONTIGUOUS | {aten.log_sigmoid_forward.default}
_CONTIGUOUS_ON_GPU = _CONTIGUOUS | {aten.channel_shuffle.default}

_KEPT_ON_GPU = {aten.upsample_bilinear2d.default: 0, aten.native_dropout_backward.default: 0}
_KEPT_ON_CPU = {
    aten.upsample_bilinear2d.default: 0,
    aten.roll.default: 0,
    aten.channel_shuffle.default: 0,
    aten.replication_pad2d_backward.default: 1,
    aten.reflection_pad2d_backward.default: 1,
    aten.max_unpool2d.default: 0,
    aten.native_group_norm_backward.default: 1,
}
_NORMS_ON_CPU = {
    aten.native_batch_norm.default: 0,
    aten._native_batch_norm_legit.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.batch_norm_backward.default: 1,
}
_KEPT_ON_CPU |= _NORMS_ON_CPU
"""Operator -> place of the argument whose layout its first result has if that is channels-last."""

_COPIED = {aten.binary_cross_entropy_backward.default: 1}
"""Operator -> place of the argument whose layout its result has."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

_GROUPED = aten._grouped_mm.default
_ROW_BYTES = 16


class LayoutFakeMode(FakeTensorMode):
    """The mode in which a step is traced."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _forget_other_switches()
        self.raised: list[Exception] = []
        """What operators of the step have raised: fakes raise where tensors might not, or something else."""
        self._depth = 0
        self.forms = PythonForms()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayoutFakeMode:
        """Itself: a copy of a fake tensor is of the same mode.

        Otherwise ``copy.deepcopy(opt.state_dict())`` in a step copies all that the mode holds, weak references to
        storages among it, of which each copy frees the same one: the heap was corrupted, and nothing said so.
        """
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the operator gives, with the strides of the kernel."""
        self._depth += 1
        sizes = self.shape_env if isinstance(self.shape_env, SizeEnv) else None
        around = None if sizes is None else sizes.operator
        if sizes is not None:
            sizes.operator = self.forms.asking(func)
        try:
            return self._dispatched(func, types, args, kwargs)
        except Exception as error:
            if self._depth == 1:
                self.raised.append(error)
            raise
        finally:
            self._depth -= 1
            if sizes is not None:
                sizes.operator = around

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _refuse_undiscovered(args)
        if func is aten._ctc_loss.Tensor:
            return _losses_of_paths(self, *args)
        if func is aten._ctc_loss_backward.Tensor:
            return args[1].new_empty(args[1].shape)
        kwargs = _on_one_host(kwargs or {})
        if func is _GROUPED and args[0].dtype in (torch.float32, torch.bfloat16, torch.float16):
            return _product_of_groups(*args, **kwargs)
        written = [one for one in written_tensors(func, args, kwargs) if isinstance(one, FakeTensor)]
        with _undrawn(func), lists_counted(func, written), computed_where_pure(self, func, args, kwargs, written):
            run = partial(super().__torch_dispatch__, func, types, args, kwargs)
            found: Any = self.forms.describe(run, self, func, args, kwargs)
        for one in written:
            one.item_memo = None
        return _laid_out(func, args, found)


_switches: list[tuple[str, str]] = []
"""Those under which fake tensors of this process were described last."""


def _forget_other_switches() -> None:
    """Drops what torch remembers of fake results where a switch is another one now: it remembers them by arguments
    alone, and without cuDNN or MKLDNN a convolution has other strides."""
    global _switches
    if (now := torch_switches()) != _switches:
        _switches = now
        FakeTensorMode.cache_clear()


def _on_one_host(kwargs: Any) -> Any:
    """Arguments of an operator; a device of the host in them has no number, as no tensor there has one."""
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "cpu" and device.index is not None:
        return {**kwargs, "device": torch.device("cpu")}
    return kwargs


def _refuse_undiscovered(args: Any) -> None:
    """A parameter that is no input of the trace would be given the trace's gradient: refused before it has any."""
    for one in args:
        if isinstance(one, (list, tuple)):
            _refuse_undiscovered(one)
        elif isinstance(one, torch.Tensor) and one.requires_grad and not isinstance(one, FakeTensor):
            raise CaptureError(
                f"The step uses a parameter {list(one.shape)} at {current_line()} that wholestep could not find in its "
                f"arguments, closure, globals or attributes. Pass the object that holds it as an argument of the step."
            )


@contextmanager
def _undrawn(func: Any) -> Iterator[None]:
    """Around an operator that draws. One that torch does not describe runs for its description (gamma and Dirichlet
    samples, binomials): the generators of GPUs have the state again that they had. That of the CPU is not drawn from.
    """
    draws = torch.Tag.nondeterministic_seeded in func.tags and torch.cuda.is_initialized()
    states = [(one, one.get_state()) for one in torch.cuda.default_generators] if draws else []
    try:
        yield
    finally:
        for one, state in states:
            one.set_state(state)


def _laid_out(func: Any, args: Any, found: Any) -> Any:
    """What an operator gave, as its kernel lays it out."""
    first = found[0] if isinstance(found, (tuple, list)) and found else found
    if not isinstance(first, FakeTensor):
        return found
    on_cpu = first.device.type == "cpu"
    if func in (_CONTIGUOUS_ON_CPU if on_cpu else _CONTIGUOUS_ON_GPU):
        return tree_map_only(FakeTensor, lambda one: _with_strides(one, _contiguous(one)), found)
    kept = _KEPT_ON_CPU if on_cpu else _KEPT_ON_GPU
    if func in kept:
        strides = _kept(first, args[kept[func]], is_norm=func in _NORMS_ON_CPU)
    elif func in _OF_OPERANDS:
        strides = torch.add(*(_blank(args[operand]) for operand in _OF_OPERANDS[func])).stride()
    elif func in _COPIED:
        strides = torch.empty_like(_blank(args[_COPIED[func]])).stride()
    else:
        return found
    changed = _with_strides(first, strides)
    return changed if first is found else (changed, *found[1:])


def _product_of_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What ATen gives for groups of rows (`a` has two dims), of columns (`b` has two) or of what is summed (both)."""
    sizes = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        sizes.insert(0, offs.shape[0] if offs is not None else a.shape[0])
    dtype = out_dtype or a.dtype
    step = _ROW_BYTES // dtype.itemsize
    row = -(-sizes[-1] // step) * step
    strides = (row, 1) if len(sizes) == 2 else (sizes[1] * row, row, 1)
    return a.new_empty_strided(sizes, strides, dtype=dtype)


def _losses_of_paths(
    mode: FakeTensorMode, log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What CTC gives for lengths that are data: a loss for each of a batch, and what its backward reads of all paths,
    whose number is twice the longest target and one."""
    frames, batch = log_probs.shape[:2]
    assert mode.shape_env is not None
    paths = mode.shape_env.create_unbacked_symint()
    torch._check(paths >= 1)
    return log_probs.new_empty([batch]), log_probs.new_empty([batch, frames, paths])


def _with_strides(made: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    same = made.stride() == strides or len(strides) != made.dim()
    return made if same else made.new_empty_strided(made.shape, strides)


def _blank(operand: Any) -> Any:
    """What has the layout of a tensor and no content, and belongs to no mode; numbers are their own."""
    if not isinstance(operand, torch.Tensor):
        return operand
    return torch.empty_strided(operand.shape, operand.stride(), device="meta")


def _contiguous(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()


def _kept(made: torch.Tensor, source: torch.Tensor, *, is_norm: bool) -> tuple[int, ...]:
    """Strides of what is channels-last if `source` is, and contiguous otherwise."""
    form = _FORMATS.get(source.dim())
    if form is None or source.is_contiguous():
        return _contiguous(made)
    # One image alone has many strides that could be called channels-last. Norms take them all, others what looks so.
    is_kept = source.is_contiguous(memory_format=form) if is_norm else suggest_memory_format(source) is form
    return torch.empty(made.shape, device="meta", memory_format=form).stride() if is_kept else _contiguous(made)
