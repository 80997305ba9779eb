"""Writes stay after the reads of what they overwrite.

Inductor knows that order as dependencies that no load or store shows. Where it fits the loops of two kernels for CPUs
to each other, it works out anew what they read, and torch 2.11 forgets those dependencies there: a kernel that writes
to an input is fused into one that stands before a reader, under ``torch.compile``, too. Here they are kept, as
torch 2.13 does of itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch._inductor import dependencies, scheduler

_NODE: Any = scheduler.SchedulerNode
_FIT = "recompute_size_and_body"
_KNOWN = hasattr(_NODE, _FIT) and hasattr(dependencies, "WeakDep") and hasattr(dependencies, "StarDep")


@contextlib.contextmanager
def keep_write_order() -> Iterator[None]:
    """While it is open, no kernel forgets after whom it runs. Nothing changes with a torch of another form."""
    if not _KNOWN:
        yield
        return
    fit = getattr(_NODE, _FIT)

    def fit_and_keep(node: Any, *args: Any, **named: Any) -> None:
        kinds = (dependencies.WeakDep, dependencies.StarDep)
        before = [read for read in node.read_writes.reads if isinstance(read, kinds)]
        fit(node, *args, **named)
        kept = functools.reduce(_read_too, before, node.read_writes).rename(node.mutation_renames)
        if kept.reads != node.read_writes.reads:
            node.set_read_writes(kept)

    setattr(_NODE, _FIT, fit_and_keep)
    try:
        yield
    finally:
        setattr(_NODE, _FIT, fit)


def _read_too(known: Any, read: Any) -> Any:
    return known.with_read(read)
