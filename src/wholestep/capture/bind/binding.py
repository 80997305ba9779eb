"""The live objects behind a program's inputs and outputs: reads them before a call, puts results back after it.

Everything that stays the same between calls is looked up once. A call fills in only the arguments, the
numbers of parameter groups and the gradients that were there at entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep.capture.effects.tensor_effects import Mirror, write_locations
from wholestep.capture.guards import fast_guards
from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import Location
from wholestep.capture.scalars.counters import Counter
from wholestep.capture.scalars.hyperparameters import Hyperparameter
from wholestep.ir.program import InputKind, OutputKind, Program

Holder = Callable[[], dict[Any, Any]]


@dataclass(slots=True)
class Binding:
    """Where each input of a program comes from and where each output goes."""

    tensors: list[torch.Tensor | int | None]
    """Per input: the tensor that lives between calls, the number of a rank, or None where a call supplies it."""
    hypers: list[tuple[int, Hyperparameter]]
    """(input, number) pairs."""
    user: list[tuple[int, int]]
    """(input, argument leaf) pairs."""
    entry_grads: list[tuple[int, torch.Tensor]]
    """(input, parameter) pairs: the input is the parameter's gradient at entry."""
    result_spec: tree_util.TreeSpec
    results: list[Any]
    """The step's result with None in the places that the graph fills, in order of `result_places`."""
    result_places: list[int]
    entry_results: list[tuple[int, torch.Tensor]]
    """(place, parameter) pairs: the result there is the parameter's gradient at entry, another one in every call."""
    left: list[Location]
    """Where the last of the results go, which the step does not return."""
    mirrors: list[Mirror]
    """Tensors of the graph of which copies stand in places of the user's."""
    standing: list[tuple[int, Mirror]]
    """(place, mirror) pairs: the result there is what stands behind the call where the mirror says."""
    grads: list[torch.Tensor]
    """Parameters that get a new ``.grad``, in the order of the GRAD outputs."""
    cleared: list[torch.Tensor]
    """Parameters whose ``.grad`` is None after the call and was not before it."""
    new_state: list[tuple[Holder, Any, bool]]
    """Where the STATE outputs go: what gives the dict, the key, and whether it is a number in Python."""
    notes: list[tuple[Holder, Any, Any]]
    """Plain values that the step leaves with optimizers: what gives the dict, the key, the value."""
    ticks: list[tuple[Any, int]]
    """Schedulers that the step calls, and how often: they count that for their warnings."""
    counters: list[Counter]
    """Numbers that the step moves."""
    stepped: list[Optimizer]
    """Optimizers that step in the graph, until they have been told so."""
    slices: tuple[int, int, int] = field(default=(0, 0, 0))
    """Ends of the USER, GRAD and STATE outputs among the program's outputs."""

    is_plain: bool = field(init=False, default=False)
    """Whether all that a call leaves to do is to return its one tensor. Known once `finish` has run."""

    def with_tensors(self, more: list[torch.Tensor]) -> Binding:
        """The same binding for a program with `more` inputs at the end, which live between calls."""
        return replace(self, tensors=[*self.tensors, *more])

    def inputs(self, leaves: list[Any]) -> list[Any]:
        """The flat inputs of one call."""
        return self.source().filled(leaves)

    def source(self) -> fast_guards.PythonInputFiller:
        """What fills in the flat inputs of calls."""
        numbers = [(index, hyper.group, hyper.key, hyper.position) for index, hyper in self.hypers]
        return fast_guards.PythonInputFiller(self.tensors, numbers, self.user, self.entry_grads)

    def keeping(self, function: fast_guards.Function) -> fast_guards.Function:
        """`function` with what a call looks at before it: what stands for mirrors, and the gradients at entry that the
        step returns. These come behind its outputs, for `finish`: others may be in their places by then."""
        if not self.entry_results and not self.mirrors:
            return function

        def run(inputs: list[Any]) -> tuple[Any, ...]:
            grads = [param.grad for _, param in self.entry_results]
            for mirror in self.mirrors:
                mirror.take()
            return (*function(inputs), *grads)

        return run

    def finish(self, outputs: tuple[Any, ...]) -> Any:
        """Puts gradients and new state back and returns what the step returns. `outputs` are of a function that
        `keeping` gave."""
        user_end, grad_end, state_end = self.slices
        for param in self.cleared:
            param.grad = None
        if grad_end > user_end:
            for param, grad in zip(self.grads, outputs[user_end:grad_end], strict=True):
                param.grad = grad
        if state_end > grad_end:
            for (holder, key, is_number), made in zip(self.new_state, outputs[grad_end:state_end], strict=True):
                holder()[key] = made.item() if is_number else made
        for holder, key, value in self.notes:
            holder()[key] = value
        for scheduler, count in self.ticks:
            scheduler._step_count += count
        for counter in self.counters:
            counter.store()
        for mirror in self.mirrors:
            mirror.give()
        while self.stepped:  # what a scheduler looks at before it warns; nobody takes it back
            self.stepped.pop()._opt_called = True  # type: ignore[attr-defined]
        if self.result_spec.type is None and user_end and not self.left:  # the usual result: one tensor
            rest = self.cleared or self.notes or self.ticks or self.counters or self.mirrors
            self.is_plain = not rest and state_end == user_end
            return outputs[0]
        results = self.results.copy()
        for number, place in enumerate(self.result_places):
            results[place] = outputs[number]
        for (place, _), grad in zip(reversed(self.entry_results), reversed(outputs), strict=False):
            results[place] = grad
        for place, mirror in self.standing:
            results[place] = mirror.standing()
        if self.left:
            num_returned = len(results) - len(self.left)
            write_locations(self.left, results[num_returned:])
            del results[num_returned:]
        return tree_util.unflatten(results, self.result_spec)

    def synced(self, program: Program) -> list[torch.Tensor]:
        """Parameters and buffers of the program, in order: what data parallel makes equal at the start."""
        kinds, kept = (InputKind.PARAM, InputKind.BUFFER), program.host_buffers
        pairs = enumerate(zip(program.inputs, self.tensors, strict=True))
        return [
            t for index, (one, t) in pairs if one.kind in kinds and index not in kept and isinstance(t, torch.Tensor)
        ]


def output_slices(program: Program) -> tuple[int, int, int]:
    """Ends of the USER, GRAD and STATE outputs, which come in this order, WRITE outputs last."""
    counts = [
        sum(o.kind is kind for o in program.outputs) for kind in (OutputKind.USER, OutputKind.GRAD, OutputKind.STATE)
    ]
    return counts[0], counts[0] + counts[1], sum(counts)
