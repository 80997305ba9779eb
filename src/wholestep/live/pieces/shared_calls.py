"""SharedCalls: what of a piece the other ranks take part in. The rest may differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.live.recording.events import communicates
from wholestep.live.recording.path import BACKWARDS, Path
from wholestep.live.recording.record import CONSTANT, EXTERNAL, VALUE, Record, name_of


@dataclass(frozen=True, slots=True)
class SharedCalls:
    """Those of the calls of a piece by which ranks send each other something, or change what is equal on all.

    Ranks whose pieces have the same ones run them together: what else they compute, keep, draw or count with is each
    rank's own. Whether the collectives fit is compared when the pieces are compiled.
    """

    calls: tuple[tuple[str, tuple[torch.Tensor, ...]], ...]
    """In order: the name of each, and the parameters and buffers that it is given or holds; of a backward the
    parameters to which gradients go."""

    @classmethod
    def of(cls, path: Path, numbers: Iterable[int]) -> SharedCalls:
        """Of the records of a path with these numbers."""
        records = (path.records[number] for number in numbers)
        shared = (one for one in records if is_shared(path, one))
        return cls(tuple((name_of(one.key.function), (*_state_of(path, one),)) for one in shared))

    @property
    def is_empty(self) -> bool:
        """Whether there are none, as of a norm that one rank logs: it may run them alone."""
        return not self.calls

    def text(self, names: Callable[[torch.Tensor], str]) -> str:
        """The same on ranks that may run their pieces together. `names` gives what all ranks have the same name on all,
        and anything else none."""
        return "\n".join(f"{name} {' '.join(sorted({*map(names, state)} - {''}))}" for name, state in self.calls)


def is_shared(path: Path, record: Record) -> bool:
    """Whether a call of a path is one in which other ranks take part, or that changes what is equal on all."""
    function = record.key.function
    if function in BACKWARDS or record.writes_grads or _may_communicate(function) or any(_optimizers(record)):
        return True
    if _module_of(record) is not None:  # it may communicate, as a SyncBatchNorm does
        return True
    return any(one.requires_grad for one in _tensors(path, (w.key for w in record.writes_to if w.kind == EXTERNAL)))


def _may_communicate(function: Callable[..., object]) -> bool:
    """Whether it may be a call by which ranks communicate."""
    is_operator = str(getattr(function, "__module__", "")).startswith("torch._ops")
    return is_operator or communicates(function)


def _module_of(record: Record) -> nn.Module | None:
    """The module that a record is a call of."""
    found: nn.Module | None = getattr(record.key.function, "module", None)
    return found


def _tensors(path: Path, numbers: Iterable[int]) -> Iterator[torch.Tensor]:
    """The tensors from outside that are the same ones in every call."""
    return (one for one in (path.externals[number] for number in numbers) if isinstance(one, torch.Tensor))


def _state_of(path: Path, record: Record) -> Iterator[torch.Tensor]:
    """The parameters and buffers that a call is given, or that its module or its optimizer holds."""
    yield from _tensors(path, (one.key for one in record.operands if one.kind == EXTERNAL))
    if (module := _module_of(record)) is not None:
        yield from (*module.parameters(), *module.buffers())
    for opt in _optimizers(record):
        yield from (param for group in opt.param_groups for param in group["params"])
    if record.key.function in BACKWARDS:
        yield from _reached(path, record)


def _reached(path: Path, backward: Record) -> Iterator[torch.Tensor]:
    """The parameters that a backward comes to."""
    waiting, seen = [backward], set[int]()
    while waiting:
        record = waiting.pop()
        yield from (one for one in _state_of(path, record) if one.requires_grad) if record is not backward else ()
        for one in record.operands:
            if one.kind == VALUE and one.key not in seen:
                meta = path.records[one.key].outputs[one.detail]
                if meta is not None and meta.requires_grad:
                    seen.add(one.key)
                    waiting.append(path.records[one.key])


def _optimizers(record: Record) -> Iterator[Optimizer]:
    """The one that a call steps."""
    return (one.key for one in record.operands if one.kind == CONSTANT and isinstance(one.key, Optimizer))
