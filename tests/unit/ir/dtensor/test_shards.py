"""DTensors of what a graph gives: the layout and values that ``from_local`` gives, found out once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from wholestep.ir.dtensor.shards import dtensor_maker
from wholestep.ir.program import ShardSpec


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of two, which talk to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    dist.destroy_process_group()


@pytest.mark.parametrize(("dim", "whole_shape"), [(0, (6, 4)), (0, (5, 4)), (1, (3, 7)), (0, (1, 4))], ids=str)
def test_each_is_as_the_first(
    mesh: DeviceMesh, dim: int, whole_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    from_local = DTensor.from_local

    def counted(*args: Any, **kwargs: Any) -> DTensor:
        nonlocal calls
        calls += 1
        return from_local(*args, **kwargs)

    monkeypatch.setattr(DTensor, "from_local", counted)
    spec = ShardSpec(axis="data", num_ranks=2, dim=dim, whole_shape=whole_shape)
    make = dtensor_maker(spec, mesh)
    parts = [torch.randn(spec.shard_shape) for _ in range(3)]
    first, *others = [make(part) for part in parts]
    assert calls == 1
    for part, made in zip(parts[1:], others, strict=True):
        assert type(made) is DTensor
        assert made._spec == first._spec
        assert (tuple(made.shape), made.stride(), made.dtype) == (whole_shape, first.stride(), part.dtype)
        assert made.is_leaf
        assert not made.requires_grad
        assert made.to_local().shape == first.to_local().shape
        assert made._local_tensor.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        assert torch.equal(made.to_local(), part.narrow(dim, 0, first.to_local().shape[dim]))
        assert torch.equal((made * 2).to_local(), made.to_local() * 2)


def test_a_torch_that_makes_them_otherwise_is_asked_each_time(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ShardSpec(axis="data", num_ranks=2, dim=0, whole_shape=(6, 4))
    calls, is_inside = 0, False
    from_local, new = DTensor.from_local, DTensor.__new__

    def counted(*args: Any, **kwargs: Any) -> DTensor:
        nonlocal calls, is_inside
        calls, is_inside = calls + 1, True
        try:
            return from_local(*args, **kwargs)
        finally:
            is_inside = False

    def refuses(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_inside:
            raise TypeError("another signature")
        return new(cls, *args, **kwargs)

    monkeypatch.setattr(DTensor, "from_local", counted)
    make = dtensor_maker(spec, mesh)
    parts = [torch.randn(spec.shard_shape) for _ in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(DTensor, "__new__", refuses)
        made = [make(part) for part in parts]
    assert calls == 3
    assert all(torch.equal(one.to_local(), part) for one, part in zip(made, parts, strict=True))
