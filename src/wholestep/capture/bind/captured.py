"""Ties: how a program hangs together with the objects of a scene, by number; and the same with live objects.

A capture gives a program and its ties. Tied to the scene it was made in, they are a `Captured` step; tied to a scene of
another process in which everything has the same place, they are the same step there, and nothing was traced for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from wholestep.capture.bind.binding import Binding
from wholestep.capture.effects import object_effects
from wholestep.capture.effects.argument_effects import Written, write
from wholestep.capture.effects.optimizer_effects import Note
from wholestep.capture.effects.side_effects import TICKS
from wholestep.capture.effects.tensor_effects import Mirror, Way, loosen, put
from wholestep.capture.functionalize.storage_resize import Sizes
from wholestep.capture.guards import guards as guarding
from wholestep.capture.guards.guards import Guards
from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import Spot, Watch
from wholestep.capture.reach.step_context import Scene
from wholestep.capture.reach.train_state import Address
from wholestep.capture.scalars.counters import Place, identity
from wholestep.capture.scalars.rank_symbols import Rank, ranks
from wholestep.ir.program import InputKind, Program


@dataclass(frozen=True, slots=True)
class Held:
    """In a result: the tensor of the state in this slot."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """Where a program's inputs come from, where its outputs go, and what its trace depends on.

    Plain values. A *slot* is a place in `State.slots`; the tracer's inputs are the slots, then the numbers of parameter
    groups, the tensors of the arguments, and the ranks.
    """

    kept: tuple[int, ...]
    """Per input of the program its place among the tracer's inputs."""
    result_spec: tree_util.TreeSpec
    results: tuple[Any, ...]
    """Leaves of what the step returns: `Held`, or a value as it is; None where the graph fills it."""
    left: tuple[tuple[int, Any], ...]
    """Where the last leaves go, which the step does not return: the number of a container in the scene, and a key."""
    shared: frozenset[int]
    """Those of `left` by number where the very tensor has to stand that stood there, since it stands elsewhere, too."""
    mirrored: tuple[tuple[int, tuple[int, Any], Way], ...]
    """Slots of tensors that the graph has for itself, and where what they mirror stands between calls, as in `left`."""
    written: frozenset[int]
    """Slots that the graph writes to."""
    result_places: tuple[int, ...]
    """Leaves that the graph fills, in the order of its USER outputs."""
    grads: tuple[int, ...]
    """Slots of parameters that get a new ``.grad``, in the order of the GRAD outputs."""
    kept_grads: frozenset[int]
    """Slots of parameters whose ``.grad`` is the tensor that it was at entry."""
    new_state: tuple[tuple[Address, bool], ...]
    """What the graph creates for optimizers, and whether it is a number in Python."""
    notes: tuple[Note, ...]
    """Plain values that the step leaves with optimizers."""
    unread: tuple[int, ...]
    """Leaves of the arguments that are any text."""
    handed: tuple[Written, ...]
    """To which containers among the arguments the step writes. If to any, its result is a pair: what it returns, and a
    list of what is new there."""
    nests: tuple[tuple[int, Any], ...]
    """Where things go that it leaves in objects, as in `left`. If any, its result is a pair of all that and a list."""
    hides: bool
    """Whether nobody looks at what stood there before."""
    places: tuple[tuple[int, Place], ...]
    """Of numbers that the step moves, each without its container, which is the one with this number in the scene."""
    calls_scheduler: bool
    """Whether the step itself calls a scheduler, whose own constants are in its graph then."""
    ticks: tuple[tuple[int, int], ...]
    """Schedulers by number, and how often the step calls them."""
    stepped: frozenset[int]
    """Slots of parameters that had a gradient when an optimizer stepped."""
    stepping: tuple[int, ...]
    """Optimizers that step, by number."""
    slices: tuple[int, int, int]
    """Ends of the USER, GRAD and STATE outputs among the program's outputs."""
    placeholders: tuple[str, ...]
    """Names of the tracer's inputs, by which predicates know them."""
    predicates: tuple[fx.GraphModule, list[bool], list[str]] | None
    storages: tuple[tuple[int, int], ...]
    """Inputs of the tracer whose storage has to have so many bytes."""
    foreign: int
    """How many tensors of nobody the graph holds: they are constants of this process."""
    environment: Mapping[str, str]
    """Variables of the environment that the trace read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured step: the program, the objects behind its inputs and outputs, and when it may be used again."""

    source: Callable[[], Program]
    """Gives the program; a saved one is not read before somebody asks for it."""
    binding: Binding
    guards: Guards
    ties: Ties
    nests: list[Spot]
    """Where things go that the step leaves in objects."""
    settled: bool = True
    """Whether the step changed nothing in its first run. Else the ties are those of a scene that it had set up."""
    undo: Callable[[], None]
    """Removes the optimizer state that was created for this step: for when its first call fails after the capture."""

    @property
    def program(self) -> Program:
        """The program, as it was captured."""
        return self.source()

    def returned(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Behind a call that gave `result`: writes to its arguments and to objects what the step leaves there besides
        tensors. What it returns."""
        if self.nests:
            result, left = result
            put(self.nests, left)
        if self.ties.handed:
            result, things = result
            write(self.ties.handed, (args, kwargs), things)
        return result

    @property
    def only_returns(self) -> bool:
        """Whether there is nothing to do for `returned`."""
        return not (self.nests or self.ties.handed)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around the first call: one that fails leaves no optimizer state behind that was not there before it."""
        try:
            yield
        except BaseException:
            self.undo()
            raise


def numbered(places: Sequence[Place], scene: Scene) -> tuple[tuple[int, Place], ...]:
    """Places as plain values."""
    known: dict[int, int] = {}
    for number, container in enumerate(scene.containers()):
        known.setdefault(identity(container), number)
    return tuple((known[identity(place.container)], replace(place, container=None)) for place in places)


def numbered_spots(spots: Sequence[Spot], scene: Scene) -> tuple[tuple[int, Any], ...]:
    """The same for spots."""
    known = {identity(container): number for number, container in enumerate(scene.containers())}
    return tuple((known[identity(container)], key) for container, key in spots)


def located(places: Sequence[tuple[int, Place]], scene: Scene) -> list[Place]:
    """The same places in another scene."""
    containers = scene.containers()
    return [replace(place, container=containers[number]) for number, place in places]


def tie(source: Callable[[], Program], ties: Ties, scene: Scene) -> Captured:
    """The program tied to the live objects of the scene. State that the step does not use is taken back."""
    # Before guards are made, which hold what is left.
    slots = scene.state.slots
    read = {i for i in ties.kept if i < len(slots) and slots[i].kind is not InputKind.PARAM}
    scene.lazy.take_back({id(slots[slot].tensor) for slot in ties.stepped | read})
    for slot, _, _ in ties.mirrored:
        slots[slot].tensor = slots[slot].tensor.detach().clone()
    binding = _binding(ties, scene)
    guards = _guards(ties, scene, ranks())
    leaf_of = {ties.kept[index]: leaf for index, leaf in binding.user}
    guards.storages = _sizes(ties, scene, leaf_of)
    return Captured(
        source=source, binding=binding, guards=guards, ties=ties, nests=_spots(ties.nests, scene),
        undo=scene.lazy.take_back,
    )  # fmt: skip


def _binding(ties: Ties, scene: Scene) -> Binding:
    state, slots, hypers, numbers = scene.state, scene.state.slots, scene.lifter.hypers, ranks()
    place = {id(leaf): i for i, leaf in reversed(list(enumerate(scene.leaves)))}
    tensors: list[torch.Tensor | int | None] = []
    binding = Binding(
        tensors=tensors, hypers=[], user=[], entry_grads=[], result_spec=ties.result_spec,
        results=[_result(one, scene) for one in ties.results],
        result_places=list(ties.result_places), entry_results=[], left=_spots(ties.left, scene),
        mirrors=[
            Mirror(slots[slot].tensor, spot, way)
            for (slot, _, way), spot in zip(ties.mirrored, _mirrored(ties, scene), strict=True)
        ],
        standing=[],
        grads=[slots[i].tensor for i in ties.grads], cleared=[],
        stepped=[state.optimizers[number][1] for number in ties.stepping],
        new_state=[(where.holder(state), where.key, is_number) for where, is_number in ties.new_state],
        notes=[(note.address.holder(state), note.address.key, note.value) for note in ties.notes],
        ticks=[(scene.found.schedulers[number][1], count) for number, count in ties.ticks],
        counters=scene.counters.written(scene.arguments.numbers),
        slices=ties.slices,
    )  # fmt: skip
    owner = {id(s.tensor.grad): s.tensor for s in state.params if s.tensor.grad is not None}
    mirrors = dict(zip((slot for slot, _, _ in ties.mirrored), binding.mirrors, strict=True))
    for index, one in enumerate(ties.results):
        if isinstance(one, Held) and slots[one.slot].kind is InputKind.GRAD:
            binding.entry_results.append((index, owner[id(slots[one.slot].tensor)]))
        elif isinstance(one, Held) and one.slot in mirrors:
            binding.standing.append((index, mirrors[one.slot]))
    for index, old in enumerate(ties.kept):
        tensors.append(None)
        if old < len(slots):
            if slots[old].kind is InputKind.GRAD:
                binding.entry_grads.append((index, owner[id(slots[old].tensor)]))
            else:
                tensors[index] = slots[old].tensor
        elif (number := old - len(slots)) < len(hypers):
            binding.hypers.append((index, hypers[number]))
        elif (number := number - len(hypers)) < len(scene.user):
            binding.user.append((index, place[id(scene.user[number])]))
        else:
            tensors[index] = numbers[number - len(scene.user)].number
    with_new = {*ties.grads, *ties.kept_grads}
    binding.cleared = [
        s.tensor
        for i, s in enumerate(slots)
        if s.kind is InputKind.PARAM and s.tensor.grad is not None and i not in with_new
    ]
    return binding


def _result(one: Any, scene: Scene) -> Any:
    """What a call returns in one place, if that is the same in every call; else None."""
    if not isinstance(one, Held):
        return one
    slot = scene.state.slots[one.slot]
    return None if slot.kind is InputKind.GRAD else slot.tensor


def _spots(numbered: Sequence[tuple[int, Any]], scene: Scene) -> list[Spot]:
    containers = scene.containers() if numbered else []
    return [(containers[number], key) for number, key in numbered]


def _mirrored(ties: Ties, scene: Scene) -> list[Spot]:
    return _spots([spot for _, spot, _ in ties.mirrored], scene)


def _guards(ties: Ties, scene: Scene, numbers: list[Rank]) -> Guards:
    kept, state = set(ties.kept), scene.state
    with_grad = kept | {one.slot for one in ties.results if isinstance(one, Held)}
    grads: dict[int, bool] = {}
    for slot in state.params:
        if slot.tensor.grad is None:
            grads[id(slot.tensor)] = False
        elif state.index[id(slot.tensor.grad)] in with_grad:
            grads[id(slot.tensor)] = True
    pairs = list(zip(scene.leaves, scene.is_data, strict=True))
    free = [spot for number, spot in enumerate(_spots(ties.left, scene)) if number not in ties.shared]
    written = {id(state.slots[slot].tensor) for slot in ties.written if slot < len(state.slots)}
    loosen(scene.found.watches, free, _like)
    loosen(scene.found.watches, _mirrored(ties, scene), partial(_like, but=written))
    if ties.hides:
        object_effects.loosen(scene.found.watches, _spots(ties.nests, scene))
    of_tensors = {id(vars(slot.tensor)) for slot in state.slots}
    numbers_given = scene.arguments.numbers
    moving = [leaf for leaf in numbers_given if scene.counters.has(numbers_given, leaf)]
    return Guards(
        state=guarding.state_slots(state, kept), is_data=scene.is_data, spec=scene.spec, grads=grads,
        leaves=[guarding.describe(leaf) if is_data else leaf for leaf, is_data in pairs],
        aliases=guarding.aliases_of(scene.leaves, scene.is_data),
        watches=[
            *scene.found.watches, *scene.lifter.watches, *scene.lifter.attributes, *_optimizer_watches(ties, scene)
        ],
        predicates=_predicates(ties, scene, numbers), counters=scene.counters if scene.counters.counters else None,
        given=numbers_given, moving=moving, unread=ties.unread, paths=scene.arguments.paths,
        outside=[watch for watch in scene.found.watches if id(watch.container) not in of_tensors],
    )  # fmt: skip


def _like(tensor: torch.Tensor, but: Set[int] = frozenset()) -> Callable[[Any], bool]:
    """Whether something is a tensor of which a trace depends on the same as of this one, and none with an id in `but`:
    the step writes to these under another name."""
    then = guarding.describe(tensor)
    return lambda now: isinstance(now, torch.Tensor) and id(now) not in but and guarding.describe(now) == then


def _sizes(ties: Ties, scene: Scene, leaf_of: dict[int, int]) -> Sizes | None:
    names, slots = scene.names(), scene.state.slots
    tensors = [*(slot.tensor for slot in slots), *(hyper.box for hyper in scene.lifter.hypers), *scene.user]
    found = Sizes()
    for index, num_bytes in ties.storages:
        if index in leaf_of:
            found.arguments.append((leaf_of[index], num_bytes))
        else:
            found.state.append((names[index], tensors[index], num_bytes))
    return found if ties.storages else None


def _predicates(ties: Ties, scene: Scene, numbers: Sequence[Rank]) -> Any:
    if ties.predicates is None:
        return None
    slots, hypers, names = scene.state.slots, scene.lifter.hypers, ties.placeholders
    sources: dict[str, Any] = {}
    for name, slot in zip(names, slots, strict=False):
        sources[name] = slot.tensor.detach().clone if slot.tensor.dim() == 0 else None
    for name, hyper in zip(names[len(slots) :], hypers, strict=False):
        sources[name] = _boxed(hyper.read)
    for name, rank in zip(reversed(names), reversed(numbers), strict=False):
        sources[name] = partial(int, rank.number)
    return guarding.host_sources(ties.predicates, sources)


def _boxed(read: Callable[[], float]) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(read(), dtype=torch.float64, device="cpu")


def _optimizer_watches(ties: Ties, scene: Scene) -> list[Watch]:
    """Structure of the optimizers: groups, their parameters, and the state tensors the graph is tied to."""
    watches: list[Watch] = []
    state = scene.state

    def watch(container: Any, path: str, keys: tuple[Any, ...] | None = None) -> None:
        one = Watch(container, path, keys)
        one.held = one.now()
        watches.append(one)

    for name, opt in state.optimizers:
        watch(vars(opt), name, ("state", "param_groups"))
        watch(opt.param_groups, f"{name}.param_groups")
        watch(opt.state, f"{name}.state")
        watch(opt._optimizer_step_pre_hooks, f"{name}.step_pre_hooks")
        watch(opt._optimizer_step_post_hooks, f"{name}.step_post_hooks")
        for number, group in enumerate(opt.param_groups):
            watch(group["params"], f"{name}.groups.{number}.params")
            for param in group["params"]:
                if param in opt.state and state.index[id(param)] in ties.stepped:
                    watch(opt.state[param], f"{name}.state of {state.name_of(param)}")
    called = [(name, one) for name, one in scene.found.schedulers if scene.counters.moves(vars(one))]
    for name, scheduler in called:
        watch(vars(scheduler), name)
    scene.counters.mark(watches)
    for one in watches[len(watches) - len(called) :]:
        one.moving |= {TICKS}
    return watches
