"""Values from safetensors stream into shards, and never is more than one tensor whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.ranks.checkpoint.training import SETUPS, Net, differences, training, values, whole
from tests.ranks.sharding.test_shard import Net as MetaNet
from tests.ranks.sharding.test_shard import next_loss
from wholestep.config import Strategy

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.ranks


def saved(folder: Path, model: nn.Module, files: int = 2, prefix: str = "") -> dict[str, Tensor]:
    """Writes a model as Hugging Face does: in files with an index, tied parameters once."""
    tensors = dict(model.named_parameters()) | {
        name: one for name, one in model.state_dict().items() if name in dict(model.named_buffers())
    }
    tensors = {f"{prefix}{name}": one.detach().clone() for name, one in tensors.items()}
    index = {}
    for number in range(files):
        part = dict([*tensors.items()][number::files])
        name = f"model-{number + 1:05}-of-{files:05}.safetensors" if files > 1 else "model.safetensors"
        safetensors.save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        safetensors.save_file({"noise": torch.zeros(1)}, folder / "another.safetensors")  # that no index names
    return tensors


def loaded(name: str, folder: Path) -> tuple[dict[str, Tensor], int]:
    """Into a training that has run; what it has by then, and its captures."""
    one = training(SETUPS[name], seed=3)
    one.run(1)
    ws.load_safetensors(folder, one.model)
    found = values(one)
    one.run(1)
    return found, one.step.cache_info().traces


@pytest.mark.parametrize("name", ["ddp1", "ddp2", "zero2", "fsdp2", "hfsdp2x2"])
def test_into_every_strategy(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    torch.manual_seed(11)
    want = saved(tmp_path, Net())
    ranks = SETUPS[name].ranks
    run = request.getfixturevalue(f"pool{ranks}").run if ranks > 1 else lambda do, *args: [do(*args)]
    for found, traces in run(loaded, name, tmp_path):
        assert all(torch.equal(want[key], found[key]) for key in want)
        assert traces == 1


def from_meta(strategy: Strategy, folder: Path, by_initialize: bool) -> tuple[dict[str, Tensor], set[str], int]:
    """A model on the meta device with the values of files; its types, and the most elements of a read at once."""
    torch.manual_seed(3)
    with torch.device("meta"):
        model = MetaNet()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if by_initialize:
        ws.shard(model, opt, strategy=strategy, initialize=ws.from_safetensors(folder, model))
    else:
        ws.shard(model, opt, strategy=strategy)
    most = 0
    if not by_initialize:
        copy = Tensor.copy_

        def counted(self: Tensor, other: Tensor, *args: Any) -> Tensor:
            nonlocal most
            most = max(most, other.numel())
            return copy(self, other, *args)

        Tensor.copy_ = counted  # type: ignore[method-assign]
        try:
            ws.load_safetensors(folder, model)
        finally:
            Tensor.copy_ = copy  # type: ignore[method-assign]
    step = ws.compile(next_loss, strategy=strategy, backend="eager", fullgraph=True)
    found = {name: whole(one) for name, one in (*model.named_parameters(), *model.named_buffers())}
    assert bool(step(model, opt, torch.arange(10).view(2, 5) % 13).isfinite())
    return found, {type(one).__name__ for one in model.parameters() if one.dim()}, most


@pytest.mark.parametrize("strategy", [ws.FSDP(), ws.ZeRO()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("by_initialize", [True, False])
def test_a_model_on_the_meta_device(pool2: Any, tmp_path: Path, strategy: Strategy, by_initialize: bool) -> None:
    torch.manual_seed(12)
    source = MetaNet()
    want = saved(tmp_path, source)
    largest = max(one.numel() for one in want.values())
    for found, types, most in pool2.run(from_meta, strategy, tmp_path, by_initialize):
        assert all(torch.equal(want[name], found[name]) for name in want)
        assert torch.equal(found["places.places"], source.places.places)  # type: ignore[union-attr,arg-type]
        assert types == {"DTensor" if isinstance(strategy, ws.FSDP) else "Parameter"}
        if isinstance(strategy, ws.FSDP) and not by_initialize:
            assert most < largest  # parts, never all of the largest one


def refused_on_all_ranks(folder: Path) -> list[str]:
    one = training(SETUPS["fsdp2"], seed=3)
    one.run(1)
    before = values(one)
    said = []
    for model, path in ((one.model, folder / "nowhere"), (nn.Linear(2, 2), folder)):
        try:
            ws.load_safetensors(path, model)
        except ws.CheckpointError as error:
            said.append(str(error))
    assert differences(before, values(one)) == []
    return said


def test_what_does_not_fit_is_refused_on_all_ranks(pool2: Any, tmp_path: Path) -> None:
    saved(tmp_path, Net())
    for nowhere, other in pool2.run(refused_on_all_ranks, tmp_path):
        assert "nowhere is not there" in nowhere
        assert "the files have no bias" in other
