"""dedupe does the same collective of the same value once."""

from __future__ import annotations

import torch

from tests.unit import builders
from tests.unit.builders import c10d
from wholestep.ir import node_meta, op_info
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.cse import eliminate_common_subexpressions


def reduce(x: torch.Tensor, how: str = "sum") -> torch.Tensor:
    return op_info.WAIT(c10d.all_reduce.default(x, how, builders.world_group()))


def deduped(fn, tensors, num_collectives):
    program = builders.place(builders.capture(fn, tensors))
    after = run_passes(program, [eliminate_common_subexpressions])
    assert builders.same(builders.execute(after, tensors), builders.execute(program, tensors))
    assert builders.count(after, *op_info.COLLECTIVES) == num_collectives
    assert builders.count(after, op_info.WAIT) == num_collectives
    return after


def test_the_same_collective_is_done_once():
    after = deduped(lambda x: (reduce(x) + 1, reduce(x) * 2), [torch.randn(3)], 1)
    assert after.history[0].notes == ("dropped 1 collectives and 0 host scalars that repeat another one",)


def test_also_where_the_second_starts_before_the_first_is_waited_for():
    def fn(x):
        group = builders.world_group()
        one, two = (c10d.all_gather_into_tensor.default(x, 1, group) for _ in range(2))
        return op_info.WAIT(two) + 1, op_info.WAIT(one) * 2

    deduped(fn, [torch.randn(3)], 1)


def test_what_each_phase_gathers_for_itself_stays_so():
    def fn(x):
        group = builders.world_group()
        return tuple(op_info.WAIT(c10d.all_gather_into_tensor.default(x, 1, group)) for _ in range(3))

    program = builders.place(builders.capture(fn, [torch.randn(3)]))
    starts = program.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    for start, phase in zip(starts, ("forward", "backward", "forward"), strict=True):
        node_meta.set_bucket(start, node_meta.Bucket(0, ("w",), 12, "", kind=node_meta.BucketKind.GATHER, phase=phase))
    after = run_passes(program, [eliminate_common_subexpressions])
    left = after.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    buckets = [node_meta.bucket(start) for start in left]
    assert [(one.kind, one.phase, one.members) for one in buckets] == [
        (node_meta.BucketKind.GATHER, phase, ("w",)) for phase in ("forward", "backward")
    ]


def test_other_values_and_other_arguments_are_other_collectives():
    deduped(lambda x, y: (reduce(x), reduce(y), reduce(x, "max"), reduce(x + 0)), [torch.randn(3), torch.randn(3)], 4)


def test_a_chain_of_repeats():
    deduped(lambda x: reduce(reduce(x)) + reduce(reduce(x)), [torch.randn(3)], 2)


def test_a_gradient_of_two_parameters_is_one_member_for_both():
    def fn(x):
        grad = x * 2
        return builders.gradient(grad, "a"), builders.gradient(grad, "b")

    program = builders.place(builders.capture(fn, [torch.randn(3)]), mean=False)
    after = run_passes(program, [eliminate_common_subexpressions])
    (start,) = after.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    assert node_meta.bucket(start).members == ("a", "b")
