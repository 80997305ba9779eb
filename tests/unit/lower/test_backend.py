"""What was compiled of segments, on its way from one process to another: by whom each was, and what is done with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wholestep as ws
import wholestep.step
from tests.unit.program.test_portable import segments_of, with_segments
from wholestep.config import Inductor as InductorOptions
from wholestep.lower import ahead, inductor, lists
from wholestep.lower.backend import Eager, Inductor
from wholestep.program.segment import Segment

GPU = torch.device("cuda", 1)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is done with what another process has compiled, in order. Nothing else is."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(inductor, "_choose_assembler", lambda: None)  # it changes the environment
    monkeypatch.setattr(ahead, "wait_for_inductor", lambda: found.append(("wait",)))
    monkeypatch.setattr(inductor.Inductor, "found", lambda self: b"found")
    monkeypatch.setattr(inductor.Inductor, "take_found", lambda self, data: found.append(("found", data)))
    monkeypatch.setattr(
        inductor.Inductor, "take", lambda self, segment, data: found.append(("inductor", segment, data))
    )
    monkeypatch.setattr(lists.Plans, "take", lambda self, segment, *rest: found.append(("lists", segment, *rest)))
    return found


def backend(device: torch.device = GPU) -> Inductor:
    return Inductor(InductorOptions(), device)


def compiled_by(monkeypatch: pytest.MonkeyPatch, own: dict[str, bytes], others: dict[str, bytes]) -> None:
    """What kernels over lists and Inductor have of segments, by name."""
    monkeypatch.setattr(lists.Plans, "written", lambda self, segment: own.get(segment.name))
    monkeypatch.setattr(inductor.Inductor, "written", lambda self, segment: others.get(segment.name))


def test_everybody_gets_what_is_theirs(given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bytes it starts with. Keys of Inductor are waited for, and kernels over lists come behind its own."""
    program = with_segments()
    first, second, third = segments_of(program)
    own, others = {first.name: b"LL", third.name: b"II"}, {second.name: b"IL", third.name: b"of both"}
    compiled_by(monkeypatch, own, others)
    kernels = backend().kernels(program)
    given.clear()
    backend().give(program, kernels)
    assert given == [
        ("wait",), ("inductor", second, b"IL"), ("found", b"found"), ("lists", first, b"LL", GPU),
        ("lists", third, b"II", GPU),
    ]  # fmt: skip


def test_on_a_cpu_nobody_is_waited_for(given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the CPU comes before the kernels that ask for it."""
    program = with_segments()
    (first, *_), cpu = segments_of(program), torch.device("cpu")
    compiled_by(monkeypatch, {}, {first.name: b"kernel"})
    kernels = backend(cpu).kernels(program)
    assert kernels[2:] == (None, None)
    backend(cpu).give(program, kernels)
    assert given == [("found", b"found"), ("inductor", first, b"kernel")]


def test_only_what_did_not_come_is_looked_at(given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that Inductor has compiled elsewhere is not searched for lists, nor read."""
    program, looked_at = with_segments(), list[Segment]()
    first, second, third = segments_of(program)
    compiled_by(monkeypatch, {}, {first.name: b"kernel", third.name: b"kernel"})
    there, kernels = backend(), backend().kernels(program)
    there.give(program, kernels)
    monkeypatch.setattr(Segment, "module", property(lambda segment: pytest.fail(f"{segment} was read")))
    monkeypatch.setattr(lists, "plan", lambda segment, texts: looked_at.append(segment) or "it is no list")
    there._lists.begin(program)
    assert there._lists.compile(first) is there._lists.compile(third) is None
    assert looked_at == [second]


def test_a_step_that_one_cuda_graph_launches_costs_the_host_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict[str, Any]()
    monkeypatch.setattr(wholestep.step, "explain", lambda program, **kwargs: told.update(kwargs))
    step = ws.compile(lambda x: x + 1, backend="eager")
    step(torch.ones(2))
    for is_one in (False, True):
        monkeypatch.setattr(Eager, "is_one_launch", is_one)
        step.explain()
        assert told["one_launch"] is is_one
    graphed = backend()
    assert graphed.is_one_launch
    graphed.why_no_graph = "it was not asked for"
    assert not graphed.is_one_launch
