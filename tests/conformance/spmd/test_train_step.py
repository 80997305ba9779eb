"""A training step compiled as a whole by the older surface, and collectives over the axes of a mesh.

The reference is eager DistributedDataParallel, whose gradients are the mean over the ranks; here they are the sum. With
two ranks the mean times two is the sum bit for bit, so parameters and buffers must be equal, not close.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

from wholestep.runtime.distributed.world import init
from wholestep.spmd import COMPILED_OBJECT_KEY, CommTensor, GraphModuleTransformation, Override, compile

row = pytest.mark.row
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


# ---- S1: a compiled step against DistributedDataParallel ---------------------------------------------------------


def train_step(mod: nn.Module, opt: torch.optim.Optimizer, *batch: Tensor) -> None:
    mod(*batch).sum().backward()
    opt.step()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, foreach=True)


def adam(params: Any, **which: bool) -> torch.optim.Optimizer:
    """On GPUs with its step count there, as whole-step graphs want it."""
    return torch.optim.Adam(params, lr=0.01, capturable=init().device.type == "cuda", **which)


def differences(
    mod: nn.Module,
    batches: Sequence[tuple[Tensor, ...]],
    make_opt: Callable[[Any], torch.optim.Optimizer] = sgd,
    step: Callable[..., Any] | None = None,
) -> list[str]:
    """Names of the parameters and buffers in which `step` leaves `mod` other than DistributedDataParallel would.

    The first batch, which must be the same on every rank, is for an eager step, so that optimizer state exists.
    """
    device = init().device
    mod.to(device)
    opt, wrapped = make_opt(mod.parameters()), DistributedDataParallel(deepcopy(mod))
    wrapped_opt = make_opt(wrapped.parameters())
    first, *rest = [tuple(tensor.to(device) for tensor in batch) for batch in batches]
    for one, its in ((mod, opt), (wrapped, wrapped_opt)):
        train_step(one, its, *first)
        for tensor in (*one.parameters(), *one.buffers()):
            tensor.grad = None
    step = compile()(train_step) if step is None else step
    for batch in rest:
        step(mod, opt, *batch)
        wrapped(*batch).sum().backward()
        with torch.no_grad():
            for param in wrapped.parameters():
                param.grad *= dist.get_world_size()
        wrapped_opt.step()
        for tensor in (*wrapped.parameters(), *wrapped.buffers()):
            tensor.grad = None
    ours, theirs = mod.state_dict(), wrapped.module.state_dict()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def floats(count: int = 3) -> list[tuple[Tensor, ...]]:
    """Batches of floats: the first is the same on every rank, the others are not."""
    torch.manual_seed(100)
    first = torch.randn(2, 10)
    torch.manual_seed(dist.get_rank())
    return [(first,), *((torch.randn(2, 10),) for _ in range(count - 1))]


def assert_equal_on_all(pool: Any, check: Callable[..., list[str]], *args: Any) -> None:
    assert pool.run(check, *args) == [[]] * pool.nproc


def simple() -> list[Tensor]:
    torch.manual_seed(0)
    mod = nn.Linear(10, 10).to(init().device)
    wrapped = DistributedDataParallel(deepcopy(mod))
    torch.manual_seed(dist.get_rank())
    inp = torch.randn(2, 10).to(init().device)

    @compile()
    def step(mod: nn.Module, inp: Tensor) -> list[Tensor | None]:
        mod(inp).sum().backward()
        return [p.grad for p in mod.parameters()]

    grads = step(mod, inp)
    wrapped(inp).sum().backward()
    assert all(p.grad is None for p in mod.parameters()), "gradients live inside of the call"
    size, theirs = dist.get_world_size(), wrapped.parameters()
    return [ours - param.grad * size for ours, param in zip(grads, theirs, strict=True)]


@row("S1", "train_step_simple")
def test_train_step_simple(ranks2: Any) -> None:
    for found in ranks2.run(simple):
        assert len(found) == 2
        assert all(not difference.any() for difference in found)


def with_sgd(bias: bool) -> list[str]:
    return differences(nn.Linear(10, 10, bias=bias), floats())


@row("S1", "sgd")
@pytest.mark.parametrize("bias", [True, False])
def test_sgd(ranks2: Any, bias: bool) -> None:
    assert_equal_on_all(ranks2, with_sgd, bias)


class Counts(Override):
    """Replaces nothing; counts the all-reduces of the placed graph."""

    def __init__(self) -> None:
        self.reductions: list[int] = []
        self.state: list[torch.Tensor] = []

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        return orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        self.reductions.append(len(gm.graph.find_nodes(op="call_function", target=ALL_REDUCE)))
        self.state = flat_state
        return gm


def with_adam(foreach: bool, fused: bool) -> list[str]:
    counts = Counts()
    step = compile(module_override=[counts])(train_step)
    mod = nn.Sequential(nn.Linear(10, 10, bias=False))
    found = differences(mod, floats(), partial(adam, foreach=foreach, fused=fused), step)
    if counts.reductions != [1]:
        found.append(f"all-reduces per graph: {counts.reductions}")
    weight, *state = counts.state
    if weight is not mod[0].weight or [tuple(one.shape) for one in state] != [(), (10, 10), (10, 10)]:
        found.append(f"flat_state: {[tuple(one.shape) for one in counts.state]}")
    return found


@row("S1", "adam_foreach")
def test_adam_foreach(ranks2: Any) -> None:
    assert_equal_on_all(ranks2, with_adam, True, False)


@row("S1", "adam_fused")
def test_adam_fused(ranks2: Any) -> None:
    assert_equal_on_all(ranks2, with_adam, False, True)


# ---- S1: modules that are replaced while the step is captured ----------------------------------------------------

_LIBRARY = torch.library.Library("conformance_tracing", "DEF")
_LIBRARY.define("forward(Tensor x) -> Tensor")
_LIBRARY.define("backward(Tensor grad) -> Tensor")
_LIBRARY.impl("forward", lambda x: x.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("backward", lambda grad: grad.clone(), "CompositeExplicitAutograd")
FORWARD = torch.ops.conformance_tracing.forward.default
BACKWARD = torch.ops.conformance_tracing.backward.default


class Anchors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return FORWARD(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return BACKWARD(grad)


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("this module has no graph")


class Placeholder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Anchors.apply(x)


class Tripled(nn.Module):
    """What the rewritten graph computes in the place of the untraceable module."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3.0


