"""Calls of torch's own Python that are one record: steps of its optimizers, gradients that are cleared or clipped.

Each reads nothing of Python but its arguments and, for an optimizer, what its snapshot holds. So it may run later than
it is called. It saves time only: not redirected, these functions are recorded call by call. What must be redirected is
``autograd.Function.apply``, whose graph would be lost if the calls inside of it were recorded.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, optimizer

from wholestep.capture.tracing.process_group_rules import RULES
from wholestep.live.opaque.redirect import Redirections
from wholestep.live.recording.handle import CURRENT, RUNS, Handle, is_looked_into
from wholestep.live.recording.modes import block_may_have_ended

_TORCH = os.path.dirname(torch.__file__) + os.sep

_redirections = Redirections()

_LOOKED_INTO = "a function mode that the step has entered looks at every call here"


def redirected(*, looks: bool) -> Any:
    """While open, live steps record these calls whole. A context manager.

    `looks`: whether there may be optimizers of other classes than before.
    """
    return _redirections(_wanted() if looks else ())


def _wanted() -> Iterator[tuple[types.FunctionType, Callable[[Any], Any]]]:
    for cls in _subclasses(Optimizer):
        step = cls.__dict__.get("step")
        if isinstance(step, types.FunctionType) and _is_of_torch(step):
            yield step, _step
    yield _plain(nn.Module.__init__), _module_made
    yield _plain(nn.Module.__call__), _module
    yield _plain(Optimizer.zero_grad), _zero_grad_of_optimizer
    yield _plain(nn.Module.zero_grad), _zero_grad_of_module
    yield _plain(clip_grad.clip_grad_norm_), _clip
    yield _plain(clip_grad.clip_grad_value_), _clip
    yield _plain(nn.Parameter.__new__), _parameter
    for module in (torch.random, torch.cuda.random):  # seeds, and who reads or sets states
        for one in vars(module).values():
            if isinstance(one, types.FunctionType) and one.__module__ == module.__name__ and inspect.unwrap(one) is one:
                yield one, _draws_told
    yield from ((one, _ranks_communicate) for one in _communicating())
    yield _plain(torch.autocast.__exit__), _block_ended
    yield torch.autograd.Function.apply.__func__, _apply  # type: ignore[attr-defined]


@functools.cache
def _communicating() -> tuple[types.FunctionType, ...]:
    """The functions of torch.distributed that call a method of a process group. Those that ask classes of tensors what
    to do come to the recording mode by themselves."""
    found = []
    for one in vars(distributed_c10d).values() if dist.is_available() else ():
        if type(one) is types.FunctionType and one.__module__ == distributed_c10d.__name__:
            names = inspect.unwrap(one).__code__.co_names
            if not RULES.keys().isdisjoint(names) and "handle_torch_function" not in names:
                found.append(one)
    return tuple(found)


def _plain(function: Any) -> types.FunctionType:
    assert isinstance(function, types.FunctionType)
    return function


def _subclasses(cls: type) -> Iterator[type]:
    one: type
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)


@functools.cache
def _is_of_torch(function: types.FunctionType) -> bool:
    return inspect.unwrap(function).__code__.co_filename.startswith(_TORCH)  # type: ignore[no-any-return]


def _step(plain: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        run = CURRENT.run
        if run is None or len(args) != 1 or kwargs or _runs_code(args[0]) or _holds_tensors(args[0]):
            return plain(*args, **kwargs)
        if is_looked_into():
            return run.unrecorded(plain, args, kwargs, _LOOKED_INTO)
        return run.called(plain, args, kwargs)

    return step


def _holds_tensors(opt: Optimizer) -> bool:
    """Whether tensors are attributes of an optimizer, as a GradScaler lends it its scale for the time of a step.

    A snapshot does not hold them: what reads them has to run now.
    """
    return any(isinstance(held, torch.Tensor) for held in vars(opt).values())


def _runs_code(opt: Optimizer) -> bool:
    """Whether a step of it runs hooks, or another optimizer: one around it was not made by torch's ``__init__``."""
    return bool(
        "_optimizer_step_pre_hooks" not in vars(opt)
        or opt._optimizer_step_pre_hooks
        or opt._optimizer_step_post_hooks
        or optimizer._global_optimizer_pre_hooks
        or optimizer._global_optimizer_post_hooks
    )


