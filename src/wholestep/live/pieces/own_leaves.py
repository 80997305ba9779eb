"""Tensors that a step makes and tells to ask for a gradient, as attacks and gradient penalties do.

``noise.requires_grad_()`` makes a value another one, without a graph. A backward that comes after it leaves a gradient
there, which Python may read: if somebody still holds the tensor when the piece has run, ``.grad`` is a result of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wholestep.live.pieces.recorded_calls import RecordedCalls
from wholestep.live.recording.path import BACKWARDS, GRADIENT_OF
from wholestep.live.recording.record import VALUE, Record, Value
from wholestep.live.recording.structure import unflatten


def given_gradients(run: RecordedCalls, records: Sequence[Record]) -> dict[Value, torch.Tensor]:
    """Those that somebody holds and that these records take or make, if a backward among them leaves gradients."""
    if not any(map(_leaves_gradients, records)):
        return {}
    alive = run.tensors.alive().items()
    asking = {value: one for value, one in alive if one.requires_grad and not run.has_graph(value)}
    if not asking:
        return {}
    taken = {(operand.key, operand.detail) for one in records for operand in one.operands if operand.kind == VALUE}
    return {value: one for value, one in asking.items() if value in taken}


def why_no_piece(run: RecordedCalls, span: tuple[int, int], since: int) -> str:
    """Why a piece of these records cannot give such gradients; empty if it can. What comes before the record `since` is
    no part of it, and gradients that a piece leaves at its arguments are an error of its capture."""
    records = run.records[since : span[1]]
    asking = given_gradients(run, records)
    if not asking:
        return ""
    if any(value[0] < since for value in asking):
        return "where a backward leaves a gradient at what an earlier piece has made"
    if any(map(_may_make_graph, records)):
        return "where a backward leaves a gradient with a graph"
    held = (run.records[value[0]] for value in run.tensors.alive())
    if any(_asked(record) in asking for record in held):
        return "where both a tensor and its gradient are held"
    return ""


def _leaves_gradients(record: Record) -> bool:
    """Whether it is a backward that adds to ``.grad``."""
    return record.key.function in BACKWARDS[:2]


def _may_make_graph(record: Record) -> bool:
    """Whether it is a backward that is told to make a graph."""
    if not _leaves_gradients(record):
        return False
    args, kwargs = unflatten(record.key.structure, [operand.key for operand in record.operands])
    return kwargs.get("create_graph", False) is not False or args[3:4] == (True,)


def _asked(record: Record) -> Value | None:
    """The value of which a record gives the gradient."""
    if record.key.function not in GRADIENT_OF or record.operands[0].kind != VALUE:
        return None
    return record.operands[0].key, record.operands[0].detail
