"""Warm starts: a step that another process has captured and compiled, bound to the objects of this one.

The new process walks over its objects, as every capture does, and writes down what it finds
(`api/cache/object_fingerprint.py`). If that and everything else a compiled step depends on is as it was, the ties of
the saved step are tied to these objects: nothing is traced, planned or compiled. Whatever is different is a reason not
to, with a name.

Every rank keeps a file of its own: a step may look at its rank, in Python or in the environment, and then traces of two
ranks differ where no fingerprint tells.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import platform
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wholestep.api.cache import artifact
from wholestep.api.cache.artifact import Fingerprint, Header, Line
from wholestep.api.cache.object_fingerprint import NotComparable, object_fingerprint
from wholestep.capture.bind.bind import bind
from wholestep.capture.bind.captured import BindingSpec, Captured, resolve_scalars
from wholestep.capture.guards.environment import Environment, edited, source_digest, torch_switches
from wholestep.capture.reach.step_context import StepContext
from wholestep.cost.calibration import calibrate
from wholestep.errors import ArtifactError, WholestepError
from wholestep.ir import serializer
from wholestep.ir.program import Program, Stage
from wholestep.lower.auto_backend import Backend
from wholestep.runtime.compression_state import CompressionState
from wholestep.runtime.distributed.rendezvous import Rendezvous
from wholestep.runtime.distributed.world import World
from wholestep.runtime.options import Options, data_axis
from wholestep.runtime.shared_costs import COSTS, marks_of

log = logging.getLogger("wholestep")

CACHE = "WHOLESTEP_CACHE"
"""Variable of the environment that says with 0 that steps are neither kept nor looked for."""


class Programs(Mapping[Stage, Program]):
    """The program at each stage, read when it is asked for. Raises ArtifactError for one that cannot be read here."""

    def __init__(self, written: Mapping[str, bytes]) -> None:
        self._written, self._read = dict(written), dict[Stage, Program]()

    def __getitem__(self, stage: Stage) -> Program:
        if stage not in self._read:
            self._read[stage] = _read(self._written[stage.value], f"the {stage.value} program")
        return self._read[stage]

    def __iter__(self) -> Iterator[Stage]:
        return iter(map(Stage, self._written))

    def __len__(self) -> int:
        return len(self._written)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """What is pickled of a compiled step."""

    programs: Mapping[str, bytes]
    spec: BindingSpec
    plan: str
    choices: Mapping[str, Any]
    """What rank 0 had answered, by question."""
    kernels: tuple[bytes | None, ...]
    """What the backend has compiled."""
    options: Options | None
    """What `compile` was asked for, less the mesh; None in the cache, where the process that looks has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStep:
    """A saved step that fits, tied to live objects."""

    captured: Captured
    programs: Programs
    plan: str
    choices: Mapping[str, Any]
    kernels: tuple[bytes | None, ...]
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLookup:
    """What was seen before a capture."""

    fingerprint: Fingerprint | None
    """What the step depends on; None where another process could not tell."""
    ready: CachedStep | None
    why_not: str
    """Why there is nothing ready; empty where there is."""

    def dropped(self, why_not: str) -> CacheLookup:
        """The same without what was ready."""
        if self.ready is not None:
            self.ready.captured.undo()
        return CacheLookup(fingerprint=self.fingerprint, ready=None, why_not=why_not)

    def given(self) -> CacheLookup:
        """The same without the bytes of kernels, which the backend has by then."""
        return self if self.ready is None else replace(self, ready=replace(self.ready, kernels=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContext:
    """What surrounds a call besides its objects."""

    options: Options
    world: World
    backend: Backend
    comm: CompressionState | None
    choices: Mapping[str, Any]
    """What the ranks have agreed on so far."""
    moved: Collection[Hashable] = ()
    """Places of tensors that are others in other calls."""


class StepCache:
    """The saved steps of one compiled step."""

    def __init__(self, step: Callable[..., Any], path: Path | None = None) -> None:
        """`path`: the file to load, which may be trusted; None means the automatic cache."""
        self._step, self._path = step, path
        self.name = name_of(step)

    @property
    def is_asked_for(self) -> bool:
        """Whether the user has named a file: then what does not fit is an error."""
        return self._path is not None

    def agreed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], setting: CacheContext, first: Rendezvous | None
    ) -> CacheLookup:
        """`look`, where all ranks use what they found, or none does. `first`: they meet there in their first call.

        Raises ArtifactError where the user has named a file for the first call, and it does not fit.
        """
        world, name = setting.world, self.name.rpartition(".")[2].rpartition(":")[2]
        look = self.look(args, kwargs, setting, may_load=first is not None or world.size == 1)
        why_not = look.why_not
        if first is not None:
            try:
                why_not = first.objection(why_not, world, f"the look for a saved {name}")
            except WholestepError:
                look.dropped("")
                raise
        if why_not:
            look = look.dropped(why_not)
        if look.ready is None:
            if self.is_asked_for and first is not None:
                raise ArtifactError(look.why_not)
            log.info("%s is captured: %s", name, look.why_not)
        return look

    def look(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], setting: CacheContext, *, may_load: bool
    ) -> CacheLookup:
        """Looks for a saved step that fits this call. Nothing of the user's is changed."""
        try:
            with StepContext(self._step, args, kwargs, moved=setting.moved) as context:
                fingerprint = _fingerprint(context, setting)
                try:
                    if self._path is None and not is_enabled():
                        raise ArtifactError(f"{CACHE} is 0.")
                    if not may_load:
                        raise ArtifactError("only the first signature of a step is looked for on several ranks.")
                    ready = self._ready(context, fingerprint, setting)
                    return CacheLookup(fingerprint=fingerprint, ready=ready, why_not="")
                except ArtifactError as error:
                    context.lazy.take_back()
                    return CacheLookup(fingerprint=fingerprint, ready=None, why_not=str(error))
        except NotComparable as error:
            return CacheLookup(
                fingerprint=None, ready=None, why_not=f"{error}. It cannot be compared in another process."
            )
        except WholestepError as error:  # the capture will say it better
            return CacheLookup(fingerprint=None, ready=None, why_not=str(error))
        except Exception as error:  # a cache may fail in a hundred ways, and none of them is a reason not to train
            log.warning("the look for a saved %s failed", self.name, exc_info=True)
            return CacheLookup(fingerprint=None, ready=None, why_not=f"{type(error).__name__}: {error}")

    def _ready(self, context: StepContext, fingerprint: Fingerprint, setting: CacheContext) -> CachedStep:
        """The saved step that fits. Raises ArtifactError."""
        path = self._path or self._cached(fingerprint)
        header, data = artifact.read(path)
        if why_not := artifact.difference(header.fingerprint, fingerprint):
            raise ArtifactError(f"{path} was saved for something else. {why_not}.")
        body = _loaded(path, data)
        costs = _costs_now(setting) if setting.world.rank == 0 else body.choices[COSTS]
        now = _outside_lines(_outside_of(header).now(), costs)
        if why_not := artifact.difference(header.outside, now):
            raise ArtifactError(f"{path} was saved for something else. {why_not}.")
        programs = Programs(body.programs)
        programs[Stage.SCHEDULED]  # what runs can be read, or nothing is begun
        context.count(resolve_scalars(body.spec.places, context))
        captured = bind(partial(programs.__getitem__, Stage.CAPTURED), body.spec, context)
        if why_not := captured.guards.why_not(context.leaves, context.spec):
            raise ArtifactError(
                f"{path} was saved for another state of the training. {why_not[0].upper()}{why_not[1:]}."
            )
        return CachedStep(
            captured=captured, programs=programs, plan=body.plan, choices=body.choices, kernels=body.kernels, path=path
        )

    def _cached(self, fingerprint: Fingerprint) -> Path:
        """The file of the cache with this fingerprint. Raises ArtifactError, with what the newest of others lacks."""
        folder = artifact.make_folder()
        path = folder / artifact.key_of(self._name_in_cache(fingerprint), fingerprint)
        if path.exists():
            artifact.check_private(path)
            return path
        prefix = artifact.prefix_of(self._name_in_cache(fingerprint))
        for other in artifact.newest_first(folder.glob(f"{prefix}*")):
            why_not = artifact.difference(artifact.read(other)[0].fingerprint, fingerprint)
            raise ArtifactError(f"{other} was saved for something else. {why_not}.")
        raise ArtifactError(f"{folder} holds no {self.name}.")

    def _name_in_cache(self, fingerprint: Fingerprint) -> str:
        """What files of the cache are kept by: the step and the rank, so that ranks do not push out each other's."""
        return f"{self.name} {dict(fingerprint['the mesh'])['the rank']}"

    def write(self, path: Path, entry: StepToSave, setting: CacheContext) -> None:
        """Writes a step to a file of the user's, one per rank. Raises ArtifactError."""
        header, body = written(self.name, entry, replace(setting.options, mesh=None))
        try:
            artifact.write(of_rank(path, setting.world), header, body)
        except OSError as error:
            raise ArtifactError(f"{path} cannot be written: {error.strerror or error}.") from error

    def keep(self, saved: Callable[[], StepToSave]) -> None:
        """Writes a step to the cache, if it is on and the step can be written; else the log says why."""
        if self._path is not None or not is_enabled():
            return
        try:
            header, body = written(self.name, saved())
            folder, name = artifact.make_folder(), self._name_in_cache(header.fingerprint)
            artifact.write(folder / artifact.key_of(name, header.fingerprint), header, body)
            artifact.forget_old(folder.glob(f"{artifact.prefix_of(name)}*"))
        except ArtifactError as error:
            log.info("%s is not kept for other processes: %s", self.name, error)
        except Exception as error:  # as above
            log.warning(
                "%s is not kept for other processes: %s: %s", self.name, type(error).__name__, error,
                exc_info=log.isEnabledFor(logging.DEBUG),
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepToSave:
    """What there is to save of a compiled step."""

    look: CacheLookup
    captured: Captured
    programs: Mapping[Stage, Program]
    plan: str
    choices: Mapping[str, Any]
    kernels: tuple[bytes | None, ...]


def is_enabled() -> bool:
    """Whether steps are kept for other processes."""
    return os.environ.get(CACHE, "1") != "0"


def name_of(step: Callable[..., Any]) -> str:
    """``module:qualified name`` of a function, by which another process finds it."""
    return f"{getattr(step, '__module__', '')}:{getattr(step, '__qualname__', type(step).__qualname__)}"


def of_rank(path: Path, world: World) -> Path:
    """The file of this rank: ``path`` itself on one process."""
    return path if world.size == 1 else path.with_name(f"{path.name}.{world.rank}of{world.size}")


def options_of(path: Path, *, trusted: bool) -> tuple[Options, str]:
    """The options of a saved step, and its name. Raises ArtifactError."""
    artifact.check_trusted(path, trusted=trusted)
    header, data = artifact.read(path)
    options = _loaded(path, data).options
    if options is None:
        raise ArtifactError(
            f"{path} belongs to the automatic cache, which has no options. Load what step.save(path) wrote."
        )
    return options, header.step


def written(name: str, entry: StepToSave, options: Options | None = None) -> tuple[Header, bytes]:
    """A compiled step as header and body of a file. Raises ArtifactError for one that means nothing elsewhere."""
    captured = entry.captured
    if entry.look.fingerprint is None:
        raise ArtifactError(f"It cannot be saved: {entry.look.why_not}")
    if captured.spec.foreign:
        raise ArtifactError(
            "It cannot be saved: it reads a tensor that belongs to no argument, closure, global or attribute, and that "
            "another process does not have. Pass the object that holds it as an argument of the step."
        )
    if captured.spec.calls_scheduler:
        raise ArtifactError(
            "It cannot be saved: it calls a scheduler, and whether that of another process is the same is not "
            "compared. Call scheduler.step() outside the step."
        )
    if not captured.settled:
        raise ArtifactError("It cannot be saved: its first run set something up that its graph does not do again.")
    try:
        body = serializer.dumps(
            _Body(
                programs={stage.value: serializer.dumps(program) for stage, program in entry.programs.items()},
                spec=captured.spec, plan=entry.plan, choices=dict(entry.choices), kernels=entry.kernels,
                options=options,
            )
        )  # fmt: skip
    except serializer.NotPortable as error:
        raise ArtifactError(f"It cannot be saved: {error}.") from error
    outside = Environment.seen(captured.spec.environment)
    if (path := edited(outside.files)) is not None:
        raise ArtifactError(f"It cannot be saved: {path} was written while this process ran, and may not be what runs.")
    lines = _outside_lines(outside, entry.choices[COSTS])
    return Header(step=name, fingerprint=entry.look.fingerprint, outside=lines), body


def _read(data: bytes, what: str) -> Any:
    try:
        return serializer.loads(data)
    except (pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{what} holds what this process does not know: {type(error).__name__}: {error}."
        ) from error


def _loaded(path: Path, data: bytes) -> _Body:
    body = _read(data, str(path))
    if not isinstance(body, _Body):
        raise ArtifactError(f"{path} holds a {type(body).__name__} and no step.")
    return body


def _fingerprint(context: StepContext, setting: CacheContext) -> Fingerprint:
    """What a compiled step depends on, as far as it is known before anything is traced. Raises NotComparable."""
    options, world, comm = setting.options, setting.world, setting.comm
    chosen = {"strategy": options.strategy, "backend": options.backend, "passes": options.passes}
    axis = data_axis(world, options.mesh)
    mesh = [("the axis", str(axis)), ("the number of ranks", str(world.size)), ("the rank", str(world.rank))]
    state = (
        [("what compression does next", f"{comm}, {'on' if comm.started else 'not yet'}")] if comm is not None else []
    )
    return {
        "the build": tuple(_build(world)),
        "the mesh": tuple(mesh),
        "the backend": (("its kind", type(setting.backend).__name__), *setting.backend.marks()),
        "the switches of torch": tuple(torch_switches()),
        "compression": tuple(state),
        "the tensors that move": tuple(context.moved_places()),
        "the step": tuple(object_fingerprint(context, chosen)),
    }


def _build(world: World) -> list[Line]:
    return [
        ("wholestep", source_digest()),
        ("Python", sys.version),
        ("torch", f"{torch.__version__} {torch.version.git_version} CUDA {torch.version.cuda} HIP {torch.version.hip}"),
        ("the capability of the CPU", f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"),
        *((f"the {name} of the host", str(mark)) for name, mark in marks_of(world).items()),
    ]


def _outside_of(header: Header) -> Environment:
    lines = {subject: dict(held) for subject, held in header.outside.items()}
    return Environment(files=lines["files"], packages=lines["packages"], environment=lines["environment"])


def _outside_lines(outside: Environment, costs: Mapping[str, Any]) -> Fingerprint:
    """What has to be the same besides what a portrait shows."""
    digest = hashlib.sha256(json.dumps(costs, sort_keys=True).encode()).hexdigest()
    return {
        "files": tuple(outside.files.items()),
        "packages": tuple(outside.packages.items()),
        "environment": tuple(outside.environment.items()),
        "predicted costs": (("their source", str(costs["source"])), ("their numbers", digest)),
    }


def _costs_now(setting: CacheContext) -> Mapping[str, Any]:
    """The costs that a plan made now would be made with, on the rank that says which."""
    if COSTS in setting.choices:
        known: Mapping[str, Any] = setting.choices[COSTS]
        return known
    return calibrate.to_json(calibrate.find(setting.world.device, marks_of(setting.world)))
