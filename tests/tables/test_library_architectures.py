"""benchmarks/library_architectures.py tells architectures that train alike from those that do not."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks import library_architectures as measured

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("task", "name", "kind", "why"),
    [
        ("causal", "doge", "equal", "losses"),
        ("ctc", "wav2vec2", "refused", "numpy.random"),
        ("masked_image", "swin", "eager", "size"),
    ],
)
def test_what_comes_of_an_architecture(task: str, name: str, kind: str, why: str) -> None:
    found = measured.outcome(task, name, "eager", 0.0)
    assert (found.kind, why in found.why) == (kind, True), found.why


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(step: Any, **options: Any) -> Any:
        return lambda **arguments: step(**arguments) + 1e-6

    monkeypatch.setattr(measured.ws, "compile", compiled)
    assert measured.outcome("causal", "llama", "eager", 0.0).kind == "different"
    assert measured.outcome("causal", "llama", "eager", 1e-4).kind == "equal"


def test_a_process_that_ends_or_takes_long_is_told() -> None:
    late = measured.Outcome("task", "name", "late")
    assert measured.apart(lambda: measured.Outcome("task", "name", "equal"), late, 60).kind == "equal"
    assert measured.apart(lambda: exit(3), late, 60) is late
    begin = time.monotonic()
    assert measured.apart(lambda: time.sleep(60) or late, late, 1) is late  # type: ignore[func-returns-value]
    assert time.monotonic() - begin < 30


def test_a_page_says_what_was_found() -> None:
    found = [measured.Outcome("causal", "a", "equal"), measured.Outcome("causal", "b", "refused", "y")]
    assert list(measured.page("causal", found))[1:4] == ["Equal (1): a.\n", "Refused (1):\n", "- b: `y`"]
