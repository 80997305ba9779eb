"""bind(program, spec, context): a program tied to live objects: those it was captured from, or others alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from wholestep.capture.bind import effects
from wholestep.capture.bind.binding import ArgumentLeaf, Binding, Constant, EntryGrad, GroupNumber, LiveInput
from wholestep.capture.bind.captured import (
    BindingSpec,
    Captured,
    GradSink,
    ResultSink,
    StateRef,
    StateSink,
)
from wholestep.capture.bind.effects import Effect
from wholestep.capture.bind.make_guards import make_guards
from wholestep.capture.reach.arguments import ArgumentSize
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.traced_inputs import (
    ArgumentRef,
    ArgumentSource,
    EntryGradSource,
    HyperparameterSource,
    InputSource,
    RankSource,
    StateSource,
    StateView,
    seen,
)
from wholestep.capture.scalars.rank_symbols import ranks
from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.capture.wrappers import ddp
from wholestep.ir.dtensor.layouts import local_tensor
from wholestep.ir.dtensor.shards import is_dtensor, local_value
from wholestep.ir.program import InputKind, Program


def bind(
    source: Callable[[], Program], spec: BindingSpec, context: StepContext, sizes: SizeEnv | None = None
) -> Captured:
    """The program tied to the live objects of the context. State that the step does not use is taken back.

    `sizes`: what the trace has asked of sizes that move.
    """
    # Before guards are made, which hold what is left.
    slots = context.state.slots
    read = {
        one.slot
        for one in spec.inputs
        if isinstance(one, (StateSource, EntryGradSource)) and slots[one.slot].kind is not InputKind.PARAM
    }
    steppers = {id(context.state.optimizers[number][1]) for number in spec.stepped_optimizers}
    context.lazy.discard({id(slots[slot].tensor) for slot in spec.reads.stepped | read}, steppers)
    live = _Live(spec, context)
    return Captured(
        source=source,
        binding=live.binding(),
        guards=make_guards(spec, context, sizes),
        spec=spec,
        undo=context.lazy.discard,
        constant_sizes=_constant_sizes(context, sizes),
    )


def _constant_sizes(context: StepContext, sizes: SizeEnv | None) -> dict[ArgumentSize, str | None]:
    """The dims that were to move and have become constants, with the reasons."""
    found: dict[ArgumentSize, str | None] = {}
    for size, why in sizes.constant.items() if sizes is not None else ():
        row = next(row for row in context.traced_inputs() if row.name == size.input)
        leaves = (leaf for leaf, one in enumerate(context.leaves) if one is row.tensor)
        found |= {ArgumentSize(context.arguments.paths[leaf], size.dim): why for leaf in leaves}
    return found


class _Live:
    """Looks up the objects behind a spec."""

    def __init__(self, spec: BindingSpec, context: StepContext) -> None:
        self._spec, self._context, self._state = spec, context, context.state
        self._slots, self._ranks = context.state.slots, ranks()
        self._leaf = {id(one): place for place, one in reversed(list(enumerate(context.leaves)))}
        grads = ((slot.tensor.grad, slot.tensor) for slot in self._state.params)
        self._owner = {id(grad): param for grad, param in grads if grad is not None}

    def binding(self) -> Binding:
        """The live objects of the inputs, and the effects of a call."""
        returned = {
            leaf: self._owner[id(self._slots[one.slot].tensor)]
            for leaf, one in enumerate(self._spec.leaves)
            if isinstance(one, StateRef) and self._slots[one.slot].kind is InputKind.GRAD
        }
        arguments = {leaf: one for leaf, one in enumerate(self._spec.leaves) if isinstance(one, ArgumentRef)}
        steppers = [self._state.optimizers[number][1] for number in self._spec.stepped_optimizers]
        return Binding(
            inputs=tuple(map(self._input, self._spec.inputs)),
            effects=tuple(self._effects([*returned, *arguments])),
            once=[effects.MarkStepped(one) for one in steppers],
            returned_grads=tuple(returned.values()),
            returned_inputs=tuple(self._spec.inputs.index(ArgumentSource(one.number)) for one in arguments.values()),
        )

    def _input(self, source: InputSource) -> LiveInput:
        match source:
            case StateSource(slot):
                tensor = self._slots[slot].tensor
                if self._context.sees_parts:
                    return Constant(local_tensor(tensor))
                return Constant(local_value(tensor) if is_dtensor(tensor) else tensor)
            case EntryGradSource(slot):
                return EntryGrad(self._owner[id(self._slots[slot].tensor)])
            case HyperparameterSource(number):
                return GroupNumber(self._context.lifter.hypers[number])
            case ArgumentSource(number):
                return ArgumentLeaf(self._leaf[id(self._context.user[number])])
            case RankSource(number):
                return Constant(self._ranks[number].number)

    def _effects(self, returned: list[int]) -> Iterator[Effect]:
        """In the order in which a call applies them. `returned`: leaves that are gradients from before the call, and
        arguments."""
        spec = self._spec
        yield from self._gradients()
        if made := [one for one in spec.outputs if isinstance(one, StateSink)]:
            entries = tuple((one.address.holder(self._state), one.address.key) for one in made)
            yield effects.SetOptimizerState(entries, len(spec.outputs) - len(made))
        if spec.requires_grad:
            yield effects.SetRequiresGrad(tuple((self._slots[slot].tensor, flag) for slot, flag in spec.requires_grad))
        wrappers = [wrapper for _, wrapper in self._context.reachable.wrappers.values()]
        for number, is_awaited in spec.forwards:
            if ddp.changes_note(wrappers[number], is_awaited):
                yield effects.NoteForward(wrappers[number], is_awaited)
        yield self._result(returned)

    def _gradients(self) -> Iterator[Effect]:
        made = [(number, one.slot) for number, one in enumerate(self._spec.outputs) if isinstance(one, GradSink)]
        with_grad = {*(slot for _, slot in made), *self._spec.reads.kept_grads}
        cleared = [
            slot.tensor
            for number, slot in enumerate(self._slots)
            if slot.kind is InputKind.PARAM and slot.tensor.grad is not None and number not in with_grad
        ]
        if cleared:
            yield effects.ClearGradients(tuple(cleared))
        if made:
            yield effects.SetGradients(tuple(self._slots[slot].tensor for _, slot in made), made[0][0])

    def _result(self, returned: list[int]) -> effects.BuildResult:
        spec = self._spec
        outputs = [(one.leaf, number) for number, one in enumerate(spec.outputs) if isinstance(one, ResultSink)]
        return effects.BuildResult(
            spec=spec.result_spec,
            leaves=tuple(map(self._leaf_value, spec.leaves)),
            outputs=(*outputs, *((leaf, number - len(returned)) for number, leaf in enumerate(returned))),
            views=tuple(
                (leaf, one, seen(self._slots[one.slot].tensor, parts=self._context.sees_parts))
                for leaf, one in enumerate(spec.leaves)
                if isinstance(one, StateView)
            ),
        )

    def _leaf_value(self, leaf: Any) -> Any:
        """A leaf of the result, if it is the same in every call; else None."""
        if not isinstance(leaf, StateRef):
            return None if isinstance(leaf, (StateView, ArgumentRef)) else leaf
        slot = self._slots[leaf.slot]
        found: torch.Tensor | None = None if slot.kind is InputKind.GRAD else slot.tensor
        return found
