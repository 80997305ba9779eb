"""A module of ``fully_shard`` given to a compiled step: one graph with its settings, equal to its eager training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import wholestep as ws

pytestmark = pytest.mark.ranks

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.ReLU()) for _ in range(3)), nn.Linear(9, 4))


def sharded(**settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = net()
    for block in list(model)[:3]:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x).float(), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def accumulating(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    model.set_requires_gradient_sync(False)
    nn.functional.cross_entropy(model(x[:3]).float(), y[:3]).backward()
    model.set_requires_gradient_sync(True)
    return train(model, opt, x[3:], y[3:])


def batches(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1 + dist.get_rank())
    return [(torch.randn(6, 9), torch.randint(0, 4, (6,))) for _ in range(count)]


def whole(model: nn.Module) -> list[Tensor]:
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in model.state_dict().values()]


SETTINGS: dict[str, Any] = {
    "again": {},
    "keep": {"reshard_after_forward": False},
    "half": {"mp_policy": HALF},
}


def equal_to_eager(step: Any, settings: dict[str, Any]) -> tuple[int, int]:
    """Bitwise, with an eager step and an evaluation among the compiled ones."""
    eager, ours, compiled = sharded(**settings), sharded(**settings), ws.compile(step, fullgraph=True)
    for number, (x, y) in enumerate(batches()):
        given = (step if number == 2 else compiled)(*ours, x, y)
        assert torch.equal(step(*eager, x, y), given), number
        with torch.no_grad():
            assert torch.equal(eager[0](x), ours[0](x)), number
    for one, other in zip(whole(eager[0]), whole(ours[0]), strict=True):
        assert torch.equal(one, other)
    calls = [str(node.target) for node in compiled.graph.graph.nodes]
    return compiled.cache_info().traces, sum("reduce_scatter_tensor" in call for call in calls)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_give_the_numbers_of_eager_training(pool2: Any, name: str) -> None:
    assert [traces for traces, _ in pool2.run(equal_to_eager, train, SETTINGS[name])] == [1, 1]


def hooked(clips: bool) -> int:
    """Hooks on parameters: torch calls none for gradients of what it has cut, and those after the accumulation."""
    eager, ours, compiled = sharded(), sharded(), ws.compile(train, fullgraph=True)
    for model, _ in (eager, ours):
        for param in model.parameters():
            param.register_hook(lambda grad: grad * 0.5)
            if clips:
                param.register_post_accumulate_grad_hook(_clip)
    for x, y in batches(3):
        assert torch.equal(train(*eager, x, y), compiled(*ours, x, y))
    for one, other in zip(whole(eager[0]), whole(ours[0]), strict=True):
        assert torch.equal(one, other)
    return compiled.cache_info().traces


def _clip(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-1e-3, 1e-3)


@pytest.mark.parametrize("clips", [False, True])
def test_hooks_on_parameters_are_called_as_torch_calls_them(pool2: Any, clips: bool) -> None:
    assert pool2.run(hooked, clips) == [1, 1]


def trains_behind_an_evaluation() -> tuple[int, int]:
    """The first forward outside of a graph is in inference mode, and the second one is an eager step."""
    (eager, opt), (model, own), compiled = sharded(), sharded(), ws.compile(train, fullgraph=True)
    for number, (x, y) in enumerate(batches(3)):
        given = (train if number == 1 else compiled)(model, own, x, y)
        assert torch.equal(given, train(eager, opt, x, y))
        with torch.inference_mode():
            model(x)
    return sum(torch.equal(*pair) for pair in zip(whole(eager), whole(model), strict=True)), len(whole(eager))


def test_an_evaluation_in_inference_mode_spoils_no_training(pool2: Any) -> None:
    for equal, count in pool2.run(trains_behind_an_evaluation):
        assert equal == count


def test_micro_batches_without_sync_are_reduced_once(pool2: Any) -> None:
    for traces, scatters in pool2.run(equal_to_eager, accumulating, {}):
        assert traces == 1
        assert scatters == 1


def clears_in_place(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x).float(), y)
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    return loss.detach()


def adds_up_gradients(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    """With an operator that no rule computes on parts."""
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x).float(), y)
    loss.backward()
    for param in model.parameters():
        if param.dim() == 2:
            param.grad = param.grad.cumsum(1)
    opt.step()
    return loss.detach()


def gradients_left(step: Any) -> list[str]:
    """With an eager call after compiled ones, which adds to what they have left. Gives the fallbacks."""
    eager, ours, compiled = sharded(), sharded(), ws.compile(step, fullgraph=True)
    for number, (x, y) in enumerate(batches(4)):
        given = (step if number == 2 else compiled)(*ours, x, y)
        assert torch.equal(step(*eager, x, y), given), number
        for one, other in zip(eager[0].parameters(), ours[0].parameters(), strict=True):
            assert isinstance(other.grad, DTensor)
            assert torch.equal(one.grad.to_local(), other.grad.to_local())
    program = compiled.program()
    return [one.operator for one in program.fallbacks]


@pytest.mark.parametrize(("step", "fallbacks"), [(clears_in_place, []), (adds_up_gradients, ["aten.cumsum.default"])])
def test_gradients_that_a_step_leaves_are_shards(pool2: Any, step: Any, fallbacks: list[str]) -> None:
    """Whatever has computed them. They were whole, on parameters that are shards."""
    assert pool2.run(gradients_left, step) == [fallbacks, fallbacks]


class Trunk(nn.Sequential):
    """Its last layer is used outside of its forward, as losses that are computed by parts use it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self)[:3]:
            x = block(x)
        return x


