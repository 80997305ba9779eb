"""Compares the plans of ranks: whether they fit together, and a readable difference if they do not."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

MAX_GROUPS = 4  # groups of ranks that a difference shows
MAX_LINES = 24  # lines of difference per group
MAX_COLUMNS = 200  # characters per line
MAX_COMPARED_LINES = 600  # lines that are compared once equal heads and tails are cut off


def mismatch(texts: Mapping[int, str]) -> bool:
    """Whether the plans of the ranks, from rank to `plan_text`, do not belong together.

    What concerns all ranks must be the same text; every line that begins with ranks must be found on all of
    them, as often and in the same order.
    """
    shared = {tuple(line for line in text.splitlines() if not line.startswith("[")) for text in texts.values()}
    if len(shared) > 1:
        return True
    held: dict[str, dict[int, list[str]]] = {}
    for rank, text in texts.items():
        for line in text.splitlines():
            if line.startswith("["):
                held.setdefault(line[1 : line.index("]")], {}).setdefault(rank, []).append(line)
    for channel, by_rank in held.items():
        wanted = {int(rank) for rank in re.findall(r"\d+", channel.partition(" ")[0])}
        if by_rank.keys() != wanted & texts.keys() or len(set(map(tuple, by_rank.values()))) > 1:
            return True
    return False


def difference(texts: dict[int, str]) -> str:
    """A readable verdict about what each rank holds, from rank to text; the empty string when all are equal.

    Ranks with equal texts form a group. The largest group (of equals: the one with the lowest rank) is what the
    others are compared with, as a unified diff of bounded length with line numbers of that group's text.
    """
    found = groups(texts)
    if len(found) <= 1:
        return ""
    main, *others = found
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


def groups(values: dict[int, str]) -> list[list[int]]:
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
    body = [clipped(line) for line in found if not line.startswith("@@")]
    lines = [f"  --- {base_name}", f"  +++ {other_name}", f"  from line {head + 1} on:"]
    lines += [f"  {line}" for line in body[:MAX_LINES]]
    if len(body) > MAX_LINES:
        lines.append(f"  ... and {len(body) - MAX_LINES} more lines")
    return lines


def clipped(line: str) -> str:
    """The line, or as much of it as a message shows."""
    return line if len(line) <= MAX_COLUMNS else f"{line[: MAX_COLUMNS - 3]}..."
