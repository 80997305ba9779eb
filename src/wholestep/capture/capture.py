"""capture(step, args, kwargs): one call of the user's step as Program[CAPTURED], its live objects and its guards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from wholestep.capture import guards as guarding
from wholestep.capture import state as stating
from wholestep.capture import tree, walk
from wholestep.capture.binding import Binding, output_slices
from wholestep.capture.effects import SideEffects
from wholestep.capture.functional import Functional, functionalize
from wholestep.capture.guards import Guards
from wholestep.capture.hyper import Lifter
from wholestep.capture.ranks import axes_of, rank_inputs
from wholestep.capture.state import LazyState, Slot, State
from wholestep.capture.storage import Storages
from wholestep.capture.trace import Trace, Tracer
from wholestep.capture.version import keep_versions
from wholestep.errors import CaptureError, WholestepError
from wholestep.program import edit, meta
from wholestep.program.program import Input, InputKind, Output, OutputKind, Placement, Program, Stage
from wholestep.program.spec import verify

log = logging.getLogger("wholestep.capture")

_REPLICATED = (InputKind.PARAM, InputKind.BUFFER, InputKind.OPTIMIZER, InputKind.HYPER, InputKind.GRAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured step: the program, the objects behind its inputs and outputs, and when it may be used again."""

    program: Program
    binding: Binding
    guards: Guards
    undo: Callable[[], None]
    """Removes the optimizer state that was created for this step: for when its first call fails after the capture."""

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around the first call: one that fails leaves no optimizer state behind that was not there before it."""
        try:
            yield
        except BaseException:
            self.undo()
            raise


def capture(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Captures one call of `step`. Nothing of the user's is changed, whether it succeeds or not.

    Raises:
        CaptureError: with the user's file and line, for what cannot become one graph.
        HyperparameterError: for optimizers without a fixed update rule.
        ConfigError: for modules that are wrapped in their own communication.
    """
    try:
        return _capture_once(step, args, kwargs)
    except _Unsettled as first:
        # Libraries set things up in their first forward (hooks, caches). If a second trace changes nothing and is
        # the same graph, that was all it was. A counter or a growing list changes again.
        try:
            captured = _capture_once(step, args, kwargs, expected=first.code)
        except (_Unsettled, WholestepError):
            first.effects.restore()
            raise CaptureError(first.effects.sentence()) from None
        return captured


class _Unsettled(Exception):
    """A trace changed Python state. `effects` says what, and can put it back; `code` is what was traced."""

    def __init__(self, effects: SideEffects, code: str) -> None:
        super().__init__()
        self.effects, self.code = effects, code


def _capture_once(step: Callable[..., Any], args: Any, kwargs: Any, expected: str | None = None) -> Captured:
    leaves, spec = tree.flatten((args, kwargs))
    found = walk.find(step, args, kwargs)
    lazy = LazyState(list(found.optimizers.values()))
    try:
        program, binding, guards = _Job(step, args, kwargs, found, lazy).run(leaves, spec, expected)
    except BaseException:
        lazy.take_back()
        raise
    return Captured(program=program, binding=binding, guards=guards, undo=lazy.take_back)


