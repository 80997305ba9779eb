"""`pad=`: batches of many lengths run on few traces, with the loss that they had."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws

WORDS, LENGTHS = 11, (5, 7, 8, 13, 16, 11, 3)
PAD = {"tokens": ws.Pad(1, 8), "batch.labels": ws.Pad(-1, 8, value=-100)}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.words(x)))
        return out


def trained(compiled: Any) -> tuple[list[Tensor], Model, Any]:
    torch.manual_seed(0)
    model = Model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run, losses = compiled(step), []
    for length in LENGTHS * 2:
        whole = torch.randint(WORDS, (2, length + 1))  # slices of it, and no dense tensors
        tokens, batch = whole[:, :-1], {"labels": whole[:, 1:]}
        losses.append(run(tokens, batch=batch))
        assert tokens.shape == batch["labels"].shape == (2, length)
    return losses, model, run


def test_the_loss_is_that_of_the_batch_and_traces_are_few() -> None:
    wanted, eager, _ = trained(lambda step: step)
    found, model, step = trained(lambda step: ws.compile(step, pad=PAD, dynamic=False, fullgraph=True))
    assert step.cache_info().traces == 2  # 8 and 16
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_what_is_a_multiple_already_is_given_as_it_is() -> None:
    x = torch.ones(2, 8, 3)
    assert ws.Pad(1, 4).of(x) is x
    assert ws.Pad(1, 3, value=2.0).of(x).tolist() == F.pad(x, (0, 0, 0, 1), value=2.0).tolist()
    assert ws.Pad(-1, 2).of(x).shape == (2, 8, 4)


def test_a_method_is_padded_by_its_own_parameters() -> None:
    class Trainer:
        @ws.compile(pad={"x": ws.Pad(0, 4)}, dynamic=False)
        def step(self, x: Tensor) -> Tensor:
            return x.sum() * 2

    trainer = Trainer()
    assert [float(trainer.step(torch.ones(n))) for n in (1, 3, 4)] == [2, 6, 8]
    assert trainer.step.cache_info().traces == 1


def test_named_tuples_and_lists_keep_their_class() -> None:
    @ws.compile(pad={"pair.1": ws.Pad(0, 4)}, dynamic=False)
    def step(pair: Any) -> Any:
        return pair

    for kind in (list, tuple, lambda items: Pair(*items)):
        pair = kind([torch.ones(3), torch.ones(3)])
        found = step(pair)
        assert type(found) is type(pair)
        assert found[1].tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("may_go_live", [True, False])
def test_a_step_that_writes_to_a_copy_is_an_error(may_go_live: bool) -> None:
    @ws.compile(pad={"x": ws.Pad(0, 4)})
    def step(x: Tensor) -> Tensor:
        x.add_(1)
        return x.sum() if not may_go_live or x.sum().item() > 0 else x

    with pytest.raises(ws.ConfigError, match=r"writes to .*copies|has written to x"):
        step(torch.ones(3))


def test_what_cannot_be_padded_is_named() -> None:
    def step(x: Any) -> Any:
        return x

    with pytest.raises(ws.ConfigError, match=r"names y\. Parameters of the step are \['x'\]"):
        ws.compile(step, pad={"y": ws.Pad(0, 4)})
    with pytest.raises(ws.ConfigError, match=r"wants a tensor with dim 1 in x, got 1 dims"):
        ws.compile(step, pad={"x": ws.Pad(1, 4)})(torch.ones(3))
    with pytest.raises(ws.ConfigError, match=r"names x\.labels, which is not there: KeyError"):
        ws.compile(step, pad={"x.labels": ws.Pad(0, 4)})({"tokens": torch.ones(3)})
    with pytest.raises(ws.ConfigError, match=r"a multiple of 1 or more"):
        ws.Pad(0, 0)
    with pytest.raises(ws.ConfigError, match=r"wants \{.*ws.Pad"):
        ws.compile(step, pad={"x": 64})  # type: ignore[dict-item]
