"""What virtual ranks own: copies of state, and slices of a batch."""

from __future__ import annotations

import torch

from wholestep.capture.functionalize.storage_resize import is_freed
from wholestep.capture.reach.train_state import TrainState
from wholestep.ir.program import InputKind
from wholestep.runtime.verify.rank_state import Batch, copies_of
from wholestep.runtime.verify.state_backup import freed_like, overwrite


def test_copies_that_shared_memory_share_it_again_and_no_other() -> None:
    base = torch.arange(12.0)
    views = [base[2:8].view(2, 3).t(), base[4:6], torch.ones(1).expand(3), 5]
    one, part, wide, number = copies_of(views)
    assert torch.equal(one, views[0])
    assert (one.stride(), wide.stride(), number) == (views[0].stride(), (0,), 5)
    part.fill_(-1)
    assert one.t().flatten().tolist() == [2, 3, -1, -1, 6, 7]
    assert base.tolist() == list(range(12))


def test_copies_of_what_has_no_memory_have_none() -> None:
    freed, sparse = freed_like(torch.ones(3, 2).t()), torch.eye(3).to_sparse()
    one, other, empty = copies_of([freed, sparse, torch.ones(0, 3)])
    assert is_freed(one)
    assert one.stride() == freed.stride()
    assert torch.equal(other.to_dense(), torch.eye(3))
    assert empty.shape == (0, 3)


def test_memory_comes_and_goes_with_what_is_written() -> None:
    target = torch.ones(3, 2)
    overwrite(target, freed_like(target))
    assert is_freed(target)
    overwrite(target, torch.full((3, 2), 4.0))
    assert torch.equal(target, torch.full((3, 2), 4.0))


def test_rows_are_divided_in_order_and_move_on() -> None:
    x, weight, mine = torch.arange(8.0).view(4, 2), torch.ones(3), torch.ones(4)
    state = TrainState()
    state.add(InputKind.TENSOR, "mine", mine)
    x.requires_grad_()
    batch = Batch((x, weight, x), {"mine": mine, "flag": True}, state, 2)
    first, second = (batch.of_rank(rank, 0) for rank in range(2))
    assert first[0] is first[2]  # one tensor, given twice
    assert first[0].requires_grad
    assert first[0].is_leaf
    assert (first[0].tolist(), second[0].tolist()) == ([[0, 1], [2, 3]], [[4, 5], [6, 7]])
    assert first[3] is mine  # state is no row of the batch, whatever its size
    assert first[4] is True
    assert first[1] is not weight
    assert batch.of_rank(0, 1)[0].tolist() == [[6, 7], [0, 1]]
    (whole, *_), kwargs = batch.whole(1)
    assert whole.tolist() == [[6, 7], [0, 1], [2, 3], [4, 5]]
    assert kwargs == {"mine": mine, "flag": True}


def test_the_batch_size_is_what_most_tensors_share() -> None:
    batch = Batch((torch.ones(5, 5), torch.ones(4, 2), torch.ones(4)), {}, TrainState(), 2)
    assert batch.num_rows == 4
    assert "1 other tensors were given whole" in batch.note()
