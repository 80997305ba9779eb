"""What tests of guards and of the native look share."""

from __future__ import annotations

from types import ModuleType

import pytest

from wholestep.capture import native


@pytest.fixture(scope="session")
def module() -> ModuleType:
    """The native look."""
    assert native.wait() == ""
    loaded = native.module()
    assert loaded is not None
    return loaded


@pytest.fixture(params=["native", "plain"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the native look before the comparisons in Python, and without it."""
    if request.param == "plain":
        monkeypatch.setattr(native, "module", lambda: None)
    else:
        assert native.wait() == ""
    return str(request.param)
