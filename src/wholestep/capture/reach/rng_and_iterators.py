"""Random generators, iterators and locks that a step reaches: what it may not advance or take in a trace.

A trace asks once, and what it was given would be frozen in the graph. Torch's draws are operators, with the generator
that they draw from, so those come out right; to seed a generator, or to draw from one of Python's, is no operator.

Note: who puts a generator back
    A step may draw and leave the state that there was: by what it has read itself, or by the same seed in every call.
    So it does not suffice to compare states. Of torch's see `_TorchGenerator`, of numpy's `_NumpyGenerator`; what
    Python's do are calls of C functions, which are watched (`capture/tracing/call_watch.py`).
"""

from __future__ import annotations

import builtins
import random
import re
import secrets
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.fx as fx

from wholestep.capture.python import user_frame
from wholestep.capture.python.attribute_access import HiddenThing
from wholestep.capture.python.code_lines import user_of
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.capture.reach import library_globals
from wholestep.errors import CaptureError
from wholestep.ir import node_meta
from wholestep.ir.ops import rng_state

KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Types of generators."""

LOCKS = (type(threading.Lock()), type(threading.RLock()))
"""Types of locks."""


@dataclass(slots=True)
class _Generator:
    """A generator, and the state that it has while no one uses it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    held: Any = None

    def watch(self) -> None:
        """Begins to watch it."""
        self.held = self.read()

    def restore(self) -> bool:
        """Gives it the state that it had. Whether somebody has used it."""
        if changed := not _same(self.held, self.read()):
            self.write(self.held)
        return changed

    def sentence(self) -> str:
        """What the step did to it, and what to do instead."""
        return draws(self.name)


def draws(name: str) -> str:
    """Why a step that draws from a generator is no graph."""
    return (
        f"The step draws from {name}: one draw would be frozen in the graph. "
        f"Draw with torch (torch.rand), or draw outside the step and pass the number as a tensor."
    )


def uses(name: str, method: str) -> str:
    """Why a step that calls a method of a generator is no graph."""
    if method in ("manual_seed", "seed", "set_state"):
        return (
            f"The step seeds {name}. That would happen once, while capturing, and never again. Seed it "
            f"outside the step. To draw the same numbers twice, read torch.get_rng_state() and set it again with "
            f"torch.set_rng_state()."
        )
    if method in ("initial_seed", "get_state"):
        return (
            f"The step asks {name} for its seed or state ({method}), which would be frozen in the graph. Ask it "
            f"outside the step and pass the number as a tensor."
        )
    return draws(name)


class _TorchGenerator(_Generator):
    """One of torch. Where it draws on the CPU, it has a state meanwhile that no step gives it."""

    def __init__(self, name: str, thing: torch.Generator) -> None:
        super().__init__(name, thing.get_state, thing.set_state)
        self._thing, self._expected = thing, torch.empty(0)

    def watch(self) -> None:
        super().watch()
        if self._thing.device.type == "cpu":
            self._thing.manual_seed(secrets.randbits(60))
        self._expected = self.read()

    def restore(self) -> bool:
        changed = not torch.equal(self._expected, self.read())
        super().restore()
        return changed

    def sentence(self) -> str:
        return uses(self.name, "manual_seed")


class _NotingLock:
    """A lock that notes whether the thread which made it has taken it."""

    def __init__(self) -> None:
        self._lock, self._thread, self.taken = threading.RLock(), threading.get_ident(), False

    def __enter__(self) -> bool:
        self.taken |= threading.get_ident() == self._thread
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)


class _NumpyGenerator(_Generator):
    """One of numpy. Meanwhile it draws from a copy of its bits, whose lock it takes for all that it does."""

    def __init__(self, name: str, thing: np.random.RandomState | np.random.Generator) -> None:
        self._thing: Any = thing
        self._bits: Any = thing._bit_generator  # type: ignore[union-attr]
        self._lock: _NotingLock | None = None
        if isinstance(thing, np.random.RandomState):
            super().__init__(name, lambda: thing.get_state(legacy=False), thing.set_state)
        else:
            super().__init__(name, lambda: self._bits.state, lambda state: setattr(self._bits, "state", state))

    def watch(self) -> None:
        super().watch()
        lock, kind = _NotingLock(), type(self._bits)
        try:
            # numpy knows states by the name of the class.
            copy = type(kind.__name__, (kind,), {"lock": lock})(0)
            copy.state = self._bits.state
        except Exception:  # bits of somebody's own, which are compared alone
            return
        self._use(copy)
        self._lock = lock
        lock.taken = False

    def _use(self, bits: Any) -> None:
        self._thing.__init__(bits)
        if isinstance(self._thing, np.random.RandomState):  # which has more than its bits
            self.write(self.held)

    def restore(self) -> bool:
        if self._lock is None:
            return super().restore()
        self._use(self._bits)
        return super().restore() or self._lock.taken


def generators_of_torch() -> list[tuple[str, torch.Generator]]:
    """Those that torch draws from where it is given none, with names."""
    found = [("torch's own generator", torch.default_generator)]
    if torch.cuda.is_initialized():
        found += [(f"the generator of cuda:{i}", one) for i, one in enumerate(torch.cuda.default_generators)]
    return found


class Generators:
    """The generators that a step may draw from, as they are before it is traced."""

    def __init__(self, found: Mapping[int, tuple[str, Any]]) -> None:
        """`found`: those that the step reaches, with names, by id."""
        self._held = [
            _Generator("Python's random generator", random.getstate, random.setstate),
            _NumpyGenerator("Python's numpy.random generator", np.random.mtrand._rand),
            *(_generator(name, thing) for name, thing in (*generators_of_torch(), *found.values())),
        ]

    def watch(self) -> None:
        """Begins to watch them."""
        for one in self._held:
            one.watch()

    def restore(self) -> str:
        """Gives all of them the state that they had. Says what the step did to one of them; "" if nothing."""
        changed = [one for one in self._held if one.restore()]
        return changed[0].sentence() if changed else ""


