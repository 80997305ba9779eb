"""capture(step, args, kwargs): one call of the user's step as Program[CAPTURED], its live objects and its guards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.fx as fx

from wholestep.capture.bind.bind import bind
from wholestep.capture.bind.binding import output_slices
from wholestep.capture.bind.captured import BindingSpec, Captured, StateRef, portable_locations, portable_scalars
from wholestep.capture.effects.argument_effects import ArgumentEffects
from wholestep.capture.effects.object_effects import Leaves, ObjectEffects, holds_value, identities
from wholestep.capture.effects.optimizer_effects import OptimizerEffects
from wholestep.capture.effects.side_effects import SideEffects
from wholestep.capture.effects.tensor_effects import MirrorMode
from wholestep.capture.equivalence import is_equivalent
from wholestep.capture.functionalize.alias_checks import check_writes
from wholestep.capture.functionalize.functionalize import Functional, functionalize
from wholestep.capture.functionalize.storage_resize import StorageRecorder
from wholestep.capture.functionalize.version_counters import keep_versions
from wholestep.capture.guards.environment import environment_read
from wholestep.capture.guards.state_guards import looks_for_nan
from wholestep.capture.python.container_views import ContentView
from wholestep.capture.reach import unwrap_compiled
from wholestep.capture.reach.rng_and_iterators import check_made, kept_iterators
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.train_state import Slot
from wholestep.capture.scalars.counters import ScalarLocation, ScalarsChanged, VaryingValue
from wholestep.capture.scalars.rank_symbols import axes_of, rank_inputs
from wholestep.capture.tracing.tracer import Trace, Tracer, settle
from wholestep.errors import CaptureError, WholestepError
from wholestep.ir import graph_edit, node_meta
from wholestep.ir.program import Input, InputKind, Output, OutputKind, Placement, Program, Stage
from wholestep.ir.verifier import verify

log = logging.getLogger("wholestep.capture")

_REPLICATED = (InputKind.PARAM, InputKind.BUFFER, InputKind.OPTIMIZER, InputKind.HYPER, InputKind.GRAD)


def capture(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    moving: Collection[VaryingValue] = (),
    moved: Collection[Hashable] = (),
) -> Captured:
    """Captures one call of `step`. Nothing of the user's is changed, whether it succeeds or not.

    `moving`: numbers and texts that are others in other calls. Numbers are inputs of the graph; texts it may not ask.
    `moved`: places of tensors that are others in other calls, as `Guards.rebound_locations` gives them.

    Raises:
        CaptureError: with the user's file and line, for what cannot become one graph.
        HyperparameterError: for optimizers without a fixed update rule.
        ConfigError: for modules that are wrapped in their own communication.
    """
    if looks_for_nan():
        raise CaptureError(
            "Detection of anomalies is on (torch.autograd.set_detect_anomaly), which looks at the values of all "
            "gradients. A step that becomes one graph cannot: call it without wholestep while you look for nan, or "
            "turn the detection off."
        )
    look = partial(StepContext, step, args, kwargs, varying=moving, rebound_locations=moved)
    places: dict[Hashable, ScalarLocation] = {}
    leaving: set[Hashable] = set()
    why_not_kept = ""
    while True:
        try:
            return _unlooked(partial(look, list(places.values())), step, leaving)
        except ScalarsChanged as found:
            before, why_not_kept = dict(places), why_not_kept or found.sentence
            places |= {place.identity: place for place in found.places}
            if before == places:
                raise CaptureError(f"The step moves {found.places[0].path} in another way in every trace.") from None
        except Leaves as found:
            if identities(found.spots) <= leaving:
                raise CaptureError(found.sentence) from None
            leaving |= identities(found.spots)
            why_not_kept = why_not_kept or found.sentence
        except CaptureError as error:
            if not why_not_kept:
                raise
            raise CaptureError(f"{why_not_kept} (It can be no input of the graph either. {error})") from error


def _unlooked(look: Callable[[], StepContext], step: Callable[..., Any], leaving: Collection[Hashable]) -> Captured:
    """The capture, and one in which nobody can look at what the step replaces, if that is the same."""
    captured = _settled(look, step, leaving)
    if not any(map(holds_value, captured.object_effects)):
        return captured
    captured.undo()
    try:
        hidden = _settled(look, step, leaving, hidden=True)
        if is_equivalent(captured, hidden):
            return hidden
        hidden.undo()
    except (WholestepError, ScalarsChanged, Leaves) as error:
        log.info("what stands in the place of what the step leaves is a constant: %s", error)
    return _settled(look, step, leaving)


def _settled(
    look: Callable[[], StepContext], step: Callable[..., Any], leaving: Collection[Hashable], *, hidden: bool = False
) -> Captured:
    """`look` looks for all that the step involves."""
    once = partial(_capture_once, look, step, leaving, hidden)
    try:
        return once()
    except _Unsettled as first:
        # Libraries set things up in their first forward (hooks, caches). If a second trace changes nothing and is
        # the same graph, that was all it was. A counter or a growing list changes again.
        try:
            captured = once(expected=first.code)
        except (ScalarsChanged, Leaves):
            first.effects.restore()
            raise
        except Exception:  # what the first one left may make any part of it fail
            moved, left = first.effects.moved(), first.effects.left()
            first.effects.restore()
            if moved:
                raise ScalarsChanged(moved, first.effects.sentence()) from None
            if left:
                raise Leaves(left, first.effects.sentence()) from None
            raise CaptureError(first.effects.sentence()) from None
        return replace(captured, settled=False)


class _Unsettled(Exception):
    """A trace changed Python state. `effects` says what, and can put it back; `code` is what was traced."""

    def __init__(self, effects: SideEffects, code: str) -> None:
        super().__init__()
        self.effects, self.code = effects, code


def _capture_once(
    look: Callable[[], StepContext],
    step: Callable[..., Any],
    leaving: Collection[Hashable],
    hidden: bool,
    expected: str | None = None,
) -> Captured:
    with look() as context:
        objects = ObjectEffects(context.reachable.snapshots, leaving, hidden)
        program, spec = _Job(step, context, objects).run(expected)
        unwrap_compiled.log_unwrapped(context.reachable.compiled)
        return bind(lambda: program, spec, context)


class _Job:
    """One capture under way."""

    def __init__(self, step: Callable[..., Any], context: StepContext, objects: ObjectEffects) -> None:
        self._step, self._scene, self._state, self._objects = step, context, context.state, objects
        self._arguments = ArgumentEffects(context.arguments)
        self.trace: Trace
        self._storages: StorageRecorder

    def run(self, expected: str | None) -> tuple[Program, BindingSpec]:
        """Traces, makes functional, and describes inputs and outputs."""
        context = self._scene
        left = OptimizerEffects(context)
        tracer = Tracer(context, left, self._objects, self._arguments)
        self._storages = tracer.storages
        settle()
        effects, iterators = SideEffects(context, left), kept_iterators(context.reachable.iterators)
        with environment_read() as self._environment, effects, iterators:
            self.trace = tracer.run(partial(self._arguments.call, self._step))
        check_made(self.trace.module, context.reachable.generators)
        _check_sizes(self.trace.module.graph, context)
        if left.places:
            effects.restore()
            raise ScalarsChanged(left.places)
        self._notes, self._ticks = tuple(left.notes), tuple(effects.ticks.items())
        if effects.changed:
            raise _Unsettled(effects, self.trace.module.code)
        if expected is not None and self.trace.module.code != expected:
            raise CaptureError("the second run of the step traced another graph than the first")
        _check_discovered(self.trace)
        for watch in context.reachable.snapshots:  # a tensor on an array's memory sees what is written to it
            if isinstance(watch.container, ContentView) and any(map(watch.container.shares_memory, self.trace.found)):
                watch.guard = False
        check_writes(self.trace.module.graph, context.names())
        functional = functionalize(
            self.trace.module, self.trace.fakes, self.trace.mode, tracer.known, self.trace.numbers
        )
        functional.writes = self._storages.exit_writes(functional.writes)
        self._writes = frozenset(functional.writes)
        program, kept = self._program(functional)
        verify(program)
        return program, self._spec(kept, output_slices(program))

    def _spec(self, kept: list[int], slices: tuple[int, int, int]) -> BindingSpec:
        trace, state = self.trace, self._state
        results = trace.module.graph.output_node().args[0]
        traced = [isinstance(r, fx.Node) for r in results[: trace.num_results]]  # type: ignore[index,union-attr]
        return BindingSpec(
            kept=tuple(kept), slices=slices, result_spec=trace.result_spec,
            results=tuple(StateRef(state.index[id(r)]) if id(r) in state.index else r for r in trace.results),
            result_places=tuple(i for i, r in enumerate(traced) if r),
            grads=tuple(trace.grads), kept_grads=frozenset(trace.kept_grads), new_state=tuple(trace.new_state),
            notes=self._notes, ticks=self._ticks, places=portable_scalars(self._scene.counters.places, self._scene),
            calls_scheduler=any(self._scene.counters.any_in(vars(one)) for _, one in self._scene.reachable.schedulers),
            stepped=frozenset(state.index[one] for one in trace.stepped if one in state.index),
            stepping=tuple(n for n, (_, opt) in enumerate(state.optimizers) if id(opt) in trace.stepped_optimizers),
            left=portable_locations(trace.left.spots, self._scene), shared=frozenset(trace.left.shared),
            mirrored=self._mirrored(), written=self._writes,
            placeholders=tuple(n.name for n in trace.module.graph.find_nodes(op="placeholder")),
            predicates=trace.predicates, storages=tuple(self._storages.sizes()), foreign=len(trace.found),
            environment=self._environment, opaque_leaves=self._scene.arguments.opaque_leaves,
            argument_effects=self._arguments.written, object_effects=portable_locations(self._objects.spots,
            self._scene), hides=self._objects.hides,
        )  # fmt: skip

    def _mirrored(self) -> tuple[tuple[int, tuple[int, Any], MirrorMode], ...]:
        found = self.trace.left.mirrored
        spots = portable_locations([spot for _, spot, _ in found], self._scene)
        ways = (
            MirrorMode.REPLACES if puts else MirrorMode.WRITES if slot in self._writes else MirrorMode.READS
            for slot, _, puts in found
        )
        return tuple(zip((slot for slot, _, _ in found), spots, ways, strict=True))

    def _records(self) -> list[Input]:
        slots = [*self._state.slots, *(Slot(InputKind.HYPER, h.name, h.box) for h in self._scene.lifter.hypers)]
        slots += [Slot(InputKind.USER, f"args.{i}", tensor) for i, tensor in enumerate(self._scene.user)]
        return [
            Input(
                kind=s.kind, name=s.name, shape=tuple(s.tensor.shape), dtype=s.tensor.dtype,
                placement=Placement.REPLICATE if s.kind in _REPLICATED else Placement.LOCAL,
                trainable=s.kind is InputKind.PARAM and s.tensor.requires_grad, freed=i in self._storages.freed,
            )
            for i, s in enumerate(slots)
        ] + rank_inputs(self.trace.ranks)  # fmt: skip

    def _program(self, functional: Functional) -> tuple[Program, list[int]]:
        """The program and, per kept input, its place among the tracer's tensors. Unused inputs are dropped."""
        trace, graph = self.trace, functional.module.graph
        placeholders = graph.find_nodes(op="placeholder")
        records, lifter = self._records(), self._scene.lifter
        results: Any = graph.output_node().args[0]
        computed = dict(zip(trace.payloads, results[len(results) - len(trace.payloads) :], strict=True))
        boxes = {id(h.box): placeholders[len(self._state.slots) + i] for i, h in enumerate(lifter.hypers)}
        lifter.replace_payloads(graph, boxes, computed)
        _numbers_as_inputs(placeholders, records)
        results = graph.output_node().args[0]  # numbers that are returned stand there as inputs by now
        results = results[: len(results) - len(trace.payloads)]
        outputs: list[Output] = []
        user_nodes = [r for r in results[: trace.num_results] if isinstance(r, fx.Node)]
        outputs += [Output(kind=OutputKind.USER, name=f"result.{i}") for i in range(len(user_nodes))]
        outputs += [Output(kind=OutputKind.GRAD, name=records[slot].name, target=slot) for slot in trace.grads]
        outputs += [Output(kind=OutputKind.STATE, name=where.spelled(self._state)) for where, _ in trace.new_state]
        end = len(results) - len(trace.versions)
        rest = results[trace.num_results : end]
        writes = {k: v for k, v in functional.writes.items() if v is not placeholders[k]}
        outputs += [Output(kind=OutputKind.WRITE, name=records[k].name, target=k) for k in writes]
        graph_edit.set_results(graph, [*user_nodes, *rest, *writes.values()])
        keep_versions(graph, list(zip(trace.versions, results[end:], strict=True)), writes.keys())
        graph_edit.remove_dead_code(graph)
        targets = {o.target for o in outputs if o.target is not None}
        kept = [i for i, n in enumerate(placeholders) if n.users or i in targets or records[i].kind is InputKind.PARAM]
        for index, node in enumerate(placeholders):
            if index not in set(kept):
                graph.erase_node(node)
        place = {old: new for new, old in enumerate(kept)}
        renumbered = tuple(
            o if o.target is None else Output(kind=o.kind, name=o.name, target=place[o.target]) for o in outputs
        )
        functional.module.recompile()
        program = Program(
            module=functional.module, inputs=tuple(records[i] for i in kept), outputs=renumbered,
            stage=Stage.CAPTURED, mesh=axes_of(graph, trace.ranks),
        )  # fmt: skip
        return program, kept