class Rewrites(Override):
    """Puts a product in the place of each anchor: an operator forward, a function of torch backward."""

    def __init__(self, recompile: bool) -> None:
        self.recompile = recompile
        self.fqns: list[str] = []
        self.targets: list[Any] = []

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        self.fqns.append(fqn)
        return Placeholder() if isinstance(orig_submodule, Untraceable) else orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        products = {FORWARD: torch.ops.aten.mul.Tensor, BACKWARD: torch.mul}
        for node in gm.graph.nodes:
            if node.target in products:
                self.targets.append(node.target)
                with gm.graph.inserting_before(node):
                    product = gm.graph.call_function(products[node.target], args=(*node.args, 3.0))
                node.replace_all_uses_with(product)
        gm.graph.lint()
        gm.graph.eliminate_dead_code()
        if self.recompile:
            gm.recompile()
        return gm


class Chain(nn.Module):
    def __init__(self, holes: int, hole: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(10, 10) for _ in range(holes + 1)]
        self.inner = nn.ModuleList(layers)
        self.holes = nn.ModuleList(hole() for _ in range(holes))

    def forward(self, x: Tensor) -> Tensor:
        for layer, hole in zip(self.inner, self.holes, strict=False):
            x = hole(layer(x))
        return torch.relu(self.inner[-1](x))


