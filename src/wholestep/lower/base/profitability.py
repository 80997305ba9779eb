"""Whether a compiler of kernels pays on the CPU: the predicted step node by node, and in compiled segments.

What a compiler makes kernels of itself (additions, norms, updates) loses its calls, and the memory that one such node
writes only for another one to read. Products run by the faster one of two libraries, where the calibration has
measured both; convolutions and attention are calls of the same libraries in both.
How long the compilation takes is no part of this: only the user knows how many steps there will be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.ir.program import Program

ENOUGH = 0.05
"""The share of the computation that has to go. The share itself is predicted to about as much."""


def saved_share(program: Program, cost: CostModel, *, compiles: Callable[[fx.Node], bool]) -> float:
    """How much shorter the computation of a placed program becomes in compiled segments: 0.0 not at all, near 1.0
    nearly all of it. `compiles` says which nodes the compiler may have."""
    nodes = list(program.graph.nodes)
    compiled = replace(cost, compiles=compiles, device=cost.device.tuned())
    apart_us, compiled_us = (sum(model.times_us(nodes).values()) for model in (cost, compiled))
    return 1 - compiled_us / apart_us if apart_us else 0.0
