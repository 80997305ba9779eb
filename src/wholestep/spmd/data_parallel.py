"""Parallel modes of the older surface."""

from __future__ import annotations

from collections.abc import Callable

import torch.fx as fx

from wholestep.config import DDP
from wholestep.errors import ConfigError


class DataParallel:
    """Data parallel over all ranks: parameters are whole on every rank, gradients are summed.

    Args:
        parallel_style: ``"replicate"``. ``"fully_shard"`` is known, and refused until parameters can be sharded.
        input_batch_dim: the dimension of the arguments that counts samples. Each rank passes its own batch, so
            nothing is split here and any dimension is right.
        custom_passes: rewrites the placed graph, after the overrides and before ``gm_transformation``.

    Raises:
        ConfigError: for another style.
    """

    def __init__(
        self,
        parallel_style: str = "replicate",
        *,
        input_batch_dim: int = 0,
        custom_passes: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> None:
        if parallel_style == "fully_shard":
            raise ConfigError(
                'DataParallel("fully_shard") wants parameters in shards, which no strategy places yet. '
                'Use DataParallel("replicate"), which holds them whole on every rank.'
            )
        if parallel_style != "replicate":
            raise ConfigError(
                f'DataParallel(parallel_style=...) wants "replicate" or "fully_shard", got {parallel_style!r}.'
            )
        self.parallel_style, self.input_batch_dim, self.custom_passes = parallel_style, input_batch_dim, custom_passes

    @property
    def strategy(self) -> DDP:
        """The strategy that placement gets."""
        return DDP(reduce="sum")
