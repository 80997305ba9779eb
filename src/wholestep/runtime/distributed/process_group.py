"""Process groups of torch: their backends, how long they wait, and what is to be done before one ends.

[Note: graphs end before groups]
NCCL destroys a communicator only when all CUDA graphs that hold its kernels are gone. A compiled step keeps such a
graph, and is itself kept by whoever decorated a function, so that ``destroy_process_group()`` at the end of a script
would wait for ever.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol

import torch
import torch.distributed as dist

from wholestep.errors import ConfigError


class GroupUser(Protocol):
    """An object that must release a process group before it ends. Only a weak reference to it is kept."""

    def release_group(self, group: str) -> None:
        """Releases everything of the group of this name, which is about to end."""


_users: weakref.WeakSet[GroupUser] = weakref.WeakSet()


def release_before_teardown(user: GroupUser) -> None:
    """From now on `user` releases a process group before it ends, whoever ends it."""
    _patch_shutdown()
    _users.add(user)


@functools.cache
def _patch_shutdown() -> None:
    """Calls `release_group` where torch shuts a group down: in a method that ``destroy_process_group`` calls, under
    whatever name the user has imported that one."""
    shutdown = dist.ProcessGroup.shutdown

    @functools.wraps(shutdown)
    def shut_down(group: dist.ProcessGroup) -> None:
        for user in list(_users):
            user.release_group(group.group_name)
        shutdown(group)

    dist.ProcessGroup.shutdown = shut_down  # type: ignore[method-assign, assignment]


def with_gloo(backend: str) -> str:
    """nccl alone cannot carry CPU tensors, such as the step counters of optimizers, so gloo goes with it."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def chosen_backend(backend: str | None) -> str:
    """The backend that a name stands for, None for the usual one. Raises ConfigError where it cannot be used here."""
    if backend is None:
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    backend = with_gloo(backend)
    known = {name.lower() for name in dist.Backend.backend_list}
    for part in backend.split(","):
        if part.rpartition(":")[2] not in known:
            raise ConfigError(f"init(backend={backend!r}): {part!r} is no backend; torch has {sorted(known)}.")
    if "nccl" in backend and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError(f"init(backend={backend!r}) wants CUDA and NCCL, which are not available here. Use gloo.")
    return backend


def default_backend() -> str:
    """The backend of the default group, as ``cpu:gloo,cuda:nccl`` or ``gloo``."""
    if dist.get_backend() == "nccl":
        return "nccl"
    return "cpu:gloo,cuda:nccl" if "nccl" in str(dist.get_backend_config()) else str(dist.get_backend())


def own_timeout_s(group: dist.ProcessGroup) -> float | None:
    """How long a collective of the group waits for a rank, in seconds: ``init_process_group(timeout=...)``.

    The shortest where its backends differ; None where none of them says.
    """
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    known = [getattr(one, "_timeout", None) for one in options]
    return min((timeout.total_seconds() for timeout in known if timeout is not None), default=None)


def carries_host_tensors(group: dist.ProcessGroup) -> bool:
    """Whether tensors of the CPU can be sent through a group: not where the user has asked for NCCL alone."""
    return any(device.type == "cpu" for device in group._device_types)


def device_of_rank(backend: str, local_rank: int) -> torch.device:
    """The device of this rank, made the current one when it is a GPU."""
    if "nccl" not in backend:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not 0 <= local_rank < count:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} wants a GPU of its own, and this process sees {count} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'is not set')}). Start at most one process "
            "per GPU on a host and let all of them see all of its GPUs, as torchrun does; or use "
            'init(backend="gloo") on the CPU.'
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
