"""What a call that fails may not change, and the small model that the tests of failing calls share."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.behaviour.harness import Record, observe, same
from tests.behaviour.small_models import FEATURES, loss_of
from tests.harness.training import backward_and_step

MARK = "# <- here"
"""Ends the line of a step that an error or a warning must name."""


def place_of(step: Callable[..., Any]) -> str:
    """``file.py:12`` of the marked line of a function."""
    lines, first = inspect.getsourcelines(step)
    return (
        f"{Path(inspect.getfile(step)).name}:{first + next(index for index, line in enumerate(lines) if MARK in line)}"
    )


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(5, FEATURES), torch.randint(3, (5,))


def everything(**objects: object) -> Record:
    """Whatever a failed call may not change; fails by itself on a tensor that is no plain tensor."""
    seen: Record = {}
    for name, one in objects.items():
        seen.update(observe(one, name))
        if isinstance(one, torch.optim.Optimizer):
            seen[f"{name}:owned"] = [[id(p) for p in group["params"]] for group in one.param_groups]
            seen[f"{name}:keys"] = [id(p) for p in one.state]
        if isinstance(one, nn.Module):
            seen[f"{name}:ids"] = [id(t) for t in (*one.parameters(), *one.buffers())]
    seen["rng"], seen["random"] = torch.get_rng_state(), random.getstate()
    seen["numpy"] = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    return seen


def assert_untouched(before: Record, after: Record) -> None:
    assert before.keys() == after.keys()
    assert [path for path in before if not same(before[path], after[path])] == []


@contextmanager
def untouched(**objects: object) -> Iterator[None]:
    """Around a call that fails: none of the objects may be another one, or hold anything else, afterwards."""
    before = everything(**objects)
    yield
    assert_untouched(before, everything(**objects))


def warm_up(module: nn.Module, opt: torch.optim.Optimizer) -> None:
    """One eager update, and gradients left behind: there is state that an error could spoil."""
    x, y = batch()
    backward_and_step(loss_of(module, x, y), opt)
    loss_of(module, x, y).backward()
