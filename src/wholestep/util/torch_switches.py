"""Global switches of torch with their values: those that choose kernels, and those that change what code means."""

from __future__ import annotations

from typing import Any

import torch


def looks_for_nan() -> bool:
    """Whether autograd looks at the values of all gradients."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def torch_modes() -> tuple[tuple[str, Any], ...]:
    """Global switches of torch that change what a trace means."""
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast on CPU", torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")),
        ("autocast on CUDA", torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")),
        ("autocast's cache of weights", torch.is_autocast_cache_enabled()),
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
