"""Cases about architectures of Hugging Face transformers: tiny configurations, unmodified code, dropout off and on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tests.behaviour.harness import Job, Registry, Run
from tests.harness.training import backward_and_step

registry = Registry()

VOCABULARY, ROWS, LENGTH, CLASSES = 31, 2, 6, 3
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

LAYERS: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
ENCODER_AND_DECODER: dict[str, Any] = {
    "d_model": 8,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
}


def tokens(generator: torch.Generator, low: int = 3) -> Tensor:
    return torch.randint(low, VOCABULARY, (ROWS, LENGTH), generator=generator)


def text_batch(generator: torch.Generator) -> dict[str, Tensor]:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids.clone()}


def masked_text_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """With a padding mask, and labels on some positions only."""
    ids, mask = tokens(generator), torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, ids, -100)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def pair_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": tokens(generator), "labels": tokens(generator)}


def image_batch(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(ROWS, 3, size, size, generator=generator),
        "labels": torch.randint(CLASSES, (ROWS,), generator=generator),
    }


def sound_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(ROWS, 16, 8, generator=generator),
        "labels": torch.randint(CLASSES, (ROWS,), generator=generator),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A configuration, the model built from it, and one batch with labels."""

    config: Callable[..., Any]
    options: dict[str, Any]
    model: Callable[..., Any]
    batch: Callable[[torch.Generator], dict[str, Tensor]]
    dropout: dict[str, float]
    """The options that turn dropout on; all are set to zero for the run without."""
    from_config: dict[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "bert": Architecture(  # encoder
        config=hf.BertConfig, model=hf.BertForMaskedLM, batch=masked_text_batch,
        options={**TEXT, **LAYERS, "max_position_embeddings": 8},
        dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    ),
    "gpt2": Architecture(  # decoder, tied embedding
        config=hf.GPT2Config, model=hf.GPT2LMHeadModel, batch=text_batch,
        options={**TEXT, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8},
        dropout={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    ),
    "llama": Architecture(  # decoder, rotary positions, grouped heads
        config=hf.LlamaConfig, model=hf.LlamaForCausalLM, batch=masked_text_batch,
        options={**TEXT, **LAYERS, "num_key_value_heads": 1, "max_position_embeddings": 8},
        dropout={"attention_dropout": 0.1},
    ),
    "t5": Architecture(  # encoder and decoder, relative positions
        config=hf.T5Config, model=hf.T5ForConditionalGeneration, batch=pair_batch,
        options={"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2,
            "decoder_start_token_id": 0},
        dropout={"dropout_rate": 0.1},
    ),
    "mixtral": Architecture(  # mixture of experts, in the implementation whose shapes do not depend on the routing
        config=hf.MixtralConfig, model=hf.MixtralForCausalLM, batch=text_batch,
        options={**TEXT, **LAYERS, "num_key_value_heads": 1, "max_position_embeddings": 8, "num_local_experts": 4,
            "num_experts_per_tok": 2, "output_router_logits": True},
        dropout={"attention_dropout": 0.1, "router_jitter_noise": 0.1},
        from_config={"experts_implementation": "batched_mm"},
    ),
    "vit": Architecture(  # vision transformer
        config=hf.ViTConfig, model=hf.ViTForImageClassification, batch=image_batch,
        options={**LAYERS, "image_size": 8, "patch_size": 4, "num_labels": CLASSES},
        dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    ),
    "convnextv2": Architecture(  # convolutional, layer norm, stochastic depth
        config=hf.ConvNextV2Config, model=hf.ConvNextV2ForImageClassification, batch=image_batch,
        options={"hidden_sizes": [4, 8], "depths": [1, 2], "num_stages": 2, "patch_size": 2, "image_size": 8,
            "num_labels": CLASSES},
        dropout={"drop_path_rate": 0.2},
    ),
    "resnet": Architecture(  # convolutional, batch norm
        config=hf.ResNetConfig, model=hf.ResNetForImageClassification, batch=partial(image_batch, size=16),
        options={"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic",
            "num_labels": CLASSES},
        dropout={},
    ),
    "mamba": Architecture(  # state-space, the slow path in plain torch
        config=hf.MambaConfig, model=hf.MambaForCausalLM, batch=text_batch,
        options={**TEXT, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2},
        dropout={},
    ),
    "ast": Architecture(  # speech: a transformer on spectrograms
        config=hf.ASTConfig, model=hf.ASTForAudioClassification, batch=sound_batch,
        options={**LAYERS, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16,
            "num_mel_bins": 8, "num_labels": CLASSES},
        dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    ),
    "whisper": Architecture(  # speech: encoder on spectrograms, decoder on text
        config=hf.WhisperConfig, model=hf.WhisperForConditionalGeneration,
        batch=lambda generator: {"input_features": torch.randn(ROWS, 4, 16, generator=generator),
            "labels": tokens(generator)},
        options={**TEXT, **ENCODER_AND_DECODER, "num_mel_bins": 4, "max_source_positions": 8,
            "max_target_positions": 8, "decoder_start_token_id": 1},
        dropout={"dropout": 0.1, "attention_dropout": 0.1},
    ),
    "bart": Architecture(  # encoder and decoder, learned positions
        config=hf.BartConfig, model=hf.BartForConditionalGeneration, batch=pair_batch,
        options={**TEXT, **ENCODER_AND_DECODER, "max_position_embeddings": 8, "decoder_start_token_id": 2},
        dropout={"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
    ),
    "opt": Architecture(  # decoder, learned positions that follow the mask
        config=hf.OPTConfig, model=hf.OPTForCausalLM, batch=masked_text_batch,
        options={**TEXT, "hidden_size": 8, "word_embed_proj_dim": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "ffn_dim": 16, "max_position_embeddings": 8},
        dropout={"dropout": 0.1, "attention_dropout": 0.1},
    ),
    "wav2vec2": Architecture(
        config=hf.Wav2Vec2Config, model=hf.Wav2Vec2ForSequenceClassification,
        batch=lambda generator: {"input_values": torch.randn(ROWS, 64, generator=generator),
            "labels": torch.randint(CLASSES, (ROWS,), generator=generator)},
        options={**LAYERS, "num_hidden_layers": 1,
            "conv_dim": (4, 4), "conv_stride": (2, 2), "conv_kernel": (4, 4), "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": CLASSES,
            "apply_spec_augment": False, "layerdrop": 0.0, "classifier_proj_size": 4},
        dropout={"hidden_dropout": 0.1, "attention_dropout": 0.1},
    ),
    "deberta": Architecture(
        config=hf.DebertaV2Config, model=hf.DebertaV2ForMaskedLM, batch=masked_text_batch,
        options={**TEXT, **LAYERS, "max_position_embeddings": 8},
        dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    ),
}  # fmt: skip


RETURNED_WHOLE = ("bert", "vit")
"""Steps that return the model's own output record and not only the loss."""

ONE_BY_ONE = ("gpt2", "resnet")
"""Architectures with the optimizer as torch chooses it on the CPU: an update per parameter."""


DRAWS = ("whisper", "bart")
"""Architectures that also run as their code was before transformers 5, which draws for every layer."""


class Drawn(float):
    """A probability to skip a layer that never counts as 0 before the draw is compared with it."""

    def __gt__(self, other: object) -> bool:
        return True


DEPTH = ("num_hidden_layers", "n_layer", "num_layers")
"""Options for the number of layers. Two are alike, share biases and follow each other; masks do so in one."""


def build_model(architecture: Architecture, dropout: bool) -> Any:
    rates = architecture.dropout if dropout else dict.fromkeys(architecture.dropout, 0.0)
    depth = dict.fromkeys((name for name in DEPTH if dropout and name in architecture.options), 1)
    config = architecture.config(**{**architecture.options, **depth}, **rates)
    model = architecture.model._from_config(config, **architecture.from_config)
    return model.train()


def architecture_job(run: Run, name: str, dropout: bool, draws: bool = False) -> Job:
    architecture = ARCHITECTURES[name]
    module = build_model(architecture, dropout)
    for part in module.modules() if draws else ():
        if hasattr(part, "layerdrop"):
            part.layerdrop = Drawn(part.layerdrop)
    # Some models hold parameters that only masking or generation uses.
    model = run.model(module, find_unused_parameters=True)
    # An update that is one call makes the graph half as large.
    opt = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=name not in ONE_BY_ONE)

    @run.compile
    def step(batch: dict[str, Tensor]) -> Any:
        out = model(**batch)
        backward_and_step(out.loss, opt)
        return out if name in RETURNED_WHOLE else out.loss

    generator = torch.Generator().manual_seed(run.rank)
    batches = [(architecture.batch(generator),) for _ in range(3)]
    return Job(step=step, batches=batches, objects={"model": module, "opt": opt})


for _name, _architecture in ARCHITECTURES.items():
    registry.add(name=_name)(partial(architecture_job, name=_name, dropout=False))
    if _architecture.dropout:
        registry.add(name=f"{_name}_dropout")(partial(architecture_job, name=_name, dropout=True))

for _name in DRAWS:
    registry.add(name=f"{_name}_draws")(partial(architecture_job, name=_name, dropout=True, draws=True))
