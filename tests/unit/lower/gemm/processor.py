"""Whether torch lets oneDNN multiply on this processor: one without AVX-512 it refuses, and torch multiplies itself."""

from __future__ import annotations

import pytest
import torch

IS_SERVED: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""It asks for the instructions of bfloat16 whatever the type of the operands."""

NEEDS_ONEDNN = pytest.mark.skipif(not IS_SERVED, reason="torch lets oneDNN multiply on processors with AVX-512")