def with_override(holes: int, recompile: bool) -> tuple[Any, ...]:
    """What the override saw, and whether the step left what the same step with real modules leaves."""
    device, override = init().device, Rewrites(recompile)
    mods = [Chain(holes, kind).to(device) for kind in (Untraceable, Tripled if recompile else nn.Identity)]
    plain = compile()(train_step)
    step = compile(module_override=[override])(train_step)
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(4, 10).to(device) for _ in range(2)]
    for mod, run in zip(mods, (step, plain), strict=True):
        opt = torch.optim.SGD(mod.parameters(), lr=0.01, foreach=False)
        for batch in batches:
            run(mod, opt, batch)
    pairs = zip(*(mod.parameters() for mod in mods), strict=True)
    equal = [torch.equal(a, b) for a, b in pairs]
    untouched = all(isinstance(hole, Untraceable) for hole in mods[0].holes)
    return [target.name() for target in override.targets], override.fqns, all(equal), untouched


@pytest.mark.parametrize("recompile", [False, True], ids=["edited", "recompiled"])
@pytest.mark.parametrize(
    "holes",
    [
        pytest.param(1, marks=row("S1", "module_override"), id="module_override"),
        pytest.param(2, marks=row("S1", "module_multi_fqn_override"), id="module_multi_fqn_override"),
    ],
)
def test_module_override(ranks2: Any, holes: int, recompile: bool) -> None:
    """As with every GraphModule, an edit counts when it was recompiled."""
    expected = ["conformance_tracing::forward"] * holes + ["conformance_tracing::backward"] * holes
    fqns = ["inner", *(f"inner.{i}" for i in range(holes + 1)), "holes", *(f"holes.{i}" for i in range(holes))]
    for targets, asked, equal, untouched in ranks2.run(with_override, holes, recompile):
        assert targets == expected
        assert asked == fqns
        assert equal
        assert untouched, "the replacement stands in while the step is captured, no longer"


# ---- S1: the cached object and the transformation of its graph ---------------------------------------------------


def cached(optimized: bool) -> dict[str, Any]:
    device, calls = init().device, []
    theirs = GraphModuleTransformation(2, enable_graph_optimization=optimized)

    def transformation(gm: fx.GraphModule) -> fx.GraphModule:
        calls.append(len(gm.graph.find_nodes(op="call_function", target=ALL_REDUCE)))
        return theirs(gm)

    step = compile(gm_transformation=transformation)(train_step)
    torch.manual_seed(0)
    mod = nn.Linear(10, 10).to(device)
    opt = adam(mod.parameters(), foreach=False)
    inp = torch.randn(2, 10).to(device)
    train_step(mod, opt, inp)
    opt.zero_grad()
    step(mod, opt, inp)
    first = step.__dict__[COMPILED_OBJECT_KEY]
    step(mod, opt, inp)
    second = step._compiled_obj
    step(mod, opt, torch.cat([inp, inp]))
    return {
        "same": first.gm is second.gm,
        "belongs": first.mod is mod and first.opt is opt and first.flat_state[0] is mod.weight,
        "calls": calls,
        "reductions": sum(node.target in (ALL_REDUCE, ALL_REDUCE_) for node in first.gm.graph.nodes),
        "other": step._compiled_obj.gm is not first.gm,
    }


ALL_REDUCE_ = torch.ops._c10d_functional.all_reduce_.default


@row("S1", "gm_cache_and_transformation")
@pytest.mark.parametrize("optimized", [False, True])
def test_gm_cache_and_transformation(ranks2: Any, optimized: bool) -> None:
    """The third call has another shape, and so a graph of its own. Optimized, two gradients share a bucket."""
    for found in ranks2.run(cached, optimized):
        assert found.pop("reductions") == (1 if optimized else 2)
        assert found == {"same": True, "belongs": True, "calls": [2, 2], "other": True}


# ---- S1: buffers, sizes, operators -------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 10)
        self.register_buffer("scale", torch.ones(10, 10))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.requires_grad = True  # not before: such a buffer cannot be copied by deepcopy
        return torch.matmul(self.fc(x), self.scale)


