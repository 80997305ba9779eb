"""A step whose sizes move starts warm: its traces are loaded with their conditions, and the bits are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.behaviour.moving_sizes.conditions import conditions
from tests.behaviour.warm.steps import state_of

WORDS, WIDTH = 11, 8
LENGTHS = (5, 7, 2, 1, 12, 9, 30)
F = nn.functional


def things() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.LayerNorm(WIDTH))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, opt: Any, x: Tensor) -> Tensor:
    h = model(x)
    seen = h.transpose(0, 1).reshape(-1, WIDTH)[: 2 * x.shape[1] if x.shape[1] < 100 else None]
    loss = (h @ h.transpose(1, 2)).square().mean() / x.shape[1] + seen.sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def train_long_otherwise(model: Any, opt: Any, x: Tensor) -> Tensor:
    return train(model, opt, x if x.shape[1] < 8 else x.flip(1)[:, 1:])


def train_on_a_number_of_words(model: Any, opt: Any, x: Tensor) -> Tensor:
    return train(model, opt, x[:, [int(x.shape[1]) - 1, 0]])


WEIGHT = {"loss": 1.0}


def train_long_otherwise_by_a_number(model: Any, opt: Any, x: Tensor) -> Tensor:
    loss = model(x if x.shape[1] < 8 else x.flip(1)[:, 1:]).square().mean() * WEIGHT["loss"]
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def losses(step: Callable[..., Tensor], lengths: Sequence[int] = LENGTHS) -> list[Any]:
    """Of some calls, and the state after them."""
    context, batches = things(), torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    found: list[Any] = []
    for call, length in enumerate(lengths):
        WEIGHT["loss"] = 1.0 + call
        found += [step(*context, torch.randint(WORDS, (3, length), generator=batches)), torch.get_rng_state()]
    return [*found, *state_of(context)]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("backend", "dynamic"), [("inductor", None), ("eager", True)])
def test_no_size_is_traced_again(backend: Any, dynamic: bool | None) -> None:
    first, second = (ws.compile(train, backend=backend, fullgraph=True, dynamic=dynamic) for _ in range(2))
    cold, warm = losses(first), losses(second)
    assert equal(cold, warm)
    assert backend != "eager" or equal(cold, losses(train))
    info, traces = second.cache_info(), first.cache_info().traces
    assert (info.traces, info.loaded) == (0, traces)
    assert traces <= 4
    assert conditions(first) == conditions(second) != []
    assert str(first.explain().sizes) == str(second.explain().sizes)


def test_a_saved_trace_is_for_the_sizes_of_its_conditions_alone() -> None:
    """Two traces for the same arguments, which a branch on their size tells apart."""
    losses(ws.compile(train_long_otherwise, backend="eager", dynamic=True), (5, 9))
    second = ws.compile(train_long_otherwise, backend="eager", dynamic=True)
    assert equal(losses(second, (20, 3, 8, 7)), losses(train_long_otherwise, (20, 3, 8, 7)))
    assert (second.cache_info().traces, second.cache_info().loaded) == (0, 2)
    third = ws.compile(train_long_otherwise, backend="eager", dynamic=True)
    assert equal(losses(third, (1,)), losses(train_long_otherwise, (1,)))
    assert (third.cache_info().traces, third.cache_info().loaded) == (1, 0)


def test_a_file_that_does_not_fit_leaves_nothing_to_the_next_one() -> None:
    """Both read a number that moves: it is an input of the trace that is loaded after the other one was tried."""
    losses(ws.compile(train_long_otherwise_by_a_number, backend="eager", dynamic=True), (5, 6, 9, 10, 4))
    for lengths in ((20, 3, 8, 7, 6), (6, 5, 20, 9), (5, 20, 6, 9, 10)):
        second = ws.compile(train_long_otherwise_by_a_number, backend="eager", dynamic=True)
        assert equal(losses(second, lengths), losses(train_long_otherwise_by_a_number, lengths))
        assert second.cache_info().loaded > 0


def test_a_size_that_has_become_a_constant_is_not_loaded_for_another_one() -> None:
    lengths = (5, 7, 9)
    losses(ws.compile(train_on_a_number_of_words, backend="eager"), lengths)
    second = ws.compile(train_on_a_number_of_words, backend="eager")
    assert equal(losses(second, (5, 9, 7)), losses(train_on_a_number_of_words, (5, 9, 7)))
    assert second.cache_info().loaded > 0


def test_a_step_with_sizes_that_move_is_saved_and_loaded_by_name(tmp_path: Path) -> None:
    step = ws.compile(train, backend="eager", dynamic=True)
    wanted = losses(step, (5, 7))
    step.save(tmp_path / "step")
    loaded = ws.load(tmp_path / "step", trusted=True)
    assert equal(losses(loaded, (5, 7)), wanted)
    assert (loaded.cache_info().traces, loaded.cache_info().loaded) == (0, 1)


SCRIPT = """
import sys, torch
import wholestep as ws
from tests.behaviour.warm import test_moving_sizes as t
from wholestep.capture.tracing.tracer import Tracer
from wholestep.ir.segment import Segment
def fail(*_): raise AssertionError("it was traced, or nodes of a segment were asked for")
if sys.argv[1] == "warm":
    Tracer.run, Segment.module = fail, property(fail)
for backend in ("eager", "inductor"):
    step = ws.compile(t.train, backend=backend)
    found = t.losses(step)
    print([float(one.double().sum()).hex() for one in found], sorted(t.conditions(step)))
    print(step.cache_info().loaded)
"""


@pytest.mark.slow  # as Inductor compiles
def test_another_process_neither_traces_nor_reads_nodes() -> None:
    def process(phase: str) -> list[str]:
        env = {**os.environ, "PYTHONHASHSEED": "1" if phase == "warm" else "2", "PYTHONWARNINGS": "ignore"}
        root = Path(__file__).parents[3]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, phase], env=env, cwd=root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    cold, warm = process("cold"), process("warm")
    assert cold[::2] == warm[::2]
    assert cold[1::2] == ["0", "0"]
    assert all(int(one) > 2 for one in warm[1::2])
