"""What a step can reach is found under the name a person would use, and what it may read is watched."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import wholestep as ws
from wholestep.api.cache.object_fingerprint import object_fingerprint
from wholestep.capture.python import code_owner
from wholestep.capture.python.snapshot import Snapshot, same
from wholestep.capture.reach import reachability
from wholestep.capture.reach.reachability import HANDLERS, Walker, find_reachable
from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.reach.step_context import StepContext

GLOBAL_MODEL = nn.Linear(2, 2)
GLOBAL_FACTOR = 2.0
UNUSED_MODEL = nn.Linear(2, 2)


def named(found: Reachable) -> dict[str, nn.Module]:
    return dict(found.modules.values())


def paths(found: Reachable) -> list[str]:
    return [watch.path for watch in found.snapshots]


def changed(found: Reachable) -> list[tuple[str, Any, Any]]:
    return [change for watch in found.snapshots for change in watch.changes()]


def use_globals(x: Tensor) -> Tensor:
    return GLOBAL_MODEL(x) * GLOBAL_FACTOR


class Trainer:
    def __init__(self) -> None:
        self.model, self.unused = nn.Linear(2, 2), nn.Linear(3, 3)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.average = torch.zeros(2)
        self.calls, self.seen_by_loop = 0, 0

    def step(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        self.opt.step()
        return loss + self.average.sum() + self.calls

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).sum()


def reaches(thing: Any) -> Reachable:
    """What a walk finds that begins at a thing of the name "x"."""
    walker = Walker()
    walker.visit("x", thing)
    return walker.finish()


INNER = nn.Linear(2, 2)
SGD = torch.optim.SGD(INNER.parameters(), lr=0.1)


class Holder:
    def __init__(self) -> None:
        self.forward = INNER

    def method(self) -> Any:
        return self.forward


def holding_an_attribute() -> Tensor:
    tensor = torch.zeros(2)
    tensor.layer = INNER  # type: ignore[attr-defined]
    return tensor


ROWS: dict[str, tuple[int, Any, Callable[[Reachable], object]]] = {
    "loose tensor": (0, holding_an_attribute(), lambda found: [name for name, _ in found.tensors.values()] == ["x"]),
    "module": (1, nn.Sequential(INNER), lambda found: list(named(found)) == ["x"] and "x.0" in paths(found)),
    "optimizer": (2, SGD, lambda found: list(found.optimizers.values()) == [("x", SGD)]),
    "scheduler": (3, torch.optim.lr_scheduler.StepLR(SGD, 1), lambda found: (
        [name for name, _ in (*found.schedulers, *found.optimizers.values())] == ["x", "x.optimizer"])),
    "scaler": (4, GradScaler("cpu"), lambda found: (
        [name for name, _ in found.tensors.values()] == ["x._scale", "x._growth_tracker"])),
    "function": (5, lambda: INNER, lambda found: list(named(found)) == ["INNER"] and len(found.codes) == 1),
    "method": (6, Holder().method, lambda found: list(named(found)) == ["self.forward"]),
    "partial": (7, functools.partial(use_globals, x=INNER), lambda found: (
        list(named(found)) == ["GLOBAL_MODEL", "x.keywords['x']"])),
    "reference": (8, weakref.ref(INNER), lambda found: list(named(found)) == ["x"]),
    "cache": (9, functools.lru_cache(lambda: INNER), lambda found: (
        list(named(found)) == ["INNER"] and [name for name, _ in found.caches] == ["x"])),
    "native method": (10, [INNER].append, lambda found: list(named(found)) == ["x.0"]),
    "sequence": (11, deque([INNER]), lambda found: list(named(found)) == ["x.0"] and paths(found)[0] == "x"),
    "buffer": (12, bytearray(b"12"), lambda found: paths(found) == ["x"]),
    "mapping": (13, MappingProxyType({"a": INNER}), lambda found: list(named(found)) == ["x['a']"]),
    "plain object": (14, SimpleNamespace(forward=INNER), lambda found: list(named(found)) == ["x.forward"]),
}  # fmt: skip
"""Per row of `HANDLERS` its number, a thing that it is for, and what a walk from there finds."""


@pytest.mark.parametrize("name", ROWS)
def test_each_handler_follows_its_kind_of_thing(name: str) -> None:
    row, thing, is_found = ROWS[name]
    assert next(number for number, (kind, _) in enumerate(HANDLERS) if isinstance(thing, kind)) == row
    assert is_found(reaches(thing))


def test_every_handler_has_a_case() -> None:
    assert [row for row, _, _ in ROWS.values()] == list(range(len(HANDLERS)))


def test_globals_that_the_code_names_are_found() -> None:
    found = find_reachable(use_globals, (torch.ones(2),), {})
    assert named(found) == {"GLOBAL_MODEL": GLOBAL_MODEL}
    watch = next(w for w in found.snapshots if w.path.startswith("globals"))
    assert watch.held["GLOBAL_FACTOR"] == 2.0
    assert "UNUSED_MODEL" not in watch.held


def test_modules_in_closures_arguments_and_partials_are_found() -> None:
    a, b, c = nn.Linear(1, 1), nn.Linear(2, 2), nn.Linear(3, 3)

    def step(model: Any, x: Tensor, other: Any) -> Any:
        return model, other, a

    found = find_reachable(functools.partial(step, b), (torch.ones(1),), {"other": {"inner": [c]}})
    assert set(map(id, named(found).values())) == {id(a), id(b), id(c)}
    assert named(found)["a"] is a
    assert named(found)["other.inner.0"] is c


def test_positional_arguments_have_the_names_of_the_signature() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(2, 2)
    found = find_reachable(lambda generator, critic: None, (a, b), {})
    assert named(found) == {"generator": a, "critic": b}


def test_a_trainer_is_followed_through_self_and_its_methods() -> None:
    trainer = Trainer()
    found = find_reachable(trainer.step, (torch.ones(2),), {})
    assert list(named(found).values()) == [trainer.model]  # `unused` is named nowhere
    assert [opt for _, opt in found.optimizers.values()] == [trainer.opt]
    assert [name for name, tensor in found.tensors.values() if tensor is trainer.average] == ["self.average"]


def test_attributes_are_watched_only_where_code_names_them() -> None:
    trainer = Trainer()
    found = find_reachable(trainer.step, (torch.ones(2),), {})
    trainer.seen_by_loop = 7
    assert changed(found) == []
    trainer.calls = 1
    assert changed(found) == [("self.calls", 0, 1)]


def test_children_are_no_roots_and_are_watched_by_their_path() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())

    def step(x: Tensor) -> Any:
        return net[1], net(x), inner(x)

    inner = net[0]
    found = find_reachable(step, (torch.ones(2),), {})
    assert list(named(found).values()) == [net]
    net[1].eval()
    assert changed(found) == [("net.1.training", True, False)]


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parameter": (lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(2, 2))), "net.0.weight"),
    "buffer": (lambda net: net[0].register_buffer("late", torch.ones(1)), "net.0.late"),
    "child": (lambda net: net.append(nn.ReLU()), "net.2"),
    "attribute": (lambda net: setattr(net[1], "p", 0.1), "net.1.p"),
    "hook": (lambda net: net[0].register_forward_hook(lambda *a: None), "net.0._forward_hooks"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_module_are_named(name: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    found = find_reachable(lambda x: net(x), (torch.ones(2),), {})
    assert changed(found) == []
    change, path = CHANGES[name]
    change(net)
    assert any(one[0].startswith(path) for one in changed(found)), changed(found)


def test_a_long_list_is_looked_at_and_its_items_are_not_walked() -> None:
    table = [[0.0] for _ in range(5000)]

    def step(x: Tensor) -> Any:
        return x * table[0][0]

    watched = paths(find_reachable(step, (torch.ones(2),), {}))
    assert "table" in watched
    assert "table.0" not in watched


def test_tensors_of_the_call_are_not_state_and_batches_are_not_walked() -> None:
    batch = SimpleNamespace(x=torch.ones(2))
    found = find_reachable(lambda x, batch: batch.x + x, (torch.ones(2), batch), {})
    assert found.tensors == {}
    assert [path for path in paths(found) if path.startswith("batch")] == []


def test_an_object_with_a_module_is_walked() -> None:
    holder = SimpleNamespace(x=torch.ones(2), model=nn.Linear(1, 1))
    found = find_reachable(lambda holder: holder.model(holder.x), (holder,), {})
    assert list(named(found).values()) == [holder.model]
    assert [tensor for _, tensor in found.tensors.values() if tensor is holder.x]


def test_schedulers_lead_to_their_optimizer_and_move_freely_unless_read() -> None:
    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)

    def holds(x: Tensor) -> Any:
        return scheduler and x

    def reads(x: Tensor) -> Any:
        return x * scheduler.get_last_lr()[0] * scheduler.gamma * getattr(scheduler, "own", 1.0)

    for step, numbers_move in ((holds, False), (reads, True)):
        found = find_reachable(step, (torch.ones(1),), {})
        assert [o for _, o in found.optimizers.values()] == [opt]
        compiled = ws.compile(step, backend="eager")
        for gamma in (0.2, 0.5, 0.5):
            scheduler.gamma = gamma
            assert compiled(torch.ones(1)) == step(torch.ones(1))
            opt.step()
            scheduler.step()
        assert (compiled.cache_info().traces > 1) is numbers_move
    scheduler.own = 3.0
    assert compiled(torch.ones(1)) == reads(torch.ones(1)), "an attribute of the user's"


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1, 1, True), (1, True, False), (1, 1.0, False), (float("nan"), float("nan"), True), ("a", "a", True),
        ((1, (2,)), (1, (2,)), True), ((1, (2,)), (1, (3,)), False), ([1], [1], False),
        ([].append, [].append, False), (torch.float32, torch.float32, True), (None, 0, False),
    ],
)  # fmt: skip
def test_same_compares_type_and_value(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal


def test_bound_methods_are_the_same_by_object_and_function() -> None:
    one, other = Trainer(), Trainer()
    assert same(one.step, one.step)
    assert not same(one.step, other.step)


def watched(container: Any, keys: tuple[Any, ...] | None = None) -> Snapshot:
    watch = Snapshot(container, "thing", keys)
    watch.held = watch.now()
    return watch


def test_a_watch_tells_and_restores_a_list() -> None:
    things: list[Any] = [1, 2]
    watch = watched(things)
    things[0] = 5
    things.append(3)
    assert list(watch.changes()) == [("len(thing)", 2, 3), ("thing[0]", 1, 5)]
    watch.restore()
    assert things == [1, 2]


def test_a_watch_tells_and_restores_a_dict() -> None:
    things = {"a": 1, "b": 2, 3: 4}
    watch = watched(things)
    things.update(a=7, c=9)
    del things["b"], things[3]
    assert [path for path, _, _ in watch.changes()] == ["thing.a", "thing.b", "thing[3]", "thing.c"]
    watch.restore()
    assert things == {"a": 1, "b": 2, 3: 4}


class MadeAnew(OrderedDict[str, Any]):
    """Gives an object of the class that it holds, as transformers' ``ACT2FN`` does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Doubled(list[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([2 * self[i] for i in range(len(self))])


