"""Threads that have steps traced at the same time, or use torch beside a trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.second_thread import closed_lock, of_a_library, wait_for
from tests.harness.training import backward_and_step
from wholestep.capture.capture import capture


def make_step() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        return backward_and_step(model(x).square().mean(), opt)

    return step


def test_threads_make_their_first_calls_at_once() -> None:
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

    threads = [threading.Thread(target=work, args=(step,), daemon=True) for step in steps]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failed == []
    assert [step.cache_info().traces for step in steps] == [1, 1, 1]
    assert torch.get_rng_state().dtype is torch.uint8  # torch's own functions are in their places again


def test_a_first_call_beside_a_capture_waits_for_it_and_is_captured_itself() -> None:
    """As eager code, no strategy would average its gradients, and `fullgraph=True` would be broken in silence."""
    begins, goes_on = closed_lock(), closed_lock()
    other = ws.compile(make_step(), backend="eager")

    def call_other() -> None:
        wait_for(begins)
        threading.Timer(0.3, goes_on.release).start()  # an eager call would have ended by then
        other(torch.ones(2, 4))

    def step(x: Tensor) -> Tensor:
        begins.release()
        wait_for(goes_on)
        return x * 2

    with of_a_library(begins, goes_on), ThreadPoolExecutor(1) as threads:
        called = threads.submit(call_other)
        capture(step, (torch.ones(2),), {})
        called.result()
    assert other.cache_info().traces == 1


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
