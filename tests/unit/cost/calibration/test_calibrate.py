"""Calibrations are kept whole, found again on the same kind of host only, and shared as rank 0's."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wholestep.cost.calibration import calibrate
from wholestep.cost.calibration.device_probe import Sizes, probe_device
from wholestep.cost.cost_model import CostModel
from wholestep.cost.curve import Curve
from wholestep.cost.device_model import Device

CPU = torch.device("cpu")
MODEL = replace(CostModel.default("cpu+gloo"), source="calibrated here")
TINY = Sizes(
    elements=(64, 4096),
    products=((8, 8, 8), (64, 64, 64)),
    convolutions=((2, 4, 4, 8), (4, 4, 4, 8)),
    attentions=((1, 1, 16, 8), (2, 2, 16, 8)),
    dtypes=(torch.float32,),
    pool_bytes=2**18,
    messages_bytes=(2**10, 2**16),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def marks(**changes: object) -> calibrate.Fingerprint:
    return {**calibrate.fingerprint(CPU, "gloo", 2), **changes}  # type: ignore[dict-item]


def test_what_is_saved_is_loaded_bit_for_bit(cache: Path) -> None:
    odd = replace(MODEL, device=replace(MODEL.device, us_per_listed_tensor=0.1 + 0.2, curves={
        "pointwise": Curve(points=((1.0, 1 / 3), (7.0, 2 / 3)))}))  # fmt: skip
    path = calibrate.save(odd, marks())
    assert calibrate.load(marks()) == odd
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert path.is_relative_to(cache / "wholestep")


@pytest.mark.parametrize(
    "change",
    [{"device": "another"}, {"count": 999}, {"torch": "1.0"}, {"backend": "nccl"}, {"ranks": 3}, {"threads": 77}],
    ids=str,
)
def test_another_host_does_not_use_it(change: dict[str, object]) -> None:
    calibrate.save(MODEL, marks())
    assert calibrate.load(marks(**change)) is None
    assert calibrate.find(CPU, marks(**change)).source == "defaults for cpu + gloo, not calibrated"
    assert calibrate.find(CPU, marks()).source == "calibrated here"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace(f'"version": {calibrate.VERSION}', '"version": 0'),
        lambda text: text.replace('"all_reduce"', '"all_produce"'),
        lambda text: text.replace('"calls_us"', '"calls_ms"'),
        lambda text: text.replace('"ranks": 2', '"ranks": 4'),
        lambda text: re.sub(r'"all_reduce": {"2": \[(\[.*?\]).*?\]\]', r'"all_reduce": {"2": [\1]', text),
    ],
    ids=["cut off", "no object", "version", "no all-reduce", "no such field", "moved here from elsewhere", "one point"],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_line(damage: object, caplog: pytest.LogCaptureFixture) -> None:
    path = calibrate.save(MODEL, marks())
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with caplog.at_level(logging.INFO, "wholestep"):
        assert calibrate.load(marks()) is None
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


def test_the_document_is_json_and_says_what_it_is_for() -> None:
    written = json.loads(calibrate.save(MODEL, marks()).read_text())
    assert written["fingerprint"] == marks()
    assert written["links"]["tables"]["all_reduce"]["2"][0][1] > 0


def test_a_device_is_probed() -> None:
    told: list[str] = []
    device = probe_device(CPU, TINY, told.append)
    assert isinstance(device, Device)
    assert {"matmul/float32", "attention_backward/float32", "convolution/float32", "pointwise"} < device.curves.keys()
    assert any(one.startswith("softmax") for one in told)
    assert device.host_is_device
    assert 0 < device.calls_us["number"] < device.calls_us["view"] < 1000
    # The price of a call is in no curve, but whatever else a kernel costs is.
    assert device.curves["pointwise"].floor_us == device.curves["in_place"].floor_us == 1e-3
    assert device.curves["convolution/float32"].floor_us > 1
    assert device.calls_us.keys() == {"pointwise", "in_place", "view", "number"}
    # A product of 64 rows does 512 times the work of one of 8.
    matmul = device.curves["matmul/float32"]
    assert matmul.points[-1][1] > matmul.points[0][1]
    assert [amount for amount, _ in matmul.points] == [2 * 8.0**3, 2 * 64.0**3]


def test_products_count_by_the_faster_library_where_a_compiler_may_choose() -> None:
    aten, taken = torch.ops.aten, list[str]()

    def lazy(*factors: torch.Tensor) -> torch.Tensor:
        taken.append("product")
        return factors[0].new_empty(factors[-2].shape[0], factors[-1].shape[1])

    def slow(*factors: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            found = torch.mm(*factors[-2:])
        return found

    plain = probe_device(CPU, TINY)
    assert plain.tuned() == plain
    quick = probe_device(CPU, TINY, instead={aten.mm.default: lazy, aten.addmm.default: lazy})
    assert taken
    assert quick.tuned().curves["matmul/float32"] == quick.curves["tuned_matmul/float32"]
    assert quick.tuned().curves["matmul/float32"].points[-1][1] < 0.5 * quick.curves["matmul/float32"].points[-1][1]
    # What is slower is not chosen.
    late = probe_device(CPU, TINY, instead={aten.mm.default: slow, aten.addmm.default: slow})
    assert late.tuned().curves["matmul/float32"] == late.curves["matmul/float32"]
    assert late.tuned().curves["pointwise"] == late.curves["pointwise"]


def test_numbers_that_are_in_doubt_say_so_wherever_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    doubt = "all_reduce of 1.0 KiB took 210,000 us; calibrate again when nothing else runs"
    monkeypatch.setattr(calibrate, "probe_links", lambda *args, **kwargs: (MODEL.links, doubt))
    monkeypatch.setattr(calibrate, "probe_device", lambda *args: MODEL.device)
    model = calibrate.calibrate(CPU, "group", marks())
    assert model.source.endswith(f"gloo, 2 ranks), in doubt: {doubt}")
    assert model.is_calibrated
    calibrate.save(model, marks())
    assert calibrate.find(CPU, marks()).source == model.source


def test_probing_leaves_the_random_numbers_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    probe_device(CPU, TINY)
    assert torch.equal(torch.rand(1), expected)
