"""What data parallel places into a captured step: which gradients and buffers travel, how, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from wholestep.capture.capture import capture
from wholestep.config import DDP
from wholestep.errors import PlacementError
from wholestep.ir import node_meta, op_info
from wholestep.ir.printer import source
from wholestep.ir.program import InputKind, MeshAxis, Program, Stage
from wholestep.place.strategies import place

AXIS = MeshAxis(name="data", size=2, group="0")
aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6), torch.randint(3, (5,))


def placed(step: Callable[..., Any], *args: Tensor, config: DDP | None = None, axis: MeshAxis = AXIS) -> Program:
    return place(capture(step, args or data(), {}).program, config or DDP(), (axis,))


def usual(module: nn.Module, opt: torch.optim.Optimizer | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    opt = opt or sgd(module)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step


def found(program: Program, target: Any) -> list[fx.Node]:
    return program.graph.find_nodes(op="call_function", target=target)


def reduced(program: Program) -> Counter[str]:
    """How often the gradient of each parameter is reduced. Every reduction must be waited for and carry its name."""
    counts: Counter[str] = Counter()
    for node in found(program, c10d.all_reduce.default):
        bucket = node_meta.bucket(node)
        assert bucket is not None
        assert [user.target for user in node.users] == [op_info.WAIT]
        counts.update(bucket.members)
    return counts


def params(program: Program) -> list[str]:
    return [record.name for record in program.inputs if record.kind is InputKind.PARAM]


def depends_on(node: fx.Node, other: fx.Node) -> bool:
    seen, stack = set(), [node]
    while stack:
        one = stack.pop()
        if one is other:
            return True
        stack.extend(arg for arg in one.all_input_nodes if arg not in seen)
        seen.add(one)
    return False


def test_each_gradient_is_scaled_and_summed_once() -> None:
    program = placed(usual(mlp()))
    assert program.stage is Stage.PLACED
    assert program.mesh == (AXIS,)
    assert reduced(program) == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], 1)
    for node in found(program, c10d.all_reduce.default):
        scaled, op, group = node.args
        assert (op, group) == ("sum", "0")
        assert scaled.target is aten.mul.Tensor
        assert scaled.args[1] == 0.5
    assert not found(program, op_info.GRADIENT)


def test_the_scale_is_one_over_the_size_of_the_axis() -> None:
    program = placed(usual(mlp()), axis=MeshAxis(name="data", size=8, group="0"))
    assert {node.args[0].args[1] for node in found(program, c10d.all_reduce.default)} == {0.125}


def test_a_sum_is_not_scaled() -> None:
    program = placed(usual(mlp()), config=DDP(reduce="sum"))
    assert len(found(program, c10d.all_reduce.default)) == 4
    assert aten.mul.Tensor not in {node.args[0].target for node in found(program, c10d.all_reduce.default)}


def test_the_captured_program_is_left_alone() -> None:
    program = capture(usual(mlp()), data(), {}).program
    before = source(program)
    place(program, DDP(), (AXIS,))
    assert source(program) == before
    assert len(found(program, op_info.GRADIENT)) == 4


@pytest.mark.parametrize("config", [None, DDP()])
def test_one_process_has_no_communication(config: DDP | None) -> None:
    alone = MeshAxis(name="data", size=1, group="0")
    program = place(capture(usual(mlp()), data(), {}).program, config, () if config is None else (alone,))
    assert not any(op_info.is_collective(node) or node.target is op_info.GRADIENT for node in program.graph.nodes)


def test_the_axis_is_not_used_without_a_strategy() -> None:
    program = place(capture(usual(mlp()), data(), {}).program, None, (AXIS,))
    assert not any(op_info.is_collective(node) for node in program.graph.nodes)


# ---- several gradients of one parameter --------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [2, 3])
def test_accumulated_gradients_are_reduced_once(calls: int) -> None:
    module = mlp()
    opt = sgd(module)

    def step(x: Tensor, y: Tensor) -> None:
        for _ in range(calls):
            F.cross_entropy(module(x), y).backward()
        opt.step()
        opt.zero_grad()

    program = placed(step)
    assert set(reduced(program).values()) == {1}
    assert sum(reduced(program).values()) == 4


def test_gradients_that_are_used_between_two_backward_calls_are_reduced_each_time() -> None:
    module = mlp()
    opt = sgd(module)

    def step(x: Tensor, y: Tensor) -> None:
        for _ in range(2):
            F.cross_entropy(module(x), y).backward()
            opt.step()
            opt.zero_grad()

    assert reduced(placed(step)) == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], 2)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_gradients_left_from_an_earlier_call_join_the_one_reduction(calls: int) -> None:
    module = mlp()
    F.cross_entropy(module(torch.randn(5, 6)), torch.zeros(5, dtype=torch.int64)).backward()

    def step(x: Tensor, y: Tensor) -> None:
        for _ in range(calls):
            F.cross_entropy(module(x), y).backward()

    program = placed(step)
    assert set(reduced(program).values()) == {1}
    entry = next(
        node
        for record, node in zip(program.inputs, program.placeholders, strict=True)
        if record.kind is InputKind.GRAD and record.shape == (8, 6)
    )
    (sent,) = [n for n in found(program, c10d.all_reduce.default) if tuple(node_meta.tensor(n).shape) == (8, 6)]
    assert depends_on(sent, entry)


def test_gan_reduces_what_its_optimizers_use() -> None:
    """The generator's loss leaves gradients in the discriminator that nobody reads: those do not travel."""
    makes, judges = nn.Linear(4, 6), nn.Linear(6, 1)
    makes_opt, judges_opt = sgd(makes), sgd(judges)

    def step(real: Tensor, noise: Tensor) -> None:
        fake = makes(noise)
        (judges(fake.detach()).mean() - judges(real).mean()).backward()
        judges_opt.step()
        judges_opt.zero_grad()
        (-judges(fake).mean()).backward()
        makes_opt.step()
        makes_opt.zero_grad()
        judges_opt.zero_grad()

    program = placed(step, torch.randn(5, 6), torch.randn(5, 4))
    assert reduced(program) == dict.fromkeys(["makes.weight", "makes.bias", "judges.weight", "judges.bias"], 1)


