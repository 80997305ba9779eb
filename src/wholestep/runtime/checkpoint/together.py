"""What all ranks do around a checkpoint: agree on a number, fail together, name who failed."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from wholestep.errors import CheckpointError, WholestepError
from wholestep.runtime.distributed.failure_report import explain_failure, named_failures
from wholestep.runtime.distributed.world import World

T = TypeVar("T")


def common_number(world: World) -> int:
    """A number that no one has had before, the same on all ranks."""
    number = torch.tensor([secrets.randbits(62)], device=world.device)
    if world.size > 1:
        with named_failures(world, lambda: "a checkpoint"):
            dist.broadcast(number, 0)
    return int(number.item())


def check_same(world: World, text: str, otherwise: str) -> None:
    """Raises CheckpointError, which says `otherwise`, where the text of this rank is not that of rank 0."""
    own = zlib.crc32(text.encode())
    number = torch.tensor([own], device=world.device)
    if world.size > 1:
        with named_failures(world, lambda: "a checkpoint"):
            dist.broadcast(number, 0)
    if int(number.item()) != own:
        raise CheckpointError(otherwise)


def on_all_ranks(world: World, what: str, do: Callable[[], T]) -> T:
    """What `do` gives, once it has succeeded on all ranks; else an error on all of them, and nobody goes on alone."""
    error: Exception | None = None
    result: list[T] = []
    try:
        result.append(do())
    except Exception as raised:
        error = raised
    if world.size > 1:
        failed = torch.tensor([world.size if error is None else world.rank], device=world.device)
        with named_failures(world, lambda: what):
            dist.all_reduce(failed, dist.ReduceOp.MIN)
        first = int(failed.item())
        if error is None and first < world.size:
            raise CheckpointError(f"{what} was given up: rank {first} raised an error, which its output shows.")
    if error is not None:
        raise error
    return result[0]


@contextmanager
def explained(world: World, what: str) -> Iterator[None]:
    """While open, errors of torch's checkpoints are ours: what failed, on which rank.

    Raises:
        CheckpointError: a file could not be read or written, or a value could not be saved.
        RankMissingError: a rank did not come, or died.
    """
    try:
        yield
    except CheckpointException as error:
        raise _explained(error, what) from error
    except Exception as error:
        missing = explain_failure(error, world, what)
        if missing is None:
            raise
        raise missing from error


def _explained(error: CheckpointException, what: str) -> CheckpointError:
    rank, (cause, _) = min(error.failures.items())
    where = f" on rank {rank}" if len(error.failures) == 1 else f" on ranks {sorted(error.failures)}"
    text = str(cause) if isinstance(cause, WholestepError) else f"{type(cause).__name__}: {cause}"
    return CheckpointError(f"{what} failed{where}: {text}")
