"""Fixtures of the tests of CUDA graphs."""

from __future__ import annotations

import pytest

from tests.unit.lower.cudagraph.fake_cuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)
