"""make_guards(spec, context): when a captured step may be used again, by what its trace has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch

from wholestep.capture.bind.captured import BindingSpec, StateRef, mirrored_locations, resolve_locations
from wholestep.capture.effects import object_effects
from wholestep.capture.effects.side_effects import TICKS
from wholestep.capture.effects.tensor_effects import relax_snapshots
from wholestep.capture.functionalize.storage_resize import StorageSizes
from wholestep.capture.guards import guards as guarding
from wholestep.capture.guards.guards import Guards
from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.scalars.rank_symbols import Rank


def make_guards(spec: BindingSpec, context: StepContext, numbers: list[Rank]) -> Guards:
    kept, state = set(spec.kept), context.state
    with_grad = kept | {one.slot for one in spec.results if isinstance(one, StateRef)}
    grads: dict[int, bool] = {}
    for slot in state.params:
        if slot.tensor.grad is None:
            grads[id(slot.tensor)] = False
        elif state.index[id(slot.tensor.grad)] in with_grad:
            grads[id(slot.tensor)] = True
    pairs = list(zip(context.leaves, context.is_data, strict=True))
    free = [spot for number, spot in enumerate(resolve_locations(spec.left, context)) if number not in spec.shared]
    written = {id(state.slots[slot].tensor) for slot in spec.written if slot < len(state.slots)}
    relax_snapshots(context.found.snapshots, free, _like)
    relax_snapshots(context.found.snapshots, mirrored_locations(spec, context), partial(_like, but=written))
    if spec.hides:
        object_effects.relax_snapshots(context.found.snapshots, resolve_locations(spec.object_effects, context))
    of_tensors = {id(vars(slot.tensor)) for slot in state.slots}
    numbers_given = context.arguments.numbers
    moving = [leaf for leaf in numbers_given if context.counters.has(numbers_given, leaf)]
    return Guards(
        state=guarding.state_slots(state, kept), is_data=context.is_data, spec=context.spec, grads=grads,
        leaves=[guarding.describe(leaf) if is_data else leaf for leaf, is_data in pairs],
        aliases=guarding.aliases_of(context.leaves, context.is_data),
        snapshots=[
            *context.found.snapshots, *context.lifter.snapshots, *context.lifter.attributes, *_optimizer_watches(spec,
            context)
        ],
        predicates=_predicates(spec, context, numbers), counters=context.counters if context.counters.counters else
        None, given=numbers_given, moving=moving, unread=spec.unread, paths=context.arguments.paths, outside=[watch for
        watch in context.found.snapshots if id(watch.container) not in of_tensors],
    )  # fmt: skip


def _like(tensor: torch.Tensor, but: Set[int] = frozenset()) -> Callable[[Any], bool]:
    """Whether something is a tensor of which a trace depends on the same as of this one, and none with an id in `but`:
    the step writes to these under another name."""
    then = guarding.describe(tensor)
    return lambda now: isinstance(now, torch.Tensor) and id(now) not in but and guarding.describe(now) == then


def storage_sizes(spec: BindingSpec, context: StepContext, leaf_of: dict[int, int]) -> StorageSizes | None:
    names, slots = context.names(), context.state.slots
    tensors = [*(slot.tensor for slot in slots), *(hyper.box for hyper in context.lifter.hypers), *context.user]
    found = StorageSizes()
    for index, num_bytes in spec.storages:
        if index in leaf_of:
            found.arguments.append((leaf_of[index], num_bytes))
        else:
            found.state.append((names[index], tensors[index], num_bytes))
    return found if spec.storages else None


def _predicates(spec: BindingSpec, context: StepContext, numbers: Sequence[Rank]) -> Any:
    if spec.predicates is None:
        return None
    slots, hypers, names = context.state.slots, context.lifter.hypers, spec.placeholders
    sources: dict[str, Any] = {}
    for name, slot in zip(names, slots, strict=False):
        sources[name] = slot.tensor.detach().clone if slot.tensor.dim() == 0 else None
    for name, hyper in zip(names[len(slots) :], hypers, strict=False):
        sources[name] = _boxed(hyper.read)
    for name, rank in zip(reversed(names), reversed(numbers), strict=False):
        sources[name] = partial(int, rank.number)
    return guarding.host_sources(spec.predicates, sources)


def _boxed(read: Callable[[], float]) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(read(), dtype=torch.float64, device="cpu")


def _optimizer_watches(spec: BindingSpec, context: StepContext) -> list[Snapshot]:
    """Structure of the optimizers: groups, their parameters, and the state tensors the graph is tied to."""
    snapshots: list[Snapshot] = []
    state = context.state

    def watch(container: Any, path: str, keys: tuple[Any, ...] | None = None) -> None:
        one = Snapshot(container, path, keys)
        one.held = one.now()
        snapshots.append(one)

    for name, opt in state.optimizers:
        watch(vars(opt), name, ("state", "param_groups"))
        watch(opt.param_groups, f"{name}.param_groups")
        watch(opt.state, f"{name}.state")
        watch(opt._optimizer_step_pre_hooks, f"{name}.step_pre_hooks")
        watch(opt._optimizer_step_post_hooks, f"{name}.step_post_hooks")
        for number, group in enumerate(opt.param_groups):
            watch(group["params"], f"{name}.groups.{number}.params")
            for param in group["params"]:
                if param in opt.state and state.index[id(param)] in spec.stepped:
                    watch(opt.state[param], f"{name}.state of {state.name_of(param)}")
    called = [(name, one) for name, one in context.found.schedulers if context.counters.moves(vars(one))]
    for name, scheduler in called:
        watch(vars(scheduler), name)
    context.counters.mark(snapshots)
    for one in snapshots[len(snapshots) - len(called) :]:
        one.moving |= {TICKS}
    return snapshots
