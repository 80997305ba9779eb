"""Steps with sizes that move: graphs for each size that is seen again, and what the program gives for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.builders import aten
from tests.unit.lower.gpu_programs import Spec, gpu, scheduled
from tests.unit.lower.replays import PARAM, Replays, breaks, graphed_of, layers, same, waits
from wholestep.ir.program import Program
from wholestep.lower.base import eager_backend
from wholestep.lower.cudagraph import sized_graphs
from wholestep.lower.cudagraph.captured_piece import CapturedPiece
from wholestep.lower.cudagraph.partition import Partition, partition
from wholestep.lower.cudagraph.sized_graphs import SizedGraphs

CAPTURED = sized_graphs.PLAIN_CALLS + 1
"""The call of a size that is captured."""
FEW = 8
"""Sizes that are known in a test of how many may be."""


def square(w: Tensor, x: Tensor) -> Tensor:
    return layers(w @ (x.t() @ x))


def one(w: Tensor, x: Tensor) -> tuple[Any, ...]:
    """A mean, which divides by a size."""
    y = x @ square(w, x)
    return y, y.mean(), y.sum() / x.shape[0]


def cut(w: Tensor, x: Tensor) -> tuple[Any, ...]:
    """Both pieces take the size."""
    y = x @ square(w, x) * x.shape[0]
    z = y * y.sum().item()
    return z, layers(z.t() @ z).sum() / x.shape[0], aten.view.default(z, [x.shape[0] * 3])


def writes(w: Tensor, x: Tensor) -> tuple[Any, ...]:
    grad = square(w, x)
    w.sub_(grad, alpha=1e-3)
    x.mul_(2)
    return x + 1, grad.sum()


STEPS: dict[str, tuple[Callable[..., Any], int]] = {"one": (one, 1), "cut": (cut, 2), "writes": (writes, 1)}
SPECS: list[Spec] = [gpu(3, 3, kind=PARAM), gpu(5, 3)]


def sized(fn: Callable[..., Any], pool: Replays) -> tuple[SizedGraphs, Callable[..., Any]]:
    """The graphs of a step with rows that move, and its program as it is."""
    program = scheduled(fn, *SPECS, writes=True, segments=False, moving=[1])
    refused: dict[Any, str] = {}
    parts = partition(program)
    assert isinstance(parts, Partition), parts
    return SizedGraphs(program, parts, pool.lower, pool, refused=refused), eager_backend.lower(program)


def batch(rows: int, call: int) -> Tensor:
    return torch.rand(rows, 3, generator=torch.Generator().manual_seed(call))


@pytest.mark.parametrize("name", STEPS)
def test_each_size_that_comes_again_has_graphs(name: str) -> None:
    fn, num_graphs = STEPS[name]
    pool = Replays()
    graphs, plain = sized(fn, pool)
    w, kept, seen = torch.rand(3, 3), [], dict[int, int]()
    own = w.clone()
    for call in range(24):
        rows = (5, 2, 7)[call % 3] if call != 10 else 9
        seen[rows] = seen.get(rows, 0) + 1
        x, other = batch(rows, call), batch(rows, call)
        del pool.calls[:]
        with torch.no_grad():
            found, wanted = graphs([own, x]), plain([w, other])
        assert same([*found[: len(wanted)], own, x], [*wanted, w, other]), call
        kept.append((found[: len(wanted)], wanted))
        assert pool.calls.count("replay") == (num_graphs if seen[rows] >= CAPTURED else 0)
        assert pool.calls.count("capture") == (num_graphs if seen[rows] == CAPTURED else 0)
    assert all(same(*pair) for pair in kept)  # results are the caller's own
    assert not graphs.why_none


def test_a_size_runs_once_more_where_a_graph_has_to_know_how_random_numbers_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CapturedPiece, "is_observed", True)
    pool = Replays()
    graphs, _ = sized(one, pool)
    w = torch.rand(3, 3)
    with torch.no_grad():
        for call in range(CAPTURED):
            graphs([w, batch(5, call)])
        assert "capture" not in pool.calls
        graphs([w, batch(5, CAPTURED)])
    assert pool.calls.count("capture") == 1


def test_what_is_laid_out_in_another_way_is_another_size() -> None:
    pool = Replays()
    graphs, plain = sized(one, pool)
    w = torch.rand(3, 3)
    for call in range(8):
        wide = torch.rand(5, 4, generator=torch.Generator().manual_seed(call))[:, :3]
        x = wide if call % 2 else wide.clone(memory_format=torch.contiguous_format)
        with torch.no_grad():
            assert same(graphs([w, x]), plain([w, x])), call
    assert pool.calls.count("capture") == 2


def test_what_a_graph_runs_is_lowered_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels over lists keep a table of addresses, which their graph reads in every replay."""
    pool, lowered, lower = Replays(), list[int](), Replays.lower

    def noting(self: Replays, part: Program) -> Any:
        lowered.append(id(part))
        return lower(self, part)

    monkeypatch.setattr(Replays, "lower", noting)
    graphs, _ = sized(one, pool)
    with torch.no_grad():
        for call in range(2 * CAPTURED):
            graphs([torch.rand(3, 3), batch(4 + call % 2, call)])
    assert pool.calls.count("capture") == 2
    assert sorted(map(lowered.count, set(lowered))) == [1, 2, 2]  # the whole; the host's calls and the piece, by size


