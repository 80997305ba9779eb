"""Language models: a GPT trained as nanoGPT does, an LSTM as PyTorch's examples do, and DeBERTa of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from benchmarks.idioms import Loop
from tests.behaviour.training_functions.base import loop, training

VOCABULARY, BLOCK = 17, 6


@dataclass
class GPTConfig:
    """As nanoGPT has it."""

    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 8
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal, with one matrix for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.dropout = config.n_head, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (
            one.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for one in self.c_attn(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return out


class Block(nn.Module):
    """Attention and a small perceptron, each after a norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(config), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(config.dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """With tied embeddings, and a loss if there are targets."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, config.n_embd), nn.Embedding(BLOCK, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(config.n_embd), nn.Linear(config.n_embd, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        device, (_, t) = idx.device, idx.size()
        assert t <= BLOCK, f"Cannot forward sequence of length {t}, block size is only {BLOCK}"
        x = self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay: float, learning_rate: float) -> torch.optim.Optimizer:
        """No decay for what has one dimension."""
        params = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


@training()
def nano_gpt() -> Loop:
    """Accumulation, autocast, a cosine by hand, clipping, a scaler, estimated losses, the next batch inside."""
    learning_rate, min_lr, warmup_iters, lr_decay_iters = 1e-2, 1e-3, 2, 8
    gradient_accumulation_steps, grad_clip, eval_interval, eval_iters, log_interval = 2, 1.0, 3, 2, 2
    data = {name: np.random.RandomState(0).randint(0, VOCABULARY, 200).astype(np.uint16) for name in ("train", "val")}
    model = GPT(GPTConfig())
    optimizer = model.configure_optimizers(1e-1, learning_rate)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ctx: Any = torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16)
    iter_num, best_val_loss, checkpoint = 0, 1e9, {}

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        ix = torch.randint(len(data[split]) - BLOCK, (3,))
        x = torch.stack([torch.from_numpy((data[split][i : i + BLOCK]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[split][i + 1 : i + 1 + BLOCK]).astype(np.int64)) for i in ix])
        return x, y

    @torch.no_grad()
    def estimate_loss() -> dict[str, Tensor]:
        out = {}
        model.eval()
        for split in ["train", "val"]:
            losses = torch.zeros(eval_iters)
            for k in range(eval_iters):
                X, Y = get_batch(split)
                with ctx:
                    _, loss = model(X, Y)
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    def get_lr(it: int) -> float:
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)

    X, Y = get_batch("train")

    def train_iteration() -> None:
        nonlocal iter_num, best_val_loss, checkpoint, X, Y
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % eval_interval == 0:
            losses = estimate_loss()
            print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
            if losses["val"] < best_val_loss:
                best_val_loss = losses["val"]
                if iter_num > 0:
                    checkpoint = {"iter_num": iter_num, "best_val_loss": best_val_loss}
        for _ in range(gradient_accumulation_steps):
            with ctx:
                _, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % log_interval == 0:
            lossf = loss.item() * gradient_accumulation_steps
            print(f"iter {iter_num}: loss {lossf:.4f}")
        iter_num += 1

    return loop(
        train_iteration, model=model, opt=optimizer, iter_num=lambda: iter_num, best=lambda: best_val_loss,
        checkpoint=lambda: checkpoint, batch=lambda: (X, Y),
    )  # fmt: skip


class RNNModel(nn.Module):
    """An encoder, an LSTM and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder, self.decoder = nn.Dropout(0.2), nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.rnn = nn.LSTM(6, 6, 2, dropout=0.2)

    def forward(self, input: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, VOCABULARY), dim=1), hidden

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(2, bsz, 6), weight.new_zeros(2, bsz, 6)


def repackage_hidden(h: Any) -> Any:
    """Wraps hidden states in new tensors, to detach them from their history."""
    if isinstance(h, Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


@training(unrolled=True)
def word_language_model() -> Loop:
    """A whole epoch is the compiled function: hidden states carried on, an update by hand, a line at every interval."""
    bptt, lr, clip, log_interval = 4, 2.0, 0.25, 2
    model, criterion, epoch = RNNModel(), nn.NLLLoss(), 0
    train_data = torch.randint(VOCABULARY, (18, 3))

    def get_batch(source: Tensor, i: int) -> tuple[Tensor, Tensor]:
        seq_len = min(bptt, len(source) - 1 - i)
        return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)

    def train() -> None:
        model.train()
        total_loss = 0.0
        hidden = model.init_hidden(3)
        for batch, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
            data, targets = get_batch(train_data, i)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for p in model.parameters():
                assert p.grad is not None
                p.data.add_(p.grad, alpha=-lr)
            total_loss += loss.item()
            if batch % log_interval == 0 and batch > 0:
                cur_loss = total_loss / log_interval
                print(f"| {batch:5d} batches | loss {cur_loss:5.2f} | ppl {math.exp(cur_loss):8.2f}")
                total_loss = 0

    return loop(train, model=model, epoch=lambda: epoch)


@training()
def deberta() -> Loop:
    """DeBERTa-v2 for classification with relative positions, as a trainer steps it."""
    config = hf.DebertaV2Config(
        vocab_size=31, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        relative_attention=True, position_buckets=4, max_relative_positions=8, pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm", share_att_key=True, position_biased_input=False, max_position_embeddings=16,
        num_labels=3,
    )  # fmt: skip
    model = hf.DebertaV2ForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = hf.get_linear_schedule_with_warmup(optimizer, 2, 20)
    state: dict[str, Any] = {"global_step": 0, "losses": []}

    def training_step(batch: dict[str, Tensor]) -> Tensor:
        outputs = model(**batch)
        outputs.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state["global_step"] += 1
        state["losses"].append(outputs.loss.item())
        return outputs.loss.detach()

    def arguments(call: int) -> tuple[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(call)
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[1, 5:] = 0
        ids = torch.randint(3, 31, (2, 7), generator=draw)
        return ({"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, (2,), generator=draw)},)

    return loop(
        training_step, arguments, model=model, opt=optimizer, state=state, rates=lambda: scheduler.get_last_lr()
    )
