"""The one list of passes, in order, and why each stands where it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from wholestep.passes.bucket import bucket
from wholestep.passes.cleanup import cleanup
from wholestep.passes.dedupe import dedupe
from wholestep.passes.pipeline import Pass
from wholestep.passes.reinplace import reinplace


def default_passes(*, cap_bytes: int, extra: Sequence[Pass] = ()) -> list[Pass]:
    """The passes from a placed program to a scheduled one.

    Args:
        cap_bytes: bound of the bytes of one all-reduce.
        extra: passes of the user; they see the functional graph, with its buckets, before anything runs in place.
    """
    return [
        *optimizations(cap_bytes=cap_bytes),
        *extra,
        # Last: from here on the order of the nodes is fixed, and values that are dead are overwritten.
        reinplace,
    ]


def optimizations(*, cap_bytes: int) -> list[Pass]:
    """The passes that a step can do without: its numbers are the same, its messages more and smaller."""
    return [
        # First: whatever follows looks at fewer nodes, and two names of one value have become one.
        cleanup,
        # Before buckets are filled, so that no gradient is in two of them; behind cleanup, which makes
        # equal arguments the same node.
        dedupe,
        # On the functional graph: readers of gradients can still be moved freely.
        partial(bucket, cap_bytes=cap_bytes),
    ]
