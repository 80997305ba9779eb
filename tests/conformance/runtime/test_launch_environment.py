"""What the launcher says in the environment: the debug level, LOCAL_RANK and the device that goes with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import shared_gpu
from wholestep.errors import ConfigError
from wholestep.runtime.distributed.world import close_current, init

row = pytest.mark.row


@pytest.fixture
def debug_level() -> Iterator[None]:
    before = dist.get_debug_level()
    yield
    dist.set_debug_level(before)


@row("S10", "debug_level")
@pytest.mark.parametrize("text", ["OFF", "off", "oFf", "INFO", "info", "INfO", "DETAIL", "detail", "DeTaIl", None])
def test_the_debug_level_is_read_in_any_case(
    text: str | None, debug_level: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is None:
        monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    else:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", text)
    dist.set_debug_level(dist.DebugLevel.DETAIL if text is None else dist.DebugLevel.OFF)
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == getattr(dist.DebugLevel, (text or "OFF").upper())


@row("S10", "debug_level")
@pytest.mark.parametrize("text", ["foo", "0", "1", "-1"])
def test_a_bad_debug_level_raises(text: str, debug_level: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", text)
    with pytest.raises(ValueError, match="The value of TORCH_DISTRIBUTED_DEBUG must"):
        dist.set_debug_level_from_env()


@row("S10", "local_rank_without_env")
def test_a_missing_local_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()


@row("S10", "local_rank_without_env_with_fallback")
def test_a_missing_local_rank_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_node_local_rank(fallback_rank=2) == 2


def local_ranks() -> tuple[int, int]:
    return dist.get_node_local_rank(), dist.get_node_local_rank(fallback_rank=123)


@row("S10", "local_rank")
@row("S10", "local_rank_overrides_fallback")
def test_the_local_rank_is_read_and_counts_more_than_a_fallback(ranks4: Any) -> None:
    wanted = [0] * 4 if shared_gpu.ASKED and ranks4.backend == "nccl" else [*range(4)]
    assert ranks4.run(local_ranks) == [(rank, rank) for rank in wanted]


def own_device() -> tuple[str, str, int]:
    world = init()
    tensor = torch.ones(1, device=world.device)
    return str(world.device), str(tensor.device), int(os.environ["LOCAL_RANK"])


@row("S10", "world_device")
def test_the_world_takes_its_device_from_the_local_rank(ranks2: Any) -> None:
    for device, of_tensor, local_rank in ranks2.run(own_device):
        assert device == of_tensor == (f"cuda:{local_rank}" if ranks2.backend == "nccl" else "cpu")


@row("S10", "world_device")
def test_a_local_rank_without_a_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host that shows fewer GPUs than it has processes, before any rank waits for another."""
    close_current()
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=3 wants a GPU of its own, and this process sees 2"):
        init("nccl")


@row("S10", "world_device")
def test_a_missing_local_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    close_current()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match=r"set by half: LOCAL_RANK is missing.* torchrun"):
        init("gloo")
