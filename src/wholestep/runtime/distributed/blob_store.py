"""Blobs that one rank makes for all ranks, as bytes in the rendezvous store.

Whoever claims a key first makes its blob, the others wait for it. For the first trace of a step that is rank 0, which
writes before the ranks agree. Later traces come when a rank needs one, and on some ranks never. A blob may be a pickle,
which is code: the store of a process group is trusted, as torch trusts it.

Keys below ``wholestep/blobs/<name>/<key>/``: ``claims``, how many ranks have asked to make the blob; ``<number>``, a
chunk of the bytes; ``chunks``, how many they are, written last, 0 where nothing came of it; ``taken``, how many ranks
have read them. The last one to read them deletes them, all but the claims.
"""

from __future__ import annotations

import time
import zlib

from wholestep.runtime.distributed.store import PrefixStore, Store

_CHUNK_BYTES = 1 << 22
"""TCPStore refuses values of more than 8 MiB."""
_LONGEST_WAIT_S, _PAUSE_S = 600.0, 0.01
"""For a blob that was claimed: compilers take minutes, and a rank that has died claims no other."""


class BlobStore:
    """Named blobs as one rank writes or reads them."""

    def __init__(self, store: Store, name: str, *, rank: int, size: int) -> None:
        """`size`: the number of ranks."""
        self._store, self._readers = PrefixStore(f"wholestep/blobs/{name}", store), size - 1
        self.is_writer = rank == 0
        """Whether this rank makes those of the first trace."""

    def claim(self, key: str) -> bool:
        """Whether this rank is the first to claim a key: it has to `put` its blob or to `give_up` on it."""
        return self._store.add(f"{key}/claims", 1) == 1

    def give_up(self, key: str) -> None:
        """Says that no blob comes for a key that this rank has claimed."""
        self._store.set(f"{key}/chunks", "0")

    def put(self, key: str, data: bytes) -> None:
        """Writes a blob, once per key. Raises torch.distributed.DistError for a store out of reach."""
        packed = zlib.compress(data, level=1)
        starts = range(0, len(packed), _CHUNK_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", packed[start : start + _CHUNK_BYTES])  # type: ignore[arg-type]
        self._store.set(f"{key}/chunks", str(len(starts)))
        self._store.get(f"{key}/chunks")  # a store answers once it has what it was sent before

    def take(self, key: str) -> bytes | None:
        """Reads a blob that another rank has claimed, at most once on every rank, and waits until it is there. None if
        none comes. Raises as `put`, and zlib.error."""
        end = time.monotonic() + _LONGEST_WAIT_S
        while not self._store.check([f"{key}/chunks"]):
            if time.monotonic() > end:
                return None
            time.sleep(_PAUSE_S)
        chunks = range(int(self._store.get(f"{key}/chunks")))
        if not chunks:
            return None
        packed = b"".join(self._store.get(f"{key}/{number}") for number in chunks)
        if self._store.add(f"{key}/taken", 1) == self._readers:
            for name in ("chunks", "taken", *chunks):
                self._store.delete_key(f"{key}/{name}")
        return zlib.decompress(packed)
