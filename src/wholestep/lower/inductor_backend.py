"""The backend of Inductor: compiled segments and, on a GPU, CUDA graphs of the whole step."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx

from wholestep.config import Inductor as InductorOptions
from wholestep.cost.cost_model import CostModel
from wholestep.cost.link_model import with_copies
from wholestep.ir.ops.dispatch_guard import without_autocast
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.ir.segment import Compiled, Segment, segments_of
from wholestep.lower.base import eager_backend
from wholestep.lower.base.protocol import Backend, ExecutionMode, Wait
from wholestep.lower.cudagraph import graph_pool, graph_runner, sized_graphs
from wholestep.lower.cudagraph.partition import partition
from wholestep.lower.foreach import multi_tensor
from wholestep.lower.gemm import matmul_autotune
from wholestep.lower.inductor_passes import copy_engine_wire_format, inductor_passes
from wholestep.lower.kernel_exchange import KernelExchange, receives_kernels
from wholestep.lower.kernels import copy_all_reduce
from wholestep.lower.program_compiler import ProgramCompiler
from wholestep.passes.analysis.task_graph import live_bytes
from wholestep.passes.comm.use_copy_engine import MIN_BYTES
from wholestep.passes.comm.wire_format import WireFormat, unchanged
from wholestep.passes.pass_manager import Pass
from wholestep.runtime.distributed.blob_store import BlobStore
from wholestep.util import background
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from wholestep.lower.inductor import compile_fx, segment_compiler
else:
    compile_fx = lazy_import("wholestep.lower.inductor.compile_fx")
    segment_compiler = lazy_import("wholestep.lower.inductor.segment_compiler")

log = logging.getLogger("wholestep")


class InductorBackend(Backend):
    """Runs segments as Inductor compiles them and, on a GPU, the whole step as one CUDA graph or as few as possible."""

    shares_kernels = True

    def __init__(self, options: InductorOptions, device: torch.device, blob_store: BlobStore | None = None) -> None:
        """`blob_store`: where other ranks find what rank 0 compiles; None where there are none."""
        self._options, self._device, self._on_gpu = options, device, device.type == "cuda"
        self._receives_kernels = receives_kernels(blob_store)
        self._uses_copy_engines = self._on_gpu and bool(options.copy_engines)
        self._copy_group_sizes: dict[str, int] = {}
        """Of the last program: the groups whose large reductions go by copies, with their sizes."""
        self._tunes = options.tune_products and segment_compiler.may_measure()
        self._operators = matmul_autotune.operators() if self._tunes and self._on_gpu else None
        """What stands in for operators of torch."""
        self._compiler = ProgramCompiler(device, early_launches=options.early_launches, tune_products=self._tunes)
        self._exchange = KernelExchange(self._compiler, device, blob_store) if blob_store is not None else None
        self._pool = graph_pool.Pool(device)
        self._why_no_graph: WeakKeyDictionary[Step, str] = WeakKeyDictionary()
        """Why nothing of a lowered program is a CUDA graph."""
        self._one_by_one: WeakKeyDictionary[Step, str] = WeakKeyDictionary()
        """Which segments of a lowered program are not compiled, and why; where there are any."""
        self._refused: dict[Any, str] = {}
        """Targets of calls that no graph can hold, as was found out in a capture, with what was said."""

    def prepare(self) -> None:
        if self._receives_kernels:
            if self._on_gpu:
                # Who measures block sizes imports it, and the others would wait for this rank in the first run.
                background.start_in_background(partial(importlib.import_module, "wholestep.lower.inductor.compile_fx"))
        elif self._on_gpu:
            compile_fx.start_workers()
        else:
            self._compiler.inductor.prepare()

    def passes(self, placed: Program) -> list[Pass]:
        self._copy_group_sizes = self._groups_that_copy(placed)
        return inductor_passes(
            self._device.type,
            fuses_activations=bool(self._operators),
            uses_copy_engines=self._uses_copy_engines,
            multi_tensor_notes=self._compiler.multi_tensor.note_updates,
        )

    def costs(self, cost: CostModel) -> CostModel:
        links = cost.links
        for ranks in {*self._copy_group_sizes.values()}:  # none before there are `passes`
            links = with_copies(links, ranks=ranks, least_bytes=MIN_BYTES)
        device = cost.device.tuned() if self._tunes else cost.device
        return replace(
            cost, compiles=segment_compiler.may_compile, at_once=multi_tensor.loops, links=links, device=device
        )

    def wire_format(self, grad: fx.Node, group: str) -> WireFormat:
        # Copies leave gradients in the type of their products, and take rows of tables.
        size = self._copy_group_sizes.get(group, 0)
        return copy_engine_wire_format(grad, size, supports=segment_compiler.widens) if size else unchanged(grad, group)

    def fingerprint(self) -> list[tuple[str, str]]:
        return segment_compiler.fingerprint(self._device)

    def dump_kernels(self, program: Program) -> tuple[bytes | None, ...]:
        return self._compiler.dumps(program)

    def load_kernels(self, program: Program, kernels: tuple[bytes | None, ...]) -> None:
        if self._exchange is not None:
            self._exchange.mark_seen(program)
        self._compiler.loads(program, kernels)

    @without_autocast()
    def compile_segments(self, program: Program) -> Mapping[Segment, Compiled]:
        self._compiler.compile_all(program)
        return {one: self._compiler.compile(one) for one in segments_of(program)}

    @without_autocast()
    def lower(self, program: Program, wait: Wait | None = None) -> Step:
        """As `Backend.lower`. With `wait` there is no CUDA graph, in which nobody could be seen to wait."""
        self._copy_group_sizes = self._groups_that_copy(program)  # a step that was saved has been planned elsewhere
        key = self._exchange.mark_seen(program) if self._exchange is not None else None
        if self._exchange is None or key is None:
            return self._lowered(program, wait)
        if not self._exchange.compiles(key):
            self._exchange.take(program, key)
            return self._lowered(program, wait)
        try:
            step = self._lowered(program, wait)
        except BaseException:
            self._exchange.give_up(key)
            raise
        self._exchange.put(program, key)
        return step

    def execution_mode(self, step: Step) -> ExecutionMode:
        rest = self._one_by_one.get(step, "")
        if not isinstance(step, (graph_runner.GraphRunner, sized_graphs.SizedGraphs)):
            reason = self._why_no_graph.get(step, "there is no GPU")
        elif step.why_none:
            reason = step.why_none
        else:
            return ExecutionMode(f"inductor, {step.description}{rest}", is_one_launch=True)
        return ExecutionMode(f"inductor, no CUDA graph: {reason}{rest}")

    def _groups_that_copy(self, program: Program) -> dict[str, int]:
        """The groups of a program whose large reductions go by copies, with their sizes."""
        axes = program.mesh if self._uses_copy_engines else ()
        return {
            axis.group: axis.size
            for axis in axes
            if axis.size > 1 and not copy_all_reduce.why_not(axis.group, self._device)
        }

    def _lowered(self, program: Program, wait: Wait | None) -> Step:
        self._compiler.compile_all(program)
        step = self._step(program, wait)
        if reasons := self._compiler.why_one_by_one(program):
            self._one_by_one[step] = "".join(f"; {name} runs one by one: {why}" for name, why in reasons.items())
        return step

    def _step(self, program: Program, wait: Wait | None) -> Step:
        moves = bool(sized_graphs.moving_inputs(program))
        # Algorithms of products are measured for one size each, and every batch may have another one.
        replacements = None if moves else self._operators
        lower = eager_backend.Lowering(wait=wait, compile_segment=self._compiler.compile, replacements=replacements)
        if not self._on_gpu or wait is not None:
            return lower(program)
        program = self._compiler.multi_tensor.overlap_last_update(program)
        parts = partition(program, self._refused) if self._options.cuda_graph == "auto" else "it was not asked for"
        if isinstance(parts, str):
            log.info("no CUDA graph: %s", parts)
            step = lower(program)
            self._why_no_graph[step] = parts
            return step
        runner: type[graph_runner.GraphRunner | sized_graphs.SizedGraphs]
        runner = sized_graphs.SizedGraphs if moves else graph_runner.GraphRunner
        room_bytes = max(live_bytes(program).values(), default=0)
        return runner(program, parts, lower, self._pool, refused=self._refused, room_bytes=room_bytes)
