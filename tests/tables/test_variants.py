"""benchmarks/variants.py: what a variant names, what is reckoned of its times, and that all train alike."""

from __future__ import annotations

import json

import pytest

import wholestep as ws
from benchmarks import variants
from wholestep.errors import ConfigError


@pytest.mark.parametrize(
    ("variant", "backend", "optimizer"),
    [
        ("ddp", None, "fused"),
        ("ddp:optimizer=auto", None, "auto"),
        ("eager", "eager", "fused"),
        ("inductor", "inductor", "fused"),
        ("inductor:optimizer=loop", "inductor", "loop"),
        (
            "inductor:tune_products=false,optimizer=foreach,copy_engines=auto,early_launches=true",
            ws.Inductor(tune_products=False, early_launches=True),
            "foreach",
        ),
    ],
)
def test_what_a_variant_names(variant: str, backend: str | ws.Inductor | None, optimizer: str) -> None:
    assert variants.variant_of(variant) == variants.Variant(backend=backend, optimizer=optimizer)


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("jax", "got 'jax'"),
        ("eager:cuda_graph=false", "got 'cuda_graph=false' in 'eager:"),
        ("ddp:optimizer=true", "got 'optimizer=true'"),
        ("inductor:cuda_graphs=false", "got 'cuda_graphs=false'"),
        ("inductor:cuda_graph=no", "got 'cuda_graph=no'"),
        ("inductor:cuda_graph=true", 'wants "auto" or False'),
    ],
)
def test_a_variant_that_is_none_is_told(variant: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        variants.variant_of(variant)


def test_a_slow_moment_of_the_machine_does_not_count() -> None:
    """Twice as fast in every round, on a machine that slows down by ten."""
    row = variants._row("eager", (1.0, 0.5), [1.0, 10.0, 100.0], [2.0, 20.0, 200.0])
    assert (row.median_ms, row.ratio, row.ratio_p10, row.ratio_p90) == (10.0, 2.0, 2.0, 2.0)


def test_variants_train_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--training", "tiny", "--nproc", "2", "--steps", "20", "--clip", "0.01", "--json", "ddp", "eager"]
    monkeypatch.setattr("sys.argv", ["variants.py", *asked])
    assert variants.main() == 0
    told = json.loads(capsys.readouterr().out)
    ddp, eager = told["rows"]
    assert (told["nproc"], ddp["variant"], eager["variant"]) == (2, "ddp", "eager")
    assert ddp["loss"] == eager["loss"]
    assert eager["first_s"] > ddp["first_s"] > 0
    assert ddp["ratio"] == 1
    assert 0 < eager["p10_ms"] <= eager["median_ms"] <= eager["p90_ms"]


def test_gradients_are_clipped_and_the_update_has_the_form_that_is_asked() -> None:
    def losses(clip: float, optimizer: str) -> list[float]:
        race = variants.Race(training="tiny", variants=(), num_steps=20, clip=clip)
        call = variants.prepare(variants.Variant(backend="eager", optimizer=optimizer), race, ws.init())
        return [float(call()) for _ in range(3)]

    free = losses(0.0, "fused")
    clipped, listed = losses(1e-6, "fused"), losses(0.0, "foreach")
    assert free[0] == clipped[0] == listed[0]
    assert clipped[2] > free[2]  # gradients as small as Adam's eps move parameters less
    assert listed[2] == pytest.approx(free[2], rel=2**-20)


def test_variants_that_do_not_differ_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["variants.py", "eager", "eager"])
    with pytest.raises(SystemExit):
        variants.main()
    assert "variants want to differ" in capsys.readouterr().err
