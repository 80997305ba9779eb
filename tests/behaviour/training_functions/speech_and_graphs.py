"""Speech: wav2vec2 of transformers, which masks by numpy. Graphs: data objects as those of torch_geometric."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from benchmarks.idioms import Loop
from tests.behaviour.training_functions.base import loop, training


def wav2vec2_config() -> Any:
    return hf.Wav2Vec2Config(
        vocab_size=12, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=(6, 6),
        conv_kernel=(5, 3), conv_stride=(3, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.3, mask_time_length=2, mask_time_min_masks=1, layerdrop=0.1,
        ctc_loss_reduction="mean", ctc_zero_infinity=True,
    )  # fmt: skip


@training()
def wav2vec2() -> Loop:
    """CTC with time masks drawn by numpy, layers that are dropped, and labels padded with -100."""
    model = hf.Wav2Vec2ForCTC(wav2vec2_config()).train()
    model.freeze_feature_encoder()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses: list[float] = []

    def training_step(input_values: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        outputs = model(input_values, attention_mask=attention_mask, labels=labels)
        loss: Tensor = outputs.loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
        return outputs.logits.detach().argmax(-1)

    def arguments(call: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(call)
        mask = torch.ones(2, 120, dtype=torch.long)
        mask[1, 100:] = 0
        labels = torch.randint(1, 12, (2, 4), generator=draw)
        labels[1, 3:] = -100
        return torch.randn(2, 120, generator=draw), mask, labels

    return loop(training_step, arguments, model=model, opt=optimizer, losses=losses)


class Storage(dict[str, Any]):
    """What a graph keeps."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


class Data:
    """A graph whose tensors are attributes that live in a store, as in torch_geometric."""

    def __init__(self, **items: Any) -> None:
        self.__dict__["_store"] = Storage(items)

    def __getattr__(self, key: str) -> Any:
        return getattr(self._store, key)

    def __setattr__(self, key: str, value: Any) -> None:
        self._store[key] = value

    @property
    def num_nodes(self) -> int:
        return int(self._store["x"].size(0))

    def to(self, device: str) -> Data:
        return Data(
            **{key: value.to(device) if isinstance(value, Tensor) else value for key, value in self._store.items()}
        )


class GCNConv(nn.Module):
    """Messages along the edges, with self loops and symmetric norms."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.lin, self.bias = nn.Linear(width, out, bias=False), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        num_nodes = x.size(0)
        loops = torch.arange(num_nodes).unsqueeze(0).repeat(2, 1)
        row, col = torch.cat([edge_index, loops], dim=1)
        deg = torch.zeros(num_nodes).scatter_add_(0, col, torch.ones(col.size(0)))
        norm = deg.pow(-0.5)[row] * deg.pow(-0.5)[col]
        x = self.lin(x)
        return torch.zeros_like(x).index_add_(0, col, norm.view(-1, 1) * x[row]) + self.bias


class GCN(nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(5, 6), GCNConv(6, 3)

    def forward(self, data: Data) -> Tensor:
        x = F.dropout(F.relu(self.conv1(data.x, data.edge_index)), training=self.training)
        return F.log_softmax(self.conv2(x, data.edge_index), dim=1)


def graph(nodes: int, edges: int, seed: int) -> Data:
    draw = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(nodes, 5, generator=draw), edge_index=torch.randint(nodes, (2, edges), generator=draw),
        y=torch.randint(3, (nodes,), generator=draw), train_mask=torch.arange(nodes) % 3 != 0, name=f"graph {seed}",
    )  # fmt: skip


@training()
def graph_of_nodes() -> Loop:
    """One graph, boolean masks over its nodes, an evaluation in the same function, features exchanged between calls."""
    model, data = GCN(), graph(9, 14, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def train_and_test(epoch: int) -> float:
        model.train()
        optimizer.zero_grad()
        out = model(data)
        loss = F.nll_loss(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            pred = model(data).argmax(dim=1)
        correct = (pred[~data.train_mask] == data.y[~data.train_mask]).sum()
        acc = int(correct) / int((~data.train_mask).sum())
        print(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Test: {acc:.4f}")
        return float(loss)

    def arguments(call: int) -> tuple[int]:
        if call == 3:
            data.x = data.x.flip(0)
        return (call,)

    return loop(train_and_test, arguments, model=model, opt=optimizer, x=lambda: data.x)


@training()
def batches_of_graphs() -> Loop:
    """Every call a graph of another size, moved by its own `to`."""
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    total = {"loss": 0.0, "nodes": 0}

    def step(data: Data) -> float:
        data = data.to("cpu")
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), data.y)
        loss.backward()
        optimizer.step()
        total["loss"] += float(loss) * data.num_nodes
        total["nodes"] += data.num_nodes
        return total["loss"] / total["nodes"]

    return Loop(
        step=step,
        arguments=lambda call: (graph(6 + call % 3, 10 + call % 2, call),),
        observe=lambda: {"model": model, "opt": optimizer, "total": total},
    )
