"""capture(step, args, kwargs): one call of the user's step as Program[CAPTURED], its live objects and its guards.

[Note: traces of one capture]
A step is traced once, and is refused if its Python changes anything (`capture/effects`), with these exceptions:

- A trace that comes upon attributes which nobody watches is followed by one in which they are.
- A trace that has changed Python state is followed by one on the state that it has left. Libraries set things up in
  their first forward (hooks, caches of plain values): a second trace changes nothing, and is the same graph. Anything
  else changes again, or does something else.
- The caller compares a trace with inputs in the place of numbers with one without (`capture/retrace_policy.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from wholestep.capture.bind.bind import bind
from wholestep.capture.bind.captured import (
    BindingSpec,
    Captured,
    GradSink,
    ResultSink,
    Setup,
    StateRef,
    StateSink,
    TraceReads,
    portable_scalars,
)
from wholestep.capture.effects.optimizer_effects import OptimizerEffects
from wholestep.capture.effects.set_first import SetFirst
from wholestep.capture.effects.side_effects import SideEffects
from wholestep.capture.functionalize.alias_checks import check_arrays, check_results, check_writes
from wholestep.capture.functionalize.functionalize import functionalize
from wholestep.capture.guards.environment import environment_read
from wholestep.capture.make_program import make_program
from wholestep.capture.python import tree_util
from wholestep.capture.python.attribute_access import AttributesFound
from wholestep.capture.python.container_views import BUFFERS, ContentView, own_dict
from wholestep.capture.python.snapshot import SCALARS
from wholestep.capture.python.tracing_thread import NO_OTHER_CAPTURE
from wholestep.capture.reach import unwrap_compiled
from wholestep.capture.reach.rng_and_iterators import check_made, hidden_error, kept_iterators, refuse_hidden
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.train_state import CutState
from wholestep.capture.scalars.varying_numbers import VaryingValue
from wholestep.capture.sizes.promises import emit_promises
from wholestep.capture.tracing.tracer import Trace, Tracer, settle
from wholestep.errors import CaptureError
from wholestep.ir import node_meta
from wholestep.ir.dtensor.layouts import local_tensor
from wholestep.ir.program import InputKind, Program
from wholestep.ir.sizes import is_data
from wholestep.ir.verifier import verify
from wholestep.util.torch_switches import keeps_parametrized_weights, looks_for_nan

log = logging.getLogger("wholestep.capture")

MAX_TRACES = 100
"""Of one capture. Every trace but the last two finds an attribute, so that more is a fault of ours."""


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
    places: tuple[tuple[Any, str, Any], ...]
    """The attributes that it has set, with what they hold now, if that is all."""


@dataclass(frozen=True, slots=True)
class _ReadArguments:
    """A trace has read tensors of the arguments where objects hold them, too. They are state of the step."""

    tensors: frozenset[int]
    """By id."""


_Attributes = frozenset[str | type]
"""That the step uses and no code names, as `capture/python/attribute_access.py` finds them."""
_Outcome = Captured | _Attributes | _Unsettled | _ReadArguments | Exception


def capture(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varying: Collection[VaryingValue] = (),
    *,
    cut_state: CutState | None = None,
) -> Captured:
    """Captures one call of `step`. Nothing of the user's is changed, whether it succeeds or not.

    Args:
        step: a training step.
        args, kwargs: of the call.
        varying: numbers and texts that are others in other calls. Numbers are inputs of the graph; texts it may not
            ask.
        cut_state: of a strategy that shards the state of optimizers: what it does with state that a capture creates.

    Raises:
        CaptureError: with the user's file and line, for what cannot become one graph.
        HyperparameterError: for optimizers without a fixed update rule.
        ConfigError: for modules that are wrapped in their own communication.
    """
    _refuse_anomaly_detection()
    _refuse_kept_weights()
    trace = partial(_trace_once, partial(StepContext, step, args, kwargs, varying=varying, cut_state=cut_state), step)
    observed: _Attributes = frozenset()
    read: frozenset[int] = frozenset()
    setup: _Unsettled | None = None
    with NO_OTHER_CAPTURE:
        for number in range(1, MAX_TRACES + 1):
            outcome = trace(observed, read, setup)
            log.debug("trace %d: %s", number, type(outcome).__name__)
            setup = None
            match outcome:
                case Captured():
                    return outcome
                case _Unsettled():
                    setup = outcome
                case frozenset():
                    observed |= outcome
                case _ReadArguments():
                    read |= outcome.tensors
                case _:
                    raise outcome
    raise CaptureError(f"The step was traced {MAX_TRACES} times, and each trace came upon other attributes.")


def _refuse_anomaly_detection() -> None:
    if looks_for_nan():
        raise CaptureError(
            "Detection of anomalies is on (torch.autograd.set_detect_anomaly), which looks at the values of all "
            "gradients. A step that becomes one graph cannot: call it without wholestep while you look for nan, or "
            "turn the detection off."
        )


def _refuse_kept_weights() -> None:
    if keeps_parametrized_weights():
        raise CaptureError(
            "The step is called inside of parametrize.cached(), where torch keeps parametrized weights from call to "
            "call. A graph would neither use those nor leave any. Open it in the step."
        )


def _trace_once(
    make_context: Callable[..., StepContext],
    step: Callable[..., Any],
    observed: _Attributes,
    read: frozenset[int],
    setup: _Unsettled | None,
) -> _Outcome:
    """One trace, and what it showed. `setup`: the one before it, which has changed Python state and not put it back."""
    outcome: _Outcome
    try:
        with make_context(observed=observed, read=read) as context:
            outcome = _attempted(context, observed, step, setup)
            if not isinstance(outcome, Captured):
                context.lazy.discard()
    except AttributesFound:
        outcome, hidden = frozenset(context.attributes.found), context.attributes.seen_hidden
        if hidden is not None:
            outcome = hidden_error(hidden, context.reachable.codes)
    except Exception as error:
        outcome = error
    return outcome if setup is None else _after_setup(setup, outcome)


def _attempted(
    context: StepContext, observed: _Attributes, step: Callable[..., Any], setup: _Unsettled | None
) -> _Outcome:
    found: _Outcome
    try:
        found = _Attempt(context, observed).run(step, setup)
    except Exception as error:
        found = error
    held = context.read_arguments() if not isinstance(found, _Unsettled) else None
    return _ReadArguments(held) if held else found


def _after_setup(setup: _Unsettled, outcome: _Outcome) -> _Outcome:
    """What two traces have shown of which the first one changed Python state."""
    if isinstance(outcome, Captured):  # it changed nothing and is the same graph
        discard = outcome.undo

        def undo() -> None:
            discard()
            setup.effects.restore()

        return replace(outcome, settled=False, undo=undo)
    if isinstance(outcome, _Unsettled):  # it may have changed something else than the first one
        outcome.effects.restore()
    setup.effects.restore()
    if isinstance(outcome, (frozenset, _ReadArguments)):
        return outcome
    again = outcome.effects.sentence() if isinstance(outcome, _Unsettled) else str(outcome)
    return CaptureError(f"{setup.effects.sentence()} Its second run: {again}")


class _Attempt:
    """One trace of one call, made functional, with what it reads, returns and leaves."""

    def __init__(self, context: StepContext, observed: _Attributes) -> None:
        self._context = context
        self._attributes = tuple(sorted(one if isinstance(one, str) else one.__qualname__ for one in observed))

    def run(self, step: Callable[..., Any], setup: _Unsettled | None) -> Captured | _Unsettled:
        """Raises CaptureError, also where the step does something else than in `setup`, and what the step raises."""
        context, optimizers = self._context, OptimizerEffects(self._context)
        refuse_hidden(context.reachable.hidden, context.reachable.codes)
        tracer = Tracer(context, optimizers)
        settle()
        side_effects = SideEffects(context, optimizers)
        kept = kept_iterators(context.reachable.iterators)
        places = () if setup is None else setup.places
        set_first = SetFirst([(thing, name) for thing, name, _ in places])
        with environment_read() as environment, side_effects, kept, set_first.observed():
            trace = tracer.run(step)
            check_made(trace.module, context.reachable.generators)
            _check_sizes(trace.module.graph, context)
        if side_effects.changed:
            if trace.foreign and side_effects.has_written_buffers:  # a graph would read what was written after it
                side_effects.restore()
                raise CaptureError(side_effects.sentence())
            return _Unsettled(side_effects, _outline(trace), _set_places(side_effects, context))
        if setup is not None and _outline(trace) != setup.outline:
            raise CaptureError("the second run of the step did something else than the first")
        program, spec = self._functional(trace, environment)
        unwrap_compiled.log_unwrapped(context.reachable.compiled)
        captured = bind(lambda: program, spec, context, trace.sizes)
        if not places or not set_first.holds:
            return captured
        return replace(captured, setup=Setup(tuple((vars(thing), name, now) for thing, name, now in places)))

    def _functional(self, trace: Trace, environment: Mapping[str, str]) -> tuple[Program, BindingSpec]:
        _log_foreign(trace.foreign)
        check_writes(trace.module.graph, trace.labels, [row.tensor for row in self._context.traced_inputs()])
        check_results(trace.module, len(trace.recorded.results))
        emit_promises(trace.module.graph, trace.sizes)
        functional = functionalize(trace.module, trace.fakes, trace.mode, trace.known, trace.recorded.numbers)
        functional.writes = trace.storages.exit_writes(functional.writes)
        written = frozenset(functional.writes)
        _check_shared(self._context, written)
        _check_arrays(self._context, written)
        program, kept = make_program(self._context, trace, functional)
        verify(program)
        return program, self._spec(trace, kept, self._reads(trace, written, environment))

    def _spec(self, trace: Trace, kept: list[int], reads: TraceReads) -> BindingSpec:
        state, recorded = self._context.state, trace.recorded
        results: Any = trace.module.graph.output_node().args[0]
        filled = [leaf for leaf, one in enumerate(results[: len(recorded.results)]) if isinstance(one, fx.Node)]
        stepped = enumerate(opt for _, opt in state.optimizers)
        return BindingSpec(
            inputs=tuple(trace.sources[index] for index in kept),
            outputs=(
                *map(ResultSink, filled),
                *map(GradSink, recorded.grads),
                *map(StateSink, recorded.new_state),
            ),
            layouts=(*(recorded.layouts[leaf] for leaf in filled), *recorded.layouts[len(recorded.results) :]),
            sees_parts=self._context.sees_parts,
            result_spec=recorded.result_spec,
            leaves=tuple(StateRef(state.index[id(one)]) if id(one) in state.index else one for one in recorded.results),
            forwards=tuple(
                (number, trace.forwards[one])
                for number, one in enumerate(self._context.reachable.wrappers)
                if one in trace.forwards
            ),
            stepped_optimizers=tuple(number for number, opt in stepped if id(opt) in trace.stepped_optimizers),
            requires_grad=recorded.requires_grad,
            kept_graph="" if recorded.kept_graph is None else str(list(recorded.kept_graph.shape)),
            reads=reads,
        )

    def _reads(self, trace: Trace, written: frozenset[int], environment: Mapping[str, str]) -> TraceReads:
        context, recorded = self._context, trace.recorded
        state, placeholders = context.state, trace.module.graph.find_nodes(op="placeholder")
        return TraceReads(
            kept_grads=frozenset(recorded.kept_grads),
            stepped=frozenset(state.index[one] for one in trace.stepped if one in state.index),
            uses_grads=trace.uses_grads,
            argument_grads=tuple(leaf for leaf, one in enumerate(context.leaves) if id(one) in trace.looked_at),
            written=written,
            opaque_leaves=context.arguments.opaque_leaves,
            scalars=portable_scalars(context.varying.places, context),
            predicates=recorded.predicates,
            predicate_inputs=tuple((n.name, source) for n, source in zip(placeholders, trace.sources, strict=True)),
            storages=tuple((trace.sources[index], num_bytes) for index, num_bytes in trace.storages.sizes()),
            foreign=len(trace.foreign),
            held_arguments=len(context.read),
            environment=environment,
            tensor_attributes=context.attributes.asks_tensors,
            attributes=self._attributes,
        )


def _set_places(effects: SideEffects, context: StepContext) -> tuple[tuple[Any, str, Any], ...]:
    """What a trace has changed, if those are all plain attributes: object, name and value. Else nothing."""
    modules = (module for _, root in context.reachable.modules.values() for module in root.modules())
    objects = (one.thing for one in context.reachable.objects.values())
    owners = {id(own_dict(thing)): thing for thing in (*modules, *objects)}
    places = [(owners.get(id(container)), key, then, now) for container, key, then, now in effects.places()]
    plain = all(thing is not None and isinstance(then, SCALARS) and isinstance(now, SCALARS)
                for thing, _, then, now in places)  # fmt: skip
    return tuple((thing, key, now) for thing, key, _, now in places) if plain else ()


def _outline(trace: Trace) -> _Outline:
    recorded = trace.recorded
    return _Outline(
        trace.module.code, recorded.result_spec,
        leaves=tuple(one if isinstance(one, SCALARS) else type(one) for one in recorded.results),
        effects=(recorded.grads, recorded.new_state, recorded.requires_grad),
    )  # fmt: skip


def _check_shared(context: StepContext, written: Collection[int]) -> None:
    """Raises CaptureError for a write to an argument with sizes that move, and whose memory another tensor sees."""
    rows = context.traced_inputs()
    for place in sorted(written):
        if place < len(rows) and context.shares_memory(rows[place].tensor):
            raise CaptureError(f"The step writes to {rows[place].label}, in whose memory another tensor lies.")


def _check_arrays(context: StepContext, written: Collection[int]) -> None:
    views = ((one.path, one.container) for one in context.reachable.snapshots if isinstance(one.container, ContentView))
    rows = enumerate(context.traced_inputs())
    check_arrays(
        [(path, view.thing) for path, view in views if isinstance(view.thing, BUFFERS)],
        [local_tensor(row.tensor) for place, row in rows if place in written or row.kind is InputKind.GRAD],
    )


def _check_sizes(graph: fx.Graph, context: StepContext) -> None:
    """Raises CaptureError where a number that moves between calls may decide about a shape or a place in memory."""
    for node in graph.nodes if context.outside else ():
        for one in node_meta.tensors(node):
            if any(map(is_data, (*one.shape, *one.stride(), one.storage_offset()))):
                raise CaptureError(f"The shape of a tensor, or its place in memory, is not known: {list(one.shape)}.")


def _log_foreign(foreign: Sequence[torch.Tensor]) -> None:
    """Says which tensors of nobody are constants."""
    for tensor in foreign:
        log.info("the step reads a tensor %s that belongs to no argument, closure or attribute", list(tensor.shape))
