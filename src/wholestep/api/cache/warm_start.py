"""Warm starts: a step that another process has captured and compiled, bound to the objects of this one.

The new process walks over its objects, as every capture does, and writes their fingerprint
(`api/cache/object_fingerprint.py`). If it and everything else a compiled step depends on is as it was, the saved step
is bound to these objects: nothing is traced, planned or compiled. Whatever is different is a named reason not to.

Every rank keeps a file of its own: a step may look at its rank, in Python or in the environment, and then traces of two
ranks differ where no fingerprint tells.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from wholestep.api.cache import artifact
from wholestep.api.cache.fingerprint import costs_now, difference, environment_lines, environment_of, fingerprint_of
from wholestep.api.cache.object_fingerprint import NotComparable, layout_text, mode_lines
from wholestep.api.cache.records import (
    CacheContext,
    CachedStep,
    CacheLookup,
    Fingerprint,
    Header,
    Line,
    SavedStep,
    StepToSave,
)
from wholestep.capture.bind.bind import bind
from wholestep.capture.bind.captured import Captured, resolve_scalars
from wholestep.capture.guards.argument_guards import TensorArgumentGuard
from wholestep.capture.guards.environment import Environment, edited
from wholestep.capture.guards.size_guards import SizeConditions, SizeGuard
from wholestep.capture.reach.arguments import ArgumentSize
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.sizes.size_symbols import RestoredSizes, SavedSizes
from wholestep.errors import ArtifactError, WholestepError
from wholestep.ir import serializer
from wholestep.ir.program import Program, Stage
from wholestep.ir.serializer import SavedShapes
from wholestep.runtime.distributed.rendezvous import Rendezvous
from wholestep.runtime.distributed.world import World
from wholestep.runtime.options import Options
from wholestep.runtime.shared_costs import COSTS

log = logging.getLogger("wholestep")

CACHE = "WHOLESTEP_CACHE"
"""Environment variable: with 0 steps are neither written to the cache nor looked up in it."""


class LazyPrograms(Mapping[Stage, Program]):
    """The program at each stage, read when it is asked for. Raises ArtifactError for one that cannot be read here."""

    def __init__(self, serialized: Mapping[str, bytes], shapes: SavedShapes | None = None) -> None:
        """`shapes`: as for `serializer.loads`."""
        self._serialized, self._programs, self._shapes = dict(serialized), dict[Stage, Program](), shapes

    def __getitem__(self, stage: Stage) -> Program:
        if stage not in self._programs:
            data, what = self._serialized[stage.value], f"the {stage.value} program"
            self._programs[stage] = _unpickled(data, what, self._shapes)
        return self._programs[stage]

    def __iter__(self) -> Iterator[Stage]:
        return iter(map(Stage, self._serialized))

    def __len__(self) -> int:
        return len(self._serialized)


class StepCache:
    """The saved steps of one compiled step."""

    def __init__(self, step: Callable[..., Any], path: Path | None = None) -> None:
        """`path`: the file to load, which may be trusted; None means the automatic cache."""
        self._step, self._path = step, path
        self.name = name_of(step)

    def lookup(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: CacheContext,
        first: Rendezvous | None,
        moving: Sequence[ArgumentSize] = (),
    ) -> CacheLookup:
        """The saved step that fits this call, where every rank has found one. Nothing of the user's is changed.

        Args:
            args, kwargs: of the call.
            context: what a step depends on besides.
            first: where the ranks meet in their first call; None in later ones, in which several ranks load nothing.
            moving: dims of arguments that are to be symbols in a trace of this call.

        Raises ArtifactError where the user has named a file for the first call, and it does not fit.
        """
        world, name = context.world, self.name.rpartition(".")[2].rpartition(":")[2]
        call = partial(StepContext, self._step, args, kwargs, cut_state=context.cut_state)
        lookup = self._lookup_on_this_rank(call, context, moving, may_load=first is not None or world.size == 1)
        why_not = lookup.why_not
        if first is not None:
            try:
                why_not = first.objection(why_not, world, f"the look for a saved {name}")
            except WholestepError:
                lookup.without_step("")
                raise
        if why_not:
            lookup = lookup.without_step(why_not)
        if lookup.step is None:
            if self._path is not None and first is not None:
                raise ArtifactError(lookup.why_not)
            log.info("%s is captured: %s", name, lookup.why_not)
        return lookup

    def _lookup_on_this_rank(
        self,
        call: Callable[..., StepContext],
        cache_context: CacheContext,
        moving: Sequence[ArgumentSize],
        *,
        may_load: bool,
    ) -> CacheLookup:
        try:
            if self._path is not None and may_load:
                moving = _saved_step(self._path, artifact.read(self._path)[1]).moving
            with call(moving) as context:
                fingerprint = fingerprint_of(context, cache_context)
                try:
                    if self._path is None and not is_enabled():
                        raise ArtifactError(f"{CACHE} is 0.")
                    if not may_load:
                        raise ArtifactError("only the first signature of a step is looked for on several ranks.")
                    step = self._load(context, fingerprint, cache_context, partial(call, moving))
                    return CacheLookup(fingerprint=fingerprint, step=step, why_not="", moving=tuple(moving))
                except ArtifactError as error:
                    context.lazy.discard()
                    return CacheLookup(fingerprint=fingerprint, step=None, why_not=str(error), moving=tuple(moving))
        except NotComparable as error:
            why_not = f"{error}. It cannot be compared in another process."
        except WholestepError as error:  # the capture will say it better
            why_not = str(error)
        except Exception as error:  # a cache may fail in a hundred ways, and none of them is a reason not to train
            log.warning("the look for a saved %s failed", self.name, exc_info=True)
            why_not = f"{type(error).__name__}: {error}"
        return CacheLookup(fingerprint=None, step=None, why_not=why_not)

    def _load(
        self, context: StepContext, fingerprint: Fingerprint, cache_context: CacheContext,
        again: Callable[[], StepContext],
    ) -> CachedStep:  # fmt: skip
        """The saved step that fits. Raises ArtifactError. `again` makes the context anew."""
        if self._path is not None:
            return self._load_file(self._path, context, fingerprint, cache_context)
        why_not: ArtifactError | None = None
        for number, path in enumerate(self._cache_paths(fingerprint)):  # of other sizes or branches: guards tell apart
            with again() if number else nullcontext(context) as fresh:  # a file leaves its numbers in the context
                try:
                    return self._load_file(path, fresh, fingerprint, cache_context)
                except ArtifactError as error:
                    fresh.lazy.discard()
                    why_not = why_not or error
        raise why_not or ArtifactError(f"{artifact.folder()} holds no {self.name}.")

    def _load_file(
        self, path: Path, context: StepContext, fingerprint: Fingerprint, cache_context: CacheContext
    ) -> CachedStep:
        header, data = artifact.read(path)
        if why_not := difference(header.fingerprint, fingerprint):
            raise ArtifactError(f"{path} was saved for something else. {why_not}.")
        body = _saved_step(path, data)
        costs = costs_now(cache_context) if cache_context.world.rank == 0 else body.choices[COSTS]
        now = environment_lines(environment_of(header).now(), costs)
        if why_not := difference(header.environment, now):
            raise ArtifactError(f"{path} was saved for something else. {why_not}.")
        sizes = None if body.sizes is None else RestoredSizes(body.sizes)
        programs = LazyPrograms(body.programs, sizes)
        programs[Stage.SCHEDULED]  # what runs can be read, or nothing is begun
        context.count(resolve_scalars(body.spec.reads.scalars, context))
        _move(context, body.sizes, path)
        captured = bind(partial(programs.__getitem__, Stage.CAPTURED), body.spec, context, sizes)
        if (layouts := _constant_layouts(captured)) != body.constant:  # guards are of what there is now
            captured.undo()
            raise ArtifactError(f"{path} was saved for arguments {body.constant}, not {layouts}.")
        if why_not := captured.guards.why_not(context.leaves, context.spec):
            raise ArtifactError(
                f"{path} was saved for another state of the training. {why_not[0].upper()}{why_not[1:]}."
            )
        return CachedStep(
            captured=captured, programs=programs, plan=body.plan, choices=body.choices, kernels=body.kernels, path=path
        )

    def _cache_paths(self, fingerprint: Fingerprint) -> list[Path]:
        """The files of the cache with this fingerprint. Raises ArtifactError, with what the newest of others lacks."""
        folder, name = artifact.make_folder(), self._name_in_cache(fingerprint)
        found = artifact.newest_first(folder.glob(f"{artifact.name_of_all(name, fingerprint)}*"))
        for path in found:
            artifact.check_private(path)
        if found:
            return found
        prefix = artifact.file_prefix(name)
        for other in artifact.newest_first(folder.glob(f"{prefix}*")):
            why_not = difference(artifact.read(other)[0].fingerprint, fingerprint)
            raise ArtifactError(f"{other} was saved for something else. {why_not}.")
        raise ArtifactError(f"{folder} holds no {self.name}.")

    def _name_in_cache(self, fingerprint: Fingerprint) -> str:
        """The step and the rank: ranks do not evict each other's files."""
        return f"{self.name} {dict(fingerprint['the mesh'])['the rank']}"

    def save(self, path: Path, entry: StepToSave, context: CacheContext) -> None:
        """Writes a step to a file of the user's, one per rank. Raises ArtifactError."""
        header, body = serialized(self.name, entry, replace(context.options, mesh=None))
        try:
            artifact.write(path_of_rank(path, context.world), header, body)
        except OSError as error:
            raise ArtifactError(f"{path} cannot be written: {error.strerror or error}.") from error

    def store(self, saved: Callable[[], StepToSave]) -> None:
        """Writes a step to the cache, if it is on and the step can be written; else the log says why."""
        if self._path is not None or not is_enabled():
            return
        try:
            entry = saved()
            header, body = serialized(self.name, entry)
            _refuse_moved_modes(header.fingerprint)
            folder, name = artifact.make_folder(), self._name_in_cache(header.fingerprint)
            plan = f"{entry.plan}{_conditions(entry.captured)}"
            artifact.write(folder / artifact.file_name(name, header.fingerprint, plan), header, body)
            artifact.evict_old(folder.glob(f"{artifact.file_prefix(name)}*"))
        except ArtifactError as error:
            log.info("%s is not kept for other processes: %s", self.name, error)
        except Exception as error:  # as above
            log.warning(
                "%s is not kept for other processes: %s: %s", self.name, type(error).__name__, error,
                exc_info=log.isEnabledFor(logging.DEBUG),
            )  # fmt: skip


