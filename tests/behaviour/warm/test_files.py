"""Files of the cache and of `CompiledStep.save`: damaged, foreign, switched off, saved and loaded."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
import wholestep.api.compiled_step
from tests.behaviour.warm.steps import losses, run, state_of, things, train, why_captured
from wholestep.errors import ArtifactError


def test_a_damaged_file_of_the_cache_is_captured_anew(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    run()
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    assert "is damaged" in why_captured(run, caplog)
    assert run().cache_info().loaded == 1, "and written anew"


def test_a_file_that_others_can_write_to_is_not_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    run()
    (file,) = cache.iterdir()
    file.chmod(0o666)
    assert "can be written to by others" in why_captured(run, caplog)


def test_the_cache_can_be_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE", "0")
    run()
    assert not cache.exists()


def test_what_cannot_be_compared_is_not_kept(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = zlib.compressobj()

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train(model, opt, x, y) + (0 if odd is None else 1)

    with caplog.at_level(logging.INFO, "wholestep"):
        run(step)
    assert "odd holds a Compress, of which nothing can be seen" in caplog.text
    assert not list(cache.glob("*"))


def test_a_step_saved_and_loaded_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, step = things(), ws.compile(train, backend="eager", max_retraces=3)
    cold = losses(step, context)
    path = tmp_path / "saved.step"
    step.save(path)
    monkeypatch.setenv("WHOLESTEP_CACHE", "0")
    with pytest.raises(ArtifactError, match="trusted=True"):
        ws.load(path)
    loaded = ws.load(path, trusted=True)
    again = things()
    assert losses(loaded, again) == cold
    assert loaded.cache_info().loaded == 1
    assert loaded.cache_info().traces == 0
    assert all(map(torch.equal, state_of(context), state_of(again)))


def test_a_loaded_step_is_refused_as_the_saved_one(tmp_path: Path) -> None:
    path = tmp_path / "saved.step"
    run(max_retraces=0, fullgraph=True).save(path)
    step = ws.load(path, train, trusted=True)
    model, opt, x, y = things()
    step(model, opt, x, y)
    with pytest.raises(ws.RetraceLimitError):
        step(model, opt, x[:2], y[:2])


def test_a_file_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "saved.step"
    run().save(path)
    step = ws.load(path, train, trusted=True)
    before = things(width=9)
    with pytest.raises(ArtifactError, match="was saved for something else"):
        step(*before)
    assert not before[1].state, "no state of the optimizer is left behind"


def test_a_file_that_is_no_step_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "saved.step"
    path.write_bytes(b"no step at all")
    with pytest.raises(ArtifactError, match="is no step"):
        ws.load(path, trusted=True)


def test_a_function_that_cannot_be_found_has_to_be_passed(tmp_path: Path) -> None:
    def local(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train(model, opt, x, y)

    path = tmp_path / "saved.step"
    run(local).save(path)
    with pytest.raises(ArtifactError, match="Pass the function"):
        ws.load(path, trusted=True)
    step = ws.load(path, local, trusted=True)
    step(*things())
    assert step.cache_info().loaded == 1


def test_a_step_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    step = run(context=things())
    with pytest.raises(ArtifactError, match="cannot be written"):
        step.save(tmp_path / "no folder" / "saved.step")
