"""Modules of ``parallelize_module`` in a compiled step: one graph with their communication, equal to eager training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws

pytestmark = pytest.mark.ranks

SGD: Any = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    "sgd": SGD,
    "sgd-damped": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(x)))
        return hidden


class Block(nn.Module):
    """Residual, over parts of the sequence: norms between two MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mlp, self.last = nn.LayerNorm(8), MLP(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.mlp(self.first(x)))  # type: ignore[no-any-return]


class Language(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.mlp, self.head = nn.Embedding(12, 8), MLP(), nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mlp(self.words(tokens)))  # type: ignore[no-any-return]


def of_length(size: int, number: int) -> Tensor:
    """Sequences of this length."""
    return batch(number, 4, size, 8)


def two_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(MLP(), two_ranks(), {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence() -> nn.Module:
    torch.manual_seed(0)
    plan = {
        "first": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": SequenceParallel(),
    }
    whole = {"": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))}
    return parallelize_module(parallelize_module(Block(), two_ranks(), plan), two_ranks(), whole[""])


def language(head: Any, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate()), "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(), "head": head,
    }  # fmt: skip
    return parallelize_module(Language(tied=tied), two_ranks(), plan)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def clear_last(model: Any, opt: Any, x: Tensor, clip: float | None = None) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def clear_first(model: Any, opt: Any, x: Tensor, clip: float | None = None) -> Tensor:
    opt.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()
    return loss.detach()


def zeros_stay(model: Any, opt: Any, x: Tensor) -> Tensor:
    opt.zero_grad(set_to_none=False)
    loss = loss_of(model, x)
    loss.backward()
    opt.step()
    return loss.detach()


def accumulated(model: Any, opt: Any, x: Tensor) -> Tensor:
    """Every call adds to the gradients that are there, and none clears them."""
    loss = loss_of(model, x)
    loss.backward()
    opt.step()
    return loss.detach()


def batch(number: int, *shape: int) -> Tensor:
    """The same on both ranks: they divide the work on one batch."""
    torch.manual_seed(number)
    return torch.randn(*(shape or (4, 6, 8)))


def words(number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.randint(0, 12, (4, 6))


def pieces(one: Any) -> Any:
    """What of a tensor has to be equal."""
    return (one.placements, tuple(one.shape), one.to_local()) if isinstance(one, DTensor) else (None, None, one)


def same(one: Any, other: Any) -> bool:
    """Whether two tensors have the same bits on this rank, and are placed alike."""
    if one is None or other is None:
        return one is other
    (placed, shape, local), (others_placed, others_shape, others_local) = pieces(one), pieces(other)
    return placed == others_placed and shape == others_shape and torch.equal(local, others_local)


def held(model: Any, opt: Any) -> list[Any]:
    """Parameters, gradients and optimizer state."""
    params = list(model.parameters())
    state = [leaf for one in params for _, leaf in sorted(opt.state[one].items()) if isinstance(leaf, Tensor)]
    return [*params, *(one.grad for one in params), *state]


def equal_to_eager(
    make: Callable[[], Any], optimizer: Any, step: Any, data: Callable[[int], Tensor] = batch, **options: Any
) -> tuple[int, list[str]]:
    """Bitwise over five calls, one of them with another rate; the number of traces, and the collectives of the plan."""
    eager, model = make(), make()
    opt, own = optimizer(eager.parameters()), optimizer(model.parameters())
    compiled = ws.compile(step, fullgraph=True, **options)
    for number in range(5):
        for group in (*opt.param_groups, *own.param_groups):
            group["lr"] = 0.1 if number == 3 else 0.01
        assert same(compiled(model, own, data(number)), step(eager, opt, data(number))), number
        pairs = list(zip(held(eager, opt), held(model, own), strict=True))
        assert [place for place, pair in enumerate(pairs) if not same(*pair)] == [], number
    assert any(isinstance(one, DTensor) for one in model.parameters())
    return compiled.cache_info().traces, collectives(compiled.plan)


def collectives(plan: str) -> list[str]:
    return [line.split()[1] for line in plan.splitlines() if line.startswith("#")]


def calls_of_eager_code(make: Callable[[], Any], optimizer: Any, step: Any, data: Callable[[int], Tensor]) -> int:
    """How many collectives one eager call has, after a first one."""
    model = make()
    opt = optimizer(model.parameters())
    step(model, opt, data(0))
    with CommDebugMode() as communication:
        step(model, opt, data(1))
    return int(communication.get_total_counts())


def compared(
    make: Callable[[], Any], optimizer: Any, step: Any, data: Callable[[int], Tensor] = batch
) -> tuple[int, int, int]:
    """Bitwise as eager training: the number of traces, of collectives in the plan, and of those of an eager call."""
    traces, planned = equal_to_eager(make, optimizer, step, data, backend="eager")
    return traces, len(planned), calls_of_eager_code(make, optimizer, step, data)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], Tensor]]] = {
    "sequence": (sequence, batch),
    "words": (partial(language, ColwiseParallel(output_layouts=Replicate())), words),
    "tied words": (partial(language, ColwiseParallel(output_layouts=Replicate()), tied=True), words),
    "logits in parts": (partial(language, ColwiseParallel(use_local_output=False)), words),
}


