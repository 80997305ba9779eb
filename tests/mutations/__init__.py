"""Faults that `tests/mutation_check.py` puts into a copy of wholestep."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One fault: what it is, where, and the tests of which at least one must fail."""

    name: str
    what: str
    file: str
    """Below src/wholestep."""
    old: str
    new: str
    tests: tuple[str, ...]
    says: str = ""
    """What the failure must say, where failing for another reason would prove nothing."""
    since: str = ""
    """The first torch with which its tests exist; empty for any."""

    def exists(self) -> bool:
        """Whether this torch has its tests."""
        return torch.__version__ >= self.since
