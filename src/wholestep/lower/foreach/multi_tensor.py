"""Segments of calls on lists of tensors, as kernels of our own: one for all indices with the same expression.

What an optimizer does to n parameters is the same arithmetic n times. A compiler that is given all of it looks at n
times as many operators; here one index is written out (`lower/foreach/index_expr.py`), and one kernel
(`lower/foreach/triton_codegen.py`) computes it for all of them, one row of a table each
(`lower/foreach/kernel_plan.py`)::

    w', m', v' = fused_adamw([w0, w1, ...], [g0, g1, ...], ...)
    table      = one row per index: addresses of w, g, m, v, rates, betas, of w', m', v'; number of elements

Note: tables in CUDA graphs
    Outside of a capture a table is made anew where an address has changed, through pinned memory of its own, which the
    allocator keeps until the copy is done. A graph finds its addresses in `_captured`, which lives as long as this
    object, which the owner of the graph keeps. It is filled after the capture: the addresses are those of every
    replay, and a copy before each kernel would be waited for. A step that is captured again has dropped its graph,
    and `torch.cuda.graph` waits for the device before a capture begins: the last replay of the old graph is done before
    `_captured` changes. Where a user captures the step, nobody is there after it, and the graph copies out of `_held`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
import logging
import threading
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir import graph_edit, node_meta, op_info, serializer
from wholestep.ir.ops.collectives import ALL_REDUCE_ROWS_
from wholestep.ir.program import Program
from wholestep.ir.segment import Segment, segments_of
from wholestep.lower.codecache import toolchain_hash, triton_cache
from wholestep.lower.cudagraph import capture_hooks
from wholestep.lower.foreach import triton_codegen
from wholestep.lower.foreach.index_expr import apart, loops, takes
from wholestep.lower.foreach.kernel_plan import Cell, Plan, Turned, plan
from wholestep.lower.kernels import copy_all_reduce
from wholestep.passes.analysis import write_order
from wholestep.util import background

log = logging.getLogger("wholestep")

__all__ = ["MultiTensorCompiler", "MultiTensorSegment", "apart", "loops", "takes"]

_WARPS = 4


@dataclass(frozen=True, slots=True)
class _Awaited:
    """An argument of a segment that comes as `copies.Arriving`."""

    argument: int
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dumped:
    """What another process needs."""

    plan: Plan
    binaries: bytes


class MultiTensorCompiler:
    """Compiles segments of calls on lists of tensors, each once."""

    def __init__(self) -> None:
        self._plans: dict[Segment, Plan | str] = {}
        """Why not, for what is not computed here; nothing where Inductor has compiled it in another process."""
        self._awaited: dict[Segment, _Awaited] = {}
        self._layouts: dict[Segment, _Layout] = {}
        self._texts: dict[str, str] = {}
        self._building: threading.Thread | None = None

    def begin(self, program: Program) -> None:
        """Begins to build the kernels of a program for a GPU, in a thread: there are other segments to compile."""
        plans = [one for segment in segments_of(program) if isinstance(one := self._of(segment), Plan)]
        wanted = {kernel.text: one.device for one in plans for kernel in one.kernels}
        for text in wanted:
            _built(text)  # once: what two threads made would be two kernels, of which one is built
        if wanted:
            self._building = background.start_in_background(functools.partial(_build, wanted))

    def compile(self, segment: Segment) -> MultiTensorSegment | None:
        """A function that does what the segment does, with tables of its own; None for what is not computed here."""
        found = self._of(segment)
        if not isinstance(found, Plan):
            return None
        layout = self._layouts.get(segment)
        if layout is None or layout.plan is not found:
            layout = self._layouts[segment] = _Layout.of(found, self._awaited.get(segment))
        return MultiTensorSegment(layout, self._building)

    def has(self, segment: Segment) -> bool:
        """Whether a segment is computed here."""
        return isinstance(self._of(segment), Plan)

    def dumps(self, segment: Segment) -> bytes | None:
        """The plan of a segment and what Triton has made of its kernels, for another process; None for what was not
        built."""
        found = self._of(segment)
        if self._building is not None:
            self._building.join()
        if not isinstance(found, Plan) or not all(kernel.text in _binaries for kernel in found.kernels):
            return None
        built = triton_cache.dumps(_binaries[kernel.text] for kernel in found.kernels)
        return serializer.dumps(_Dumped(plan=found, binaries=built)) if found.kernels else None

    def loads(self, segment: Segment, data: bytes, device: torch.device) -> None:
        """Uses what `dumps` gave in another process, for this GPU or one of the same kind: it holds no number of
        one but that of the plan."""
        try:
            found: _Dumped = serializer.loads(data)
            self._plans[segment] = replace(found.plan, device=device)
            triton_cache.loads(found.binaries)
        except Exception as error:  # whatever it is, kernels can be built
            log.warning("%s is built anew: %s: %s", segment.name, type(error).__name__, error)

    def leave_to_inductor(self, segment: Segment) -> None:
        """Another process has had this segment compiled by Inductor. Nobody looks at what it does."""
        self._plans[segment] = ""

    def _of(self, segment: Segment) -> Plan | str:
        if segment not in self._plans:
            self._plans[segment] = found = plan(segment, self._texts)
            if isinstance(found, str) and found and any(map(takes, segment.calls)):
                log.info("%s is left to Inductor: %s", segment.name, found)
        return self._plans[segment]

    def overlap_last_update(self, program: Program) -> Program:
        """The scheduled program whose last update by copies begins when all pieces of its gradients but one are there.

        While it does, the wires are busy with the last piece, after which there is only that piece's own part left.
        The segment waits itself then. That can be where it alone reads the message, and by one kernel, so that no
        element is read which another kernel has overwritten; and where inputs are written beside communication anyway.
        Rows of a table (`lower/kernels/sparse_all_reduce.py`) come as one piece. Where they come last, nothing else has
        to be early.
        """
        if not write_order.writes_during_communication(program):
            return program
        program = graph_edit.copy(program)
        waits = (node for node in reversed(program.graph.nodes) if node.target is op_info.WAIT and _is_by_copies(node))
        wait = next(waits, None)
        reader = next(iter(wait.users)) if wait is not None and len(wait.users) == 1 else None
        if wait is None or reader is None or not isinstance(reader.target, Segment):
            return program
        if (start := op_info.waited_for(wait)).target not in copy_all_reduce.STARTS:
            return program
        segment, awaited = reader.target, _Awaited(reader.args.index(wait), node_meta.tensor(wait).itemsize)
        if isinstance(found := self._of(segment), Plan) and _can_await(found, awaited.argument):
            reader.target = replace(segment)
            self._plans[reader.target], self._awaited[reader.target] = found, awaited
            start.target = copy_all_reduce.STARTS[start.target]
            graph_edit.replace_node(wait, start)
        return program

    def note_updates(self, program: Program) -> Program:
        """The same program. Notes say how many tensors how many kernels update, and what is left to Inductor."""
        # Segments change once more, when results are stored where their operands lay.
        plans = {one.name: plan(one, self._texts) for one in segments_of(program) if any(map(takes, one.calls))}
        own = [one for one in plans.values() if isinstance(one, Plan)]
        rows, kernels = sum(one.num_rows for one in own), sum(len(one.kernels) for one in own)
        return program.with_notes(
            *([f"{rows} tensors are updated by {kernels} kernels over lists"] if own else []),
            *(f"{name} is left to Inductor: {one}" for name, one in plans.items() if isinstance(one, str)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """What all functions of a plan share: where its kernels begin in the tables, and what each program does."""

    plan: Plan
    awaited: _Awaited | None
    launches: tuple[tuple[Any, int, int, int], ...]
    """Kernel, where its table starts, where its programs start, how many they are."""
    needs_bytes: tuple[int, ...]
    """Of what is awaited, for each program of the first kernel, in order."""
    bases: Tensor
    offsets: Tensor
    programs: Tensor
    """On the device. A capture cannot make it."""

    @classmethod
    def of(cls, plan: Plan, awaited: _Awaited | None) -> _Layout:
        """That of a plan. Not to be called in a capture."""
        cells: list[Cell] = []
        programs: list[tuple[int, int]] = []
        launches: list[tuple[Any, int, int, int]] = []
        needs_bytes: tuple[int, ...] = ()
        for kernel in plan.kernels:
            first = len(programs)
            for row, (*_, size) in enumerate(kernel.rows):
                programs += [(row, chunk) for chunk in range(-(-size.offset // triton_codegen.CHUNK))]
            if awaited is not None and not kernel.of_numbers:
                needs = {(row, chunk): _needed_bytes(kernel.rows[row], chunk, awaited) for row, chunk in programs}
                programs.sort(key=needs.__getitem__)
                needs_bytes = tuple(needs[one] for one in programs)
            if len(programs) > first:
                launches.append((_built(kernel.text), len(cells), first, len(programs) - first))
            cells += [cell for row in kernel.rows for cell in row]
            # Both tables start on 16 bytes, by which Triton tells variants of a kernel apart.
            cells += [Cell(base=0, offset=0)] * (len(cells) % 2)
            programs += [(0, 0)] * (len(programs) % 2)
        return cls(
            plan=plan, awaited=awaited, launches=tuple(launches), needs_bytes=needs_bytes,
            bases=torch.tensor([cell.base for cell in cells], dtype=torch.int64, device="cpu"),
            offsets=torch.tensor([cell.offset for cell in cells], dtype=torch.int64, device="cpu"),
            programs=torch.tensor(programs, dtype=torch.int32, device=plan.device),
        )  # fmt: skip


class MultiTensorSegment:
    """A segment as its kernels: takes a list of arguments, which it empties, and gives a list of results."""

    def __init__(self, layout: _Layout, building: threading.Thread | None = None) -> None:
        """Makes tables of its own. Not to be called in a capture. `building` builds the kernels, until when calls
        wait."""
        self._layout, self._building = layout, building
        self._plan, self._device, self._awaited = layout.plan, layout.plan.device, layout.awaited
        # A capture can make neither of them.
        pinned, num_cells = self._device.type == "cuda", len(layout.bases)
        self._held = torch.empty(num_cells, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._captured = torch.empty(num_cells, dtype=torch.int64, device=self._device)
        self._known: tuple[Any, ...] = ()
        self._table: Tensor | None = None

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """One run."""
        if self._building is not None:
            self._building.join()
            self._building = None
        arriving: copy_all_reduce.PendingMessage | None = None
        if self._awaited is not None:
            arriving = arguments[self._awaited.argument]
            arguments[self._awaited.argument] = arriving.result
        results: list[Any] = [None] * self._plan.num_results
        for number, like in self._plan.fresh:
            results[number] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._device)
        turned = [_turn(one, arguments[one.argument]) for one in self._plan.turned]
        tensors = [*arguments, *(results[number] for number, _ in self._plan.fresh), *turned]
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            table = self._filled([0, *map(Tensor.data_ptr, tensors)])
            done = 0 if arriving is None else self._begin(table, arriving)
            for number, (*_, count) in enumerate(self._layout.launches):
                self._launch(table, number, 0 if number else done, count)
        arguments.clear()
        return results

    def _fill(self) -> None:
        self._captured.copy_(self._held, non_blocking=True)

    def _begin(self, table: Tensor, arriving: copy_all_reduce.PendingMessage) -> int:
        """Launches what programs of the first kernel can do without the last piece, and waits for that one.

        Gives how many programs have been launched.
        """
        *early, (_, last) = arriving.pieces
        for _, event in early:
            event.wait()
        there = early[-1][0] * arriving.result.itemsize if early else 0
        done = bisect_right(self._layout.needs_bytes, there) // 2 * 2  # tables start on 16 bytes
        self._launch(table, 0, 0, done)
        last.wait()
        return done

    def _launch(self, table: Tensor, number: int, start: int, stop: int) -> None:
        """Some programs of a kernel."""
        if stop > start:
            kernel, cells, first, _ = self._layout.launches[number]
            kernel[(stop - start,)](table[cells:], self._layout.programs[first + start :], num_warps=_WARPS)

    def _filled(self, addresses: list[int]) -> Tensor:
        """The table with these addresses, for what is launched next."""
        on_gpu = self._device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            torch.add(torch.tensor(addresses, device="cpu")[self._layout.bases], self._layout.offsets, out=self._held)
            if not capture_hooks.after_capture(self._fill):
                self._fill()
            return self._captured
        known = (addresses, torch.cuda.current_stream() if on_gpu else None)
        if self._table is None or known != self._known:
            filled = torch.tensor(addresses, device="cpu")[self._layout.bases] + self._layout.offsets
            filled = filled.pin_memory() if on_gpu else filled
            self._known, self._table = known, filled.to(self._device, non_blocking=True)
        return self._table


def _is_by_copies(wait: fx.Node) -> bool:
    start = op_info.waited_for(wait)
    return start.target in (*copy_all_reduce.STARTS, ALL_REDUCE_ROWS_) and list(start.users) == [wait]


def _can_await(plan: Plan, argument: int) -> bool:
    """Whether a plan can begin with a part of an argument: it is read where it is, and one kernel alone goes through
    elements. Kernels of numbers are launched after it anyway, as it reads what they overwrite."""
    return sum(not kernel.of_numbers for kernel in plan.kernels) == 1 and all(
        one.argument != argument for one in plan.turned
    )


def _needed_bytes(row: tuple[Cell, ...], chunk: int, awaited: _Awaited) -> int:
    """Up to where a program reads the argument that is awaited; 0 if it does not."""
    *cells, size = row
    stop = min((chunk + 1) * triton_codegen.CHUNK, size.offset)
    ends = (cell.offset + stop * awaited.itemsize for cell in cells if cell.base == 1 + awaited.argument)
    return max(ends, default=0)


def _turn(turned: Turned, argument: Tensor) -> Tensor:
    seen = turned.seen
    source = argument.as_strided(seen.shape, seen.stride(), argument.storage_offset() + turned.start)
    made = torch.empty_strided(seen.shape, turned.strides, dtype=seen.dtype, device=argument.device)
    return made.copy_(source)


def _build(wanted: Mapping[str, torch.device]) -> None:
    """Has Triton compile modules' kernels for devices, as `MultiTensorSegment` launches them."""
    toolchain_hash.wait_for_triton()
    for text, device in wanted.items():
        if background.is_ending():
            return
        # What goes wrong here goes wrong again where the kernel is launched, and is told there.
        with contextlib.suppress(Exception), torch.cuda.device(device):
            _binaries[text] = _built(text).warmup(torch.int64, torch.int32, grid=(1,), num_warps=_WARPS)
            triton_cache.make_ready(_binaries[text])


_binaries: dict[str, Any] = {}
"""What Triton has made of a module's text."""


@functools.cache
def _built(text: str) -> Any:
    """The kernel of a module's text. Triton reads the source of functions where Python keeps lines of files."""
    name = f"wholestep_kernel_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    linecache.cache[f"<{name}>"] = (len(text), None, text.splitlines(keepends=True), f"<{name}>")
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(text, f"<{name}>", "exec"), namespace)
    return next(namespace[key] for key in ("update_lists", "update_numbers") if key in namespace)