@pytest.mark.parametrize("clip", [None, 0.1], ids=["", "clipped"])
@pytest.mark.parametrize("step", [clear_first, clear_last], ids=["first", "last"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused"])
def test_an_mlp_trains_as_in_eager_code(pool2: Any, name: str, step: Any, clip: float | None) -> None:
    """Gradients that the first call finds are none, so that a step which clears them first has a second trace."""
    traces = 1 if step is clear_last else 2
    count = 1 if clip is None else 2  # one for the forward, one for the norm of all gradients
    assert pool2.run(compared, mlp, OPTIMIZERS[name], partial(step, clip=clip)) == [(traces, count, count)] * 2


@pytest.mark.parametrize("name", ["sgd", "sgd-damped", "adamw", "adamw-fused"])
@pytest.mark.parametrize(
    "step", [clear_first, partial(clear_last, clip=0.1), accumulated], ids=["first", "last", "sum"]
)
def test_gradients_of_norms_are_sums_still(pool2: Any, step: Any, name: str) -> None:
    """Each rank has seen its piece of the sequence. DTensor adds them up, in clipping and in the optimizer.

    AdamW reads each twice, and eager code adds them up twice. A graph does so once.
    """
    for traces, planned, eager in pool2.run(compared, sequence, OPTIMIZERS[name], step):
        assert traces == (2 if name == "sgd-damped" or not isinstance(step, partial) else 1)
        assert planned < eager if name == "adamw" else 0 < planned <= eager


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fakes of uneven pieces are refused a view that eager code has")
def test_sequences_that_two_ranks_do_not_divide(pool2: Any) -> None:
    """Ranks compute with parts of other sizes. What a step leaves is cut evenly all the same."""
    data = partial(of_length, 5)
    for traces, planned, eager in pool2.run(compared, sequence, OPTIMIZERS["sgd"], clear_last, data):
        assert traces == 1
        assert 0 < planned <= eager


@pytest.mark.parametrize("name", [name for name in MODELS if name != "sequence"])
@pytest.mark.parametrize("step", [clear_first, partial(clear_last, clip=0.1)], ids=["first", "last"])
def test_embeddings(pool2: Any, step: Any, name: str) -> None:
    make, data = MODELS[name]
    for traces, planned, eager in pool2.run(compared, make, OPTIMIZERS["adamw"], step, data):
        assert traces == (1 if isinstance(step, partial) else 2)
        assert 0 < planned <= eager


@pytest.mark.parametrize("step", [zeros_stay, accumulated])
@pytest.mark.parametrize("name", ["sgd", "adamw-foreach"])
def test_gradients_are_added_to_those_that_are_there(pool2: Any, name: str, step: Any) -> None:
    assert pool2.run(compared, mlp, OPTIMIZERS[name], step) == [(2, 1, 1)] * 2


def returns_dtensors(model: Any, opt: Any, x: Tensor) -> Any:
    loss = clear_last(model, opt, x)
    return loss, model.up.weight.detach() * 2, {"weight": model.up.weight}, model.down.weight.to_local()


def results() -> None:
    eager, model, compiled = mlp(), mlp(), ws.compile(returns_dtensors, fullgraph=True)
    opt, own, views = SGD(eager.parameters()), SGD(model.parameters()), list[Tensor]()
    for number in range(3):
        theirs, ours = returns_dtensors(eager, opt, batch(number)), compiled(model, own, batch(number))
        assert torch.equal(theirs[0], ours[0])
        assert same(theirs[1], ours[1])
        assert ours[2]["weight"] is model.up.weight
        views.append(ours[3])
        assert all(torch.equal(one, model.down.weight.to_local()) for one in views)  # they show what later calls write


def test_results_that_are_dtensors_are_so_again(pool2: Any) -> None:
    pool2.run(results)


def cross_entropy_in_parts(model: Any, opt: Any, tokens: Tensor) -> Tensor:
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def test_a_loss_of_logits_in_parts(pool2: Any) -> None:
    make, data = MODELS["logits in parts"]
    for traces, planned, eager in pool2.run(compared, make, OPTIMIZERS["adamw"], cross_entropy_in_parts, data):
        assert traces == 1
        assert 0 < planned <= eager


def between_calls() -> tuple[int, list[str]]:
    """A checkpoint, an evaluation, an eager step, a load and gradients placed otherwise."""
    eager, model, compiled = sequence(), sequence(), ws.compile(accumulated, fullgraph=True)
    opt, own = SGD(eager.parameters()), SGD(model.parameters())
    saved: Any = None
    for number in range(7):
        step = accumulated if number == 3 else compiled
        assert torch.equal(accumulated(eager, opt, batch(number)), step(model, own, batch(number))), number
        for one, other in zip(eager.state_dict().values(), model.state_dict().values(), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())
        with torch.no_grad():
            assert torch.equal(eager(batch(9)), model(batch(9)))
        if number == 1:
            saved = copy.deepcopy(model.state_dict())
        if number == 4:
            for one in (eager, model):
                one.load_state_dict(saved)
        if number == 5:
            for net in (eager, model):
                net.first.weight.grad = net.first.weight.grad.redistribute(placements=[Replicate()])
    return compiled.cache_info().traces, list(compiled.cache_info().reasons)


def test_what_happens_between_calls(pool2: Any) -> None:
    for traces, reasons in pool2.run(between_calls):
        assert traces == 3
        assert "first.weight had no gradient" in reasons[0]
        assert "the gradient of first.weight at entry was placed as (Partial(sum),), is (Replicate(),)" in reasons[1]


def with_inductor(step: Any) -> tuple[int, list[str]]:
    eager, model, compiled = mlp(), mlp(), ws.compile(step, fullgraph=True, backend="inductor")
    opt, own = OPTIMIZERS["adamw"](eager.parameters()), OPTIMIZERS["adamw"](model.parameters())
    for number in range(4):
        torch.testing.assert_close(compiled(model, own, batch(number)), step(eager, opt, batch(number)))
        for one, other in zip(held(eager, opt), held(model, own), strict=True):
            assert (one is None) is (other is None)
            if isinstance(one, DTensor):
                assert one.placements == other.placements
                torch.testing.assert_close(other.to_local(), one.to_local(), atol=1e-5, rtol=1e-4)
    return compiled.cache_info().traces, collectives(compiled.plan)


def test_inductor_compiles_between_the_collectives(pool2: Any) -> None:
    assert pool2.run(with_inductor, partial(clear_first, clip=0.1)) == [(2, ["all_reduce"] * 2)] * 2


def told() -> tuple[str, str, list[str]]:
    model, compiled = mlp(), ws.compile(clear_first, fullgraph=True, backend="eager")
    opt = SGD(model.parameters())
    compiled(model, opt, batch(0))
    with pytest.raises(ws.ConfigError, match="Compare with the eager step"):
        compiled.verify(model, opt, batch(0))
    with pytest.raises(ws.ArtifactError, match="steps of DTensors are captured in every process"):
        compiled.save("step.ws")
    with pytest.raises(ws.ConfigError, match="Leave strategy out: such a model communicates itself"):
        ws.compile(clear_first, strategy=ws.DDP())(model, opt, batch(0))
    return str(compiled.explain()), compiled.plan, [str(one.name) for one in compiled.program().outputs]


def test_what_is_told_of_the_step(pool2: Any) -> None:
    for explained, plan, outputs in pool2.run(told):
        assert "4 parameters, 576 B; tensor parallel on 2 ranks, backend eager" in " ".join(explained.split())
        assert "all_reduce float32" in explained
        assert "param up.weight float32[8, 8] trainable" in plan
        assert "down.bias" in outputs


def uneven() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8))
    return parallelize_module(net, two_ranks(), {"0": RowwiseParallel(input_layouts=Replicate())}), words(0)


