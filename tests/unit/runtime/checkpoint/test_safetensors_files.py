"""Which files a path means, names, and what is refused; on one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.runtime.checkpoint import safetensors_files
from wholestep.runtime.checkpoint.safetensors_files import files_of

safetensors = pytest.importorskip("safetensors.torch")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def written(path: Path, model: nn.Module, prefix: str = "") -> None:
    safetensors.save_file({prefix + name: one.clone() for name, one in model.state_dict().items()}, path)


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_a_file_an_index_and_a_folder(tmp_path: Path) -> None:
    source = net()
    file = tmp_path / "model.safetensors"
    written(file, source)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(source.state_dict(), file.name)}))
    for path in (file, index, tmp_path):
        model = net()
        ws.load_safetensors(path, model)
        assert equal(source, model)
    index.unlink()
    assert files_of(tmp_path) == [file]


def test_what_is_no_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="has no files of safetensors"):
        ws.load_safetensors(tmp_path, net())
    with pytest.raises(ws.CheckpointError, match=r"gone\.safetensors is not there"):
        ws.load_safetensors(tmp_path / "gone.safetensors", net())
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ws.CheckpointError, match=r"x\.json is no index of safetensors \(KeyError"):
        ws.load_safetensors(tmp_path / "x.json", net())


def test_names_and_types(tmp_path: Path) -> None:
    source = net()
    written(tmp_path / "model.safetensors", source, "body.")
    model = net().to(torch.float64)
    ws.load_safetensors(tmp_path, model, rename=lambda name: f"body.{name}")
    assert equal(source.double(), model)


def test_what_only_one_of_them_has(tmp_path: Path) -> None:
    source = net()
    written(tmp_path / "model.safetensors", source)
    before = nn.Sequential(net(), nn.Linear(2, 2))
    with pytest.raises(ws.CheckpointError, match=r"the files have no 0\.0\.weight.*; and \d more.*strict=False loads"):
        ws.load_safetensors(tmp_path, before)
    model = nn.Sequential(*source, nn.Linear(2, 2))
    kept = model[2].weight.detach().clone()
    ws.load_safetensors(tmp_path, model, strict=False)
    assert torch.equal(kept, model[2].weight)
    larger = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with pytest.raises(ws.CheckpointError, match=r"0\.weight is \[2, 3\] in the files and \[2, 4\] in the model"):
        ws.load_safetensors(tmp_path, larger, strict=False)
    smaller = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ws.CheckpointError, match=r"the model has no 1\.bias"):
        ws.load_safetensors(tmp_path, smaller)


class Table(nn.Module):
    """Cannot initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(2))
        self.register_buffer("scale", torch.empty(3), persistent=False)


def test_what_the_files_do_not_have_is_set_otherwise(tmp_path: Path) -> None:
    safetensors.save_file({"table": torch.tensor([1.0, 2.0])}, tmp_path / "model.safetensors")

    def made() -> nn.Module:
        with torch.device("meta"):
            return Table()

    model = made()
    with pytest.raises(ws.PlacementError, match="scale was not set"):
        ws.shard(model, initialize=ws.from_safetensors(tmp_path, model))
    model = made()
    otherwise = lambda module: module.scale.fill_(7)  # noqa: E731
    ws.shard(model, initialize=ws.from_safetensors(tmp_path, model, otherwise=otherwise))
    assert model.table.tolist() == [1, 2]  # type: ignore[union-attr,operator]
    assert model.scale.tolist() == [7, 7, 7]  # type: ignore[union-attr,operator]
    with pytest.raises(ws.ConfigError, match="on the meta device"):
        ws.load_safetensors(tmp_path, made())


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ws.ConfigError, match="library safetensors: install it"):
        ws.load_safetensors(tmp_path, net())
    with pytest.raises(ws.ConfigError, match="library safetensors: install it"):
        ws.from_safetensors(tmp_path, net())
