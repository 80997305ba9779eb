"""Blobs that rank 0 makes for all ranks, as bytes in the rendezvous store.

Rank 0 writes them before the ranks agree, the others read them afterwards, so nobody waits. A blob may be a pickle,
which is code: the store of a process group is trusted, as torch trusts it.

Keys below ``wholestep/blobs/<name>/<key>/``: ``<number>``, a chunk of the bytes; ``chunks``, how many they are, written
last; ``taken``, how many ranks have read them. The last one to read them deletes them.
"""

from __future__ import annotations

import zlib

from wholestep.runtime.distributed.store import PrefixStore, Store

_CHUNK_BYTES = 1 << 22
"""TCPStore refuses values of more than 8 MiB."""


class BlobStore:
    """Named blobs as one rank writes or reads them."""

    def __init__(self, store: Store, name: str, *, rank: int, size: int) -> None:
        """`size`: the number of ranks."""
        self._store, self._readers = PrefixStore(f"wholestep/blobs/{name}", store), size - 1
        self.is_writer = rank == 0
        """Whether this rank puts blobs, and the others take them."""

    def put(self, key: str, data: bytes) -> None:
        """Writes a blob, once per key. Raises torch.distributed.DistError for a store out of reach."""
        packed = zlib.compress(data, level=1)
        starts = range(0, len(packed), _CHUNK_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", packed[start : start + _CHUNK_BYTES])  # type: ignore[arg-type]
        self._store.set(f"{key}/chunks", str(len(starts)))
        self._store.get(f"{key}/chunks")  # a store answers behind what it was sent before

    def take(self, key: str) -> bytes | None:
        """Reads a blob, at most once on every rank; None if there is none. Raises as `put`, and zlib.error."""
        if not self._store.check([f"{key}/chunks"]):
            return None
        chunks = range(int(self._store.get(f"{key}/chunks")))
        packed = b"".join(self._store.get(f"{key}/{number}") for number in chunks)
        if self._store.add(f"{key}/taken", 1) == self._readers:
            for name in ("chunks", "taken", *chunks):
                self._store.delete_key(f"{key}/{name}")
        return zlib.decompress(packed)
