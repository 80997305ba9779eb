"""capture(step, args, kwargs): one call of the user's step as Program[CAPTURED], its live objects and its guards.

[Note: traces of one capture]
A step is traced on assumptions: which numbers it changes, where it leaves objects. A trace shows when one is missing:
then the step is traced again with it (`Retry`). Three more traces are for certainty, and must give the same graph:

- A trace that has changed Python state for another reason is followed by one on the state that it has left. Libraries
  set things up in their first forward (hooks, caches): a second trace changes nothing. A counter changes again.
- Where a step leaves objects, a trace in which nobody can look at what stood there before shows that nobody does.
- The caller compares a trace with inputs in the place of numbers with one without (`capture/retrace_policy.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from wholestep.capture.bind.bind import bind
from wholestep.capture.bind.captured import (
    BindingSpec,
    Captured,
    EffectSpec,
    GradSink,
    KeepObject,
    KeepTensor,
    MirrorTensor,
    OptimizerStepped,
    ResultSink,
    SchedulerCalls,
    StateRef,
    StateSink,
    TraceReads,
    portable_locations,
    portable_scalars,
)
from wholestep.capture.bind.effects import WriteObjects
from wholestep.capture.effects.argument_effects import ArgumentEffects
from wholestep.capture.effects.object_effects import ObjectEffects, holds_value, identities, in_mixed_dicts
from wholestep.capture.effects.optimizer_effects import OptimizerEffects
from wholestep.capture.effects.side_effects import SideEffects
from wholestep.capture.effects.tensor_effects import KeptTensors, MirrorMode
from wholestep.capture.equivalence import is_equivalent
from wholestep.capture.functionalize.alias_checks import check_writes
from wholestep.capture.functionalize.functionalize import functionalize
from wholestep.capture.guards.environment import environment_read
from wholestep.capture.guards.state_guards import looks_for_nan
from wholestep.capture.make_program import make_program
from wholestep.capture.python import tree_util
from wholestep.capture.python.attribute_access import AttributesFound
from wholestep.capture.python.container_views import ContentView
from wholestep.capture.python.snapshot import SCALARS, Location
from wholestep.capture.reach import unwrap_compiled
from wholestep.capture.reach.rng_and_iterators import check_made, kept_iterators, refuse_hidden
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.scalars.counters import ScalarLocation, ScalarsChanged, VaryingValue, identity
from wholestep.capture.tracing.tracer import Trace, TracedEffects, Tracer, settle
from wholestep.errors import CaptureError, WholestepError
from wholestep.ir import node_meta
from wholestep.ir.program import Program
from wholestep.ir.verifier import verify

log = logging.getLogger("wholestep.capture")

MAX_TRACES = 100
"""Of one capture. Every retry but a few adds a number or an object of the step's, so that more is a fault of ours."""


@dataclass(frozen=True, slots=True)
class _Assumptions:
    """What a trace takes for granted besides what its call shows."""

    scalars: Mapping[Hashable, ScalarLocation] = field(default_factory=dict)
    """Numbers that the step changes, by identity: inputs and outputs of the graph."""
    objects: frozenset[Hashable] = frozenset()
    """Identities of locations in which the step leaves objects that are results."""
    hides: bool = False
    """What stood in these locations cannot be looked at."""
    attributes: frozenset[str | type] = frozenset()
    """Attributes that the step uses and no code names, as `capture/python/attribute_access.py` finds them."""

    def extended(self, retry: Retry) -> _Assumptions:
        """With what another trace has shown. Raises CaptureError where that is nothing new."""
        scalars = {**self.scalars, **{one.identity: one for one in retry.scalars}}
        if retry.scalars and scalars == self.scalars:
            raise CaptureError(f"The step moves {retry.scalars[0].path} in another way in every trace.")
        if not retry.scalars and identities(retry.objects) <= self.objects and retry.attributes <= self.attributes:
            raise CaptureError(retry.reason)
        return _Assumptions(
            scalars, self.objects | identities(retry.objects), attributes=self.attributes | retry.attributes
        )


