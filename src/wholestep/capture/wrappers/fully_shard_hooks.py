"""The hooks of ``fully_shard``: silent while a step is traced, since the graph has gathers and reductions of its own.

Hooks stay registered. What they call does nothing but cast, where the module has a mixed precision policy: casts of
parameters are then part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, RegisterPostBackwardFunction
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from wholestep.ir.dtensor.shards import own_part

_BEHIND = "_post_accumulate_grad_hooks"
"""Where a tensor has its hooks after the accumulation of its gradient."""


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this very module."""
    return isinstance(module, FSDPModule)


def groups_of(module: FSDPModule) -> list[Any]:
    """The groups in which torch gathers the parameters of this very module."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12; before, one or none
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group]


def state_text(thing: Any) -> str | None:
    """What a trace sees of the object in which torch keeps how a module is sharded; None for any other object.

    The rest of it are streams, groups and events of a process, and what the last eager call has left.
    """
    return f"{type(thing).__name__} {thing._mp_policy}" if isinstance(thing, FSDPState) else None


def key_text(key: Any) -> str | None:
    """A name for the key under which torch keeps such objects in a module, which is new in every process."""
    return {REGISTRY_KEY: "registry of composable APIs", STATE_KEY: "state of composable APIs"}.get(key)


def is_bookkeeping(key: Any) -> bool:
    """Whether torch keeps a count of its own under that name in a sharded parameter."""
    return isinstance(key, str) and key == "_fsdp_orig_uid"


def is_own_hook(hook: Any) -> bool:
    """Whether a hook of a module is one of those by which ``fully_shard`` works."""
    hook = getattr(hook, "hook", hook)  # torch wraps those for loading state
    home = getattr(getattr(hook, "__self__", hook), "__module__", "")
    return home.startswith(FSDPState.__module__.rpartition(".")[0])


def lies_in_state(path: str) -> bool:
    """Whether a path names something inside of what torch keeps under those keys."""
    return REGISTRY_KEY in path or STATE_KEY in path


class Gathered(Protocol):
    """Is told when torch would gather the parameters of a group, and when it would drop them."""

    def gathers(self, group: FSDPParamGroup) -> None: ...

    def drops(self, group: FSDPParamGroup) -> None: ...


@contextmanager
def silent_hooks(gathered: Gathered) -> Iterator[None]:
    """While open, a forward and a backward of a module of ``fully_shard`` communicate nothing and move no parameter.

    So do `unshard` and `reshard` of its owner: torch's own would fill its memory with what a trace computes.
    """
    used: list[FSDPParamGroup] = []
    roots = _Roots()

    def unshard(group: FSDPParamGroup, async_op: bool = False) -> None:
        gathered.gathers(group)
        used.append(group)
        _cast_parameters(group)

    def reshard(group: FSDPParamGroup) -> None:
        put_parameters_back(group)
        gathered.drops(group)

    def pre_forward(group: FSDPParamGroup, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        unshard(group)
        return args, kwargs

    def post_forward(group: FSDPParamGroup, module: Any, args: Any, output: Any) -> Any:
        keeps = not group._reshard_after_forward or id(group) in roots.keep
        if not keeps or is_of_strategy(module):
            reshard(group)
        return output

    with ExitStack() as stack:
        begun = stack.enter_context(_forwards_ended())
        stack.callback(lambda: [*map(put_parameters_back, used)])

        def begin(state: FSDPState, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            begun.append(state)
            roots.note(state, module)
            return args, kwargs

        for owner, name, replacement in (
            (FSDPState, "_root_pre_forward", begin),
            (FSDPState, "_register_pre_backward_hook", lambda state, output: output),
            (FSDPParamGroup, "pre_forward", pre_forward),
            (FSDPParamGroup, "post_forward", post_forward),
            (FSDPParamGroup, "unshard", unshard),
            (FSDPParamGroup, "reshard", reshard),
            (FSDPParamGroup, "_prefetch_unshard", staticmethod(lambda *_: None)),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield


class _Roots:
    """Outermost modules whose first forward runs in a trace. In eager code torch notes then that they keep what they
    gather, unless their owner has said otherwise."""

    def __init__(self) -> None:
        self.keep: set[int] = set()
        """ids of the groups of their own parameters."""
        self._seen: set[int] = set()

    def note(self, state: Any, module: FSDPModule) -> None:
        """The forward of a module begins."""
        if state._is_root is not None or id(module) in self._seen:
            return
        self._seen |= {id(one) for one in state._modules[0].modules()}
        if state._auto_reshard_after_forward:
            self.keep |= {id(group) for group in groups_of(module)}


@contextmanager
def before_forwards(do: Callable[[], object]) -> Iterator[None]:
    """While open, `do` is called before the outermost sharded module of a forward gathers anything."""
    original = FSDPState._root_pre_forward

    def root_pre_forward(state: FSDPState, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        begun.append(state)
        if state._state_ctx.iter_forward_root is None:
            do()
        return original(state, module, args, kwargs)

    with _forwards_ended() as begun, patch.object(FSDPState, "_root_pre_forward", root_pre_forward):
        yield


@contextmanager
def reduced_last() -> Iterator[None]:
    """While open, a backward drops gathered parameters, and reduces their gradients, at its end alone.

    Torch does so as soon as a forward has been gone back through. The graph that an earlier backward has made may
    be gone through after that: it reads the parameters, and adds to the gradients.
    """
    with patch.object(RegisterPostBackwardFunction, "backward", staticmethod(lambda ctx, *grads: (None, *grads))):
        yield


@contextmanager
def reshards_noted(note: Callable[[FSDPModule], None]) -> Iterator[None]:
    """While open, `note` is called with every module whose owner has it drop what it has gathered."""
    original = FSDPModule.reshard

    def reshard(module: FSDPModule) -> None:
        note(module)
        original(module)

    with patch.object(FSDPModule, "reshard", reshard):
        yield


_KEPT = "_wholestep_nodes"
"""Where something is kept with the state of a module, which nobody looks at."""


def kept_with(module: FSDPModule) -> Any:
    """What was kept with a sharded module; None if nothing was."""
    return getattr(module._get_fsdp_state(), _KEPT, None)


def keep_with(module: FSDPModule, what: Any) -> None:
    """Keeps something as long as a sharded module lives."""
    setattr(module._get_fsdp_state(), _KEPT, what)


_BY_STRATEGY = "_wholestep_strategy"


def note_strategy(module: FSDPModule) -> None:
    """Notes that a strategy has sharded the module, and not its user."""
    setattr(module._get_fsdp_state(), _BY_STRATEGY, True)


def is_of_strategy(module: FSDPModule) -> bool:
    """Whether a strategy has sharded the module, whose user wrote for whole parameters."""
    return getattr(module._get_fsdp_state(), _BY_STRATEGY, False)


_live_backwards = 0
"""How many backwards run in which a live step reduces gradients of whole parameters."""


def reduces_by_itself() -> bool:
    """Whether a backward runs in which a live step reduces gradients of whole parameters. (Of any thread: on a GPU
    gradients are accumulated by another one than that which asks for them.)"""
    return _live_backwards > 0


@contextmanager
def reduced_alike() -> Iterator[set[int]]:
    """While open, a backward reduces gradients of the same parameters on all ranks, whatever each of them has used.

    Ranks that reduce different ones send messages of different sizes, so the others get zeros. Gives the ids of the
    parameters that this rank has used.
    """
    used: set[int] = set()
    original = FSDPParamGroup.post_backward

    def post_backward(group: FSDPParamGroup, *args: Any) -> None:
        for one in group.fsdp_params if group.reduce_grads else ():
            gathered = getattr(one, "_unsharded_param", None)
            if gathered is None or not gathered.requires_grad:
                continue
            if gathered.grad is None and one.unsharded_accumulated_grad is None:
                gathered.grad = torch.zeros_like(gathered)
            else:
                used.add(id(one.sharded_param))
        original(group, *args)

    global _live_backwards
    _live_backwards += 1
    try:
        with patch.object(FSDPParamGroup, "post_backward", post_backward):
            yield used
    finally:
        _live_backwards -= 1


@contextmanager
def as_of_whole_parameters(of_python: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While open, sharded modules do with their parameters what they do with whole ones.

    What a forward writes to gathered ones goes into the shards before the gathered ones are dropped. Hooks for
    gradients of a parameter are called, with gradients of this rank, as under DistributedDataParallel. Hooks after the
    accumulation are called by torch, with reduced gradients; `of_python` is open while they are.
    """
    begin, end, reduce = FSDPParamGroup.pre_forward, FSDPParamGroup.post_forward, FSDPParamGroup.post_backward

    def pre_forward(group: FSDPParamGroup, *args: Any) -> Any:
        result = begin(group, *args)
        for one in group.fsdp_params:
            if one._unsharded_param._backward_hooks is not one.sharded_param._backward_hooks:
                one._unsharded_param._backward_hooks = one.sharded_param._backward_hooks
        return result

    def post_forward(group: FSDPParamGroup, *args: Any) -> Any:
        if group.is_unsharded:
            for one in group.fsdp_params:
                _write_through(one)
        return end(group, *args)

    def post_backward(group: FSDPParamGroup, *args: Any) -> None:
        held = [(one.sharded_param, getattr(one.sharded_param, _BEHIND, None)) for one in group.fsdp_params]
        hooked = [(param, hooks) for param, hooks in held if hooks]
        for param, hooks in hooked:
            setattr(param, _BEHIND, type(hooks)((key, _within(of_python, hook)) for key, hook in hooks.items()))
        try:
            reduce(group, *args)
        finally:
            for param, hooks in hooked:
                setattr(param, _BEHIND, hooks)

    with (
        patch.object(FSDPParamGroup, "pre_forward", pre_forward),
        patch.object(FSDPParamGroup, "post_forward", post_forward),
        patch.object(FSDPParamGroup, "post_backward", post_backward),
    ):
        yield


