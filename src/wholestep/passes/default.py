"""The one list of passes, in order, and why each stands where it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from wholestep.cost.model import CostModel
from wholestep.passes.bucket import Choose, bucket, choose_alone
from wholestep.passes.cleanup import cleanup
from wholestep.passes.dedupe import dedupe
from wholestep.passes.fill import fill_buckets
from wholestep.passes.pipeline import Pass
from wholestep.passes.reinplace import reinplace
from wholestep.passes.remat import Budget, remat
from wholestep.passes.schedule import schedule
from wholestep.passes.update import split_updates


def default_passes(
    *,
    cost: CostModel,
    bucket_bytes: int | None = None,
    compress: Pass | None = None,
    hold_updates: bool = False,
    bound_bytes: int | None = None,
    memory_budget: Budget | None = None,
    choose: Choose = choose_alone,
    extra: Sequence[Pass] = (),
    lowering: Sequence[Pass] = (),
) -> list[Pass]:
    """The passes from a placed program to a scheduled one.

    Args:
        cost: predicted times of nodes and collectives; the same on every rank.
        bucket_bytes: a bucket of gradients is closed once it holds as many bytes; None: buckets with the shortest
            predicted step.
        compress: lets other tensors travel in the place of the gradients of a bucket.
        hold_updates: inputs are written behind the last collective, so that a peer that dies leaves them as they were.
        bound_bytes: bound of the bytes that live besides the inputs; None: what the step needs as written, plus 2 %.
        memory_budget: forward values are computed again in the backward until at most so much lives besides the inputs:
            bytes (int), or a fraction of what the step needs without that (float). None: nothing is computed again.
        choose: how ranks whose batches differ come by the same buckets.
        extra: passes of the user; they see the functional graph in its order, before anything runs in place.
        lowering: passes of the backend.
    """
    return [
        # First: whatever follows looks at fewer nodes, and two names of one value have become one.
        cleanup,
        # Before buckets are filled, so that no gradient is in two of them; behind cleanup, which makes
        # equal arguments the same node.
        dedupe,
        # On the functional graph: readers of gradients can still be moved freely.
        partial(bucket, cost=cost, bucket_bytes=bucket_bytes, choose=choose),
        # Behind bucket, since it is buckets that are compressed; whatever follows sees what really travels.
        *([compress] if compress is not None else []),
        # Behind bucket, whose buckets it splits by; before schedule, which moves the parts.
        split_updates,
        # Behind whatever adds nodes: it orders all of them.
        partial(schedule, cost=cost, hold_updates=hold_updates, bound_bytes=bound_bytes),
        # Behind schedule, in whose order it weighs what is alive; nothing moves what it computes again.
        *([partial(remat, cost=cost, budget=memory_budget)] if memory_budget is not None else []),
        *extra,
        # The backend's own: what it compiles is one call from here on.
        *lowering,
        # From here on the order of the nodes is fixed, and values that are dead are overwritten.
        partial(reinplace, hold_updates=hold_updates),
        # Last: a slice of a bucket is memory that several nodes write to.
        fill_buckets,
    ]
