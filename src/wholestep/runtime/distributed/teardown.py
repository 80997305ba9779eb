"""What has to go before a process group does.

NCCL destroys a communicator only when all CUDA graphs that hold its kernels are gone. A compiled step keeps such a
graph, and is itself kept by whoever decorated a function, so that ``destroy_process_group()`` at the end of a script
would wait for ever.
"""

from __future__ import annotations

import functools
import weakref
from typing import Protocol

import torch.distributed as dist


class Holder(Protocol):
    """Something that process groups wait for. It is looked for as long as it lives, and not kept alive."""

    def let_go(self, group: str) -> None:
        """Gives up what belongs to the group of this name, which is about to end."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def goes_first(holder: Holder) -> None:
    """From now on `holder` lets go before a process group ends, whoever ends it."""
    _look_out()
    _holders.add(holder)


@functools.cache
def _look_out() -> None:
    """Has holders let go where torch shuts a group down: a method that ``destroy_process_group`` calls, under whatever
    name the user has imported that one."""
    shutdown = dist.ProcessGroup.shutdown

    @functools.wraps(shutdown)
    def shut_down(group: dist.ProcessGroup) -> None:
        for holder in list(_holders):
            holder.let_go(group.group_name)
        shutdown(group)

    dist.ProcessGroup.shutdown = shut_down  # type: ignore[method-assign, assignment]
