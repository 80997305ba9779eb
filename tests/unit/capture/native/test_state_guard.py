"""The native guards sees every change, says nothing when nothing changed, and comes without anybody waiting for it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CellType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wholestep.capture.guards import fast_guards
from wholestep.capture.guards.tensor_layout import describe, first_aliases
from wholestep.capture.native import build, self_test
from wholestep.capture.python import tree_util
from wholestep.capture.python.container_views import attribute_dict

Change = Callable[[Any], object]


class Special(nn.Parameter):
    """A parameter by another name."""


# ---- tensors

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
    others = [torch.zeros(3, 4) for _ in range(3)]  # before and behind it: every place is looked at
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
    look = module.StateGuard((tensor,), bytes([self_test.STATE]), (), ())
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
        look = module.StateGuard((tensor,), bytes([self_test.STATE]), (), ())
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
    look = module.StateGuard((param,), bytes([self_test.WITH_GRADIENT]), (), ())
    param.grad = torch.ones(3, 4)  # another tensor of the same kind
    assert look.changed() == ()
    GRADIENTS[name](param)
    assert look.changed() == (fast_guards.TENSORS,)


def test_a_gradient_that_appears_is_seen_where_it_matters(module: ModuleType) -> None:
    for want, seen in ((self_test.WITHOUT_GRADIENT, (fast_guards.TENSORS,)), (self_test.PARAMETER, ())):
        param = nn.Parameter(torch.zeros(1))
        look = module.StateGuard((param,), bytes([want]), (), ())
        param.grad = torch.zeros(1)
        assert look.changed() == seen


def test_hooks_added_to_and_removed_from_those_that_are_there(module: ModuleType) -> None:
    param = nn.Parameter(torch.zeros(2))
    handles = [param.register_hook(lambda grad: None), param.register_post_accumulate_grad_hook(lambda t: None)]
    for change in (handles[0].remove, handles[1].remove, lambda: param.register_hook(lambda grad: None)):
        look = module.StateGuard((param,), bytes([self_test.PARAMETER]), (), ())
        assert look.changed() == ()
        change()
        assert look.changed() == (fast_guards.TENSORS,)


def test_renew_takes_the_tensors_as_they_are(module: ModuleType) -> None:
    tensor, other = torch.zeros(2), torch.zeros(2)
    look = module.StateGuard((tensor,), bytes([self_test.STATE]), (), ())
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
            module.StateGuard((thing,), bytes([self_test.STATE]), (), ())
    with pytest.raises(TypeError, match="neither dict"):
        module.StateGuard((), b"", ({1},), (None,))


# ---- containers


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda: defaultdict(int)])
@pytest.mark.parametrize("filled", [True, False])
def test_every_write_to_a_dict_is_seen(module: ModuleType, kind: Callable[[], Any], filled: bool) -> None:
    others = [kind() for _ in range(50)]
    container = kind()
    if filled:
        container["a"] = 1
    look = module.StateGuard((), b"", (*others, container), (None,) * 51)
    writes: list[Callable[[], Any]] = [
        lambda: container.update(a=2), lambda: container.setdefault("b", 1), lambda: container.pop("b"),
        lambda: container.__delitem__("a"), lambda: container.update(c=1), lambda: container.clear(),
    ]  # fmt: skip
    for write in writes:
        assert look.changed() == ()
        write()
        assert look.changed() == (50,) == look.changed()
        look.accept()
    container.get("a"), list(container.items())
    assert look.changed() == ()


def test_every_write_to_a_class_is_seen_and_none_to_its_base(module: ModuleType) -> None:
    base = type("Base", (), {"a": 1})
    kind = type("Kind", (base,), {"a": 1})
    look = module.StateGuard((), b"", (attribute_dict(base), attribute_dict(kind)), (None, None))
    writes: list[Callable[[], Any]] = [
        lambda: setattr(kind, "a", 2), lambda: setattr(kind, "b", 1), lambda: delattr(kind, "a"),
        lambda: setattr(kind, "__call__", len), lambda: setattr(kind, "__doc__", "a text"),
    ]  # fmt: skip
    for write in writes:
        assert look.changed() == ()
        write()
        assert look.changed() == (1,) == look.changed()
        look.accept()
    assert (kind.a, kind().b, isinstance(kind(), base), look.changed()) == (1, 1, True, ())  # type: ignore[attr-defined]
    setattr(base, "a", 3)  # noqa: B010
    assert look.changed() == (0,)


class Few:
    """Python keeps the attributes in the object, until somebody asks for its dict."""

    def __init__(self) -> None:
        self.a = self.b = 0


class Many:
    """More attributes than objects of a class can share the names of."""

    def __init__(self) -> None:
        for number in range(60):
            setattr(self, f"name_{number}", number)
        self.a = 0


class Added(Few):
    """The attribute is not there when the object is made."""

    def __init__(self) -> None:
        self.other = 0
        self.late = 0
        del self.other
        self.a = 0


COUNTED = 0


def count_globally() -> None:
    global COUNTED
    COUNTED += 1


@pytest.mark.parametrize("kind", [Few, Many, Added, nn.Identity])
@pytest.mark.parametrize("early", [True, False], ids=["dict at once", "dict behind the warming"])
def test_attributes_written_by_warm_code_are_seen(module: ModuleType, kind: type[Any], early: bool) -> None:
    """Python rewrites instructions that run often, and such a one writes into the dict by a way of its own."""
    owner = kind()
    owner.a = 0
    attributes = vars(owner) if early else None

    def write() -> None:
        owner.a += 1

    for _ in range(5000):
        write()
    attributes = vars(owner) if attributes is None else attributes
    look = module.StateGuard((), b"", (attributes,), (None,))
    for _ in range(5000):
        assert look.changed() == ()
        write()
        assert look.changed() == (0,)
        look.accept()
    del owner.a
    assert look.changed() == (0,)


def test_globals_and_writes_from_c_are_seen(module: ModuleType) -> None:
    container: dict[str, Any] = {"a": 1}
    look = module.StateGuard((), b"", (globals(), container), (None, None))
    for _ in range(2000):
        count_globally()
        assert look.changed() == (0,)
        look.accept()
    more = ctypes.pythonapi.PyDict_SetItemString, ctypes.pythonapi.PyDict_DelItemString
    writes: list[Callable[[], Any]] = [
        lambda: more[0](ctypes.py_object(container), b"a", ctypes.py_object(2)),
        lambda: more[1](ctypes.py_object(container), b"a"),
        lambda: container.__ior__({"b": 1}),
        container.popitem,
        lambda: exec("c = 1", {}, container),
    ]
    for write in writes:
        assert look.changed() == ()
        write()
        assert look.changed() == (1,)
        look.accept()


def test_a_write_between_the_look_and_the_renewal_is_not_lost(module: ModuleType) -> None:
    one, two = {"a": 1}, {"a": 1}
    look = module.StateGuard((), b"", (one, two), (None, None))
    one["a"] = 2
    assert look.changed() == (0,)
    two["a"] = 2
    look.accept()
    assert look.changed() == (1,)


def test_lists_and_cells(module: ModuleType) -> None:
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


# ---- the run


@pytest.fixture(params=["native", "plain"])
def inputs(request: pytest.FixtureRequest) -> Callable[..., fast_guards.InputFiller]:
    """Makes inputs of: tensors, numbers, user, grads."""
    assert build.wait() == ""

    def make(tensors: list[Any], numbers: Any = (), user: Any = (), grads: Any = ()) -> fast_guards.InputFiller:
        made = fast_guards.PythonInputFiller(tensors, numbers, user, grads)
        return made.native() if request.param == "native" else made

    return make


Make = Callable[..., fast_guards.InputFiller]


@pytest.mark.parametrize("before", [True, False])
def test_gradients_are_off_in_a_run_and_as_they_were_behind_it(inputs: Make, before: bool) -> None:
    def fails(inputs: list[Any]) -> None:
        raise ValueError(torch.is_grad_enabled())

    with torch.set_grad_enabled(before):
        assert inputs([1, 2]).run(lambda flat: (torch.is_grad_enabled(), *flat), []) == (False, 1, 2)
        assert torch.is_grad_enabled() == before
        with pytest.raises(ValueError, match="False"):
            inputs([]).run(fails, [])
        assert torch.is_grad_enabled() == before


@pytest.mark.parametrize("before", [True, False])
def test_autocast_is_off_in_a_run_and_as_it_was_behind_it(inputs: Make, before: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=before):
        ran = inputs([torch.ones(2, 2)]).run(lambda flat: (flat[0] @ flat[0]).dtype, [])
        assert torch.is_autocast_enabled("cpu") == before
    assert ran is torch.float32


def test_inputs_are_as_they_are_now(inputs: Make) -> None:
    parameter, lives = nn.Parameter(torch.zeros(2)), object()
    group: dict[str, Any] = {"lr": 0.5, "betas": (0.9, 0.99)}
    made = inputs(
        [None, None, lives, None, None, None],
        [(0, group, "lr", None), (1, group, "betas", 1)],
        [(3, 1), (4, 0)],
        [(5, parameter)],
    )
    assert made.run(list, ["a", "b"]) == [0.5, 0.99, lives, "b", "a", None]
    group.update(lr=2, betas=[0.1, True])  # integers enter as floats
    parameter.grad = torch.ones(2)
    found = made.run(list, ["c", "d"])
    assert found == [2.0, 1.0, lives, "d", "c", parameter.grad]
    assert [type(one) for one in found[:2]] == [float, float]


def test_inputs_that_are_not_there_are_the_errors_of_python(inputs: Make) -> None:
    for numbers, error in (([(0, {}, "lr", None)], KeyError), ([(0, {"lr": "x"}, "lr", None)], ValueError)):
        with pytest.raises(error):
            inputs([None], numbers).run(list, [])
    with pytest.raises(IndexError):
        inputs([None], user=[(0, 3)]).run(list, [1])
    with pytest.raises(IndexError):
        inputs([None], user=[(4, 0)]).run(list, [1])


def test_what_belongs_to_a_call_is_let_go_and_the_list_serves_again(inputs: Make) -> None:
    class Batch:
        pass

    seen: list[list[Any]] = []
    made = inputs([1, None, 2, None], user=[(1, 0), (3, 0)])
    gone = []
    for _ in range(3):
        batch = Batch()
        gone.append(weakref.ref(batch))
        assert made.run(lambda flat: seen.append(flat) or flat[1] is flat[3] is not None, [batch]) is True
        del batch
        assert seen[-1] == [1, None, 2, None]
        assert gone[-1]() is None
    assert seen[0] is seen[1] is seen[2]


def test_a_call_within_a_call_has_a_list_of_its_own(inputs: Make) -> None:
    made = inputs([None], user=[(0, 0)])

    def function(flat: list[Any]) -> list[Any]:
        inner = made.run(list, ["inner"]) if flat == ["outer"] else []
        return [*flat, *inner]

    assert made.run(function, ["outer"]) == ["outer", "inner"]


def test_inputs_in_a_cycle_are_collected(inputs: Make) -> None:
    class Owner:
        pass

    owner: Any = Owner()
    owner.inputs = inputs([owner])
    assert owner.inputs.run(len, []) == 1
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


# ---- arguments


def matcher(
    args: tuple[Any, ...], kwargs: dict[str, Any], state: tuple[Tensor, ...] = ()
) -> fast_guards.SignatureGuard | None:
    leaves, spec = tree_util.flatten((args, kwargs))
    data = [isinstance(leaf, torch.Tensor) and all(leaf is not one for one in state) for leaf in leaves]
    described = [describe(leaf) if is_data else leaf for leaf, is_data in zip(leaves, data, strict=True)]
    return fast_guards.signature_guard(spec, described, data, first_aliases(leaves, data), state)


def same_as_flatten(made: fast_guards.SignatureGuard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    found = made.match((args, kwargs))
    wanted = tree_util.flatten((args, kwargs))[0]
    return found is not None and len(found) == len(wanted) and all(a is b for a, b in zip(found, wanted, strict=True))


def test_leaves_are_those_of_flatten(module: ModuleType) -> None:
    model = nn.Linear(2, 2)
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    args, kwargs = (model, {"x": x, "more": [y, (x, None)]}), {"scale": 2.5, "name": "a b", "on": True, "n": 10**20}
    made = matcher(args, kwargs)
    assert made is not None
    assert same_as_flatten(made, args, kwargs)
    u, v = torch.ones(2, 3), torch.ones(2, dtype=torch.int64)
    others = {"scale": float("2.5"), "name": " ".join("ab"), "on": True, "n": int("1" + "0" * 20)}
    assert same_as_flatten(made, (model, {"x": u, "more": [v, (u, None)]}), others)


X, Y = torch.zeros(2, 3), torch.zeros(2, 3)
OTHER_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "shape": ((torch.zeros(3, 3), [Y, 1]), {"k": 1.0}),
    "strides": ((torch.zeros(3, 2).t(), [Y, 1]), {"k": 1.0}),
    "dtype": ((X.double(), [Y, 1]), {"k": 1.0}),
    "device": ((torch.zeros(2, 3, device="meta"), [Y, 1]), {"k": 1.0}),
    "requires_grad": ((torch.zeros(2, 3, requires_grad=True), [Y, 1]), {"k": 1.0}),
    "negative": ((torch._neg_view(X), [Y, 1]), {"k": 1.0}),
    "class": ((nn.Parameter(X, requires_grad=False), [Y, 1]), {"k": 1.0}),
    "layout": ((X.to_sparse(), [Y, 1]), {"k": 1.0}),
    "no tensor": ((None, [Y, 1]), {"k": 1.0}),
    "the same tensor twice": ((X, [X, 1]), {"k": 1.0}),
    "a number": ((X, [Y, 2]), {"k": 1.0}),
    "type of a number": ((X, [Y, True]), {"k": 1.0}),
    "a keyword's number": ((X, [Y, 1]), {"k": 1.5}),
    "another keyword": ((X, [Y, 1]), {"j": 1.0}),
    "one keyword more": ((X, [Y, 1]), {"k": 1.0, "j": 1.0}),
    "one argument more": ((X, [Y, 1], 1), {"k": 1.0}),
    "a longer list": ((X, [Y, 1, 1]), {"k": 1.0}),
    "a tuple": ((X, (Y, 1)), {"k": 1.0}),
    "nothing": ((), {}),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_another_call_does_not_match(module: ModuleType, name: str) -> None:
    made = matcher((X, [Y, 1]), {"k": 1.0})
    assert made is not None
    assert made.match(OTHER_CALLS[name]) is None
    assert made.match(((torch.ones(2, 3), [torch.ones(2, 3), 1]), {"k": 1.0})) is not None


def test_a_conjugate_is_another_call(module: ModuleType) -> None:
    z = torch.zeros(2, 3, dtype=torch.complex64)
    made = matcher((z,), {})
    assert made is not None
    assert made.match(((z.conj(),), {})) is None
    assert made.match(((z.clone(),), {})) is not None


def test_order_of_names_and_tensors_given_twice(module: ModuleType) -> None:
    made = matcher(({"a": X, "b": Y},), {})
    assert made is not None
    assert made.match((({"b": Y, "a": X},), {})) is None
    twice = matcher((X, Y, X), {})
    assert twice is not None
    assert twice.match(((Y, X, Y), {})) is not None
    assert twice.match(((X, Y, Y), {})) is None
    assert twice.match(((X, X, X), {})) is None


def test_a_tensor_of_the_state_is_no_data(module: ModuleType) -> None:
    state = torch.zeros(2, 3)
    made = matcher((X,), {}, state=(state,))
    assert made is not None
    assert made.match(((state,), {})) is None


@pytest.mark.parametrize("thing", [SimpleNamespace(), {1: X}, OrderedDict(a=X), object(), {1, 2}])
def test_other_arguments_are_left_to_python(module: ModuleType, thing: Any) -> None:
    assert matcher((X, thing), {}) is None


# ---- how it comes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, a compiler that copies the library that is there, and a door that knows nothing.

    The compiler takes half a second, and longer while there is a file ``hold``.
    """
    built = build.library()
    assert build.wait() == ""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!{sys.executable}\nimport os, shutil, sys, time\nopen({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
        f"time.sleep(0.5)\nwhile os.path.exists({str(tmp_path / 'hold')!r}): time.sleep(0.01)\n"
        f"shutil.copy({str(built)!r}, sys.argv[sys.argv.index('-o') + 1])\n"
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setattr(build, "_build", build._Build())
    yield tmp_path
    build.wait(10)


def num_builds(cache: Path) -> int:
    calls = cache / "calls"
    return len(calls.read_text()) if calls.exists() else 0


@contextmanager
def held_lock() -> Iterator[Path]:
    """The lock file, held as by another process that builds."""
    lock = build.library().with_suffix(".lock")
    lock.parent.mkdir(mode=0o700, parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lock


def test_the_first_call_does_not_wait(cache: Path) -> None:
    hold = cache / "hold"
    hold.touch()
    assert build.module() is None
    assert build.why_not() == "it is being built"
    hold.unlink()
    assert build.wait() == ""
    assert build.module() is not None
    assert build.library().parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in build.library().parent.iterdir()] == [build.library().name]


def test_what_is_built_is_loaded_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build()
    monkeypatch.setattr(build, "_build", build._Build())
    assert build.module() is not None
    assert num_builds(cache) == 1


def test_many_build_once(cache: Path) -> None:
    threads = [threading.Thread(target=build.build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.library().exists()
    assert num_builds(cache) == 1


KILLED = """
import os, signal, sys
from wholestep.capture.native import build
build._compiler = lambda: ["sh", "-c", f"kill -9 {os.getpid()}"]
build.build()
"""


def test_what_a_process_that_was_killed_left_behind_is_taken_over(cache: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False, timeout=120)
    lock = build.library().with_suffix(".lock")
    assert killed.returncode == -signal.SIGKILL
    assert lock.exists()
    half = lock.with_suffix(".tmp")
    half.touch()
    old = time.time() - build.STALE_S - 1
    os.utime(half, (old, old))
    build.build()
    assert not half.exists()
    assert build.library().exists()
    assert not lock.exists()


def test_a_build_for_another_torch_may_end_meanwhile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is renamed between two looks at the folder."""
    path, glob = build.library(), Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda folder, what: [*glob(folder, what), path.with_name("fast_guards-other.7.tmp")]
    )
    build.build()
    assert path.exists()


def test_a_lock_that_is_held_is_respected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BUILD_TIMEOUT_S", 0.3)
    with held_lock() as lock, pytest.raises(build.Unavailable, match="another process has held"):
        build.build()
    assert num_builds(cache) == 0
    assert lock.exists()


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, logger="wholestep"):
        assert build.wait() == "there is no C++ compiler (no-such-compiler) on the PATH"
        for _ in range(3):
            assert build.module() is None
    assert len([record for record in caplog.records if "no C++ compiler" in record.getMessage()]) == 1


def test_a_compiler_that_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = cache / "bad"
    bad.write_text("#!/bin/sh\necho note\necho 'look.cpp:3: error: no header'\nexit 1\n")
    bad.chmod(0o700)
    monkeypatch.setenv("CXX", str(bad))
    assert build.wait().endswith("failed: look.cpp:3: error: no header")
    assert list(build.library().parent.iterdir()) == []


def test_a_library_that_is_none(cache: Path) -> None:
    path = build.library()
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(b"no library")
    assert "cannot be loaded" in build.wait()


def test_a_folder_that_others_can_write_to(cache: Path) -> None:
    path = build.build()
    path.parent.chmod(0o777)
    assert "can be written by others" in build.wait()
    assert build.module() is None


def test_a_library_that_fails_its_test(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "fault", lambda module: "dict: cleared")
    assert build.wait() == "the library fails its test: dict: cleared"


def test_the_switch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.wait() == "WHOLESTEP_NATIVE=0 switches it off"
    assert build.module() is None
    assert num_builds(cache) == 0


def test_a_process_that_ends_takes_its_build_with_it(cache: Path) -> None:
    code = "from wholestep.capture.native import build; assert build.module() is None; import time; time.sleep(0.3)"
    slow = cache / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CXX": str(slow)}, timeout=50)
    assert time.monotonic() - start < 45
    assert list(build.library().parent.iterdir()) == []


def test_a_process_that_ends_starts_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may be on the way there, and nobody would end what it starts."""
    monkeypatch.setattr(build, "_ending", threading.Event())
    build._give_up()
    with pytest.raises(build.Unavailable, match="the program ends"):
        build.build()
    assert num_builds(cache) == 0
    assert list(build.library().parent.iterdir()) == []


def test_a_process_that_ends_waits_for_no_other_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_ending", threading.Event())
    with held_lock() as lock:
        assert build.module() is None
        build._give_up()
        assert build.why_not() == "the program ends"
    assert lock.exists()


def test_a_file_system_without_locks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    assert build.build().exists()


class Blind:
    """A look that sees nothing, for the test of the library."""

    TENSORS = fast_guards.TENSORS

    class StateGuard:
        def __init__(self, *args: Any) -> None:
            pass

        def changed(self) -> tuple[int, ...]:
            return ()


class BlindFor:
    """A look that sees everything but what is written to some things: ``things(tensors, dicts)`` says which."""

    def __init__(self, module: ModuleType, things: Callable[[Any, Any], bool]) -> None:
        self._module, self._things, self.TENSORS = module, things, fast_guards.TENSORS

    def StateGuard(self, tensors: Any, wants: Any, containers: Any, held: Any) -> Any:
        return (
            Blind.StateGuard()
            if self._things(tensors, containers)
            else self._module.StateGuard(tensors, wants, containers, held)
        )


BLIND_FOR: dict[str, Callable[[Any, Any], bool]] = {
    "class: an attribute replaced": lambda _, dicts: any("__module__" in one for one in dicts),
    "dict: an attribute written": lambda _, dicts: any(one.get("a", 0) > self_test._WARM for one in dicts),
    "dict: an attribute replaced": lambda _, dicts: {"a": 1, "b": 1} in dicts,
    "parameter: a hook beside another": lambda tensors, _: any(one._backward_hooks for one in tensors),
}  # fmt: skip


@pytest.mark.parametrize("fault", BLIND_FOR)
def test_the_test_of_the_library_can_fail(module: ModuleType, fault: str) -> None:
    assert self_test.fault(BlindFor(module, BLIND_FOR[fault])) == fault  # type: ignore[arg-type]


def test_the_test_of_the_library(module: ModuleType) -> None:
    assert self_test.fault(module) == ""
    assert self_test.fault(Blind) == "dict: a value replaced"  # type: ignore[arg-type]
