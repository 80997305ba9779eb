"""A kernel of which Triton cannot compile one block size has the others; here or in a worker."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor.compile_worker.subproc_pool import SubprocException
from torch._inductor.runtime import triton_heuristics

from wholestep.lower.inductor.config_fallback import config_fallback

TUNED: Any = triton_heuristics.CachingAutotuner
ASKED: Any = async_compile.AsyncCompile
FAILURE = "PassManager::run failed"


def kernel_of(sizes: list[str]) -> Any:
    """A kernel that has been compiled with no block size so far."""
    made = TUNED.__new__(TUNED)
    made.configs, made.compile_results, made.launchers = sizes, [], []
    return made


def says(text: str) -> Any:
    def compiles(kernel: Any, size: str) -> str:
        if size.startswith("bad"):
            raise RuntimeError(text)
        return f"compiled {size}"

    return compiles


def test_what_does_not_compile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TUNED, "_precompile_config", says(FAILURE))
    kernel = kernel_of(["one", "bad", "two"])
    with config_fallback():
        kernel._precompile_worker()
    assert kernel.compile_results == ["compiled one", "compiled two"]
    with pytest.raises(RuntimeError, match=FAILURE):
        kernel_of(["bad"])._precompile_worker()  # as Inductor has it


def test_nothing_left_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TUNED, "_precompile_config", says(FAILURE))
    with config_fallback(), pytest.raises(triton_heuristics.NoTritonConfigsError, match=FAILURE):
        kernel_of(["bad", "bad too"])._precompile_worker()


def test_other_failures_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TUNED, "_precompile_config", says("device lost"))
    with config_fallback(), pytest.raises(RuntimeError, match="device lost"):
        kernel_of(["one", "bad"])._precompile_worker()


class Pool:
    """Workers that fail at all they are given."""

    def __init__(self, text: str) -> None:
        self.text = text

    def submit(self, *job: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(SubprocException(self.text))
        return future


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that this process compiled itself."""
    names: list[str] = []

    def load(name: str, text: str) -> Any:
        return SimpleNamespace(
            set_compile_info=lambda *info: None, precompile=lambda **options: names.append(name),
            autotune_cache_info=None, triton_meta={}, inductor_meta={}, fn=None,
        )  # fmt: skip

    monkeypatch.setattr(async_compile, "_load_triton_kernel_from_source", load)
    monkeypatch.setattr(ASKED, "use_process_pool", staticmethod(lambda: inductor_config.compile_threads != 1))
    return names


@pytest.mark.parametrize("named", [False, True])
def test_a_workers_failure_is_compiled_here(monkeypatch: pytest.MonkeyPatch, loaded: list[str], named: bool) -> None:
    monkeypatch.setattr(ASKED, "process_pool", staticmethod(lambda: Pool(f"...\n{FAILURE}\n")))
    with inductor_config.patch(compile_threads=2), config_fallback():
        # generated code names the device, in some versions by its place
        pool = ASKED()
        found = (
            pool.triton("name", f"text {named}", device_str="cuda")
            if named
            else pool.triton("name", f"{named}", "cuda")
        )
        assert loaded == []
        scope = {"name": found}
        pool.wait(scope)
    assert loaded == ["name"]
    assert not hasattr(scope["name"], "result_fn")


def test_other_failures_of_workers_are_raised(monkeypatch: pytest.MonkeyPatch, loaded: list[str]) -> None:
    monkeypatch.setattr(ASKED, "process_pool", staticmethod(lambda: Pool("syntax error")))
    with inductor_config.patch(compile_threads=2), config_fallback():
        found = ASKED().triton("name", "other text", device_str="cuda")
        with pytest.raises(SubprocException, match="syntax error"):
            found.result()
    assert loaded == []
    async_compile.CompiledTritonKernels.cache_clear()
