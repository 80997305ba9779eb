"""Steps as CUDA graphs: pieces of a step by turns with calls that run as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.lower.cudagraph.fake_cuda import FakeCuda
from tests.unit.lower.gpu_programs import gpu, scheduled
from tests.unit.lower.replays import GRAD, PARAM, STEPS, Replays, graphed_of, layers, same, tensors_for
from wholestep.config import Inductor as InductorOptions
from wholestep.ir.program import MeshAxis, Program
from wholestep.lower.base import eager_backend
from wholestep.lower.base.protocol import ExecutionMode
from wholestep.lower.cudagraph.graph_pool import Pool
from wholestep.lower.cudagraph.graph_runner import WARM_UP_CALLS, GraphRunner
from wholestep.lower.cudagraph.partition import Partition, partition
from wholestep.lower.inductor_backend import InductorBackend


def test_a_step_whose_capture_fails_runs_as_it_is(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    def step(x: Tensor) -> Tensor:
        return x * 2

    program = scheduled(step, gpu(3))
    calls = []

    def lower(part: Program) -> Callable[[list[Any]], tuple[Any, ...]]:
        def run(inputs: list[Any]) -> tuple[Any, ...]:
            calls.append(cuda.stream)
            if cuda.stream != "users":
                error = RuntimeError("illegal")
                error.add_note("while running mul")
                raise error
            return tuple(one * 2 for one in inputs) if part is parts.pieces[0].program else ()

        return run

    parts = partition(program)
    assert isinstance(parts, Partition)
    backend = InductorBackend(InductorOptions(), torch.device("cuda", 0))
    graphed = GraphRunner(program, parts, lower, Pool(torch.device("cpu")), refused={})
    assert backend.execution_mode(graphed) == ExecutionMode("inductor, one CUDA graph", is_one_launch=True)
    with caplog.at_level(logging.WARNING):
        found = [graphed([torch.ones(3)])[0] for _ in range(5)]
    assert all(torch.equal(one, torch.full((3,), 2.0)) for one in found)
    assert len([stream for stream in calls if stream != "users"]) == 1
    assert backend.execution_mode(graphed) == ExecutionMode(
        "inductor, no CUDA graph: its capture failed: illegal, while running mul", is_one_launch=False
    )
    own = [record for record in caplog.records if record.name == "wholestep"]
    assert [record.getMessage() for record in own] == [
        "the step runs without a CUDA graph, since its capture failed: illegal, while running mul"
    ]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("moves", [(), (3,), (3, 4, 5, 6, 7, 8)])
def test_pieces_give_what_the_program_gives(name: str, moves: tuple[int, ...]) -> None:
    """In every call; also where parameters and gradients have moved before some of them."""
    fn, specs, num_graphs = STEPS[name]
    program, pool = scheduled(fn, *specs, writes=True, segments=False), Replays()
    graphed = graphed_of(program, pool)
    plain = eager_backend.lower(program)
    ours, theirs = tensors_for(specs, 0), tensors_for(specs, 0)
    kept = []
    for call in range(10):
        fresh = tensors_for(specs, 100 + call)
        for place, (_, _, _, kind) in enumerate(specs):
            if kind not in (PARAM, GRAD):
                ours[place], theirs[place] = fresh[place].clone(), fresh[place].clone()
            elif call in moves:
                ours[place] = ours[place].clone()
        del pool.calls[:]
        with torch.no_grad():
            found, wanted = graphed(list(ours)), plain(list(theirs))
        found = found[: len(wanted)]  # after them are those that were written in place
        assert same([*found, *ours], [*wanted, *theirs]), call
        kept.append((found, wanted))
        assert pool.calls.count("replay") == (num_graphs if call >= WARM_UP_CALLS else 0)
        assert pool.calls.count("capture") == num_graphs or call != WARM_UP_CALLS
    assert pool.calls.count("capture") == 0  # in the last call, by which all is settled
    assert not graphed.why_none
    assert all(same(*pair) for pair in kept)  # results are the caller's own


def counts(name: str, moves: Callable[[int], set[int]]) -> list[int]:
    """How many captures there were in each of ten calls, where the tensors at some places have moved before."""
    fn, specs, _ = STEPS[name]
    pool = Replays()
    graphed = graphed_of(scheduled(fn, *specs, writes=True, segments=False), pool)
    tensors, found, alive = tensors_for(specs, 0), [], []
    for call in range(10):
        alive.append(tensors)
        tensors = [one.clone() if place in moves(call) else one for place, one in enumerate(tensors)]
        del pool.calls[:]
        with torch.no_grad():
            graphed(list(tensors))
        found.append(pool.calls.count("capture"))
    assert not graphed.why_none
    return found


MOVES: dict[str, tuple[Callable[[int], set[int]], list[int]]] = {
    "arguments, which are copied": (lambda call: {2, 3}, [0, 0, 3, 0, 0, 0, 0, 0, 0, 0]),
    "a parameter": (lambda call: {0} if call in (4, 5, 6, 7) else set(), [0, 0, 3, 0, 3, 3, 3, 3, 0, 0]),
    "gradients, copied after a while": (lambda call: {1}, [0, 0, 3, 3, 3, 3, 0, 0, 0, 0]),
    "gradients, now and then": (lambda call: {1} if call in (5, 7) else set(), [0, 0, 3, 0, 0, 3, 0, 3, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_what_has_moved_is_captured_again(name: str) -> None:
    moves, wanted = MOVES[name]
    assert counts("a training step", moves) == wanted


def test_a_step_whose_values_wander_runs_as_it_is() -> None:
    """Two values with the memory of one, which a piece without a graph allocates in every call: none is copied."""

    def step(x: Tensor) -> tuple[Any, ...]:
        y = layers(x)
        number = y.sum().item()
        z = x * number
        flat = z.view(-1)
        return flat, flat * number, layers(z), layers(flat.outer(flat))

    pool, specs = Replays(), [gpu(3, 3)]
    program = scheduled(step, *specs, segments=False)
    graphed = graphed_of(program, pool)
    (x,), alive = tensors_for(specs, 0), []
    for _ in range(8):
        alive.append(graphed([x]))
        assert same(alive[-1], alive[0])
    assert graphed.why_none == "its capture failed: what is computed outside of a graph lies elsewhere in every call"
    assert pool.calls[-3:] == ["run", "run", "run"]
    assert all(piece.graph is None for piece in graphed._pieces)


def test_a_call_that_turns_out_to_wait_cuts_the_step() -> None:
    def step(w: Tensor, x: Tensor) -> tuple[Any, ...]:
        y = layers(w * x)
        w.sub_(layers(torch.ops.wholestep_unit_tests.waits(y)))
        return y, layers(torch.ops.wholestep_unit_tests.waits(w))

    pool, specs = Replays(), [gpu(3, 3, kind=PARAM), gpu(3, 3)]
    program = scheduled(step, *specs, writes=True, segments=False)
    graphed = graphed_of(program, pool)
    plain = eager_backend.lower(program)
    (w, x), kept = tensors_for(specs, 0), []
    theirs = w.clone()
    for call in range(8):
        del pool.calls[:]
        found, wanted = graphed([w, x]), plain([theirs, x])
        assert same([*found[:2], w], [*wanted[:2], theirs])
        kept.append((found[:2], wanted[:2]))
        # It is captured in vain once, runs as it is in that call and two others, and in pieces from then on.
        assert pool.calls.count("replay") == (3 if call >= 2 * WARM_UP_CALLS + 1 else 0)
    assert all(same(*pair) for pair in kept)
    assert graphed.description == (
        "3 CUDA graphs, cut where wholestep_unit_tests.waits.default of train.py:7 could not be captured: "
        "operation not permitted when stream is capturing, and 1 more"
    )


def test_what_cuts_one_program_cuts_all() -> None:
    """Another one need not find out by itself, unless it was begun before. Each says how it runs."""

    def step(x: Tensor) -> Tensor:
        return layers(torch.ops.wholestep_unit_tests.waits(layers(x)))

    def other(x: Tensor) -> Tensor:
        return layers(x)

    pool, specs, refused = Replays(), [gpu(3, 3)], dict[Any, str]()
    backend = InductorBackend(InductorOptions(), torch.device("cuda", 0))

    def made(fn: Callable[..., Any]) -> GraphRunner:
        return graphed_of(scheduled(fn, *specs, segments=False), pool, refused)

    first, early, whole = made(step), made(step), made(other)
    (x,) = tensors_for(specs, 0)
    for _ in range(WARM_UP_CALLS + 1):
        first([x])
    cut = first.description
    assert cut.startswith("2 CUDA graphs, cut where wholestep_unit_tests.waits.default")
    assert (early.description, whole.description) == ("one CUDA graph",) * 2
    late = made(step)
    assert late.description == cut
    assert len(late._pieces) == 3
    for _ in range(WARM_UP_CALLS + 1):
        early([x])
        late([x])
    assert [backend.execution_mode(one).description for one in (early, late)] == [f"inductor, {cut}"] * 2
    assert backend.execution_mode(whole).description == "inductor, one CUDA graph"


def test_a_capture_that_fails_for_another_reason_cuts_nothing() -> None:
    def step(x: Tensor) -> Tensor:
        return layers(torch.ops.wholestep_unit_tests.breaks(layers(x)))

    pool, specs = Replays(), [gpu(3, 3)]
    graphed = graphed_of(scheduled(step, *specs, segments=False), pool)
    (x,) = tensors_for(specs, 0)
    found = [graphed([x]) for _ in range(6)]
    assert all(same(one, found[0]) for one in found)
    assert graphed.why_none.startswith(
        "its capture failed: no memory, with so much of it in private pools that captures have, while running breaks"
    )
    assert pool.calls.count("capture") == 1


def test_all_behind_a_piece_that_is_captured_again_are_captured_again() -> None:
    """It may leave what it computes elsewhere, where a later one has had its own memory until then."""

    def step(w: Tensor, x: Tensor) -> tuple[Any, ...]:
        y = layers(w * x)
        return layers(x * y.sum().item()), y

    pool, specs = Replays(), [gpu(3, 3, kind=PARAM), gpu(3, 3)]
    program = scheduled(step, *specs, segments=False)
    graphed = graphed_of(program, pool)
    assert [len(piece._piece.inputs) for piece in graphed._pieces] == [2, 2, 1]
    w, x = tensors_for(specs, 0)
    for _ in range(4):
        graphed([w, x])
    assert [len(piece._static) for piece in graphed._pieces] == [1, 0, 1]  # the argument; what is computed in between
    del pool.calls[:]
    graphed([w.clone(), x])
    assert pool.calls == ["run", "capture", "reset", "replay", "run", "capture", "replay"]


def test_graphs_are_given_up_with_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized = list[Any]()
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    fn, specs, _ = STEPS["a number in the middle"]
    pool = Replays()
    program = replace(scheduled(fn, *specs, segments=False), mesh=(MeshAxis(name="data", size=2, group="its group"),))
    graphed = graphed_of(program, pool)
    inputs = tensors_for(specs, 0)
    graphed.release_group("its group")
    assert not synchronized
    for _ in range(3):
        graphed(list(inputs))
    graphed.release_group("another")
    assert "reset" not in pool.calls
    graphed.release_group("its group")
    assert synchronized == [torch.device("cpu")]
    assert pool.calls[-2:] == ["reset", "reset"]
    del pool.calls[:]
    graphed(list(inputs))
    assert pool.calls.count("capture") == 2
