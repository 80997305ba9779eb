"""Which modules are gathered as one in eager code."""

from __future__ import annotations

import pytest
from torch import nn

import wholestep as ws
from wholestep.runtime.sharding.units import units_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 8)


def names(model: nn.Module, units: object) -> list[str]:
    of = {id(module): name for name, module in model.named_modules()}
    return [of[id(one)] for one in units_of(model, units)]  # type: ignore[arg-type]


def test_repeated_blocks_are_units_and_the_root_takes_the_rest() -> None:
    assert names(Model(), "auto") == ["blocks.0", "blocks.1", ""]


def test_layers_without_layers_of_their_own_are_no_units() -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "auto") == [""]


def test_a_block_that_shares_a_parameter_stays_with_the_root() -> None:
    model = Model()
    model.blocks[1].second.weight = model.blocks[0].second.weight  # type: ignore[union-attr]
    assert names(model, "auto") == [""]
    model = Model()
    model.tokens.weight = nn.Parameter(model.head.weight)
    assert names(model, "auto") == ["blocks.0", "blocks.1", ""]


def test_patterns_choose_units_inner_ones_first() -> None:
    assert names(Model(), ("blocks.*", "head")) == [
        "blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "blocks.0", "blocks.1", "head", "",
    ]  # fmt: skip


def test_patterns_that_fit_nothing_or_share_are_errors() -> None:
    with pytest.raises(ws.PlacementError, match=r"layers\.\*.*the modules of the step are"):
        units_of(Model(), ("layers.*",))
    model = Model()
    model.head.weight = nn.Parameter(model.tokens.weight)
    model.tokens.weight = model.head.weight
    with pytest.raises(ws.PlacementError, match="share parameters with modules outside"):
        units_of(model, ("head",))
