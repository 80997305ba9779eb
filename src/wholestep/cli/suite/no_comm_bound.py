"""The same step with its communication left out: the limit of what hiding it can reach.

It is planned, scheduled and cut into segments like the real one, and runs the same kernels; only what starts and ends
collectives is taken out of the scheduled graph. So its results are wrong: every rank goes its own way. Gradients that
would come back from their journey in float32 are made in it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from wholestep.api.compiled_step import CompiledStep
from wholestep.api.stages import Stages
from wholestep.config import DDP
from wholestep.config import Inductor as InductorOptions
from wholestep.errors import InternalError
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.lower.base.protocol import Wait
from wholestep.lower.inductor_backend import InductorBackend
from wholestep.passes.comm.wire_dtype import narrow_wire_dtype
from wholestep.passes.pass_manager import Pass, pass_name
from wholestep.runtime.distributed.world import init
from wholestep.runtime.options import checked_options


def without_communication(program: Program) -> Program:
    """A copy of a scheduled program in which what a collective gives is what it was given.

    Raises InternalError for a collective whose result has another shape: nothing could stand for it.
    """
    program = graph_edit.copy(program)
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is op_info.WAIT or (op_info.is_collective(node) and op_info.mutated_args(node.target)):
            graph_edit.replace_node(node, node.args[0])
        elif op_info.is_collective(node):
            given = node.args[0]
            if node_meta.tensor(node).shape != node_meta.tensor(given).shape:
                raise InternalError(f"{node.name} ({node.target}) cannot be left out: it gives another shape.")
            with graph.inserting_before(node):  # the collective would have copied it as well
                graph_edit.replace_node(node, graph_edit.emit(graph, torch.ops.aten.clone.default, given, like=node))
    return program


class _Silent(InductorBackend):
    """Inductor's backend for a program without its communication."""

    def passes(self, placed: Program) -> list[Pass]:
        return [one for one in super().passes(placed) if pass_name(one) != narrow_wire_dtype.__name__]

    def lower(self, program: Program, wait: Wait | None = None) -> Step:
        return super().lower(without_communication(program), wait)


class _SilentStages(Stages):
    @cached_property
    def backend(self) -> InductorBackend:
        return _Silent(InductorOptions(), init().device)


class SilentStep(CompiledStep):
    """The compiled step of a data-parallel training, without its communication."""

    def __init__(self, step: Any) -> None:
        super().__init__(step, checked_options(DDP(), None, "inductor", None, 0, fullgraph=True), stages=_SilentStages)
