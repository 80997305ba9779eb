"""Training functions as people publish them, at tiny sizes, and how each is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.idioms import Idiom, Loop

TRAININGS: dict[str, Idiom] = {}
"""All of them by name."""


def training(**options: Any) -> Callable[[Callable[[], Loop]], Callable[[], Loop]]:
    """Registers a function that builds a fresh training."""

    def register(build: Callable[[], Loop]) -> Callable[[], Loop]:
        TRAININGS[build.__name__] = Idiom(
            name=build.__name__, group=build.__module__.rpartition(".")[2], build=build, **options
        )
        return build

    return register


def loop(
    step: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]] = lambda call: (), **observed: Any
) -> Loop:
    """A loop that looks at these objects; functions among them are called for a value."""

    def observe() -> dict[str, object]:
        return {name: one() if type(one).__name__ == "function" else one for name, one in observed.items()}

    return Loop(step=step, arguments=arguments, observe=observe)
