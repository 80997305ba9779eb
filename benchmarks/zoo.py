"""Models as people train them, unmodified, for `models.py`: Hugging Face, torchvision, timm, and steps written by hand.

A case gives the model, its optimizer, the step and one batch on a device. With `tiny` it is small enough for a test.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF = torch.bfloat16
WORDS, CLASSES = 50_257, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained."""

    model: nn.Module
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    step: Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
    """`step(model, optimizer, batch)`: the loss, or a tuple that begins with it."""
    batch: Any


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The fused one, on what is trained."""
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """As image classifiers are trained."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-4)


def hugging_face_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> Tensor:
    """Autocast, the model's own loss, clipping."""
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, HALF, enabled=next(model.parameters()).dtype is torch.float32):
        loss = model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()  # type: ignore[no-any-return]


def step_with(
    loss_of: Callable[[Tensor, Tensor], Tensor], *, clip: float = 0.0, accuracy: bool = False, micro_batches: int = 1
) -> Callable[..., Any]:
    """A step of a model of one tensor under autocast."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Any:
        total = torch.zeros((), device=batch[1].device)
        for x, y in zip(batch[0].chunk(micro_batches), batch[1].chunk(micro_batches), strict=True):
            with torch.autocast(y.device.type, HALF):
                out = model(x)
                loss = loss_of(out, y) / micro_batches
            loss.backward()
            total = total + loss.detach()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return (total, (out.argmax(-1) == y).float().mean()) if accuracy else total

    return step


def words(rows: int, length: int, device: torch.device, vocabulary: int) -> Tensor:
    """(rows, length) of a vocabulary."""
    return torch.randint(3, vocabulary, (rows, length), device=device)


def _language_model(tiny: bool, device: torch.device, *, kind: str, rows: int, length: int, **small: int) -> Case:
    hf: Any = importlib.import_module("transformers")
    config = getattr(hf, f"{kind}Config")(**(small if tiny else {}))
    x = words(2 if tiny else rows, 32 if tiny else length, device, config.vocab_size)
    batch = {"input_ids": x, "labels": x.clone()}
    heads = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}
    if kind == "Bert":
        batch["labels"] = torch.where(torch.rand(x.shape, device=device) < 0.15, x, -100)
    return Case(model=getattr(hf, heads[kind])(config), optimizer=adamw, step=hugging_face_step, batch=batch)


def _llama(tiny: bool, device: torch.device, *, half: bool = False) -> Case:
    hf: Any = importlib.import_module("transformers")
    config = hf.LlamaConfig(
        vocab_size=32_000, hidden_size=64 if tiny else 1024, intermediate_size=128 if tiny else 2816,
        num_hidden_layers=2 if tiny else 12, num_attention_heads=4 if tiny else 16,
        num_key_value_heads=2 if tiny else 4,
    )  # fmt: skip
    x = words(2 if tiny else 8, 32 if tiny else 1024, device, config.vocab_size)
    model = hf.LlamaForCausalLM(config)
    batch = {"input_ids": x, "labels": x.clone()}
    return Case(model=model.to(HALF) if half else model, optimizer=adamw, step=hugging_face_step, batch=batch)


def _t5(tiny: bool, device: torch.device) -> Case:
    hf: Any = importlib.import_module("transformers")
    small = {"num_layers": 2, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128} if tiny else {}
    config = hf.T5Config(decoder_start_token_id=0, **small)
    rows, length = (2, 32) if tiny else (16, 512)
    batch = {name: words(rows, size, device, config.vocab_size) for name, size in
             (("input_ids", length), ("labels", length // 4))}  # fmt: skip
    return Case(model=hf.T5ForConditionalGeneration(config), optimizer=adamw, step=hugging_face_step, batch=batch)


def _images(
    tiny: bool, device: torch.device, *, name: str, rows: int, library: str = "torchvision.models", **options: Any
) -> Case:
    last = options.pop("channels_last", False)
    source: Any = importlib.import_module(library)
    model = source.create_model(name) if library == "timm" else getattr(source, name)()
    rows = 2 if tiny else rows
    x, y = torch.randn(rows, 3, 224, 224, device=device), torch.randint(CLASSES, (rows,), device=device)
    if last:
        x, model = x.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    optimizer = sgd if last else adamw
    return Case(model=model, optimizer=optimizer, step=step_with(**options), batch=(x, y))


class Block(nn.Module):
    """A layer of a GPT, (rows, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """(rows, length) of words -> (rows, length, vocabulary): the size of GPT-2, its head tied to its embedding."""

    def __init__(self, vocabulary: int = WORDS, *, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for one in self.parameters():
            if one.dim() == 2:
                nn.init.normal_(one, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.words(x) + self.places(places))))  # type: ignore[no-any-return]


def entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Of every word."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=smoothing)


def with_z_loss(logits: Tensor, y: Tensor) -> Tensor:
    """And the square of the logarithm of the partition function (PaLM)."""
    logits = logits.float()
    return entropy(logits, y) + 1e-4 * logits.logsumexp(-1).square().mean()


def _gpt(tiny: bool, device: torch.device, *, scaled: bool = False, **options: Any) -> Case:
    rows, length, vocabulary = (4, 32, 97) if tiny else (8, 1024, WORDS)
    model = GPT(vocabulary, width=64, layers=2, heads=2) if tiny else GPT()
    step = _scaled_step(device) if scaled else step_with(clip=1.0, **({"loss_of": entropy} | options))
    batch = (words(rows, length, device, vocabulary), words(rows, length, device, vocabulary))
    return Case(model=model, optimizer=adamw, step=step, batch=batch)


def _scaled_step(device: torch.device) -> Callable[..., Any]:
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else HALF):
            loss = entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _table(tiny: bool, device: torch.device) -> Case:
    """An MLP of odd sizes on rows of a table."""
    width, rows = (62, 32) if tiny else (1022, 8192)
    sizes = [97, *[width] * (2 if tiny else 8)]
    layers = [part for one, other in pairwise(sizes)
              for part in (nn.Linear(one, other), nn.BatchNorm1d(other), nn.GELU(), nn.Dropout(0.1))]  # fmt: skip
    batch = (torch.randn(rows, 97, device=device), torch.randint(7, (rows,), device=device))
    return Case(model=nn.Sequential(*layers, nn.Linear(width, 7)), optimizer=adamw,
                step=step_with(F.cross_entropy), batch=batch)  # fmt: skip


def _checkpointed(tiny: bool, device: torch.device, *, of: Callable[[bool, torch.device], Case]) -> Case:
    case = of(tiny, device)
    enable: Any = case.model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return case


_GPT2 = partial(
    _language_model, kind="GPT2", rows=8, length=1024, n_layer=2, n_embd=64, n_head=2, n_positions=64
)  # fmt: skip
_SMOOTH = partial(F.cross_entropy, label_smoothing=0.1)
CASES: Mapping[str, Callable[[bool, torch.device], Case]] = {
    "gpt2": _GPT2,
    "gpt2_checkpointed": partial(_checkpointed, of=_GPT2),
    "bert": partial(_language_model, kind="Bert", rows=16, length=512, num_hidden_layers=2, hidden_size=64,
                    num_attention_heads=2, intermediate_size=128),
    "llama": _llama,
    "llama_half": partial(_llama, half=True),
    "llama_checkpointed": partial(_checkpointed, of=_llama),
    "t5": _t5,
    "gpt": _gpt,
    "gpt_smoothing": partial(_gpt, loss_of=partial(entropy, smoothing=0.1)),
    "gpt_accuracy": partial(_gpt, accuracy=True),
    "gpt_z_loss": partial(_gpt, loss_of=with_z_loss),
    "gpt_accumulation": partial(_gpt, micro_batches=4),
    "gpt_scaler": partial(_gpt, scaled=True),
    "table": _table,
    "resnet50": partial(_images, name="resnet50", rows=128, loss_of=F.cross_entropy, channels_last=True),
    "efficientnet": partial(_images, name="efficientnet_b0", rows=64, loss_of=F.cross_entropy, channels_last=True),
    "convnext": partial(_images, name="convnext_tiny", rows=64, loss_of=_SMOOTH),
    "swin": partial(_images, name="swin_t", rows=64, loss_of=F.cross_entropy, clip=5.0),
    "deit": partial(_images, name="deit_small_patch16_224", library="timm", rows=128, loss_of=_SMOOTH, accuracy=True),
}  # fmt: skip
"""Name -> what it trains, given `tiny` and a device."""
