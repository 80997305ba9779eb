"""reinplace around collectives: fences, waits, failures, and messages that are overwritten."""

from __future__ import annotations

import pytest
import torch

from tests.unit import builders
from tests.unit.builders import c10d
from tests.unit.passes.memory.reinplaced import check_placed, copies, reduce
from wholestep.ir import node_meta, op_info
from wholestep.lower.base import eager_backend
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes


def test_no_input_is_written_before_the_last_wait():
    def fn(mean, a, b, x):
        mean.lerp_(x.mean(0), 0.1)
        a.sub_(reduce(x.sum(0)))
        b.sub_(reduce(x.square().sum(0)))

    tensors = [torch.randn(3), torch.randn(3), torch.randn(3), torch.randn(5, 3)]
    after = check_placed(fn, tensors)
    assert copies(after) == 0
    calls = builders.calls(after)
    last = max(index for index, call in enumerate(calls) if "wait_tensor" in call)
    writes = [index for index, call in enumerate(calls) if call in ("aten.lerp_.Scalar", "aten.sub_.Tensor")]
    assert len(writes) == 3
    assert min(writes) > last


class FailAtWait(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails in the n-th wait."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number
        self.started: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is op_info.WAIT:
            self.left -= 1
            if not self.left:
                raise RuntimeError("a peer is gone")
        result = func(*args, **(kwargs or {}))
        if func in op_info.COLLECTIVES:
            self.started.append(result)
        return result

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        for tensor in self.started:  # work that nobody waits for makes torch complain at the end of the process
            op_info.WAIT(tensor)


@pytest.mark.parametrize("number", [1, 2])
def test_a_collective_that_fails_leaves_every_input_as_it_was(number):
    def fn(mean, a, b, x):
        mean.lerp_(x.mean(0), 0.1)
        a.sub_(reduce(x.sum(0)))
        b.sub_(reduce(x.square().sum(0)))

    tensors = [torch.randn(3), torch.randn(3), torch.randn(3), torch.randn(5, 3)]
    after = run_passes(builders.place(builders.capture(fn, tensors)), [reinplace])
    before = [tensor.clone() for tensor in tensors]
    with torch.no_grad(), FailAtWait(number), pytest.raises(RuntimeError, match="peer"):
        eager_backend.lower(after)(tensors)
    assert builders.same(tensors, before)


def test_a_metric_reduced_behind_the_optimizer_costs_no_copy():
    def fn(weight, x):
        loss = (x @ weight).sum()
        weight.sub_(x.sum(0))
        return reduce(loss)

    tensors = [torch.randn(3), torch.randn(5, 3)]
    after = check_placed(fn, tensors)
    assert copies(after) == 0
    assert any("calls moved after the last" in note for note in after.history[-1].notes)


def test_an_update_that_a_collective_depends_on_is_copied_at_the_end():
    def fn(weight, x):
        weight.sub_(x)
        return reduce(weight * 1)

    tensors = [torch.randn(3), torch.randn(3)]
    after = check_placed(fn, tensors)
    assert builders.calls(after)[-1] == "aten.copy_.default"


def test_random_operators_keep_their_order():
    def fn(weight, x):
        weight.sub_(x)
        noise = torch.rand_like(weight)  # would move with the update, past the next one
        return noise, torch.rand_like(x), reduce(x.sum())

    tensors = [torch.randn(3), torch.randn(3)]
    program = builders.place(builders.capture(fn, tensors))
    after = run_passes(program, [reinplace])
    results = []
    for one in (program, after):
        torch.manual_seed(1)
        results.append(builders.execute(one, tensors))
    assert builders.same(*results)


def test_an_all_reduce_of_a_dead_value_goes_in_place_and_of_a_live_one_does_not():
    def fn(x):
        dead, live = x * 2, x * 3
        return reduce(dead), reduce(live), live

    tensors = [torch.randn(3)]
    after = check_placed(fn, tensors)
    assert builders.count(after, c10d.all_reduce_.default) == 1
    assert builders.count(after, c10d.all_reduce.default) == 1


def test_a_collective_that_nobody_reads_stays_as_a_whole():
    """Other ranks take part in it, and one of them may read it."""
    program = builders.place(builders.capture(lambda x: (reduce(x * 2), x + 1)[1], [torch.randn(3)]))
    after = run_passes(program, [reinplace])
    assert [builders.count(after, *op_info.COLLECTIVES), builders.count(after, op_info.WAIT)] == [1, 1]


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_a_collective_of_what_is_not_contiguous_makes_its_own_copy(name):
    def fn(x):
        value = (x * 2).t()
        if name == "all_reduce":
            return reduce(value) + 1
        return op_info.WAIT(c10d.broadcast.default(value, 0, builders.world_group())) + 1

    tensors = [torch.randn(3, 4)]
    after = check_placed(fn, tensors)
    assert builders.count(after, c10d.all_reduce.default, c10d.broadcast.default) == 1


def test_the_input_of_an_all_gather_is_not_overwritten_while_it_is_under_way():
    def fn(x):
        shard = x * 2
        gathered = c10d.all_gather_into_tensor.default(shard, 1, builders.world_group())
        meanwhile = shard.add(1)
        return op_info.WAIT(gathered), meanwhile

    tensors = [torch.randn(3)]
    program = builders.place(builders.capture(fn, tensors))
    assert "aten.add.Tensor" in builders.calls(run_passes(program, [reinplace]))


def test_buckets_keep_what_is_known_about_them():
    program = builders.place(builders.capture(lambda g: builders.gradient(g * 2, "w"), [torch.randn(3)]))
    after = run_passes(program, [reinplace])
    (node,) = after.graph.find_nodes(op="call_function", target=c10d.all_reduce_.default)
    assert node_meta.bucket(node) == node_meta.Bucket(0, ("w",), 12, node_meta.UNBUCKETED)
