"""The host's part of a step, which the device waits for: what it makes of equal numbers is computed once.

An optimizer keeps a step counter per parameter, and makes the same bias corrections of each. Before and after::

    one = counters[0].item()                     one = counters[0].item()
    rate_0 = lr / (1 - beta ** one)              two = counters[1].item()
    two = counters[1].item()               ->    rate = lr / (1 - beta ** one)       # if one == two
    rate_1 = lr / (1 - beta ** two)

Note: nothing is assumed
    The numbers are read in every call. Which of them are equal is the key of the program that runs behind them: it does
    the same arithmetic on the same numbers, so results are the same bits. Where numbers are equal in another way at
    every call, all arithmetic is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta
from wholestep.ir.ops.packed_scalars import pack
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.lower.cudagraph.partition import extract
from wholestep.passes.rewrites.cse import eliminate_common_subexpressions, is_arithmetic

MOST_PATTERNS = 4
"""Ways in which numbers may be equal for which there is a program of its own."""

FEWEST_NUMBERS = 4
"""With fewer of them, comparing takes as long as computing."""

_READ = torch.ops.aten._local_scalar_dense.default

Pattern = tuple[int, ...]
"""Per number the place of the first one that it is equal to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitHost:
    """The host's part of a step in two: what reads numbers, and what is made of them."""

    before: Program
    """Takes all inputs; gives what `after` needs of it, the numbers last."""
    after: Program
    """Takes all inputs, then what `before` gives."""
    num_numbers: int


def split_host(host: Program) -> SplitHost | None:
    """The two parts; None if only few numbers are read.

    Numbers count up to the first call that does more with one than to compute or to pack it, since what stands behind
    may see what that call does. Those of one dtype count, which most have: 3 and 3.0 are equal and not the same.
    """
    nodes = [node for node in host.graph.nodes if node.op == "call_function"]
    reads = _reads_of_one_dtype(nodes)
    made, end = dict.fromkeys(reads), len(nodes)
    for place, node in enumerate(nodes):
        if node not in made and any(arg in made for arg in node.all_input_nodes):
            if not (is_arithmetic(node) or node.target is pack):
                end = place
                break
            made[node] = None
    before = {node: None for node in nodes[:end] if node in reads or node not in made}
    numbers = [node for node in reads if node in before]
    if len(numbers) < FEWEST_NUMBERS:
        return None
    needed = {arg for node in nodes if node not in before for arg in node.all_input_nodes}
    needed |= {value for value in host.results if isinstance(value, fx.Node)}
    given = [*(node for node in before if node in needed and node not in reads), *numbers]
    after = set(nodes).difference(before)
    return SplitHost(
        before=extract(host, given, keep=before.__contains__),
        after=extract(host, host.results, keep=after.__contains__, inputs=[*host.placeholders, *given]),
        num_numbers=len(numbers),
    )


def _reads_of_one_dtype(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    by_dtype: dict[torch.dtype, dict[fx.Node, None]] = {}
    for node in nodes:
        if node.target is _READ:
            by_dtype.setdefault(node_meta.tensor(node.args[0]).dtype, {})[node] = None  # type: ignore[arg-type]
    return max(by_dtype.values(), key=len, default={})


def pattern_of(numbers: Sequence[Any]) -> Pattern:
    """Which numbers are equal. Zeros are apart, since 0.0 and -0.0 are equal and not the same; so is what is none."""
    if numbers[0] and numbers.count(numbers[0]) == len(numbers):
        return (0,) * len(numbers)
    first: dict[Any, int] = {}
    return tuple(first.setdefault(number, place) if number else place for place, number in enumerate(numbers))


def merge_equal(after: Program, pattern: Pattern) -> Program:
    """The program for numbers, its last inputs, that are equal as `pattern` says."""
    program = graph_edit.copy(after)
    numbers = program.placeholders[-len(pattern) :]
    for number, place in zip(numbers, pattern, strict=True):
        if numbers[place] is not number:
            number.replace_all_uses_with(numbers[place])
    program = eliminate_common_subexpressions(program)
    graph_edit.remove_dead_code(program.graph)
    return program


class HostPart:
    """Runs the host's part: a function from the inputs of the step to what the pieces need, then the host's results."""

    def __init__(self, program: Program, lower: Callable[[Program], Step]) -> None:
        """`lower` makes a function of a program."""
        self._lower, self._split = lower, split_host(program)
        self._before = lower(program if self._split is None else self._split.before)
        self._after: dict[Pattern, Step] = {}

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Results that are None at the end are left out."""
        found = self._before(list(inputs))
        if self._split is None:
            return found
        pattern = pattern_of(found[-self._split.num_numbers :])
        step = self._after.get(pattern) or self._after_for(pattern, self._split)
        return step([*inputs, *found])

    def _after_for(self, pattern: Pattern, split: SplitHost) -> Step:
        if len(self._after) >= MOST_PATTERNS:
            pattern = tuple(range(split.num_numbers))  # none equal: right for all
        if pattern not in self._after:
            self._after[pattern] = self._lower(merge_equal(split.after, pattern))
        return self._after[pattern]
