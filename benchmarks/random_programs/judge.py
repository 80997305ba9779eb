"""Whether a compiled program did what eager code does, and the smallest program that shows that it did not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.idioms import Idiom
from benchmarks.idioms.compare import outcome, play
from benchmarks.random_programs.program import CALLS, Program
from wholestep.config import DDP, Strategy

SHOWN = 5
"""Differences of a program that are told."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a program."""

    program: Program
    kind: str
    """As of `Outcome`, or ``discarded`` where eager code itself fails."""
    complaints: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return not self.complaints

    @property
    def told(self) -> str:
        """The seed, the differences and the text."""
        return "\n".join([f"seed {self.program.seed}: {self.kind}", *self.complaints[:SHOWN], self.program.text])


Judge = Callable[[Program], Verdict]


def judged(
    program: Program, strategy: Strategy | None = None, grad_weight: float | None = None, *, is_wrapped: bool = False
) -> Verdict:
    """Runs a program both ways; compiled with a strategy, and with gradients that count so much on this rank.

    Eager code that wraps its network trains on all ranks, too, and has the same weight.
    """
    name = f"program {program.seed}"
    built = functools.partial(program.loop, grad_weight if is_wrapped else None)
    try:
        want = play(Idiom(name=name, group="random", build=built), lambda step: step, calls=CALLS)
    except Exception as error:
        return Verdict(program, f"discarded, {type(error).__name__}", ())
    idiom = Idiom(name=name, group="random", build=functools.partial(program.loop, grad_weight))
    # Gradients are added before or after they are averaged; norms of shards are added up.
    rounds = grad_weight is not None or not isinstance(strategy, DDP | None)
    found = outcome(idiom, calls=CALLS, strategy=strategy, want=want, rounds=rounds)
    return Verdict(program, found.kind, found.complaints)


def shrunk(failing: Verdict, judge: Judge = judged) -> Verdict:
    """The same failure, of a program that fails no more if any statement is left out."""
    while True:
        for smaller in failing.program.smaller():
            found = judge(smaller)
            if not found.holds:
                failing = found
                break
        else:
            return failing
