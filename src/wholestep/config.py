"""What the user chose: frozen records, validated once, here, at the border."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wholestep.errors import ConfigError

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""What ``bucket_bytes="auto"`` means until costs are measured: the default of DistributedDataParallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP:
    """Data parallel: every rank holds all parameters; gradients are reduced over the data axis.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """

    reduce: Literal["mean", "sum"] = "mean"
    """How gradients are combined over the ranks."""
    bucket_bytes: int | Literal["auto"] = "auto"
    """Upper bound of the bytes in one all-reduce; "auto" is 25 MiB until costs are measured."""
    ignore: tuple[str, ...] = ()
    """Fully qualified names of parameters whose gradients stay local to the rank."""
    sync_at_start: bool = True
    """Broadcast parameters and buffers from rank 0 before the first step."""
    broadcast_buffers: bool = True
    """Let every step start from rank 0's buffers, as DistributedDataParallel does. The graph of a step broadcasts
    the buffers that it writes; those that it only reads are broadcast when a step has written them since then."""

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum"):
            raise ConfigError(f'DDP(reduce=...) wants "mean" or "sum", got {self.reduce!r}.')
        if self.bucket_bytes != "auto" and (not isinstance(self.bucket_bytes, int) or self.bucket_bytes <= 0):
            raise ConfigError(
                f'DDP(bucket_bytes=...) wants "auto" or a positive number of bytes, got {self.bucket_bytes!r}.'
            )
        if isinstance(self.ignore, str):
            raise ConfigError(f"DDP(ignore=...) wants a tuple of parameter names, got the string {self.ignore!r}.")

    @property
    def cap_bytes(self) -> int:
        """The bound in bytes that bucketing uses."""
        return DEFAULT_BUCKET_BYTES if self.bucket_bytes == "auto" else self.bucket_bytes


Strategy = DDP
"""The strategies that `compile` accepts; sharded ones join this union."""
