"""Runs a step once on fake tensors and writes it down: `trace(context, effects, step)` gives a `Trace`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import uninteresting_files

from wholestep.capture.effects.argument_writes import ArgumentWrites
from wholestep.capture.effects.optimizer_effects import OptimizerEffects
from wholestep.capture.effects.tensor_flags import TensorFlags
from wholestep.capture.functionalize.storage_resize import StorageRecorder, check_places, place_of
from wholestep.capture.native import build
from wholestep.capture.python import tree_util, user_frame
from wholestep.capture.python.attribute_access import AttributesFound
from wholestep.capture.python.code_lines import writer_of
from wholestep.capture.python.modules_left_alone import modules_left_alone
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.traced_inputs import (
    ArgumentRef,
    InputSource,
    RankSource,
    TracedInput,
    shown_state,
    state_views,
)
from wholestep.capture.reach.train_state import Address
from wholestep.capture.scalars.host_scalars import HostValues, predicate_graph
from wholestep.capture.scalars.math_functions import refuse_predicates
from wholestep.capture.scalars.rank_symbols import Rank
from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.capture.tracing import new_parameters
from wholestep.capture.tracing.backward_engine import leaves_behind
from wholestep.capture.tracing.call_watch import calls_watched
from wholestep.capture.tracing.grad_markers import gradients_watched
from wholestep.capture.tracing.patches import make_recorders, patched
from wholestep.capture.tracing.tensor_swap import ENTRY_MARK, swapped
from wholestep.capture.wrappers import tensor_parallel
from wholestep.errors import CaptureError
from wholestep.ir.dtensor.layouts import DTensorLayout, local_tensor
from wholestep.ir.dtensor.shards import is_dtensor
from wholestep.ir.dtensor.whole_fake import whole_fake
from wholestep.ir.lazy_graph_module import unwritten
from wholestep.ir.program import InputKind
from wholestep.util.freed_graphs import freed_graphs
from wholestep.util.gradient_node import askable, gradient_node, is_leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """What the step had done at its end, while everything was still traced."""

    result_spec: tree_util.TreeSpec
    results: list[Any]
    """Leaves of the step's result that no graph gives, in place; tensors and numbers of the graph are None."""
    grads: list[int]
    """Slots of the parameters that have a new ``.grad`` at the end, in the order of the graph's results."""
    kept_grads: set[int]
    """Slots of parameters whose ``.grad`` is the very tensor it was at entry."""
    new_state: list[Address]
    """What the graph creates for optimizers."""
    layouts: list[DTensorLayout | None]
    """Of each of these results, gradients and states, in this order, that the graph gives a part of."""
    predicates: tuple[fx.GraphModule, list[bool], list[str]] | None
    numbers: dict[Any, Any]
    """Symbols of host scalars, and their values at this call."""
    kept_graph: torch.Tensor | None
    """A result through whose graph a backward could still go."""
    requires_grad: tuple[tuple[int, bool], ...]
    """Slots of the state that take gradients at the end and did not (True), or the other way round (False)."""
    versions: list[int]
    """Inputs whose version counter the step sets, in the order of the graph's last results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one run of the step on fake tensors left."""

    module: fx.GraphModule
    sources: list[InputSource]
    """Per placeholder where it comes from."""
    labels: list[str]
    """What errors call the placeholders that are tensors, which are the first ones."""
    fakes: list[Any]
    """What the trace ran on, per placeholder: fake tensors, then the symbols of ranks."""
    known: list[Any]
    """Per placeholder: the real value of a host number, the number of a rank, or None."""
    mode: FakeTensorMode
    sizes: SizeEnv
    recorded: _Recorded
    storages: StorageRecorder
    stepped: set[int]
    """ids of parameters that had a gradient when an optimizer stepped."""
    stepped_optimizers: set[int]
    uses_grads: bool
    """Whether a backward has left gradients, which may be gone by now, or Python has looked at some."""
    forwards: dict[int, bool]
    """By id of each DistributedDataParallel whose forward ran: whether a reduction follows the last one."""
    looked_at: frozenset[int]
    """ids of arguments whose gradient Python has looked at."""
    ranks: list[Rank]
    """The groups of this process, whose numbers are the last placeholders."""
    foreign: list[torch.Tensor]
    """Real tensors that the step used and nobody had found."""


