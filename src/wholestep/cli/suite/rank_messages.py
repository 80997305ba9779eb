"""Messages between ranks about contenders, through the store, which cannot hang."""

from __future__ import annotations

import itertools
import json
import time
from datetime import timedelta
from typing import Any

from wholestep.errors import RankMissingError
from wholestep.runtime.distributed.store import PrefixStore
from wholestep.runtime.distributed.world import World

FAILED_WAIT_S = 20.0
"""A rank whose contender failed waits so long for the others: they may be in a collective that it will never join."""

_made = itertools.count()  # a second one in the same processes reads no old news


class RankMessages:
    """Rounds in which every rank says something and hears all others."""

    def __init__(self, world: World, *, deadline: float) -> None:
        """`deadline`: seconds of ``time.time``, until which a rank is waited for."""
        self._rank, self._size, self._deadline = world.rank, world.size, deadline
        self._store = PrefixStore(f"wholestep/suite/{next(_made)}", world.store)
        self._rounds = 0

    def all(self, said: Any, *, failed: bool = False) -> list[Any]:
        """What every rank said in this round, in rank order: plain values, as JSON takes them.

        Raises RankMissingError where one says nothing: until the deadline, or for a while where this one `failed`.
        """
        self._rounds += 1
        self._store.set(self._key(self._rank), json.dumps(said))
        wait_s = FAILED_WAIT_S if failed else max(1.0, self._deadline - time.time())
        heard = []
        for rank in range(self._size):
            try:
                self._store.wait([self._key(rank)], timedelta(seconds=wait_s))
            except Exception as error:
                lost = f", whose contender failed: {said}" if failed else ""
                raise RankMissingError(
                    f"Rank {rank} did not come to round {self._rounds} of the suite within {wait_s:.0f} s of rank "
                    f"{self._rank}{lost}. Contenders that were done are kept."
                ) from error
            heard.append(json.loads(self._store.get(self._key(rank))))
        return heard

    def first(self, said: Any) -> Any:
        """What rank 0 says."""
        return self.all(said)[0]

    def _key(self, rank: int) -> str:
        return f"{self._rounds}/{rank}"
