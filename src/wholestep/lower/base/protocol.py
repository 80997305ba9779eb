"""The interface of backends: the passes that they add, and how they make a function of a scheduled program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.fx as fx
from torch import Tensor

from wholestep.cost.cost_model import CostModel
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.ir.segment import Compiled, Segment
from wholestep.passes.comm.wire_format import WireFormat
from wholestep.passes.pass_manager import Pass

Wait = Callable[[Tensor], Tensor]
"""Stands in for ``wait_tensor``."""


@dataclass(frozen=True, slots=True)
class ExecutionMode:
    """How a lowered program runs."""

    description: str
    """For people."""
    is_one_launch: bool = False
    """Whether the host launches the whole step at once."""


class Backend(Protocol):
    """Adds passes to a plan, and makes a function of what they have planned."""

    @property
    def shares_kernels(self) -> bool:
        """Whether ranks load what rank 0 compiles: it lowers before the ranks agree, the others afterwards."""

    def prepare(self) -> None:
        """Starts slow work that compiling will need, before anything is captured."""

    def passes(self, placed: Program) -> list[Pass]:
        """Passes for a program, to run before the one that lets operators write in place."""

    def costs(self, cost: CostModel) -> CostModel:
        """A cost model of nodes as they will run, made from one of nodes that run one by one."""

    def wire_format(self, grad: fx.Node, group: str) -> WireFormat:
        """How a placed gradient is sent within the group that reduces it."""

    def fingerprint(self) -> list[tuple[str, str]]:
        """All that compiled code depends on besides the program, as pairs of a name and a value."""

    def dump_kernels(self, program: Program) -> tuple[bytes | None, ...]:
        """The compiled code of a program, for another process; None for code that cannot be written."""

    def load_kernels(self, program: Program, kernels: tuple[bytes | None, ...]) -> None:
        """Takes over code that another process has dumped, for when the program is lowered."""

    def compile_segments(self, program: Program) -> Mapping[Segment, Compiled]:
        """What is made of each segment of a program; empty where nothing is compiled."""

    def lower(self, program: Program, wait: Wait | None = None) -> Step:
        """A function from flat inputs to flat results, in which `wait` stands in for ``wait_tensor``."""

    def execution_mode(self, step: Step) -> ExecutionMode:
        """How a function that `lower` has made runs."""
