"""Whether a call is the next record of a path, in as little time as Python allows: most calls of a live step are.

It says yes or does not know. Whatever is not plain (containers among the arguments, optimizers, a backward, tensors
that are others at every call) goes the long way, which decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from wholestep.live.recording.modes import Modes
from wholestep.live.recording.record import Operand, OutputMeta, Record
from wholestep.live.recording.structure import LEAF


@dataclass(frozen=True, slots=True)
class FastRecord:
    """A record whose arguments are plain leaves, and whose result is one new tensor."""

    record: Record
    function: Callable[..., Any]
    num_args: int
    names: tuple[str, ...]
    """Of the keyword arguments."""
    operands: tuple[Operand, ...]
    modes: Modes
    output: OutputMeta


def fast_record(record: Record, slow: tuple[Any, ...]) -> FastRecord | None:
    """The record for quick comparison; None where it has to be the long way. `slow` functions always have."""
    _, (args, kwargs) = record.key.structure
    plain = all(item is LEAF for item in (*args[1], *kwargs[2]))
    output = record.outputs[0] if record.output_structure is LEAF else None
    if not plain or output is None or output.alias is not None or record.key.function in slow:
        return None
    if any(isinstance(operand.key, Optimizer) for operand in record.operands):
        return None
    return FastRecord(
        record, record.key.function, len(args[1]), tuple(kwargs[1]), record.operands, record.key.modes, output
    )  # fmt: skip
