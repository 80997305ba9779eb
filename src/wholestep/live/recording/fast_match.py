"""Whether a call is the next record of a path, in as little time as Python allows: most calls of a live step are.

It says yes or does not know. Whatever is not plain (containers among the arguments, optimizers, a backward, tensors
that are others at every call) goes the long way, which decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.optim import Optimizer

from wholestep.live.recording.modes import Modes
from wholestep.live.recording.record import EXTERNAL, Operand, OutputMeta, Record
from wholestep.live.recording.structure import LEAF, Structure

BLOCK = "block"
"""The kind of an operand that is a list of tensors from outside."""


@dataclass(frozen=True, slots=True)
class FastRecord:
    """A record whose arguments are plain leaves and lists of tensors, and whose result is one new tensor or None."""

    record: Record
    function: Callable[..., Any]
    num_args: int
    names: tuple[str, ...]
    """Of the keyword arguments."""
    operands: tuple[Operand, ...]
    """Per argument. Of a list of tensors from outside a BLOCK: their numbers, and its kind."""
    modes: Modes
    output: OutputMeta | None


def fast_record(record: Record, slow: tuple[Any, ...]) -> FastRecord | None:
    """The record for quick comparison; None where it has to be the long way. `slow` functions always have."""
    _, (args, kwargs) = record.key.structure
    operands = _arguments((*args[1], *kwargs[2]), record.operands)
    if operands is None or record.output_structure is not LEAF or record.num_externals or record.key.function in slow:
        return None
    output = record.outputs[0]
    if (output is not None and (output.alias, output.becomes) != (None, None)) or any(
        isinstance(one.key, Optimizer) for one in operands
    ):
        return None
    return FastRecord(
        record, record.key.function, len(args[1]), tuple(kwargs[1]), operands, record.key.modes, output
    )  # fmt: skip


def _arguments(structures: Sequence[Structure], leaves: tuple[Operand, ...]) -> tuple[Operand, ...] | None:
    """An operand for each argument; None if one is neither a leaf nor a list of tensors from outside."""
    found: list[Operand] = []
    rest = iter(leaves)
    for one in structures:
        if one is LEAF:
            found.append(next(rest))
            continue
        block = list(islice(rest, len(one[-1])))
        if one[0] is not list or not block or not all(item is LEAF for item in one[-1]):
            return None
        if not all(operand.kind == EXTERNAL for operand in block):
            return None
        found.append(Operand(BLOCK, tuple(operand.key for operand in block), list))
    return tuple(found)
