"""The backends: which passes they add, and how they make a function of a scheduled program."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx

from wholestep.config import Inductor as InductorOptions
from wholestep.cost.cost_model import CostModel
from wholestep.cost.link_model import with_copies
from wholestep.ir import node_meta
from wholestep.ir.ops.collectives import averages
from wholestep.ir.ops.dispatch_guard import without_autocast
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.ir.segment import Segment
from wholestep.lower.base import eager_backend
from wholestep.lower.codecache import toolchain_hash, triton_cache
from wholestep.lower.cudagraph import graph_pool, graph_runner
from wholestep.lower.cudagraph.partition import split
from wholestep.lower.foreach import multi_tensor
from wholestep.lower.gemm import matmul_autotune
from wholestep.lower.kernels import column_sum, copy_all_reduce, cross_entropy, row_sum, sparse_all_reduce
from wholestep.passes.comm.fold_mean import fold_mean
from wholestep.passes.comm.use_copy_engine import MIN_BYTES, use_copy_engine
from wholestep.passes.comm.wire_dtype import Makes, narrow_type, narrow_wire_dtype
from wholestep.passes.comm.wire_format import WireFormat, unchanged
from wholestep.passes.pass_manager import Pass
from wholestep.passes.rewrites.decompose_batch_norm import decompose_batch_norm
from wholestep.passes.rewrites.fuse_cross_entropy import CROSS_ENTROPY, fuse_cross_entropy
from wholestep.passes.rewrites.fuse_gelu import fuse_gelu
from wholestep.passes.rewrites.matmul_out_dtype import widen_matmul_out_dtype
from wholestep.passes.rewrites.pad_matmul import pad_matmul
from wholestep.passes.rewrites.padded_cross_entropy import pad_cross_entropy
from wholestep.passes.schedule.batch_host_reads import batch_host_reads
from wholestep.passes.schedule.defer_host_reads import defer_host_reads
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars
from wholestep.passes.schedule.sink_waits import sink_waits
from wholestep.runtime.distributed.blob_store import BlobStore
from wholestep.util import background
from wholestep.util.lazy_import import lazy_import
from wholestep.util.progress import report_stage

if TYPE_CHECKING:
    from wholestep.lower.inductor import compile_fx, segment_compiler
    from wholestep.lower.inductor.compile_fx import Compiled
else:
    compile_fx = lazy_import("wholestep.lower.inductor.compile_fx")
    segment_compiler = lazy_import("wholestep.lower.inductor.segment_compiler")

log = logging.getLogger("wholestep")

_BY_INDUCTOR, _OVER_LISTS = b"I", b"L"
"""Marks in front of what was compiled of a segment: by whom."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a program runs that was lowered."""

    told: str
    """For people."""
    is_one_launch: bool = False
    """Whether the host launches the whole step at once."""


class Eager:
    """Runs the graph's own text, node by node."""

    shares_kernels = False
    """Whether ranks use what rank 0 has compiled: it lowers before it meets the others, who lower behind that."""

    def prepare(self) -> None:
        """Starts what takes a while and will be needed to compile, before anything is captured."""

    def passes(self, placed: Program) -> list[Pass]:
        """Passes before the one that lets operators write in place, for this program."""
        return []

    def costs(self, cost: CostModel) -> CostModel:
        """Costs of nodes as they will run, from those of nodes that run one by one."""
        return cost

    def travels_as(self, grad: fx.Node, group: str) -> WireFormat:
        """How a placed gradient goes to who adds it, in the group that reduces it."""
        return unchanged(grad, group)

    def marks(self) -> list[tuple[str, str]]:
        """What its compiled code depends on besides the program, and how that is."""
        return []

    def kernels(self, program: Program) -> tuple[bytes | None, ...]:
        """What it has compiled of a program, for another process; None for what cannot be written."""
        return ()

    def give(self, program: Program, kernels: tuple[bytes | None, ...]) -> None:
        """Has what another process has compiled of a program used when it is lowered."""

    def lower(self, program: Program, wait: eager_backend.Wait | None = None) -> Step:
        """A function from flat inputs to flat results. `wait` stands in for ``wait_tensor``."""
        return eager_backend.lower(program, wait=wait)

    def form(self, step: Step) -> Form:
        """How something runs that `lower` has given."""
        return Form("eager")


