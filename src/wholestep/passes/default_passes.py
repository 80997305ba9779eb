"""The one list of passes, in order, and why each stands where it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from wholestep.cost.cost_model import CostModel
from wholestep.errors import ConfigError
from wholestep.passes.comm.bucketing import Choose, bucket_gradients, choose_locally
from wholestep.passes.comm.early_gathers import start_gathers_early
from wholestep.passes.comm.gather_buckets import bucket_gathers
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
    """The user's options of the default passes, as `default_passes` gives them."""

    memory_budget: Budget | None = None
    bound_bytes: int | None = None
    extra: tuple[Pass, ...] = ()


def default_passes(
    *, memory_budget: Budget | None = None, bound_bytes: int | None = None, extra: Pass | Sequence[Pass] = ()
) -> DefaultPasses:
    """Options of the default passes, to be given as ``ws.compile(passes=...)``.

    What the strategy says (size of buckets, compression, when updates are written) stays with the strategy.

    Args:
        memory_budget: forward values are computed again in the backward until at most so much lives besides the inputs
            (parameters, optimizer state, the batch): bytes (int), or a fraction of what the step needs without that
            (float). The numbers stay the same bits. None: nothing is computed again. A fraction that cannot be reached
            is a wish: `explain` says how far it got.
        bound_bytes: bound of the bytes that live besides the inputs, within which the order of the step is chosen;
            None: what the step needs as written, plus 2 % (5 % where parameters are gathered). It is about the order
            alone: what `memory_budget` computes again does not help to keep it.
        extra: functions ``Program -> Program``. They see the functional graph in its order, after all passes but the
            backend's own and before anything runs in place.

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
    """One pass or several as a tuple.

    Raises ConfigError, which names the option, for anything else.
    """
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
    """The passes that make a scheduled program of a placed one, in the order in which they run.

    Args:
        options: what the user has set.
        cost: predicted times of nodes and collectives; the same on every rank.
        bucket_bytes: a bucket of gradients is closed once it holds as many bytes; None: the buckets with the shortest
            predicted step.
        compress: replaces the gradients of each bucket by smaller tensors for the reduction.
        hold_updates: inputs are written after the last collective, so that a failing peer leaves them as they were.
        choose: makes ranks whose batches differ agree on the same buckets.
        choose_wire_format: the type and layout in which a gradient is sent; not asked where `compress` is given.
        lowering: passes of the backend.
    """
    budget, wire_format = options.memory_budget, choose_wire_format if compress is None else unchanged
    return [
        # First, so that all others see fewer nodes, and one node for each value: views of all of a tensor, copies that
        # nothing needs and results that nothing reads are gone.
        eliminate_dead_code,
        # Before any pass moves nodes: that a generator is set to the state it is in shows only in the step's own order.
        clean_up_rng,
        # After dead code elimination, which makes equal arguments the same node. Before bucketing, so that no gradient
        # is reduced in two buckets.
        eliminate_common_subexpressions,
        # Before anything is compressed, split or scheduled by bucket; while readers of gradients can move after them.
        partial(
            bucket_gradients, cost=cost, bucket_bytes=bucket_bytes, choose=choose, choose_wire_format=wire_format,
            aligned=compress is None,
        ),
        # Beside the buckets of gradients, for the same reasons.
        partial(bucket_gathers, cost=cost, bucket_bytes=bucket_bytes, choose=choose),
        # After bucketing: it is buckets that are compressed. Before scheduling, which has to know what is really sent.
        *([compress] if compress is not None else []),
        # After bucketing: one optimizer call on all parameters becomes one per bucket. Before scheduling, which starts
        # each of them as soon as its bucket has arrived, and keeps the order in which collectives start.
        split_optimizer,
        partial(start_gathers_early, cost=cost, hold_updates=hold_updates),
        # After every pass that adds or splits nodes, since it gives all of them their place.
        partial(overlap_communication, cost=cost, hold_updates=hold_updates, bound_bytes=options.bound_bytes),
        # After scheduling: which values are alive together, and so what has to be recomputed, follows from the order.
        *([partial(rematerialize, cost=cost, budget=budget)] if budget is not None else []),
        # The user's own: the last ones that see single operators, in their order, with no call in place yet.
        *options.extra,
        # The backend's own: from here on what it compiles is one call.
        *lowering,
        # After the last pass that moves nodes: a value may be overwritten only where all its readers stand before.
        partial(reinplace, hold_updates=hold_updates),
        # Last, since it is not functional: several nodes write to slices of one bucket.
        grads_as_bucket_views,
    ]  # fmt: skip
