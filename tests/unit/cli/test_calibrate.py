"""`wholestep calibrate`: what it prints and keeps; once on two real ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.unit.cost.calibration.test_calibrate import TINY
from wholestep.cli import calibrate as page
from wholestep.cli import main
from wholestep.cost.calibration import calibrate
from wholestep.cost.cost_model import CostModel
from wholestep.cost.curve import Curve
from wholestep.cost.link_model import OPS
from wholestep.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def report(ranks: int) -> page.CalibrationReport:
    marks = calibrate.fingerprint(torch.device("cpu"), "gloo", ranks)
    return page.CalibrationReport(model=CostModel.default("cpu+gloo"), fingerprint=marks, file="here.json")


def shown(thing: object) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as captured:
        console.print(thing)
    return captured.get()


def test_the_report_shows_kernels_links_and_a_plot() -> None:
    text = shown(report(2))
    assert "matmul/float32" in text
    assert "Collectives on 2 ranks" in text
    assert "here.json" in text
    assert "a all_reduce" in text
    assert "links were not measured" in shown(report(1))
    assert "Collectives on" not in shown(report(1))


def test_numbers_in_doubt_say_so_on_one_line() -> None:
    made = report(2)
    source = "calibrated (2 ranks), in doubt: all_reduce of 1.0 KiB took 210,000 us; calibrate again"
    assert source in shown(replace(made, model=replace(made.model, source=source))).splitlines()


def test_the_plot_rises_from_corner_to_corner() -> None:
    lines = page.plot({"one": Curve(points=((1024.0, 1.0), (2.0**20, 1024.0)))}, (20, 11)).splitlines()
    columns = [line.partition("|")[2].ljust(20) for line in lines[:11]]
    assert columns[0].rstrip().endswith("a")
    assert columns[10].startswith("a")
    heights = [next(row for row in range(11) if columns[row][column] == "a") for column in range(20)]
    assert heights == sorted(heights, reverse=True)
    assert "1,024 us" in lines[0]
    assert "1.0 KiB" in lines[12]
    assert "1.0 MiB" in lines[12]


@pytest.mark.ranks
@pytest.mark.timeout(900)  # what is in doubt is measured again: long where other tests fill all cores
def test_two_ranks_are_measured_and_found_again(cache: Path) -> None:
    made = page.run_calibration(nproc=2, quiet=True, sizes=TINY)
    assert calibrate.load(made.fingerprint) == made.model
    assert Path(made.file).is_relative_to(cache)
    assert made.model.source.startswith("calibrated on this host at ")
    assert made.model.links.tables.keys() == set(OPS)


def test_json_is_all_that_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(page, "run_calibration", lambda *, nproc, quiet: report(nproc))
    main_left(["calibrate", "--nproc", "2", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert calibrate.from_json(printed) == CostModel.default("cpu+gloo")
    assert printed["fingerprint"]["ranks"] == 2


def main_left(args: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(args)
    assert not left.value.code


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process of its own; the threads of this one stay as many as they are."""
    monkeypatch.setattr(page.ws, "run", lambda fn, nproc, *args: [fn(*args)])
    monkeypatch.setattr(page, "threads_per_rank", lambda nproc: torch.get_num_threads())


def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    in_this_process(monkeypatch)
    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: CostModel.default("cpu+gloo"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        page.run_calibration(nproc=1, quiet=True, sizes=TINY)


def test_one_rank_measures_its_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    made = page.run_calibration(nproc=1, quiet=True, sizes=TINY)
    assert made.model.links == CostModel.default("cpu+gloo").links
    assert made.fingerprint["backend"] == "none"
    assert "links were not measured" in shown(made)