class Inductor:
    """Runs segments of the graph as Inductor compiles them and, on a GPU, all of it as one CUDA graph, or as few
    as there can be."""

    shares_kernels = True
    """See `Eager.shares_kernels`."""

    def __init__(self, options: InductorOptions, device: torch.device, blob_store: BlobStore | None = None) -> None:
        """`blob_store`: where other ranks find what rank 0 compiles; None where there are none."""
        self._options, self._device, self._on_gpu = options, device, device.type == "cuda"
        self._blob_store, self._had = blob_store, set[str]()
        """The shelf, and keys of programs whose kernels need not travel any more."""
        self._by_copies = self._on_gpu and bool(options.copy_engines)
        self._copying: dict[str, int] = {}
        """See `_groups_that_copy`, of the last program."""
        self._tunes = options.tune_products and segment_compiler.may_measure()
        self._instead = matmul_autotune.operators() if self._tunes and self._on_gpu else None
        self._inductor = segment_compiler.Inductor(
            device, early_launches=options.early_launches, tune_products=self._tunes
        )
        self._lists = multi_tensor.Plans()
        self._pool = graph_pool.Pool(device)
        self._reasons: WeakKeyDictionary[Step, str] = WeakKeyDictionary()
        """Why nothing of a lowered program is a CUDA graph."""
        self._refused: dict[Any, str] = {}
        """Targets of calls that no graph can hold, as was found out in a capture, with what was said."""

    def prepare(self) -> None:
        """See `Eager.prepare`."""
        if finds(self._blob_store):
            if self._on_gpu:
                # Who measures block sizes imports it, and the others would wait for this rank in the first run.
                background.start_in_background(partial(importlib.import_module, "wholestep.lower.inductor.compile_fx"))
            return
        if self._on_gpu:
            compile_fx.start_workers()
        else:
            self._inductor.prepare()

    def passes(self, placed: Program) -> list[Pass]:
        """See `Eager.passes`."""
        self._copying = self._groups_that_copy(placed)
        return [
            decompose_batch_norm,
            partial(fuse_cross_entropy, fuses=_fuses),
            # Behind the pass that says by whom logits are read, before those that look for products as they will be.
            partial(pad_matmul, pads=segment_compiler.widens),
            pad_cross_entropy,
            *([partial(fuse_gelu, fuses=matmul_autotune.activates)] if self._instead else []),
            # Before products are widened: the path from a gradient to its reduction is shorter then.
            partial(fold_mean, averages=averages),
            *([partial(use_copy_engine, why_not=copy_all_reduce.why_not)] if self._by_copies else []),
            partial(narrow_wire_dtype, makes=segment_compiler.widens),
            partial(widen_matmul_out_dtype, widens=segment_compiler.widens),
            *([batch_host_reads] if self._on_gpu else []),
            # Before segments are formed, whose calls read packed numbers.
            partial(
                pack_scalars, reads=partial(segment_compiler.only_on, self._device.type, segment_compiler.reads_packed)
            ),
            *([defer_host_reads] if self._on_gpu else []),
            # A segment ends where a wait stands.
            sink_waits,
            forms_segments(self._device.type),
            *([self._lists.tell_lists] if self._on_gpu else []),
        ]

    def costs(self, cost: CostModel) -> CostModel:
        """See `Eager.costs`. Before there are `passes` nothing goes by copies."""
        links = cost.links
        for ranks in {*self._copying.values()}:
            links = with_copies(links, ranks=ranks, least_bytes=MIN_BYTES)
        device = cost.device.tuned() if self._tunes else cost.device
        return replace(
            cost, compiles=segment_compiler.may_compile, at_once=multi_tensor.loops, links=links, device=device
        )

    def travels_as(self, grad: fx.Node, group: str) -> WireFormat:
        """See `Eager.travels_as`. Copies leave gradients as their products are, and take rows of tables."""
        size = self._copying.get(group, 0)
        return way_by_copies(grad, size, makes=segment_compiler.widens) if size else unchanged(grad, group)

    @without_autocast()
    def lower(self, program: Program, wait: eager_backend.Wait | None = None) -> Step:
        """See `Eager.lower`. With `wait` there is no CUDA graph, in which nobody could be seen to wait."""
        self._copying = self._groups_that_copy(program)  # a step that was saved has been planned elsewhere
        if self._blob_store is None:
            return self._lowered(program, wait)
        key = segment_compiler.key_of(segments_of(program), self._device)
        is_new = key not in self._had
        self._had.add(key)
        if is_new and not self._blob_store.is_filled_here:
            self._take(program, self._blob_store, key)
        step = self._lowered(program, wait)
        if is_new and self._blob_store.is_filled_here:
            self._put(program, self._blob_store, key)
        return step

    def _groups_that_copy(self, program: Program) -> dict[str, int]:
        """The groups of a program whose large reductions go by copies, with their sizes."""
        axes = program.mesh if self._by_copies else ()
        return {
            axis.group: axis.size
            for axis in axes
            if axis.size > 1 and not copy_all_reduce.why_not(axis.group, self._device)
        }

    def _put(self, program: Program, blob_store: BlobStore, key: str) -> None:
        """Puts what was compiled of a program on the shelf."""
        try:
            blob_store.put(key, pickle.dumps(self.kernels(program)))
        except Exception as error:  # whatever it is, the others have compilers, too
            log.warning("every rank compiles for itself: %s: %s", type(error).__name__, error)

    def _take(self, program: Program, blob_store: BlobStore, key: str) -> None:
        """Takes from the shelf what rank 0 has compiled of a program, if it has the same one."""
        try:
            if (found := blob_store.take(key)) is not None:
                self.give(program, pickle.loads(found))
                return
            why = "rank 0 has compiled no such segments for this kind of device"
        except Exception as error:  # likewise
            why = f"{type(error).__name__}: {error}"
        log.info("this rank compiles for itself: %s", why)

    def _lowered(self, program: Program, wait: eager_backend.Wait | None) -> Step:
        self._compile(program)
        lower = partial(eager_backend.lower, wait=wait, compile_segment=self._compiled, instead=self._instead)
        if not self._on_gpu or wait is not None:
            return lower(program)
        program = self._lists.as_it_arrives(program)
        parts = split(program, self._refused) if self._options.cuda_graph == "auto" else "it was not asked for"
        if isinstance(parts, str):
            log.info("no CUDA graph: %s", parts)
            step = lower(program)
            self._reasons[step] = parts
            return step
        return graph_runner.GraphRunner(program, parts, lower, self._pool, refused=self._refused)

    def form(self, step: Step) -> Form:
        """See `Eager.form`."""
        if isinstance(step, graph_runner.GraphRunner) and not step.why_none:
            return Form(f"inductor, {step.told}", is_one_launch=True)
        reason = (
            step.why_none if isinstance(step, graph_runner.GraphRunner) else self._reasons.get(step, "there is no GPU")
        )
        return Form(f"inductor, no CUDA graph: {reason}")

    def marks(self) -> list[tuple[str, str]]:
        """See `Eager.marks`."""
        return segment_compiler.marks(self._device)

    def kernels(self, program: Program) -> tuple[bytes | None, ...]:
        """See `Eager.kernels`. The first entry is what all segments have in common; those of segments that are alike
        are one object, which a file holds once."""
        written = functools.cache(self._written)
        first: dict[str, Segment] = {}
        segments = segments_of(program)
        return (self._inductor.found(), *(written(first.setdefault(one.likeness, one)) for one in segments))

    def _written(self, segment: Segment) -> bytes | None:
        """What was compiled of a segment, with a mark in front that says by whom."""
        if (data := self._lists.written(segment)) is not None:
            return _OVER_LISTS + data
        data = self._inductor.written(segment)
        return None if data is None else _BY_INDUCTOR + data

    def give(self, program: Program, kernels: tuple[bytes | None, ...]) -> None:
        """See `Eager.give`."""
        segments = segments_of(program)
        if self._blob_store is not None:
            self._had.add(segment_compiler.key_of(segments, self._device))
        if self._on_gpu:
            toolchain_hash.wait_for_inductor()
        found, *rest = kernels
        given = [(segment, data) for segment, data in zip(segments, rest, strict=True) if data is not None]
        if found is not None and not self._on_gpu:
            self._inductor.take_found(found)
        for segment, data in given:
            if data.startswith(_BY_INDUCTOR):
                self._lists.leave(segment)
                self._inductor.take(segment, data.removeprefix(_BY_INDUCTOR))
        # Behind Inductor, which tells Triton where its cache is.
        if found is not None and self._on_gpu:
            self._inductor.take_found(found)
        for segment, data in given:
            if data.startswith(_OVER_LISTS):
                self._lists.take(segment, data.removeprefix(_OVER_LISTS), self._device)

    def _compile(self, program: Program) -> None:
        """Has all segments of a program compiled, and waits for their kernels once. Ours are built meanwhile."""
        segments = segments_of(program)
        if self._on_gpu:
            self._lists.begin(program)
            triton_cache.build_beside(_kernels_called(program), self._device)
        for number, segment in enumerate(segments, 1):
            report_stage(f"compiling segment {number} of {len(segments)}")
            if not self._lists.has(segment):
                self._inductor.begin(segment)
        if self._on_gpu:
            text = "\n".join(self._inductor.texts())
            triton_cache.build_beside(itertools.chain(column_sum.builds(text), row_sum.builds(text)), self._device)
        report_stage("waiting for kernels")
        self._inductor.finish()

    def _compiled(self, segment: Segment) -> Compiled:
        return self._lists.compile(segment) or self._inductor.compile(segment)