def _within(around: Callable[[], AbstractContextManager[None]], hook: Callable[[Any], None]) -> Callable[[Any], None]:
    def called(param: Any) -> None:
        with around():
            hook(param)

    return called


@torch.no_grad()
def _write_through(one: Any) -> None:
    """Puts this rank's part of a gathered parameter into its shard. Whether it was written to is not asked: that would
    have the host wait for a GPU."""
    whole, memory, shard = one._unsharded_param, one.all_gather_outputs[0], one.sharded_param
    if whole.untyped_storage()._cdata != memory.untyped_storage()._cdata:  # ``param.data = ...``
        written = whole.data
        whole.data = memory.as_strided(whole.shape, whole.stride())  # torch gathers into the memory that it knows
        whole.data.copy_(written)  # past its counter of versions: a graph may hold it by now
    local, part = shard._local_tensor.detach(), own_part(whole, shard.device_mesh, shard.placements)
    if part.dtype != local.dtype:  # gathered in another type: only what was written is rounded to it
        part = torch.where(part == local.to(part.dtype), local, part.to(local.dtype))
    local.copy_(part)


@contextmanager
def _forwards_ended() -> Iterator[list[FSDPState]]:
    """After it no module whose state is noted in the list is in a forward.

    One whose forward has raised an error would be in it for good, and gather nothing in the next one.
    """
    begun: list[FSDPState] = []
    try:
        yield begun
    finally:
        for state in begun:
            kinds = type(state._training_state)
            if state._training_state is kinds.FORWARD:
                state._training_state = kinds.IDLE
                if state._state_ctx.iter_forward_root is state:
                    state._state_ctx.iter_forward_root = None


def _cast_parameters(group: FSDPParamGroup) -> None:
    dtype = group.mp_policy.param_dtype
    if dtype is not None:
        for one in group.fsdp_params:
            if one.sharded_param.is_floating_point():
                _put(one, one.sharded_param.to(dtype))


def put_parameters_back(group: FSDPParamGroup) -> None:
    """Has its modules read what they read before a forward."""
    if group.mp_policy.param_dtype is not None:
        for one in group.fsdp_params:
            _put(one, one.sharded_param)


def _put(one: Any, value: torch.Tensor) -> None:
    """Has every module that shares a parameter read `value` in its place."""
    info = one._module_info
    info.module._parameters[info.param_name] = value
    for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
        module._parameters[name] = value