class _Job:
    """One capture under way."""

    def __init__(self, step: Callable[..., Any], args: Any, kwargs: Any, found: walk.Found, lazy: LazyState) -> None:
        self._call = lambda: step(*args, **kwargs)
        self._found, self._lazy = found, lazy
        self.state: State = stating.collect(found)
        self.trace: Trace
        self._storages: Storages

    def run(self, leaves: list[Any], spec: tree.TreeSpec, expected: str | None) -> tuple[Program, Binding, Guards]:
        """Traces, makes functional, describes inputs and outputs, and ties them to live objects."""
        lifter = Lifter(self.state.optimizers)
        data = [isinstance(leaf, torch.Tensor) and id(leaf) not in self.state.index for leaf in leaves]
        user = _unique([leaf for leaf, is_data in zip(leaves, data, strict=True) if is_data])
        stating.check_devices(self.state, user)
        names = {id(m): n for root, top in self._found.modules.values() for n, m in _named(root, top)}
        tracer = Tracer(self.state, lifter, user, names, self._found.watches)
        self._storages = tracer.storages
        with SideEffects(self._found, self.state) as effects:
            self.trace = tracer.run(self._call)
        if effects.changed:
            raise _Unsettled(effects, self.trace.module.code)
        if expected is not None and self.trace.module.code != expected:
            raise CaptureError("the second run of the step traced another graph than the first")
        _check_discovered(self.trace)
        self._lazy.take_back(self.trace.stepped)  # before guards are made, which hold what is left
        functional = functionalize(self.trace.module, self.trace.fakes, self.trace.mode, tracer.known)
        functional.writes = self._storages.exit_writes(functional.writes)
        program, kept = self._program(functional, lifter, user)
        verify(program)
        binding = self._binding(program, kept, lifter, leaves)
        guards = self._guards(kept, lifter, leaves, data, spec)
        leaf_of = {kept[index]: leaf for index, leaf in binding.user}
        guards.storages = self._storages.sizes(tracer.names(), leaf_of)
        return program, binding, guards

    def _records(self, lifter: Lifter, user: list[torch.Tensor]) -> list[Input]:
        slots = [*self.state.slots, *(Slot(InputKind.HYPER, h.name, h.box) for h in lifter.hypers)]
        slots += [Slot(InputKind.USER, f"args.{i}", tensor) for i, tensor in enumerate(user)]
        return [
            Input(
                kind=s.kind, name=s.name, shape=tuple(s.tensor.shape), dtype=s.tensor.dtype,
                placement=Placement.REPLICATE if s.kind in _REPLICATED else Placement.LOCAL,
                trainable=s.kind is InputKind.PARAM and s.tensor.requires_grad, freed=i in self._storages.freed,
            )
            for i, s in enumerate(slots)
        ] + rank_inputs(self.trace.ranks)  # fmt: skip

    def _program(self, functional: Functional, lifter: Lifter, user: list[torch.Tensor]) -> tuple[Program, list[int]]:
        """The program and, per kept input, its place among the tracer's tensors. Unused inputs are dropped."""
        trace, graph = self.trace, functional.module.graph
        placeholders = graph.find_nodes(op="placeholder")
        records = self._records(lifter, user)
        lifter.replace_payloads(
            graph, {id(h.box): placeholders[len(self.state.slots) + i] for i, h in enumerate(lifter.hypers)}
        )
        _numbers_as_inputs(placeholders, records)
        results, outputs = functional.results, []
        user_nodes = [r for r in results[: trace.num_results] if isinstance(r, fx.Node)]
        outputs += [Output(kind=OutputKind.USER, name=f"result.{i}") for i in range(len(user_nodes))]
        outputs += [Output(kind=OutputKind.GRAD, name=records[slot].name, target=slot) for slot in trace.grads]
        outputs += [Output(kind=OutputKind.STATE, name=self._state_name(*entry)) for entry in trace.new_state]
        end = len(results) - len(trace.versions)
        rest = results[trace.num_results : end]
        writes = {k: v for k, v in functional.writes.items() if v is not placeholders[k]}
        outputs += [Output(kind=OutputKind.WRITE, name=records[k].name, target=k) for k in writes]
        edit.set_results(graph, [*user_nodes, *rest, *writes.values()])
        keep_versions(graph, list(zip(trace.versions, results[end:], strict=True)), writes.keys())
        edit.remove_dead_code(graph)
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

    def _state_name(self, number: int, slot: int, path: tuple[Any, ...]) -> str:
        return f"{self.state.optimizers[number][0]}.{'.'.join(map(str, path))}.{self.state.slots[slot].name}"

    def _binding(self, program: Program, kept: list[int], lifter: Lifter, leaves: list[Any]) -> Binding:
        trace, slots = self.trace, self.state.slots
        num_state, num_hyper = len(slots), len(lifter.hypers)
        place = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
        user_ids = _unique_ids(leaves, self.state)
        tensors: list[torch.Tensor | int | None] = []
        binding = Binding(
            tensors=tensors, hypers=[], user=[], entry_grads=[], result_spec=trace.result_spec,
            results=trace.results, result_places=[i for i, r in enumerate(self._traced_results()) if r],
            grads=[slots[i].tensor for i in trace.grads], cleared=[], stepped=[],
            new_state=[(self.state.optimizers[n][1], slots[s].tensor, path[0]) for n, s, path in trace.new_state],
        )  # fmt: skip
        owner = {id(s.tensor.grad): s.tensor for s in self.state.params if s.tensor.grad is not None}
        for index, old in enumerate(kept):
            tensors.append(None)
            if old >= num_state + num_hyper + len(user_ids):
                tensors[index] = trace.ranks[old - num_state - num_hyper - len(user_ids)].number
            elif old >= num_state + num_hyper:
                binding.user.append((index, place[user_ids[old - num_state - num_hyper]]))
            elif old >= num_state:
                binding.hypers.append((index, lifter.hypers[old - num_state]))
            elif slots[old].kind is InputKind.GRAD:
                binding.entry_grads.append((index, owner[id(slots[old].tensor)]))
            else:
                tensors[index] = slots[old].tensor
        with_new = {*trace.grads, *trace.kept_grads}
        binding.cleared = [
            s.tensor
            for i, s in enumerate(slots)
            if s.kind is InputKind.PARAM and s.tensor.grad is not None and i not in with_new
        ]
        binding.stepped = [opt for _, opt in self.state.optimizers if id(opt) in trace.stepped_optimizers]
        binding.slices = output_slices(program)
        return binding

    def _traced_results(self) -> list[bool]:
        results = self.trace.module.graph.output_node().args[0]
        return [isinstance(r, fx.Node) for r in results[: self.trace.num_results]]  # type: ignore[index,union-attr]

    def _guards(
        self, kept: list[int], lifter: Lifter, leaves: list[Any], data: list[bool], spec: tree.TreeSpec
    ) -> Guards:
        kept_set = set(kept)
        grads: dict[int, bool] = {}
        for slot in self.state.params:
            if slot.tensor.grad is None:
                grads[id(slot.tensor)] = False
            elif self.state.index[id(slot.tensor.grad)] in kept_set:
                grads[id(slot.tensor)] = True
        watches = [*self._found.watches, *lifter.watches, *_optimizer_watches(self.state, self.trace)]
        described = [guarding.describe(leaf) if is_data else leaf for leaf, is_data in zip(leaves, data, strict=True)]
        return Guards(
            state=guarding.state_slots(self.state, kept_set), leaves=described, is_data=data, spec=spec,
            aliases=guarding.aliases_of(leaves, data), watches=watches, grads=grads,
            predicates=self._predicates(lifter),
        )  # fmt: skip

    def _predicates(self, lifter: Lifter) -> Any:
        if self.trace.predicates is None:
            return None
        names = [n.name for n in self.trace.module.graph.find_nodes(op="placeholder")]
        sources: dict[str, Any] = {}
        for name, slot in zip(names, self.state.slots, strict=False):
            sources[name] = slot.tensor.detach().clone if slot.tensor.dim() == 0 else None
        for name, hyper in zip(names[len(self.state.slots) :], lifter.hypers, strict=False):
            sources[name] = _boxed(hyper.read)
        for name, rank in zip(reversed(names), reversed(self.trace.ranks), strict=False):
            sources[name] = partial(int, rank.number)
        return guarding.host_sources(self.trace.predicates, sources)


