"""The eager step on the whole batch against virtual ranks on its slices: when that is a fair reference, and how close.

Note: what is compared
    Every reduced gradient with those that a backward leaves in the same parameter (where it is called several times
    they are several, and the closest one counts); and how far the step moves every parameter. The whole batch at once
    adds in another order than its parts, and with cancellation, so half of the digits must agree (``sqrt(eps)``), of
    the narrowest type that the step computes in: digits of the largest gradient of the parameter, or of 1% of the
    largest of the model where that is more, since the gradient of what has no influence is nothing but rounding.
    An optimizer such as Adam makes a full step of an element whose gradient is nothing but rounding, so a movement
    counts only where the gradient stands out: where it is above 1% of that scale. There it may be off by `AMPLIFIED`
    times what the gradients were seen to be off, as a share of the smallest gradient that stands out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from wholestep.capture.reach.train_state import Slot, TrainState
from wholestep.config import Strategy
from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import BucketKind
from wholestep.ir.program import InputKind, Output, OutputKind, Program
from wholestep.place.sharded_placer import specs_by_param
from wholestep.runtime.verify.first_divergence import difference_at
from wholestep.runtime.verify.rank_shards import RankShards
from wholestep.runtime.verify.rank_state import Batch
from wholestep.runtime.verify.tolerance import Gap, farthest, largest
from wholestep.runtime.verify.verification import Check, Difference, Outcome

NAME = "unoptimised = eager on the whole batch"
STANDS_OUT = 0.01
"""Share of a largest gradient below which an element, or all of a parameter, may be nothing but rounding."""

AMPLIFIED = 4
"""By how much an update may be farther off than its gradient: Adam divides one average of gradients by another."""


@dataclass(slots=True)
class StepRecord:
    """The gradients and parameter values of one step, by parameter name."""

    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """As backwards leave them, in order; reduced, where there are ranks."""
    old: dict[str, torch.Tensor] = field(default_factory=dict)
    new: dict[str, torch.Tensor] = field(default_factory=dict)

    def note(self, name: str, gradient: torch.Tensor) -> None:
        """Keeps a gradient."""
        self.gradients.setdefault(name, []).append(copied(gradient))


class GradientObserver:
    """Keeps the reduced gradients of a placed program while it runs, whole, as the first group of ranks has them."""

    def __init__(self, step_record: StepRecord, program: Program, strategy_group: str, shards: RankShards) -> None:
        """`strategy_group`: the group of the last axis that gradients are reduced over."""
        self._step_record, self._shards = step_record, shards
        self._names = _gradients_of(program, strategy_group)
        self._specs = specs_by_param(program)

    def __call__(self, node: fx.Node, args: list[Any], found: list[Any]) -> None:
        """One call of the run."""
        name = self._names.get(node)
        if name is not None:
            spec = self._specs.get(name)
            is_part = spec is not None and tuple(found[0].shape) == spec.shard_shape
            self._step_record.note(name, self._shards.whole(found, spec if is_part else None))


def _gradients_of(program: Program, group: str) -> dict[fx.Node, str]:
    """The nodes that are reduced gradients, with the names of their parameters.

    Where a gradient in parts was there before the call, it is their sum: a backward accumulates.
    """
    records = dict(zip(program.placeholders, program.inputs, strict=True))
    found: dict[fx.Node, str] = {}
    for wait in program.graph.find_nodes(op="call_function", target=op_info.WAIT):
        start = op_info.waited_for(wait)
        bucket = node_meta.bucket(start)
        if bucket is None or bucket.kind is BucketKind.GATHER or start.args[-1] != group:
            continue
        sums = (
            user
            for user in wait.users
            if user.target is torch.ops.aten.add.Tensor
            and user.args[0] in records
            and records[user.args[0]].kind is InputKind.GRAD
        )
        (found[next(sums, wait)],) = bucket.members
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """A run of virtual ranks, for the comparison with the eager step."""

    strategy: Strategy
    step_records: Sequence[tuple[StepRecord, Callable[[], None]]]
    """Per step, what it did to the parameters, and what changed the numbers of parameter groups after it."""
    programs: Sequence[Program]
    """The captured programs that were run."""
    draws_random: bool
    """Whether random numbers were drawn."""


def compare_with_eager(step: Callable[..., Any], batch: Batch, state: TrainState, ranks: VirtualRun) -> Check:
    """Runs the user's step on the whole batch, on the user's own objects, and compares it step by step.

    The caller puts the user's objects back.
    """
    if (why_not := _why_not(ranks)) is not None:
        return Check(name=NAME, outcome=Outcome.SKIPPED, text=why_not)
    comparison = _Comparison(max(map(_widest_eps, ranks.programs)))
    for number, (wanted, change_numbers) in enumerate(ranks.step_records, 1):
        args, kwargs = batch.whole(number - 1)
        eager = StepRecord(old={slot.name: copied(slot.tensor) for slot in state.params})
        with _gradients_to(eager, state.params):
            step(*args, **kwargs)
        eager.new = {slot.name: copied(slot.tensor) for slot in state.params}
        found = comparison.first_difference(wanted, eager, number)
        if found is not None:
            text = f"{found.op} of {found.name} differs in step {number} by more than rounding; {_ADVICE}"
            return Check(name=NAME, outcome=Outcome.FAILED, text=text, difference=found)
        change_numbers()
    text = f"gradients and updates agree; the farthest apart reach {comparison.used:.2g} of what rounding may do"
    return Check(name=NAME, outcome=Outcome.PASSED, text=text)


_ADVICE = (
    "where the loss is no mean over rows that are independent of each other (a sum, a contrastive loss), or a hook "
    "changes gradients before they are reduced, that is as it should be: leave this check out with whole_batch=False"
)


def _why_not(ranks: VirtualRun) -> str | None:
    """Why the eager step on the whole batch would give other numbers; None if it should give the same."""
    if not ranks.step_records:
        return "no step was finished"
    if ranks.draws_random:
        return "the step draws random numbers, which every rank draws for itself"
    if ranks.strategy.reduce != "mean":
        return "gradients are summed, not averaged, over the ranks"
    if ranks.strategy.ignore:
        return f"gradients of {', '.join(ranks.strategy.ignore)} stay local to the ranks"
    return next((why_not for program in ranks.programs if (why_not := _why_not_program(program)) is not None), None)


def _why_not_program(program: Program) -> str | None:
    if program.mesh or any(record.kind is InputKind.RANK for record in program.inputs):
        return "the step itself communicates, or asks for its rank"
    for node in program.graph.nodes:
        if node.target in (op_info.RESIZE_STORAGE, op_info.RESIZE_STORAGE_):
            return "the step frees and fills storages itself"
        if _is_batch_norm(node):
            where = ", ".join(part for part in (node_meta.origin(node).module, node_meta.origin(node).source) if part)
            return f"batch norm ({where}) takes its statistics from the rows of each rank"
    for output, value in zip(program.outputs, program.results, strict=True):
        if output.kind is OutputKind.WRITE and isinstance(value, fx.Node) and _couples_rows(program, output, value):
            return f"gradients depend on the buffer {output.name}, which the step makes from the rows of each rank"
    return None


def _is_batch_norm(node: fx.Node) -> bool:
    """Whether the node is a batch norm in training."""
    name = node.target._schema.name if op_info.is_op(node) else ""  # type: ignore[union-attr]
    if "batch_norm" not in name or "backward" in name or "_no_" in name:  # ``_batch_norm_no_update``
        return False
    given = op_info.by_name(node.target, node.args, node.kwargs)
    # A variant without the flag (``_batch_norm_with_update``) exists for training only.
    return bool(given.get("training", given.get("train", True)))


def _couples_rows(program: Program, write: Output, value: fx.Node) -> bool:
    """Whether a buffer's new value is made from the batch, and it or the old one has influence on a gradient."""
    assert write.target is not None  # by the spec of a WRITE
    if program.inputs[write.target].kind is not InputKind.BUFFER:
        return False
    batch = [n for n, one in zip(program.placeholders, program.inputs, strict=True) if one.kind is InputKind.USER]
    reached = _reached([value, program.placeholders[write.target]])
    return value in _reached(batch) and any(node.target is op_info.GRADIENT for node in reached)


