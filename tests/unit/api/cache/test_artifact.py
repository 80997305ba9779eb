"""Files of saved steps: what is damaged, of another version or not one's own is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wholestep.api.cache import artifact
from wholestep.api.cache.records import Header
from wholestep.errors import ArtifactError

HEADER = Header(
    step="train:train_step",
    fingerprint={"the build": (("torch", "2.13"), ("Python", "3.11")), "the step": (("args.0", "float32[2]"),)},
    environment={"files": (("train.py", "a" * 64),)},
)
BODY = bytes(range(256)) * 3


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "step"
    artifact.write(path, HEADER, BODY)
    assert artifact.read(path) == (HEADER, BODY)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["step"], "no temporary file is left"


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_one_readable_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "step"
    artifact.write(path, HEADER, BODY)
    whole = path.read_bytes()
    if data.draw(st.booleans(), "cut"):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        place, flip = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
    with pytest.raises(ArtifactError, match=r"damaged|no step"):
        artifact.read(path)


def test_a_file_of_the_format_before_is_refused(tmp_path: Path) -> None:
    """It is whole, but the classes in its pickle are not the ones of this version."""
    path = tmp_path / "step"
    artifact.write(path, HEADER, BODY)
    path.write_bytes(path.read_bytes().replace(artifact.MAGIC, b"wholestep step, format 2\n"))
    with pytest.raises(ArtifactError, match=r"no step that this version of wholestep has saved.*format 3"):
        artifact.read(path)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        artifact.read(Path("nowhere") / "step")


def test_the_cache_is_made_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert artifact.make_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "step"
    artifact.write(path, HEADER, BODY)
    artifact.check_private(path)
    path.chmod(mode)
    with pytest.raises(ArtifactError, match="can be written to by others"):
        artifact.check_private(path)


def test_what_somebody_else_owns_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step"
    artifact.write(path, HEADER, BODY)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(ArtifactError, match=f"belongs to the user with number {me}"):
        artifact.check_private(path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    artifact.write(tmp_path / "step", HEADER, BODY)
    (tmp_path / "link").symlink_to(tmp_path / "step")
    with pytest.raises(ArtifactError, match="is a link"):
        artifact.check_private(tmp_path / "link")


def test_a_file_from_elsewhere_wants_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    inside = artifact.make_folder() / "step"
    for path in (tmp_path / "step", inside):
        artifact.write(path, HEADER, BODY)
    with pytest.raises(ArtifactError, match=r"A saved step is code.*trusted=True"):
        artifact.check_trusted(tmp_path / "step", trusted=False)
    artifact.check_trusted(tmp_path / "step", trusted=True)
    artifact.check_trusted(inside, trusted=False)
    inside.chmod(0o622)
    with pytest.raises(ArtifactError, match="by others"):
        artifact.check_trusted(inside, trusted=False)


def test_a_few_files_of_a_step_are_kept(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / f"step-{number}"
        path.touch()
        os.utime(path, ns=(number, number))
    artifact.evict_old(tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step-{number}" for number in range(4, 20))


def test_a_file_that_another_process_has_forgotten(tmp_path: Path) -> None:
    """It was there when the folder was listed."""
    kept = tmp_path / "step-0"
    kept.touch()
    assert artifact.newest_first([tmp_path / "step-1", kept]) == [kept]
    artifact.evict_old([kept, *(tmp_path / f"step-{number}" for number in range(1, 20))])
    assert kept.exists()
