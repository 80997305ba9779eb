"""Records of the step cache: what is looked up, what is found, what is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wholestep.capture.bind.captured import BindingSpec, Captured
from wholestep.capture.reach.arguments import ArgumentSize
from wholestep.capture.reach.train_state import CutState
from wholestep.capture.sizes.size_symbols import SavedSizes
from wholestep.ir.program import Program, Stage
from wholestep.lower.base.protocol import Backend
from wholestep.runtime.compression_state import CompressionState
from wholestep.runtime.distributed.world import World
from wholestep.runtime.options import Options

Line = tuple[str, str]
"""One fact: its name and its value."""
Fingerprint = Mapping[str, tuple[Line, ...]]
"""Lines by subject, in order: what a compiled step depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The facts about a compiled step that are read without running any of it."""

    step: str
    """``module:qualified name`` of the user's function."""
    fingerprint: Fingerprint
    """Facts that must be the same in the process that loads it; known before anything is traced."""
    environment: Fingerprint
    """Further facts: files, packages, environment variables, the calibration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """The part of a compiled step that is pickled."""

    programs: Mapping[str, bytes]
    spec: BindingSpec
    moving: tuple[ArgumentSize, ...]
    """The dims that were to be symbols when it was captured."""
    sizes: SavedSizes | None
    """Those that are, and on what conditions; None where no size moves."""
    constant: tuple[Line, ...]
    """The arguments whose sizes are constants: the facts leave out the size of a dim that was to move."""
    plan: str
    choices: Mapping[str, Any]
    """Rank 0's answers, by question."""
    kernels: tuple[bytes | None, ...]
    """Compiled code of the backend, a blob per segment."""
    options: Options | None
    """Options of `compile`, without the mesh; None in the cache, where the process that looks has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepToSave:
    """A compiled step, before it is serialized."""

    lookup: CacheLookup
    captured: Captured
    programs: Mapping[Stage, Program]
    plan: str
    choices: Mapping[str, Any]
    kernels: tuple[bytes | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStep:
    """A saved step that fits, tied to live objects."""

    captured: Captured
    programs: Mapping[Stage, Program]
    plan: str
    choices: Mapping[str, Any]
    kernels: tuple[bytes | None, ...]
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLookup:
    """The outcome of a lookup in the step cache, before a capture."""

    fingerprint: Fingerprint | None
    """The facts that the step depends on; None where another process could not compare them."""
    step: CachedStep | None
    why_not: str
    """Why there is no step; empty where there is one."""
    moving: tuple[ArgumentSize, ...] = ()
    """Dims of arguments of which the facts do not say the size."""

    def without_step(self, why_not: str) -> CacheLookup:
        """The same as a miss; undoes what binding the saved step has changed."""
        if self.step is not None:
            self.step.captured.undo()
        return replace(self, step=None, why_not=why_not)

    def without_kernels(self) -> CacheLookup:
        """The same without the bytes of kernels, which the backend has by then."""
        return self if self.step is None else replace(self, step=replace(self.step, kernels=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContext:
    """The facts that a compiled step depends on besides the objects of its call."""

    options: Options
    world: World
    backend: Backend
    compression: CompressionState | None
    choices: Mapping[str, Any]
    """Rank 0's answers so far, by question."""
    cut_state: CutState | None = None
    """Of a strategy that shards the state of optimizers: what it does with state that a first call creates."""
