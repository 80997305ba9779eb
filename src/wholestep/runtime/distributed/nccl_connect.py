"""NCCL's communicator, made beside other work.

NCCL connects the GPUs of a group with its first collective, which takes a third of a second and more, in which the host
waits. Ranks that have all found the same saved step will need it, and have kernels to load meanwhile; ranks that have
planned theirs wait for kernels to be compiled.
"""

from __future__ import annotations

import threading

import torch

from wholestep.ir.ops.collectives import group_named
from wholestep.ir.program import MeshAxis
from wholestep.util import background

_connecting: list[threading.Thread] = []


def begin(axes: tuple[MeshAxis, ...], device: torch.device) -> None:
    """Connects the ranks of each axis in a thread, if they are GPUs that nothing has connected yet.

    To be called by all ranks or none, where no rank is likely to fail before `wait`, before which nobody may
    communicate within the group.
    """
    for axis in axes:
        if axis.size > 1 and device.type == "cuda":
            _begin(axis, device)


def _begin(axis: MeshAxis, device: torch.device) -> None:
    backend = group_named(axis.group)._get_backend(device)
    # Private methods of torch (2.11 to 2.13): without them the first collective connects.
    connects = getattr(backend, "eager_connect_single_device", None)
    is_connected = getattr(backend, "_is_initialized", None)
    if backend.name() != "nccl" or connects is None or is_connected is None or is_connected():
        return

    def connect() -> None:
        with torch.cuda.device(device):
            connects(device)

    _connecting.append(background.start_in_background(connect))


def wait() -> None:
    """Returns when what was begun is done."""
    while _connecting:
        _connecting.pop().join()
