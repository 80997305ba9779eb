"""All that is replaced in torch while a step is traced, and the recorders that watch the trace."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _foreach_utils

from wholestep.capture.functionalize.constants import known_to_fakes
from wholestep.capture.functionalize.data_assignment import data_assignments
from wholestep.capture.functionalize.storage_resize import StorageRecorder
from wholestep.capture.functionalize.version_counters import VersionRecorder
from wholestep.capture.python.node_origin import OriginRecorder
from wholestep.capture.python.tracing_thread import capture_flag, on_this_thread
from wholestep.capture.python.user_frame import current_line
from wholestep.capture.reach.rng_and_iterators import traced_generator
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.train_state import TrainState
from wholestep.capture.reach.unwrap_compiled import compile_unwrapped
from wholestep.capture.scalars.float_arithmetic import float_arithmetic
from wholestep.capture.scalars.host_scalars import HostValues, host_branches
from wholestep.capture.scalars.math_functions import symbolic_math
from wholestep.capture.scalars.rank_symbols import RankSymbols
from wholestep.capture.scalars.symbol_views import BUILTINS, symbols_are_numbers, text_refused
from wholestep.capture.sizes.attention_kernels import without_plans
from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.capture.tracing.backward_engine import Engine, backward_replaced
from wholestep.capture.tracing.fake_kernels import LayoutFakeMode
from wholestep.capture.tracing.grad_markers import GradMarkers
from wholestep.capture.tracing.module_to import module_to_is_identity
from wholestep.capture.tracing.process_group_rules import RULES
from wholestep.capture.tracing.process_groups import ProcessGroupRecorder
from wholestep.capture.tracing.rnn_unroll import unrolled_rnns
from wholestep.capture.wrappers import ddp, tensor_parallel
from wholestep.capture.wrappers.fully_shard_hooks import silent_hooks
from wholestep.capture.wrappers.shown_shards import ShownShards
from wholestep.capture.wrappers.sync_batch_norm import graph_batch_norms
from wholestep.errors import CaptureError
from wholestep.ir.dtensor.shards import is_dtensor
from wholestep.util.gradient_node import is_leaf

_optimizer_module = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides its module of that name


@dataclass(slots=True)
class SteppedOptimizers:
    """Which optimizers a trace has stepped, and for which parameters."""

    state: TrainState
    optimizers: set[int] = field(default_factory=set)
    """By id."""
    params: set[int] = field(default_factory=set)
    """ids of parameters that had a gradient when an optimizer stepped."""

    def note(self, opt: torch.optim.Optimizer) -> None:
        """At every step of an optimizer. Raises CaptureError for one that is not in the state."""
        if id(opt) not in {id(known) for _, known in self.state.optimizers}:
            raise CaptureError(
                f"The step uses an optimizer ({type(opt).__name__}) that wholestep could not find in its arguments, "
                f"closure, globals or attributes. Pass the object that holds it as an argument of the step."
            )
        self.optimizers.add(id(opt))
        for group in opt.param_groups:
            self.params.update(id(p) for p in group["params"] if p.grad is not None)


@dataclass(slots=True, kw_only=True)
class Recorders:
    """What watches one trace."""

    mode: LayoutFakeMode
    sizes: SizeEnv
    origins: OriginRecorder
    markers: GradMarkers
    storages: StorageRecorder
    versions: VersionRecorder
    ranks: RankSymbols
    groups: ProcessGroupRecorder
    shards: ShownShards
    stepped: SteppedOptimizers
    uses_grads: bool = False
    """Whether a backward has left gradients so far, or Python has looked at some."""
    host: HostValues | None = None
    """Numbers of the host, while the step runs."""
    had_grads: dict[int, bool] = field(default_factory=dict)
    """By id of each argument that is a leaf, whether it had a gradient before the call."""
    forwards: dict[int, bool] = field(default_factory=dict)
    """By id of each DistributedDataParallel whether a reduction follows its last forward."""
    looked_at: set[int] = field(default_factory=set)
    """ids of those whose gradient Python has looked at."""

    def note_forward(self, wrapper: DistributedDataParallel, is_awaited: bool) -> None:
        """A forward of a DistributedDataParallel has run; `is_awaited`: as `ddp.set_awaited` has it."""
        self.forwards[id(wrapper)] = is_awaited

    def note_gradient(self, tensor: torch.Tensor) -> None:
        """Python looks at the gradient of a tensor. Raises CaptureError for one that came with an argument."""
        self.uses_grads = True
        self.shards.note_gradient(tensor)
        if id(tensor) in self.had_grads:
            self.looked_at.add(id(tensor))
        if self.had_grads.get(id(tensor)):
            raise CaptureError(
                f"The step looks at the gradient that an argument, a {list(tensor.shape)}, had before the call, at "
                f"{current_line()}. Pass the gradient itself as an argument."
            )


def make_recorders(context: StepContext) -> Recorders:
    """The recorders of one trace of a call."""
    reals = [row.tensor for row in context.traced_inputs()]
    owners = {id(slot.tensor): slot.name.rpartition(".")[0] for slot in context.state.params}
    shape_env = SizeEnv()
    return Recorders(
        mode=LayoutFakeMode(shape_env=shape_env, allow_non_fake_inputs=True), sizes=shape_env,
        origins=OriginRecorder(context.module_names(), owners), markers=GradMarkers(),
        storages=StorageRecorder(reals), versions=VersionRecorder(reals), ranks=RankSymbols(shape_env),
        groups=ProcessGroupRecorder(), shards=ShownShards(root for _, root in context.reachable.modules.values()),
        stepped=SteppedOptimizers(context.state),
    )  # fmt: skip


def patched(context: StepContext, recorders: Recorders) -> ExitStack:
    """Enters everything under which a step is traced; to be closed by the caller."""
    with ExitStack() as stack:
        for one in (*_modes(context, recorders), *_patches(context, recorders)):
            stack.enter_context(one)
        return stack.pop_all()


@contextmanager
def _casts_of_its_own() -> Iterator[None]:
    """While open, autocast remembers no casts of weights from before; afterwards none of the trace's fake ones."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _modes(context: StepContext, recorders: Recorders) -> Iterator[AbstractContextManager[Any]]:
    yield capture_flag()
    yield _casts_of_its_own()
    yield recorders.mode.forms.watching()
    if context.moving:
        yield recorders.mode.forms.composing()
        yield without_plans()
    yield recorders.mode
    yield known_to_fakes()
    yield torch.autograd.set_multithreading_enabled(False)  # dispatch modes belong to this thread
    yield ddp.silent_forwards(context.managed, recorders.note_forward)
    if context.sees_parts:
        yield tensor_parallel.numbers_stand_apart()
    else:
        yield recorders.markers.on({id(s.tensor): (s.name, s.tensor) for s in context.state.params}, context.unhooked)
    yield recorders.origins.recording()
    yield traced_generator()
    yield unrolled_rnns()
    yield silent_hooks(recorders.shards)
    yield graph_batch_norms()
    yield module_to_is_identity()
    yield compile_unwrapped()
    yield symbolic_math()
    yield float_arithmetic()
    yield recorders.storages.recording()
    yield data_assignments({id(row.tensor) for row in context.traced_inputs()}, recorders.mode.raised)
    yield recorders.versions.recording()


