"""What a tensor call depends on besides its arguments: modes of torch, and where random generators stand."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from wholestep.capture.wrappers import ddp
from wholestep.util.torch_switches import parametrized_weights_anew

Modes = tuple[Any, ...]
"""Gradient mode, inference mode, default dtype, of autocast the cache and (device, dtype) of each device, the wrappers
whose gradients stay local (``no_sync()``), and how many blocks of autocast have ended."""

_DEVICES = ("cpu", "cuda")


class _Blocks(threading.local):
    ended = 0


_BLOCKS = _Blocks()
"""The outermost blocks of autocast that have ended in this call of a live step. Autocast casts a parameter once in such
a block, and uses that again though somebody has written to the parameter meanwhile. The next block casts it anew."""


def begin_blocks() -> None:
    """A call of a live step begins."""
    _BLOCKS.ended = 0


def block_may_have_ended() -> None:
    """A block of autocast has ended, maybe inside of another one."""
    torch.autocast_increment_nesting()  # there is no other way to ask how many there are around
    if torch.autocast_decrement_nesting() == 0:
        _BLOCKS.ended += 1


def block_of(modes: Modes) -> int:
    """Which block of autocast a call under these modes is in, or comes before."""
    block: int = modes[-1]
    return block


def has_casts(modes: Modes) -> bool:
    """Whether autocast is on."""
    return bool(modes[4])


@contextmanager
def casts_kept(block: int | None) -> Iterator[None]:
    """While open, casts of parameters are kept from call to call, as in one block of autocast.

    Then they are dropped, but for those of the block with this number if Python is in it now and will go on there.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        is_inside = torch.autocast_decrement_nesting() > 0
        if not (is_inside and block == _BLOCKS.ended):
            torch.clear_autocast_cache()


def current_modes() -> Modes:
    """The modes at this moment, of this thread. Asked for at every recorded call."""
    casts: tuple[tuple[str, torch.dtype], ...] = ()
    if torch._C._is_any_autocast_enabled():
        if torch.is_autocast_enabled("cpu"):
            casts = (("cpu", torch.get_autocast_dtype("cpu")),)
        if torch.is_autocast_enabled("cuda"):
            casts = (*casts, ("cuda", torch.get_autocast_dtype("cuda")))
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(), casts, ddp.awaited(), _BLOCKS.ended,
    )  # fmt: skip


def recordable_modes() -> Modes | None:
    """The modes at this moment; None where a call does more than its function and arguments say."""
    return None if why_not_recordable() else current_modes()


def _casts(device: str) -> bool:
    return torch.is_autocast_enabled(device)


@contextmanager
def under(modes: Modes) -> Iterator[None]:
    """While open, these modes hold."""
    grad, inference, dtype, caches, casts, awaited, _ = modes
    dtype_around = torch.get_default_dtype()
    with ExitStack() as stack:
        if inference != torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for device in _DEVICES:
            wanted = dict(casts).get(device)
            if wanted is not None or _casts(device):
                stack.enter_context(
                    torch.autocast(device, dtype=wanted, enabled=wanted is not None, cache_enabled=caches)
                )
        stack.enter_context(ddp.with_awaited(awaited))
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype_around)


@contextmanager
def modes_off() -> Iterator[None]:
    """While open, there is no mode of the user's, such as the ``inference_mode()`` in which a value was asked for.

    Nor are there hooks on saved tensors: no call is recorded under them, so none that runs now was made for them. Nor
    weights that ``parametrize.cached()`` keeps: modules are not recorded where it does, and what they compute is kept.
    """
    modes = current_modes()
    plain = (True, False, *modes[2:4], (), *modes[5:])
    with nullcontext() if modes == plain else under(plain), _saved_tensors_hooks_off(), parametrized_weights_anew():
        yield


@contextmanager
def _saved_tensors_hooks_off() -> Iterator[None]:
    hooks, autograd = [], torch._C._autograd
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


class PendingDraws:
    """Where generators stood when calls that have not run were recorded to draw of them.

    Whoever seeds a generator after such a call, or sets its state, means the calls after that.
    """

    def __init__(self) -> None:
        self._states: dict[torch.Generator, torch.Tensor] = {}

    def go_on(self, generators: Iterable[torch.Generator]) -> bool:
        """Whether a call may be recorded that draws of these: nobody has set one that is to be drawn of before."""
        known = ((one, self._states[one]) for one in generators if one in self._states)
        return all(torch.equal(one.get_state(), state) for one, state in known)

    def take(self, generators: Iterable[torch.Generator]) -> None:
        """Takes up a call that draws of these."""
        for one in generators:
            if one not in self._states:
                self._states[one] = one.get_state()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, and all calls run, generators stand as they did; then as they were set since."""
        now = {one: one.get_state() for one in self._states}
        was_set = {one: state for one, state in now.items() if not torch.equal(state, self._states[one])}
        for one in was_set:
            one.set_state(self._states[one])
        self._states = {}
        try:
            yield
        finally:
            for one, state in was_set.items():
                one.set_state(state)


def why_not_recordable() -> str:
    """Why a call at this moment does more than its function and arguments say; empty if it does not."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on saved tensors are set here (torch.utils.checkpoint does that, or save_on_cpu)"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a TorchDispatchMode of yours looks at every operator here"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func (vmap, grad, jvp) runs here"
    if torch.is_anomaly_enabled():
        return "detection of anomalies is on"
    return ""
