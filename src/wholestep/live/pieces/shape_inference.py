"""resized(path, number, tensors): a record of a path for the sizes of this call.

[Note: live steps and sizes that move]
Two runs that differ in sizes of fresh tensors, and in ints, are one path: those are others in every call. What its
records give then has sizes that follow from them. So each such record is made once with symbols for sizes: torch's own
rules say what shape its result has, and nothing is computed. Where such expressions hold for some sizes alone, or a
float decides a size (``torch.arange(0.0, end)``), it is made on fake tensors of the sizes of the call. Answers are
kept. The pieces of the path are compiled as any step is whose sizes move: once for all of them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from wholestep.capture.tracing.fake_kernels import LayoutFakeMode
from wholestep.live.opaque.modules import OpaqueModule
from wholestep.live.pieces.observation import flat_result
from wholestep.live.pieces.tensors import TensorTable
from wholestep.live.recording.handle import with_torch_functions
from wholestep.live.recording.modes import under
from wholestep.live.recording.path import Path, moving_operands
from wholestep.live.recording.record import EXTERNAL, NUMBER, VALUE, Operand, OutputMeta, Record, name_of
from wholestep.live.recording.structure import unflatten
from wholestep.live.sizes.all_sizes import AllSizes, Call, fake, layout_of
from wholestep.live.sizes.module_sizes import Layout

log = logging.getLogger("wholestep.live")

MAX_SEEN = 20_000
"""Records of other sizes that are kept per path: all of some hundred sizes."""


def resized(path: Path, number: int, records: Sequence[Record], tensors: TensorTable) -> Record | str:
    """The record with this number of a path, with outputs as they are in this call; or why they are not known.

    `records` are those of this run before it, `tensors` what they and this one were given.
    """
    record = path.records[number]
    if number not in path.sized or all(
        one is None or (record.writes and one.alias is not None) for one in record.outputs
    ):
        return record
    brought = [Operand(VALUE, *value) for value in record.brings]
    leaves = [_leaf(operand, records, tensors) for operand in (*record.operands, *brought)]
    numbers = () if record.is_pointwise else (int, float)
    sizes = tuple(
        leaf[:2] if isinstance(leaf, tuple) else leaf for leaf in leaves if isinstance(leaf, (tuple, *numbers))
    )
    key = (number, sizes)
    found = path.seen_outputs.get(key)
    if found is None:
        if len(path.seen_outputs) >= MAX_SEEN:
            path.seen_outputs.clear()
        found = path.seen_outputs[key] = _inferred(path, number, leaves)
    return found


def _leaf(operand: Operand, records: Sequence[Record], tensors: TensorTable) -> Any:
    """An operand in this call: a number, a constant, or the layout of a tensor."""
    if operand.kind == VALUE:
        meta = records[operand.key].outputs[operand.detail]
        assert meta is not None
        return (meta.shape, meta.stride, meta.dtype, meta.device)
    if operand.kind == EXTERNAL:
        tensor = tensors.externals[operand.key]
        return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return tensors.numbers[operand.key] if operand.kind == NUMBER else operand.key


def _inferred(path: Path, number: int, leaves: Sequence[Any]) -> Record | str:
    record, stream = path.records[number], random.getstate()  # torch draws numbers of fake collectives from it
    num_operands = len(record.operands)
    try:
        results = [*_results(path, number, leaves[:num_operands]), *leaves[num_operands:]]
    except Exception as error:  # whatever a fake kernel may raise: then the call is made as in eager code
        return f"{name_of(record.key.function)} does not say what it gives for other sizes: {error}"
    finally:
        random.setstate(stream)
    if len(results) != len(record.outputs):
        return f"{name_of(record.key.function)} gives another number of tensors for other sizes"
    outputs: list[OutputMeta | None] = []
    for meta, layout in zip(record.outputs, results, strict=True):
        found = None if meta is None or layout is None else meta.of_size(*layout)
        if (found is None) is not (meta is None):
            return f"{name_of(record.key.function)} gives other kinds of tensors for other sizes"
        outputs.append(found)
    return replace(record, outputs=tuple(outputs))


def _results(path: Path, number: int, leaves: Sequence[Any]) -> Sequence[Layout | None]:
    """By the expressions for all sizes, where they are right for these, else by fake tensors of these sizes."""
    record, function = path.records[number], path.records[number].key.function

    def call(given: list[Any]) -> list[torch.Tensor | None]:
        args, kwargs = unflatten(record.key.structure, given)
        with under(record.key.modes), torch.no_grad():
            results: list[torch.Tensor | None] = flat_result(function, with_torch_functions(function, args, kwargs))[0]
            return [*results, *(given[leaf] for leaf in record.joins)]

    mode = LayoutFakeMode()
    if isinstance(function, OpaqueModule):
        args, kwargs = unflatten(record.key.structure, [fake(mode, leaf) for leaf in leaves])
        of_module: Sequence[Layout | None] = function.results_for(args, kwargs)
        return of_module
    known: AllSizes | None = path.all_sizes.get(number)
    found = None if known is None else known.results(leaves)
    if found is not None:
        return found
    given = [fake(mode, leaf) for leaf in leaves]
    with mode:
        results = call(given)
    aliases = {
        place: one.alias for place, one in enumerate(record.outputs) if one is not None and one.alias is not None
    }
    if any(results[place] is not given[leaf] for place, leaf in aliases.items()):  # such as x.contiguous()
        raise ValueError("it gave its argument itself, and now it does not")
    layouts = [layout_of(one) for one in results]
    if number not in path.all_sizes:  # after the call itself: C++ that reads a fake's memory is told so there alone
        moving = moving_operands(path, record)
        has_floats = any(isinstance(leaves[place], float) for place in moving)
        path.all_sizes[number] = None if has_floats or aliases else _for_all_sizes(call, leaves, moving)
    return layouts


def _for_all_sizes(call: Call, leaves: Sequence[Any], moving: Sequence[int]) -> AllSizes | None:
    """None where a fake kernel takes no symbols, or what it gives depends on more than sizes."""
    try:
        return AllSizes(call, leaves, moving)
    except Exception as error:
        log.debug("asked for each size anew: %s", error)
        return None
