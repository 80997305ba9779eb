"""Which part of a sharded tensor each virtual rank holds, and the whole tensor of the parts of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.ir.dtensor.shards import local_length
from wholestep.ir.program import MeshAxis, ShardSpec
from wholestep.runtime.verify.rank_simulator import rank_blocks


class RankShards:
    """Cuts tensors for virtual ranks and puts them together, over one axis of their mesh."""

    def __init__(self, axis: MeshAxis, num_ranks: int) -> None:
        """`axis`: the one that tensors are cut over. Over what other axes there are, parts are equal."""
        self.num_ranks = num_ranks
        self._blocks = rank_blocks(axis, num_ranks)
        self._positions = {rank: block.index(rank) for block in self._blocks for rank in block}

    def position(self, rank: int) -> int:
        """The number of the part that a rank holds."""
        return self._positions[rank]

    def first_alike(self, rank: int, spec: ShardSpec | None) -> int:
        """The first rank that should hold the same values of a tensor as `rank`. `spec` None: of a whole one."""
        return 0 if spec is None else next(r for r, place in self._positions.items() if place == self.position(rank))

    def cut(self, whole: torch.Tensor, spec: ShardSpec, rank: int) -> torch.Tensor:
        """A copy of a rank's part, with zeros as padding: shape `ShardSpec.shard_shape`."""
        held = whole.new_zeros(spec.shard_shape)
        length = self._length(spec, rank)
        first = min(self.position(rank) * spec.shard_length, spec.whole_shape[spec.dim])
        held.narrow(spec.dim, 0, length).copy_(whole.detach().narrow(spec.dim, first, length))
        return held

    def valid(self, value: Any, spec: ShardSpec | None, rank: int) -> Any:
        """A view of a rank's part without its padding, which may hold anything."""
        if spec is None or not isinstance(value, torch.Tensor):
            return value
        return value.narrow(spec.dim, 0, self._length(spec, rank))

    def whole(self, values: Sequence[Any], spec: ShardSpec | None, rank: int = 0) -> Any:
        """The whole tensor as the group of `rank` holds it. `values`: by rank. With `spec` None, that of the rank."""
        if spec is None or not isinstance(values[rank], torch.Tensor):
            return values[rank]
        block = next(block for block in self._blocks if rank in block)
        return torch.cat([self.valid(values[one], spec, one) for one in block], dim=spec.dim)

    def _length(self, spec: ShardSpec, rank: int) -> int:
        return local_length(spec.whole_shape[spec.dim], spec.num_ranks, self.position(rank))


class RankValues:
    """Values of virtual ranks by id of a tensor of the user's, each whole or in parts."""

    def __init__(self, shards: RankShards) -> None:
        self._shards = shards
        self.by_rank: list[dict[int, Any]] = [{} for _ in range(shards.num_ranks)]
        self.specs: dict[int, ShardSpec] = {}
        """How those are cut that are held in parts."""

    def cut_as(self, key: int, spec: ShardSpec | None) -> None:
        """From now on every rank holds the value as `spec` says; None: whole."""
        held = self.specs.get(key)
        if held == spec:
            return
        values = [of_rank[key] for of_rank in self.by_rank]
        for rank, of_rank in enumerate(self.by_rank):
            whole = self._shards.whole(values, held, rank)
            if spec is not None and isinstance(whole, torch.Tensor):
                whole = self._shards.cut(whole, spec, rank)
            of_rank[key] = whole
        self.note(key, spec)

    def note(self, key: int, spec: ShardSpec | None) -> None:
        """Records how a value is cut that was put here."""
        self.specs.pop(key, None)
        if spec is not None:
            self.specs[key] = spec
