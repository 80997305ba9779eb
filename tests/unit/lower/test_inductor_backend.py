"""What was compiled of segments, on its way from one process to another: by whom each was, and what is done with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wholestep as ws
import wholestep.api.compiled_step
import wholestep.lower.inductor_backend
from tests.unit.ir.test_serializer import segments_of, with_segments
from wholestep.config import Inductor as InductorOptions
from wholestep.ir.segment import Segment
from wholestep.lower.codecache import toolchain_hash, triton_cache
from wholestep.lower.foreach import multi_tensor
from wholestep.lower.inductor import segment_compiler
from wholestep.lower.inductor_backend import Eager, Form, Inductor
from wholestep.lower.kernels import column_sum, row_sum
from wholestep.util import background

GPU = torch.device("cuda", 1)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is done with what another process has compiled, in order. Nothing else is."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(segment_compiler, "_choose_assembler", lambda: None)  # it changes the environment
    monkeypatch.setattr(toolchain_hash, "wait_for_inductor", lambda: found.append(("wait",)))
    monkeypatch.setattr(segment_compiler.Inductor, "found", lambda self: b"found")
    monkeypatch.setattr(segment_compiler.Inductor, "take_found", lambda self, data: found.append(("found", data)))
    monkeypatch.setattr(
        segment_compiler.Inductor, "take", lambda self, segment, data: found.append(("inductor", segment, data))
    )
    monkeypatch.setattr(
        multi_tensor.Plans, "take", lambda self, segment, *rest: found.append(("lists", segment, *rest))
    )
    return found


def backend(device: torch.device = GPU) -> Inductor:
    return Inductor(InductorOptions(), device)


def compiled_by(monkeypatch: pytest.MonkeyPatch, own: dict[str, bytes], others: dict[str, bytes]) -> None:
    """What kernels over lists and Inductor have of segments, by name."""
    monkeypatch.setattr(multi_tensor.Plans, "written", lambda self, segment: own.get(segment.name))
    monkeypatch.setattr(segment_compiler.Inductor, "written", lambda self, segment: others.get(segment.name))


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
    monkeypatch.setattr(multi_tensor, "plan", lambda segment, texts: looked_at.append(segment) or "it is no list")
    there._lists.begin(program)
    assert there._lists.compile(first) is there._lists.compile(third) is None
    assert looked_at == [second]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_all_segments_are_written_before_anybody_waits(
    on_gpu: bool, given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But those of lists, which have kernels of their own. Ours are built from what was written, before the wait."""
    program = with_segments()
    first, second, third = segments_of(program)
    happened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(multi_tensor.Plans, "begin", lambda self, program: happened.append(("lists",)))
    monkeypatch.setattr(multi_tensor.Plans, "has", lambda self, segment: segment is second)
    monkeypatch.setattr(segment_compiler.Inductor, "begin", lambda self, segment: happened.append(("begin", segment)))
    monkeypatch.setattr(segment_compiler.Inductor, "finish", lambda self: happened.append(("finish",)))
    monkeypatch.setattr(segment_compiler.Inductor, "texts", lambda self: ["one", "two"])
    monkeypatch.setattr(wholestep.lower.inductor_backend, "_kernels_called", lambda program: iter(["called"]))
    monkeypatch.setattr(column_sum, "builds", lambda text: iter([("columns", text)]))
    monkeypatch.setattr(row_sum, "builds", lambda text: iter([("rows", text)]))
    monkeypatch.setattr(triton_cache, "build_beside", lambda jobs, device: happened.append(("build", device, *jobs)))
    backend(GPU if on_gpu else torch.device("cpu"))._compile(program)
    ours = [("lists",), ("build", GPU, "called")], [("build", GPU, ("columns", "one\ntwo"), ("rows", "one\ntwo"))]
    before, behind = ours if on_gpu else ([], [])
    assert happened == [*before, ("begin", first), ("begin", third), *behind, ("finish",)]


@pytest.mark.parametrize(("is_filled_here", "imports"), [(True, False), (False, True)])
def test_who_finds_kernels_imports_the_compiler_meanwhile(
    is_filled_here: bool, imports: bool, given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures block sizes, for which Inductor imports its compiler; rank 0 would wait for that in the first run."""
    begun: list[Any] = []
    monkeypatch.setattr(background, "start_in_background", begun.append)
    monkeypatch.setattr(wholestep.lower.inductor_backend, "compile_fx", SimpleNamespace(start_workers=lambda: None))
    blob_store: Any = SimpleNamespace(is_filled_here=is_filled_here)
    Inductor(InductorOptions(), GPU, blob_store).prepare()
    assert [work.args for work in begun] == [("wholestep.lower.inductor.compile_fx",)] * imports
    Inductor(InductorOptions(), torch.device("cpu"), SimpleNamespace(is_filled_here=False)).prepare()  # type: ignore[arg-type]
    assert len(begun) == imports


def test_a_step_that_one_cuda_graph_launches_costs_the_host_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict[str, Any]()
    monkeypatch.setattr(wholestep.api.compiled_step, "explain", lambda program, **kwargs: told.update(kwargs))
    step = ws.compile(lambda x: x + 1, backend="eager")
    step(torch.ones(2))
    for is_one in (False, True):
        monkeypatch.setattr(Eager, "form", lambda own, lowered, is_one=is_one: Form("eager", is_one_launch=is_one))
        step.explain()
        assert told["one_launch"] is is_one
