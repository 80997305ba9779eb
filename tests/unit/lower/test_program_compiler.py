"""What was compiled of segments, on its way from one process to another: by whom each was, and what is done with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.ir.test_serializer import with_segments
from wholestep.ir.segment import Segment, segments_of
from wholestep.lower import program_compiler
from wholestep.lower.codecache import toolchain_hash, triton_cache
from wholestep.lower.foreach import multi_tensor
from wholestep.lower.foreach.multi_tensor import MultiTensorCompiler
from wholestep.lower.inductor import segment_compiler
from wholestep.lower.inductor.segment_compiler import SegmentCompiler
from wholestep.lower.kernels import column_sum, row_sum
from wholestep.lower.program_compiler import ProgramCompiler

GPU = torch.device("cuda", 1)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is done with code from another process, in order. Nothing else is."""
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(segment_compiler, "_choose_assembler", lambda: None)  # it changes the environment
    monkeypatch.setattr(toolchain_hash, "wait_for_inductor", lambda: done.append(("wait",)))
    monkeypatch.setattr(SegmentCompiler, "dump_shared", lambda self: b"shared")
    monkeypatch.setattr(SegmentCompiler, "load_shared", lambda self, data: done.append(("shared", data)))
    monkeypatch.setattr(SegmentCompiler, "loads", lambda self, segment, data: done.append(("inductor", segment, data)))
    monkeypatch.setattr(
        MultiTensorCompiler, "loads", lambda self, segment, *rest: done.append(("multi-tensor", segment, *rest))
    )
    return done


def compiler(device: torch.device = GPU) -> ProgramCompiler:
    return ProgramCompiler(device, early_launches=False, tune_products=False)


def compiled_by(monkeypatch: pytest.MonkeyPatch, own: dict[str, bytes], others: dict[str, bytes]) -> None:
    """What kernels over lists and Inductor have of segments, by name."""
    monkeypatch.setattr(MultiTensorCompiler, "dumps", lambda self, segment: own.get(segment.name))
    monkeypatch.setattr(SegmentCompiler, "dumps", lambda self, segment: others.get(segment.name))


def test_everybody_gets_what_is_theirs(loaded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bytes it starts with. Keys of Inductor are waited for, and kernels over lists come after its own."""
    program = with_segments()
    first, second, third = segments_of(program)
    own, others = {first.name: b"LL", third.name: b"II"}, {second.name: b"IL", third.name: b"of both"}
    compiled_by(monkeypatch, own, others)
    kernels = compiler().dumps(program)
    loaded.clear()
    compiler().loads(program, kernels)
    assert loaded == [
        ("wait",), ("inductor", second, b"IL"), ("shared", b"shared"), ("multi-tensor", first, b"LL", GPU),
        ("multi-tensor", third, b"II", GPU),
    ]  # fmt: skip


def test_on_a_cpu_nobody_is_waited_for(loaded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the CPU comes before the kernels that ask for it."""
    program = with_segments()
    (first, *_), cpu = segments_of(program), torch.device("cpu")
    compiled_by(monkeypatch, {}, {first.name: b"kernel"})
    kernels = compiler(cpu).dumps(program)
    assert kernels[2:] == (None, None)
    compiler(cpu).loads(program, kernels)
    assert loaded == [("shared", b"shared"), ("inductor", first, b"kernel")]


def test_only_what_did_not_come_is_looked_at(loaded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that Inductor has compiled elsewhere is not searched for lists, nor read."""
    program, looked_at = with_segments(), list[Segment]()
    first, second, third = segments_of(program)
    compiled_by(monkeypatch, {}, {first.name: b"kernel", third.name: b"kernel"})
    there, kernels = compiler(), compiler().dumps(program)
    there.loads(program, kernels)
    monkeypatch.setattr(Segment, "module", property(lambda segment: pytest.fail(f"{segment} was read")))
    monkeypatch.setattr(multi_tensor, "plan", lambda segment, texts: looked_at.append(segment) or "")
    there.multi_tensor.begin(program)
    assert there.multi_tensor.compile(first) is there.multi_tensor.compile(third) is None
    assert looked_at == [second]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_all_segments_are_written_before_anybody_waits(
    on_gpu: bool, loaded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But those of lists, which have kernels of their own. Ours are built from what was written, before the wait."""
    program = with_segments()
    first, second, third = segments_of(program)
    happened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(MultiTensorCompiler, "begin", lambda self, program: happened.append(("lists",)))
    monkeypatch.setattr(MultiTensorCompiler, "has", lambda self, segment: segment is second)
    monkeypatch.setattr(SegmentCompiler, "begin", lambda self, segment: happened.append(("begin", segment)))
    monkeypatch.setattr(SegmentCompiler, "finish", lambda self: happened.append(("finish",)))
    monkeypatch.setattr(SegmentCompiler, "texts", lambda self: ["one", "two"])
    monkeypatch.setattr(program_compiler, "_kernels_called", lambda program: iter(["called"]))
    monkeypatch.setattr(column_sum, "builds", lambda text: iter([("columns", text)]))
    monkeypatch.setattr(row_sum, "builds", lambda text: iter([("rows", text)]))
    monkeypatch.setattr(
        triton_cache, "build_in_background", lambda jobs, device: happened.append(("build", device, *jobs))
    )
    compiler(GPU if on_gpu else torch.device("cpu")).compile_all(program)
    ours = [("lists",), ("build", GPU, "called")], [("build", GPU, ("columns", "one\ntwo"), ("rows", "one\ntwo"))]
    before, behind = ours if on_gpu else ([], [])
    assert happened == [*before, ("begin", first), ("begin", third), *behind, ("finish",)]
