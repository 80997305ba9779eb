"""Whose a class or a file is: told by where it lies, whatever its name begins with."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.api.report.live_explanation import LiveExplanation
from wholestep.capture.python import code_owner
from wholestep.capture.python.code_owner import Owner

SOURCE = """
class Box:
    def __init__(self, **items):
        self.__dict__.update(items)


class Mapping:
    def __init__(self, **items):
        self.__dict__["_mapping"] = dict(items)

    def __getattr__(self, name):
        try:
            return self._mapping[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, item):
        self._mapping[name] = item


class Slots:
    __slots__ = ("__dict__", "n", "weight")

    def __init__(self, **items):
        for name, item in items.items():
            setattr(self, name, item)


class Keyed(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Nested:
    def __init__(self, **items):
        self.__dict__["_store"] = Mapping(**items)

    def __getattr__(self, name):
        return getattr(self._store, name)

    def __setattr__(self, name, item):
        setattr(self._store, name, item)


def scaled(loss, box):
    return loss * box.weight
"""
NAMES = ("torch_helpers", "numpy_helpers", "logging_helpers", "threading_helpers", "wholestep_helpers", "torchx")
CLASSES = ("Box", "Mapping", "Slots", "Keyed", "Nested")


@pytest.fixture(params=["site-packages", "project"])
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / request.param
    made.mkdir()
    monkeypatch.syspath_prepend(made)
    return made


@pytest.fixture(params=NAMES)
def module(folder: Path, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    (folder / f"{request.param}.py").write_text(SOURCE)
    importlib.invalidate_caches()
    yield importlib.import_module(request.param)
    del sys.modules[request.param]


def test_a_name_that_begins_like_a_librarys_is_not_its(module: Any, folder: Path) -> None:
    wanted = Owner.INSTALLED if folder.name == "site-packages" else Owner.USER
    assert code_owner.owner_of_class(module.Box) is wanted
    assert code_owner.owner_of_file(module.__file__) is wanted
    assert code_owner.is_user_code(module.scaled) is (wanted is Owner.USER)
    assert not code_owner.is_library_class(module.Box)


@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        (nn.Linear, Owner.TORCH), (Tensor, Owner.TORCH), (torch.Generator, Owner.TORCH), (np.ndarray, Owner.NUMPY),
        (np.random.Generator, Owner.NUMPY), (ws.CompiledStep, Owner.OURS), (logging.Logger, Owner.PYTHON),
        (threading.local, Owner.PYTHON), (OrderedDict, Owner.PYTHON), (weakref.WeakKeyDictionary, Owner.PYTHON),
        (int, Owner.PYTHON), (type(len), Owner.PYTHON), (functools.partial, Owner.PYTHON),
        (type(iter([])), Owner.PYTHON), (pytest.MonkeyPatch, Owner.INSTALLED), (Path, Owner.PYTHON),
    ],
)  # fmt: skip
def test_whose_a_class_is(kind: type, owner: Owner) -> None:
    assert code_owner.owner_of_class(kind) is owner
    assert code_owner.is_library_class(kind) is (owner is not Owner.INSTALLED)


def training(kind: Any, compiled: bool, writes: bool) -> tuple[list[Any], Any]:
    """What a step gives that reads a weight and a target from an object, moved between calls, and may count in it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    box = kind(weight=1.0, n=0, target=torch.ones(3), loss=None)

    def update(x: Tensor) -> int:
        loss = (box.weight * (model(x) - box.target)).square().mean()
        backward_and_step(loss, opt)
        if writes:
            box.n += 1
            box.loss = loss.detach()
        return box.n  # type: ignore[no-any-return]

    step = ws.compile(update, backend="eager", fullgraph=not writes) if compiled else update
    found: list[Any] = []
    for call in range(5):
        found += [step(torch.full((2, 3), 0.5)), box.n, box.loss, *(p.detach().clone() for p in model.parameters())]
        if call % 2:
            box.weight /= 2
        if call == 2:
            box.target = torch.full((3,), float(call))
    return found, step


@pytest.mark.parametrize(("writes", "may_go_live"), [(False, False), (True, True)])
@pytest.mark.parametrize("module", ["torch_helpers", "threading_helpers"], indirect=True)
@pytest.mark.parametrize("kind", CLASSES)
def test_its_objects_are_read_and_written_at_every_call(
    module: Any, kind: str, writes: bool, may_go_live: bool
) -> None:
    (wanted, _), (found, step) = (training(getattr(module, kind), compiled, writes) for compiled in (False, True))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert isinstance(step.explain(), LiveExplanation) == writes
