"""The model and the training step of the demo: a byte-level GPT, written the ordinary way.

Nothing here knows wholestep. The same `train_step` is compiled in one contender of the demo and runs eagerly in the
other. Shapes: B rows in the batch, T bytes of context, D width, V = 256 byte values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_BYTES = 256
"""The vocabulary: every value of a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Size of the model; the default has about 2.5 million parameters."""

    num_layers: int = 4
    num_heads: int = 4
    width: int = 224
    """Features per position; a multiple of `num_heads`."""
    context: int = 128
    """Longest context, in bytes."""


class Block(nn.Module):
    """One transformer layer with the norm before each half: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width, bias=False)
        self.mlp_down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D); a position sees itself and what came before."""
        rows, length, width = x.shape
        heads = (rows, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))
        hidden: Tensor = self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x))))
        return x + hidden


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the embedding is also the output layer (tied).

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, without dropout.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(NUM_BYTES, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.register_buffer("positions", torch.arange(config.context), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The two matrices that write to the residual stream start smaller, so its variance stays near one.
                writes_residual = name.endswith(("attention_out.weight", "mlp_down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** (0.5 if writes_residual else 0.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, V) logits."""
        positions: Tensor = self.get_buffer("positions")[: tokens.shape[1]]
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def next_byte_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte, of `y` (B, T) given `x` (B, T). 0-d."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One ordinary step on this rank's batch: returns the loss before the update, 0-d, without its graph."""
    loss = next_byte_loss(model, x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.inference_mode()
def sample(model: GPT, prompt: bytes, *, num_bytes: int, temperature: float, seed: int) -> str:
    """Continue `prompt` by `num_bytes` bytes drawn at `temperature`; the same seed draws the same text."""
    device = model.embedding.weight.device
    draw = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_bytes):
        recent = torch.tensor([tokens[-model.config.context :]], device=device)
        weights = torch.softmax(model(recent)[0, -1].float() / temperature, dim=0).cpu()
        tokens.append(int(torch.multinomial(weights, 1, generator=draw)))
    return bytes(tokens).decode("utf-8", errors="replace")
