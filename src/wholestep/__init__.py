"""wholestep: an ordinary PyTorch training step as one graph, spread over a mesh, its communication scheduled.

>>> import wholestep as ws
>>> @ws.compile(strategy=ws.DDP())
... def train_step(model, opt, x, y): ...
"""

from wholestep.api.checkpoint import from_safetensors, load_checkpoint, load_safetensors, save_checkpoint
from wholestep.api.compiled_step import CompiledStep
from wholestep.api.entry_points import compile, load
from wholestep.api.shard import shard
from wholestep.config import DDP, FSDP, CastCompress, CommHook, Compressor, Inductor, Pad, PowerSGD, ZeRO
from wholestep.errors import (
    ArtifactError,
    CaptureError,
    CheckpointError,
    ConfigError,
    HyperparameterError,
    InternalError,
    PlacementError,
    RankMismatchError,
    RankMissingError,
    RetraceLimitError,
    VerificationError,
    WholestepError,
)
from wholestep.passes.default_passes import default_passes
from wholestep.runtime.checkpoint.pending import PendingCheckpoint
from wholestep.runtime.distributed.world import World, init, run
from wholestep.runtime.verify.verification import Verification

__all__ = [
    "DDP",
    "FSDP",
    "ZeRO",
    "Inductor",
    "Pad",
    "CastCompress",
    "PowerSGD",
    "Compressor",
    "CommHook",
    "ArtifactError",
    "CaptureError",
    "CheckpointError",
    "CompiledStep",
    "ConfigError",
    "HyperparameterError",
    "InternalError",
    "PendingCheckpoint",
    "PlacementError",
    "RankMismatchError",
    "RankMissingError",
    "RetraceLimitError",
    "Verification",
    "VerificationError",
    "WholestepError",
    "World",
    "compile",
    "default_passes",
    "from_safetensors",
    "init",
    "load",
    "load_checkpoint",
    "load_safetensors",
    "run",
    "save_checkpoint",
    "shard",
]
