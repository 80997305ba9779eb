"""Agreements of the ranks that run one compiled step: on plans, and on choices of rank 0."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from wholestep.errors import RankMismatchError, RankMissingError
from wholestep.runtime.distributed.blob_store import BlobStore
from wholestep.runtime.distributed.consensus import abandon, agree
from wholestep.runtime.distributed.world import World

_made: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # compiled steps of each name


class Rendezvous:
    """The meetings of one compiled step. Ranks hold them in the same order; a step that fails disturbs no other one."""

    def __init__(self, name: str, calls: Callable[[], int] = lambda: 0, number: int | None = None) -> None:
        """`calls` says how many calls of the step there were on this rank, the one that runs among them.

        `number` tells steps of one name apart, and is the same on all ranks: by default how many were made before.
        """
        self._name, self._count = name, itertools.count()
        self._number = next(_made[name]) if number is None else number
        self._calls = calls
        self._agreed: set[str] = set()
        self._chosen: dict[str, Any] = {}

    def call(self) -> str:
        """``train_step, call 7``: which call of which compiled step this is, in the same words on every rank."""
        number = f" ({self._number + 1})" if self._number else ""
        return f"{self._name}{number}, call {self._calls()}"

    def agree(self, plan: str, by_rank: Callable[[], str], world: World) -> None:
        """Returns when all ranks have shown the same plan. Raises as `agree.agree` does.

        A plan that all ranks agreed on before needs no second meeting, to which the others might not come:
        a rank whose last batch is smaller captures again, with the same schedule.
        """
        if world.size == 1 or plan in self._agreed:
            return
        agree(
            plan, store=world.store, rank=world.rank, size=world.size, key=self._next(), timeout_s=world.timeout_s,
            what=f"the plan of {self._name}", call=self.call(), peers=world, detail=by_rank,
        )  # fmt: skip
        self._agreed.add(plan)

    def abandon(self, error: Exception, world: World) -> None:
        """Tells the others that this rank will not come to the next meeting."""
        if world.size > 1:
            what = f"the plan of {self._name}"
            abandon(error, store=world.store, rank=world.rank, key=self._next(), size=world.size, what=what)

    @contextmanager
    def abandoned_on_error(self, world: World) -> Iterator[None]:
        """Around work before a meeting: an error tells the others that this rank will not come.

        Not one that a meeting has decided, which all ranks know of: they may meet again, and live steps do.
        """
        try:
            yield
        except (RankMismatchError, RankMissingError):
            raise
        except Exception as error:
            self.abandon(error, world)
            raise

    def choose(self, question: str, answer: Callable[[], Any], world: World) -> Any:
        """Rank 0's answer, something that JSON holds; the same for the same question for good.

        Ranks whose batches differ would answer differently, and one that captures again alone has nobody to ask.
        """
        if question not in self._chosen:
            if world.size == 1:
                self._chosen[question] = answer()
            else:
                key = f"wholestep/choice/{self._name}/{self._number}/{len(self._chosen)}"
                if world.rank == 0:
                    world.store.set(key, json.dumps(answer()))
                self.agree(question, lambda: question, world)
                self._chosen[question] = json.loads(world.store.get(key))
        return self._chosen[question]

    @property
    def choices(self) -> dict[str, Any]:
        """The answers so far, by question."""
        return dict(self._chosen)

    def recall(self, choices: Mapping[str, Any]) -> None:
        """Takes over answers that the same ranks have found in earlier processes."""
        self._chosen = {**choices, **self._chosen}

    def objection(self, own: str, world: World, what: str) -> str:
        """The objection of the first rank that has one, the same on every rank; empty if none has.

        `own` is what this rank says, empty if it does not object; `what` names the meeting in messages.
        """
        if world.size == 1:
            return own
        key = self._next()
        world.store.set(f"wholestep/{key}/{world.rank}", own)
        agree(
            "all are here", store=world.store, rank=world.rank, size=world.size, key=key, timeout_s=world.timeout_s,
            what=what, call=self.call(), peers=world,
        )  # fmt: skip
        said = (world.store.get(f"wholestep/{key}/{rank}").decode() for rank in range(world.size))
        return next((f"rank {rank}: {why}" for rank, why in enumerate(said) if why), "")

    def blob_store(self, world: World) -> BlobStore | None:
        """The blobs that rank 0 makes for this step; None for a single process."""
        if world.size == 1:
            return None
        return BlobStore(world.store, f"{self._name}/{self._number}", rank=world.rank, size=world.size)

    def _next(self) -> str:
        return f"plan/{self._name}/{self._number}/{next(self._count)}"
