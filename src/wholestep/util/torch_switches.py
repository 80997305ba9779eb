"""Global switches of torch with their values: those that choose kernels, and those that change what code means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import parametrize


def looks_for_nan() -> bool:
    """Whether autograd looks at the values of all gradients."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def keeps_parametrized_weights() -> bool:
    """Whether a parametrized weight is computed once, for all calls of its module (``parametrize.cached()``)."""
    return bool(parametrize._cache_enabled)


@contextmanager
def parametrized_weights_anew() -> Iterator[None]:
    """While open, each call of a module computes its parametrized weights; then those that were kept are so again."""
    enabled, kept = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = enabled, kept


def torch_modes() -> tuple[tuple[str, Any], ...]:
    """Global switches of torch that change what a trace means."""
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast on CPU", torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")),
        ("autocast on CUDA", torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")),
        ("autocast's cache of weights", torch.is_autocast_cache_enabled()),
        ("cache of parametrized weights", keeps_parametrized_weights()),
        ("detection of anomalies", looks_for_nan()),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("float32 matmul precision", torch.get_float32_matmul_precision()),
        *torch_switches(),
    )


def torch_switches() -> list[tuple[str, str]]:
    """Global switches of torch that choose kernels. Native guards know the same ones, as `Switches`."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return [
        ("flash attention", str(cuda.flash_sdp_enabled())),
        ("memory-efficient attention", str(cuda.mem_efficient_sdp_enabled())),
        ("cuDNN attention", str(cuda.cudnn_sdp_enabled())),
        ("attention by plain operators", str(cuda.math_sdp_enabled())),
        ("TF32 of matrix products", str(cuda.matmul.allow_tf32)),
        ("TF32 of cuDNN", str(cudnn.allow_tf32)),
        ("cuDNN", str(cudnn.enabled)),
        ("benchmarks of cuDNN", str(cudnn.benchmark)),
        ("deterministic kernels of cuDNN", str(cudnn.deterministic)),
        ("MKLDNN", str(mkldnn.enabled)),
    ]
