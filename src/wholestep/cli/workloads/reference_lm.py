"""The language models of the reference workloads, at full size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelSize:
    """A language model and the batch of one rank."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    length: int
    """Tokens of a sequence."""
    rows: int
    """Sequences of a rank."""
    gated: int = 0
    """Width of a SwiGLU, in a block with RMSNorm and without biases; 0: GELU of four times the width, LayerNorm."""


REFERENCE = {
    "W1": LanguageModelSize(num_layers=12, width=768, num_heads=12, vocabulary=50304, length=1024, rows=1),
    "W2": LanguageModelSize(num_layers=12, width=768, num_heads=12, vocabulary=50304, length=1024, rows=8),
    "W3": LanguageModelSize(num_layers=20, width=2048, num_heads=16, vocabulary=32000, length=2048, rows=4, gated=5376),
    "W4": LanguageModelSize(num_layers=28, width=3072, num_heads=24, vocabulary=32000, length=2048, rows=4, gated=8192),
    "tiny": LanguageModelSize(num_layers=2, width=64, num_heads=4, vocabulary=256, length=64, rows=2),
}
"""W1 is bound by launches and communication, W2 by neither alone, W3 by arithmetic. W4 has 3.4 billion parameters; with
whole state and gradients (54 GB in float32) a GPU of 80 GB has too little left. "tiny" is for trying things out."""


class Block(nn.Module):
    """One transformer layer with the norm before each half."""

    def __init__(self, size: LanguageModelSize) -> None:
        super().__init__()
        width, plain = size.width, not size.gated
        norm = nn.LayerNorm if plain else nn.RMSNorm
        self.num_heads = size.num_heads
        self.attention_norm, self.mlp_norm = norm(width), norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=plain)
        self.attention_out = nn.Linear(width, width, bias=plain)
        self.up = nn.Linear(width, size.gated or 4 * width, bias=plain)
        self.gate = nn.Linear(width, size.gated, bias=False) if size.gated else None
        self.down = nn.Linear(size.gated or 4 * width, width, bias=plain)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) -> the same."""
        heads = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = (one.transpose(1, 2) for one in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention_out(mixed)
        y = self.mlp_norm(x)
        hidden = F.gelu(self.up(y), approximate="tanh") if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(hidden)  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """(rows, length) int64 -> 0-d loss against targets of the same shape. The head is a matrix of its own."""

    def __init__(self, size: LanguageModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, on float32 logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def build(size: LanguageModelSize, device: torch.device) -> LanguageModel:
    """The model on `device`, weights drawn as GPT-2 draws them."""
    with device:
        model = LanguageModel(size)
    for param in model.parameters():
        if param.ndim > 1:
            nn.init.normal_(param, 0.0, 0.02)
    return model
