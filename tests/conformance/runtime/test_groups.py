"""What torch.distributed promises of groups: sequence numbers, ranks, and groups that only their members make.

A version of torch that breaks one of these promises is seen here, and not in a training that hangs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.store_group import StoreGroup
from wholestep.runtime.distributed.world import init

row = pytest.mark.row


def sequence_number(group: dist.ProcessGroup) -> int:
    number: int = group._get_sequence_number_for_group()
    return number


def shown(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of every rank of a group, which should not be the one whose numbers are looked at."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def first_numbers(of: str) -> tuple[int, list[Any]]:
    init()
    group = dist.group.WORLD if of == "default" else dist.new_group([0, 1])
    return sequence_number(group), shown(sequence_number(group), dist.new_group([0, 1], backend="gloo"))


@row("S9", "sequence_num_set_default_pg")
def test_all_ranks_have_one_number_in_the_default_group(ranks2: Any) -> None:
    ranks2.renew()  # a message between two ranks counts as well: an earlier test may have sent one
    for _, numbers in ranks2.run(first_numbers, "default"):
        assert len(set(numbers)) == 1


@row("S9", "sequence_num_set_new_group")
def test_all_ranks_have_one_number_in_a_new_group(ranks2: Any) -> None:
    for mine, numbers in ranks2.run(first_numbers, "new"):
        assert numbers == [mine, mine]


def count_collectives(of: str) -> None:
    """The numbers go up together; then all but two ranks run ahead by one, which the numbers show."""
    world = init()
    ranks = list(range(world.size)) if of == "default" else [0, 1, 2]
    group = dist.group.WORLD if of == "default" else dist.new_group(ranks)
    control = dist.new_group(ranks, backend="gloo")
    if world.rank not in ranks:
        return
    tensor = torch.ones(1, device=world.device)
    dist.all_reduce(tensor, group=group)
    start = sequence_number(group)
    for done in range(1, 6):
        dist.all_reduce(tensor, group=group)
        assert shown(sequence_number(group), control) == [start + done] * len(ranks)
    lags = world.rank in (0, 2)
    started = None if lags else dist.all_reduce(tensor, group=group, async_op=True)
    numbers = shown(sequence_number(group), control)
    assert numbers == [start + 5 + (rank not in (0, 2)) for rank in ranks]
    (dist.all_reduce(tensor, group=group, async_op=True) if lags else started).wait()
    assert shown(sequence_number(group), control) == [start + 6] * len(ranks)


@row("S9", "sequence_num_incremented_default_group")
def test_numbers_count_the_collectives_of_the_default_group(ranks4: Any) -> None:
    ranks4.renew()  # a message between two of the ranks counts as well: an earlier test may have sent one
    ranks4.run(count_collectives, "default")


@row("S9", "sequence_num_incremented_subgroup")
def test_numbers_count_the_collectives_of_a_subgroup(ranks4: Any) -> None:
    ranks4.run(count_collectives, "sub")


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def calls_a_group_of_others() -> dict[str, list[str]]:
    world = init()
    group = dist.new_group([0])
    x = torch.ones(2, 2, device=world.device)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather([torch.zeros_like(x)], x, group=group),
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "broadcast": lambda: dist.broadcast(x, src=0, group=group),
    }
    found = {name: warned(call) for name, call in calls.items()}
    assert torch.equal(x, torch.ones_like(x))
    return found


@row("S9", "warn_not_in_group")
def test_a_collective_on_a_group_of_others_warns(ranks2: Any) -> None:
    inside, outside = ranks2.run(calls_a_group_of_others)
    for name, texts in outside.items():
        assert [text for text in texts if name in text and "does not belong to" in text], name
        assert not [text for text in inside[name] if "does not belong to" in text]


def looks_up_ranks() -> None:
    init()
    group = dist.new_group([1])
    stranger = StoreGroup(dist.HashStore(), 0, 2)
    assert dist.get_group_rank(group, 1) == 0
    assert dist.get_global_rank(group, 0) == 1
    assert dist.get_process_group_ranks(group) == [1]
    with pytest.raises(ValueError, match="not part of group"):
        dist.get_group_rank(group, 0)
    with pytest.raises(ValueError, match="not part of group"):
        dist.get_global_rank(group, 1)
    for look_up in (dist.get_group_rank, dist.get_global_rank):
        with pytest.raises(ValueError, match="not registered"):
            look_up(stranger, 0)
    for rank in range(2):
        assert dist.get_group_rank(dist.group.WORLD, rank) == rank == dist.get_global_rank(dist.group.WORLD, rank)


def looks_up_ranks_where_it_may() -> None:
    # Who is not in a group has no group to ask about.
    if init().rank == 1:
        looks_up_ranks()
    else:
        assert dist.new_group([1]) == dist.GroupMember.NON_GROUP_MEMBER


@row("S9", "rank_membership")
def test_ranks_in_groups_and_in_the_world_are_told_both_ways(ranks2: Any) -> None:
    ranks2.run(looks_up_ranks_where_it_may)


def makes_groups_with_its_partner() -> None:
    """Each rank with the one two further on: [0, 2] and [1, 3]; nobody else takes part."""
    rank = init().rank
    members = [rank, (rank + 2) % 4]
    others = sorted(set(range(4)) - set(members))
    assert dist.new_group(others, use_local_synchronization=True) is None
    group = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    assert dist.get_process_group_ranks(group) == sorted(members)
    assert dist.get_group_rank(group, rank) == sorted(members).index(rank)


@row("S9", "new_group_local_sync")
def test_members_alone_can_make_a_group(ranks4: Any) -> None:
    ranks4.renew()  # torch names such a group after its members and the number of groups that a member has
    ranks4.run(makes_groups_with_its_partner)


def gathers_in_halves(count: int) -> None:
    world = init()
    half = world.rank // 2
    members = [2 * half, 2 * half + 1]
    groups = [dist.new_group(members, use_local_synchronization=True) for _ in range(count)]
    assert len({group.group_name for group in groups}) == count
    for number, group in enumerate(groups):
        mine = torch.tensor([number, half, world.rank], device=world.device)
        into = [torch.full_like(mine, -1) for _ in members]
        dist.all_gather(into, mine, group=group)
        assert [one.tolist() for one in into] == [[number, half, member] for member in members]


@row("S9", "new_group_local_sync_sanity_check")
def test_such_groups_carry_collectives(ranks4: Any) -> None:
    ranks4.renew()
    ranks4.run(gathers_in_halves, 1)


@row("S9", "new_group_local_sync_duplicate_pg")
def test_two_such_groups_have_the_same_members(ranks4: Any) -> None:
    ranks4.renew()
    ranks4.run(gathers_in_halves, 2)