def _boxed(read: Callable[[], float]) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(read(), dtype=torch.float64)


def _named(root: str, top: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return [(name or root, module) for name, module in top.named_modules()]


def _unique(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def _unique_ids(leaves: list[Any], state: State) -> list[int]:
    return list(
        dict.fromkeys(id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in state.index)
    )


def _numbers_as_inputs(placeholders: list[fx.Node], records: list[Input]) -> None:
    """A HYPER input is the number itself: readers of its ``item()`` read the placeholder."""
    for node, record in zip(placeholders, records, strict=True):
        if record.kind is InputKind.HYPER:
            for user in list(node.users):
                meta.set_value(node, meta.value(user))
                edit.replace_node(user, node)


def _check_discovered(trace: Trace) -> None:
    for tensor in trace.found:
        if tensor.requires_grad:
            tensor.grad = None
            raise CaptureError(
                f"The step uses a parameter {list(tensor.shape)} that wholestep could not find in its arguments, "
                f"closure, globals or attributes. Pass the object that holds it as an argument of the step."
            )
        log.info("the step reads a tensor %s that belongs to no argument, closure or attribute", list(tensor.shape))


def _optimizer_watches(state: State, trace: Trace) -> list[walk.Watch]:
    """Structure of the optimizers: groups, their parameters, and the state tensors the graph is tied to."""
    watches: list[walk.Watch] = []

    def watch(container: Any, path: str, keys: tuple[Any, ...] | None = None) -> None:
        one = walk.Watch(container, path, keys)
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
                if opt.state.get(param) and id(param) in trace.stepped:
                    watch(opt.state[param], f"{name}.state of {state.name_of(param)}")
    return watches
