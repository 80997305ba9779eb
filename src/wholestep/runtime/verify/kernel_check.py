"""Compiled segments beside their own operators: whether kernels compute what the program says.

Note: what may differ
    Kernels add in another order, and keep in float32 what operators round on the way. How far that may lead is
    measured: the operators run once more, with every number that they are given moved by up to one rounding. A result
    may be off by `AMPLIFIED` times what that has moved it, or in the second half of its digits (``sqrt(eps)`` of its
    largest element, of the narrowest type in the segment). Whole numbers may differ where they moved.
    Source: Parker, "Monte Carlo Arithmetic", 1997, measures rounding by moving operands at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import node_meta
from wholestep.ir.program import Program
from wholestep.ir.segment import Compiled, Segment
from wholestep.passes.pass_manager import Pass
from wholestep.runtime.verify.first_divergence import Where, difference_at
from wholestep.runtime.verify.tolerance import Gap, distances, farthest, largest
from wholestep.runtime.verify.verification import Check, Difference, Outcome

NAME = "kernels = operators"
AMPLIFIED = 64
"""Times the distance by which a result moved with its arguments."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the backend of a step makes of its programs."""

    passes: Callable[[Program], list[Pass]]
    """For a placed program."""
    compile: Callable[[Program], Mapping[Segment, Compiled]]
    """The segments of a scheduled program, compiled; none where the backend compiles nothing."""


class KernelCheck:
    """Compares segments on the first rank, each on what the operators before it have given."""

    def __init__(self, why_not: str) -> None:
        """`why_not`: why nothing is compared, if nothing is."""
        self._why_not, self._num_segments = why_not, 0
        self._used = 0.0
        """The largest share of an allowed distance that was reached."""
        self._first: Difference | None = None

    def watch(self, program: Program, compiled: Mapping[Segment, Compiled], number: int) -> None:
        """Has every segment of a program compare, when it first runs. `number`: of the step, from 1."""
        for node in program.graph.nodes:
            if node.target in compiled:
                node.target = _Compared(node.target, compiled[node.target], self._noted, (number, 0))

    @property
    def check(self) -> Check:
        """What was found so far."""
        if self._first is not None:
            text = f"{self._first.name} of a compiled segment differs by more than rounding"
            return Check(name=NAME, outcome=Outcome.FAILED, text=text, difference=self._first)
        if not self._num_segments:
            return Check(name=NAME, outcome=Outcome.SKIPPED, text=self._why_not)
        text = f"{self._num_segments} segments; the farthest apart reach {self._used:.2g} of what rounding may do"
        return Check(name=NAME, outcome=Outcome.PASSED, text=text)

    def _noted(self, results: Sequence[tuple[fx.Node, Gap]], where: Where) -> None:
        self._num_segments += 1
        for node, one in results:
            if one.allowed and math.isfinite(one.distance):
                self._used = max(self._used, one.distance / one.allowed)
            if one.is_fault and self._first is None:
                self._first = difference_at(node, one, where, name=node.name)


@dataclass(slots=True, eq=False, repr=False)
class _Compared:
    """In the place of a segment: runs its operators, the first time its kernels, too."""

    segment: Segment
    compiled: Compiled
    noted: Callable[[Sequence[tuple[fx.Node, Gap]], Where], None]
    where: Where
    is_compared: bool = False

    def __repr__(self) -> str:
        return self.segment.name

    def __call__(self, *given: Any) -> list[Any]:
        if self.is_compared:
            return self.segment(list(given))
        self.is_compared = True
        perturbed, own = _perturbed(given), _copied(given)
        results = self.segment(list(given))
        wanted = _with_stored(self.segment, results, given)
        near = _with_stored(self.segment, self.segment(list(perturbed)), perturbed)
        got = _with_stored(self.segment, self.compiled(list(own)), own)
        nodes: Any = self.segment.graph.output_node().args[0]
        eps = _widest_eps(self.segment)
        rows = zip(nodes, wanted, near, got, strict=True)
        self.noted([(node, _gap(one, close, mine, eps)) for node, one, close, mine in rows], self.where)
        return results


def _gap(wanted: torch.Tensor, near: torch.Tensor, got: torch.Tensor, eps: float) -> Gap:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return Gap(index=(), got=math.nan, wanted=math.nan, distance=math.inf, allowed=0.0)
    moved = distances(near, wanted)
    moved = moved[moved.isfinite()]  # one that moved without bound would allow everything
    allowed = AMPLIFIED * float(moved.max()) if moved.numel() else 0.0
    if wanted.is_floating_point():
        allowed = max(allowed, math.sqrt(eps) * largest(wanted))
    return farthest(got, wanted, allowed)


def _with_stored(segment: Segment, results: Sequence[Any], arguments: Sequence[Any]) -> list[torch.Tensor]:
    """All results, those that a segment stores in its arguments among them."""
    stored = {result: arguments[argument] for argument, result in segment.stored}
    return [stored.get(place, one) for place, one in enumerate(results)]


def _copied(arguments: Sequence[Any]) -> list[Any]:
    """Tensors of their own with the same strides; what sees an element twice is not written to, and stays."""
    return [_copy(one) if isinstance(one, torch.Tensor) else one for one in arguments]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if _sees_twice(tensor):
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def _perturbed(arguments: Sequence[Any]) -> list[Any]:
    """Copies, with numbers moved by up to a rounding of their type."""
    generators: dict[torch.device, torch.Generator] = {}

    def one(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return _copy(tensor) if isinstance(tensor, torch.Tensor) else tensor
        device = tensor.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        share = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=device) * 2 - 1
        found = tensor.detach().double() * (1 + torch.finfo(tensor.dtype).eps * share)
        return found.to(tensor.dtype) if _sees_twice(tensor) else _copy(tensor).copy_(found)

    return [one(argument) for argument in arguments]


def _sees_twice(tensor: torch.Tensor) -> bool:
    """Whether elements share a place in memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _widest_eps(segment: Segment) -> float:
    """The eps of the narrowest type that a segment computes in."""
    floats = (one.dtype for node in segment.graph.nodes for one in node_meta.tensors(node) if one.is_floating_point())
    return max((torch.finfo(dtype).eps for dtype in dict.fromkeys(floats)), default=0.0)