def test_sizes_that_do_not_come_again_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized_graphs, "MOST_SIZES", FEW)
    pool = Replays()
    graphs, _ = sized(one, pool)
    w = torch.rand(3, 3)
    with torch.no_grad():
        for call in range(4 * (FEW + 1)):
            graphs([w, batch(1 + call % (FEW + 1), call)])
    assert "capture" not in pool.calls


def test_the_size_that_was_not_seen_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized_graphs, "MOST_SIZES", FEW)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pool.calls.append("synchronize"))
    pool = Replays()
    graphs, _ = sized(one, pool)
    w = torch.rand(3, 3)
    with torch.no_grad():
        for rows in range(1, FEW + 2):
            for call in range(CAPTURED):
                graphs([w, batch(rows, call)])
        assert pool.calls.count("capture") == FEW + 1
        assert [one for one in pool.calls if one in ("synchronize", "reset")] == ["synchronize", "reset"]
        graphs([w, batch(2, 0)])  # which is still there
        assert pool.calls[-1] == "replay"
        graphs([w, batch(1, 0)])
        assert pool.calls[-1] == "run"


def test_on_a_full_device_a_new_size_takes_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(sized_graphs, "SURE_SIZES", 3)
    pool, full = Replays(), True
    monkeypatch.setattr(pool, "is_short_of_memory", lambda: full)
    graphs, plain = sized(one, pool)
    w = torch.rand(3, 3)

    def calls(rows: int, count: int = 1) -> str:
        for call in range(count):
            x = batch(rows, call)
            with torch.no_grad():
                assert same(graphs([w, x]), plain([w, x]))
        return pool.calls[-1]

    assert [calls(rows, CAPTURED) for rows in (1, 2, 3)] == ["replay"] * 3
    assert calls(1) == "replay"
    assert "reset" not in pool.calls  # so many have graphs in any case
    assert calls(4, CAPTURED) == "replay"
    assert pool.calls.count("reset") == 1
    assert [calls(rows) for rows in (1, 3, 4)] == ["replay"] * 3
    assert pool.calls.count("capture") == 4
    assert calls(2) == "replay"  # captured again, in the place of another
    assert [pool.calls.count(one) for one in ("capture", "reset")] == [5, 2]
    full = False
    assert calls(5, CAPTURED) == "replay"
    assert pool.calls.count("reset") == 2


@pytest.mark.parametrize("what", ["waits", "breaks"])
def test_a_call_that_no_graph_holds_is_found_out_once(what: str, caplog: pytest.LogCaptureFixture) -> None:
    refused = {"waits": waits, "breaks": breaks}[what]

    def step(w: Tensor, x: Tensor) -> tuple[Any, ...]:
        y = refused(x @ square(w, x))
        return layers(y.t() @ y).sum() / x.shape[0], y

    pool = Replays()
    graphs, plain = sized(step, pool)
    w = torch.rand(3, 3)
    for call in range(20):
        x = batch(4 + call % 2, call)
        with torch.no_grad():
            assert same(graphs([w, x]), plain([w, x])), call
    assert bool(graphs.why_none) == (what == "breaks")
    assert len([one for one in caplog.records if "capture failed" in one.getMessage()]) == (what == "breaks")
    # The first size finds it out; each piece is captured for either size then.
    assert pool.calls.count("capture") == (1 if what == "breaks" else 5)


def test_a_slice_is_read_with_its_strides() -> None:
    """Compiled code reads rows where they lay in the traced call."""

    def strided(w: Tensor, x: Tensor) -> Tensor:
        return layers(aten.as_strided.default(x, [3, 3], [7, 1]) @ w)

    pool, specs = Replays(), [gpu(3, 3, kind=PARAM), gpu(3, 7)]
    program = scheduled(strided, *specs, segments=False)
    graphed, w = graphed_of(program, pool), torch.rand(3, 3)
    for call in range(5):
        x = torch.rand(3, 7, generator=torch.Generator().manual_seed(call))[:, :3]
        (found,) = graphed([w, x])
        assert torch.equal(found, layers(x @ w)), call
    assert pool.calls.count("replay") == 3
