"""A process group written in Python: every collective is an exchange of bytes through a key-value store.

Slow and simple on purpose. Registered as the backend "store", it shows what torch asks of such a group, and that a
compiled step needs nothing else.
"""

from __future__ import annotations

import io
from collections import defaultdict
from datetime import timedelta
from functools import reduce as fold
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "store"

REDUCTIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


def register() -> None:
    """Makes "store" a backend of this process. Once is enough, again is fine."""
    if not dist.is_backend_available(BACKEND):
        dist.Backend.register_backend(BACKEND, StoreGroup, devices=["cpu"])


class Done(dist._Work):
    """The handle of a collective that has already happened, with the tensors that it wrote.

    torch's functional collectives, and so compiled steps, only wait; eager DistributedDataParallel asks for a future.
    """

    def __init__(self, written: list[Tensor]) -> None:
        super().__init__()
        self._written = written

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._written)
        return future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class StoreGroup(dist.ProcessGroup):
    """One rank's end of the group. Collectives return when they are complete; `calls` counts them by name."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(rank, size)
        store.set_timeout(timeout)
        self._store = store
        self._round = 0
        self._messages: defaultdict[str, int] = defaultdict(int)  # messages between two ranks, numbered
        self.calls: defaultdict[str, int] = defaultdict(int)

    # ---- names, which a group of torch's own asks its backends for -----------------------------------------------

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._text = text

    def getGroupDesc(self) -> str:
        return self._text

    # ---- the exchange ------------------------------------------------------------------------------------------

    def _exchange(self, call: str, mine: Any) -> list[Any]:
        """What every rank shows in this round, in rank order."""
        self.calls[call] += 1
        self._round += 1
        self._put(f"{self._round}/{self.rank()}", (call, mine))
        shown = [self._take(f"{self._round}/{rank}") for rank in range(self.size())]
        calls = [name for name, _ in shown]
        if set(calls) != {call}:
            raise RuntimeError(f"The ranks are in different collectives: {calls}.")
        if self._store.add(f"{self._round}/read", 1) == self.size():
            for rank in range(self.size()):
                self._store.delete_key(f"{self._round}/{rank}")
        return [value for _, value in shown]

    def _put(self, key: str, value: Any) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self._store.set(key, buffer.getvalue())

    def _take(self, key: str) -> Any:
        return torch.load(io.BytesIO(self._store.get(key)), weights_only=True)

    def _reduced(self, parts: list[Tensor], op: Any) -> Tensor:
        # ReduceOp compares with its kinds, but does not hash like them.
        kind = next(kind for kind in REDUCTIONS if op == kind)
        total = fold(REDUCTIONS[kind], parts)
        return total / len(parts) if kind == dist.ReduceOp.AVG else total

    # ---- what torch calls, by its own names ----------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Done:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        for tensor in tensors:
            tensor.copy_(self._reduced(self._exchange("allreduce", tensor), op))
        return Done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Done:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Done:
        for tensor in tensors:
            shown = self._exchange("broadcast", tensor if self.rank() == opts.rootRank else None)
            tensor.copy_(shown[opts.rootRank])
        return Done(tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Done:
        for tensor in tensors:
            shown = self._exchange("reduce", tensor)
            if self.rank() == opts.rootRank:
                tensor.copy_(self._reduced(shown, opts.reduceOp))
        return Done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Done:
        for into, mine in zip(outputs, inputs, strict=True):
            for place, value in zip(into, self._exchange("allgather", mine), strict=True):
                place.copy_(value)
        return Done([tensor for into in outputs for tensor in into])

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> Done:
        output.copy_(torch.cat(self._exchange("allgather", mine)).view_as(output))
        return Done([output])

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Done:
        for output, mine in zip(outputs, inputs, strict=True):
            self._allgather_base(output, mine)
        return Done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Done:
        for number, mine in enumerate(inputs):
            shown = self._exchange("gather", mine)
            if self.rank() == opts.rootRank:
                for place, value in zip(outputs[number], shown, strict=True):
                    place.copy_(value)
        return Done([tensor for into in outputs for tensor in into])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Done:
        for number, output in enumerate(outputs):
            shown = self._exchange("scatter", inputs[number] if self.rank() == opts.rootRank else None)
            output.copy_(shown[opts.rootRank][self.rank()])
        return Done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Done:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        for output, mine in zip(outputs, inputs, strict=True):
            shown = self._exchange("reduce_scatter", mine)
            output.copy_(self._reduced([parts[self.rank()] for parts in shown], op))
        return Done(outputs)

    def _reduce_scatter_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> Done:
        parts = [part.reshape(output.shape) for part in mine.chunk(self.size())]
        return self.reduce_scatter([output], [parts], opts)

    reduce_scatter_single = _reduce_scatter_base  # its name from torch 2.13 on

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Done:
        for output, mine in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, mine, opts)
        return Done(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Done:
        for output, parts in zip(outputs, self._exchange("alltoall", inputs), strict=True):
            output.copy_(parts[self.rank()])
        return Done(outputs)

    def alltoall_base(
        self, output: Tensor, mine: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Done:
        even = mine.shape[0] // self.size()
        parts = list(mine.split(input_sizes or [even] * self.size()))
        output.copy_(torch.cat([theirs[self.rank()] for theirs in self._exchange("alltoall", parts)]))
        return Done([output])

    all_to_all_single = alltoall_base  # its name from torch 2.13 on

    def barrier(self, opts: Any = None) -> Done:
        self._exchange("barrier", None)
        return Done([])

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Done:
        for tensor in tensors:
            self._put(self._next_message(self.rank(), to, tag), tensor)
        return Done(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Done:
        for tensor in tensors:
            tensor.copy_(self._take(self._next_message(source, self.rank(), tag)))
        return Done(tensors)

    def _next_message(self, source: int, to: int, tag: int) -> str:
        way = f"{source}-{to}-{tag}"
        self._messages[way] += 1
        return f"message/{way}/{self._messages[way]}"
