"""A tiny BERT of Hugging Face transformers, with dropout, and a step that gives loss and logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.conformance.wrapped_models.against_eager import device

VOCABULARY = 31


def bert(checkpointed: bool = False) -> Any:
    """Two layers, in training. Checkpointed: each layer is computed again in the backward, without reentering."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BertForMaskedLM._from_config(config).to(device()).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch() -> dict[str, Tensor]:
    ids, labels = torch.randint(VOCABULARY, (2, 4, 12), device=device())
    return {"input_ids": ids, "labels": labels}


def loss_and_logits(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out = model(**inputs)
    out.loss.backward()
    return out.loss.detach(), out.logits.detach()
