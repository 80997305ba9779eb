"""What a step does with ``torch.distributed`` becomes nodes of its graph.

Every function of torch.distributed ends in a method of a process group. While a step is traced, the methods of the
groups are replaced (table `wholestep.capture.tracing.process_group_rules.RULES`), so it does not matter how a function
was imported, whether its arguments are positional, or which group it is given. What is started becomes a functional
collective; ``Work.wait()``, which blocking calls do at once, becomes its wait and the writes to the user's tensors.

Supported: all_reduce, broadcast, reduce, all_gather (list), all_gather_into_tensor, gather, scatter, reduce_scatter
(list), reduce_scatter_tensor, all_to_all (lists), all_to_all_single (even, with split sizes, with split sizes that are
data), the coalesced forms and the coalescing manager, barrier, send, recv, isend, irecv, batch_isend_irecv; over any
group, asynchronous or not; SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR where the backend has them.
Functional collectives, and ``torch.distributed.nn.functional`` with its derivatives, are traced as they are.
Refused by name: collectives of objects, monitored_barrier, recv from any source, PREMUL_SUM, new groups.

[Note: what stays as it was]
A collective that nobody awaits is awaited at the end of the step. What is written to a tensor has no derivative in
eager code either; there a backward through it goes on as if the collective were the identity. Here it is an error.
A rank outside of a group gets torch's warning and no node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from wholestep.capture.python import user_frame
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.capture.scalars.rank_symbols import ranks
from wholestep.errors import CaptureError
from wholestep.ir import op_info

Write = tuple[torch.Tensor, torch.Tensor]
"""A tensor of the user and what it shall hold."""
Part = tuple[torch.Tensor, Callable[[torch.Tensor], Sequence[Write]]]
"""The result of a collective that was started, and what to write once it has arrived."""


@dataclass(slots=True)
class Message:
    """One send or receive of a batch that has not started yet."""

    tensor: torch.Tensor
    is_send: bool
    peer: Any
    """Rank in the group: an int, or an expression of the rank."""
    tag: int


class Handle(dist.Work):
    """Stands for the work handle of a collective that is a node. Whatever needs its result waits for it."""

    def __init__(self, name: str, parts: Sequence[Part], outputs: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._parts: list[Part] = list(parts)
        self._outputs = list(outputs)
        self._what = f"{name}, called at {user_frame.current_line()},"

    def wait(self, timeout: Any = None) -> bool:
        """Puts the waits and the writes here. Later calls do nothing."""
        parts, self._parts = self._parts, []
        for started, writes in parts:
            with torch.no_grad():
                arrived = writes(op_info.WAIT(started))
            for target, value in arrived:
                self._write(target, value)
        return True

    def _write(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if torch.is_grad_enabled() and target.requires_grad and not target.is_leaf:
            try:
                _Overwritten.apply(target, value, self._what)  # type: ignore[no-untyped-call]
                return
            except RuntimeError:
                pass  # a view that autograd lets nobody overwrite; eager collectives do not ask it
        with torch.no_grad():
            target.copy_(_shaped(value, target))

    def is_completed(self) -> bool:
        """True: the result is there, as the wait is put here."""
        return self.wait()

    def is_success(self) -> bool:
        """True: a collective that fails raises when the graph runs."""
        return self.wait()

    def synchronize(self) -> None:
        """Waits."""
        self.wait()

    def block_current_stream(self) -> None:
        """Waits: the graph has one stream."""
        self.wait()

    def exception(self) -> None:
        """None: a collective that fails raises when the graph runs."""

    def result(self) -> list[torch.Tensor]:
        """The tensors that the collective has written."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """A future that holds `result`; what is chained to it runs at once."""
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future


class _Overwritten(torch.autograd.Function):
    """``target.copy_(value)`` with an error in the place of a derivative."""

    @staticmethod
    def forward(ctx: Any, target: torch.Tensor, value: torch.Tensor, what: str) -> torch.Tensor:
        ctx.mark_dirty(target)
        ctx.what = what
        return target.copy_(_shaped(value, target))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise CaptureError(
            f"The backward passes through a tensor that {ctx.what} has overwritten. The collective has no derivative: "
            f"eager code would go on as if it changed nothing. Use torch.distributed.nn.functional, which has "
            f"derivatives, or communicate a detached copy."
        )


@dataclass(slots=True)
class ProcessGroupRecorder:
    """The communication of one trace."""

    _pending: list[Handle] = field(default_factory=list)
    _batches: dict[str, list[Message]] = field(default_factory=dict)
    _coalesced: dict[str, list[Handle]] = field(default_factory=dict)

    def patches(self, rules: dict[str, Callable[..., Any]]) -> Iterator[Any]:
        """What to replace while the step is traced: `rules` by the name of the method of a process group."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        own = {type(rank.group) for rank in ranks()}
        for kind in {dist.ProcessGroup, *own}:
            for name, rule in rules.items():
                if name in vars(kind):
                    yield _instead(kind, name, self._method(rule))
        yield _instead(dist.Work, "wait", _refuse_work)
        yield _instead(distributed_c10d, "_object_to_tensor", _refuse_object)
        for name in ("_new_group_with_tag", "split_group"):
            yield _instead(distributed_c10d, name, _refuse_group)

    def _method(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if (name := user_frame.calling_function("object")) is not None:
                _refuse_object(name)
            return rule(self, group, *args, **kwargs)

        return call

    def handle(self, name: str, group: Any, parts: Sequence[Part], outputs: Sequence[torch.Tensor] = ()) -> Handle:
        """The handle of a collective that has just started."""
        made = Handle(name, parts, outputs)
        self._pending.append(made)
        self._coalesced.get(group.group_name, []).append(made)
        return made

    def message(self, group: Any, message: Message, start: Callable[..., Handle]) -> Handle | None:
        """Starts one message, or keeps it for the batch that is open on its group."""
        batch = self._batches.get(group.group_name)
        if batch is None:
            return start(self, group, [message])
        batch.append(message)
        return None

    def open_batch(self, group: Any) -> None:
        """Collectives and messages on `group` share a handle from here on."""
        self._batches[group.group_name], self._coalesced[group.group_name] = [], []

    def close_batch(self, group: Any, start: Callable[..., Handle]) -> Handle:
        """Starts the messages of the open batch; one handle for everything in it."""
        messages, handles = self._batches.pop(group.group_name), self._coalesced.pop(group.group_name)
        if messages:
            handles.append(start(self, group, messages))
        made = Handle("the coalescing manager", [])
        made._parts = [part for one in handles for part in one._parts]
        for one in handles:
            one._parts = []
        self._pending.append(made)
        return made

    def finish(self) -> None:
        """Waits, at the end of the step, for what nobody has waited for."""
        for handle in self._pending:
            handle.wait()


def _instead(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    return patch.object(owner, name, on_this_thread(replacement, getattr(owner, name)))


def _shaped(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`value` in the shape of `target`, which may fold its elements in another way. Never broadcast."""
    known = all(isinstance(size, int) for size in (*value.shape, *target.shape))
    return value.reshape(target.shape) if known and value.shape != target.shape else value


def _refuse_object(name: Any, *rest: Any) -> NoReturn:
    name = (
        name if isinstance(name, str) and not rest else user_frame.calling_function("object") or "an object collective"
    )
    raise CaptureError(
        f"The step could not be captured at {user_frame.current_line()}\n{name} sends Python objects, whose pickled "
        "bytes "
        f"are values that a graph does not have. Call it outside the step, or send tensors."
    )


def _refuse_work(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        f"The step could not be captured at {user_frame.current_line()}\nThe step waits for a collective that was "
        "started "
        f"outside of it, which would happen once, while the step is captured. Wait before the step, or start it with a "
        f"functional collective and pass its result."
    )


def _refuse_group(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        f"The step could not be captured at {user_frame.current_line()}\nA process group is made here, which would "
        "happen "
        f"once, while the step is captured. Make it before the first step."
    )
