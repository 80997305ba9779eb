"""Runs a step once on fake tensors and writes it down as Program[CAPTURED]."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, uninteresting_files
from torch.utils import _foreach_utils

from wholestep.capture.effects.argument_effects import ArgumentEffects
from wholestep.capture.effects.object_effects import ObjectEffects
from wholestep.capture.effects.optimizer_effects import OptimizerEffects
from wholestep.capture.effects.tensor_effects import KeptTensors as LeftInObjects
from wholestep.capture.effects.tensor_effects import TensorEffects
from wholestep.capture.functionalize.storage_resize import StorageRecorder, check_places, place_of
from wholestep.capture.functionalize.version_counters import VersionRecorder
from wholestep.capture.python import tree_util, user_frame
from wholestep.capture.python.node_origin import OriginRecorder
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.train_state import Address
from wholestep.capture.reach.unwrap_compiled import compile_unwrapped
from wholestep.capture.scalars.counters import ScalarsChanged
from wholestep.capture.scalars.host_scalars import HostValues, host_branches, predicate_graph
from wholestep.capture.scalars.math_functions import refuse_predicates, symbolic_math
from wholestep.capture.scalars.rank_symbols import Rank, RankSymbols
from wholestep.capture.scalars.symbolic_text import PLACEHOLDER_TEXT, symbolic_text
from wholestep.capture.tracing import new_parameters
from wholestep.capture.tracing.fake_kernels import LayoutFakeMode
from wholestep.capture.tracing.grad_markers import GradMarkers
from wholestep.capture.tracing.module_to import module_to_is_identity
from wholestep.capture.tracing.process_group_rules import RULES
from wholestep.capture.tracing.process_groups import ProcessGroupRecorder
from wholestep.capture.tracing.rnn_unroll import unrolled_rnns
from wholestep.capture.tracing.tensor_swap import ENTRY_MARK, swapped
from wholestep.errors import CaptureError
from wholestep.ir.lazy_graph_module import unwritten
from wholestep.ir.ops.rng_state import traced_generator
from wholestep.ir.program import InputKind

_optimizer_module = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides its module of that name
CAPTURING: list[None] = []
"""One item per capture that runs at this moment; a list, since native code looks at it as well."""


def is_capturing() -> bool:
    """Whether a step is being captured at this moment."""
    return bool(CAPTURING)


@contextmanager
def _capture_flag() -> Iterator[None]:
    CAPTURING.append(None)
    try:
        yield
    finally:
        CAPTURING.pop()


@dataclass(slots=True)
class Trace:
    """What one run of the step on fake tensors left."""

    module: fx.GraphModule
    fakes: list[Any]
    """What the trace ran on, per placeholder: fake tensors, then the symbols of ranks."""
    mode: FakeTensorMode
    result_spec: tree_util.TreeSpec
    num_results: int
    """Leaves of what the step returns, and then of what it leaves in `left`."""
    results: list[Any]
    """Leaves of the step's result that are no tensors, in place; tensors and numbers of the graph are None."""
    grads: list[int] = field(default_factory=list)
    """Slots of the parameters that have a new ``.grad`` at the end, in the order of the graph's results."""
    kept_grads: set[int] = field(default_factory=set)
    """Slots of parameters whose ``.grad`` is the very tensor it was at entry."""
    new_state: list[tuple[Address, bool]] = field(default_factory=list)
    """What the graph creates for optimizers, and whether it is a number in Python."""
    left: LeftInObjects = field(default_factory=LeftInObjects)
    """Where the step leaves new tensors."""
    stepped: set[int] = field(default_factory=set)
    """ids of parameters that had a gradient when an optimizer stepped."""
    stepped_optimizers: set[int] = field(default_factory=set)
    predicates: tuple[fx.GraphModule, list[bool], list[str]] | None = None
    numbers: dict[Any, Any] = field(default_factory=dict)
    """Symbols of host scalars, and their values at this call."""
    versions: list[int] = field(default_factory=list)
    """Inputs whose version counter the step sets, in the order of the graph's last results but for payloads."""
    payloads: list[float] = field(default_factory=list)
    """What stands in fused kernels for numbers that the step computes, which are the graph's last results."""
    ranks: list[Rank] = field(default_factory=list)
    """The groups of this process, whose numbers are the last placeholders."""
    found: list[torch.Tensor] = field(default_factory=list)
    """Real tensors that the step used and nobody had found."""


