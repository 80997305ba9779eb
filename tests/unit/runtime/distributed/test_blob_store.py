"""Blobs in the store, with ranks as threads of one process would use it."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

from wholestep.runtime.distributed import blob_store
from wholestep.runtime.distributed.blob_store import BlobStore


def stores(size: int, name: str = "train_step/0", store: dist.Store | None = None) -> list[BlobStore]:
    store = store or dist.HashStore()
    return [BlobStore(store, name, rank=rank, size=size) for rank in range(size)]


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 2500])
def test_the_others_find_what_rank_0_puts_there(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "_CHUNK_BYTES", 1000)
    first, *rest = stores(3)
    data = os.urandom(length)  # which nothing makes shorter
    assert [one.claim("kernels") for one in (first, *rest)] == [True, False, False]
    first.put("kernels", data)
    assert [one.take("kernels") for one in rest] == [data, data]


def test_who_fills_it() -> None:
    assert [one.is_writer for one in stores(3)] == [True, False, False]


def test_names_and_keys_are_apart() -> None:
    store = dist.HashStore()
    (one, reader), (other, other_reader) = stores(2, "a/0", store), stores(2, "a/1", store)
    assert all((one.claim("x"), other.claim("x"), reader.claim("y")))
    one.put("x", b"1")
    other.put("x", b"2")
    assert (reader.take("x"), other_reader.take("x")) == (b"1", b"2")


def test_the_last_reader_takes_it_away() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    first, *rest = stores(3, store=store)
    first.put("kernels", b"long" * 100)
    assert rest[0].take("kernels") is not None
    assert store.num_keys() > before
    assert rest[1].take("kernels") is not None
    assert store.num_keys() == before


def test_who_comes_first_is_waited_for() -> None:
    one, other, third = stores(3)
    assert [other.claim("kernels"), one.claim("kernels")] == [True, False]
    begun, found = threading.Event(), list[bytes | None]()

    def waits() -> None:
        begun.set()
        found.append(one.take("kernels"))

    thread = threading.Thread(target=waits)
    thread.start()
    begun.wait()
    assert not found
    other.put("kernels", b"data")
    thread.join(60)
    assert found == [b"data"]
    assert not third.claim("kernels")
    assert third.take("kernels") == b"data"


@pytest.mark.parametrize("gives_up", [True, False])
def test_nothing_comes_of_one_that_fails(gives_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "_LONGEST_WAIT_S", 600.0 if gives_up else 0.0)
    first, other = stores(2)
    assert first.claim("kernels")
    if gives_up:
        first.give_up("kernels")
    assert other.take("kernels") is None
