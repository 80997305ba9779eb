"""The runner of passes: the only place that copies, times, checks, logs and keeps history."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import torch.fx as fx

from wholestep.errors import InternalError
from wholestep.ir import graph_edit, op_info
from wholestep.ir.ops.dispatch_guard import without_autocast
from wholestep.ir.program import PassRecord, Program
from wholestep.ir.verifier import verify

log = logging.getLogger("wholestep.passes")

Pass = Callable[[Program], Program]
"""Edits the graph it is given and returns the program; options are bound before: ``partial(bucket, cap_bytes=...)``."""


@without_autocast()
def run_passes(program: Program, passes: Iterable[Pass]) -> Program:
    """Runs `passes` in order on a copy of `program`, which stays as it is.

    The program is verified before the first pass and after each one, and calls that draw random numbers have to keep
    their order; a pass that breaks a rule is named in the InternalError. Each pass leaves a record with its time, the
    nodes left, and its notes.
    """
    verify(program)
    program = graph_edit.copy(program)
    for pass_ in passes:
        program = _run_pass(program, pass_)
    return program


def _run_pass(program: Program, pass_: Pass) -> Program:
    name, before = pass_name(pass_), program.history
    drawing = _drawing(program)
    start = time.perf_counter()
    program = pass_(program)
    time_ms = 1e3 * (time.perf_counter() - start)
    try:
        verify(program)
        _check_draws(drawing, program)
    except InternalError as error:
        raise InternalError(f"after the pass {name}: {error}") from error
    # What a pass adds to the history are its notes, in records without a name.
    notes = tuple(note for record in program.history[len(before) :] for note in record.notes)
    record = PassRecord(name=name, time_ms=time_ms, num_nodes=len(program.graph.nodes), notes=notes)
    log.debug("%s: %.1f ms, %d nodes%s", name, time_ms, record.num_nodes, "".join(f"; {note}" for note in notes))
    return replace(program, history=(*before, record))


def _drawing(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and op_info.draws(node)]


def _check_draws(before: list[fx.Node], program: Program) -> None:
    """Raises InternalError where calls that draw random numbers have changed places: each would get another's."""
    known = {node: place for place, node in enumerate(before)}
    kept = [node for node in _drawing(program) if node in known]
    for one, following in pairwise(kept):
        if known[one] > known[following]:
            raise InternalError(f"{one.name} and {following.name} draw random numbers and have changed places")


def pass_name(pass_: Pass) -> str:
    """The name of a pass: of the function, also where options are bound with ``functools.partial``."""
    inner = getattr(pass_, "func", pass_)
    return str(getattr(inner, "__name__", type(inner).__name__))
