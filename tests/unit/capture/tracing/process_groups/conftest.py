"""Four ranks that talk to nobody, one of which is this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.unit.capture.tracing.process_groups.programs import RANK, SIZE, Groups


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[Groups]:
    """Rank 1 of four, with a mesh of two rows, an irregular group, and one that this rank is not in."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=SIZE)
    made: Groups = {
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")),
        "odd": dist.new_group([0, 1, 2]),
        "others": dist.new_group([2, 3]),
        "again": dist.new_group(list(range(SIZE))),
    }
    yield made
    dist.destroy_process_group()
