"""wholestep.shard: models on the meta device, optimizers made before, and what cannot initialise itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.ranks.sharding.test_live_state import EVEN, batch, train_step, whole
from wholestep.cli.workloads.reference_lm import build
from wholestep.config import Strategy

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Tied weights, buffers that must be computed, a parameter without dims, attention, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.last = nn.Embedding(13, 8), nn.Linear(8, 13, bias=False)
        self.last.weight = self.tokens.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(2))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.places = Places()

    def forward(self, x: Tensor) -> Tensor:
        y = self.places(self.tokens(x))
        for block in self.blocks:
            y = block(y)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = self.last(self.norm(y.flatten(0, 1)))
        return out


class Places(nn.Module):
    """A buffer that no checkpoint has, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.empty(5, 8), persistent=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.places.copy_(torch.arange(5.0)[:, None].expand(5, 8) / 5)
            self.scale.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.places


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def made(strategy: Strategy) -> tuple[dict[str, Tensor], list[str], bool]:
    """The values of a model from the meta device, its types, and whether a list and an optimizer know its parameters.

    Ranks have other seeds, and the generator goes on as if nothing had been drawn.
    """
    torch.manual_seed(3 + dist.get_rank())
    model = on_meta()
    listed = list(model.parameters())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = torch.get_rng_state()
    ws.shard(model, opt, strategy=strategy)
    assert torch.equal(before, torch.get_rng_state())
    assert model.last.weight is model.tokens.weight  # type: ignore[union-attr]
    known = all(a is b for a, b in zip(listed, model.parameters(), strict=True))
    known &= all(a is b for a, b in zip(opt.param_groups[0]["params"], model.parameters(), strict=True))
    step = ws.compile(next_loss, strategy=strategy, backend="eager", fullgraph=True)
    values = {name: whole(one).clone() for name, one in (*model.named_parameters(), *model.named_buffers())}
    loss = step(model, opt, torch.arange(10).view(2, 5) % 13)
    assert bool(loss.isfinite())
    return values, [type(one).__name__ for one in model.parameters()], known


def next_loss(model: Any, opt: Any, x: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), x.flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def test_numbers_are_the_same_for_every_world_size_and_strategy(pool2: Any, pool4: Any) -> None:
    (two, kinds, known), *others = pool2.run(made, ws.FSDP())
    whole_ones, _, known_whole = pool2.run(made, ws.ZeRO())[0]
    four, _, _ = pool4.run(made, ws.FSDP(units=("blocks.*",)))[0]
    assert known
    assert known_whole
    assert kinds.count("DTensor") == len(kinds) - 1  # but the number
    for values in (others[0][0], whole_ones, four):
        assert all(torch.equal(two[name], values[name]) for name in two)
    assert torch.equal(two["places.places"][3], torch.full((8,), 0.6))
    assert torch.equal(two["norm.running_var"], torch.ones(8))
    assert float(two["tokens.weight"].std()) == pytest.approx(0.35, abs=0.15)  # as the last layer has it, made last


def test_one_process_makes_them_whole() -> None:
    torch.manual_seed(3)
    model = on_meta()
    ws.shard(model)
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
    assert all(bool(one.isfinite().all()) for one in model.parameters())


class Own(nn.Module):
    """A parameter of its own, and nothing that sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.zeros(4, 4)), nn.Linear(4, 4)


class Forgets(Own):
    """Sets its parameter and not its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)


def test_a_module_that_cannot_initialise_itself_is_refused_before_anything_is_done() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Own())
    with pytest.raises(ws.PlacementError, match=r"1 \(Own\): on the meta device.*initialize="):
        ws.shard(model)
    assert all(one.is_meta for one in model.parameters())
    ws.shard(model, initialize=lambda module: [nn.init.ones_(one) for one in module.parameters(recurse=False)])
    assert float(model[1].table.detach().sum()) == 16  # type: ignore[union-attr,operator]


def test_what_was_not_set_is_named() -> None:
    with torch.device("meta"):
        model = Forgets()
    with pytest.raises(ws.PlacementError, match="Forgets: count was not set"):
        ws.shard(model)


def test_wrong_arguments() -> None:
    with pytest.raises(ws.ConfigError, match="wants a module, got AdamW"):
        ws.shard(torch.optim.AdamW([torch.zeros(1)]))  # type: ignore[arg-type]
    with pytest.raises(ws.ConfigError, match="optimizers after the model, got Linear"):
        ws.shard(nn.Linear(1, 1), nn.Linear(1, 1))  # type: ignore[arg-type]


def sharded_before() -> tuple[bool, float]:
    """A model with values, sharded before its first call, beside one that the first call shards."""
    models = []
    for explicit in (True, False):
        torch.manual_seed(0)
        model = build(EVEN, torch.device("cpu"))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if explicit:
            ws.shard(model, opt)
            assert all(isinstance(one, DTensor) for one in model.parameters())
        step = ws.compile(train_step, strategy=ws.FSDP(), backend="eager", fullgraph=True)
        step(model, opt, *batch(EVEN, 0))
        models.append(model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return step.cache_info().traces == 1, max(float((whole(a) - whole(b)).abs().max()) for a, b in pairs)


def test_the_first_call_does_the_same(pool2: Any) -> None:
    assert pool2.run(sharded_before) == [(True, 0.0)] * 2