def settle() -> None:
    """Has torch import what it imports where it first looks for a line of the user's: ``torch.export``, and networkx.

    What modules read of the environment while they are imported (networkx: all of it) is nothing that a step depends
    on, so it is to be read before that is watched. Native code is loaded, whose self-test computes with tensors.
    """
    uninteresting_files()
    build.module()


class Tracer:
    """One trace of one call."""

    def __init__(self, context: StepContext, optimizers: OptimizerEffects) -> None:
        self._context, self._optimizers, self._state = context, optimizers, context.state
        self._flags = TensorFlags(context.state.slots, ())
        self._arguments: ArgumentWrites | None = None
        self._rows = context.traced_inputs()
        self._reals, self._labels = [row.tensor for row in self._rows], [row.label for row in self._rows]
        boxes = {id(one.box) for one in context.varying.numbers}
        self._shown = shown_state(context.state, boxes, parts=context.sees_parts)
        self._recorders = make_recorders(context)
        self._outside: list[tuple[str, torch.Tensor]] = []
        """Leaves behind inputs that were computed outside of the step, each with what errors call the input."""
        self._caches_casts = _casts_are_cached()
        self._known = [*self._known_host_values(), *(rank.number for rank in self._recorders.ranks.ranks)]

    def run(self, step: Callable[..., Any]) -> Trace:
        """Traces `step`. Raises CaptureError with the user's line; the user's objects are as before in any case."""
        recorders, recorded = self._recorders, list[_Recorded]()
        entry_grads = [(s, s.tensor.grad) for s in self._state.params if s.tensor.grad is not None]
        argument_grads = [(one, one.grad) for one in self._context.user if is_leaf(one)]
        recorders.had_grads = {id(one): grad is not None for one, grad in argument_grads}
        for one in [*(slot.tensor for slot, _ in entry_grads), *(one for one, _ in argument_grads)]:
            one.grad = None  # those of parameters are inputs of their own, those of arguments are none
        try:
            fakes = self._make_fakes()
            with self._swapped(fakes):
                for slot, grad in entry_grads:
                    setattr(grad, ENTRY_MARK, True)
                    slot.tensor.grad = grad
                with patched(self._context, recorders), unwritten(), modules_left_alone():
                    inputs = [*self._reals, *recorders.ranks.symbols]
                    traced = lambda *args: self._body(step, recorded)  # noqa: E731
                    module = make_fx(traced, _disable_torch_fn_metadata_mode=True)(*inputs)
        except Exception as error:
            raise user_frame.explain(error) from error
        finally:
            for slot, grad in entry_grads:
                slot.tensor.grad = grad
                grad.__dict__.pop(ENTRY_MARK, None)
            for argument, own_grad in argument_grads:
                argument.grad = own_grad
            self._context.varying.restore()
            self._context.lifter.restore()
            if self._arguments is not None:
                self._arguments.restore()
            self._flags.restore()
        recorders.markers.settle(module.graph)
        recorders.storages.settle(module.graph, self._labels)
        ranks = recorders.ranks.ranks
        return Trace(
            module=module, sources=[*(row.source for row in self._rows), *map(RankSource, range(len(ranks)))],
            labels=self._labels, fakes=[*fakes, *recorders.ranks.symbols], known=self._known, mode=recorders.mode,
            sizes=recorders.sizes,
            recorded=recorded[0], storages=recorders.storages, stepped=recorders.stepped.params,
            stepped_optimizers=recorders.stepped.optimizers, uses_grads=recorders.uses_grads,
            forwards=recorders.forwards,
            looked_at=frozenset(recorders.looked_at),
            ranks=ranks, foreign=_undiscovered(module),
        )  # fmt: skip

    def _make_fakes(self) -> list[torch.Tensor]:
        try:
            fakes: list[torch.Tensor] = []
            for row in self._rows:
                fakes.append(self._fake(row))
            self._outside = self._leaves_outside(fakes)
        finally:
            self._recorders.mode.fake_tensor_converter = FakeTensorConverter(copy_data=False)
        return fakes

    def _fake(self, row: TracedInput) -> torch.Tensor:
        mode, moving = self._recorders.mode, self._context.moving
        if dims := moving.get(id(row.tensor)):
            return self._recorders.sizes.fake(mode, row.tensor, row.name, dims)
        if is_dtensor(row.tensor):
            return whole_fake(mode, row.tensor)
        return mode.from_tensor(askable(row.tensor), static_shapes=True)

    def _leaves_outside(self, fakes: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        known = set(map(id, fakes))
        found = [
            (label, leaf)
            for label, fake in zip(self._labels, fakes, strict=True)
            if fake.grad_fn is not None
            for leaf in leaves_behind(fake)
            if id(leaf) not in known
        ]
        for _, leaf in found:
            leaf.grad = None
        return found

    def _known_host_values(self) -> list[torch.Tensor | None]:
        kinds = (InputKind.HYPER, InputKind.OPTIMIZER, InputKind.BUFFER)
        reals = [(row.kind in kinds, row.tensor) for row in self._rows]
        on_host = [may_be and real.dim() == 0 and real.device.type == "cpu" for may_be, real in reals]
        return [real.detach().clone() if host else None for host, (_, real) in zip(on_host, reals, strict=True)]

    @contextmanager
    def _swapped(self, fakes: list[torch.Tensor]) -> Iterator[None]:
        with swapped(self._reals, fakes):
            try:
                yield
            finally:
                for slot in self._state.params:
                    slot.tensor.grad = None  # a gradient belongs to the implementation that leaves

    def _body(self, step: Callable[..., Any], recorded: list[_Recorded]) -> list[Any]:
        """What make_fx traces: the step, and after it what makes outputs of all that it leaves."""
        varying, lifter = self._context.varying, self._context.lifter
        codes = self._context.reachable.codes
        host = self._recorders.host = HostValues.of_trace(self._known)
        torch.set_autocast_cache_enabled(self._caches_casts)  # make_fx, which sets it back, traces without
        lifter.install()
        varying.install()
        counted = [one._version for one in self._context.user]
        places, flags = [place_of(real) for real in self._reals], TensorFlags(self._state.slots, codes)
        args, kwargs = self._context.arguments.traced()
        arguments = self._arguments = ArgumentWrites(args, kwargs, codes)
        grads = gradients_watched(self._recorders.note_gradient)
        states = self._context.lazy.watched()
        with calls_watched(self._context.reachable), self._context.attributes.observed(), grads, states:
            result = step(*args, **kwargs)
        if self._context.attributes.found:
            raise AttributesFound
        for caught in self._recorders.mode.raised:  # by a handler of the user's, which took it for an error of torch
            raise user_frame.explain(caught) from caught
        self._recorders.groups.finish()
        leaves, spec = new_parameters.flatten(result, self._state.index)
        refuse_predicates(leaves)
        self._recorders.shards.check_results(leaves)
        arguments.check()
        if changed := lifter.changed():
            line = writer_of(changed.key, codes)
            raise CaptureError(
                f"The step itself changes {changed.name}{f' at {line}' if line else ''}. That would happen once, while "
                f"capturing, and never again. Change it, or call scheduler.step(), outside of the step; it is read at "
                f"every call."
            )
        varying.check()
        self._optimizers.write_replaced()
        check_places(self._reals, places, self._labels)
        flags.check_hooks()
        traced = (torch.Tensor, torch.SymFloat, torch.SymInt, torch.SymBool)
        views = state_views(leaves, self._shown, self._state.index)
        leaves = [views.get(place, leaf) for place, leaf in enumerate(leaves)]
        user = enumerate(zip(self._context.user, counted, strict=True))
        written = {id(one): ArgumentRef(number) for number, (one, before) in user if one._version != before}
        leaves = [written.get(id(leaf), leaf) for leaf in leaves]
        held = [not isinstance(leaf, traced) or id(leaf) in self._state.index for leaf in leaves]
        outputs: list[Any] = [None if is_held else leaf for leaf, is_held in zip(leaves, held, strict=True)]
        new_grads, kept_grads = self._gradients()
        created = self._optimizers.created()
        made = [*outputs, *new_grads.values(), *(one for _, one in created)]
        versions, version_values = self._recorders.versions.at_exit()
        recorded.append(
            _Recorded(
                result_spec=spec,
                results=[leaf if is_held else None for leaf, is_held in zip(leaves, held, strict=True)],
                grads=list(new_grads), kept_grads=kept_grads,
                new_state=[where for where, _ in created], versions=versions, requires_grad=flags.changed(),
                layouts=tensor_parallel.layouts(made, self._shown.values()),
                numbers=host.symbols(), predicates=predicate_graph(host), kept_graph=_kept_graph(outputs),
            )
        )  # fmt: skip
        self._recorders.host = None
        return [*map(local_tensor, made), *version_values]

    def _gradients(self) -> tuple[dict[int, torch.Tensor], set[int]]:
        """Slots of parameters with their new gradients, and slots of those that kept the one they had."""
        for number, argument in enumerate(self._context.user):
            if is_leaf(argument) and argument.grad is not None:
                raise CaptureError(
                    f"The backward leaves a gradient on tensor {number} of the arguments, a {list(argument.shape)}, "
                    f"which is another tensor at every call. Take it with torch.autograd.grad and return it."
                )
        others = (slot for slot in self._state.slots if slot.kind not in (InputKind.PARAM, InputKind.GRAD))
        for slot in others:
            if is_leaf(slot.tensor) and slot.tensor.grad is not None:
                raise CaptureError(
                    f"The backward leaves a gradient on {slot.name}, which took none when the step began. Make it an "
                    f"nn.Parameter, or take its gradient with torch.autograd.grad."
                )
        for label, leaf in self._outside:
            if leaf.grad is not None:
                raise CaptureError(
                    f"The backward goes on beyond {label}, which was computed outside of the step. Compute it in the "
                    f"step, or pass {label}.detach(), take the gradient with torch.autograd.grad and return it."
                )
        grads = {self._state.index[id(slot.tensor)]: slot.tensor.grad for slot in self._state.params}
        kept = {slot for slot, grad in grads.items() if getattr(grad, ENTRY_MARK, False)}
        return {slot: grad for slot, grad in grads.items() if grad is not None and slot not in kept}, kept


def _kept_graph(outputs: Sequence[Any]) -> torch.Tensor | None:
    """The first of the results of which no backward has freed the graph."""
    of_graphs = {n: one for n, one in enumerate(outputs) if isinstance(one, torch.Tensor) and gradient_node(one)}
    freed = freed_graphs(of_graphs)
    return next((one for number, one in of_graphs.items() if number not in freed), None)


def _undiscovered(module: fx.GraphModule) -> list[torch.Tensor]:
    """Real tensors in the graph other than constants that the step itself made: those are lifted afresh, and their
    memory is torch's. ``torch.from_numpy`` gives the memory of an array, which the user may write to."""
    found: list[torch.Tensor] = []
    for node in module.graph.find_nodes(op="get_attr"):
        held = getattr(module, node.target)
        lifted = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor):
            continue
        if not lifted or not held.untyped_storage().resizable():
            found.append(held)
    return found


def _casts_are_cached() -> bool:
    """Whether autocast casts a weight once for all who read it, whose gradients then add up in half precision.

    Not in an autocast of the caller's, which would hold casts of this trace when it has ended.
    """
    around = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_autocast_cache_enabled() and not around
