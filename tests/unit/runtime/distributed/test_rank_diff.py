"""The verdict about texts that differ: plain data in, a readable text out."""

import pytest

from wholestep.runtime.distributed import rank_diff as module
from wholestep.runtime.distributed.rank_diff import difference, mismatch, ranks_text

PLAN = [f"#{i} all_reduce float32[{64 * i}] mean" for i in range(40)]


def text(*changes):
    lines = list(PLAN)
    for number, line in changes:
        lines[number] = line
    return "\n".join(lines)


def test_equal_texts_have_no_difference():
    assert difference({0: text(), 1: text(), 5: text()}) == ""
    assert difference({3: "x"}) == ""
    assert difference({}) == ""


def test_the_minority_is_named_and_its_line_is_shown():
    verdict = difference({0: text(), 1: text((20, "#20 broadcast")), 2: text(), 3: text()})
    assert verdict.splitlines() == [
        "Rank 1 differs from ranks 0, 2, 3:",
        "  --- rank 0",
        "  +++ rank 1",
        "  from line 21 on:",
        "   #19 all_reduce float32[1216] mean",
        "  -#20 all_reduce float32[1280] mean",
        "  +#20 broadcast",
        "   #21 all_reduce float32[1344] mean",
    ]


def test_the_majority_is_the_base_also_when_rank_0_is_not_in_it():
    verdict = difference({0: "a\nb", 1: "a\nc", 2: "a\nc"})
    assert verdict.startswith("Rank 0 differs from ranks 1, 2:")
    assert "  -c" in verdict
    assert "  +b" in verdict


def test_a_tie_goes_to_the_lowest_rank():
    assert difference({0: "a", 1: "b"}).startswith("Rank 1 differs from rank 0:")


@pytest.mark.parametrize("pair", [("a\nb\nc", "a\nb"), ("a\nb", "a\nb\nc"), ("", "a"), ("a", ""), ("b", "a\nb")])
def test_lines_missing_at_either_end_are_seen(pair):
    verdict = difference(dict(enumerate(pair)))
    body = verdict.partition("on:\n")[2]
    assert any(line.startswith(("  -", "  +")) for line in body.splitlines())


def test_texts_that_differ_in_line_ends_only_are_still_different():
    assert "how lines end" in difference({0: "a\nb", 1: "a\nb\n"})


def test_the_difference_is_bounded_and_says_what_it_leaves_out():
    other = "\n".join(f"other {i}" + "x" * 1000 for i in range(5000))
    long = "\n".join(f"line {i}" for i in range(5000))
    verdict = difference({0: long, 1: other, 2: "b", 3: "c", 4: "d", 5: "e"}).splitlines()
    assert len(verdict) < 3 * (module.MAX_LINES + 6)
    assert max(map(len, verdict)) < module.MAX_COLUMNS + 10
    assert any(line.endswith("more lines") for line in verdict)
    assert verdict[-1] == "Ranks 4, 5 differ in yet other ways."


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([3], "rank 3"), ([1, 0], "ranks 0, 1"), ([2, 0, 1, 5], "ranks 0-2, 5"), (range(1000), "ranks 0-999")],
)
def test_ranks_are_listed_in_short(ranks, expected):
    assert ranks_text(ranks) == expected


SHARED = ["mesh data=4", "#0 all_reduce float32[8] sum axis=data size=4"]
PAIR, SENT = "[0,2] all_reduce float32[4] sum", "[1>3 world tag 0] float32[2]"
FIT = {0: [*SHARED, PAIR], 1: [*SHARED, SENT], 2: [*SHARED, PAIR], 3: [SHARED[0], SENT, SHARED[1]]}


def texts(**changed):
    held = FIT | {int(name[1:]): lines for name, lines in changed.items()}
    return {rank: "\n".join(lines) for rank, lines in held.items()}


def test_what_some_ranks_do_among_themselves_belongs_together():
    assert not mismatch(texts())


@pytest.mark.parametrize(
    "changed",
    [
        {"r2": SHARED},
        {"r3": SHARED},
        {"r1": [*SHARED, PAIR, SENT]},
        {"r0": [*SHARED, PAIR, PAIR]},
        {"r2": [*SHARED, PAIR.replace("4]", "5]")]},
        {"r3": [*SHARED, SENT.replace("tag 0", "tag 1")]},
        {"r3": [SHARED[0], SENT]},
    ],
    ids=["member away", "receiver away", "stranger", "twice", "size", "tag", "shared line away"],
)
def test_what_does_not_belong_together_is_seen(changed):
    assert mismatch(texts(**changed))
