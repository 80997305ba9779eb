"""Architectures of Hugging Face transformers against plain eager code on one process."""

from __future__ import annotations

import pytest
import torch

import wholestep as ws
from tests.behaviour.harness import Run, check
from tests.behaviour.transformers_cases import ARCHITECTURES, registry
from tests.behaviour.untouched import untouched
from tests.harness.training import backward_and_step


def chosen() -> list[str]:
    """Of each architecture what has no dropout, or no variant without; `tests/ranks/test_transformers_ddp.py` has those
    with dropout."""
    names = [*registry.cases]
    return [name for name in names if name.rpartition("_")[0] not in names or name.endswith("_draws")]


@pytest.mark.parametrize("name", chosen())
def test_equals_eager(name: str) -> None:
    complaints = check(registry.cases[name], Run())
    assert not complaints, "\n".join(complaints)


def test_experts_with_shapes_that_follow_the_routing_are_refused() -> None:
    """The eager implementation of experts gives every expert the tokens that chose it: no static shapes."""
    architecture = ARCHITECTURES["mixtral"]
    module = architecture.model._from_config(
        architecture.config(**architecture.options), experts_implementation="eager"
    ).train()
    opt = torch.optim.AdamW(module.parameters(), lr=1e-2)

    @ws.compile(backend="eager", fullgraph=True)
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return backward_and_step(module(**batch).loss, opt)

    with untouched(module=module, opt=opt), pytest.raises(ws.CaptureError, match=r"\.py:\d+"):
        step(architecture.batch(torch.Generator().manual_seed(0)))
