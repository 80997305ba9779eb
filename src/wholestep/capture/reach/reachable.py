"""Reachable: everything that a step can reach, with the names under which it does."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from wholestep.capture.python import code_names
from wholestep.capture.python.attribute_access import HiddenThing, WatchedObject
from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.scalars.symbol_views import BUILTINS


@dataclass(slots=True)
class Reachable:
    """Everything that a step can reach, with the names under which it does."""

    modules: dict[int, tuple[str, nn.Module]] = field(default_factory=dict)
    """Root modules only; their children come with them. Of a DistributedDataParallel, the module inside."""
    wrappers: dict[int, tuple[str, DistributedDataParallel]] = field(default_factory=dict)
    """Every DistributedDataParallel."""
    optimizers: dict[int, tuple[str, Optimizer]] = field(default_factory=dict)
    schedulers: list[tuple[str, Any]] = field(default_factory=list)
    tensors: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Loose tensors: neither parameter nor buffer of a module, nor optimizer state, nor an argument."""
    scalers: list[tuple[str, GradScaler]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    generators: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """Random generators, of torch and others."""
    iterators: dict[int, str] = field(default_factory=dict)
    """Names of what has a next item, by id."""
    hidden: list[HiddenThing] = field(default_factory=list)
    """What has a state that nobody can look at."""
    caches: list[tuple[str, Any]] = field(default_factory=list)
    """Functions that ``functools.lru_cache`` has made."""
    compiled: list[str] = field(default_factory=list)
    """Names of what torch.compile has made of modules and functions."""
    objects: dict[int, WatchedObject] = field(default_factory=dict)
    """Plain objects, by id."""
    codes: list[types.CodeType] = field(default_factory=list)
    """The user's code that the step can reach, hooks included."""
    builtin_scopes: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    """Globals of that code, by id, where it names one of `BUILTINS`, with the name."""

    def add_code(self, function: types.FunctionType) -> None:
        """Takes up the code of a function of the user, with the functions that it makes."""
        codes, scope = list(code_names.codes(function.__code__)), function.__globals__
        self.codes += codes
        for name in BUILTINS.keys() - scope.keys():
            if any(name in code.co_names for code in codes):
                self.builtin_scopes[id(scope), name] = scope
