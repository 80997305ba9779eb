"""docs/support.md is what its command computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import support_table
from benchmarks.support_table import Case

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "support.md"
TABLE = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("|")]

ROWS: dict[str, list[Case]] = {
    "sgd_dampening": [Case("SGD", (("momentum", 0.9), ("dampening", 0.5)), how) for how in support_table.HOWS],
    "adamw_amsgrad": [Case("AdamW", (("amsgrad", True),), how) for how in support_table.HOWS],
    "radam": [Case("RAdam", (), how) for how in ("single", "foreach")],
    "lbfgs": [Case("LBFGS", (), "default")],
    "adam_capturable": [Case("Adam", (("capturable", True),), how) for how in ("single", "foreach", "fused")],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_what_the_command_computes(name: str) -> None:
    assert set(ROWS[name]) <= set(support_table.cases([ROWS[name][0].optimizer]))
    found = {case: support_table.measure(case) for case in ROWS[name]}
    assert all(one.right for one in found.values())
    (row,) = support_table.rows(found)[2:]
    assert row in TABLE


def test_every_optimizer_of_torch_is_there() -> None:
    listed = {line.split("|")[1].strip() for line in TABLE[2:]}
    assert listed == set(support_table.optimizers())


def test_every_case_has_its_row() -> None:
    outcome = support_table.Outcome("-")
    lines = support_table.rows(dict.fromkeys(support_table.cases(support_table.optimizers()), outcome))[2:]
    assert [line.split("|")[1:3] for line in lines] == [line.split("|")[1:3] for line in TABLE[2:]]


def test_nothing_is_silently_different() -> None:
    assert not [line for line in TABLE if "DIFFERENT" in line]


def test_a_difference_would_be_told() -> None:
    """The verdict on two trainings can be bad."""
    one = [[torch.zeros(2)]]
    assert support_table._verdict(one, [[torch.zeros(2)]], 1) == "bitwise"
    assert support_table._verdict(one, [[torch.full((2,), 1e-8)]], 2) == "close (1e-08), 2 traces"
    assert not support_table.Outcome(support_table._verdict(one, [[torch.ones(2)]], 1)).right