def settle() -> None:
    """Has torch import what it imports where it first looks for a line of the user's: ``torch.export``, and networkx.

    What modules read of the environment while they are imported (networkx: all of it) is nothing that a step depends
    on, so it is to be read before that is watched.
    """
    uninteresting_files()


class Tracer:
    """One trace of one call. `reals` are the tensors of the state, the boxes of numbers, and the arguments."""

    def __init__(
        self, context: StepContext, left: OptimizerEffects, objects: ObjectEffects, arguments: ArgumentEffects
    ) -> None:
        self._context, state, lifter, user = context, context.state, context.lifter, context.user
        self._state, self._lifter, self._user = state, lifter, user
        self._counters, self._left, self._replaced = context.counters, left, TensorEffects(context)
        self._arguments, self._nests = arguments, objects
        self.reals = [*(slot.tensor for slot in state.slots), *(h.box for h in lifter.hypers), *user]
        owners = {id(slot.tensor): slot.name.rpartition(".")[0] for slot in state.params}
        self._recorder, self._markers = OriginRecorder(context.module_names(), owners), GradMarkers()
        self.storages, self._versions = StorageRecorder(self.reals), VersionRecorder(self.reals)
        self._mode = LayoutFakeMode(
            shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False), allow_non_fake_inputs=True
        )
        assert self._mode.shape_env is not None
        self._symbols, self._comm = RankSymbols(self._mode.shape_env), ProcessGroupRecorder()
        self._caches_casts = _casts_are_cached()
        self._out: Trace | None = None
        self._host: HostValues | None = None
        self.known = [*self._known_host_values(), *(rank.number for rank in self._symbols.ranks)]
        """Per placeholder: the real value of a host number, the number of a rank, or None."""

    def run(self, call: Callable[[], Any]) -> Trace:
        """Traces `call`. Raises CaptureError with the user's line; the user's objects are as before in any case."""
        entry_grads = [(s, s.tensor.grad) for s in self._state.params if s.tensor.grad is not None]
        fakes = self._make_fakes()
        for slot, _ in entry_grads:
            slot.tensor.grad = None
        try:
            with self._swapped(fakes), ExitStack() as stack:
                for slot, grad in entry_grads:
                    setattr(grad, ENTRY_MARK, True)
                    slot.tensor.grad = grad
                for context in (*self._contexts(), unwritten()):
                    stack.enter_context(context)
                inputs = [*self.reals, *self._symbols.symbols]
                module = make_fx(lambda *args: self._body(call), _disable_torch_fn_metadata_mode=True)(*inputs)
        except ScalarsChanged:
            raise
        except Exception as error:
            raise user_frame.explain(error) from error
        finally:
            for slot, grad in entry_grads:
                slot.tensor.grad = grad
                grad.__dict__.pop(ENTRY_MARK, None)
            self._counters.restore()
            self._lifter.restore()
            self._arguments.put_back()
        assert self._out is not None
        self._markers.settle(module.graph)
        self.storages.settle(module.graph, self._context.names())
        self._out.module, self._out.mode = module, self._mode
        self._out.fakes, self._out.ranks = [*fakes, *self._symbols.symbols], self._symbols.ranks
        self._out.found = _undiscovered(module)
        return self._out

    def _make_fakes(self) -> list[torch.Tensor]:
        try:
            fakes: list[torch.Tensor] = []
            for real in self.reals:
                fake = self._mode.from_tensor(real, static_shapes=True)
                fakes.append(fake)
            by_id = {id(real): fake for real, fake in zip(self.reals, fakes, strict=True)}
            for slot in self._state.params:  # the fake of a parameter has made a fake of its gradient already
                grad = slot.tensor.grad
                if grad is not None:
                    position = self._state.index[id(grad)]
                    inner = by_id[id(slot.tensor)].grad
                    if inner is not None:
                        fakes[position] = inner
                        by_id[id(slot.tensor)].grad = None
            for real in self._user:
                by_id[id(real)].grad = None  # an argument's gradient is no input
        finally:
            self._mode.fake_tensor_converter = FakeTensorConverter(copy_data=False)
        return fakes

    def _known_host_values(self) -> list[torch.Tensor | None]:
        known: list[torch.Tensor | None] = []
        boxes = {id(h.box) for h in self._lifter.hypers}
        kinds = {id(s.tensor): s.kind for s in self._state.slots}
        for real in self.reals:
            host = id(real) in boxes or kinds.get(id(real)) in (InputKind.OPTIMIZER, InputKind.BUFFER)
            host = host and real.dim() == 0 and real.device.type == "cpu"
            known.append(real.detach().clone() if host else None)
        return known

    @contextmanager
    def _swapped(self, fakes: list[torch.Tensor]) -> Iterator[None]:
        with swapped(self.reals, fakes):
            try:
                yield
            finally:
                for slot in self._state.params:
                    slot.tensor.grad = None  # a gradient belongs to the implementation that leaves

    def _contexts(self) -> Iterator[Any]:
        yield _capture_flag()
        yield self._mode
        yield torch.autograd.set_multithreading_enabled(False)  # dispatch modes belong to this thread
        yield self._markers.on({id(s.tensor): (s.name, s.tensor) for s in self._state.params})
        yield self._recorder.recording()
        yield traced_generator()
        yield unrolled_rnns()
        yield module_to_is_identity()
        yield compile_unwrapped()
        yield symbolic_math()
        yield self.storages.recording()
        yield self._versions.recording()
        yield from self._patches()

    def _patches(self) -> Iterator[Any]:
        yield symbolic_text()
        yield host_branches(lambda: self._host)
        yield self._lifter.fused_kernels()
        yield from self._symbols.patches(lambda: self._host)
        yield from self._comm.patches(RULES)
        for module in (_optimizer_module, _foreach_utils):  # fakes stand for plain tensors here
            plain = module._foreach_supported_types
            yield patch.object(module, "_foreach_supported_types", [*plain, FakeTensor])
        yield patch.object(torch, "as_tensor", _tensor_from_symbol(torch.as_tensor))
        yield patch.object(torch, "tensor", _tensor_from_symbol(torch.tensor))
        yield patch.object(torch.autograd, "_engine_run_backward", self._backward(torch.autograd._engine_run_backward))  # type: ignore[attr-defined]
        self._recorder.on_optimizer_step = self._note_step
        steps = (inspect.unwrap(getattr(opt, "_init_group", opt.step)) for _, opt in self._state.optimizers)
        for scope in {id(step.__globals__): step.__globals__ for step in steps}.values():
            for name, symbolic in (("max", torch.sym_max), ("min", torch.sym_min)):
                if name not in scope:  # the file has none of its own
                    yield _put(scope, name, _two_numbers(getattr(builtins, name), symbolic))

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        names = {id(s.tensor): s.name for s in self._state.params}

        def run(tensors: Any, grads: Any, keep: Any, create: Any, inputs: Any, *rest: Any, **kw: Any) -> Any:
            with self._recorder.backward():
                result = original(tensors, grads, keep, create, inputs, *rest, **kw)
                if kw.get("accumulate_grad") or create:
                    return result
                # torch.autograd.grad gives gradients without accumulating them: they are final here.
                leaves = [names.get(id(one)) for one in inputs]
                with torch.no_grad():
                    return tuple(
                        grad if name is None or grad is None else self._markers.mark(grad, name)
                        for grad, name in zip(result, leaves, strict=True)
                    )

        return on_this_thread(run, original)

    def _note_step(self, opt: torch.optim.Optimizer) -> None:
        assert self._out is not None
        if id(opt) not in {id(known) for _, known in self._state.optimizers}:
            raise CaptureError(
                f"The step uses an optimizer ({type(opt).__name__}) that wholestep could not find in its arguments, "
                f"closure, globals or attributes. Pass the object that holds it as an argument of the step."
            )
        self._out.stepped_optimizers.add(id(opt))
        for group in opt.param_groups:
            self._out.stepped.update(id(p) for p in group["params"] if p.grad is not None)

    def _body(self, call: Callable[[], Any]) -> list[Any]:
        self._host = HostValues.of_trace(self.known)
        out = self._out = Trace(None, [], self._mode, None, 0, [])  # type: ignore[arg-type]
        torch.set_autocast_cache_enabled(self._caches_casts)  # make_fx, which sets it back, traces without
        self._lifter.install()
        self._counters.install()
        places = [place_of(real) for real in self.reals]
        self._nests.hide()
        result = self._nests.take(call())
        self._comm.finish()
        leaves, out.result_spec = new_parameters.flatten(result, self._state.index)
        leaves, out.left = self._replaced.take(leaves)
        refuse_predicates(leaves)
        if moved := self._lifter.rewritten():
            raise ScalarsChanged(moved)
        self._counters.close()
        self._replaced.write()
        self._left.write_replaced()
        check_places(self.reals, places, self._context.names())
        if any(isinstance(leaf, str) and PLACEHOLDER_TEXT in leaf for leaf in leaves) or PLACEHOLDER_TEXT in repr(
            out.result_spec
        ):
            raise CaptureError("The step returns text that it made of a number it counts. Return the number itself.")
        out.num_results = len(leaves)
        traced = (torch.Tensor, torch.SymFloat, torch.SymInt, torch.SymBool)
        held = [not isinstance(leaf, traced) or id(leaf) in self._state.index for leaf in leaves]
        out.results = [leaf if is_held else None for leaf, is_held in zip(leaves, held, strict=True)]
        flat: list[Any] = [None if is_held else leaf for leaf, is_held in zip(leaves, held, strict=True)]
        flat += self._gradients(out)
        for where, is_number, made in self._left.created():
            out.new_state.append((where, is_number))
            flat.append(made)
        out.versions, versions = self._versions.at_exit()
        flat += versions
        out.payloads = list(self._lifter.computed)
        flat += self._lifter.computed.values()
        out.numbers, out.predicates = self._host.symbols(), predicate_graph(self._host)
        self._host = None
        return flat

    def _gradients(self, out: Trace) -> list[torch.Tensor]:
        grads = []
        for number, argument in enumerate(self._user):
            if argument.is_leaf and argument.grad is not None:
                raise CaptureError(
                    f"The backward leaves a gradient on tensor {number} of the arguments, a {list(argument.shape)}, "
                    f"which is another tensor at every call. Take it with torch.autograd.grad and return it."
                )
        for slot in self._state.params:
            grad = slot.tensor.grad
            if grad is None:
                continue
            if getattr(grad, ENTRY_MARK, False):
                out.kept_grads.add(self._state.index[id(slot.tensor)])
            else:
                out.grads.append(self._state.index[id(slot.tensor)])
                grads.append(grad)
        return grads


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


