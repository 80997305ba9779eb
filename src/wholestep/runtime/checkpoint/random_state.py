"""Where the random generators of this rank stand: torch's, Python's and numpy's, as tensors and numbers."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholestep.errors import CheckpointError

State = dict[str, Any]
"""By generator. Its values are tensors, numbers, and dicts of them; or `seed`, from which all of them begin anew."""


def state(device: torch.device) -> State:
    """The generators of this process and of the device on which it computes.

    Raises CheckpointError where numpy's was exchanged for one of another kind.
    """
    version, words, gauss = random.getstate()
    drawn = np.random.get_state(legacy=False)
    if "key" not in drawn["state"]:
        raise CheckpointError(
            f"numpy.random draws by {drawn['bit_generator']}, whose state is not saved. Use MT19937, as by default."
        )
    found: State = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": str(drawn["bit_generator"]), "has_gauss": int(drawn["has_gauss"]), "gauss": float(drawn["gauss"]),
            "key": torch.from_numpy(drawn["state"]["key"].astype(np.int64)), "position": int(drawn["state"]["pos"]),
        },
    }  # fmt: skip
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(saved: State, device: torch.device) -> None:
    """Has all generators go on where `saved` was taken."""
    if "seed" in saved:
        torch.manual_seed(saved["seed"])
        random.seed(saved["seed"])
        np.random.seed(saved["seed"] % 2**32)
        return
    python, drawn = saved["python"], saved["numpy"]
    torch.set_rng_state(saved["torch"])
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    inner = {"key": drawn["key"].numpy().astype(np.uint32), "pos": drawn["position"]}
    rest = {"has_gauss": drawn["has_gauss"], "gauss": drawn["gauss"]}
    np.random.set_state({"bit_generator": drawn["kind"], "state": inner, **rest})
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)


def for_rank(saved: list[State], rank: int) -> State:
    """The state with which a rank goes on from those of another number of ranks.

    That of the rank of its number; where all were alike, that one. A rank of a higher number gets a seed of its own,
    which depends on the saved states alone.
    """
    if rank < len(saved) or all(_same(one, saved[0]) for one in saved):
        return saved[min(rank, len(saved) - 1)]
    return {"seed": zlib.crc32(bytes(saved[rank % len(saved)]["torch"].tolist())) + rank}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
