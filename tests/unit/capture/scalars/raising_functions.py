"""Functions that raise for values that they do not want. pytest does not rewrite the assertions of this file."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

LIMIT = 3


class Refused(ValueError):
    """An exception of the user's own."""


def asserts(x: Tensor) -> Tensor:
    assert (x < LIMIT).all(), f"below {LIMIT}, not {x}"
    return x * 2


def asserts_a_number(x: Tensor) -> Tensor:
    assert x.max().item() < LIMIT
    return x * 2


def asserts_not(x: Tensor) -> Tensor:
    assert not (x >= LIMIT).any(), "too large"
    return x * 2


def asserts_both(x: Tensor) -> Tensor:
    assert x.dim() == 1 and x.min() > -LIMIT and x.max() < LIMIT, "out of range"  # noqa: PT018
    return x * 2


def asserts_at_last(x: Tensor) -> Tensor:
    assert x.dim() == 2 or x.max() < LIMIT, "out of range"
    return x * 2


def raises(x: Tensor) -> Tensor:
    if x.max() >= LIMIT:
        raise ValueError(f"not below {LIMIT}")
    return x * 2


def raises_in_one_of_two(x: Tensor, y: Tensor | None = None) -> Tensor:
    if x.isnan().any() or x.max() >= LIMIT:
        raise RuntimeError("nan or too large")
    return x * 2


def raises_after_what_is_known(x: Tensor) -> Tensor:
    if x is not None and x.max().item() >= LIMIT:
        raise IndexError
    return x * 2


def raises_over_lines(x: Tensor) -> Tensor:
    if (
        x.max()
        >= LIMIT
    ):  # fmt: skip
        raise ArithmeticError(
            "over "
            "lines",
        )  # fmt: skip
    return x * 2


def raises_its_own(x: Tensor) -> Tensor:
    if not (x.max() < LIMIT):
        raise Refused("mine")
    return x * 2


def raises_elsewhere(x: Tensor) -> Tensor:
    if x.dim() == 3:
        return x
    elif x.max() >= LIMIT:
        raise KeyError("elif")
    else:
        return x * 2


def raises_in_what_only_ends(x: Tensor) -> Tensor:
    try:
        if x.max() >= LIMIT:
            raise ValueError("in a try without handlers")
    finally:
        x = x + 0
    return x


def distribution(x: Tensor) -> Tensor:
    """torch checks its arguments likewise, where no `torch.compile` in this process has told it not to."""
    return torch.distributions.Bernoulli(probs=x / LIMIT, validate_args=True).log_prob(torch.ones(4))


def asks_python(x: Tensor) -> Tensor:
    loss = (1 / (x.max() - 4)).item()
    if not math.isfinite(loss) or math.isnan(loss) or math.isinf(loss):
        raise FloatingPointError("not finite")
    return x * 2


def answers(x: Tensor) -> tuple[bool, dict[str, bool]]:
    """Nothing is raised: the answers are returned."""
    number = (1 / (x.max() - 4)).item()
    return math.isfinite(number), {"nan": math.isnan(number), "inf": math.isinf(number)}


def clips(x: Tensor) -> Tensor:
    """torch's clipping raises likewise if it is told to."""
    weight = torch.ones(4, requires_grad=True)
    weight.grad = 1 / (x - 4)
    torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    return weight.grad


def branches(x: Tensor) -> Tensor:
    if x.max() >= LIMIT:
        x = x - 1
    return x


def raises_and_more(x: Tensor) -> Tensor:
    if x.max() >= LIMIT:
        x = x - 1
        raise ValueError
    return x


def raises_or_else(x: Tensor) -> Tensor:
    if x.max() < LIMIT:
        return x * 2
    raise ValueError


def asks_two_of_which_one_decides(x: Tensor) -> Tensor:
    if x.max() >= LIMIT and x.min() < 0:
        raise ValueError
    return x


def asserts_one_of_two(x: Tensor) -> Tensor:
    assert x.max() < LIMIT or x.min() > 0
    return x


def asserts_a_chain(x: Tensor) -> Tensor:
    assert 0 < x.max() < LIMIT
    return x


def asserts_a_choice(x: Tensor) -> Tensor:
    assert (x.max() if x.min() > 0 else x.min()) < LIMIT
    return x


def catches(x: Tensor) -> Tensor:
    try:
        if x.max() >= LIMIT:
            raise ValueError
    except ValueError:
        x = x - 1
    return x


def calls_what_raises(x: Tensor) -> Tensor:
    try:
        return raises(x)
    except ValueError:
        return x


def catches_others(x: Tensor) -> Tensor:
    try:
        return raises(x)
    except (TypeError, KeyError):
        return x


def raises_what_was_made_before(x: Tensor) -> Tensor:
    error = ValueError("made before")
    if x.max() >= LIMIT:
        raise error
    return x


def raises_again(x: Tensor) -> Tensor:
    try:
        x.no_such_method()
    except AttributeError:
        if x.max() >= LIMIT:
            raise
    return x


def catches_its_own(x: Tensor) -> Tensor:
    try:
        if x.max() >= LIMIT:
            raise Refused
    except Refused:
        x = x - 1
    return x


def raises_with_a_format(x: Tensor) -> Tensor:
    if x.max() >= LIMIT:
        raise ValueError(f"{LIMIT} {LIMIT:.2f} {LIMIT!r}")
    return x * 2


def suppresses(x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        x = raises(x)
    return x


REFUSED = (
    branches, raises_and_more, raises_or_else, asks_two_of_which_one_decides, asserts_one_of_two, asserts_a_chain,
    asserts_a_choice, catches, catches_its_own, raises_what_was_made_before, raises_again,
)  # fmt: skip

RAISE: dict[Any, tuple[type[Exception], str | None]] = {
    asserts: (AssertionError, "below 3, not {x}"),
    asserts_a_number: (AssertionError, ""),
    asserts_not: (AssertionError, "too large"),
    asserts_both: (AssertionError, "out of range"),
    asserts_at_last: (AssertionError, "out of range"),
    raises: (ValueError, "not below 3"),
    raises_in_one_of_two: (RuntimeError, "nan or too large"),
    raises_after_what_is_known: (IndexError, ""),
    raises_over_lines: (ArithmeticError, "over lines"),
    raises_its_own: (Refused, "mine"),
    raises_elsewhere: (KeyError, "'elif'"),
    raises_in_what_only_ends: (ValueError, "in a try without handlers"),
    catches_others: (ValueError, "not below 3"),
    raises_with_a_format: (ValueError, "3 {LIMIT} {LIMIT}"),
    asks_python: (FloatingPointError, "not finite"),
    distribution: (ValueError, None),
    clips: (RuntimeError, None),
}