def _tensor_from_symbol(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, (torch.SymFloat, torch.SymInt)):
            kwargs.setdefault("dtype", torch.get_default_dtype() if isinstance(data, torch.SymFloat) else torch.int64)
            return torch.full((), data, *args, **kwargs)  # type: ignore[call-overload,no-any-return]
        if isinstance(data, (list, tuple)) and any(isinstance(one, torch.SymInt) for one in data):
            return torch.stack([make(one, *args, **kwargs) for one in data])
        return original(data, *args, **kwargs)

    return make


def _casts_are_cached() -> bool:
    """Whether autocast casts a weight once for all who read it, whose gradients then add up in half precision.

    Not in an autocast of the caller's, which would hold casts of this trace when it has ended.
    """
    around = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_autocast_cache_enabled() and not around


@contextmanager
def _put(scope: dict[str, Any], name: str, thing: Any) -> Iterator[None]:
    """A name more in a scope. (`patch.dict` would put back all of it, and hide what the step writes there.)"""
    scope[name] = thing
    try:
        yield
    finally:
        del scope[name]


def _two_numbers(original: Callable[..., Any], symbolic: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def pick(*args: Any, **kwargs: Any) -> Any:
        numbers = len(args) == 2 and not kwargs and not any(isinstance(arg, torch.Tensor) for arg in args)
        if numbers and any(isinstance(arg, (torch.SymFloat, torch.SymInt)) for arg in args):
            return symbolic(*args)
        return original(*args, **kwargs)

    return pick
