"""BERT of Hugging Face transformers, wrapped and compiled: loss, logits and gradients of eager code, with dropout."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.conformance.wrapped_models.against_eager import against_eager, ddp, rank_seed
from tests.conformance.wrapped_models.bert import batch, bert, loss_and_logits
from tests.harness.rank_pools import Pool

pytest.importorskip("transformers")


def in_ddp(static_graph: bool, checkpointed: bool) -> int:
    def build() -> Any:
        return ddp(bert(checkpointed), static_graph=static_graph)

    rank_seed(7)
    compiled = against_eager(build, loss_and_logits, [(batch(),) for _ in range(3)])
    return compiled.cache_info().traces


@pytest.mark.parametrize(
    ("static_graph", "checkpointed"),
    [
        pytest.param(False, False, marks=pytest.mark.row("S4", "hf_bert_ddp")),
        pytest.param(True, False, marks=pytest.mark.row("S4", "hf_bert_ddp_static_graph")),
        pytest.param(False, True, marks=pytest.mark.row("S4", "hf_bert_ddp_checkpointed")),
        pytest.param(True, True, marks=pytest.mark.row("S4", "hf_bert_ddp_checkpointed")),
    ],
)
def test_bert_in_ddp_equals_eager_code(ranks2: Pool, static_graph: bool, checkpointed: bool) -> None:
    assert ranks2.run(in_ddp, static_graph, checkpointed) == [1, 1]


def sharded(by_layer: bool, checkpointed: bool) -> int:
    def build() -> nn.Module:
        model = bert(checkpointed)
        for layer in model.bert.encoder.layer if by_layer else ():
            fully_shard(layer)
        return fully_shard(model)  # type: ignore[return-value]

    rank_seed(7)
    compiled = against_eager(build, loss_and_logits, [(batch(),) for _ in range(3)])
    return compiled.cache_info().traces


@pytest.mark.parametrize(
    ("by_layer", "checkpointed"),
    [
        pytest.param(False, False, marks=pytest.mark.row("S5", "hf_bert_fsdp")),
        pytest.param(True, False, marks=pytest.mark.row("S5", "hf_bert_fsdp")),
        pytest.param(True, True, marks=pytest.mark.row("S5", "hf_bert_fsdp_activation_checkpointing")),
    ],
)
def test_sharded_bert_equals_eager_code(ranks2: Pool, by_layer: bool, checkpointed: bool) -> None:
    assert ranks2.run(sharded, by_layer, checkpointed) == [1, 1]
