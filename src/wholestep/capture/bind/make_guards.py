"""make_guards(spec, context): the guards of a captured step, all made at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from wholestep.capture.bind.captured import BindingSpec, StateRef
from wholestep.capture.functionalize.storage_resize import StorageSizes
from wholestep.capture.guards import argument_guards, fast_guards, state_guards
from wholestep.capture.guards.environment import environment_snapshot
from wholestep.capture.guards.guards import Guard, Guards
from wholestep.capture.guards.size_guards import SizeConditions, SizedLayout, SizeGuard, any_size
from wholestep.capture.guards.tensor_layout import describe, first_aliases
from wholestep.capture.guards.value_guards import (
    BranchGuard,
    GradientLayoutGuard,
    MemoryGuard,
    StorageGuard,
    VaryingNumberGuard,
    sharing,
)
from wholestep.capture.python import code_names
from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.traced_inputs import (
    ArgumentSource,
    EntryGradSource,
    HyperparameterSource,
    RankSource,
    StateSource,
    StateView,
)
from wholestep.capture.reach.train_state import Slot, TrainState
from wholestep.capture.scalars.rank_symbols import ranks
from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.ir.dtensor.layouts import DTensorLayout
from wholestep.ir.dtensor.shards import is_dtensor
from wholestep.ir.lazy_graph_module import function_of
from wholestep.ir.program import InputKind
from wholestep.util.torch_switches import torch_modes


def make_guards(spec: BindingSpec, context: StepContext, sizes: SizeEnv | None = None) -> Guards:
    """The guards of a trace, which hold for everything as it is now. `sizes`: of a trace with sizes that move."""
    slots, had_gradient = _state_slots(spec, context.state), _gradients_at_entry(spec, context)
    containers = _container_guard(spec, context)
    params = [slot for slot in slots if slot.kind is InputKind.PARAM]
    kinds = [(slot, state_guards.gradient_kind(slot.tensor.grad)) for slot in params if id(slot.tensor) in had_gradient]
    return Guards(
        arguments=_argument_guards(context, spec, slots),
        state=(
            state_guards.ModeGuard(torch_modes()),
            containers,
            state_guards.HookGuard(tuple((slot, state_guards.hooks_of(slot.tensor)) for slot in params)),
            state_guards.LayoutGuard(tuple((slot, describe(slot.tensor)) for slot in slots)),
            state_guards.GradientGuard(tuple(kinds)),
        ),
        values=(*_value_guards(spec, context, sizes), *_placed_gradients(context, had_gradient)),
        fast=_fast_path(spec, context, slots, containers, had_gradient),
        always=bool(containers.opaque),
    )


def _state_slots(spec: BindingSpec, state: TrainState) -> list[Slot]:
    """The tensors whose layout a trace depends on: every parameter first, then what else the step reads or shows."""
    kept = sorted({one.slot for one in (*spec.inputs, *spec.leaves) if isinstance(one, (StateSource, StateView))})
    read = [state.slots[number] for number in kept]
    params = [slot for slot in state.slots if slot.kind is InputKind.PARAM]
    return [*params, *(slot for slot in read if slot.kind is not InputKind.PARAM)]


def _gradients_at_entry(spec: BindingSpec, context: StepContext) -> dict[int, bool]:
    """By id of each parameter whose gradient at entry matters, whether it has one."""
    state = context.state
    used = {one.slot for one in spec.inputs if isinstance(one, EntryGradSource)}
    used |= {one.slot for one in spec.leaves if isinstance(one, StateRef)}
    if not (used or spec.reads.uses_grads):  # a forward alone
        return {}
    return {id(slot.tensor): slot.tensor.grad is not None for slot in state.params}


def _argument_guards(context: StepContext, spec: BindingSpec, slots: Sequence[Slot]) -> tuple[Guard, ...]:
    leaves, is_data, paths = context.leaves, context.is_data, context.arguments.paths
    inputs = _number_inputs(context)
    data = [leaf for leaf, one in enumerate(is_data) if one]
    constants = [
        argument_guards.Constant(leaf, leaves[leaf], paths[leaf], leaf in spec.reads.opaque_leaves)
        for leaf, one in enumerate(is_data)
        if not one and leaf not in inputs
    ]
    layouts = tuple(
        (leaf, paths[leaf], describe(leaves[leaf])) for leaf in data if id(leaves[leaf]) not in context.moving
    )
    state_ids = frozenset(id(slot.tensor) for slot in slots)
    aliases = argument_guards.AliasGuard(tuple(is_data), tuple(first_aliases(leaves, is_data)))
    return (
        argument_guards.StructureGuard(context.spec),
        argument_guards.ConstantGuard(tuple(constants)),
        argument_guards.TensorArgumentGuard(layouts, state_ids),
        *([aliases] if len(data) > 1 else []),
    )


def _sized_layouts(context: StepContext, sizes: SizeEnv | None) -> tuple[SizedLayout, ...]:
    """The arguments with sizes that move, in the order of their symbols, each by its first leaf."""
    by_name = {row.name: row.tensor for row in context.traced_inputs()}
    found = []
    for one in sizes.arguments if sizes is not None else ():
        tensor = by_name[one.name]
        leaf = next(leaf for leaf, it in enumerate(context.leaves) if it is tensor)
        dims = tuple(size.dim for size in one.sizes)
        found.append(SizedLayout(leaf, context.arguments.paths[leaf], describe(tensor), dims))
    return tuple(found)


def _number_inputs(context: StepContext) -> tuple[int, ...]:
    """Leaves of the arguments that are numbers and inputs of the graph."""
    numbers = context.arguments.numbers
    return tuple(leaf for leaf in numbers if context.varying.has(numbers, leaf))


def _container_guard(spec: BindingSpec, context: StepContext) -> state_guards.ContainerGuard:
    of_tensors = {id(vars(slot.tensor)) for slot in context.state.slots}
    found, lifter = context.guarded(spec.reads.tensor_attributes), context.lifter
    snapshots = [*found, *lifter.snapshots, *lifter.attributes, *_optimizer_snapshots(spec, context)]
    if spec.reads.environment:
        snapshots.append(environment_snapshot(spec.reads.environment))
    known = {id(one) for one in snapshots if fast_guards.guardable(one) is not None}
    return state_guards.ContainerGuard(
        snapshots=tuple(one for one in snapshots if one.guard and id(one) in known),
        opaque=tuple(one for one in snapshots if one.guard and id(one) not in known),
        of_user=tuple(one for one in found if id(one.container) not in of_tensors),
    )


def _value_guards(spec: BindingSpec, context: StepContext, sizes: SizeEnv | None) -> tuple[Guard, ...]:
    made: list[Guard] = []
    if sizes is not None and (moving := _sized_layouts(context, sizes)):
        state_ids = frozenset(id(slot.tensor) for slot in context.state.slots)
        made.append(SizeGuard(moving, SizeConditions(sizes), state_ids))
    if context.varying.numbers:
        made.append(VaryingNumberGuard(context.varying, context.arguments.numbers, _number_inputs(context)))
    if spec.reads.predicates is not None:
        made.append(_branch_guard(spec, context))
    if spec.reads.argument_grads:
        made.append(argument_guards.ArgumentGradientGuard(spec.reads.argument_grads))
    if spec.reads.storages:
        made.append(StorageGuard(_storage_sizes(spec, context)))
    if (guard := _memory_guard(spec, context)) is not None:
        made.append(guard)
    return tuple(made)


def _placed_gradients(context: StepContext, had_gradient: dict[int, bool]) -> Iterator[GradientLayoutGuard]:
    """The guard of gradients of which the graph takes parts, if there are any."""
    params = (slot for slot in context.state.params if context.sees_parts and had_gradient.get(id(slot.tensor)))
    placed = tuple((slot, DTensorLayout.of(slot.tensor.grad)) for slot in params if is_dtensor(slot.tensor.grad))
    if placed:
        yield GradientLayoutGuard(placed)


def _memory_guard(spec: BindingSpec, context: StepContext) -> MemoryGuard | None:
    """Of the arguments that the step writes to; None where it writes to none."""
    written = {id(row.tensor) for place, row in enumerate(context.traced_inputs()) if place in spec.reads.written}
    data = tuple(leaf for leaf, is_data in enumerate(context.is_data) if is_data)
    leaves = tuple(leaf for leaf in data if id(context.leaves[leaf]) in written)
    if not leaves:
        return None
    state = tuple(slot.tensor for slot in context.state.slots if not is_dtensor(slot.tensor))
    return MemoryGuard(leaves, data, state, sharing(leaves, data, context.leaves, state))


def _fast_path(
    spec: BindingSpec,
    context: StepContext,
    slots: Sequence[Slot],
    guard: state_guards.ContainerGuard,
    had_gradient: dict[int, bool],
) -> fast_guards.FastPath:
    # What is made here must not keep the context alive, which holds the tensors of the call.
    tensors, leaves, is_data = [slot.tensor for slot in slots], context.leaves, context.is_data
    wants = {None: fast_guards.PARAMETER, False: fast_guards.WITHOUT_GRADIENT, True: fast_guards.WITH_GRADIENT}
    wanted = [
        wants[had_gradient.get(id(slot.tensor))] if slot.kind is InputKind.PARAM else fast_guards.STATE
        for slot in slots
    ]
    pairs = zip(leaves, is_data, strict=True)
    described = [any_size(describe(leaf), context.moving.get(id(leaf), ())) if data else leaf for leaf, data in pairs]
    aliases, any_of_type = first_aliases(leaves, is_data), (*_number_inputs(context), *spec.reads.opaque_leaves)
    containers = [pair for one in guard.snapshots if (pair := fast_guards.guardable(one)) is not None]
    return fast_guards.FastPath(
        partial(fast_guards.state_guard, tensors, wanted, containers),
        partial(
            fast_guards.signature_guard, context.spec, described, is_data, aliases, tensors, any_of_type=any_of_type
        ),
        everything=(fast_guards.MODES, fast_guards.TENSORS, *range(len(guard.snapshots))),
    )


def _storage_sizes(spec: BindingSpec, context: StepContext) -> StorageSizes:
    rows = {row.source: row for row in context.traced_inputs()}
    leaf_of = {id(one): leaf for leaf, one in reversed(list(enumerate(context.leaves)))}
    sizes = StorageSizes()
    for source, num_bytes in spec.reads.storages:
        row = rows[source]
        if isinstance(source, ArgumentSource) and source in spec.inputs:
            sizes.arguments.append((leaf_of[id(row.tensor)], num_bytes))
        else:
            sizes.state.append((row.label, row.tensor, num_bytes))
    return sizes


def _branch_guard(spec: BindingSpec, context: StepContext) -> BranchGuard:
    """Readies the predicates for calls: sources read hyper-parameters and clone state."""
    assert spec.reads.predicates is not None
    module, truths, lines = spec.reads.predicates
    slots, hypers, groups = context.state.slots, context.lifter.hypers, ranks()
    sources: dict[str, Any] = {}
    for name, source in spec.reads.predicate_inputs:
        match source:
            case StateSource(slot) | EntryGradSource(slot):
                tensor = slots[slot].tensor
                sources[name] = tensor.detach().clone if tensor.dim() == 0 else None
            case HyperparameterSource(number):
                sources[name] = hypers[number].read
            case RankSource(number):
                sources[name] = partial(int, groups[number].number)
    used = tuple(sources[node.name] for node in module.graph.find_nodes(op="placeholder"))
    return BranchGuard(function_of(module), used, tuple(truths), tuple(lines))


def _optimizer_snapshots(spec: BindingSpec, context: StepContext) -> list[Snapshot]:
    """Structure of the optimizers: groups, their parameters, and the state tensors the graph is tied to."""
    snapshots: list[Snapshot] = []
    state = context.state
    named = {name for code in context.reachable.codes for name in code_names.names(code)}

    def watch(container: Any, path: str, keys: tuple[Any, ...] | None = None) -> None:
        one = Snapshot(container, path, keys)
        one.held = one.now()
        snapshots.append(one)

    for name, opt in state.optimizers:
        watch(vars(opt), name, ("state", "param_groups"))
        watch(opt.param_groups, f"{name}.param_groups")
        watch(opt.state, f"{name}.state")
        if "defaults" in named:  # torch adds to them where it loads a state
            watch(opt.defaults, f"{name}.defaults")
        watch(opt._optimizer_step_pre_hooks, f"{name}.step_pre_hooks")
        watch(opt._optimizer_step_post_hooks, f"{name}.step_post_hooks")
        for number, group in enumerate(opt.param_groups):
            watch(group["params"], f"{name}.groups.{number}.params")
            for param in group["params"]:
                if param in opt.state and ("state" in named or state.index[id(param)] in spec.reads.stepped):
                    watch(opt.state[param], f"{name}.state of {state.name_of(param)}")
    return snapshots
