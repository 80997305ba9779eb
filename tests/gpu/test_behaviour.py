"""The cases of tests/behaviour on GPUs, compiled by Inductor and in CUDA graphs: on one against eager code, on two
against eager DistributedDataParallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.behaviour.cases import OPTIM_CASES, STEP_CASES
from tests.behaviour.harness import Compiled, EagerDDP, Run, compare

pytestmark = pytest.mark.gpu

ELSEWHERE = {
    "adagrad_fused",  # torch has it on the CPU alone
    "asgd_single",  # its loop asks the GPU for numbers, and branches
}
ALL = {**STEP_CASES, **OPTIM_CASES}
CASES = {name: case for name, case in ALL.items() if name not in ELSEWHERE and not case.live}
ON_RANKS = [name for name, case in CASES.items() if case.ranks]
MORE_CALLS = 5
"""The third call is captured, and its graph is replayed in those after it."""
SINGLE = {"mixed_dtypes", "dtype_of_the_batch_changed"}
"""Cases with float32 in them. All others are in float64, where differences are faults and not roundings."""
TOLERANCES = {
    "weight_norm": 1e-6,  # torch's own kernel for float64 on a GPU is as exact as float32: 7e-8
    "complex_parameters": 1e-5,  # complex64
    "complex_parameters_adam": 1e-5,
    "loss_without_the_autocast_of_the_caller": 1e-5,  # torch has the norm in float32
    "muon_default": 1e-2,  # products in bfloat16
}
"""Cases that compute in another type than that of their tensors."""
CUT = {
    "adafactor_foreach", "adafactor_several_updates", "adafactor_single", "adagrad_foreach", "adagrad_several_updates",
    "adagrad_single", "asgd_foreach", "asgd_several_updates", "averaged_model_stochastic", "complex_parameters", "gan",
    "rate_as_tensor", "returns_item", "returns_items_and_arithmetic", "returns_the_rate", "rprop_foreach",
    "rprop_several_updates", "rprop_single", "values_are_checked",
}  # fmt: skip
"""Cases in which the host reads from the GPU, or gives it a number in a way that a graph cannot hold: graphs are what
stands between such calls."""
METHODS = {"found_in_self", "two_trainers_of_one_class"}
"""Steps that are called by their objects, which have programs of their own."""


def complaints(name: str, reference: Run, compiled: Compiled) -> list[str]:
    for run in (reference, compiled):
        run.device = torch.device("cuda", torch.cuda.current_device())
        run.more_calls = MORE_CALLS
    torch.set_default_dtype(torch.float32 if name in SINGLE else torch.float64)
    try:
        case = replace(CASES[name], tolerance=TOLERANCES.get(name, 0.0), tolerance_reason="see TOLERANCES")
        return compare(case, reference, compiled, rounds=True) + ([] if name in METHODS else graphless(name, compiled))
    except ws.WholestepError as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        torch.set_default_dtype(torch.float32)


def graphless(name: str, compiled: Compiled) -> list[str]:
    """What ran in no CUDA graph, or in several, and should not have."""
    told = [step.explain().backend for step in compiled.steps]
    return [one for one in told if "no CUDA graph" in one or (", cut" in one and name not in CUT)]


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    found = complaints(name, Run(), Compiled("inductor"))
    assert not found, "\n".join(found)


def on_ranks(name: str, copy_engines: Any) -> list[str]:
    return complaints(name, EagerDDP(), Compiled(ws.Inductor(copy_engines=copy_engines)))


@pytest.mark.parametrize(
    ("name", "copy_engines"), [(name, "auto" if i % 2 else False) for i, name in enumerate(ON_RANKS)]
)
def test_equals_eager_ddp(nccl2: Any, name: str, copy_engines: Any) -> None:
    found = nccl2.run(on_ranks, name, copy_engines)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told)
