"""What traces of a step have asked of sizes."""

from __future__ import annotations

from collections.abc import Iterator

import wholestep as ws
from wholestep.capture.guards.size_guards import SizeConditions, SizeGuard


def _all(step: ws.CompiledStep) -> Iterator[SizeConditions]:
    for entry in step._dispatcher.entries:
        for guard in entry.captured.guards.values:
            if isinstance(guard, SizeGuard):
                yield guard.conditions


def conditions(step: ws.CompiledStep) -> list[str]:
    """All of them, as a person reads them."""
    return [text for one in _all(step) for text in one.texts()]


def asked_behind_capture(step: ws.CompiledStep) -> list[str]:
    """Those that a stage after the capture has asked, with its file and line."""
    asked = [(str(guard.expr), str(guard.sloc)) for one in _all(step) for guard in one._env.guards]
    return [f"{text} {where}" for text, where in asked if any(f"/{room}/" in where for room in ("place", "passes"))]
