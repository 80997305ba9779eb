"""Programs of steps with collectives, seen from one of four ranks that talk to nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.unit.capture.steps import program_of
from wholestep.cost.cost_model import CostModel
from wholestep.ir.printer import plan_text, source
from wholestep.ir.program import Program
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes
from wholestep.place.strategies import place

RANK, SIZE = 1, 4
Groups = dict[str, Any]


def captured(step: Callable[..., Any], *args: Tensor) -> Program:
    return program_of(step, *(args or (torch.ones(SIZE, 3),)))


def scheduled(step: Callable[..., Any], *args: Tensor) -> Program:
    return run_passes(place(captured(step, *args), None, ()), passes_of(cost=CostModel.default("cpu+gloo")))


def plan(step: Callable[..., Any]) -> list[str]:
    """The plan without its header."""
    return plan_text(scheduled(step)).splitlines()[2:]


def num_waits(step: Callable[..., Any]) -> int:
    return source(scheduled(step), comments=False).count("wait_tensor.default(")