class AddsGradients(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        assert len(params) == 2
        with torch.no_grad():
            for param in params:
                param += param.grad


def with_buffer() -> list[str]:
    torch.manual_seed(0)
    return differences(Buffered(), floats(), AddsGradients)


@row("S1", "buffer")
def test_buffer(ranks2: Any) -> None:
    assert_equal_on_all(ranks2, with_buffer)


def expanded() -> list[list[int]]:
    device = init().device
    step = compile()(train_step)
    mod = nn.Linear(10, 10).to(device)
    step(mod, sgd(mod.parameters()), torch.randn(2, 10).to(device))
    expand = torch.ops.aten.expand.default
    return [list(node.args[1]) for node in step._compiled_obj.gm.graph.nodes if node.target is expand]


@row("S1", "expand_dimension")
def test_expand_dimension(ranks2: Any) -> None:
    for found in ranks2.run(expanded):
        assert found
        assert all(sizes == [2, 10] for sizes in found)


class Calls(nn.Module):
    """A linear layer and what a test does with it: ``body(fc, x)``."""

    def __init__(self, body: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(10, 10), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc, x)


def log_softmax(fc: nn.Linear, x: Tensor) -> Tensor:
    return F.log_softmax(fc(x), dim=1)


def factory_full(fc: nn.Linear, x: Tensor) -> Tensor:
    return torch.full(x.shape, 7, device=x.device) + fc(x)


def factory_arange(fc: nn.Linear, x: Tensor) -> Tensor:
    y = torch.arange(x.numel(), device=x.device).view(x.shape)
    z = torch.arange(0, x.numel(), device=x.device).view(x.shape)
    return fc(x) + y + z


def sym_numel(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(x) * fc.weight.numel()


def sym_stride(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(x) * fc.weight.stride(0)


def scalar(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(x) * torch.ops.aten.scalar_tensor.default(7, dtype=x.dtype, device=x.device)


def stack(fc: nn.Linear, x: Tensor) -> Tensor:
    return torch.stack([x, fc(x)], dim=1)


def arithmetic_ops_on_symint(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(x) * (x.shape[0] * x.numel() - x.shape[0] // 2)


def slice_of(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(x)[:, :1]


def bulk_cat(fc: nn.Linear, x: Tensor) -> Tensor:
    return torch.cat([fc(x) for _ in range(100)], dim=1)


BODIES = {
    "log_softmax": log_softmax, "factory_full": factory_full, "factory_arange": factory_arange,
    "sym_numel": sym_numel, "sym_stride": sym_stride, "scalar": scalar, "stack": stack,
    "arithmetic_ops_on_symint": arithmetic_ops_on_symint, "slice": slice_of, "bulk_cat": bulk_cat,
}  # fmt: skip


def with_body(name: str) -> list[str]:
    torch.manual_seed(0)
    return differences(Calls(BODIES[name]), floats())


@pytest.mark.parametrize("name", [pytest.param(name, marks=row("S1", name)) for name in BODIES])
def test_operators(ranks2: Any, name: str) -> None:
    assert_equal_on_all(ranks2, with_body, name)


class Classifies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mod, self.loss = nn.Sequential(nn.Linear(10, 10), nn.LogSoftmax(dim=1)), nn.NLLLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.mod(x), target)


VOCABULARY, WIDTH, BATCH, BLOCK = 10, 8, 2, 20


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.loss = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.NLLLoss()

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.loss(F.softmax(self.fc(self.norm(self.emb(ids))), dim=1), target)


class EmbedsPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.norm, self.fc = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        places = torch.arange(0, ids.shape[1], dtype=torch.long, device=ids.device).unsqueeze(0)
        scores = F.softmax(self.fc(self.norm(self.positions(places) + self.words(ids))), dim=-1)
        return F.cross_entropy(scores.view(-1, scores.size(-1)), target.view(-1))


def classes(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(0, VOCABULARY, shape), torch.randint(0, WIDTH, shape))


def rows_of_floats() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 10), torch.randint(0, 10, (BATCH,))


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "nll_loss": (Classifies, rows_of_floats),
    "replicated_embedding": (Embeds, classes(BATCH)),
    "pos_embedding": (EmbedsPositions, classes(BATCH, BLOCK)),
}


def with_loss(name: str) -> list[str]:
    model, draw = LOSSES[name]
    torch.manual_seed(0)
    mod, first = model(), draw()
    torch.manual_seed(1 + dist.get_rank())
    return differences(mod, [first, draw(), draw()])


@pytest.mark.parametrize("name", [pytest.param(name, marks=row("S1", name)) for name in LOSSES])
def test_losses(ranks2: Any, name: str) -> None:
    assert_equal_on_all(ranks2, with_loss, name)


# ---- S2: collectives over the axes of a mesh ---------------------------------------------------------------------


def over_axes(collective: str, shape: tuple[int, ...]) -> list[str]:
    """Traces `collective` once per axis with one input and runs the graph with another; what came out wrong."""
    world = init()
    mesh = DeviceMesh(world.device.type, torch.arange(world.size).reshape(shape))
    wrong = []
    for axis, group in enumerate(mesh.get_all_groups()):
        ranks = dist.get_process_group_ranks(group)
        own = torch.ones(3, 3, device=world.device) * world.rank
        found, expected = COLLECTIVES[collective](own, mesh, axis, ranks)
        for one, value in zip(found, expected, strict=True):
            if not torch.equal(one, torch.full_like(own, value)):
                wrong.append(f"axis {axis} of {shape}, ranks {ranks}: wanted {value}, got {one.flatten().tolist()}")
    return wrong


Found = tuple[Sequence[Tensor], Sequence[float]]


def mesh_all_reduce(own: Tensor, mesh: DeviceMesh, axis: int, ranks: list[int]) -> Found:
    def reduce(tensor: Tensor) -> Tensor:
        return funcol.all_reduce(tensor, "sum", group=(mesh, axis)) * 1

    return [make_fx(reduce)(own + 1)(own.clone())], [sum(ranks)]


def mesh_broadcast(own: Tensor, mesh: DeviceMesh, axis: int, ranks: list[int]) -> Found:
    def broadcast(tensor: Tensor) -> Tensor:
        received = CommTensor(tensor.clone())
        dist.broadcast(received, ranks[0], group=mesh.get_group(axis))
        return received * 1

    return [make_fx(broadcast)(own + 1)(own)], [ranks[0]]


def mesh_scatter(own: Tensor, mesh: DeviceMesh, axis: int, ranks: list[int]) -> Found:
    def scatter(receive: Tensor, give: list[Tensor]) -> Tensor:
        received, given = CommTensor(receive), [CommTensor(one) for one in give]
        root = mesh.get_local_rank(axis) == 0
        dist.scatter(received, given if root else None, src=ranks[0], group=mesh.get_group(axis))
        return received * 1

    give = [torch.ones_like(own) * rank for rank in ranks]
    traced, receive = make_fx(scatter)(torch.empty_like(own), [one + 1 for one in give]), torch.empty_like(own)
    found, (rank,) = traced(receive, give), {int(own[0, 0])}
    return [found, receive], [rank, rank]  # in place: the tensor that was wrapped holds the result, too


def mesh_all_gather(own: Tensor, mesh: DeviceMesh, axis: int, ranks: list[int]) -> Found:
    def gather(tensor: Tensor) -> list[Tensor]:
        gathered = funcol.all_gather_tensor(tensor, gather_dim=0, group=(mesh, axis))
        return list(torch.chunk(gathered, len(ranks)))

    return make_fx(gather)(own + 1)(own), ranks


COLLECTIVES: dict[str, Callable[..., Found]] = {
    "tracing_all_reduce_nd": mesh_all_reduce,
    "broadcast_nd": mesh_broadcast,
    "scatter_nd": mesh_scatter,
    "all_gather_nd": mesh_all_gather,
}
over = pytest.mark.parametrize("name", [pytest.param(name, marks=row("S2", name)) for name in COLLECTIVES])


@over
def test_mesh_2d(ranks4: Any, name: str) -> None:
    assert_equal_on_all(ranks4, over_axes, name, (2, 2))


@over
def test_mesh_3d(pool8: Any, name: str) -> None:
    assert_equal_on_all(pool8, over_axes, name, (2, 2, 2))
