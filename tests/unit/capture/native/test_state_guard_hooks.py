"""Hooks of tensors: a change among them is seen, and their dict is watched as long as a look lives."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.capture.native.looks import (
    NEEDS_WATCHERS,
    WATCHED,
    look_at,
    look_at_tensor,
    num_watchers,
)
from wholestep.capture.guards import fast_guards


def hooked() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2))
    param.register_hook(lambda grad: None)
    param.register_post_accumulate_grad_hook(lambda t: None)
    return param


HOOK_CHANGES: dict[str, Callable[[Any], object]] = {
    "one more": lambda t: t.register_hook(lambda grad: None),
    "one more behind the gradient": lambda t: t.register_post_accumulate_grad_hook(lambda t: None),
    "another function": lambda t: t._backward_hooks.update(dict.fromkeys(t._backward_hooks, len)),
    "none left": lambda t: t._backward_hooks.clear(),
    "none left behind the gradient": lambda t: t._post_accumulate_grad_hooks.popitem(),
    "another dict": lambda t: setattr(t, "_backward_hooks", t._backward_hooks.copy()),
    "none": lambda t: setattr(t, "_backward_hooks", None),
}


@pytest.mark.parametrize("name", HOOK_CHANGES)
def test_a_change_among_hooks_is_seen(module: ModuleType, name: str) -> None:
    param = hooked()
    look = look_at_tensor(module, param)
    assert look.changed() == () == look.changed()
    HOOK_CHANGES[name](param)
    assert look.changed() == (fast_guards.TENSORS,) == look.changed()
    look.accept()
    assert look.changed() == () == look.changed()
    param.register_hook(lambda grad: None)
    assert look.changed() == (fast_guards.TENSORS,)


@NEEDS_WATCHERS
def test_hooks_are_watched_as_long_as_a_look_lives(module: ModuleType) -> None:
    param = hooked()
    first: Any = param._backward_hooks
    look = look_at_tensor(module, param)
    assert num_watchers(first) == 1
    param._backward_hooks = second = OrderedDict(first)
    assert look.changed() == (fast_guards.TENSORS,)
    look.accept()
    assert (num_watchers(first), num_watchers(second)) == (0, 1)
    look = None
    assert num_watchers(second) == 0


def test_hooks_that_are_gone_leave_their_address_to_others(module: ModuleType) -> None:
    """Nobody but the tensor owns the dict of its hooks, and a new one may lie where the old one lay."""
    param = hooked()
    look = look_at_tensor(module, param)
    place, others = id(param._backward_hooks), []
    param._backward_hooks = None
    while not others or id(others[-1]) != place:
        assert len(others) < 10_000, "the case that this test is about"
        others.append(OrderedDict({0: 1}))
    other = look_at(module, others[-1])
    others[-1].clear()
    assert (look.changed(), other.changed()) == ((fast_guards.TENSORS,), (0,))
    del other
    assert not WATCHED or num_watchers(others[-1]) == 0
    param._backward_hooks = OrderedDict({0: lambda grad: None})
    look.accept()
    assert look.changed() == ()
    param._backward_hooks.clear()  # type: ignore[attr-defined]
    assert look.changed() == (fast_guards.TENSORS,)
    look.accept()
    gone = weakref.ref(param)
    del param
    assert gone() is not None, "the look owns the tensor"
    del look
    assert gone() is None
