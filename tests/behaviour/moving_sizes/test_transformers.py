"""Models of Hugging Face transformers train on batches of moving sizes as in eager code, with three traces at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws

transformers = pytest.importorskip("transformers")

WORDS, ROWS = 31, 2
LENGTHS = (9, 12, 21, 17, 33, 10)
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
Inputs = dict[str, Any]


def words(*shape: int) -> Tensor:
    return torch.randint(1, WORDS, shape)


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def gpt2_batch(length: int) -> Inputs:
    x = words(ROWS, length)
    return {"input_ids": x, "labels": x}


def bert() -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=64, **TINY)
    )  # fmt: skip


def bert_batch(length: int) -> Inputs:
    """The second row is padded."""
    x, mask = words(ROWS, length), torch.ones(ROWS, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return {"input_ids": x, "attention_mask": mask, "labels": x}


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def t5_batch(length: int) -> Inputs:
    return {"input_ids": words(ROWS, length), "labels": words(ROWS, length // 2 + 2)}


def vit() -> Any:
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=5, **TINY)
    return transformers.ViTForImageClassification(config)


def vit_batch(length: int) -> Inputs:
    """One of three sizes of images."""
    side = 8 * (length % 3 + 3)
    image = torch.randn(ROWS, 3, side, side)
    return {"pixel_values": image, "labels": torch.randint(5, (ROWS,)), "interpolate_pos_encoding": True}


def wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0, **TINY,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def wav2vec2_batch(length: int) -> Inputs:
    """Sound of `40 * length` samples; of the second row a quarter is padding."""
    mask = torch.ones(ROWS, 40 * length, dtype=torch.long)
    mask[1, 30 * length :] = 0
    return {"input_values": torch.randn(ROWS, 40 * length), "attention_mask": mask, "labels": words(ROWS, 3)}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], Inputs]]] = {
    "gpt2": (gpt2, gpt2_batch), "bert": (bert, bert_batch), "t5": (t5, t5_batch), "vit": (vit, vit_batch),
    "wav2vec2": (wav2vec2, wav2vec2_batch),
}  # fmt: skip


def train(model: Any, opt: Any, batch: Inputs) -> Tensor:
    loss: Tensor = model(**batch).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_eager_code_with_three_traces_at_most(name: str) -> None:
    build, batch = MODELS[name]
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = build().train()
        made.append((model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    compiled = ws.compile(train, backend="eager", fullgraph=True)
    for length in LENGTHS:
        torch.manual_seed(length)
        inputs = batch(length)
        torch.manual_seed(length)
        wanted = train(*made[0], inputs)
        torch.manual_seed(length)
        assert torch.equal(wanted, compiled(*made[1], inputs)), length
    assert all(map(torch.equal, made[0][0].parameters(), made[1][0].parameters()))
    assert compiled.cache_info().traces <= 3
