"""Ranks agree before they talk: texts are compared through the rendezvous store, never by a collective.

A collective that one rank does not issue hangs all others, so the plan of what will be issued is compared first,
over a channel that cannot hang. Rank 0 judges: every rank shows the SHA-256 of its text, rank 0 publishes one
verdict, and all ranks act on that verdict. Whole texts travel only when hashes differ, and then only one per
group of ranks that agree among themselves. Texts that differ belong together where the difference is what some
ranks do among themselves, and those have it alike (`wholestep.runtime.distributed.rank_diff.mismatch`).

Keys below ``wholestep/agree/<key>/``, in the order in which they are written:

    came/<rank>   guards against a key that is used twice
    line/<rank>   where in the user's code the rank waits
    hash/<rank>   what the rank shows
    asked         ranks whose texts the judge wants to see (on a mismatch only)
    text/<rank>   such a text, compressed
    verdict       JSON ``{"kind": ..., "message": ...}``; the first one written counts
    read          how many ranks have read a verdict that is an error
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from wholestep.capture.python.user_frame import current_line
from wholestep.errors import (
    CaptureError,
    InternalError,
    PeerRefusedError,
    RankMismatchError,
    RankMissingError,
    WholestepError,
)
from wholestep.runtime.distributed.rank_diff import clipped, difference, mismatch, ranks_text
from wholestep.runtime.distributed.rank_diff import groups as groups_of
from wholestep.runtime.distributed.store import PrefixStore, Store, default_store

__all__ = ["Peers", "abandon", "agree", "default_store"]

_ERRORS: dict[str, type[WholestepError]] = {
    "mismatch": RankMismatchError, "missing": RankMissingError, "refused": PeerRefusedError
}  # fmt: skip
"""By the kind of a verdict."""


class Peers(Protocol):
    """News about ranks that have not come to an agreement; usually a `World`."""

    def departed(self, ranks: Iterable[int]) -> dict[int, str]:
        """Which of them will not come any more, and how that is known."""

    def locations(self, ranks: Iterable[int]) -> dict[int, str]:
        """Where each of them was when last heard of."""

    def stuck(self, ranks: Iterable[int], call: str) -> dict[int, str]:
        """Which of them have been in the run of `call` for long, and where."""


VERDICT_GRACE_S = 3.0  # how much longer than the judge the others wait, so that one verdict names all
TEXTS_TIMEOUT_S = 30.0  # how long the judge waits for the texts of ranks that are known to be there
LINGER_S = 2.0  # how long rank 0, which often keeps the store, stays so that others can read an error
GONE_EVERY_S = 0.5  # how often a waiting rank asks who has gone
POLL_FIRST_S, POLL_LAST_S = 0.0005, 0.05  # polling, since a wait that times out makes TCPStore log warnings


def agree(
    text: str,
    *,
    store: Store,
    rank: int,
    size: int,
    key: str,
    timeout_s: float,
    what: str = "the plan agreement",
    call: str = "",
    peers: Peers | None = None,
    detail: Callable[[], str] | None = None,
) -> None:
    """Return when all ranks have shown the same text; else raise the same error on every rank that came.

    Every rank calls this with the same `key`, which must be new each time: a counter of the caller belongs into it.
    `timeout_s` counts from this rank's arrival. `peers`, usually the World, ends the wait early for ranks that
    are known to have ended, or to be past this meeting: inside of `call`, where they wait for the ranks that are here.
    `what` names the meeting in messages. `detail` gives what is compared in the place of texts that differ.

    Raises:
        RankMismatchError: the texts differ; the message shows which ranks differ and where.
        RankMissingError: ranks did not come in time, gave up (see `abandon`), or the store is out of reach.
    """
    if size == 1:
        return
    agreement = _Agreement(
        store=_prefixed(store, key), rank=rank, size=size, timeout_s=timeout_s, what=what, call=call, peers=peers,
        detail=detail,
    )  # fmt: skip
    with _store_in_reach(what, agreement.started):
        agreement.run(text)


def abandon(
    reason: str | BaseException,
    *,
    store: Store,
    rank: int,
    key: str,
    size: int = 0,
    what: str = "the plan agreement",
) -> None:
    """Tell the ranks that wait, or will wait, in `agree` under `key` that this rank will not come, and why.

    Their `agree` raises `RankMissingError` with the reason at once. With `size` given, rank 0 stays for up to
    two seconds until the others have read it, as the store may end with it. Never raises for a store that is
    out of reach: the caller is about to raise an error of its own.
    """
    refused = isinstance(reason, CaptureError)
    if isinstance(reason, BaseException):
        reason = f"{type(reason).__name__}: {reason}"
    prefixed = _prefixed(store, key)
    message = (
        f"Rank {rank} gave up before {what}, so the other ranks stop here too. Its reason was:\n"
        f"{_indented(reason)}\nChange that first; the full error is in the output of rank {rank}."
    )
    try:
        _publish(prefixed, "refused" if refused else "missing", message)
        prefixed.add("read", 1)
        if rank == 0 and size > 1:
            _linger(prefixed, size)
    except dist.DistError:
        return


@dataclass(slots=True, kw_only=True)
class _Agreement:
    """One agreement as one rank lives it."""

    store: Store
    rank: int
    size: int
    timeout_s: float
    what: str
    call: str
    peers: Peers | None
    detail: Callable[[], str] | None = None
    started: float = field(default_factory=time.monotonic)

    def run(self, text: str) -> None:
        if self.store.add(f"came/{self.rank}", 1) > 1:
            raise InternalError(f"{self.what}: its key was used twice by rank {self.rank}; a key needs a counter.")
        self.store.set(f"line/{self.rank}", current_line())
        self.store.set(f"hash/{self.rank}", hashlib.sha256(text.encode()).hexdigest())
        if self.rank == 0:
            self._decide(text)
        kind, message = self._verdict(text)
        if kind == "ok":
            return
        self.store.add("read", 1)
        if self.rank == 0:
            _linger(self.store, sum(self._has_arrived(r) for r in range(self.size)))
        error: type[WholestepError] = _ERRORS[kind]
        raise error(message)

    def _decide(self, text: str) -> None:
        """Rank 0: see every hash, then publish the verdict. Returns early when somebody else has published one."""
        hashes: dict[int, str] = {}
        ask_again = GONE_EVERY_S
        for waited_s in _ticks(self.started):
            for rank in range(self.size):
                if rank not in hashes and self._has_arrived(rank):
                    hashes[rank] = self.store.get(f"hash/{rank}").decode()
            if len(hashes) == self.size or self.store.check(["verdict"]):
                break
            if waited_s > ask_again:
                ask_again = waited_s + GONE_EVERY_S
                if self._publish_departed(set(range(self.size)) - hashes.keys()):
                    return
            if waited_s > self.timeout_s:
                self._publish_missing(set(range(self.size)) - hashes.keys())
                return
        else:
            raise InternalError("an endless wait ended")
        if len(hashes) < self.size:
            return
        groups = groups_of(hashes)
        if len(groups) == 1:
            _publish(self.store, "ok", "")
        else:
            self._decide_by_texts(groups, text)

    def _verdict(self, text: str) -> tuple[str, str]:
        """Wait for the verdict, and show the text when the judge asks for it."""
        limit_s, ask_again, shown = self.timeout_s + VERDICT_GRACE_S, GONE_EVERY_S, False
        for waited_s in _ticks(self.started):
            if self.store.check(["verdict"]):
                break
            if not shown and self.store.check(["asked"]):
                if self.rank in json.loads(self.store.get("asked")):
                    packed = base64.b85encode(zlib.compress(self._shown(text).encode())).decode()
                    self.store.set(f"text/{self.rank}", packed)
                shown, limit_s = True, limit_s + TEXTS_TIMEOUT_S
            if waited_s > ask_again:
                ask_again = waited_s + GONE_EVERY_S
                self._publish_departed({0})
            if waited_s > limit_s:
                absent = {rank for rank in range(self.size) if not self._has_arrived(rank)}
                # Everybody came and there is no verdict: it is the judge who has stopped.
                self._publish_missing(absent or {0})
        verdict = json.loads(self.store.get("verdict"))
        return verdict["kind"], verdict["message"]

    def _shown(self, text: str) -> str:
        return text if self.detail is None else self.detail()

    def _has_arrived(self, rank: int) -> bool:
        return bool(self.store.check([f"hash/{rank}"]))

    def _publish_departed(self, absent: set[int]) -> bool:
        """Publish who of the absent can never come, if that is known of anybody."""
        if self.peers is None:
            return False
        if known := self.peers.departed(absent):
            why = "\n".join(f"  rank {rank} {known[rank]}" for rank in sorted(known))
            self._publish_missing(
                set(known), f"It will not come any more:\n{why}\nSee the output of {ranks_text(known)} for the cause."
            )
        elif self.call and (known := self.peers.stuck(absent, self.call)):
            self._publish_missing(
                set(known),
                f"{ranks_text(known).capitalize()} needed no new plan for this call and waits in it for a collective "
                "of the ranks that do. Something that the step depends on changed on some ranks only: a shape, a flag, "
                "an option of the optimizer; `cache_info().reasons` of the compiled step says what. Make it change on "
                "all ranks in the same call.",
            )
        else:
            return False
        return True

    def _publish_missing(self, absent: set[int], why: str = "") -> None:
        waited_s = time.monotonic() - self.started
        lines = {
            rank: self.store.get(f"line/{rank}").decode()
            for rank in range(self.size)
            if rank not in absent and self._has_arrived(rank)
        }
        where = self.peers.locations(absent) if self.peers is not None else {}
        seen = "".join(f" Rank {rank} was last {where[rank]}." for rank in sorted(where))
        why = why or (
            f"A missing rank may still be compiling (then raise the timeout, now {self.timeout_s:g} s: that of "
            "init_process_group or of wholestep.init), have crashed (see its output), or have taken another branch: "
            "every rank must make the same calls in the same order, the same number of times."
        )
        _publish(
            self.store,
            "missing",
            f"{ranks_text(absent).capitalize()} of {self.size} did not come to {self.what} in {waited_s:.1f} s; "
            f"{_waiting(lines)}.{seen} {why}",
        )

    def _decide_by_texts(self, groups: list[list[int]], text: str) -> None:
        """Collect one text per group, and publish where they differ, if they do not belong together as they are."""
        wanted = {group[0] for group in groups} - {0}
        self.store.set("asked", json.dumps(sorted(wanted)))
        texts = {0: self._shown(text)}
        asked_at = time.monotonic()
        for waited_s in _ticks(asked_at):
            for rank in wanted - texts.keys():
                if self.store.check([f"text/{rank}"]):
                    texts[rank] = zlib.decompress(base64.b85decode(self.store.get(f"text/{rank}"))).decode()
            if wanted <= texts.keys() or waited_s > TEXTS_TIMEOUT_S:
                break
        by_rank: dict[int, str] = {}
        for number, group in enumerate(groups):
            for rank in group:
                # A group whose text is not shown needs one that equals no other.
                by_rank[rank] = texts.get(group[0], f"(the text of rank {group[0]} was not received, group {number})")
        if not mismatch(by_rank):
            _publish(self.store, "ok", "")
            return
        message = (
            f"{self.what} failed: the ranks hold different texts, so their collectives would not match.\n"
            f"{difference(by_rank)}\n"
            "Every rank must run the same step with the same model, optimizer and shapes; make what differs equal, "
            "or decide it from something that all ranks share."
        )
        _publish(self.store, "mismatch", message[0].upper() + message[1:])


def _waiting(lines: dict[int, str]) -> str:
    """``ranks 0, 1 (train.py:41), rank 2 (eval.py:12) wait``, from rank to line."""
    by_line: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(lines):
        by_line[lines[rank]].append(rank)
    parts = [f"{ranks_text(ranks)} ({line})" if line else ranks_text(ranks) for line, ranks in by_line.items()]
    return f"{', '.join(parts)} {'waits' if len(lines) == 1 else 'wait'}"


def _prefixed(store: Store, key: str) -> Store:
    return PrefixStore(f"wholestep/agree/{key}", store)


def _publish(prefixed: Store, kind: str, message: str) -> None:
    """Write the verdict unless there is one."""
    prefixed.compare_set("verdict", "", json.dumps({"kind": kind, "message": message}))


def _linger(prefixed: Store, readers: int) -> None:
    """Stay until so many ranks have read the verdict, two seconds at most."""
    for waited_s in _ticks(time.monotonic()):
        if prefixed.add("read", 0) >= readers or waited_s > LINGER_S:
            return


def _ticks(started: float) -> Iterator[float]:
    """Seconds since `started`, at once and then again and again with growing pauses, without an end."""
    pause_s = POLL_FIRST_S
    while True:
        yield time.monotonic() - started
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_LAST_S)


@contextmanager
def _store_in_reach(what: str, started: float) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        waited_s = time.monotonic() - started
        raise RankMissingError(
            f"The rendezvous store went out of reach {waited_s:.1f} s into {what}: the process that keeps it (rank 0, "
            f"or the launcher) has ended. See the output of rank 0 for the cause. torch said: {error}"
        ) from error


def _indented(text: str) -> str:
    return "\n".join(f"  {clipped(line)}" for line in text.splitlines()[:40])
