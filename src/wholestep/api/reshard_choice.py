"""How many parameters are gathered again for the backward: FSDP's ``reshard_after_forward="auto"``."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from wholestep.config import FSDP, Strategy
from wholestep.ir import node_meta
from wholestep.ir.node_meta import Bucket, BucketKind
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

    Gathering a parameter again costs communication, so no more of them are than it takes to fit the device. Those that
    the forward uses first are: the backward needs them last, so nothing frees memory for longer.
    """
    if not isinstance(strategy, FSDP) or strategy.reshard_after_forward != "auto":
        return place(program, strategy, axes)
    strategy = replace(strategy, reshard_after_forward=False)
    kept = place(program, strategy, axes)
    names = [record.members[0] for record in map(node_meta.bucket, kept.graph.nodes) if _is_kept(record)]

    def placed(num_again: int) -> Program:
        return place(program, strategy, axes, again=frozenset(names[:num_again])) if num_again else kept

    cut = "\n".join(f"{record.name} {record.shape}" for record in kept.inputs if record.shard is not None)
    question = f"how many parameters are gathered again, of {zlib.crc32(cut.encode()):x}"
    num_again, reason = choose(question, lambda: decided(placed, len(names), device_bytes(device)))
    return placed(num_again).with_notes(reason)


def _is_kept(record: Bucket | None) -> TypeGuard[Bucket]:
    """Whether a gather brings what the forward and the backward share: it has no phase of its own."""
    return record is not None and record.kind is BucketKind.GATHER and not record.phase


def decided(placed: Callable[[int], Program], num_params: int, limit_bytes: int | None) -> tuple[int, str]:
    """How many parameters are gathered again for a program to fit into a device's memory, and why.

    Args:
        placed: the program in which so many are.
    """
    if limit_bytes is None:
        return 0, "gathered parameters are kept for the backward: memory of a host is not counted"
    may_bytes, kept_bytes = MEMORY_SHARE * limit_bytes, peak_bytes(placed(0))
    would = f"kept, {bytes_text(kept_bytes)} would live at the peak"
    may = f"{MEMORY_SHARE:.0%} of {bytes_text(limit_bytes)} may"
    if kept_bytes <= may_bytes:
        return 0, f"gathered parameters are kept for the backward: {would} and {may}"
    too_few, enough, found_bytes = 0, num_params, peak_bytes(placed(num_params))
    while found_bytes <= may_bytes and enough - too_few > 1:
        middle = (too_few + enough) // 2
        middle_bytes = peak_bytes(placed(middle))
        if middle_bytes <= may_bytes:
            enough, found_bytes = middle, middle_bytes
        else:
            too_few = middle
    return enough, (
        f"gathered parameters are gathered again for the backward, {enough} of {num_params}: {would}, so "
        f"{bytes_text(found_bytes)} do, and {may}"
    )


def peak_bytes(program: Program) -> int:
    """What lives at most while a program runs, by prediction."""
    return sum(map(node_meta.num_bytes, program.placeholders)) + max(live_bytes(program).values(), default=0)


def device_bytes(device: torch.device) -> int | None:
    """The memory of a GPU; None for a CPU."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None
