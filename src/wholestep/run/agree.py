"""Ranks agree before they talk: texts are compared through the rendezvous store, never by a collective.

A collective that one rank does not issue hangs all others, so the plan of what will be issued is compared first,
over a channel that cannot hang. Rank 0 judges: every rank shows the SHA-256 of its text, rank 0 publishes one
verdict, and all ranks act on that verdict. Whole texts travel only when hashes differ, and then only one per
group of ranks that agree among themselves.

Keys below ``wholestep/agree/<key>/``, in the order in which they are written:

    came/<rank>   guards against a key that is used twice
    hash/<rank>   what the rank shows
    asked         ranks whose texts the judge wants to see (on a mismatch only)
    text/<rank>   such a text, compressed
    verdict       JSON ``{"kind": ..., "message": ...}``; the first one written counts
    read          how many ranks have read a verdict that is an error
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from wholestep.errors import InternalError, RankMismatchError, RankMissingError, WholestepError
from wholestep.run.store import PrefixStore, Store, default_store

__all__ = ["Gone", "abandon", "agree", "default_store", "difference", "ranks_text"]

Gone = Callable[[Iterable[int]], dict[int, str]]
"""Asked for some ranks, tells which of them will not come any more, and why."""

VERDICT_GRACE_S = 3.0  # how much longer than the judge the others wait, so that one verdict names all
TEXTS_TIMEOUT_S = 30.0  # how long the judge waits for the texts of ranks that are known to be there
LINGER_S = 2.0  # how long rank 0, which often keeps the store, stays so that others can read an error
GONE_EVERY_S = 0.5  # how often a waiting rank asks who has gone
POLL_FIRST_S, POLL_LAST_S = 0.0005, 0.05  # polling, since a wait that times out makes TCPStore log warnings

MAX_GROUPS = 4  # groups of ranks that a difference shows
MAX_LINES = 24  # lines of difference per group
MAX_COLUMNS = 200  # characters per line
MAX_COMPARED_LINES = 600  # lines that are compared once equal heads and tails are cut off


def agree(
    text: str,
    *,
    store: Store,
    rank: int,
    size: int,
    key: str,
    timeout_s: float,
    what: str = "the plan agreement",
    gone: Gone | None = None,
) -> None:
    """Return when all ranks have shown the same text; else raise the same error on every rank that came.

    Every rank calls this with the same `key`, which must be new each time: a counter of the caller belongs into it.
    `timeout_s` counts from this rank's arrival. `gone`, usually `World.gone`, ends the wait early for ranks that
    are known to have ended. `what` names the meeting in messages.

    Raises:
        RankMismatchError: the texts differ; the message shows which ranks differ and where.
        RankMissingError: ranks did not come in time, gave up (see `abandon`), or the store is out of reach.
    """
    if size == 1:
        return
    meeting = _Meeting(store=_room(store, key), rank=rank, size=size, timeout_s=timeout_s, what=what, gone=gone)
    with _store_in_reach(what, meeting.started):
        meeting.attend(text)


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
    if isinstance(reason, BaseException):
        reason = f"{type(reason).__name__}: {reason}"
    room = _room(store, key)
    message = (
        f"Rank {rank} gave up before {what}, so the other ranks stop here too. Its reason was:\n"
        f"{_indented(reason)}\nChange that first; the full error is in the output of rank {rank}."
    )
    try:
        _publish(room, "missing", message)
        room.add("read", 1)
        if rank == 0 and size > 1:
            _linger(room, size)
    except dist.DistError:
        return


def difference(texts: dict[int, str]) -> str:
    """A readable verdict about what each rank holds, from rank to text; the empty string when all are equal.

    Ranks with equal texts form a group. The largest group (of equals: the one with the lowest rank) is what the
    others are compared with, as a unified diff of bounded length with line numbers of that group's text.
    """
    groups = _groups(texts)
    if len(groups) <= 1:
        return ""
    main, *others = groups
    base = texts[main[0]]
    parts = []
    for group in others[: MAX_GROUPS - 1]:
        verb = "differs" if len(group) == 1 else "differ"
        parts.append(f"{ranks_text(group).capitalize()} {verb} from {ranks_text(main)}:")
        parts.extend(_diff_lines(base, texts[group[0]], f"rank {main[0]}", f"rank {group[0]}"))
    hidden = [rank for group in others[MAX_GROUPS - 1 :] for rank in group]
    if hidden:
        parts.append(f"{ranks_text(sorted(hidden)).capitalize()} differ in yet other ways.")
    return "\n".join(parts)


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {listed}"


@dataclass(slots=True, kw_only=True)
class _Meeting:
    """One agreement as one rank lives it."""

    store: Store
    rank: int
    size: int
    timeout_s: float
    what: str
    gone: Gone | None
    started: float = field(default_factory=time.monotonic)

    def attend(self, text: str) -> None:
        if self.store.add(f"came/{self.rank}", 1) > 1:
            raise InternalError(f"{self.what}: its key was used twice by rank {self.rank}; a key needs a counter.")
        self.store.set(f"hash/{self.rank}", hashlib.sha256(text.encode()).hexdigest())
        if self.rank == 0:
            self._judge(text)
        kind, message = self._verdict(text)
        if kind == "ok":
            return
        self.store.add("read", 1)
        if self.rank == 0:
            _linger(self.store, sum(self._came(r) for r in range(self.size)))
        error: type[WholestepError] = RankMismatchError if kind == "mismatch" else RankMissingError
        raise error(message)

    def _judge(self, text: str) -> None:
        """Rank 0: see every hash, then publish the verdict. Returns early when somebody else has published one."""
        hashes: dict[int, str] = {}
        ask_again = GONE_EVERY_S
        for waited_s in _ticks(self.started):
            for rank in range(self.size):
                if rank not in hashes and self._came(rank):
                    hashes[rank] = self.store.get(f"hash/{rank}").decode()
            if len(hashes) == self.size or self.store.check(["verdict"]):
                break
            if waited_s > ask_again:
                ask_again = waited_s + GONE_EVERY_S
                if self._publish_gone(set(range(self.size)) - hashes.keys()):
                    return
            if waited_s > self.timeout_s:
                self._publish_missing(set(range(self.size)) - hashes.keys())
                return
        else:
            raise InternalError("an endless wait ended")
        if len(hashes) < self.size:
            return
        groups = _groups(hashes)
        if len(groups) == 1:
            _publish(self.store, "ok", "")
        else:
            self._publish_mismatch(groups, text)

    def _verdict(self, text: str) -> tuple[str, str]:
        """Wait for the verdict, and show the text when the judge asks for it."""
        limit_s, ask_again, shown = self.timeout_s + VERDICT_GRACE_S, GONE_EVERY_S, False
        for waited_s in _ticks(self.started):
            if self.store.check(["verdict"]):
                break
            if not shown and self.store.check(["asked"]):
                if self.rank in json.loads(self.store.get("asked")):
                    self.store.set(f"text/{self.rank}", base64.b85encode(zlib.compress(text.encode())).decode())
                shown, limit_s = True, limit_s + TEXTS_TIMEOUT_S
            if waited_s > ask_again:
                ask_again = waited_s + GONE_EVERY_S
                self._publish_gone({0})
            if waited_s > limit_s:
                absent = {rank for rank in range(self.size) if not self._came(rank)}
                # Everybody came and there is no verdict: it is the judge who has stopped.
                self._publish_missing(absent or {0})
        verdict = json.loads(self.store.get("verdict"))
        return verdict["kind"], verdict["message"]

    def _came(self, rank: int) -> bool:
        return bool(self.store.check([f"hash/{rank}"]))

    def _publish_gone(self, absent: set[int]) -> bool:
        """Publish who has gone for good, if anybody among the absent has."""
        known = self.gone(absent) if self.gone is not None else {}
        if known:
            self._publish_missing(set(known), known)
        return bool(known)

    def _publish_missing(self, absent: set[int], known: dict[int, str] | None = None) -> None:
        waited_s = time.monotonic() - self.started
        present = [rank for rank in range(self.size) if rank not in absent and self._came(rank)]
        head = f"{ranks_text(absent).capitalize()} of {self.size} did not come to {self.what} in {waited_s:.1f} s"
        if known:
            why = "\n".join(f"  rank {rank} {known[rank]}" for rank in sorted(known))
            tail = f"and will not come any more:\n{why}\nSee the output of {ranks_text(known)} for the cause."
        else:
            tail = (
                f"({ranks_text(present)} came). A missing rank may still be compiling (then raise timeout_s, now "
                f"{self.timeout_s:g} s), have crashed (see its output), or have taken another branch: every rank must "
                "make the same calls in the same order, the same number of times."
            )
        _publish(self.store, "missing", f"{head} {tail}")

    def _publish_mismatch(self, groups: list[list[int]], text: str) -> None:
        """Collect one text per group, and publish where they differ."""
        shown = groups[:MAX_GROUPS]
        wanted = {group[0] for group in shown} - {0}
        self.store.set("asked", json.dumps(sorted(wanted)))
        texts = {0: text}
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
        message = (
            f"{self.what} failed: the ranks hold different texts, so their collectives would not match.\n"
            f"{difference(by_rank)}\n"
            "Every rank must run the same step with the same model, optimizer and shapes; make what differs equal, "
            "or decide it from something that all ranks share."
        )
        _publish(self.store, "mismatch", message[0].upper() + message[1:])


def _room(store: Store, key: str) -> Store:
    return PrefixStore(f"wholestep/agree/{key}", store)


def _publish(room: Store, kind: str, message: str) -> None:
    """Write the verdict unless there is one."""
    room.compare_set("verdict", "", json.dumps({"kind": kind, "message": message}))


def _linger(room: Store, readers: int) -> None:
    """Stay until so many ranks have read the verdict, two seconds at most."""
    for waited_s in _ticks(time.monotonic()):
        if room.add("read", 0) >= readers or waited_s > LINGER_S:
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


def _groups(values: dict[int, str]) -> list[list[int]]:
    """Ranks with equal values, the largest group first and, of equals, the one with the lowest rank."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(values):
        members[values[rank]].append(rank)
    return sorted(members.values(), key=lambda group: (-len(group), group[0]))


