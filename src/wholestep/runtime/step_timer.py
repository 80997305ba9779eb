"""Measured times of a compiled step: the user's own calls, timed as they run, and in them the waits for collectives.

Nothing runs for the measurement's sake, so training is what it would have been. On a GPU the device is waited for
before and after a timed call, and the time that its stream stands still in a wait is read from events in the stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import ConfigError
from wholestep.ir import op_info

Runner = Callable[[list[Any]], tuple[Any, ...]]
Wait = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of some calls on this rank, microseconds."""

    step_us: tuple[float, ...]
    """Of each call, from the inputs to the results; the look whether the graph still holds comes before that."""
    waits_us: tuple[tuple[float, ...], ...]
    """Of each call, how long each wait of the graph took, in the order of the graph. A wait lasts until the slowest
    rank has come, so what ranks lose to each other is in here too."""

    def wait_us(self, number: int) -> float:
        """The median time of one wait."""
        return statistics.median(waits[number] for waits in self.waits_us)


class StepTimer:
    """Times calls until it has seen enough; a first one goes by untimed, as new code is slower once."""

    def __init__(self, num_calls: int, device: torch.device, lower: Callable[[Wait], Runner]) -> None:
        """`lower` makes the function that runs, with another function in the place of ``wait_tensor``.

        Raises ConfigError for fewer than one call.
        """
        if num_calls < 1:
            raise ConfigError(f"measure(...) wants a number of calls of at least 1, got {num_calls!r}.")
        self._num_remaining, self._device = num_calls + 1, device
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._steps: list[float] = []
        self._waits: list[tuple[float, ...]] = []
        self.runner = lower(self._wait)

    def time(self, call: Callable[[], Any]) -> Any:
        """Runs one call, which uses `runner`. One that raises does not count."""
        self._marks.clear()
        self._synchronize()
        start_s = time.perf_counter()
        result = call()
        self._synchronize()
        step_us = 1e6 * (time.perf_counter() - start_s)
        self._num_remaining -= 1
        self._steps.append(step_us)
        self._waits.append(tuple(self._elapsed_us(begin, end) for begin, end in self._marks))
        return result

    @property
    def measured(self) -> StepTimes | None:
        """The times once enough calls were timed; None before that."""
        if self._num_remaining > 0:
            return None
        return StepTimes(step_us=tuple(self._steps[1:]), waits_us=tuple(self._waits[1:]))

    def _wait(self, tensor: Tensor) -> Tensor:
        begin = self._mark()
        done: Tensor = op_info.WAIT(tensor)
        self._marks.append((begin, self._mark()))
        return done

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_us(self, begin: Any, end: Any) -> float:
        return float(1e3 * begin.elapsed_time(end) if self._on_gpu else 1e6 * (end - begin))
