"""What Inductor asks about a CPU is asked once."""

from __future__ import annotations

import pytest
from torch._inductor.cpu_vec_isa import VecISA

from wholestep.lower.inductor import cpu_isa


class Asked(VecISA):
    """Vector instructions that one compiler has."""

    _arch_flags = "-mmine"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was really tried. Inductor's own memory of it is left alone."""
    tried: list[str] = []

    def check_build(isa: VecISA, code: str) -> bool:
        tried.append(code)
        return code == "good"

    def pick() -> list[bool]:
        return [Asked().check_build(code) for code in ("good", "bad")]

    with cpu_isa._lock:  # a thread that another test has started asks first
        monkeypatch.setattr(cpu_isa, "_check_build", check_build)
        monkeypatch.setattr(cpu_isa, "_answers", {})
    monkeypatch.setattr(cpu_isa, "pick_vec_isa", pick)
    return tried


def test_nothing_is_asked_twice(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_isa.probe()
    cpu_isa.probe()
    assert asked == ["good", "bad"]
    said = cpu_isa.dump_answers()
    monkeypatch.setattr(cpu_isa, "_answers", {})  # as in another process
    cpu_isa.load_answers(said)
    assert asked == ["good", "bad"]
    assert cpu_isa.dump_answers() == said
    assert sorted(cpu_isa._answers.values()) == [False, True]


def test_other_flags_are_another_question(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_isa.probe()
    monkeypatch.setattr(Asked, "_arch_flags", "-mmine -mmore")
    cpu_isa.probe()
    assert asked == ["good", "bad"] * 2


def test_inductor_asks_as_ever_in_the_end(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        assert VecISA.check_build is cpu_isa._answered
        raise OSError("no room")

    before = VecISA.check_build
    monkeypatch.setattr(cpu_isa, "_check_build", before)
    monkeypatch.setattr(cpu_isa, "pick_vec_isa", fails)
    with pytest.raises(OSError, match="no room"):
        cpu_isa.probe()
    assert VecISA.check_build is before
