"""The models of the table: each gives the loss of a batch, in training mode, without random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

from wholestep.cli.workloads.reference_lm import LanguageModelSize, build

ROWS = 4
"""Of a batch of one rank, so that it can be halved."""
Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """The cross-entropy of what some layers say of an input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of `x` for the classes `y`, (rows,)."""
        return F.cross_entropy(self.layers(x), y)


class TiedGPT(nn.Module):
    """Words, blocks, and a head whose weight is that of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 16), nn.Embedding(6, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of `x`, (rows, 6) words, for the next ones `y`."""
        hidden = self.words(x) + self.places(torch.arange(6, device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


class Adapted(nn.Module):
    """A frozen layer with a product of low rank beside it, as LoRA has it."""

    def __init__(self, width_in: int, width_out: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width_out).requires_grad_(False)
        self.down, self.up = nn.Linear(width_in, rank, bias=False), nn.Linear(rank, width_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width_in) to (rows, width_out)."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class TinyBert(nn.Module):
    """Hugging Face's masked language model, two layers of width 16."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertForMaskedLM(
            BertConfig(
                vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of `x`, (rows, 6) words, for the words `y`."""
        loss: Tensor = self.bert(input_ids=x, labels=y).loss
        return loss


@dataclass(frozen=True, slots=True)
class Model:
    """A model and what it learns from."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of a row of the input."""
    num_classes: int
    num_words: int = 0
    """Of the input's vocabulary; 0 for real numbers, which have one class a row."""

    def batch(self, rank: int, call: int) -> Batch:
        """Of a rank in a call."""
        draws = torch.Generator().manual_seed(100 * call + rank)
        classes = (ROWS, *self.shape) if self.num_words else (ROWS,)
        y = torch.randint(self.num_classes, classes, generator=draws)
        x = (ROWS, *self.shape)
        if self.num_words:
            return torch.randint(self.num_words, x, generator=draws), y
        return torch.randn(x, generator=draws), y


def _language_model(size: LanguageModelSize) -> Model:
    make = lambda: build(size, torch.device("cpu"))  # noqa: E731
    return Model(make, (size.length,), size.vocabulary, size.vocabulary)


def _mlp() -> nn.Module:
    return Classifier(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 6))


def _conv() -> nn.Module:
    return Classifier(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6),
    )  # fmt: skip


EVEN = LanguageModelSize(num_layers=2, width=16, num_heads=2, vocabulary=40, length=6, rows=ROWS)
UNEVEN = LanguageModelSize(num_layers=2, width=15, num_heads=1, vocabulary=41, length=7, rows=ROWS)
MODELS: dict[str, Model] = {
    "MLP": Model(_mlp, (8,), 6),
    "GPT": _language_model(EVEN),
    "conv with BatchNorm": Model(_conv, (3, 8, 8), 6),
    "tied GPT": Model(TiedGPT, (6,), 40, 40),
    "BERT": Model(TinyBert, (6,), 40, 40),
    "LoRA-like": Model(lambda: Classifier(Adapted(8, 16), nn.ReLU(), Adapted(16, 6)), (8,), 6),
    "uneven sizes": _language_model(UNEVEN),
}
