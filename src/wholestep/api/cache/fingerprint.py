"""The fingerprint of a compiled step: everything it depends on as lines of text, and how two of them are compared."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

from wholestep.api.cache.object_fingerprint import NotComparable, object_fingerprint
from wholestep.api.cache.records import CacheContext, Fingerprint, Header, Line
from wholestep.capture.guards.environment import Environment, source_digest
from wholestep.capture.reach.step_context import StepContext
from wholestep.config import DDP, CommHook
from wholestep.cost.calibration import calibrate
from wholestep.runtime.distributed.world import World
from wholestep.runtime.options import data_axes
from wholestep.runtime.shared_costs import COSTS, host_fingerprint
from wholestep.util.torch_switches import torch_switches


def fingerprint_of(context: StepContext, cache_context: CacheContext) -> Fingerprint:
    """The facts a compiled step depends on that are known before a trace. Raises NotComparable."""
    options, world, compression = cache_context.options, cache_context.world, cache_context.compression
    if isinstance(options.strategy, DDP) and isinstance(options.strategy.compress, CommHook):
        raise NotComparable("the step has a communication hook, which a graph calls in this process alone")
    chosen = {"strategy": options.strategy, "backend": options.backend, "passes": options.passes}
    axes = data_axes(world, options.mesh)
    mesh = [("the axes", str(axes)), ("the number of ranks", str(world.size)), ("the rank", str(world.rank))]
    state = (
        [("what compression does next", f"{compression}, {'on' if compression.started else 'not yet'}")]
        if compression is not None
        else []
    )
    return {
        "the build": tuple(_build(world)),
        "the mesh": tuple(mesh),
        "the backend": (("its kind", type(cache_context.backend).__name__), *cache_context.backend.fingerprint()),
        "the switches of torch": tuple(torch_switches()),
        "compression": tuple(state),
        "the step": tuple(object_fingerprint(context, chosen)),
    }


def _build(world: World) -> list[Line]:
    return [
        ("wholestep", source_digest()),
        ("Python", sys.version),
        ("torch", f"{torch.__version__} {torch.version.git_version} CUDA {torch.version.cuda} HIP {torch.version.hip}"),
        ("the capability of the CPU", f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"),
        *((f"the {name} of the host", str(mark)) for name, mark in host_fingerprint(world).items()),
    ]


def environment_of(header: Header) -> Environment:
    lines = {subject: dict(held) for subject, held in header.environment.items()}
    return Environment(files=lines["files"], packages=lines["packages"], environment=lines["environment"])


def environment_lines(environment: Environment, costs: Mapping[str, Any]) -> Fingerprint:
    """The facts besides objects: files, packages, environment variables, costs."""
    digest = hashlib.sha256(json.dumps(costs, sort_keys=True).encode()).hexdigest()
    return {
        "files": tuple(environment.files.items()),
        "packages": tuple(environment.packages.items()),
        "environment": tuple(environment.environment.items()),
        "predicted costs": (("their source", str(costs["source"])), ("their numbers", digest)),
    }


def costs_now(context: CacheContext) -> Mapping[str, Any]:
    """The costs that a plan made now would be made with, on the rank that says which."""
    if COSTS in context.choices:
        known: Mapping[str, Any] = context.choices[COSTS]
        return known
    return calibrate.to_json(calibrate.find(context.world.device, host_fingerprint(context.world)))


def difference(saved: Fingerprint, now: Fingerprint) -> str | None:
    """The first thing that is not as it was, as a sentence; None if everything is."""
    for subject in dict.fromkeys([*saved, *now]):
        then, new = saved.get(subject, ()), now.get(subject, ())
        for (a, was), (b, is_now) in zip(then, new, strict=False):
            if a != b:
                return f"{subject}: there was {a}, where now is {b}"
            if was != is_now:
                return f"{subject}: {a} was {_short(was, is_now)}, is {_short(is_now, was)}"
        if len(then) != len(new):
            more = then[len(new) :] or new[len(then) :]
            return f"{subject}: {more[0][0]} is {'gone' if len(then) > len(new) else 'new'}"
    return None


def _short(text: str, other: str) -> str:
    """A text short enough for a sentence, from a little before the place where it differs from another."""
    if len(text) <= 80:
        return text
    alike = (a == b for a, b in zip(text, other, strict=False))
    start = max(0, next((place for place, one in enumerate(alike) if not one), len(text)) - 20)
    return f"{'...' if start else ''}{text[start : start + 70]}{'...' if start + 70 < len(text) else ''}"
