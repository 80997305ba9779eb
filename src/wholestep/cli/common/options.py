"""Options that several commands share: how many ranks, how many threads each, and JSON."""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer

from wholestep.errors import ConfigError

Nproc = Annotated[int | None, typer.Option(help="Processes (default: one per local GPU, or 2 on the CPU).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]

CPU_RANKS = 2
"""Ranks on a machine without GPUs: the smallest number that has something to reduce."""


def choose_nproc(requested: int | None) -> int:
    """The number asked for; by default one per local GPU, or two on the CPU.

    Raises ConfigError for less than one, and for more than there are GPUs.
    """
    num_gpus = torch.cuda.device_count()
    if requested is None:
        return num_gpus or CPU_RANKS
    if requested < 1:
        raise ConfigError(f"--nproc wants at least 1 process, got {requested}.")
    if 0 < num_gpus < requested:
        raise ConfigError(
            f"--nproc asks for {requested} processes, but this machine has {num_gpus} GPUs and each process needs its "
            f"own. Ask for at most {num_gpus}, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU."
        )
    return requested


def num_cores() -> int:
    """Cores that this process may use: what ``taskset`` or a container leaves of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(nproc: int) -> int:
    """Cores divided among the ranks of this machine, at least one each."""
    return max(1, num_cores() // nproc)
