"""What Python does with a result that has no numbers yet: it is an ordinary tensor in every way."""

from __future__ import annotations

import array
import copy
import heapq
import io
import json
import math
import pickle
import queue
import statistics
import struct
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws

CALLS = 4


def saved(values: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(values.detach(), file)
    file.seek(0)
    return torch.load(file).tolist()


def through_a_queue(loss: Tensor) -> float:
    held: queue.Queue[Tensor] = queue.Queue()
    held.put(loss)
    return float(held.get())


def on_a_heap(loss: Tensor) -> list[float]:
    heap: list[tuple[Tensor, int]] = []
    heapq.heappush(heap, (loss, 1))
    heapq.heappush(heap, (loss * 0, 2))
    return [float(one) for one, _ in heap]


def noted(loss: Tensor) -> int:
    loss.tag = 3  # type: ignore[attr-defined]
    return int(loss.tag)  # type: ignore[attr-defined]


USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "its class": lambda loss, _: [
        type(loss).__name__,
        type(loss) is torch.Tensor,
        loss.__class__.__name__,
        loss.type(),
    ],
    "a metric where it is a tensor": lambda loss, _: loss.item() if type(loss) is Tensor else None,
    "what it is": lambda loss, _: [loss.dtype, loss.shape, loss.requires_grad, loss.is_leaf, loss.grad_fn.name()],
    "an array": lambda _, values: np.asarray(values.detach()).tolist(),
    "functions of numpy": lambda _, values: [np.argsort(values.detach()).tolist(), float(np.median(values.detach()))],
    "its items": lambda _, values: [float(one) for one in values],
    "unpacked": lambda _, values: (lambda first, *rest: float(first) + len(rest))(*values),
    "sorted": lambda loss, _: [float(one) for one in sorted([loss, loss * 0.5, loss * 2])],
    "the larger one": lambda loss, values: [float(max(loss, loss * 2)), float(min(values.unbind()))],
    "a key": lambda loss, _: {loss: 1}[loss],
    "in a list": lambda loss, _: [loss in [loss], loss is not None],
    "a copy": lambda loss, _: [float(copy.copy(loss)), float(copy.deepcopy(loss.detach()))],
    "pickled": lambda loss, _: float(pickle.loads(pickle.dumps(loss.detach()))),
    "saved": lambda _, values: saved(values),
    "through a queue": lambda loss, _: through_a_queue(loss),
    "on a heap": lambda loss, _: on_a_heap(loss),
    "text": lambda loss, values: [f"{loss:.4f}", f"{loss.item():.3e}", repr(values.detach()), str(values.tolist())],
    "a condition": lambda loss, _: [bool(loss > 0.1), not (loss > 100), "big" if loss > 0.2 else "small", 0 < loss < 9],
    "math": lambda loss, _: [
        math.sqrt(loss),
        math.floor(loss * 10),
        math.isfinite(loss),
        complex(loss),
    ],
    "a number of things": lambda loss, _: [list(range((loss * 10).int())), [0] * (loss * 0 + 2).long()],
    "an index": lambda loss, values: [
        "abc"[int(loss > 0)],
        [5, 6, 7][(loss * 0).long()],
        values[values.argmax()].item(),
    ],
    "bytes": lambda loss, values: [struct.pack("f", loss), array.array("f", [loss]), values.detach().numpy().tobytes()],
    "statistics": lambda loss, values: [statistics.mean([float(loss), 1.0]), Counter(int(one * 9) for one in values)],
    "json": lambda loss, _: json.dumps({"loss": float(loss)}),
    "a tensor of it": lambda loss, _: [torch.tensor([loss, 2.0]), torch.as_tensor(loss).item()],
    "a mask": lambda _, values: [values[values > 0].sum(), values.gt(0).nonzero().flatten().tolist()],
    "a weak reference": lambda loss, _: float(weakref.ref(loss)()),  # type: ignore[arg-type]
    "an attribute": lambda loss, _: noted(loss),
    "its version": lambda _, values: values._version,
    "the last ones": lambda loss, _: float(deque([loss], 3)[0]),
    "printed": lambda loss, _: print(loss.detach(), file=io.StringIO()),
}


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.notes: list[Any] = []


@pytest.mark.parametrize("use", USES)
def test_it_is_used_as_in_eager_code(use: str) -> None:
    def step(t: Training, x: Tensor) -> None:
        out = torch.tanh(t.model(x))
        loss, values = out.square().mean(), out[:, 0] * 1.0
        t.notes.append(USES[use](loss, values))
        loss.backward()
        t.opt.step()
        t.opt.zero_grad()

    eager, ours, compiled = Training(), Training(), ws.compile(step, backend="eager")
    for number in range(CALLS):
        torch.manual_seed(number)
        x = torch.randn(5, 4)
        step(eager, x)
        compiled(ours, x)
    assert str(ours.notes) == str(eager.notes)
    assert torch.equal(ours.model.weight, eager.model.weight)
