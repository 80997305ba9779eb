"""The segments of whole programs, compiled: lists of tensors by kernels of ours, all others by Inductor."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from wholestep.ir.program import Program
from wholestep.ir.segment import Compiled, Segment, segments_of
from wholestep.lower.codecache import toolchain_hash, triton_cache
from wholestep.lower.foreach import multi_tensor
from wholestep.lower.kernels import column_sum, copy_all_reduce, cross_entropy, row_sum, sparse_all_reduce
from wholestep.passes.rewrites.fuse_cross_entropy import CROSS_ENTROPY
from wholestep.util.lazy_import import lazy_import
from wholestep.util.progress import report_stage

if TYPE_CHECKING:
    from wholestep.lower.inductor import segment_compiler
else:
    segment_compiler = lazy_import("wholestep.lower.inductor.segment_compiler")

_BY_INDUCTOR, _MULTI_TENSOR = b"I", b"L"
"""Marks before what was compiled of a segment: by whom."""


class ProgramCompiler:
    """Compiles the segments of programs, and writes and reads what it has compiled."""

    def __init__(self, device: torch.device, *, early_launches: bool, tune_products: bool) -> None:
        """The options are those of `wholestep.Inductor`."""
        self._device, self._on_gpu = device, device.type == "cuda"
        self.multi_tensor = multi_tensor.MultiTensorCompiler()
        self.inductor = segment_compiler.SegmentCompiler(
            device, early_launches=early_launches, tune_products=tune_products
        )

    def compile_all(self, program: Program) -> None:
        """Has all segments of a program compiled, and waits for their kernels once. Ours are built meanwhile."""
        segments = segments_of(program)
        if self._on_gpu:
            self.multi_tensor.begin(program)
            triton_cache.build_in_background(_kernels_called(program), self._device)
        for number, segment in enumerate(segments, 1):
            report_stage(f"compiling segment {number} of {len(segments)}")
            if not self.multi_tensor.has(segment):
                self.inductor.begin(segment)
        if self._on_gpu:
            text = "\n".join(self.inductor.texts())
            triton_cache.build_in_background(
                itertools.chain(column_sum.builds(text), row_sum.builds(text)), self._device
            )
        report_stage("waiting for kernels")
        self.inductor.finish()

    def why_one_by_one(self, program: Program) -> dict[str, str]:
        """By name of the segments that are not compiled, why."""
        found = {one.name: self.inductor.why_none(one) for one in segments_of(program)}
        return {name: why for name, why in found.items() if why}

    def compile(self, segment: Segment) -> Compiled:
        """A function that does what a segment does: takes a list, which it empties, and returns a list."""
        return self.multi_tensor.compile(segment) or self.inductor.compile(segment)

    def dumps(self, program: Program) -> tuple[bytes | None, ...]:
        """The compiled code of a program, for another process: first what its segments share, then one entry each.

        Segments that do the same have one entry in common, an object that a file holds once."""
        dumped = functools.cache(self._dumped)
        first: dict[str, Segment] = {}
        segments = segments_of(program)
        return (self.inductor.dump_shared(), *(dumped(first.setdefault(one.likeness, one)) for one in segments))

    def _dumped(self, segment: Segment) -> bytes | None:
        """The compiled code of a segment, with a mark before it that says by whom."""
        if (data := self.multi_tensor.dumps(segment)) is not None:
            return _MULTI_TENSOR + data
        data = self.inductor.dumps(segment)
        return None if data is None else _BY_INDUCTOR + data

    def loads(self, program: Program, kernels: tuple[bytes | None, ...]) -> None:
        """Takes over what `dumps` has given in another process."""
        if self._on_gpu:
            toolchain_hash.wait_for_inductor()
        shared, *rest = kernels
        loaded = [(segment, data) for segment, data in zip(segments_of(program), rest, strict=True) if data is not None]
        if shared is not None and not self._on_gpu:
            self.inductor.load_shared(shared)
        for segment, data in loaded:
            if data.startswith(_BY_INDUCTOR):
                self.multi_tensor.leave_to_inductor(segment)
                self.inductor.loads(segment, data.removeprefix(_BY_INDUCTOR))
        # After Inductor, which tells Triton where its cache is.
        if shared is not None and self._on_gpu:
            self.inductor.load_shared(shared)
        for segment, data in loaded:
            if data.startswith(_MULTI_TENSOR):
                self.multi_tensor.loads(segment, data.removeprefix(_MULTI_TENSOR), self._device)


def _kernels_called(program: Program) -> Iterator[triton_cache.Job]:
    """Builds of the kernels of ours that a program calls itself, not within segments."""
    for node in program.graph.find_nodes(op="call_function", target=CROSS_ENTROPY):
        if cross_entropy.takes(node.args[0]):
            yield cross_entropy.build(node)
    yield from copy_all_reduce.builds(program)
    yield from sparse_all_reduce.builds(program)
