"""Whether a compiled program did what eager code does, and the smallest program that shows that it did not."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.idioms import Idiom
from benchmarks.idioms.compare import outcome, play
from benchmarks.random_programs.program import CALLS, Program

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


def judged(program: Program) -> Verdict:
    """Runs a program both ways."""
    idiom = Idiom(name=f"program {program.seed}", group="random", build=program.loop)
    try:
        play(idiom, lambda step: step, calls=CALLS)
    except Exception as error:
        return Verdict(program, f"discarded, {type(error).__name__}", ())
    found = outcome(idiom, calls=CALLS)
    return Verdict(program, found.kind, found.complaints)


def shrunk(failing: Verdict) -> Verdict:
    """The same failure, of a program that fails no more if any statement is left out."""
    while True:
        for smaller in failing.program.smaller():
            found = judged(smaller)
            if not found.holds:
                failing = found
                break
        else:
            return failing