def _numbers_as_inputs(placeholders: list[fx.Node], records: list[Input]) -> None:
    """A HYPER input is the number itself: readers of its ``item()`` read the placeholder."""
    replaced = {}
    for node, record in zip(placeholders, records, strict=True):
        if record.kind is InputKind.HYPER:
            for user in node.users:
                node_meta.set_value(node, node_meta.value(user))
                replaced[user] = node
    graph_edit.replace_nodes(replaced)


def _check_sizes(graph: fx.Graph, context: StepContext) -> None:
    """Raises CaptureError where a number that moves between calls may decide about a shape or a place in memory."""
    for node in graph.nodes if context.outside else ():
        for one in node_meta.tensors(node):
            if not all(isinstance(size, int) for size in (*one.shape, *one.stride(), one.storage_offset())):
                raise CaptureError(f"The shape of a tensor, or its place in memory, is not known: {list(one.shape)}.")


def _check_discovered(trace: Trace) -> None:
    for tensor in trace.found:
        if tensor.requires_grad:
            tensor.grad = None
            raise CaptureError(
                f"The step uses a parameter {list(tensor.shape)} that wholestep could not find in its arguments, "
                f"closure, globals or attributes. Pass the object that holds it as an argument of the step."
            )
        log.info("the step reads a tensor %s that belongs to no argument, closure or attribute", list(tensor.shape))
