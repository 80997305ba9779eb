"""What torch.distributed promises of stores, and wholestep builds on: timeouts and barriers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

row = pytest.mark.row
TIMEOUT_S = 0.5
NEEDED, CAME = 4, 3


def stores(kind: str, folder: Path, count: int) -> list[dist.Store]:
    """One store as `count` ranks see it, each through a connection of its own where it has connections."""
    if kind == "hash":
        return [dist.HashStore()] * count
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), count) for _ in range(count)]
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [first, *(dist.TCPStore("127.0.0.1", first.port, is_master=False) for _ in range(count - 1))]


@row("S8", "store_timeout")
@pytest.mark.parametrize("kind", ["file", "tcp", "hash"])
def test_a_read_of_a_missing_key_gives_up_in_time(kind: str, tmp_path: Path) -> None:
    (store,) = stores(kind, tmp_path, 1)
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    store.set("there", "value")
    assert store.get("there") == b"value"
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        store.get("not there")
    assert 0.9 * TIMEOUT_S < time.monotonic() - started < 20  # torch's own would be five minutes


@row("S8", "store_timeout")
@pytest.mark.parametrize("method", ["file", "tcp"])
def test_the_store_of_the_default_group_takes_the_timeout_of_the_group(method: str, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/rendezvous" if method == "file" else "tcp://127.0.0.1:0"
    dist.init_process_group("gloo", init_method=address, world_size=1, rank=0, timeout=timedelta(seconds=1))
    try:
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timeout"):
            c10d._get_default_store().get("not there")
        assert 0.9 < time.monotonic() - started < 20
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def waited_in_vain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Exception | None]]:
    """Kind of store -> what each rank met in a barrier to which one rank does not come.

    All at once: the barrier of torch looks at its timeout every ten seconds and not more often.
    """

    def wait(store: dist.Store, rank: int) -> Exception | None:
        try:
            c10d._store_based_barrier(rank, store, "somebody_is_missing", NEEDED, timedelta(seconds=TIMEOUT_S))
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(3 * CAME) as threads:
        waits = {
            kind: [
                threads.submit(wait, store, rank)
                for rank, store in enumerate(stores(kind, tmp_path_factory.mktemp(kind), CAME))
            ]
            for kind in ("file", "tcp", "hash")
        }
        return {kind: [future.result() for future in futures] for kind, futures in waits.items()}


@row("S8", "store_based_barrier")
@pytest.mark.parametrize("kind", ["file", "tcp", "hash"])
def test_a_store_barrier_raises_on_every_rank_that_waits(
    kind: str, waited_in_vain: dict[str, list[Exception | None]]
) -> None:
    errors = waited_in_vain[kind]
    assert [type(error) for error in errors] == [dist.DistStoreError] * CAME
    assert isinstance(errors[0], dist.DistError)
    for rank, error in enumerate(errors):
        assert f"rank {rank}" in str(error)
        assert f"num_workers_joined={CAME}" in str(error)


@row("S8", "store_based_barrier")
@pytest.mark.parametrize("kind", ["file", "tcp", "hash"])
def test_a_store_barrier_ends_when_all_have_come(kind: str, tmp_path: Path) -> None:
    def wait(rank: int, store: dist.Store) -> float:
        started = time.monotonic()
        c10d._store_based_barrier(rank, store, "all", CAME, timedelta(seconds=30))
        return time.monotonic() - started

    with ThreadPoolExecutor(CAME) as threads:
        assert max(threads.map(wait, range(CAME), stores(kind, tmp_path, CAME))) < 15
