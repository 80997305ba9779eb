"""What the backend of Inductor starts before it compiles, and how a step of it is said to run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wholestep as ws
import wholestep.api.compiled_step
from wholestep.config import Inductor as InductorOptions
from wholestep.lower import inductor_backend
from wholestep.lower.base.eager_backend import EagerBackend
from wholestep.lower.base.protocol import ExecutionMode
from wholestep.lower.inductor import compile_fx, segment_compiler
from wholestep.lower.inductor_backend import InductorBackend
from wholestep.util import background

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(("is_writer", "imports"), [(True, False), (False, True)])
def test_who_finds_kernels_imports_the_compiler_meanwhile(
    is_writer: bool, imports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures block sizes, for which Inductor imports its compiler; rank 0 would wait for that in the first run."""
    begun: list[Any] = []
    monkeypatch.setattr(segment_compiler, "_choose_assembler", lambda: None)  # it changes the environment
    monkeypatch.setattr(background, "start_in_background", begun.append)
    monkeypatch.setattr(inductor_backend, "compile_fx", SimpleNamespace(start_workers=lambda: None))
    blob_store: Any = SimpleNamespace(is_writer=is_writer)
    InductorBackend(InductorOptions(), GPU, blob_store).prepare()
    assert [work.args for work in begun] == [("wholestep.lower.inductor.compile_fx",)] * imports
    InductorBackend(InductorOptions(), torch.device("cpu"), SimpleNamespace(is_writer=False)).prepare()  # type: ignore[arg-type]
    assert len(begun) == imports


def test_a_step_that_one_cuda_graph_launches_costs_the_host_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict[str, Any]()
    monkeypatch.setattr(wholestep.api.compiled_step, "explain", lambda program, **kwargs: told.update(kwargs))
    step = ws.compile(lambda x: x + 1, backend="eager")
    step(torch.ones(2))
    for is_one in (False, True):
        monkeypatch.setattr(EagerBackend, "execution_mode", lambda *_, is_one=is_one: ExecutionMode("eager", is_one))
        step.explain()
        assert told["one_launch"] is is_one


@pytest.mark.parametrize("may_run_one_by_one", [True])
def test_segments_that_inductor_cannot_compile_run_one_by_one_and_are_told(
    monkeypatch: pytest.MonkeyPatch, may_run_one_by_one: bool
) -> None:
    def compile_fx_inner(*args: Any) -> Any:
        raise NotImplementedError("no lowering of that\nand more")

    monkeypatch.setenv("WHOLESTEP_CACHE", "0")
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)
    fn = lambda x: (x + 1).relu().sum()  # noqa: E731
    step, x = ws.compile(fn, backend="inductor"), torch.randn(4, 4)
    assert torch.equal(step(x), fn(x))
    told: Any = step.explain()
    assert "runs one by one: NotImplementedError: no lowering of that" in told.backend
    assert "and more" not in told.backend
