"""benchmarks/library_optimizers.py tells right optimizers from wrong ones, and its page is what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import library_optimizers as measured

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")


class Counting(torch.optim.SGD):
    """Halves its rate by a number that it keeps itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


class Asking(Counting):
    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].grad.sum() > 1e9:
            return None
        return super().step(closure)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize(("kind", "wanted", "why"), [
    (torch.optim.SGD, "bitwise", ""), (Counting, "live", "opt.groups.0.lr"), (Asking, "live", "params"),
])  # fmt: skip
def test_what_comes_of_an_optimizer(kind: Any, wanted: str, why: str, may_go_live: bool) -> None:
    found = measured.outcome("it", lambda net: kind(net.parameters(), lr=0.1))
    assert found.kind == wanted
    assert why in found.why


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([measured.step_of(1)] * measured.STEPS + [lambda net, *rest: torch.zeros(())] * measured.STEPS)
    monkeypatch.setattr(measured.ws, "compile", lambda step, **options: step)
    monkeypatch.setattr(measured, "step_of", lambda updates: lambda *args: next(steps)(*args))
    found = measured.outcome("it", lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    assert found.kind == "different"


def test_the_page_is_of_this_command_and_finds_nothing_wrong() -> None:
    head = measured.HEAD.partition("torch {version}")[0]
    assert PAGE.startswith(head)
    assert "DIFFERENT" not in PAGE
    assert all(f"\n## {library} " in PAGE for library in measured.LIBRARIES)
    lines = list(measured.page("torch.optim", [measured.Outcome("SGD", "bitwise"), measured.Outcome("X", "live", "y")]))
    assert lines[1:] == ["Equal in every bit (1): SGD.\n", "Equal in every bit, and live (1):\n", "- X: `y`"]


@pytest.mark.parametrize("updates", [1, 3])
def test_a_call_makes_as_many_updates_as_are_asked_for(updates: int) -> None:
    made: list[torch.optim.Optimizer] = []

    def make(net: torch.nn.Module) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(net.parameters(), lr=0.01, foreach=True))
        return made[-1]

    assert measured.outcome("it", make, updates).kind == "bitwise"
    for opt in made:
        assert {float(held["step"]) for held in opt.state.values()} == {float(updates * measured.STEPS)}