def acts_on_parameters(function: Any, leaves: Iterable[Any]) -> bool:
    """Whether a call is one of these: they act on parameters and their gradients, and know those that are shards."""
    is_step = any(isinstance(leaf, Optimizer) for leaf in leaves)
    return is_step or function is clear_grads or getattr(function, "__module__", "") == clip_grad.__name__


def clear_grads(params: list[torch.Tensor], set_to_none: bool) -> None:
    """Clears gradients as ``zero_grad`` of optimizers and modules does."""
    for param in params:
        if param.grad is None:
            continue
        if set_to_none:
            param.grad = None
        else:
            if param.grad.grad_fn is not None:
                param.grad.detach_()
            else:
                param.grad.requires_grad_(False)
            param.grad.zero_()


def _zero_grad_of_optimizer(plain: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        run = CURRENT.run
        if run is None:
            plain(self, set_to_none)
        elif is_looked_into():
            run.unrecorded(plain, (self, set_to_none), {}, _LOOKED_INTO)
        else:
            params = [param for group in self.param_groups for param in group["params"]]
            run.called(clear_grads, (params, bool(set_to_none)), {})

    return zero_grad


def _zero_grad_of_module(plain: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        run = CURRENT.run
        if run is None:
            plain(self, set_to_none)
        elif is_looked_into():
            run.unrecorded(plain, (self, set_to_none), {}, _LOOKED_INTO)
        else:
            run.called(clear_grads, (list(self.parameters()), bool(set_to_none)), {})

    return zero_grad


def _clip(plain: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        run = CURRENT.run
        if run is None:
            return plain(parameters, *args, **kwargs)
        if is_looked_into():
            return run.unrecorded(plain, (parameters, *args), kwargs, _LOOKED_INTO)
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        return run.called(plain, (params, *args), kwargs)

    return clip


def _module(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = CURRENT.run
        if run is not None:
            return run.called_module(plain, self, args, kwargs)
        for thread, other in list(RUNS.items()):
            if thread != threading.get_ident():
                other.before_another_thread_calls(self)
        return plain(self, *args, **kwargs)

    return call


def _module_made(plain: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        run = CURRENT.run
        if run is not None:
            run.note_made(self)
        plain(self, *args, **kwargs)

    return init


def _parameter(plain: Callable[..., Any]) -> Callable[..., Any]:
    def make(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        run = CURRENT.run
        if run is not None and isinstance(data, Handle):
            run.flush("a result becomes a parameter")  # which is one for good, so it needs its numbers
        return plain(cls, data, requires_grad)

    return make


def _draws_told(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        run = CURRENT.run
        if run is not None:
            run.before_draws_are_told(plain)
        return plain(*args, **kwargs)

    return call


def _ranks_communicate(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        run = CURRENT.run
        if run is not None:
            run.before_ranks_communicate(plain)
        return plain(*args, **kwargs)

    return call


def _block_ended(plain: Callable[..., Any]) -> Callable[..., Any]:
    def leave(*args: Any) -> Any:
        result = plain(*args)
        if CURRENT.run is not None:
            block_may_have_ended()
        return result

    return leave


def _apply(plain: Callable[..., Any]) -> Callable[..., Any]:
    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        run = CURRENT.run
        if run is None:
            return plain(function, *args, **kwargs)

        def at_once(call: nn.Module | None, *args: Any, **kwargs: Any) -> Any:
            return run.unrecorded(plain, (function, *args), kwargs, f"{function.__name__} is an autograd.Function")

        call = run.call_of(function)
        return at_once(None, *args, **kwargs) if call is None else run.called_module(at_once, call, args, kwargs)

    return apply