def _refuse_moved_modes(before: Fingerprint) -> None:
    """Raises ArtifactError where a switch of torch was another one before the first call: the step has set it."""
    known = {line for lines in before.values() for line in lines}
    moved = [name for name, value in mode_lines() if (name, value) not in known]
    if moved:
        raise ArtifactError(f"It cannot be saved: it sets {' and '.join(moved)}, and its graph does not.")


def is_enabled() -> bool:
    """Whether steps are kept for other processes."""
    return os.environ.get(CACHE, "1") != "0"


def name_of(step: Callable[..., Any]) -> str:
    """``module:qualified name`` of a function, by which another process finds it."""
    return f"{getattr(step, '__module__', '')}:{getattr(step, '__qualname__', type(step).__qualname__)}"


def path_of_rank(path: Path, world: World) -> Path:
    """The file of this rank: ``path`` itself on one process."""
    return path if world.size == 1 else path.with_name(f"{path.name}.{world.rank}of{world.size}")


def saved_options(path: Path, *, trusted: bool) -> tuple[Options, str]:
    """The options of a saved step, and its name. Raises ArtifactError."""
    artifact.check_trusted(path, trusted=trusted)
    header, data = artifact.read(path)
    options = _saved_step(path, data).options
    if options is None:
        raise ArtifactError(
            f"{path} belongs to the automatic cache, which has no options. Load what step.save(path) wrote."
        )
    return options, header.step


