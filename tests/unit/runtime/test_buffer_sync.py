"""State that becomes equal on all ranks: in messages of bounded size, and nothing before all have come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from wholestep.ir.program import MeshAxis
from wholestep.runtime import buffer_sync

AXIS = MeshAxis(name="data", size=2, group="all")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_sync, "MESSAGE_BYTES", 64)


def of(*num_elements: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full((count,), float(place), dtype=dtype) for place, count in enumerate(num_elements)]


def test_messages_are_bounded_and_hold_every_tensor_once() -> None:
    floats, longs = of(8, 8, 1, 40, 3, 0), of(2, 8, dtype=torch.int64)
    mixed = [floats[0], longs[0], *floats[1:], longs[1]]
    found = [[id(one) for one in message] for message in buffer_sync.messages(mixed)]
    wanted = [floats[:2], floats[2:3], floats[3:4], floats[4:], longs[:1], longs[1:]]
    assert found == [[id(one) for one in message] for message in wanted]
    assert list(buffer_sync.messages([])) == []


def broadcasts(monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[int]:
    """In the place of the group: what comes is -1, and one of the messages may not come. Their sizes in bytes."""
    sent: list[int] = []

    def broadcast(flat: Tensor, source: int, group: Any) -> None:
        if len(sent) == fail_at:
            raise RuntimeError("rank 0 has left")
        sent.append(flat.nbytes)
        flat.fill_(-1)

    monkeypatch.setattr(buffer_sync, "group_named", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(buffer_sync.dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(buffer_sync.dist, "broadcast", broadcast)
    return sent


def test_every_tensor_gets_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, tensors = broadcasts(monkeypatch), [*of(8, 8, 40), torch.zeros(2, 3, dtype=torch.int64).t()]
    buffer_sync.broadcast_tensors(tensors, AXIS)
    assert sent == [64, 160, 48]
    assert all(bool((one == -1).all()) for one in tensors)


def test_nothing_is_changed_before_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, tensors = broadcasts(monkeypatch, fail_at=2), of(8, 8, 40, 2)
    before = [one.clone() for one in tensors]
    with pytest.raises(RuntimeError, match="has left"):
        buffer_sync.broadcast_tensors(tensors, AXIS)
    assert sent == [64, 160]
    assert all(map(torch.equal, before, tensors))
