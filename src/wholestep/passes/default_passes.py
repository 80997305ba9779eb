"""The one list of passes, in order, and why each stands where it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from wholestep.cost.cost_model import CostModel
from wholestep.errors import ConfigError
from wholestep.passes.comm.bucketing import Choose, bucket_gradients, choose_locally
from wholestep.passes.comm.grads_as_bucket_views import grads_as_bucket_views
from wholestep.passes.comm.split_optimizer import split_optimizer
from wholestep.passes.comm.wire_format import ChooseWireFormat, unchanged
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.memory.rematerialize import Budget, check_budget, rematerialize
from wholestep.passes.pass_manager import Pass
from wholestep.passes.rewrites.cse import eliminate_common_subexpressions
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.rewrites.rng_cleanup import clean_up_rng
from wholestep.passes.schedule.overlap import overlap_communication


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultPasses:
    """The default passes with options of the user's: what `default_passes` gives and ``compile(passes=...)`` takes."""

    memory_budget: Budget | None = None
    bound_bytes: int | None = None
    extra: tuple[Pass, ...] = ()


def default_passes(
    *, memory_budget: Budget | None = None, bound_bytes: int | None = None, extra: Pass | Sequence[Pass] = ()
) -> DefaultPasses:
    """Options of the default passes, for ``ws.compile(passes=ws.default_passes(memory_budget=0.6))``.

    What the strategy says (size of buckets, compression, when updates are written) stays with the strategy.

    Args:
        memory_budget: forward values are computed again in the backward until at most so much lives besides the inputs
            (parameters, optimizer state, the batch): bytes (int), or a fraction of what the step needs without that
            (float). The numbers stay the same bits. None: nothing is computed again. A fraction that cannot be reached
            is a wish: `explain` says how far it got.
        bound_bytes: bound of the bytes that live besides the inputs, within which the order of the step is chosen;
            None: what the step needs as written, plus 2 %. It is about the order alone: what `memory_budget` computes
            again does not help to keep it.
        extra: functions ``Program -> Program``. They see the functional graph in its order, before anything runs in
            place, behind all other passes.

    Raises:
        ConfigError: for values that are none of that. Bytes that cannot be kept are one at the first call, which names
            the smallest number that can.
    """
    if memory_budget is not None:
        check_budget(memory_budget)
    if bound_bytes is not None and (type(bound_bytes) is not int or bound_bytes <= 0):
        raise ConfigError(f"bound_bytes wants a positive number of bytes, such as 8 << 30; got {bound_bytes!r}.")
    extra = as_passes(extra, "wholestep.default_passes(extra=...)")
    return DefaultPasses(memory_budget=memory_budget, bound_bytes=bound_bytes, extra=extra)


def as_passes(value: Any, option: str) -> tuple[Pass, ...]:
    """One pass or several as a tuple. Raises ConfigError, which names the option, for what is none."""
    passes = (value,) if callable(value) else tuple(value) if isinstance(value, Sequence) else None
    if passes is None or not all(map(callable, passes)):
        raise ConfigError(
            f"{option} wants functions Program -> Program, got {value!r}. Options of the default passes go together "
            f"with your own as passes=ws.default_passes(..., extra=[my_pass])."
        )
    return passes


def passes_of(
    options: DefaultPasses = DefaultPasses(),
    *,
    cost: CostModel,
    bucket_bytes: int | None = None,
    compress: Pass | None = None,
    hold_updates: bool = False,
    choose: Choose = choose_locally,
    choose_wire_format: ChooseWireFormat = unchanged,
    lowering: Sequence[Pass] = (),
) -> list[Pass]:
    """The passes from a placed program to a scheduled one.

    Args:
        options: what the user has set.
        cost: predicted times of nodes and collectives; the same on every rank.
        bucket_bytes: a bucket of gradients is closed once it holds as many bytes; None: buckets with the shortest
            predicted step.
        compress: lets other tensors travel in the place of the gradients of a bucket.
        hold_updates: inputs are written behind the last collective, so that a peer that dies leaves them as they were.
        choose: how ranks whose batches differ come by the same buckets.
        choose_wire_format: how a gradient goes to who adds it, where nothing travels in its place.
        lowering: passes of the backend.
    """
    budget, way = options.memory_budget, choose_wire_format if compress is None else unchanged
    return [
        # First: whatever follows looks at fewer nodes, and two names of one value have become one.
        eliminate_dead_code,
        # On the functional graph, whose order is that of the step; before anything asks what may be moved.
        clean_up_rng,
        # Before buckets are filled, so that no gradient is in two of them; behind cleanup, which makes
        # equal arguments the same node.
        eliminate_common_subexpressions,
        # On the functional graph: readers of gradients can still be moved freely.
        partial(
            bucket_gradients,
            cost=cost,
            bucket_bytes=bucket_bytes,
            choose=choose,
            choose_wire_format=way,
            aligned=compress is None,
        ),
        # Behind bucket, since it is buckets that are compressed; whatever follows sees what really travels.
        *([compress] if compress is not None else []),
        # Behind bucket, whose buckets it splits by; before schedule, which moves the parts.
        split_optimizer,
        # Behind whatever adds nodes: it orders all of them.
        partial(overlap_communication, cost=cost, hold_updates=hold_updates, bound_bytes=options.bound_bytes),
        # Behind schedule, in whose order it weighs what is alive; nothing moves what it computes again.
        *([partial(rematerialize, cost=cost, budget=budget)] if budget is not None else []),
        *options.extra,
        # The backend's own: what it compiles is one call from here on.
        *lowering,
        # From here on the order of the nodes is fixed, and values that are dead are overwritten.
        partial(reinplace, hold_updates=hold_updates),
        # Last: a slice of a bucket is memory that several nodes write to.
        grads_as_bucket_views,
    ]
