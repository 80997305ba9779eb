"""All cases by name."""

from __future__ import annotations

from tests.behaviour.cases import (
    autograd,
    calls,
    changes,
    counters,
    kept_tensors,
    models,
    optimizers,
    replaced_tensors,
    results,
    steps,
    tensors,
    written_arguments,
)
from tests.behaviour.harness import Case

FILES = (
    steps,
    results,
    models,
    tensors,
    autograd,
    calls,
    changes,
    counters,
    written_arguments,
    kept_tensors,
    replaced_tensors,
)

STEP_CASES: dict[str, Case] = {name: case for file in FILES for name, case in file.registry.cases.items()}
assert len(STEP_CASES) == sum(len(file.registry.cases) for file in FILES), "two files name a case alike"

OPTIM_CASES: dict[str, Case] = optimizers.registry.cases