def test_autograd_grad_is_reduced() -> None:
    module = mlp()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))

    assert sum(reduced(placed(step)).values()) == 4


def test_clipping_reads_reduced_gradients() -> None:
    module = mlp()
    opt = sgd(module)

    def step(x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(module(x), y).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return norm

    program = placed(step)
    assert set(reduced(program).values()) == {1}
    norm = program.results[0]
    assert all(depends_on(norm, node) for node in found(program, c10d.all_reduce.default))


# ---- hooks -------------------------------------------------------------------------------------------------------


def test_what_a_post_accumulate_hook_leaves_is_reduced() -> None:
    """As in DistributedDataParallel the hook sees the local gradient."""
    module = mlp()
    module[0].weight.register_post_accumulate_grad_hook(lambda param: param.grad.clamp_(-0.01, 0.01))
    program = placed(usual(module))
    assert set(reduced(program).values()) == {1}
    (clamp,) = found(program, aten.clamp.default)
    (sent,) = [n for n in found(program, c10d.all_reduce.default) if node_meta.bucket(n).members == ("0.weight",)]  # type: ignore[union-attr]
    assert depends_on(sent, clamp)


def test_a_parameter_hook_runs_before_the_reduction() -> None:
    module = mlp()
    module[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    program = placed(usual(module))
    (clamp,) = found(program, aten.clamp.default)
    assert not any(depends_on(clamp, node) for node in found(program, c10d.all_reduce.default))


def test_an_optimizer_inside_of_the_backward_uses_reduced_gradients() -> None:
    """Its hook leaves no gradient behind, so nothing later could be reduced in its place."""
    module = mlp()
    opts = {param: torch.optim.SGD([param], lr=0.1) for param in module.parameters()}

    def update(param: Tensor) -> None:
        opts[param].step()
        opts[param].zero_grad()

    for param in opts:
        param.register_post_accumulate_grad_hook(update)

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(module(x), y).backward()

    program = placed(step)
    assert sum(reduced(program).values()) == 4
    sent = found(program, c10d.all_reduce.default)
    assert all(any(depends_on(result, node) for node in sent) for result in program.results)


# ---- which parameters --------------------------------------------------------------------------------------------


def test_a_tied_weight_is_reduced_once() -> None:
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    module[2].weight = module[0].weight
    assert reduced(placed(usual(module))) == {"0.weight": 1}


def test_frozen_and_unused_parameters_are_not_reduced() -> None:
    module = nn.ModuleDict({"body": mlp(), "spare": nn.Linear(3, 3)})
    module["body"][0].weight.requires_grad_(False)  # type: ignore[index]
    opt = sgd(module)

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(module["body"](x), y).backward()
        opt.step()
        opt.zero_grad()

    assert set(reduced(placed(step))) == {"body.0.bias", "body.2.weight", "body.2.bias"}


def test_ignored_parameters_stay_local() -> None:
    program = placed(usual(mlp()), config=DDP(ignore=("0.weight", "2.bias")))
    assert reduced(program) == {"0.bias": 1, "2.weight": 1}
    assert not found(program, op_info.GRADIENT)


def test_an_unknown_name_in_ignore_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"0\.wieght.*0\.weight"):
        placed(usual(mlp()), config=DDP(ignore=("0.wieght",)))


def test_a_gradient_that_is_only_left_in_grad_is_reduced() -> None:
    module = mlp()

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(module(x), y).backward()

    assert set(reduced(placed(step)).values()) == {1}


# ---- buffers -----------------------------------------------------------------------------------------------------


def norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_written_buffers_come_from_rank_0_one_message_per_dtype() -> None:
    program = placed(usual(norm_net()))
    sent = {node_meta.tensor(node).dtype: node for node in found(program, c10d.broadcast.default)}
    assert {dtype: node_meta.tensor(node).numel() for dtype, node in sent.items()} == {
        torch.float32: 24,
        torch.int64: 2,
    }
    assert all(node.args[1:] == (0, "0") for node in sent.values())
    place_of = {node: index for index, node in enumerate(program.graph.nodes)}
    first_layer = min(place_of[node] for node in found(program, aten.addmm.default))
    assert max(place_of[node] for node in sent.values()) < first_layer
    assert "4 buffers that the step writes" in " ".join(note for one in program.history for note in one.notes)


def test_every_reader_of_a_broadcast_buffer_reads_what_came() -> None:
    program = placed(usual(norm_net()))
    for record, node in zip(program.inputs, program.placeholders, strict=True):
        if record.kind is InputKind.BUFFER:
            assert {user.target for user in node.users} <= {aten.reshape.default, aten.view.default, aten.cat.default}


def test_buffers_that_are_only_read_stay_where_they_are() -> None:
    program = placed(usual(norm_net().eval()))
    assert any(record.kind is InputKind.BUFFER for record in program.inputs)
    assert not found(program, c10d.broadcast.default)


def test_buffers_stay_local_on_request() -> None:
    assert not found(placed(usual(norm_net()), config=DDP(broadcast_buffers=False)), c10d.broadcast.default)


def on_a_gpu(program: Program) -> Program:
    """The same program with its parameters on a GPU."""
    for record, node in zip(program.inputs, program.placeholders, strict=True):
        if record.kind is InputKind.PARAM:
            value = node_meta.tensor(node)
            assert isinstance(value, FakeTensor)
            with value.fake_mode:
                node_meta.set_value(node, torch.empty(record.shape, dtype=record.dtype, device="cuda"))
    return program


def test_counters_on_the_cpu_of_a_step_on_a_gpu_stay_where_they_are() -> None:
    """NCCL could not send them, and every rank counts for itself. Nothing else does, on the CPU or on the GPU."""
    program = capture(usual(norm_net()), data(), {}).program
    assert program.host_buffers == frozenset()
    assert found(place(program, DDP(), (AXIS,)), c10d.broadcast.default)
    program = on_a_gpu(capture(usual(norm_net()), data(), {}).program)
    assert {program.inputs[index].kind for index in program.host_buffers} == {InputKind.BUFFER}
    assert len(program.host_buffers) == sum(record.kind is InputKind.BUFFER for record in program.inputs)
    assert not found(place(program, DDP(), (AXIS,)), c10d.broadcast.default)


# ---- the text of the graph ---------------------------------------------------------------------------------------


@contextmanager
def on_rank(rank: int) -> Iterator[None]:
    """As if this process were one of two; collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_every_rank_writes_the_same_text() -> None:
    texts = []
    for rank in range(2):
        torch.manual_seed(rank)  # other weights, other data
        module = norm_net()
        with on_rank(rank):
            texts.append(source(placed(usual(module, torch.optim.AdamW(module.parameters(), lr=0.1)))))
    assert texts[0] == texts[1]
    assert "all_reduce" in texts[0]
    assert "broadcast" in texts[0]


def test_host_scalars_pass_through_untouched() -> None:
    """Step counts and rates are computed on the host; placing them adds and changes nothing."""

    def host(program: Program) -> list[tuple[str, Any]]:
        return [
            (node.name, node.target)
            for node in program.graph.nodes
            if node.op == "call_function" and not list(node_meta.tensors(node))
        ]

    module = mlp()
    program = capture(usual(module, torch.optim.AdamW(module.parameters(), lr=0.1)), data(), {}).program
    assert len(host(program)) > 4
    assert host(place(program, DDP(), (AXIS,))) == host(program)
    hypers = [record for record in program.inputs if record.kind is InputKind.HYPER]
    assert hypers
    assert [record for record in place(program, DDP(), (AXIS,)).inputs if record.kind is InputKind.HYPER] == hypers


def test_origins_are_kept() -> None:
    program = placed(usual(mlp()))
    for node in found(program, c10d.all_reduce.default):
        origin = node_meta.origin(node)
        assert origin is not None
        assert origin.region is node_meta.Region.BACKWARD
    assert params(program) == ["0.weight", "0.bias", "2.weight", "2.bias"]
