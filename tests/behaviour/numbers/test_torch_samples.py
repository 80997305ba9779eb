"""Operators and modules of torch with the samples of its own tests: a few of them here, all by a command.

``python -m benchmarks.torch_samples`` runs the rest.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.torch_samples.cases import Case, Choice, Training, module_cases, operator_cases, plain_random_state
from benchmarks.torch_samples.judge import ROUNDS, judged

OPERATORS = (
    "add", "cat", "cumsum", "index_put", "linalg.qr", "nn.functional.dropout", "nn.functional.interpolate.bicubic",
    "nn.functional.scaled_dot_product_attention", "normal", "sort", "to_sparse", "unique",
)  # fmt: skip
MODULES = ("nn.BatchNorm1d", "nn.LazyConv1d", "nn.LSTM", "nn.MultiheadAttention")


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("asks", [False, True], ids=["pure", "live"])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_does_what_it_does_in_eager_code(name: str, asks: bool, may_go_live: bool) -> None:
    with plain_random_state():
        found = list(operator_cases(Choice(samples=4, only=(name,), asks=asks)))
        assert found
        verdicts = [judged(one, "eager", "cpu") for one in found]
        assert [one.complaint for one in verdicts] == [""] * len(found)
        assert all(one.compared for one in verdicts)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_does_what_it_does_in_eager_code(name: str) -> None:
    with plain_random_state():
        found = list(module_cases(Choice(samples=2, only=(name,))))
        assert found
        verdicts = [judged(one, "eager", "cpu") for one in found]
        assert [one.complaint for one in verdicts] == [""] * len(found)
        assert all(one.compared for one in verdicts)


def test_torchs_own_tests_leave_the_process_as_it_was() -> None:
    with plain_random_state():
        assert list(operator_cases(Choice(samples=1, only=("add",))))
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark


class Faulty:
    """A training that differs once it is compiled."""

    def __init__(self, how: str) -> None:
        self.how, self.built = how, 0

    def __call__(self) -> Training:
        self.built += 1
        how, value = self.how if self.built == 3 else "", torch.zeros(2)

        def step(x: torch.Tensor) -> torch.Tensor:
            if how == "raises":
                raise ValueError(how)
            if how == "draws":
                torch.rand(1)
            if how == "writes":
                value.add_(1)
            return x * (2 + (how == "values") * 1e-5)

        return Training(step, lambda: [value])


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("", ""), ("raises", "raised ValueError: raises"), ("draws", "the generator is elsewhere"),
        ("writes", "differs by 1.0e+00"), ("values", "differs by"),
    ],
)  # fmt: skip
def test_what_differs_is_told(how: str, told: str, may_go_live: bool) -> None:
    verdict = judged(Case("made up", Faulty(how), [((torch.ones(2, 3),), {})]), "eager", "cpu")
    assert verdict.complaint == told or (told and f"sample 0: {told}" in verdict.complaint)
    assert verdict.compared == (0 if told else ROUNDS)