def way_by_copies(grad: fx.Node, ranks: int, *, makes: Makes) -> WireFormat:
    """How copies take a placed gradient to who adds it, among so many ranks; `makes` as for `narrow_type`."""
    own = node_meta.tensor(grad)
    dtype = narrow_type(grad, makes=makes) or own.dtype
    return WireFormat(dtype=dtype, most_rows=sparse_all_reduce.most_rows(own.shape, own.dtype, ranks))


def forms_segments(device_type: str) -> Pass:
    """The pass that gives Inductor its segments."""
    on_gpu = device_type == "cuda"
    return partial(
        form_segments,
        compiles=partial(segment_compiler.only_on, device_type, segment_compiler.compiles),
        apart=multi_tensor.apart,
        postpones=segment_compiler.follows,
        pays_alone=segment_compiler.pays_alone,
        by_library=segment_compiler.by_library,
        # Calls cost nothing within a CUDA graph. On a CPU they do, and Inductor compiles equal kernels of a segment
        # once anyway, and its different ones side by side.
        cuts_repeats=on_gpu,
        # A core takes longer for a tanh than for reading one.
        goes_by_number=segment_compiler.goes_by_number if on_gpu else None,
    )


def finds(blob_store: BlobStore | None) -> bool:
    """Whether this rank will find what another one has compiled."""
    return blob_store is not None and not blob_store.is_filled_here


def _kernels_called(program: Program) -> Iterator[triton_cache.Job]:
    """What builds the kernels of ours that stand in a program, and not within segments."""
    for node in program.graph.find_nodes(op="call_function", target=CROSS_ENTROPY):
        if cross_entropy.takes(node.args[0]):
            yield cross_entropy.build(node)
    yield from copy_all_reduce.builds(program)
    yield from sparse_all_reduce.builds(program)


def _fuses(product: fx.Node) -> bool:
    """Whether logits go to our own kernel: where they lie in memory anyway, as a library has written them."""
    return segment_compiler.by_library(product) and cross_entropy.takes(product)


def segments_of(program: Program) -> list[Segment]:
    """The segments of a program, in order."""
    return [node.target for node in program.graph.nodes if isinstance(node.target, Segment)]
