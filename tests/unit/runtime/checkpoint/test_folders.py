"""Folders that are whole or not there, whatever moment a save ends at."""

from __future__ import annotations

from pathlib import Path

import pytest

from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint import folders
from wholestep.runtime.checkpoint.folders import METADATA, commit, temporary, tidy, whole_folder


class Killed(BaseException):
    """The process ends here."""


def written(path: Path, number: int) -> Path:
    """A temporary folder with all of a checkpoint, whose text is its number."""
    folder = temporary(path, number)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_text(str(number))
    (folder / METADATA).write_text(str(number))
    return folder


def saved(path: Path, number: int) -> None:
    tidy(path)
    commit(written(path, number), path)


def number_in(folder: Path) -> tuple[str, str]:
    return (folder / "__0_0.distcp").read_text(), (folder / METADATA).read_text()


def test_a_checkpoint_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.1"
    for number in (10, 11):
        saved(path, number)
        assert number_in(whole_folder(path)) == (str(number),) * 2
    assert [one.name for one in path.parent.iterdir()] == ["run.1"]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("at", range(12))
def test_whatever_call_of_the_system_is_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, is_first: bool
) -> None:
    """Each rename, removal and flush of a save, and of the tidying of the next one, is the last thing done once."""
    path = tmp_path / "run"
    if not is_first:
        saved(path, 1)
    calls = 0

    def counted(do):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls > at:
                raise Killed
            return do(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_flush", counted(folders._flush))
        patch.setattr(folders.shutil, "rmtree", counted(folders.shutil.rmtree))
        patch.setattr(Path, "rename", counted(Path.rename))
        try:
            saved(path, 2)
            written(path, 3)  # and a rank that was killed while it wrote
            tidy(path)
        except Killed:
            pass
    is_committed = calls > 1 and at > 1  # the flush, and the rename after it
    if is_first and not is_committed:
        with pytest.raises(CheckpointError, match="does not exist"):
            whole_folder(path)
    else:
        assert number_in(whole_folder(path)) == ("2" if is_committed else "1",) * 2
    saved(path, 4)
    assert number_in(path) == ("4", "4")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_straggler_of_a_lost_save_disturbs_nobody(tmp_path: Path) -> None:
    path = tmp_path / "run"
    straggler = written(path, 1)
    saved(path, 2)
    straggler.mkdir()
    (straggler / "__1_0.distcp").write_text("late")
    assert number_in(whole_folder(path)) == ("2", "2")


def test_names_that_begin_alike_are_others(tmp_path: Path) -> None:
    other = written(tmp_path / "run.1", 7)
    saved(tmp_path / "run", 8)
    assert other.exists()


def test_a_folder_of_the_users_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt would be lost"):
        tidy(path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file would be lost"):
        tidy(tmp_path / "file")


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="run does not exist"):
        whole_folder(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"has no \.metadata file"):
        whole_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="load_safetensors"):
        whole_folder(tmp_path)
