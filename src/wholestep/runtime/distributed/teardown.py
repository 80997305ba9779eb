"""Releases CUDA graphs before the process groups whose kernels they hold end.

NCCL destroys a communicator only when all CUDA graphs that hold its kernels are gone. A compiled step keeps such a
graph, and is itself kept by whoever decorated a function, so that ``destroy_process_group()`` at the end of a script
would wait for ever.
"""

from __future__ import annotations

import functools
import weakref
from typing import Protocol

import torch.distributed as dist


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
