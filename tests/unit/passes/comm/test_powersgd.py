"""PowerSGD on tensors: which gradients it takes, and what several ranks get that run it side by side."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wholestep.config import PowerSGD
from wholestep.passes.compress.powersgd import Factor, Reduced, exchange, find_factors, orthogonalize

BARE = {"start_iter": 0, "error_feedback": False, "warm_start": False}


def test_what_shrinks_enough_is_taken_and_one_shape_follows_the_other():
    shapes = [(6, 4), (5,), (8, 8), (), (20, 3, 2), (6, 4), (0, 9), (9, 9)]
    # (6 + 4) * 2 < 24 and (8 + 8) * 2 < 64; a vector is a matrix of one column, which does not shrink.
    assert find_factors(shapes, PowerSGD(rank=1)) == [
        Factor(0, 6, 4, 1), Factor(5, 6, 4, 1), Factor(2, 8, 8, 1), Factor(4, 20, 6, 1), Factor(7, 9, 9, 1),
    ]  # fmt: skip
    assert find_factors(shapes, PowerSGD(rank=2)) == [Factor(4, 20, 6, 2), Factor(7, 9, 9, 2)]  # 64 is not below 64
    assert find_factors([(2, 100)], PowerSGD(rank=9, min_compression_rate=0)) == [Factor(0, 2, 100, 2)]
    assert find_factors(shapes, PowerSGD(min_compression_rate=1e9)) == []


def side_by_side(
    grads: Sequence[Sequence[Tensor]], errors: Sequence[Sequence[Tensor]], qs: Sequence[Tensor], config: PowerSGD
) -> tuple[list[Reduced], list[dict[str, int]]]:
    """Every rank's result, and the elements of each message."""
    ranks = [
        exchange(one, error, qs, config=config, num_ranks=len(grads)) for one, error in zip(grads, errors, strict=True)
    ]
    answers: list[dict[str, Tensor] | None] = [None] * len(ranks)
    sent: list[dict[str, int]] = []
    while True:
        messages, done = [], []
        for rank, answer in zip(ranks, answers, strict=True):
            try:
                messages.append(rank.send(answer))
            except StopIteration as end:
                done.append(end.value)
        if done:
            assert not messages
            return done, sent
        sent.append({name: one.numel() for name, one in messages[0].items()})
        sums = {name: torch.stack([one[name] for one in messages]).sum(0) for name in messages[0]}
        answers = [{name: one.clone() for name, one in sums.items()} for _ in ranks]


def data(shapes: Sequence[tuple[int, ...]], config: PowerSGD, num_ranks: int = 3):
    draw = torch.Generator().manual_seed(0)
    grads = [[torch.randn(s, dtype=torch.float64, generator=draw) for s in shapes] for _ in range(num_ranks)]
    qs = [torch.randn(one.cols, one.rank, dtype=torch.float64, generator=draw) for one in find_factors(shapes, config)]
    return grads, [[torch.zeros_like(g) for g in rank] for rank in grads], qs


def test_all_ranks_get_the_same_and_messages_have_the_stated_sizes():
    config, shapes = PowerSGD(rank=2), [(20, 9), (7,), (10, 4, 6)]
    grads, errors, qs = data(shapes, config)
    found, sent = side_by_side(grads, errors, qs, config)
    assert sent == [{"uncompressed": 7, "P": (20 + 10) * 2}, {"Q": (9 + 24) * 2}]
    for one in found[1:]:
        assert all(map(torch.equal, [*one.grads, *one.qs], [*found[0].grads, *found[0].qs]))
    mean = [sum(ranks) / 3 for ranks in zip(*grads, strict=True)]
    assert torch.allclose(found[0].grads[1], mean[1], rtol=0, atol=1e-15)
    assert torch.linalg.matrix_rank(found[0].grads[0]) == torch.linalg.matrix_rank(found[0].grads[2].flatten(1)) == 2
    for rank, one in enumerate(found):
        for grad, got, error in zip(grads[rank], one.grads, one.errors, strict=True):
            assert torch.equal(error, grad - got)


def test_a_mean_of_low_rank_arrives_whole():
    config = PowerSGD(rank=2)
    grads, errors, qs = data([(12, 15)], config)
    left, right = torch.randn(12, 2, dtype=torch.float64), torch.randn(15, 2, dtype=torch.float64)
    grads = [[left @ torch.diag(torch.tensor([1.0, rank], dtype=torch.float64)) @ right.T] for rank in range(1, 4)]
    found, _ = side_by_side(grads, errors, qs, config)
    mean = sum(one for (one,) in grads) / 3
    assert torch.allclose(found[0].grads[0], mean, rtol=0, atol=1e-13 * float(mean.norm()))


def test_what_was_lost_arrives_in_the_end():
    """Error feedback: the sum over the steps of what arrives follows the sum of what was meant to."""
    config = PowerSGD(rank=1)
    grads, errors, qs = data([(16, 16)], config)
    mean, arrived, num_steps = sum(one for (one,) in grads) / 3, torch.zeros(16, 16, dtype=torch.float64), 200
    blind = side_by_side(grads, [[] for _ in grads], qs, config)[0][0].grads[0]
    for step in range(1, num_steps + 1):
        found, _ = side_by_side(grads, errors, qs, config)
        errors, qs = [one.errors for one in found], found[0].qs
        arrived += found[0].grads[0]
        left = sum(one.errors[0] for one in found) / 3
        assert torch.allclose(arrived + left, mean * step, rtol=0, atol=1e-9)  # nothing is lost for good
    assert (arrived / num_steps - mean).norm() < 0.2 * (blind - mean).norm()


@given(
    rows=st.integers(1, 12), rank=st.integers(1, 5), batch=st.integers(1, 2), seed=st.integers(0, 99),
    half=st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_columns_become_orthonormal_and_span_the_same(rows, rank, batch, seed, half):
    rank = min(rank, rows)
    matrices = torch.randn(batch, rows, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    given_matrices = matrices.to(torch.bfloat16) if half and rank == 1 else matrices
    found = orthogonalize(given_matrices, 0)
    assert found.dtype == given_matrices.dtype
    assert found.is_contiguous()
    eps = torch.finfo(found.dtype).eps
    # Gram-Schmidt of two columns and Householder's QR: errors grow with the condition of what is given at most.
    bound = 50 * eps * max(float(torch.linalg.cond(matrices).max()), rows)
    gram = found.double().mT @ found.double()
    assert torch.allclose(gram, torch.eye(rank, dtype=torch.float64).expand_as(gram), rtol=0, atol=bound)
    again = found.double() @ (found.double().mT @ matrices)
    assert torch.allclose(again, matrices, rtol=0, atol=bound * float(matrices.norm()))


@pytest.mark.parametrize("rank", [1, 2])
def test_epsilon_keeps_zeros_from_becoming_nan(rank):
    zeros = torch.zeros(1, 4, rank)
    assert orthogonalize(zeros, 0).isnan().all()
    assert torch.equal(orthogonalize(zeros, 1e-8), zeros)
