"""What differs from the saved step is told by name, and captured."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
import wholestep.api.compiled_step
from tests.behaviour.warm import steps
from tests.behaviour.warm.steps import run, scaled, things, train, why_captured
from tests.harness.training import backward_and_step


def within_a_weight(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    return model, opt, model[0].weight.detach()[: len(x)], y


CHANGES: dict[str, tuple[Callable[[], ws.CompiledStep], str]] = {
    "shape of the batch": (lambda: run(context=(*things()[:2], torch.randn(5, 4), torch.ones(5, dtype=torch.int64))),
                           "argument 2 was .*6, 4"),
    "width of the model": (lambda: run(context=things(width=9)), "weight was"),
    "a flag of the optimizer": (lambda: run(context=things(amsgrad=True)), "amsgrad was bool False, is bool True"),
    "a number that becomes a branch": (lambda: run(context=things(weight_decay=0.0)), "he condition at .* was True"),
    "an option of the strategy": (lambda: run(strategy=ws.DDP(hold_updates=True)), "strategy was"),
    "a batch that is a part of a weight": (lambda: run(context=within_a_weight(*things())), r"share was \[\], is \[\("),
    "an option of the passes": (lambda: run(passes=ws.default_passes(memory_budget=0.9)), "passes was"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_step_is_captured_and_the_change_named(what: str, caplog: pytest.LogCaptureFixture) -> None:
    run()
    change, reason = CHANGES[what]
    told = why_captured(change, caplog)
    assert re.search(reason, told), told


FACTORS = np.ones(3, dtype=np.float32)
GENERATOR = torch.Generator()


def with_array(x: Tensor) -> Tensor:
    return x * torch.from_numpy(FACTORS)


def with_generator(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=GENERATOR)


@pytest.mark.parametrize("fn", [with_array, with_generator])
def test_what_belongs_to_this_process_is_not_copied(fn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that the caller writes to, and a generator that goes on."""
    if fn is with_generator and torch.__version__ < "2.13":
        pytest.skip("torch traces no generator as an argument")
    monkeypatch.setattr(sys.modules[__name__], "FACTORS", FACTORS.copy())
    for _ in range(2):
        step, x = ws.compile(fn, backend="eager"), torch.ones(3)
        for factor in (1.0, 2.0):
            FACTORS[:] = factor
            GENERATOR.manual_seed(3)
            want = fn(x)
            GENERATOR.manual_seed(3)
            assert torch.equal(step(x), want)
        FACTORS[:] = 1.0


def test_a_changed_global_constant_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run()
    monkeypatch.setattr(steps, "SCALE", 2.0)
    assert "SCALE was float 1.0, is float 2.0" in why_captured(run, caplog)


def test_a_changed_switch_of_torch_is_named(caplog: pytest.LogCaptureFixture) -> None:
    run()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert "flash attention was True, is False" in why_captured(run, caplog)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_another_torch_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run()
    monkeypatch.setattr(torch.version, "git_version", "another")
    assert "the build: torch was" in why_captured(run, caplog)


HELPER = """
import os
WEIGHT = {weight}
def scaled(loss):
    if os.environ.get("DOUBLED"):
        loss = loss * 2
    return loss * WEIGHT{more}
"""


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Writes and imports a module of the user's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(weight: float = 1.0, more: str = "") -> Any:
        path = tmp_path / "users_helper.py"
        path.write_text(HELPER.format(weight=weight, more=more))
        os.utime(path, (0, 0))  # as if it had been there before this process
        sys.modules.pop("users_helper", None)
        importlib.invalidate_caches()
        return importlib.import_module("users_helper")

    yield make
    sys.modules.pop("users_helper", None)


def with_helper(module: Any) -> Callable[..., Tensor]:
    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(module.scaled(nn.functional.cross_entropy(model(x), y)), opt).detach()

    return step


def test_a_changed_line_of_a_helper_module_is_named(
    helper: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(with_helper(helper())).cache_info().traces == 1
    assert run(with_helper(helper())).cache_info().loaded == 1
    assert "the code of scaled was" in why_captured(lambda: run(with_helper(helper(more=" + 1"))), caplog)


def test_a_changed_constant_of_a_helper_module_is_named(
    helper: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    module = helper()
    run(with_helper(module))
    module.WEIGHT = 3.0  # the file is the same
    assert "WEIGHT was float 1.0, is float 3.0" in why_captured(lambda: run(with_helper(module)), caplog)


def test_a_changed_file_that_no_walk_reaches_is_named(
    helper: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    module = helper()
    run()
    Path(module.__file__).write_text("print('something else')\n")
    assert "users_helper.py was" in why_captured(run, caplog)


def test_a_file_written_while_the_process_ran_keeps_a_step_from_being_saved(
    helper: Callable[..., Any], cache: Path
) -> None:
    """What was imported may be what it said before."""
    Path(helper().__file__).touch()
    run()
    assert not list(cache.glob("*"))


def test_a_changed_variable_of_the_environment_is_named(
    helper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = helper()
    run(with_helper(module))
    monkeypatch.setenv("DOUBLED", "1")
    assert "environment: DOUBLED was not set, is 1" in why_captured(lambda: run(with_helper(module)), caplog)


def test_another_number_of_an_optimizer_is_another_step(caplog: pytest.LogCaptureFixture) -> None:
    run(train, scaled(0))
    assert "opt.scale was int 0, is int 5" in why_captured(lambda: run(train, scaled(5)), caplog)
