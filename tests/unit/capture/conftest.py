"""What tests of guards share."""

from __future__ import annotations

import pytest

from wholestep.capture import native


@pytest.fixture(params=["native", "plain"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the native look before the comparisons in Python, and without it."""
    if request.param == "plain":
        monkeypatch.setattr(native, "module", lambda: None)
    else:
        assert native.wait() == ""
    return str(request.param)
