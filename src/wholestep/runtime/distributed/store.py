"""The rendezvous store: the key-value channel that every rank reaches, also when collectives hang.

The one door to the parts of torch that hold it. The classes are public as ``torch.distributed.Store`` and so on;
they are named by their home here because that is where their type annotations are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from wholestep.errors import InternalError

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "default_store", "own_connection"]


def default_store() -> Store:
    """The store of the default process group.

    Raises:
        InternalError: there is no default group, or this torch keeps its store elsewhere.
    """
    if not dist.is_initialized():
        raise InternalError("The store was asked for before a process group existed; wholestep.init() makes one.")
    getter = getattr(distributed_c10d, "_get_default_store", None)
    if getter is not None:
        store = getter()
    else:
        groups = getattr(getattr(distributed_c10d, "_world", None), "pg_map", {})
        store = groups.get(dist.group.WORLD, (None, None))[1]
    if not isinstance(store, Store):
        raise InternalError(f"torch {torch.__version__} keeps the store of its default group elsewhere.")
    return store


def own_connection(store: Store) -> Store:
    """A second connection to the same store: a call that blocks on the first does not hold up calls on this one."""
    clone: Store = store.clone()  # type: ignore[attr-defined]  # missing from the annotations of torch
    return clone
