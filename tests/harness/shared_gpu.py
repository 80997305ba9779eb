"""Ranks that share one GPU, so that what needs several can be tested on a machine with one: WHOLESTEP_SHARED_GPU=1.

NCCL refuses two ranks of one host on one GPU, so every rank says that it is a host of its own (NCCL_HOSTID), and they
talk through sockets. Memory is mapped across processes as it is across GPUs. Kernels, graphs and their order are those
of several GPUs; times are not, as the processes take turns on the GPU.
"""

from __future__ import annotations

import os

import torch

from wholestep.runtime.distributed import launch

ASKED = os.environ.get("WHOLESTEP_SHARED_GPU") == "1"
_of_a_rank = launch._rank_environment


def environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """That of a rank, which is to take the first GPU."""
    return _of_a_rank(rank, nproc, port) | {
        "LOCAL_RANK": "0", "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }  # fmt: skip


def count() -> int:
    """How many ranks have a GPU."""
    return 8 if ASKED and torch.cuda.device_count() else torch.cuda.device_count()


if ASKED:
    launch._rank_environment = environment
