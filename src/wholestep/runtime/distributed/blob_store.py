"""The shelf: what rank 0 makes for all ranks, as bytes in the rendezvous store.

Rank 0 puts things there before a meeting, the others look behind it: nobody waits at the shelf. What lies there may be
a pickle, which is code: the store of a process group is trusted, as torch trusts it.

Keys below ``wholestep/shelf/<name>/<key>/``: ``<number>``, the parts of the bytes; ``parts``, how many they are,
written last; ``taken``, how many ranks have read them. The last one to read them deletes them.
"""

from __future__ import annotations

import zlib

from wholestep.runtime.distributed.store import PrefixStore, Store

_PART_BYTES = 1 << 22
"""TCPStore refuses values of more than 8 MiB."""


class BlobStore:
    """One rank's way to the shelf of a name, of which every rank has one."""

    def __init__(self, store: Store, name: str, *, rank: int, size: int) -> None:
        """`size`: the number of ranks."""
        self._store, self._readers = PrefixStore(f"wholestep/shelf/{name}", store), size - 1
        self.is_filled_here = rank == 0
        """Whether this rank puts things there, and the others take them."""

    def put(self, key: str, data: bytes) -> None:
        """Puts something there, once per key. Raises torch.distributed.DistError for a store out of reach."""
        packed = zlib.compress(data, level=1)
        starts = range(0, len(packed), _PART_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", packed[start : start + _PART_BYTES])  # type: ignore[arg-type]
        self._store.set(f"{key}/parts", str(len(starts)))
        self._store.get(f"{key}/parts")  # a store answers behind what it was sent before

    def take(self, key: str) -> bytes | None:
        """What lies there, at most once on every rank; None if there is nothing. Raises as `put`, and zlib.error."""
        if not self._store.check([f"{key}/parts"]):
            return None
        parts = range(int(self._store.get(f"{key}/parts")))
        packed = b"".join(self._store.get(f"{key}/{number}") for number in parts)
        if self._store.add(f"{key}/taken", 1) == self._readers:
            for name in ("parts", "taken", *parts):
                self._store.delete_key(f"{key}/{name}")
        return zlib.decompress(packed)
