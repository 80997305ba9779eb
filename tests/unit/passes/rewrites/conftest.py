"""What several tests of rewrites share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.passes.rewrites.cross_entropy import in_words_of_aten


@pytest.fixture(scope="module")
def kernel() -> Iterator[None]:
    """`CROSS_ENTROPY` in the words of ATen; the kernel itself: `tests/unit/lower/kernels/test_cross_entropy.py`."""
    library = torch.library.Library("wholestep", "IMPL")
    library.impl("cross_entropy", in_words_of_aten, "CPU")
    yield
    library._destroy()