def an_argument() -> Any:
    return mlp(), DTensor.from_local(batch(0), two_ranks(), [Replicate()])


def wrapped_beside() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(mlp(), DistributedDataParallel(nn.Linear(8, 8))), batch(0)


def sharded_beside() -> Any:
    torch.manual_seed(1)
    last = nn.Linear(8, 8)
    fully_shard(last, mesh=two_ranks())
    return nn.Sequential(mlp(), last), batch(0)


def sharded_momentum() -> Any:
    return MODELS["words"][0](), words(0)


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "uneven": (uneven, "0.weight is a DTensor of [13, 8] that is cut along dim 0 into 2 parts, which are not of one"),
    "an argument": (an_argument, "An argument of the step is a DTensor of [4, 6, 8]. Pass a plain tensor"),
    "wrapped beside": (wrapped_beside, "leave those plain, or make two steps of it"),
    "sharded beside": (sharded_beside, "leave those plain, or make two steps of it"),
    "momentum": (sharded_momentum, "SGD makes the momentum of a DTensor of [12, 8]"),
}


def as_eager_code(make: Callable[[], Any]) -> str:
    (eager, x), (model, _) = make(), make()
    opt, own, compiled = SGD(eager.parameters()), SGD(model.parameters()), ws.compile(clear_last)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wholestep").addHandler(handler)
    try:
        for number in range(3):
            assert same(clear_last(eager, opt, x), compiled(model, own, x)), number
    finally:
        logging.getLogger("wholestep").removeHandler(handler)
    assert all(map(same, held(eager, opt), held(model, own)))
    assert sum(line.startswith("clear_last is live. It has DTensors. It runs as eager code") for line in said) == 1
    return str(compiled.explain())


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_runs_as_eager_code(pool2: Any, name: str) -> None:
    make, reason = REFUSALS[name]
    for explained in pool2.run(as_eager_code, make):
        assert reason in " ".join(explained.split())
