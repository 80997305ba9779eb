"""All cases by name."""

from __future__ import annotations

from tests.behaviour import (
    cases_autograd,
    cases_calls,
    cases_changes,
    cases_counters,
    cases_given,
    cases_left,
    cases_models,
    cases_optim,
    cases_replaced,
    cases_results,
    cases_steps,
    cases_tensors,
)
from tests.behaviour.harness import Case

FILES = (
    cases_steps,
    cases_results,
    cases_models,
    cases_tensors,
    cases_autograd,
    cases_calls,
    cases_changes,
    cases_counters,
    cases_given,
    cases_left,
    cases_replaced,
)

STEP_CASES: dict[str, Case] = {name: case for file in FILES for name, case in file.registry.cases.items()}
assert len(STEP_CASES) == sum(len(file.registry.cases) for file in FILES), "two files name a case alike"

OPTIM_CASES: dict[str, Case] = cases_optim.registry.cases