def serialized(name: str, entry: StepToSave, options: Options | None = None) -> tuple[Header, bytes]:
    """A compiled step as header and body of a file. Raises ArtifactError for one that means nothing elsewhere."""
    captured = entry.captured
    if entry.lookup.fingerprint is None:
        raise ArtifactError(f"It cannot be saved: {entry.lookup.why_not}")
    if captured.spec.reads.foreign:
        raise ArtifactError(
            "It cannot be saved: it reads a tensor that belongs to no argument, closure, global or attribute, and that "
            "another process does not have. Pass the object that holds it as an argument of the step."
        )
    if captured.spec.reads.held_arguments:
        raise ArtifactError(
            "It cannot be saved: it reads a tensor of its arguments where an object holds it, too. Let it read the "
            "argument alone."
        )
    if captured.spec.reads.attributes:
        raise ArtifactError(
            f"It cannot be saved: it reads attributes by names that stand nowhere in its code "
            f"({', '.join(captured.spec.reads.attributes[:3])}), which are not compared in another process."
        )
    if not captured.settled:
        raise ArtifactError("It cannot be saved: its first run set something up that its graph does not do again.")
    try:
        body = serializer.dumps(
            SavedStep(
                programs={stage.value: serializer.dumps(program) for stage, program in entry.programs.items()},
                spec=captured.spec, moving=entry.lookup.moving, sizes=_sizes(captured),
                constant=_constant_layouts(captured), plan=entry.plan,
                choices=dict(entry.choices), kernels=entry.kernels,
                options=options,
            )
        )  # fmt: skip
    except serializer.NotPortable as error:
        raise ArtifactError(f"It cannot be saved: {error}.") from error
    environment = Environment.seen(captured.spec.reads.environment)
    if (path := edited(environment.files)) is not None:
        raise ArtifactError(f"It cannot be saved: {path} was written while this process ran, and may not be what runs.")
    lines = environment_lines(environment, entry.choices[COSTS])
    return Header(step=name, fingerprint=entry.lookup.fingerprint, environment=lines), body


