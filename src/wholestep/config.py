"""What the user chose: frozen records, validated once, here, at the border."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from wholestep.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import Shard


@dataclass(frozen=True, slots=True)
class CastCompress:
    """Gradients travel in another type: cast, divided by the number of ranks if they are averaged, summed, cast back.

    The arithmetic is that of PyTorch's ``fp16_compress_hook`` and ``bf16_compress_hook``.
    """

    dtype: torch.dtype
    """A real floating-point type, such as ``torch.bfloat16``."""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ConfigError(f"CastCompress(dtype) wants a type such as torch.bfloat16, got {self.dtype!r}.")


@dataclass(frozen=True, slots=True)
class Pad:
    """A dim of an argument is made longer, up to a multiple: so there are few sizes, each with a trace of its own."""

    dim: int
    multiple: int
    value: float = 0
    """What stands in the new places. A step whose loss leaves them out (an ``ignore_index``, a mask that is padded with
    0) computes the loss that it did; one that takes means over them does not."""

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or not isinstance(self.multiple, int) or self.multiple < 1:
            raise ConfigError(f"Pad(dim, multiple) wants a dim and a multiple of 1 or more, got {self!r}.")

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with that dim longer. Dense also where it is a multiple already: one layout has one trace."""
        more = -tensor.shape[self.dim] % self.multiple
        if not more:
            return tensor.contiguous()
        dims_behind = tensor.dim() - 1 - self.dim % tensor.dim()
        return torch.nn.functional.pad(tensor, (0, 0) * dims_behind + (0, more), value=self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Gradients travel as the factors of a product of low rank: lossy, and far fewer bytes.

    Numbers are those of PyTorch's ``powerSGD_hook`` with the same options and buckets: bit by bit on two ranks, on more
    of them but for the order in which the backend adds. Calls before `start_iter` multiply by 1/ranks, as
    DistributedDataParallel does without a hook; the hook divides there, which rounds otherwise if the number of ranks
    is no power of 2. Errors and factors are state of the compiled step: keep them with `CompiledStep.state_dict`.
    Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.
    """

    rank: int = 1
    """Columns of the factors: the higher, the closer to the gradient and the more bytes. Usually 1 to 4."""
    start_iter: int = 1000
    """Calls that reduce gradients as they are before compression starts; early gradients do not bear it well. With 0
    the random factors of the first call differ from PyTorch's, whose buckets have another order in that call."""
    min_compression_rate: float = 2
    """A gradient travels whole unless it shrinks by more than this factor."""
    error_feedback: bool = True
    """Add to each gradient what the compression of the one before it lost."""
    warm_start: bool = True
    """Start from the factors of the step before, and not from random ones at every step."""
    orthogonalization_epsilon: float = 0
    """Added to the norms of columns, so that a gradient of zeros does not give NaN. A value such as 1e-8, or 0."""
    seed: int = 0
    """Of the random factors; the same on every rank."""

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_iter", 0), ("seed", 0)):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ConfigError(f"PowerSGD({name}=...) wants a whole number of at least {least}, got {number!r}.")
        if self.seed >= 2**32:
            raise ConfigError(f"PowerSGD(seed=...) wants less than 2**32, got {self.seed}.")
        for name in ("min_compression_rate", "orthogonalization_epsilon"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"PowerSGD({name}=...) wants a number of at least 0, got {getattr(self, name)!r}.")
        if (self.error_feedback or self.warm_start) and self.start_iter <= 1:
            raise ConfigError(
                f"PowerSGD(start_iter=...) wants more than 1 with error_feedback or warm_start, got {self.start_iter}: "
                f"what they remember belongs to buckets that DistributedDataParallel makes anew after its first "
                f"iteration, and both are to give the same numbers. Use start_iter=2, or turn both off."
            )


@runtime_checkable
class Compressor(Protocol):
    """A compressor of one's own: two functions on tensors, traced into the graph of the step.

    They may use any torch operator, but no values of tensors in Python, and no tensors from elsewhere.
    """

    def compress(self, flat: torch.Tensor) -> torch.Tensor:
        """What travels for a bucket, and is summed over the ranks.

        `flat` are the gradients of the bucket on this rank, one dimension; where gradients are averaged they are
        divided by the number of ranks already.
        """
        ...

    def decompress(self, wire: torch.Tensor, size: int) -> torch.Tensor:
        """The `size` gradient elements of the bucket that the sum `wire` stands for, one dimension, any type."""
        ...


@dataclass(frozen=True, slots=True)
class CommHook:
    """A communication hook of DistributedDataParallel, as its ``register_comm_hook`` takes it.

    It is called with a bucket that has the methods of ``torch.distributed.GradBucket`` and gives a future, or a tensor,
    of the reduced gradients. It is traced into the graph of the step. One that reads Python state, or cannot be traced,
    runs as it is at every call, and a CUDA graph is cut there.
    """

    hook: Callable[[Any, Any], Any]
    """``hook(state, bucket)``."""
    state: Any = None


Compress = CastCompress | PowerSGD | CommHook | Compressor


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelOptions:
    """What all strategies that spread a batch over ranks have in common."""

    reduce: Literal["mean", "sum"] = "mean"
    """How gradients are combined over the ranks."""
    bucket_bytes: int | Literal["auto"] = "auto"
    """A bucket is closed once it holds as many bytes, as DistributedDataParallel does it; "auto": the buckets with the
    shortest predicted step."""
    ignore: tuple[str, ...] = ()
    """Fully qualified names of parameters whose gradients stay local to the rank, and which are not sharded; and of
    buffers that steps do not broadcast."""
    sync_at_start: bool = True
    """Broadcast parameters and buffers from rank 0 before the first step."""
    hold_updates: bool = False
    """Write parameters after the last collective of the step, so that a step which loses a peer leaves them as they
    were. Else those of a bucket are updated as soon as it has arrived, beside the communication of the others."""
    broadcast_buffers: bool = True
    """Let every step start from rank 0's buffers, as DistributedDataParallel does. The graph of a step broadcasts
    the buffers that it writes; those that it only reads are broadcast when a step has written them since then."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.reduce not in ("mean", "sum"):
            raise ConfigError(f'{name}(reduce=...) wants "mean" or "sum", got {self.reduce!r}.')
        if self.bucket_bytes != "auto" and (not isinstance(self.bucket_bytes, int) or self.bucket_bytes <= 0):
            raise ConfigError(
                f'{name}(bucket_bytes=...) wants "auto" or a positive number of bytes, got {self.bucket_bytes!r}.'
            )
        if isinstance(self.ignore, str):
            raise ConfigError(f"{name}(ignore=...) wants a tuple of names, got the string {self.ignore!r}.")

    @property
    def limit_bytes(self) -> int | None:
        """The bytes that close a bucket; None where they are chosen."""
        return None if self.bucket_bytes == "auto" else self.bucket_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(DataParallelOptions):
    """Data parallel: every rank holds all parameters; gradients are reduced over the data axis.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """

    compress: Compress | None = None
    """What travels in the place of gradients: `CastCompress`, `PowerSGD`, a `Compressor` of one's own, or what a
    `CommHook` sends."""

    def __post_init__(self) -> None:
        DataParallelOptions.__post_init__(self)
        if self.compress is not None and not isinstance(self.compress, (CastCompress, PowerSGD, CommHook, Compressor)):
            raise ConfigError(
                f"DDP(compress=...) wants CastCompress(dtype), PowerSGD(...), CommHook(hook) or an object with the "
                f"functions compress(flat) and decompress(wire, size), got {self.compress!r}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeRO(DataParallelOptions):
    """Data parallel with optimizer state sharded over the data axis: every rank updates its part of each parameter.

    Parameters stay whole on every rank. Gradients are reduce-scattered, and updated parts are all-gathered.
    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """

    stage: Literal[1, 2] = 1
    """1: a gradient that the step leaves in ``.grad`` is whole. 2: it is this rank's part, a DTensor."""

    def __post_init__(self) -> None:
        DataParallelOptions.__post_init__(self)
        if self.stage not in (1, 2):
            raise ConfigError(f"ZeRO(stage=...) wants 1 or 2, got {self.stage!r}. Stage 3 is ws.FSDP().")


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP(DataParallelOptions):
    """Data parallel with parameters, gradients and optimizer state sharded over the data axis.

    Live parameters are those of ``torch.distributed.fsdp.fully_shard``: DTensors. On a mesh with the axes
    "dp_replicate" and "dp_shard" they are sharded over the second one and equal over the first (HSDP).
    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
    """

    reshard_after_forward: bool | Literal["auto"] = "auto"
    """True: gathered parameters are dropped after the forward and gathered again for the backward; False: they are
    kept; "auto": no more of them are gathered again than it takes to fit the GPU's memory by prediction, which the plan
    notes."""
    mp_policy: MixedPrecisionPolicy | None = None
    """The types in which parameters are gathered and gradients reduced, as `fully_shard` takes them."""
    units: tuple[str, ...] | Literal["auto"] = "auto"
    """Patterns of names of the modules that are gathered as one in eager code; "auto": repeated blocks."""
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None
    """The dim along which a parameter is sharded, as `fully_shard` takes it. By default the first one."""

    def __post_init__(self) -> None:
        DataParallelOptions.__post_init__(self)
        if self.reshard_after_forward not in (True, False, "auto"):
            raise ConfigError(
                f'FSDP(reshard_after_forward=...) wants True, False or "auto", got {self.reshard_after_forward!r}.'
            )
        if isinstance(self.units, str) and self.units != "auto":
            raise ConfigError(f'FSDP(units=...) wants a tuple of patterns or "auto", got the string {self.units!r}.')


Strategy = DDP | ZeRO | FSDP
"""The strategies that `compile` accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inductor:
    """The backend that compiles kernels."""

    cuda_graph: Literal["auto", False] = "auto"
    """"auto": a step on a GPU runs as one CUDA graph, or as a few around what the host waits for, and `explain` says
    what cuts it; False: as compiled segments, one by one."""
    copy_engines: Literal["auto", False] = "auto"
    """Whether large reductions among the GPUs of one host go through their copy engines, so that multiprocessors stay
    with computation; "auto": where the GPUs can access each other's memory. Gradients that are products in half
    precision go there as they are, and are added in float32; those of embeddings go as the rows that were looked up,
    with the same bits. False: all reductions are NCCL's."""
    early_launches: bool = False
    """Whether kernels are launched before earlier ones have ended, on NVIDIA GPUs since Hopper. Steps of many
    short kernels get shorter by 1 or 2 %, and first calls longer, since launches of this kind have to be compiled."""
    tune_products: bool = True
    """Whether products of matrices are timed in the first call and the fastest way is taken: in half precision on an
    NVIDIA GPU, of all algorithms that cublasLt names; in float32 on a CPU, of torch's library and oneDNN. False:
    torch's own choice. ``torch.use_deterministic_algorithms`` and ``torch._inductor.config.deterministic`` keep them
    with torch, too, since another process may find another one the fastest, which rounds differently."""

    def __post_init__(self) -> None:
        for name in ("early_launches", "tune_products"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"Inductor({name}=...) wants True or False, got {getattr(self, name)!r}.")
        for name in ("cuda_graph", "copy_engines"):
            chosen = getattr(self, name)
            if chosen is not False and chosen != "auto":
                raise ConfigError(f'Inductor({name}=...) wants "auto" or False, got {chosen!r}.')