def _reached(starts: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and everything that depends on them."""
    found, todo = set(starts), list(starts)
    while todo:
        users = [user for user in todo.pop().users if user not in found]
        found.update(users)
        todo += users
    return found


def _widest_eps(program: Program) -> float:
    """The eps of the narrowest floating-point type that the program computes in."""
    floats = (one.dtype for node in program.graph.nodes for one in node_meta.tensors(node) if one.is_floating_point())
    return max((torch.finfo(dtype).eps for dtype in dict.fromkeys(floats)), default=0.0)


@contextmanager
def _gradients_to(step_record: StepRecord, params: Sequence[Slot]) -> Iterator[None]:
    """While open, `step_record` is told of every gradient that a backward accumulates."""

    def keep(name: str) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            if param.grad is not None:
                step_record.note(name, param.grad)

        return hook

    trained = [slot for slot in params if slot.tensor.requires_grad and slot.tensor.is_leaf]
    handles = [slot.tensor.register_post_accumulate_grad_hook(keep(slot.name)) for slot in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Comparison:
    """Virtual ranks against the eager step, over all steps."""

    def __init__(self, eps: float) -> None:
        self._digits = math.sqrt(eps)
        self._reliable: dict[str, torch.Tensor] = {}
        """Per parameter, where its gradients have stood out so far."""
        self._gradient_errors: dict[str, float] = {}
        """Per parameter, how far a gradient was off at most, as a share of its scale."""
        self.used = 0.0
        """The largest share of an allowed distance that was reached."""

    def first_difference(self, ranks: StepRecord, eager: StepRecord, number: int) -> Difference | None:
        """The first gradient or update of a step that rounding does not explain."""
        model = max((largest(one) for grads in ranks.gradients.values() for one in grads), default=0.0)
        for name, reduced in ranks.gradients.items():
            for ours in reduced:
                one = self._gradient_gap(name, ours, eager.gradients.get(name, []), model)
                if one is not None and one.is_fault:
                    return difference_at(None, one, (number, 0), name=name, op="gradient")
        for name in ranks.gradients:
            one = self._update_gap(name, ranks, eager)
            if one.is_fault:
                return difference_at(None, one, (number, 0), name=name, op="update")
        return None

    def _gradient_gap(self, name: str, ours: torch.Tensor, eager: Sequence[torch.Tensor], model: float) -> Gap | None:
        """How far a reduced gradient is from the closest of the eager ones; `model`: the largest gradient of all.

        None where no backward left one: the step took it with ``torch.autograd.grad``.
        """
        scale = max(largest(ours), STANDS_OUT * model)
        stands_out = ours.abs() >= STANDS_OUT * scale
        self._reliable[name] = stands_out & self._reliable.get(name, stands_out)
        gaps = [farthest(ours, wanted, self._digits * scale) for wanted in eager]
        one = self._seen(min(gaps, key=lambda gap: gap.distance)) if gaps else None
        off = self._digits if one is None or not scale else one.distance / scale
        self._gradient_errors[name] = max(off, self._gradient_errors.get(name, 0.0))
        return one

    def _update_gap(self, name: str, ranks: StepRecord, eager: StepRecord) -> Gap:
        """How far apart a parameter was moved, where its gradients stand out."""
        new = ranks.new[name]
        wanted, ours = eager.new[name].double() - eager.old[name].double(), new.double() - ranks.old[name].double()
        ours = torch.where(self._reliable[name], ours, wanted)
        share = max(self._digits, AMPLIFIED * self._gradient_errors[name] / STANDS_OUT)
        stored = 4 * torch.finfo(new.dtype).eps * largest(new)  # a rounding for each of four parameters
        return self._seen(farthest(ours, wanted, share * largest(wanted) + stored))

    def _seen(self, one: Gap) -> Gap:
        if one.allowed:
            self.used = max(self.used, one.distance / one.allowed)
        return one


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; of complex numbers, their parts."""
    copy = tensor.detach().clone()
    return torch.view_as_real(copy) if copy.is_complex() else copy