def _size_conditions(captured: Captured) -> SizeConditions | None:
    return next((one.conditions for one in captured.guards.values if isinstance(one, SizeGuard)), None)


def _constant_layouts(captured: Captured) -> tuple[Line, ...]:
    """The tensors among the arguments of which no size moves."""
    guards = (one for one in captured.guards.arguments if isinstance(one, TensorArgumentGuard))
    layouts = (layout for one in guards for layout in one.layouts)
    return tuple((f"argument {leaf}", layout_text(description)) for leaf, _, description in layouts)


def _sizes(captured: Captured) -> SavedSizes | None:
    found = _size_conditions(captured)
    return None if found is None else found.saved()


def _conditions(captured: Captured) -> list[str]:
    found = _size_conditions(captured)
    return [] if found is None else found.texts()


def _move(context: StepContext, sizes: SavedSizes | None, path: Path) -> None:
    """Has those dims move that are symbols in a saved step. Raises ArtifactError for one that is none here."""
    arguments = () if sizes is None else sizes.arguments
    try:
        context.move({one.name: [size.dim for size in one.sizes] for one in arguments})
    except KeyError as error:
        raise ArtifactError(f"{path} was saved for a step with an argument {error}, of which a size moves.") from error


def _unpickled(data: bytes, what: str, shapes: SavedShapes | None = None) -> Any:
    try:
        return serializer.loads(data, shapes)
    except (pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{what} holds what this process does not know: {type(error).__name__}: {error}."
        ) from error


def _saved_step(path: Path, data: bytes) -> SavedStep:
    body = _unpickled(data, str(path))
    if not isinstance(body, SavedStep):
        raise ArtifactError(f"{path} holds a {type(body).__name__} and no step.")
    return body