def _generator(name: str, thing: Any) -> _Generator:
    if isinstance(thing, torch.Generator):
        return _TorchGenerator(name, thing)
    if isinstance(thing, (np.random.RandomState, np.random.Generator)):
        return _NumpyGenerator(name, thing)
    return _Generator(name, thing.getstate, thing.setstate)


def _same(a: Any, b: Any) -> bool:
    """Whether two states of generators are equal, arrays in tuples and dicts among them."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


def check_made(module: fx.GraphModule, known: Mapping[int, tuple[str, Any]]) -> None:
    """Raises CaptureError where a traced graph draws from a generator that the step itself has made."""
    there = {_native_id(thing) for _, thing in known.values() if isinstance(thing, torch.Generator)}
    there.add(_native_id(torch.default_generator))
    for node in module.graph.nodes:
        made = node.kwargs.get("generator")
        if isinstance(made, fx.Node):  # a constant of the graph
            made = getattr(module, str(made.target), None)
        if isinstance(made, torch.Generator) and _native_id(made) not in there:
            raise CaptureError(
                f"The step could not be captured at {node_meta.origin(node).source}\nit draws from a torch.Generator "
                "that "
                f"it makes itself, or that wholestep could not find in its arguments, closure, globals or attributes. "
                f"It would be made once, while capturing, and every call would draw on from it. Make it outside the "
                f"step."
            )


def _native_id(generator: torch.Generator) -> int:
    """The address of torch's generator: a graph holds another Python object for the same one."""
    return int(generator._cdata)  # type: ignore[attr-defined,unused-ignore]


def why_hidden(thing: Any) -> str:
    """Why a trace may not use a thing, an iterator of C, a variable of a context or a lock; "" if it may."""
    if isinstance(thing, LOCKS):
        return (
            ""
            if _is_of_library(thing)
            else (
                "which guards what another thread may change meanwhile. While capturing, that would be undone together "
                "with what the step does: take it outside of the step"
            )
        )
    ways = [vars(base)["__next__"] for base in type(thing).__mro__ if "__next__" in vars(base)]
    # What is Python code has its state in attributes. It may call the one of C that it stands for.
    is_hidden = not all(isinstance(one, types.FunctionType) for one in ways)
    if not is_hidden and not isinstance(thing, ContextVar):
        return ""
    return (
        "of which nobody can see where it stands. What it gives while capturing, every call would use again: read it "
        "outside the step, and pass what the step needs as an argument"
    )


def _is_of_library(lock: Any) -> bool:
    """Whether a lock is a global of a library, as `logging` has one: it guards what that library alone knows."""
    modules = [one for one in sys.modules.copy().values() if isinstance(one, types.ModuleType)]
    held = (vars(one).copy().values() for one in modules if library_globals.belong_to_library(vars(one)))
    return any(one is lock for values in held for one in values)


def hidden_error(one: HiddenThing, codes: Sequence[types.CodeType]) -> CaptureError:
    """Why a step that comes to a thing of `Reachable.hidden` is refused."""
    line = user_of({re.split(r"[.\[]", one.name)[-1], re.split(r"[.\[]", one.name)[0]}, codes)
    return CaptureError(
        f"The step could not be captured{line}\nit reaches {one.name}, a {type(one.thing).__name__}, {one.why}."
    )


def refuse_hidden(found: Sequence[HiddenThing], codes: Sequence[types.CodeType]) -> None:
    """Raises CaptureError for hidden things that a step may come to without asking an object that would tell."""
    for one in found:
        if one.attribute is None:
            raise hidden_error(one, codes)


@contextmanager
def kept_iterators(known: Mapping[int, str]) -> Iterator[None]:
    """While open, ``next`` refuses iterators in `known`, which has names by id."""
    original = builtins.next

    def refusing(iterator: Any, *default: Any) -> Any:
        if id(iterator) in known:
            raise CaptureError(
                f"The step could not be captured at {user_frame.current_line()}\nit takes the next item of "
                f"{known[id(iterator)]}, a {type(iterator).__name__}. That would happen once, while capturing, and "
                f"every call would use that item again. Take it outside the step and pass it as an argument."
            )
        return original(iterator, *default)

    with patch.object(builtins, "next", on_this_thread(refusing, original)):
        yield


@contextmanager
def traced_generator() -> Iterator[None]:
    """While open, ``torch.get_rng_state`` and ``set_rng_state`` (CPU and CUDA) are operations of the graph, for the
    thread that opened it."""

    def name(device: Any) -> str:
        return f"cuda:{device}" if isinstance(device, int) else str(device)

    on_cpu: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda: rng_state.GET("cpu"),
        "set_rng_state": lambda new_state: rng_state.SET(new_state, "cpu"),
    }
    on_gpu: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda device="cuda": rng_state.GET(name(device)),
        "set_rng_state": lambda new_state, device="cuda": rng_state.SET(new_state, name(device)),
    }
    with ExitStack() as stack:
        for modules, functions in (((torch, torch.random), on_cpu), ((torch.cuda, torch.cuda.random), on_gpu)):
            for module, (key, function) in product(modules, functions.items()):
                traced = on_this_thread(function, getattr(module, key))
                stack.enter_context(patch.object(module, key, traced))
        yield
