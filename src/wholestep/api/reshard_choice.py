"""Whether gathered parameters are kept for the backward or gathered again: FSDP's ``reshard_after_forward="auto"``."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from wholestep.config import FSDP, Strategy
from wholestep.ir import node_meta
from wholestep.ir.printer import bytes_text
from wholestep.ir.program import MeshAxis, Program
from wholestep.passes.analysis.task_graph import live_bytes
from wholestep.place.strategies import place

MEMORY_SHARE = 0.8
"""Of a device's memory, what a step may take by prediction: kernels need workspaces, and allocators leave gaps."""

Choose = Callable[[str, Callable[[], Any]], Any]
"""Gives rank 0's answer to a question; the answer is something that JSON holds."""


def place_and_choose(
    program: Program, strategy: Strategy | None, axes: tuple[MeshAxis, ...], device: torch.device, choose: Choose
) -> Program:
    """`place`, where what the strategy leaves open is chosen, and the reason noted.

    Parameters are kept if the step fits the device so: gathering them again costs communication.
    """
    if not isinstance(strategy, FSDP) or strategy.reshard_after_forward != "auto":
        return place(program, strategy, axes)
    kept = place(program, replace(strategy, reshard_after_forward=False), axes)
    cut = "\n".join(f"{record.name} {record.shape}" for record in kept.inputs if record.shard is not None)
    question = f"whether parameters are gathered again, of {zlib.crc32(cut.encode()):x}"
    keeps, reason = choose(question, lambda: decided(kept, device_bytes(device)))
    placed = kept if keeps else place(program, replace(strategy, reshard_after_forward=True), axes)
    return placed.with_notes(reason)


def decided(kept: Program, limit_bytes: int | None) -> tuple[bool, str]:
    """Whether a program that keeps what it gathers fits into a device's memory, and why."""
    if limit_bytes is None:
        return True, "gathered parameters are kept for the backward: memory of a host is not counted"
    inputs_bytes = sum(map(node_meta.num_bytes, kept.placeholders))
    peak_bytes = inputs_bytes + max(live_bytes(kept).values(), default=0)
    keeps = peak_bytes <= MEMORY_SHARE * limit_bytes
    what = "kept for the backward" if keeps else "gathered again for the backward"
    return keeps, (
        f"gathered parameters are {what}: kept, {bytes_text(peak_bytes)} would live at the peak, and "
        f"{MEMORY_SHARE:.0%} of {bytes_text(limit_bytes)} may"
    )


def device_bytes(device: torch.device) -> int | None:
    """The memory of a GPU; None for a CPU."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None
