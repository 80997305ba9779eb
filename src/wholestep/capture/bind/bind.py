"""bind(program, spec, context): a program tied to live objects: those it was captured from, or others alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wholestep.capture.bind.binding import Binding
from wholestep.capture.bind.captured import BindingSpec, Captured, StateRef, mirrored_locations, resolve_locations
from wholestep.capture.bind.make_guards import make_guards
from wholestep.capture.effects.tensor_effects import Mirror
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.scalars.rank_symbols import ranks
from wholestep.ir.program import InputKind, Program


def bind(source: Callable[[], Program], spec: BindingSpec, context: StepContext) -> Captured:
    """The program tied to the live objects of the scene. State that the step does not use is taken back."""
    # Before guards are made, which hold what is left.
    slots = context.state.slots
    read = {i for i in spec.kept if i < len(slots) and slots[i].kind is not InputKind.PARAM}
    context.lazy.discard({id(slots[slot].tensor) for slot in spec.stepped | read})
    for slot, _, _ in spec.mirrored:
        slots[slot].tensor = slots[slot].tensor.detach().clone()
    binding = _binding(spec, context)
    leaf_of = {spec.kept[index]: leaf for index, leaf in binding.user}
    guards = make_guards(spec, context, ranks(), leaf_of)
    return Captured(
        source=source, binding=binding, guards=guards, spec=spec,
        object_effects=resolve_locations(spec.object_effects, context), undo=context.lazy.discard,
    )  # fmt: skip


def _binding(spec: BindingSpec, context: StepContext) -> Binding:
    state, slots, hypers, numbers = context.state, context.state.slots, context.lifter.hypers, ranks()
    place = {id(leaf): i for i, leaf in reversed(list(enumerate(context.leaves)))}
    tensors: list[torch.Tensor | int | None] = []
    binding = Binding(
        tensors=tensors, hypers=[], user=[], entry_grads=[], result_spec=spec.result_spec,
        results=[_result(one, context) for one in spec.results],
        result_places=list(spec.result_places), entry_results=[], left=resolve_locations(spec.left, context),
        mirrors=[
            Mirror(slots[slot].tensor, spot, way)
            for (slot, _, way), spot in zip(spec.mirrored, mirrored_locations(spec, context), strict=True)
        ],
        standing=[],
        grads=[slots[i].tensor for i in spec.grads], cleared=[],
        stepped=[state.optimizers[number][1] for number in spec.stepping],
        new_state=[(where.holder(state), where.key, is_number) for where, is_number in spec.new_state],
        notes=[(note.address.holder(state), note.address.key, note.value) for note in spec.notes],
        ticks=[(context.reachable.schedulers[number][1], count) for number, count in spec.ticks],
        counters=context.counters.written(context.arguments.numbers),
        slices=spec.slices,
    )  # fmt: skip
    owner = {id(s.tensor.grad): s.tensor for s in state.params if s.tensor.grad is not None}
    mirrors = dict(zip((slot for slot, _, _ in spec.mirrored), binding.mirrors, strict=True))
    for index, one in enumerate(spec.results):
        if isinstance(one, StateRef) and slots[one.slot].kind is InputKind.GRAD:
            binding.entry_results.append((index, owner[id(slots[one.slot].tensor)]))
        elif isinstance(one, StateRef) and one.slot in mirrors:
            binding.standing.append((index, mirrors[one.slot]))
    for index, old in enumerate(spec.kept):
        tensors.append(None)
        if old < len(slots):
            if slots[old].kind is InputKind.GRAD:
                binding.entry_grads.append((index, owner[id(slots[old].tensor)]))
            else:
                tensors[index] = slots[old].tensor
        elif (number := old - len(slots)) < len(hypers):
            binding.hypers.append((index, hypers[number]))
        elif (number := number - len(hypers)) < len(context.user):
            binding.user.append((index, place[id(context.user[number])]))
        else:
            tensors[index] = numbers[number - len(context.user)].number
    with_new = {*spec.grads, *spec.kept_grads}
    binding.cleared = [
        s.tensor
        for i, s in enumerate(slots)
        if s.kind is InputKind.PARAM and s.tensor.grad is not None and i not in with_new
    ]
    return binding


def _result(one: Any, context: StepContext) -> Any:
    """What a call returns in one place, if that is the same in every call; else None."""
    if not isinstance(one, StateRef):
        return one
    slot = context.state.slots[one.slot]
    return None if slot.kind is InputKind.GRAD else slot.tensor
