"""Threads that have steps traced at the same time, or use torch beside a trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step


def make_step() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        return backward_and_step(model(x).square().mean(), opt)

    return step


def test_two_threads_make_their_first_calls_at_once() -> None:
    steps = [ws.compile(make_step(), backend="eager", fullgraph=True) for _ in range(3)]
    failed: list[BaseException] = []
    together = threading.Barrier(len(steps))

    def work(step: Any) -> None:
        try:
            together.wait()
            for _ in range(3):
                step(torch.ones(2, 4))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failed == []
    assert [step.cache_info().traces for step in steps] == [1, 1, 1]
    assert torch.get_rng_state().dtype is torch.uint8  # torch's own functions are in their places again


@pytest.mark.parametrize("may_go_live", [True])  # nobody sees who it was that has seeded the generator
def test_a_thread_draws_with_a_seed_of_its_own_beside_a_trace() -> None:
    ends, failed, draws = threading.Event(), [], []

    def augment() -> None:
        try:
            while not ends.is_set():
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(3)
                    draws.append(torch.rand(1).item())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=augment)
    thread.start()
    run = ws.compile(make_step(), backend="eager")
    for _ in range(2):
        run(torch.ones(2, 4))
    ends.set()
    thread.join()
    assert failed == []
    assert draws