def _diff_lines(base: str, other: str, base_name: str, other_name: str) -> list[str]:
    """A unified diff of bounded size. Equal heads and tails are cut first, as difflib is quadratic."""
    a, b = base.splitlines(), other.splitlines()
    if a == b:
        return ["  (they differ only in how lines end)"]
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tail = next(
        (i for i, (x, y) in enumerate(zip(reversed(a[head:]), reversed(b[head:]), strict=False)) if x != y),
        min(len(a), len(b)) - head,
    )
    start = max(0, head - 1)  # one line of context on each side
    a = a[start : min(len(a), len(a) - tail + 1, start + MAX_COMPARED_LINES)]
    b = b[start : min(len(b), len(b) - tail + 1, start + MAX_COMPARED_LINES)]
    found = list(difflib.unified_diff(a, b, n=1, lineterm=""))[2:]
    body = [_clipped(line) for line in found if not line.startswith("@@")]
    lines = [f"  --- {base_name}", f"  +++ {other_name}", f"  from line {head + 1} on:"]
    lines += [f"  {line}" for line in body[:MAX_LINES]]
    if len(body) > MAX_LINES:
        lines.append(f"  ... and {len(body) - MAX_LINES} more lines")
    return lines


def _clipped(line: str) -> str:
    return line if len(line) <= MAX_COLUMNS else f"{line[: MAX_COLUMNS - 3]}..."


def _indented(text: str) -> str:
    return "\n".join(f"  {_clipped(line)}" for line in text.splitlines()[:40])
