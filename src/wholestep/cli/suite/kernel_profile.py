"""Kernels by class, read from their names, and the time that steps spend on each class.

Names are those of torch 2.11 and 2.13 on CUDA: libraries (nvjet, cutlass, cuDNN, NCCL), ATen templates, and kernels of
Inductor, whose names list the operators that are fused into them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wholestep.cli.suite.exposed_time import Interval, exposed_us, idle_us, total_us


class KernelClass(StrEnum):
    """What a kernel is for."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention"
    NCCL = "communication"
    UPDATE = "optimizer update"
    LOSS = "cross-entropy"
    NORMS = "norms"
    POINTWISE = "other fused and pointwise"
    COMBINED = "small kernels in one: casts, updates"
    COPIES = "copies, casts and fills"


_FUSED = re.compile(r"triton_(?!tem)[a-z]+_fused_?(.*)")
"""A kernel of Inductor: ``triton_poi_fused_add_mul_3``. Templates (``triton_tem_fused_mm``) are products."""
_MOVES = re.compile(r"_to_copy|copy_?|clone|cat|stack|unsqueeze|expand|t_?|transpose|permute|view|slice|_|\d")

_FUSED_RULES = (
    # Adam as Inductor lists it; only lists of tensors give the kind "for".
    (KernelClass.UPDATE, r"^for_|adam|sgd|lerp|addcdiv|addcmul|(?<!r)sqrt"),
    (KernelClass.LOSS, r"softmax|nll|cross_entropy|logsumexp|amax.*exp|exp.*log"),
    (KernelClass.NORMS, r"layer_norm|rms_norm|batch_norm|group_norm|rsqrt"),
)
_RULES = (
    # The first that is found counts, so what may stand in names of other classes comes first.
    (KernelClass.NCCL, r"nccl|ptop|symmetric_memory|^_add$|one_shot_all_reduce|two_shot_all_reduce|multimem"),
    (KernelClass.ATTENTION, r"flash|fmha|attention|sdpa|mha_|cudnn::fusion"),
    (KernelClass.UPDATE, r"adam|fusedsgd|fused_sgd|fusedoptimizer|lerp|addcdiv|^update_(lists|numbers)$"),
    (KernelClass.LOSS, r"softmax|nll_loss|nllloss|cross_entropy"),
    (KernelClass.PRODUCTS, r"nvjet|gemm|cutlass|cublas|xmma|splitk|gemv|triton_tem_|wgmma|matmul"),
    (KernelClass.NORMS, r"layer_?norm|rms_?norm|batch_?norm|group_?norm|gammabeta|^_sum_columns$"),
    (KernelClass.COPIES, r"memcpy|memset|copy|catarray|chunk_cat|split_with_sizes|fillfunctor"),
)


def class_of(name: str) -> KernelClass:
    """The class of a kernel, by its name as a profiler gives it."""
    lowered = name.lower()
    if (fused := _FUSED.match(lowered)) is None:
        return _first(_RULES, lowered)
    kind, names = lowered.removeprefix("triton_").partition("_")[0], fused.group(1)
    if kind == "poi" and not names.strip("_0123456789"):
        return KernelClass.COMBINED  # Inductor names them by number alone
    if _MOVES.sub("", names) == "" and kind == "poi":
        return KernelClass.COPIES
    return _first(_FUSED_RULES, f"{kind}_{names}")


def _first(rules: Sequence[tuple[KernelClass, str]], name: str) -> KernelClass:
    return next((one for one, pattern in rules if re.search(pattern, name)), KernelClass.POINTWISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvent:
    """One run of a kernel, or a copy of the device's own."""

    name: str
    start_us: float
    stop_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of one step goes on one device."""

    step_ms: float
    """From the first kernel to the last, per step."""
    busy_ms: dict[str, float]
    """Sum of the times of kernels by class; those that run beside each other count twice."""
    exposed_ms: float
    """Time in which nothing but communication runs."""
    idle_ms: float
    """Time in which nothing runs."""
    kernels: float
    """Kernels and copies of a step."""
    longest: tuple[tuple[str, float], ...]
    """The names that take longest, ms of a step each."""


MARKER = "bitwisexor"
"""A kernel that no training has: what runs on the device up to its end only lets ranks meet."""

_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def device_events(trace: Mapping[str, Any]) -> list[KernelEvent]:
    """What ran on the device, of a trace in Chrome's format as ``torch.profiler`` exports it."""
    return [
        KernelEvent(name=event["name"], start_us=float(event["ts"]), stop_us=float(event["ts"]) + float(event["dur"]))
        for event in trace.get("traceEvents", ())
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_WORK
    ]


def read_trace(path: str) -> list[KernelEvent]:
    """The same of a file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return device_events(json.load(file))


def after_marker(events: Sequence[KernelEvent]) -> list[KernelEvent]:
    """The events that start after the last marker; all of them where there is none."""
    start_us = max((event.stop_us for event in events if MARKER in event.name.lower()), default=-math.inf)
    return [event for event in events if event.start_us >= start_us]


def breakdown(
    events: Sequence[KernelEvent], *, num_steps: int, by_copies: bool = False, num_longest: int = 12
) -> Breakdown | None:
    """What `num_steps` steps in a row spend, per step; None where nothing ran on a device.

    `by_copies`: gradients are reduced by copies between devices. A profiler shows those like copies within a device,
    so all count as communication then, also the few that are none.
    """
    if not events:
        return None
    everything, sent, rest = list[Interval](), list[Interval](), list[Interval]()
    by_class, by_name = dict.fromkeys(map(str, KernelClass), 0.0), dict[str, float]()
    for event in events:
        took_us = event.stop_us - event.start_us
        travels = by_copies and event.name.startswith("Memcpy DtoD")
        kind = KernelClass.NCCL if travels else class_of(event.name)
        for intervals in (everything, sent if kind is KernelClass.NCCL else rest):
            intervals.append((event.start_us, event.stop_us))
        by_class[kind] += took_us
        by_name[event.name] = by_name.get(event.name, 0.0) + took_us
    per_step_ms = 1e-3 / num_steps
    first = sorted(by_name.items(), key=lambda pair: (-pair[1], pair[0]))[:num_longest]
    gaps_us = idle_us(everything)
    return Breakdown(
        step_ms=(total_us(everything) + gaps_us) * per_step_ms,
        busy_ms={name: us * per_step_ms for name, us in by_class.items()},
        exposed_ms=exposed_us(sent, rest) * per_step_ms,
        idle_ms=gaps_us * per_step_ms,
        kernels=len(events) / num_steps,
        longest=tuple((name, us * per_step_ms) for name, us in first),
    )
