"""Nothing in a checkpoint runs when it is loaded, and files that are cut off are noticed before anything changes."""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import wholestep as ws
from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint.storage import nested, read_metadata

RAN: list[str] = []


def note(text: str) -> None:
    """What must not be called."""
    RAN.append(text)


class Hostile:
    """Runs code where it is unpickled."""

    def __init__(self, call: Any = note, *args: Any) -> None:
        self._call, self._args = call, args or ("ran",)

    def __reduce__(self) -> Any:
        return self._call, self._args


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of torch's own making."""
    RAN.clear()
    model = nn.Linear(2, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run")
    return tmp_path / "run"


def rewritten(folder: Path, **fields: Any) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for name, value in fields.items():
        setattr(metadata, name, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_torchs_own_metadata_is_read(folder: Path) -> None:
    found = read_metadata(folder)
    assert sorted(found.state_dict_metadata) == ["model.bias", "model.weight"]
    assert found.storage_data == pickle.loads((folder / ".metadata").read_bytes()).storage_data


@pytest.mark.parametrize(
    "thing",
    [Hostile(), Hostile(os.system, "true"), Hostile(eval, "1"), Hostile(getattr, 1, "real"), collections.Counter()],
    ids=["ours", "system", "eval", "getattr", "an unknown class"],
)
def test_code_in_the_metadata_does_not_run(folder: Path, thing: Any) -> None:
    rewritten(folder, planner_data=thing)
    with pytest.raises(CheckpointError, match=r"names [\w.]+, which is no part of a checkpoint"):
        ws.load_checkpoint(folder, nn.Linear(2, 2))
    assert RAN == []
    if isinstance(thing, Hostile) and thing._call is note:  # torch's own loader runs it: this test can fail
        pickle.loads((folder / ".metadata").read_bytes())
        assert RAN == ["ran"]


def test_code_in_a_value_does_not_run(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    opt, other_opt = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.2)
    RAN.clear()
    opt.param_groups[0]["lr"] = Hostile()
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\.0\.lr is a .*Hostile, which could not be"):
        ws.save_checkpoint(tmp_path / "run", model, opt)
    state = {"model": model.state_dict(), "optimizer": {"param_groups": [opt.param_groups[0] | {"params": []}]}}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    before = other.weight.detach().clone()
    with pytest.raises(CheckpointError, match="UnpicklingError"):
        ws.load_checkpoint(tmp_path / "run", other, other_opt)
    assert RAN == []
    assert torch.equal(before, other.weight)
    assert other_opt.param_groups[0]["lr"] == 0.2


def test_no_file_outside_is_read(folder: Path) -> None:
    metadata = read_metadata(folder)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret.distcp"
    rewritten(folder, storage_data=metadata.storage_data)
    with pytest.raises(CheckpointError, match="outside of the folder"):
        read_metadata(folder)


def test_files_that_are_cut_off_or_missing(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    whole = file.read_bytes()
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"has {len(whole) - 1} bytes and should have {len(whole)}"):
        ws.load_checkpoint(folder, model)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"its file {file.name} is missing"):
        ws.load_checkpoint(folder, model)
    (folder / ".metadata").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ws.load_checkpoint(folder, model)
    assert torch.equal(before, model.weight)


def test_numbers_of_numpy_are_saved_as_those_of_python(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=float(np.float64(0.1)))
    opt.param_groups[0]["lr"] = np.float64(0.25)
    ws.save_checkpoint(tmp_path / "run", model, opt)
    opt.param_groups[0]["lr"] = 0.1
    ws.load_checkpoint(tmp_path / "run", model, opt)
    assert opt.param_groups[0]["lr"] == 0.25
    assert type(opt.param_groups[0]["lr"]) is float


def test_a_tree_is_built_of_paths() -> None:
    flat = {"a.b": 1, "a.c.1": 2, "a.c.0.x": 3, "d": 4}
    paths: dict[str, tuple[str | int, ...]] = {
        "a.b": ("a", "b"), "a.c.1": ("a", "c", 1), "a.c.0.x": ("a", "c", 0, "x"), "d": ("d",)
    }  # fmt: skip
    assert nested(flat, paths) == {"a": {"b": 1, "c": [{"x": 3}, 2]}, "d": 4}
