"""Global switches of torch that choose kernels, with their values."""

from __future__ import annotations

import torch


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
