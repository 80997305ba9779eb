"""Code of the user's in libraries is found whenever it was put there; what was not written is not looked at again."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from wholestep.api.cache import put_in_libraries as module
from wholestep.api.cache.put_in_libraries import put_in_libraries
from wholestep.capture.native import build


def ours(x: Any) -> Any:
    return x


class OurLinear(nn.Linear):
    pass


@pytest.fixture(autouse=True, params=["guarded", "unguarded"])
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a native guard, and where there is none."""
    if request.param == "unguarded":
        monkeypatch.setattr(module, "state_guard", lambda *_: None)
    elif reason := build.wait():
        pytest.skip(reason)
    monkeypatch.setattr(module, "_libraries", module._Libraries())
    return request.param


def found() -> dict[str, Any]:
    return {path: item for path, item in put_in_libraries() if item in (ours, OurLinear)}


def test_a_function_is_found_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found() == {}
    with monkeypatch.context() as patch:
        patch.setattr(functional, "gelu", ours)
        assert found() == {"torch.nn.functional.gelu": ours}
        assert found() == {"torch.nn.functional.gelu": ours}
    assert found() == {}


def test_a_method_and_a_class_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found() == {}
    monkeypatch.setattr(nn.Bilinear, "forward", ours)
    monkeypatch.setattr(torch.nn.modules.linear, "Linear", OurLinear)
    assert found() == {"torch.nn.modules.linear.Bilinear.forward": ours, "torch.nn.modules.linear.Linear": OurLinear}


def test_libraries_that_come_later_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found() == {}
    late = types.ModuleType("late_library")
    late.__file__ = f"{torch.__path__[0]}/late_library.py"
    late.Late = type("Late", (), {"__module__": "late_library", "method": ours})
    monkeypatch.setitem(sys.modules, "late_library", late)
    assert found() == {"late_library.Late.method": ours}
    late.Later = type("Later", (), {"__module__": "late_library"})
    assert found() == {"late_library.Late.method": ours}
    late.Later.method = ours
    assert found() == {"late_library.Late.method": ours, "late_library.Later.method": ours}
    monkeypatch.delitem(sys.modules, "late_library")
    assert found() == {}


def test_what_was_not_written_is_not_looked_at_again(libraries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found() == found() == {}  # the first look may have had modules imported
    usual, looked_at = module._users_in, []
    monkeypatch.setattr(module, "_users_in", lambda place: looked_at.append(place[0]) or usual(place))
    monkeypatch.setattr(functional, "gelu", ours)
    assert found() == {"torch.nn.functional.gelu": ours}
    assert "torch.nn.functional" in looked_at
    assert len(looked_at) < 20 if libraries == "guarded" else len(looked_at) > 1000
