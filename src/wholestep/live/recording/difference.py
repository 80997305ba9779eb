"""difference(function, paths, ...): in words, what a call has that none of the known paths has at its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.live.recording.path import Path
from wholestep.live.recording.record import (
    CONSTANT,
    EXTERNAL,
    NUMBER,
    VALUE,
    Description,
    Key,
    Operand,
    StateKind,
    name_of,
)


def difference(
    key: Key, number: int, path: Path, externals: Sequence[tuple[torch.Tensor, StateKind]], numbers: Sequence[float]
) -> str:
    """What the call with this key, the record `number` of a run, is otherwise than on a path that fitted until then.

    `externals` and `numbers` are the tensors from outside, as they are and as they were when the run began, and the
    numbers of the run, those of the call among them.
    """
    name = name_of(key.function)
    if number >= len(path.records):
        return f"{name} is called where the known calls end"
    known = path.records[number]
    if known.key.function != key.function:
        return f"{name} is called where {name_of(known.key.function)} was ({known.line})"
    if known.key.modes != key.modes:
        return f"{name} is called under another mode of torch (gradients, autocast, default dtype)"
    if known.key.structure != key.structure:
        return f"{name} is given arguments of another structure"
    for place, (was, now) in enumerate(zip(known.operands, key.operands, strict=True), 1):
        if was != now:
            return f"argument {place} of {name} was {_shown(was, path)}, is {_shown(now, path)}"
        if now.kind == EXTERNAL and not path.takes_external(now.key, *externals[now.key]):
            was_given, is_given = path.externals[now.key], externals[now.key][0]
            return f"argument {place} of {name} was {_tensor(was_given)}, is {_other(is_given)}"
        if now.kind == NUMBER and not path.takes_number(now.key, numbers[now.key]):
            return f"argument {place} of {name} was {path.numbers[now.key]!r}, is {numbers[now.key]!r}"
    return f"{name} is a call that no earlier run made here"


def _shown(operand: Operand, path: Path) -> str:
    if operand.kind == CONSTANT:
        return f"{operand.key!r:.60}"
    if operand.kind == VALUE:
        record = path.records[operand.key]
        return f"what {name_of(record.key.function)} gave ({record.line})"
    return "a number" if operand.kind == NUMBER else "a tensor from outside"


def _other(tensor: torch.Tensor) -> str:
    return f"another tensor, {_tensor(Description.of(tensor))}"


def _tensor(known: Any) -> str:
    if not isinstance(known, Description):
        known, said = Description.of(known), "one tensor, "
    else:
        said = "new tensors, "
    grad = ", requires_grad" if known.requires_grad else ""
    return f"{said}{str(known.dtype).removeprefix('torch.')}{list(known.shape)}{grad}"
