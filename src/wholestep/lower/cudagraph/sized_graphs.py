"""CUDA graphs of a step whose arguments have sizes that move: graphs for each of the sizes that come again.

A graph is a list of launches for one set of sizes. Compiled code is for all of them, so what a new size costs is a
capture, which takes as long as a call that is launched kernel by kernel. So a size is captured when it is seen for the
second time, and a training on texts of 900 lengths comes to replay nearly all its steps.

Note: memory
    All graphs are in the pool of the step and never run side by side. Each holds its arguments and what the step
    returns; the rest of the pool is as large as the largest of the sizes needs it. Besides, the driver keeps some
    kilobytes for each launch. On a device with little free memory the size that was not seen for longest makes room
    for a new one.

Note: steps of their own
    What is lowered for a graph is lowered for it alone: kernels over lists of tensors have a table of addresses that a
    graph reads in every replay. All share the text, and what such kernels are laid out by.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wholestep.ir import node_meta
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.ir.sizes import numbers_of
from wholestep.lower.cudagraph.graph_pool import Pool
from wholestep.lower.cudagraph.graph_runner import GraphRunner
from wholestep.lower.cudagraph.partition import Partition, partition
from wholestep.util.gc_pause import gc_paused

MOST_SIZES = 1024
"""Sizes that are known, with graphs or without: the one that was not seen for longest makes room."""

SURE_SIZES = 16
"""Sizes that have graphs however little of the device is free."""

PLAIN_CALLS = 1
"""Calls of a size that run without graphs, in which libraries meet it, before one is captured."""


def moving_inputs(program: Program) -> list[int]:
    """The numbers of tensors with sizes or strides that move between calls."""
    values = map(node_meta.value, program.placeholders)
    tensors = [(number, value) for number, value in enumerate(values) if isinstance(value, Tensor)]
    return [number for number, value in tensors if not all(isinstance(one, int) for one in numbers_of(value))]


@dataclass(slots=True)
class _Seen:
    """Sizes that were seen lately."""

    num_calls: int = 0
    runner: GraphRunner | None = None


class SizedGraphs:
    """Runs a scheduled program as CUDA graphs, by sizes: a function from flat inputs to flat results."""

    def __init__(
        self,
        program: Program,
        parts: Partition,
        lower: Callable[[Program], Step],
        pool: Pool,
        *,
        refused: dict[Any, str],
        room_bytes: int = 0,
    ) -> None:
        """As for `GraphRunner`."""
        self._program, self._parts, self._lower, self._pool = program, parts, lower, pool
        self._refused, self._cut_by, self._room_bytes = refused, {*refused}, room_bytes
        self._plain = lower(program)
        self._moving = moving_inputs(program)
        self._seen: OrderedDict[tuple[tuple[int, ...], ...], _Seen] = OrderedDict()
        """By sizes and strides of the moving inputs, those of the last call at the end."""
        self.why_none = ""
        """Why all runs as it is, where a capture has failed for good."""

    @property
    def description(self) -> str:
        """How many graphs the step is for one size, and why it is cut, for people."""
        return f"{self._parts.description}, for each size that comes again"

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """One step. Results are the caller's own."""
        runner = None if self.why_none else self._runner(inputs)
        if runner is None:
            return self._plain(inputs)
        found = runner(inputs)
        self._learn(runner)
        return found

    def _runner(self, inputs: list[Any]) -> GraphRunner | None:
        """That of the sizes of this call, if they have one."""
        sizes = tuple(size for number in self._moving for size in (inputs[number].shape, inputs[number].stride()))
        seen = self._seen.setdefault(sizes, _Seen())
        self._seen.move_to_end(sizes)
        if len(self._seen) > MOST_SIZES:
            _drop_graphs(self._seen.popitem(last=False)[1])
        seen.num_calls += 1
        if seen.runner is None and seen.num_calls > PLAIN_CALLS:
            others = [one for one in self._seen.values() if one.runner is not None]
            if len(others) >= SURE_SIZES and self._pool.is_short_of_memory():
                _drop_graphs(others[0])
            with gc_paused():
                seen.runner = GraphRunner(
                    self._program, self._parts, self._lower, self._pool,
                    refused=self._refused, room_bytes=self._room_bytes, warm_up_calls=0, keeps_grads=False,
                )  # fmt: skip
        return seen.runner

    def _learn(self, runner: GraphRunner) -> None:
        """Goes on as a capture of the last call has shown: without graphs, or cut where none can hold a call."""
        self.why_none = runner.why_none
        if not self.why_none and self._cut_by == self._refused.keys():
            return
        parts = partition(self._program, self._refused)
        self._parts, self._cut_by = parts if isinstance(parts, Partition) else self._parts, {*self._refused}
        for seen in self._seen.values():
            _drop_graphs(seen)


def _drop_graphs(seen: _Seen) -> None:
    if seen.runner is not None:
        seen.runner.retire()
    seen.runner = None