@dataclass(frozen=True, slots=True)
class Retry:
    """A trace did not hold: another one is needed that assumes this, too."""

    scalars: Sequence[ScalarLocation] = ()
    objects: Sequence[Location] = ()
    attributes: frozenset[str | type] = frozenset()
    reason: str = ""
    """A sentence for the user, for when it cannot be."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """What one run of the step did: two that differ are of different calls."""

    code: str
    """Of the graph."""
    result: tree_util.TreeSpec
    leaves: tuple[Any, ...]
    """Of the result, those that no graph gives: plain values, and the classes of others."""
    effects: tuple[Any, ...]
    """What it leaves where."""


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A trace changed Python state. `effects` says what, and can put it back; `outline` is what was traced."""

    effects: SideEffects
    outline: _Outline


_Outcome = Captured | Retry | _Unsettled | Exception


def capture(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varying: Collection[VaryingValue] = (),
    rebound_locations: Collection[Hashable] = (),
) -> Captured:
    """Captures one call of `step`. Nothing of the user's is changed, whether it succeeds or not.

    Args:
        step: a training step.
        args, kwargs: of the call.
        varying: numbers and texts that are others in other calls. Numbers are inputs of the graph; texts it may not
            ask.
        rebound_locations: places of tensors that are others in other calls, as `Guards.other_tensors` gives them.

    Raises:
        CaptureError: with the user's file and line, for what cannot become one graph.
        HyperparameterError: for optimizers without a fixed update rule.
        ConfigError: for modules that are wrapped in their own communication.
    """
    _refuse_anomaly_detection()
    trace = partial(
        _trace_once,
        partial(StepContext, step, args, kwargs, varying=varying, rebound_locations=rebound_locations),
        step,
    )
    assumed, may_hide, reason = _Assumptions(), True, ""
    setup: _Unsettled | None = None
    plain: Captured | None = None
    for number in range(1, MAX_TRACES + 1):
        outcome = trace(assumed, setup)
        log.debug("trace %d: %s", number, type(outcome).__name__)
        setup = None
        match outcome:
            case _Unsettled():
                setup = outcome
            case Captured() if assumed.hides and plain is not None and is_equivalent(plain, outcome):
                return outcome
            case Captured() if assumed.hides:
                outcome.undo()
                assumed, may_hide = replace(assumed, hides=False), False
            case Captured() if may_hide and _replaces_objects(outcome):
                outcome.undo()
                plain, assumed = outcome, replace(assumed, hides=True)
            case Captured():
                return outcome
            case Retry(attributes=found) if found:
                assumed = replace(assumed, attributes=assumed.attributes | found)
            case Retry() | WholestepError() if assumed.hides:
                said = outcome.reason if isinstance(outcome, Retry) else outcome
                log.info("what stands in the place of what the step leaves is a constant: %s", said)
                assumed, may_hide = replace(assumed, hides=False), False
            case Retry():
                assumed, may_hide, reason = assumed.extended(outcome), True, reason or outcome.reason
            case CaptureError() if reason:
                raise CaptureError(f"{reason} (It can be no input of the graph either. {outcome})") from outcome
            case _:
                raise outcome
    raise CaptureError(f"The step was traced {MAX_TRACES} times, and each trace showed something new. {reason}")


def _refuse_anomaly_detection() -> None:
    if looks_for_nan():
        raise CaptureError(
            "Detection of anomalies is on (torch.autograd.set_detect_anomaly), which looks at the values of all "
            "gradients. A step that becomes one graph cannot: call it without wholestep while you look for nan, or "
            "turn the detection off."
        )


def _replaces_objects(captured: Captured) -> bool:
    """Whether something stands already where the step leaves objects."""
    return any(holds_value(where) for one in captured.binding.effects_of(WriteObjects) for where in one.locations)


def _trace_once(
    make_context: Callable[..., StepContext],
    step: Callable[..., Any],
    assumed: _Assumptions,
    setup: _Unsettled | None,
) -> _Outcome:
    """One trace, and what it showed. `setup`: the one before it, which has changed Python state and not put it back."""
    outcome: _Outcome
    try:
        with make_context(list(assumed.scalars.values()), observed=assumed.attributes) as context:
            outcome = _Attempt(context, assumed).run(step, None if setup is None else setup.outline)
            if not isinstance(outcome, Captured):
                context.lazy.discard()
    except AttributesFound:
        outcome = Retry(attributes=frozenset(context.attributes.found))
    except ScalarsChanged as found:
        outcome = Retry(scalars=found.places, reason=found.sentence)
    except Exception as error:
        outcome = error
    return outcome if setup is None else _after_setup(setup, outcome)


