"""The text of the demo: the same on every run, no file in both halves, an error where there is too little."""

from pathlib import Path

import pytest
import torch

from wholestep.cli.workloads.text_data import batch, standard_library
from wholestep.errors import ConfigError

FILE_BYTES = 4096


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """200 files; every byte of file i is i, so that a byte tells its file."""
    for i in range(200):
        path = tmp_path / f"package_{i % 7}" / f"module_{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([i]) * FILE_BYTES)
    return tmp_path


def files_of(text: torch.Tensor) -> set[int]:
    return set(text.tolist()) - {ord("\n")}  # the separator, and file 10 with it


def test_the_halves_share_no_file_and_lose_none(library: Path) -> None:
    text = standard_library(max_bytes=2**30, folder=library)
    train, held_out = files_of(text.train), files_of(text.held_out)
    assert text.num_files == 200
    assert not train & held_out
    assert train | held_out == set(range(200)) - {ord("\n")}
    assert 5 <= len(held_out) <= 40


def test_a_bounded_read_stops_and_repeats(library: Path) -> None:
    bound = 120 * FILE_BYTES
    one, other = (standard_library(max_bytes=bound, folder=library) for _ in range(2))
    assert one.num_files == 120
    assert torch.equal(one.train, other.train)
    assert torch.equal(one.held_out, other.held_out)
    packages = {i % 7 for i in files_of(one.train)}
    assert packages == set(range(7))  # a fair sample, not the first folders


def test_what_a_user_installed_is_left_out(library: Path) -> None:
    stranger = library / "site-packages" / "other" / "module.py"
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(bytes([250]) * FILE_BYTES)
    text = standard_library(max_bytes=2**30, folder=library)
    assert 250 not in files_of(text.train) | files_of(text.held_out)


def test_too_little_text_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="64 KiB") as caught:
        standard_library(max_bytes=2**20, folder=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_real_library_is_enough() -> None:
    text = standard_library(max_bytes=2**20)
    assert len(text.train) > 2**19
    assert b"import" in bytes(text.held_out.tolist())


def test_targets_are_the_inputs_one_byte_later() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    x, y = batch(text, rows=5, context=16, draw=torch.Generator().manual_seed(3))
    assert x.shape == y.shape == (5, 16)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x + 1, y)
    assert len(set(x[:, 0].tolist())) > 1