def gathers_ahead(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    model.unshard()
    handles = [block.unshard(async_op=True) for block in list(model)[:3]]
    handles[0].wait()
    return train(model, opt, x, y)


def gathers_for_an_evaluation(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    train(model, opt, x, y)
    model.unshard()
    with torch.no_grad():
        out = model(x[:2])
    model.reshard()
    return torch.as_tensor(out)


def hidden_loss(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    """With the weight of the last layer, which torch keeps gathered in the type of the policy."""
    opt.zero_grad()
    hidden, last = model(x), model[3]
    parts = [nn.functional.linear(part, last.weight, last.bias).float() for part in hidden.chunk(2)]
    losses = [nn.functional.cross_entropy(part, own) for part, own in zip(parts, y.chunk(2), strict=True)]
    loss = torch.stack(losses).mean()
    loss.backward()
    opt.step()
    return loss.detach()


def of_a_trunk(settings: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = Trunk(*net())
    for block in list(model)[:3]:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gathered_by_hand(step: Any, settings: dict[str, Any]) -> None:
    """The first call of all is a compiled one."""
    make = of_a_trunk if step is hidden_loss else lambda given: sharded(**given)
    (eager, opt), (model, own), compiled = make(settings), make(settings), ws.compile(step, fullgraph=True)
    for x, y in batches():
        assert torch.equal(compiled(model, own, x, y), step(eager, opt, x, y))
    for one, other in zip(whole(eager), whole(model), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("step", [gathers_ahead, gathers_for_an_evaluation, hidden_loss])
def test_parameters_that_are_gathered_outside_of_a_forward(pool2: Any, step: Any, name: str) -> None:
    """By `unshard`, which torch carried out in a trace: NaN from the first call on. Or as torch leaves them."""
    pool2.run(gathered_by_hand, step, SETTINGS[name])


def plans(settings: dict[str, Any], axes: tuple[int, int] | None) -> tuple[str, str]:
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=names) if axes is not None else ws.init().mesh
    assert mesh is not None
    x, y = batches(1)[0]
    ours = ws.compile(train)
    ours(*sharded(mesh=mesh, **settings), x, y)
    strategy = ws.FSDP(
        broadcast_buffers=False, mp_policy=settings.get("mp_policy"),
        reshard_after_forward=settings.get("reshard_after_forward", True),
    )  # fmt: skip
    other, plain = ws.compile(train, strategy=strategy, mesh=mesh), net()
    other(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), x, y)
    return ours.plan, other.plan


@pytest.mark.parametrize("name", SETTINGS)
def test_the_plan_is_that_of_the_plain_module_with_the_strategy(pool2: Any, name: str) -> None:
    for ours, other in pool2.run(plans, SETTINGS[name], None):
        assert ours == other


def test_a_mesh_of_two_axes_is_that_of_the_module(pool4: Any) -> None:
    for ours, other in pool4.run(plans, {}, (2, 2)):
        assert ours == other
        assert "mesh dp_shard=2, dp_replicate=2" in ours


def ignored_parameter() -> None:
    def make() -> tuple[Any, Any]:
        model: Any = net()
        fully_shard(model, ignored_params={model[3].bias})
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    eager, ours, compiled = make(), make(), ws.compile(train, fullgraph=True)
    for x, y in batches():
        assert torch.equal(train(*eager, x, y), compiled(*ours, x, y))
    assert torch.equal(eager[0][3].bias, ours[0][3].bias)


def test_ignored_parameters_stay_local(pool2: Any) -> None:
    pool2.run(ignored_parameter)


def changed_settings() -> tuple[list[str], list[str]]:
    """What owners change between calls, and why the step was captured again."""
    (model, opt), compiled = sharded(), ws.compile(train)
    x, y = batches(1)[0]
    compiled(model, opt, x, y)
    with torch.no_grad():
        model(x)  # torch decides about the outermost module in its first eager forward, which changes nothing here
    compiled(model, opt, x, y)
    reasons = list(compiled.cache_info().reasons)
    model[0].set_reshard_after_forward(False)
    compiled(model, opt, x, y)
    changed = list(compiled.cache_info().reasons)
    return reasons, changed


def test_a_setting_that_changes_is_seen_at_the_next_call(pool2: Any) -> None:
    for reasons, changed in pool2.run(changed_settings):
        assert reasons == []
        assert len(changed) == 1
        assert "post_forward_mesh_info" in changed[0]


def refusals() -> None:
    x, y = batches(1)[0]
    with pytest.raises(ws.ConfigError, match=r"too\. Leave strategy out"):
        ws.compile(train, strategy=ws.DDP())(*sharded(), x, y)
    for make, why in NO_GRAPH.values():
        with pytest.raises(ws.CaptureError, match=why):
            ws.compile(train, fullgraph=True)(*make(), x, y)


def with_a_hook() -> tuple[Any, torch.optim.Optimizer]:
    model, opt = sharded()
    model.set_all_reduce_hook(lambda grad: grad.mul_(0.5))
    return model, opt


def mixed() -> tuple[Any, torch.optim.Optimizer]:
    """Its first block sums gradients in bfloat16, the others do not."""
    model: Any = net()
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


NO_GRAPH: dict[str, tuple[Callable[[], tuple[Any, torch.optim.Optimizer]], str]] = {
    "offloaded": (lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), "shard without offload_policy"),
    "with a hook": (with_a_hook, "has set_all_reduce_hook, which a graph does not call"),
    "mixed": (mixed, "with other meshes, policies or divide factors"),
}
"""What no graph keeps, and what is said of it."""


def test_what_contradicts_is_refused_by_name(pool2: Any) -> None:
    pool2.run(refusals)


def as_eager_code(name: str) -> str:
    make, _ = NO_GRAPH[name]
    eager, ours, compiled = make(), make(), ws.compile(train)
    for x, y in batches():
        assert torch.equal(train(*eager, x, y), compiled(*ours, x, y))
    for one, other in zip(whole(eager[0]), whole(ours[0]), strict=True):
        assert torch.equal(one, other)
    return str(compiled.explain())


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("name", NO_GRAPH)
def test_what_no_graph_keeps_is_kept_by_eager_code(pool2: Any, name: str, may_go_live: bool) -> None:
    for explained in pool2.run(as_eager_code, name):
        assert "It runs as eager code, and its modules communicate" in " ".join(explained.split())


def sums() -> None:
    eager, ours, compiled = sharded(), sharded(), ws.compile(train, fullgraph=True)
    for model, _ in (eager, ours):
        for one in model.modules():
            if hasattr(one, "set_gradient_divide_factor"):
                one.set_gradient_divide_factor(1.0)
    for x, y in batches():
        x, y = x.cuda(), y.cuda()
        torch.testing.assert_close(train(*eager, x, y), compiled(*ours, x, y))


@pytest.mark.gpu
def test_a_divide_factor_of_one_sums_gradients(nccl2: Any) -> None:
    """gloo has no factors."""
    nccl2.run(sums)