def _after_setup(setup: _Unsettled, outcome: _Outcome) -> _Outcome:
    """What two traces have shown of which the first one changed Python state."""
    if isinstance(outcome, Captured):  # it changed nothing and is the same graph
        return replace(outcome, settled=False)
    scalars, objects = setup.effects.changed_scalars(), setup.effects.kept_objects()
    if isinstance(outcome, _Unsettled):  # it may have changed something else than the first one
        outcome.effects.restore()
    setup.effects.restore()
    if isinstance(outcome, Retry):
        return outcome
    if scalars or objects:  # what the first one left may make any part of the second one fail
        return Retry(scalars, () if scalars else objects, reason=setup.effects.sentence())
    return CaptureError(setup.effects.sentence())


class _Attempt:
    """One trace of one call, made functional, with what it reads, returns and leaves."""

    def __init__(self, context: StepContext, assumed: _Assumptions) -> None:
        self._context = context
        self._attributes = tuple(
            sorted(one if isinstance(one, str) else one.__qualname__ for one in assumed.attributes)
        )
        self._effects = TracedEffects(
            OptimizerEffects(context), ObjectEffects(context.reachable.snapshots, assumed.objects, assumed.hides),
            ArgumentEffects(context.arguments),
        )  # fmt: skip

    def run(self, step: Callable[..., Any], expected: _Outline | None) -> Captured | Retry | _Unsettled:
        """Raises CaptureError, also where the step does something else than `expected`, and what the step raises."""
        context, optimizers = self._context, self._effects.optimizers
        refuse_hidden(context.reachable.hidden, context.reachable.codes)
        tracer = Tracer(context, self._effects)
        settle()
        self._side_effects = SideEffects(context, optimizers)
        kept = kept_iterators(context.reachable.iterators)
        with environment_read() as environment, self._side_effects, kept:
            trace = tracer.run(step)
        check_made(trace.module, context.reachable.generators)
        _check_sizes(trace.module.graph, context)
        if optimizers.places:
            self._side_effects.restore()
            return Retry(optimizers.places)
        if self._side_effects.changed:
            return _Unsettled(self._side_effects, self._outline(trace))
        if expected is not None and self._outline(trace) != expected:
            raise CaptureError("the second run of the step did something else than the first")
        if mixed := in_mixed_dicts(trace.recorded.kept.spots, self._effects.objects.spots):
            reason = "The step adds keys to a dict, for tensors and for other things, in an order that no graph keeps."
            return Retry(objects=mixed, reason=reason)
        program, spec = self._functional(trace, environment)
        unwrap_compiled.log_unwrapped(context.reachable.compiled)
        return bind(lambda: program, spec, context)

    def _outline(self, trace: Trace) -> _Outline:
        recorded, kept, effects = trace.recorded, trace.recorded.kept, self._effects
        return _Outline(
            trace.module.code, recorded.result_spec,
            leaves=tuple(one if isinstance(one, SCALARS) else type(one) for one in recorded.results),
            effects=(
                [(identity(container), key) for container, key in (*kept.spots, *effects.objects.spots)],
                [(slot, identity(container), key) for slot, (container, key), _ in kept.mirrored],
                recorded.grads, recorded.new_state, effects.arguments.written, effects.optimizers.notes,
                self._side_effects.ticks,
            ),
        )  # fmt: skip

    def _functional(self, trace: Trace, environment: Mapping[str, str]) -> tuple[Program, BindingSpec]:
        _log_foreign(trace.foreign)
        for snapshot in self._context.reachable.snapshots:  # a tensor on an array's memory sees what is written to it
            view = snapshot.container
            if isinstance(view, ContentView) and any(map(view.shares_memory, trace.foreign)):
                snapshot.guard = False
        check_writes(trace.module.graph, trace.labels)
        functional = functionalize(trace.module, trace.fakes, trace.mode, trace.known, trace.recorded.numbers)
        functional.writes = trace.storages.exit_writes(functional.writes)
        written = frozenset(functional.writes)
        program, kept = make_program(self._context, trace, functional)
        verify(program)
        return program, self._spec(trace, kept, written, environment)

    def _spec(
        self, trace: Trace, kept: list[int], written: frozenset[int], environment: Mapping[str, str]
    ) -> BindingSpec:
        state, recorded = self._context.state, trace.recorded
        results: Any = trace.module.graph.output_node().args[0]
        filled = [leaf for leaf, one in enumerate(results[: recorded.num_results]) if isinstance(one, fx.Node)]
        return BindingSpec(
            inputs=tuple(trace.sources[index] for index in kept),
            outputs=(
                *map(ResultSink, filled),
                *map(GradSink, recorded.grads),
                *(StateSink(address, is_number) for address, is_number in recorded.new_state),
            ),
            result_spec=recorded.result_spec,
            leaves=tuple(StateRef(state.index[id(one)]) if id(one) in state.index else one for one in recorded.results),
            effects=tuple(self._effect_specs(trace, written)),
            reads=self._reads(trace, written, environment),
        )

    def _effect_specs(self, trace: Trace, written: frozenset[int]) -> list[EffectSpec]:
        context, kept = self._context, trace.recorded.kept
        stepped = enumerate(opt for _, opt in context.state.optimizers)
        return [
            *(OptimizerStepped(number) for number, opt in stepped if id(opt) in trace.stepped_optimizers),
            *self._effects.optimizers.notes,
            *(SchedulerCalls(number, count) for number, count in self._side_effects.ticks.items()),
            *_mirrored(kept, written, context),
            *(
                KeepTensor(location, number in kept.shared)
                for number, location in enumerate(portable_locations(kept.spots, context))
            ),
            *map(KeepObject, portable_locations(self._effects.objects.spots, context)),
            *self._effects.arguments.written,
        ]

    def _reads(self, trace: Trace, written: frozenset[int], environment: Mapping[str, str]) -> TraceReads:
        context, recorded = self._context, trace.recorded
        state, placeholders = context.state, trace.module.graph.find_nodes(op="placeholder")
        return TraceReads(
            kept_grads=frozenset(recorded.kept_grads),
            stepped=frozenset(state.index[one] for one in trace.stepped if one in state.index),
            written=written,
            opaque_leaves=context.arguments.opaque_leaves,
            hides=self._effects.objects.hides,
            scalars=portable_scalars(context.counters.places, context),
            calls_scheduler=any(context.counters.any_in(vars(one)) for _, one in context.reachable.schedulers),
            predicates=recorded.predicates,
            predicate_inputs=tuple((n.name, source) for n, source in zip(placeholders, trace.sources, strict=True)),
            storages=tuple((trace.sources[index], num_bytes) for index, num_bytes in trace.storages.sizes()),
            foreign=len(trace.foreign),
            environment=environment,
            attributes=self._attributes,
        )


def _mirrored(kept: KeptTensors, written: frozenset[int], context: StepContext) -> list[MirrorTensor]:
    locations = portable_locations([location for _, location, _ in kept.mirrored], context)
    return [
        MirrorTensor(
            slot, location,
            MirrorMode.REPLACES if replaces else MirrorMode.WRITES if slot in written else MirrorMode.READS,
        )
        for (slot, _, replaces), location in zip(kept.mirrored, locations, strict=True)
    ]  # fmt: skip


def _check_sizes(graph: fx.Graph, context: StepContext) -> None:
    """Raises CaptureError where a number that moves between calls may decide about a shape or a place in memory."""
    for node in graph.nodes if context.outside else ():
        for one in node_meta.tensors(node):
            if not all(isinstance(size, int) for size in (*one.shape, *one.stride(), one.storage_offset())):
                raise CaptureError(f"The shape of a tensor, or its place in memory, is not known: {list(one.shape)}.")


def _log_foreign(foreign: Sequence[torch.Tensor]) -> None:
    """Says which tensors of nobody are constants."""
    for tensor in foreign:
        log.info("the step reads a tensor %s that belongs to no argument, closure or attribute", list(tensor.shape))
