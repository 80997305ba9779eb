"""From which states of a generator a CUDA graph draws. That it draws the same: `tests/gpu/test_cuda_steps.py`."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from wholestep.ir import node_meta
from wholestep.ir.ops import rng_state
from wholestep.lower.cudagraph import rng_replay
from wholestep.lower.cudagraph.rng_replay import ReplayPlan, plan_replay


def drawn(plan: ReplayPlan, draws: list[int]) -> list[list[int]]:
    """What each part of a graph draws: `draws` numbers each, before every setting and after the last."""
    places = [0, *plan.starts]
    found, now = [], 0
    for number, count in enumerate(draws):
        found.append(list(range(places[now], places[now] + count)))
        places[now] += count
        if number < len(plan.turns):
            now = plan.turns[number]
    return found


def as_it_is(program: list[tuple[str, int]]) -> tuple[list[list[int]], list[tuple[int, int]], list[int]]:
    """Runs draws, reads and settings: what each part draws, the settings as they are seen, and how much was drawn."""
    place, states, settings = 0, list[int](), list[tuple[int, int]]()
    parts: list[list[int]] = [[]]
    for word, number in program:
        if word == "draw":
            parts[-1] += range(place, place + number)
            place += number
        elif word == "get":
            states.append(place)
        else:
            settings.append((place, states[number]))
            place = states[number]
            parts.append([])
    return parts, settings, [len(part) for part in parts]


def draw(count: int) -> tuple[str, int]:
    return "draw", count


GET = ("get", 0)
PROGRAMS = {
    "one block": [draw(4), GET, draw(8), GET, ("set", 0), draw(8), ("set", 1), draw(4)],
    "blocks, the last first": [
        GET, draw(8), GET, draw(12), draw(4), GET, ("set", 1), draw(12), ("set", 2), GET, ("set", 0), draw(8),
        ("set", 3), draw(4),
    ],
    "one within another": [
        GET, draw(8), GET, draw(4), GET, ("set", 0), draw(8), GET, draw(4), GET, ("set", 3), draw(4), ("set", 4),
        ("set", 2), draw(4),
    ],
    "back, and on from there twice": [
        GET, draw(8), GET, ("set", 0), draw(4), GET, ("set", 1), draw(4), GET, ("set", 2), draw(4), ("set", 3), draw(4),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_draws_what_is_drawn_without_one(name: str) -> None:
    parts, settings, draws = as_it_is(PROGRAMS[name])
    plan = plan_replay(settings)
    assert plan is not None
    assert drawn(plan, draws) == parts


def test_a_block_has_one_state_of_its_own() -> None:
    _, settings, _ = as_it_is(PROGRAMS["blocks, the last first"])
    assert plan_replay(settings) == ReplayPlan(starts=(8, 0), turns=(1, 0, 2, 0))


def test_a_step_that_leaves_the_generator_back_there_has_no_plan() -> None:
    assert plan_replay([(8, 0)]) is None
    assert plan_replay([]) == ReplayPlan(starts=(), turns=())


def node(graph: fx.Graph, target: object, *args: object) -> fx.Node:
    made = graph.call_function(target, args)  # type: ignore[arg-type]
    with FakeTensorMode():
        node_meta.set_value(made, torch.empty(16, dtype=torch.uint8))
    return made


def test_settings_to_states_that_the_step_has_read_are_taken() -> None:
    graph = fx.Graph()
    outside = graph.placeholder("state")
    read, read_on_host = node(graph, rng_state.GET, "cuda:0"), node(graph, rng_state.GET, "cpu")
    assert rng_replay.is_replayed(read)
    assert not rng_replay.is_replayed(read_on_host)
    assert rng_replay.is_replayed(node(graph, rng_state.SET, read, "cuda"))
    assert not rng_replay.is_replayed(node(graph, rng_state.SET, read_on_host, "cpu"))
    assert not rng_replay.is_replayed(node(graph, rng_state.SET, outside, "cuda"))
    node(graph, torch.ops.aten.clone.default, read)
    assert not any(map(rng_replay.is_replayed, (read, *read.users)))  # a graph would show something else
