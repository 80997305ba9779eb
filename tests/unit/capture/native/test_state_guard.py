"""The native look sees every change of a tensor, a list or a cell, and says nothing when nothing changed."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import CellType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.capture.native.looks import look_at_tensor
from wholestep.capture.guards import fast_guards
from wholestep.capture.native import self_test

Change = Callable[[Any], object]


class Special(nn.Parameter):
    """A parameter by another name."""


CHANGES: dict[str, Change] = {
    "data of another shape": lambda t: setattr(t, "data", torch.zeros(4, 3)),
    "data with fewer dimensions": lambda t: setattr(t, "data", torch.zeros(12)),
    "data with more dimensions": lambda t: setattr(t, "data", torch.zeros(3, 4, 1, 1)),
    "data of other strides": lambda t: setattr(t, "data", torch.zeros(4, 3).t()),
    "data of another dtype": lambda t: setattr(t, "data", torch.zeros(3, 4, dtype=torch.float64)),
    "requires_grad": lambda t: t.requires_grad_(not t.requires_grad),
    "class": lambda t: setattr(t, "__class__", Special),
    "what it wraps": lambda t: torch._C._swap_tensor_impl(t, torch.zeros(3, 4)),
    "device": lambda t: torch._C._swap_tensor_impl(t, torch.zeros(3, 4, device="meta")),
    "as_strided_": lambda t: t.as_strided_((3, 4), (1, 3)),
    "set_": lambda t: t.set_(torch.zeros(2)),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "negative by a flag": lambda t: torch._C._set_neg(t, True),
}
PARAMETER_CHANGES: dict[str, Change] = {
    "hook": lambda t: t.register_hook(lambda grad: None),
    "hook behind the gradient": lambda t: t.register_post_accumulate_grad_hook(lambda t: None),
    "hooks by attribute": lambda t: setattr(t, "_backward_hooks", OrderedDict({0: lambda grad: None})),
}


def check(module: ModuleType, change: Change, tensor: Tensor, want: int) -> None:
    others = [torch.zeros(3, 4) for _ in range(3)]  # before and after it: every place is looked at
    tensors = (*others[:2], tensor, others[2])
    look = module.StateGuard(tensors, bytes([self_test.STATE, self_test.PARAMETER, want, self_test.STATE]), (), ())
    assert look.changed() == () == look.changed()
    with torch.no_grad():
        tensor.zero_()  # numbers are no matter of the look
        assert look.changed() == (fast_guards.MODES,)
        change(tensor)
    assert look.changed() == (fast_guards.TENSORS,)
    assert look.changed() == (fast_guards.TENSORS,), "what was told once must not be taken for granted"


@pytest.mark.parametrize("shape", [(3, 4), (3, 1), (2, 3, 4, 5), (1, 2, 3, 4, 5, 6), ()])
def test_shapes_and_strides_of_any_rank_are_seen(module: ModuleType, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    look = look_at_tensor(module, tensor, self_test.STATE)
    with torch.no_grad():
        tensor.unsqueeze_(0)
    assert look.changed() == (fast_guards.TENSORS,)
    look.accept()
    assert look.changed() == ()
    strides = tuple(stride + 1 for stride in tensor.stride())
    tensor.data = torch.empty_strided(tensor.shape, strides)
    assert look.changed() == (fast_guards.TENSORS,), "strides of dimensions of size one count as well"


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 3, 4), (2, 3, 4, 5, 6, 7)])
def test_every_size_counts(module: ModuleType, shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        tensor = torch.empty(shape)
        look = look_at_tensor(module, tensor, self_test.STATE)
        tensor.data = torch.empty([size + (number == dim) for number, size in enumerate(shape)])
        assert look.changed() == (fast_guards.TENSORS,)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_state_tensor_is_seen(module: ModuleType, name: str) -> None:
    check(module, CHANGES[name], torch.zeros(3, 4), self_test.STATE)


@pytest.mark.parametrize("want", [self_test.PARAMETER, self_test.WITHOUT_GRADIENT])
@pytest.mark.parametrize("name", [*CHANGES, *PARAMETER_CHANGES])
def test_a_change_of_a_parameter_is_seen(module: ModuleType, name: str, want: int) -> None:
    check(module, (CHANGES | PARAMETER_CHANGES)[name], nn.Parameter(torch.zeros(3, 4)), want)


GRADIENTS: dict[str, Change] = {
    "none": lambda t: setattr(t, "grad", None),
    "sparse": lambda t: setattr(t, "grad", torch.zeros(3, 4).to_sparse()),
    "of another class": lambda t: setattr(t, "grad", nn.Parameter(torch.zeros(3, 4), requires_grad=False)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_change_of_a_gradient_at_entry_is_seen(module: ModuleType, name: str) -> None:
    param = nn.Parameter(torch.zeros(3, 4))
    param.grad = torch.zeros(3, 4)
    look = look_at_tensor(module, param, self_test.WITH_GRADIENT)
    param.grad = torch.ones(3, 4)  # another tensor of the same kind
    assert look.changed() == ()
    GRADIENTS[name](param)
    assert look.changed() == (fast_guards.TENSORS,)


def test_a_gradient_that_appears_is_seen_where_none_is_wanted(module: ModuleType) -> None:
    for want, seen in ((self_test.WITHOUT_GRADIENT, (fast_guards.TENSORS,)), (self_test.PARAMETER, ())):
        param = nn.Parameter(torch.zeros(1))
        look = look_at_tensor(module, param, want)
        param.grad = torch.zeros(1)
        assert look.changed() == seen


def test_a_hook_added_or_removed_is_seen(module: ModuleType) -> None:
    param = nn.Parameter(torch.zeros(2))
    handles = [param.register_hook(lambda grad: None), param.register_post_accumulate_grad_hook(lambda t: None)]
    for change in (handles[0].remove, handles[1].remove, lambda: param.register_hook(lambda grad: None)):
        look = look_at_tensor(module, param)
        assert look.changed() == ()
        change()
        assert look.changed() == (fast_guards.TENSORS,)


def test_renew_takes_the_tensors_as_they_are(module: ModuleType) -> None:
    tensor, other = torch.zeros(2), torch.zeros(2)
    look = look_at_tensor(module, tensor, self_test.STATE)
    torch._C._swap_tensor_impl(tensor, other)
    assert look.changed() == (fast_guards.TENSORS,)
    look.accept()
    del other
    assert look.changed() == ()
    tensor.data = torch.zeros(3)
    assert look.changed() == (fast_guards.TENSORS,)


def test_what_cannot_be_taken_is_named_again(module: ModuleType) -> None:
    """A tensor that became another kind is never taken for unchanged, whatever the caller says."""
    tensors = (torch.zeros(2), torch.zeros(2))
    look = module.StateGuard(tensors, bytes(2), (), ())
    torch._C._swap_tensor_impl(tensors[1], torch.zeros(2).to_sparse())
    for _ in range(3):
        assert look.changed() == (fast_guards.TENSORS,)
        look.accept()


def test_modes_are_renewed(module: ModuleType) -> None:
    look = module.StateGuard((), b"", (), ())
    with torch.no_grad():
        assert look.changed() == (fast_guards.MODES,)
        look.accept()
        assert look.changed() == ()
    assert look.changed() == (fast_guards.MODES,)
    look.accept()
    for device in ("meta", "cpu"):  # one mode on the stack says nothing about which device it stands for
        with torch.device(device):
            assert look.changed() == (fast_guards.MODES,)
            look.accept()


def test_what_a_tensor_wrapped_may_die(module: ModuleType) -> None:
    """Its memory goes to others, which look just like it: still nothing is taken for it."""
    tensors = tuple(torch.zeros(3, 4) for _ in range(100))
    look = module.StateGuard(tensors, bytes(100), (), ())
    others = [torch.zeros(5) for _ in tensors]
    for one, other in zip(tensors, others, strict=True):
        torch._C._swap_tensor_impl(one, other)
    del others, other
    gc.collect()
    fresh = [torch.zeros(3, 4) for _ in range(300)]
    assert look.changed() == (fast_guards.TENSORS,)
    del fresh


def test_tensors_can_be_swapped_while_they_are_looked_at(module: ModuleType) -> None:
    """torch refuses to swap what somebody else refers to, weakly or not: so the look must hold no TensorImpl."""
    tensors = (torch.zeros(3, 4), nn.Parameter(torch.zeros(3, 4)))
    look = module.StateGuard(tensors, bytes([self_test.STATE, self_test.PARAMETER]), (), ())
    for tensor, other in zip(tensors, (torch.ones(3, 4), nn.Parameter(torch.ones(3, 4))), strict=True):
        assert look.changed() == ()
        torch.utils.swap_tensors(tensor, other)
        assert look.changed() == (fast_guards.TENSORS,)
        look.accept()


def test_what_it_cannot_look_at_is_refused(module: ModuleType) -> None:
    for thing in (torch.zeros(2).to_sparse(), torch._subclasses.FakeTensorMode().from_tensor(torch.zeros(2)), 5):
        with pytest.raises(TypeError):
            look_at_tensor(module, thing, self_test.STATE)
    with pytest.raises(TypeError, match="neither dict"):
        module.StateGuard((), b"", ({1},), (None,))


def test_a_change_of_a_list_or_a_cell_is_seen(module: ModuleType) -> None:
    items, cell = [1.5, "x"], CellType(items_held := object())
    look = module.StateGuard((), b"", (items, cell), (tuple(items), items_held))
    items[0], items[1] = items[0], items[1]
    assert look.changed() == ()
    for change, back in (
        (lambda: items.append(0), items.pop),
        (lambda: items.reverse(), items.reverse),
        (lambda: items.__setitem__(0, float("1.5")), None),
    ):
        change()
        assert look.changed() == (0,)
        if back is not None:
            back()
            assert look.changed() == ()
    items[:] = []
    cell.cell_contents = 5
    assert look.changed() == (0, 1)
    del cell.cell_contents
    assert look.changed() == (0, 1)


def test_a_look_in_a_cycle_is_collected(module: ModuleType) -> None:
    class Owner:
        pass

    owner = Owner()
    owner.look = module.StateGuard((), b"", (vars(owner), [owner]), (None, (owner,)))  # type: ignore[attr-defined]
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
