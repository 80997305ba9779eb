"""What tests of guards and of the native guards share."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from wholestep.capture.capture import capture
from wholestep.capture.native import build


@pytest.fixture(scope="session")
def module() -> ModuleType:
    """The native guards."""
    assert build.wait() == ""
    loaded = build.module()
    assert loaded is not None
    return loaded


@pytest.fixture(params=["native", "plain"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the native guards before the comparisons in Python, and without them."""
    if request.param == "plain":
        monkeypatch.setattr(build, "module", lambda: None)
    else:
        assert build.wait() == ""
    return str(request.param)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each capture, how many numbers were to be inputs."""
    monkeypatch.setenv("WHOLESTEP_CACHE", "0")
    counts: list[int] = []

    def counted(step: Any, args: Any, kwargs: Any, varying: Any, **options: Any) -> Any:
        counts.append(len(varying))
        return capture(step, args, kwargs, varying, **options)

    monkeypatch.setattr("wholestep.api.stages.capture", counted)
    return counts
