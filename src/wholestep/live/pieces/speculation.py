"""Runs a backward ahead of a value that Python asks for between forward and backward.

``if not math.isfinite(loss): return``, a metric of the logits, a print: the value is asked for while the graph of the
forward is still needed. Cutting there would need the tensors that autograd has saved. Instead the piece goes on to the
backward that followed in earlier calls, and its gradients are held back. When Python comes to that backward, they are
put in place; if it goes another way, they are dropped, and what is still needed is executed again as eager code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from wholestep.live.opaque.modules import OpaqueModule
from wholestep.live.pieces.forward import Before
from wholestep.live.pieces.tensors import TensorTable
from wholestep.live.recording.path import BACKWARDS, Path, reads_gradient
from wholestep.live.recording.record import CONSTANT, EXTERNAL, NUMBER, VALUE, Record, Value, name_of
from wholestep.util.gradient_node import is_leaf


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """A piece that ends with a backward whose gradients are held back."""

    span: tuple[int, int]
    """Its records; the last one is the backward."""
    position: int
    """How many records there were when Python asked for a value."""
    skipped: frozenset[int]
    """Records that only act, such as ``zero_grad()``: they run when Python comes to them."""
    leaves: tuple[int, ...]
    """Tensors from outside, by number, whose gradients are held."""

    def wanted(self, path: Path) -> list[Value]:
        """Results of the records after the read, which Python will be given when it comes to them."""
        return [
            (number, output)
            for number in range(self.position, self.span[1] - 1)
            if number not in self.skipped
            for output, meta in enumerate(path.records[number].outputs)
            if meta is not None and meta.alias is None
        ]


def plan_speculation(path: Path, started: int, position: int, tensors: TensorTable) -> SpeculationPlan | str:
    """The plan for a read after `position` records of a path; or why no backward can be run ahead of it."""
    end = next((n for n in range(position, len(path.records)) if _is_plain_backward(path.records[n])), None)
    if end is None:
        return "no loss.backward() that frees the graph came after it in the same call"
    late = next((record for record in path.records[position:end] if _cannot_wait(path, record, tensors)), None)
    if late is not None:
        return f"{name_of(late.key.function)} comes first ({late.line}), which draws, writes, freezes or needs a number"
    if (differentiated := _differentiated_later(path, started, end)) is not None:
        return (
            f"{name_of(differentiated.key.function)} ({differentiated.line}) gives what a later backward goes through"
        )
    if (reading := next((one for one in path.records[started:end] if reads_gradient(one)), None)) is not None:
        return f"a gradient of earlier calls is read before it ({reading.line}), where it would be set aside"
    length, count = tensors.length(), num_externals(path.records[position:end], len(tensors.externals))
    if not tensors.expect(path, count):
        return "calls in between are given tensors that are not known yet"
    leaves = tuple(index for index, one in enumerate(tensors.externals) if one.requires_grad)
    if any(_is_hooked(tensors.externals[index]) for index in leaves):
        tensors.forget_since(length)
        return "a parameter or an input has hooks on its gradient"
    skipped = frozenset(number for number in range(position, end) if _only_acts(path.records[number]))
    return SpeculationPlan((started, end + 1), position, skipped, leaves)


def _differentiated_later(path: Path, started: int, end: int) -> Record | None:
    """A record before a backward that leaves its graph alone, and whose result calls after it are given.

    A piece gives no graph, so a backward after it would find none.
    """
    freed = path.records[end].frees
    for operand in (one for record in path.records[end + 1 :] for one in record.operands if one.kind == VALUE):
        if started <= operand.key < end and (operand.key, operand.detail) not in freed:
            made: Record = path.records[operand.key]
            meta = made.outputs[operand.detail]
            if meta is not None and meta.requires_grad:
                return made
    return None


def num_externals(records: Sequence[Record], least: int = 0) -> int:
    """How many tensors from outside these records use, or come after."""
    used: list[int] = [one.key + 1 for record in records for one in record.operands if one.kind == EXTERNAL]
    return max([least, *used, *(record.num_externals for record in records)])


def _is_hooked(leaf: torch.Tensor) -> bool:
    """Whether more happens to its gradient than that it is added."""
    return not is_leaf(leaf) or bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def _is_plain_backward(record: Record) -> bool:
    """Whether it is ``loss.backward()``, which frees the graph and reaches all leaves."""
    if record.key.function is not BACKWARDS[0]:
        return False
    others = record.operands[1:]
    return all(one.kind == CONSTANT and one.key in (None, False) for one in others)


def _cannot_wait(path: Path, record: Record, tensors: TensorTable) -> bool:
    """Whether a record between the read and the backward needs what is not known yet, or does more than compute."""
    function = record.key.function
    if record.drawn or record.writes or record.state_entries or record.freezes or function in BACKWARDS:
        return True
    if isinstance(function, OpaqueModule) and function.written:
        return True
    if _only_acts(record):
        return any(operand.kind == VALUE for operand in record.operands)
    if record.writes_grads:
        return True
    for operand in record.operands:
        if operand.kind == NUMBER and operand.key >= len(tensors.numbers) and path.is_varying(operand.key):
            return True
    return False


def _only_acts(record: Record) -> bool:
    """Whether it gives nothing, so that it was called for what it does: ``zero_grad()``, ``param.grad = None``."""
    return all(meta is None for meta in record.outputs)


@contextmanager
def gradients_set_aside(leaves: Sequence[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """While open, leaves have no gradients. What they have at its end goes into the list it gives, and they have what
    they had before."""
    held, made = [leaf.grad for leaf in leaves], list[tuple[torch.Tensor, torch.Tensor]]()
    for leaf in leaves:
        leaf.grad = None
    try:
        yield made
    finally:
        for leaf, grad in zip(leaves, held, strict=True):
            if leaf.grad is not None:
                made.append((leaf, leaf.grad))
            leaf.grad = grad


@dataclass(slots=True)
class SpeculativeBackward:
    """Gradients that are held back until Python comes to their backward."""

    plan: SpeculationPlan
    path: Path
    before: Before
    length: tuple[int, int]
    """Of the tensors from outside and numbers before it; see `TensorTable.length`."""
    values: dict[Value, torch.Tensor] = field(default_factory=dict)
    """Of records after the read."""
    grads: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Leaves and what their gradients get."""

    def put(self) -> None:
        """Does what the backward does: adds the gradients."""
        with torch.no_grad():
            for leaf, grad in self.grads:
                if not leaf.requires_grad:
                    continue  # frozen after the forward: autograd leaves it alone
                if leaf.grad is None:
                    leaf.grad = grad
                else:
                    leaf.grad.add_(grad)