def _patches(context: StepContext, recorders: Recorders) -> Iterator[AbstractContextManager[Any]]:
    yield text_refused(recorders.mode.raised)
    yield symbols_are_numbers()
    yield recorders.shards.shown(recorders.mode.raised)
    for (_, name), scope in context.reachable.builtin_scopes.items():
        yield _put(scope, name, BUILTINS[name])
    yield host_branches(lambda: recorders.host, recorders.mode.raised)
    yield context.lifter.fused_kernels()
    yield from recorders.ranks.patches(lambda: recorders.host)
    yield from recorders.groups.patches(RULES)
    for module in (_optimizer_module, _foreach_utils):  # fakes stand for plain tensors on_this_thread
        plain = module._foreach_supported_types
        yield patch.object(module, "_foreach_supported_types", [*plain, FakeTensor])
    yield patch.object(torch, "as_tensor", _tensor_from_symbol(torch.as_tensor))
    yield patch.object(torch, "tensor", _tensor_from_symbol(torch.tensor))
    yield patch.object(torch.Tensor, "retain_grad", _of_own_tensors(context), create=True)
    yield backward_replaced(partial(_marking_backward, state=context.state, recorders=recorders))
    recorders.origins.on_optimizer_step = recorders.stepped.note
    steps = (inspect.unwrap(getattr(opt, "_init_group", opt.step)) for _, opt in context.state.optimizers)
    for scope in {id(step.__globals__): step.__globals__ for step in steps}.values():
        for name, symbolic in (("max", torch.sym_max), ("min", torch.sym_min)):
            if name not in scope:  # the file has none of its own
                yield _put(scope, name, _two_numbers(getattr(builtins, name), symbolic))


def _marking_backward(original: Engine, state: TrainState, recorders: Recorders) -> Engine:
    """The backward of autograd; gradients of parameters that it returns, and does not accumulate, are marked."""
    names = {id(s.tensor): s.name for s in state.params if not is_dtensor(s.tensor)}

    def run(tensors: Any, grads: Any, keep: Any, create: Any, inputs: Any, *rest: Any, **kw: Any) -> Any:
        with recorders.origins.backward(), ddp.a_backward():
            result = original(tensors, grads, keep, create, inputs, *rest, **kw)
            recorders.shards.backward_ends()
            recorders.uses_grads |= bool(kw.get("accumulate_grad"))
            if kw.get("accumulate_grad") or create:
                return result
            # torch.autograd.grad gives gradients without accumulating them: they are final here.
            leaves = [None if ddp.is_managed(one) else names.get(id(one)) for one in inputs]
            with torch.no_grad():
                return tuple(
                    grad if name is None or grad is None else recorders.markers.mark(grad, name)
                    for grad, name in zip(result, leaves, strict=True)
                )

    return run


def _of_own_tensors(context: StepContext) -> Callable[[torch.Tensor], None]:
    """`Tensor.retain_grad`, refused for tensors from outside: what C++ holds weakly cannot be exchanged back."""
    outside = {id(row.tensor) for row in context.traced_inputs()}
    retain: Callable[[torch.Tensor], None] = torch.Tensor.retain_grad

    def checked(tensor: torch.Tensor) -> None:
        if id(tensor) in outside and not is_leaf(tensor):
            raise CaptureError(
                f"The step has a {list(tensor.shape)} that was computed outside of it keep its gradient "
                f"(retain_grad), at {current_line()}. Call it where the tensor is computed."
            )
        retain(tensor)

    return on_this_thread(checked, retain)


def _tensor_from_symbol(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, (torch.SymFloat, torch.SymInt)):
            kwargs.setdefault("dtype", torch.get_default_dtype() if isinstance(data, torch.SymFloat) else torch.int64)
            return torch.full((), data, *args, **kwargs)  # type: ignore[call-overload,no-any-return]
        if isinstance(data, (list, tuple)) and any(isinstance(one, torch.SymInt) for one in data):
            return torch.stack([make(one, *args, **kwargs) for one in data])
        return original(data, *args, **kwargs)

    return make


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
