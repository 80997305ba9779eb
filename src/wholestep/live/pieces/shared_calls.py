"""SharedCalls: what of a piece the other ranks take part in. The rest may differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from wholestep.live.recording.events import communicates
from wholestep.live.recording.path import BACKWARDS, Path
from wholestep.live.recording.record import CONSTANT, EXTERNAL, Record, name_of


@dataclass(frozen=True, slots=True)
class SharedCalls:
    """Those of the calls of a piece by which ranks send each other something, or change what is equal on all.

    Ranks whose pieces have the same ones run them together: what else they compute, keep, draw or count with is each
    rank's own. Whether the collectives fit is compared when the pieces are compiled.
    """

    calls: tuple[str | torch.Tensor, ...]
    """In order: the name of each, and the parameters and buffers that it is given or holds."""
    trained: tuple[torch.Tensor, ...]
    """Parameters that only other calls are given: gradients may go to them, in whatever order."""

    @classmethod
    def of(cls, path: Path, numbers: Iterable[int]) -> SharedCalls:
        """Of the records of a path with these numbers."""
        calls: list[str | torch.Tensor] = []
        trained: dict[int, torch.Tensor] = {}
        for record in (path.records[number] for number in numbers):
            tensors = [*_state_of(path, record)]
            if _is_shared(path, record):
                calls += [name_of(record.key.function), *tensors]
            else:
                trained.update((id(one), one) for one in tensors if one.requires_grad)
        return cls(tuple(calls), tuple(trained.values()))

    @property
    def is_empty(self) -> bool:
        """Whether there are none, as of a norm that one rank logs: it may run them alone."""
        return not self.calls

    def text(self, names: Callable[[torch.Tensor], str]) -> str:
        """The same on ranks that may run their pieces together. `names` gives a tensor the same name on all."""
        calls = (names(one) if isinstance(one, torch.Tensor) else one for one in self.calls)
        return "\n".join((*calls, "", *sorted(map(names, self.trained))))


def _is_shared(path: Path, record: Record) -> bool:
    function = record.key.function
    if function in BACKWARDS or record.state_entries or record.writes_grads or _may_communicate(function):
        return True
    return any(one.requires_grad for one in _tensors(path, (w.key for w in record.writes_to if w.kind == EXTERNAL)))


def _may_communicate(function: Callable[..., object]) -> bool:
    """Whether it may be a call by which ranks communicate: modules may, as a SyncBatchNorm does."""
    is_operator = str(getattr(function, "__module__", "")).startswith("torch._ops")
    return getattr(function, "module", None) is not None or is_operator or communicates(function)


def _tensors(path: Path, numbers: Iterable[int]) -> Iterator[torch.Tensor]:
    """The tensors from outside that are the same ones in every call."""
    return (one for one in (path.externals[number] for number in numbers) if isinstance(one, torch.Tensor))


def _state_of(path: Path, record: Record) -> Iterator[torch.Tensor]:
    """The parameters and buffers that a call is given, or that its module or its optimizer holds."""
    yield from _tensors(path, (one.key for one in record.operands if one.kind == EXTERNAL))
    module = getattr(record.key.function, "module", None)
    if module is not None:
        yield from (*module.parameters(), *module.buffers())
    for one in record.operands:
        if one.kind == CONSTANT and isinstance(one.key, Optimizer):
            yield from (param for group in one.key.param_groups for param in group["params"])
