"""Idioms of everyday training steps: what people write inside of a step, each a small loop that eager code runs."""

from benchmarks.idioms.base import CALLS, IDIOMS, Idiom, Loop
from benchmarks.idioms.groups import GROUPS

__all__ = ["CALLS", "GROUPS", "IDIOMS", "Idiom", "Loop"]
