"""State that becomes equal on all ranks: nothing before all has come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from wholestep.ir.program import MeshAxis
from wholestep.runtime import buffer_sync

AXIS = MeshAxis(name="data", size=2, group="all")


def tensors() -> list[Tensor]:
    """Of two types, one of them not contiguous."""
    return [torch.zeros(8), torch.zeros(2, 3, dtype=torch.int64).t(), torch.ones(()), torch.zeros(0)]


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
    sent, given = broadcasts(monkeypatch), tensors()
    buffer_sync.broadcast_tensors(given, AXIS)
    assert sent == [36, 48]
    assert all(bool((one == -1).all()) for one in given)


def test_nothing_is_changed_before_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, given = broadcasts(monkeypatch, fail_at=1), tensors()
    with pytest.raises(RuntimeError, match="has left"):
        buffer_sync.broadcast_tensors(given, AXIS)
    assert sent == [36]
    assert all(map(torch.equal, given, tensors()))
