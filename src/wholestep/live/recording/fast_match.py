"""Records in the form that is compared in as little time as Python allows: most calls of a live step are known.

Records whose arguments or results are not plain have no such form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from wholestep.live.recording.modes import Modes
from wholestep.live.recording.record import EXTERNAL, Operand, OutputMeta, Record
from wholestep.live.recording.structure import LEAF, Structure

BLOCK = "block"
"""The kind of an operand that is a list of tensors from outside."""


@dataclass(frozen=True, slots=True)
class FastRecord:
    """A record whose arguments are plain leaves and lists of tensors, and whose result is one new tensor or None."""

    record: Record
    function: Any
    module: Any
    """The one that it calls, where the function is a module in one state; see `OpaqueModule`."""
    num_args: int
    names: tuple[str, ...]
    """Of the keyword arguments."""
    operands: tuple[Operand, ...]
    """Per argument. Of a list of tensors from outside a BLOCK: their numbers, and its kind."""
    modes: Modes
    output: OutputMeta | None
    optimizer: Optimizer | None
    """The one that it steps."""
    is_plain: bool
    """Whether it only computes tensors of tensors."""


def fast_records(records: Sequence[Record], acting: tuple[Any, ...]) -> list[FastRecord | None]:
    """The records of a path for quick comparison; None for one that has to be compared the long way, and at the end.

    `acting`: functions that do more than compute tensors.
    """
    found = [_fast_record(record, acting) for record in records]
    called: set[Any] = {record.key.function for record in records if record.num_externals}
    states = Counter(function.module for function in called)
    # Of a module that is called in two states one call may have to run before the other.
    return [one if one is None or one.module is None or states[one.module] == 1 else None for one in found] + [None]


def _fast_record(record: Record, acting: tuple[Any, ...]) -> FastRecord | None:
    _, (args, kwargs) = record.key.structure
    operands = _arguments((*args[1], *kwargs[2]), record.operands)
    if operands is None or not _is_leaf(record.output_structure):
        return None
    output = record.outputs[0]
    steps = [one.key for one in operands if isinstance(one.key, Optimizer)]
    gives_another = output is not None and (output.alias, output.becomes) != (None, None)
    if gives_another or record.freezes or record.joins or record.brings or len(steps) > 1:
        return None
    function: Any = record.key.function
    module = function.module if record.num_externals else None
    acts = bool(steps or record.drawn) or module is not None or function in acting
    return FastRecord(
        record, function, module, len(args[1]), tuple(kwargs[1]), operands, record.key.modes, output,
        steps[0] if steps else None, not acts,
    )  # fmt: skip


def _is_leaf(structure: Structure) -> bool:
    return structure is LEAF or (isinstance(structure, pytree.TreeSpec) and structure.is_leaf())


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