@pytest.mark.parametrize("keys", [None, ("a",)])
def test_a_watch_holds_what_a_dict_holds_and_not_what_its_class_makes_of_it(keys: tuple[str, ...] | None) -> None:
    things = MadeAnew(a=object, b=list)
    watch = watched(things, keys)
    assert list(watch.changes()) == []
    dict.__setitem__(things, "a", dict)
    assert list(watch.changes()) == [("thing.a", object, dict)]
    watch.restore()
    assert [*things.values()] == [object, list]


def test_a_watch_of_a_list_that_iterates_otherwise() -> None:
    things = Doubled([1, 2])
    watch = watched(things)
    things.append(3)
    watch.restore()
    assert [*list.__iter__(things)] == [1, 2]


def test_a_watch_of_some_keys_leaves_the_others() -> None:
    things = {"a": 1, "b": 2}
    watch = watched(things, ("a",))
    things.update(a=3, b=4)
    assert list(watch.changes()) == [("thing.a", 1, 3)]
    watch.restore()
    assert things == {"a": 1, "b": 4}


def test_a_closure_cell_is_watched_and_restored() -> None:
    calls = 0

    def step(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x

    found = find_reachable(step, (torch.ones(1),), {})
    step(torch.ones(1))
    (watch,) = (w for w in found.snapshots if w.path == "closure")
    assert list(watch.changes()) == [("closure.calls", 0, 1)]
    watch.restore()
    assert calls == 0


def test_frames_of_libraries_are_told_from_the_users() -> None:
    assert code_owner.library_frame(torch.nn.functional.__file__)
    assert code_owner.library_frame(reachability.__file__)
    assert code_owner.library_frame("<string>")
    assert not code_owner.library_frame(__file__)


NAMES: set[Any] = set()


class Registers(functools.partial[None]):
    """While it is looked at, another thread writes to the set that holds it."""

    @property
    def func(self) -> Any:  # type: ignore[override]
        NAMES.add(f"worker {len(NAMES)}")
        return print


def look_at_names(x: Tensor) -> Tensor:
    return x * bool(NAMES)


@pytest.fixture
def names() -> Iterator[None]:
    NAMES.update({Registers(print), Registers(print), "main"})
    yield
    NAMES.clear()


def test_another_thread_may_write_to_a_set_meanwhile(names: None) -> None:
    find_reachable(look_at_names, (torch.ones(2),), {})
    assert "worker 3" in NAMES
    with StepContext(look_at_names, (torch.ones(2),), {}) as context:
        count = len(NAMES)
        object_fingerprint(context, {"names": NAMES})
        assert len(NAMES) > count


class Held:
    """An object with attributes in the order that somebody has set them in."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, Held() if name != "last" else 1.0)


def test_a_hash_that_an_object_keeps_does_not_show_in_another_process() -> None:
    """Hashes of strings are others there. `GenerationConfig` of transformers keeps one of itself."""

    def painted(**attributes: object) -> str:
        held = Held("a")
        vars(held).update(attributes)
        return dict(object_fingerprint(context, {"held": held}))["held"]

    with StepContext(lambda x: x * 2, (torch.ones(2),), {}) as context:
        assert painted(_original_object_hash=1) == painted(_original_object_hash=2)
        assert painted(_original_object_hash="1") != painted(_original_object_hash="2")
        assert painted(hash=1) != painted(hash=2)


def test_the_order_in_which_attributes_were_set_does_not_show_in_another_process() -> None:
    """A library that goes through a set of names sets them in another order wherever strings have other hashes."""
    with StepContext(lambda x: x * 2, (torch.ones(2),), {}) as context:
        one, other, without = (
            dict(object_fingerprint(context, {"held": Held(*names)}))["held"]
            for names in (("a", "b", "last"), ("last", "b", "a"), ("a", "last"))
        )
    assert one == other
    assert one != without
