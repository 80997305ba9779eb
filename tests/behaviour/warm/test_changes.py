"""What differs from the saved step is told by name, and captured."""

from __future__ import annotations

import functools
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
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

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


FACTOR = 2.0


def doubled(original: Callable[..., Any], factor: float = 2.0) -> Callable[..., Any]:
    """What people put in the place of a function of torch, with the name of that."""

    @functools.wraps(original)
    def function(*args: Any, **options: Any) -> Any:
        return original(*args, **options) * factor

    return function


def by_a_global(original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **options: Any) -> Any:
        return original(*args, **options) * FACTOR

    return function


@pytest.mark.parametrize("name", ["cross_entropy", "linear", "relu"])  # the first one is named in the step itself
def test_a_function_in_the_place_of_torchs_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(backend="eager")
    functional = nn.functional
    monkeypatch.setattr(functional, name, doubled(getattr(functional, name)))
    assert name in why_captured(lambda: run(backend="eager"), caplog)
    run(backend="eager")
    monkeypatch.setattr(functional, name, doubled(functional.__dict__[name].__wrapped__, 3.0))
    assert name in why_captured(lambda: run(backend="eager"), caplog), "another closure"


def test_a_global_that_such_a_function_reads_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nn.functional, "linear", by_a_global(nn.functional.linear))
    run(backend="eager")
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)
    assert "FACTOR was float 2.0, is float 5.0" in why_captured(lambda: run(backend="eager"), caplog)


class Linear:
    """An object in the place of a function of torch, with a setting of its class and one in a method of a base."""

    scale = 1.0

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, *args: Any) -> Any:
        return self.original(*args) * self.scale * FACTOR


def test_what_the_class_of_such_an_object_has_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = nn.functional.linear
    for replacement in (Linear(original), Linear(original).__call__):
        monkeypatch.setattr(nn.functional, "linear", replacement)
        run(backend="eager")
        monkeypatch.setattr(Linear, "scale", Linear.scale + 1.0)
        assert "Linear.scale was float" in why_captured(lambda: run(backend="eager"), caplog)
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", FACTOR + 1.0)
        assert "FACTOR was float" in why_captured(lambda: run(backend="eager"), caplog)


def test_a_method_in_the_place_of_torchs_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(backend="eager")
    original = Tensor.backward
    monkeypatch.setattr(Tensor, "backward", lambda loss, *args: original(loss * 2, *args))
    assert "Tensor.backward" in why_captured(lambda: run(backend="eager"), caplog)


def test_another_hook_of_all_modules_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for factor, traces in ((2.0, 1), (2.0, 0), (3.0, 1)):
        handle = register_module_forward_hook(functools.partial(scaled_output, factor))
        try:
            assert run(backend="eager").cache_info().traces == traces
        finally:
            handle.remove()


def scaled_output(factor: float, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * factor


def test_another_hook_in_the_place_of_one_for_all_modules_is_seen() -> None:
    """Their number alone was compared."""
    model = nn.Linear(4, 3)
    step = ws.compile(lambda x: model(x).detach(), backend="eager")
    for factor in (2.0, 3.0):
        handle = register_module_forward_hook(functools.partial(scaled_output, factor))
        try:
            assert torch.equal(step(X), model(X))
        finally:
            handle.remove()


def test_another_hook_of_all_optimizers_is_seen() -> None:
    model, opt, x, y = things()
    step = ws.compile(train, backend="eager")
    for rate in (0.0, 1.0):
        handle = register_optimizer_step_post_hook(functools.partial(set_first_weight, rate))
        try:
            step(model, opt, x, y)
            assert model[0].weight[0, 0] == rate
        finally:
            handle.remove()


@torch.no_grad()
def set_first_weight(value: float, opt: torch.optim.Optimizer, args: Any, options: Any) -> None:
    opt.param_groups[0]["params"][0][0, 0] = value


X = torch.ones(2, 4)
