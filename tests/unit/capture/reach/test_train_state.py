"""State becomes named inputs, once each; optimizer state appears only where eager training would leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit.capture.steps import Blocks, captured, names, program_of, train
from wholestep.capture.reach.train_state import LazyState
from wholestep.ir.program import InputKind


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class Partly(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def adam(module: nn.Module, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(module.parameters(), lr=0.1, **options)


X = torch.ones(3, 4)


def test_tied_weights_are_one_input() -> None:
    model = Tied()
    program = program_of(train, model, adam(model), torch.tensor([1, 2]))
    assert names(program, InputKind.PARAM) == ["embed.weight"]
    assert len(names(program, InputKind.OPTIMIZER)) == 3


def test_names_are_fully_qualified() -> None:
    model = Blocks()
    program = program_of(train, model, adam(model), torch.ones(2, 8))
    assert names(program, InputKind.PARAM) == [name for name, _ in model.named_parameters()]
    state = [f"opt.{key}.{name}" for name, _ in model.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(names(program, InputKind.OPTIMIZER)) == sorted(state)
    assert names(program, InputKind.USER) == ["args.0"]


def test_two_modules_get_prefixes() -> None:
    generator, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))

    def step(generator: nn.Module, critic: nn.Module, x: Tensor) -> Tensor:
        return critic(generator(x)).sum()

    program = program_of(step, generator, critic, X)
    layers = ("generator", "critic.0", "critic.1")
    assert names(program, InputKind.PARAM) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    assert set(names(program, InputKind.BUFFER)) == {
        "critic.1.running_mean", "critic.1.running_var", "critic.1.num_batches_tracked"
    }  # fmt: skip


def test_loose_tensors_have_the_name_of_their_holder() -> None:
    weight, offset = torch.ones(4, requires_grad=True), torch.ones(4)

    def step(x: Tensor) -> Tensor:
        return (x * weight + offset).sum()

    program = program_of(step, X)
    assert names(program, InputKind.PARAM) == ["weight"]
    assert names(program, InputKind.TENSOR) == ["offset"]


def test_state_of_a_failed_capture_is_removed() -> None:
    model = nn.Linear(4, 2)
    opt = adam(model)

    def failing(x: Tensor) -> Tensor:
        loss = train(model, opt, x)
        return loss if loss > 0 else -loss

    with pytest.raises(ws.CaptureError):
        captured(failing, X)
    assert dict(opt.state) == {}
    assert [param.grad for param in model.parameters()] == [None, None]


def test_state_that_was_there_survives_a_failed_capture() -> None:
    model = nn.Linear(4, 2)
    opt = adam(model)
    train(model, opt, X)
    before = {param: dict(held) for param, held in opt.state.items()}
    values = [tensor.clone() for held in before.values() for tensor in held.values()]

    def failing(x: Tensor) -> float:
        return float(train(model, opt, x).detach())

    with pytest.raises(ws.CaptureError):
        captured(failing, X)
    for param, held in before.items():
        assert all(opt.state[param][key] is tensor for key, tensor in held.items())
    now = [tensor for held in before.values() for tensor in held.values()]
    assert all(torch.equal(a, b) for a, b in zip(values, now, strict=True))


def test_an_undone_capture_leaves_no_state() -> None:
    model = nn.Linear(4, 2)
    opt = adam(model)
    found = captured(train, model, opt, X)
    assert len(opt.state) == 2
    found.undo()
    assert dict(opt.state) == {}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adadelta])
def test_unused_parameters_get_no_state(kind: Any) -> None:
    model, twin = Partly(), Partly()
    opt, theirs = kind(model.parameters(), lr=0.1), kind(twin.parameters(), lr=0.1)
    ws.compile(train)(model, opt, X)
    train(twin, theirs, X)
    assert set(opt.state) == {model.used.weight, model.used.bias}
    assert opt.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()


def test_state_is_created_without_a_step() -> None:
    model = nn.Linear(4, 2)
    opt = adam(model)
    weight = model.weight.detach().clone()
    lazy = LazyState([("opt", opt)])
    assert all(not tensor.any() for held in opt.state.values() for tensor in held.values())
    assert torch.equal(model.weight, weight)
    assert model.weight.grad is None
    lazy.discard({id(model.weight)}, {id(opt)})
    assert list(opt.state) == [model.weight]


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_of_the_first_step_is_that_of_eager(dampening: float) -> None:
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    models[1].load_state_dict(models[0].state_dict())
    opts = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=dampening) for m in models]
    step = ws.compile(train)
    for _ in range(3):
        train(models[0], opts[0], X)
        step(models[1], opts[1], X)
        buffers = [[held["momentum_buffer"] for held in opt.state.values()] for opt in opts]
        assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))


@pytest.mark.parametrize("had_one", [False, True], ids=["none_before", "one_before"])
def test_a_gradient_left_on_an_argument_is_refused(had_one: bool) -> None:
    model = nn.Linear(4, 2)
    ours = X.clone().requires_grad_()
    ours.grad = before = torch.ones_like(ours) if had_one else None

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        model.zero_grad()
        return loss

    with pytest.raises(ws.CaptureError, match=r"torch\.autograd"):
        ws.compile(step, fullgraph=True)(ours)
    assert ours.grad is before


def test_mixed_devices_are_named() -> None:
    with pytest.raises(ws.CaptureError, match="weight on cpu, argument tensor 0 on meta"):
        captured(lambda model, x: model(x), nn.Linear(4, 2), X.to("meta"))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_without_a_fixed_rule_are_refused(kind: Any) -> None:
    with pytest.raises(ws.HyperparameterError, match=kind.__name__):
        LazyState([("opt", kind(nn.Linear(2, 2).parameters()))])


def test_a_loose_tensor_that_was_frozen_keeps_no_gradient_that_the_step_clears() -> None:
    weights = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)]

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        for weight in weights:
            weight.grad = None
        loss = (weights[0] * x * weights[1]).sum()
        loss.backward()
        return loss.detach()

    step(torch.ones(3))
    weights[1].requires_grad_(False)
    step(torch.ones(3))
    assert [weight.grad is None for weight in weights] == [False, True]


def test_a_frozen_parameter_with_a_gradient_gets_no_state_that_nobody_uses() -> None:
    model = nn.Linear(4, 2)
    opt = adam(model)
    model.bias.requires_grad_(False).grad = torch.ones(2)
    step = ws.compile(lambda x: (opt.param_groups[0]["lr"], model(x).sum().detach())[1], backend="eager")
    step(X)
    assert not opt.state
    assert torch.equal(model.bias.grad, torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(("fullgraph", "may_go_live"), [(False, True), (True, False)])
def test_a_step_that_looks_at_state_before_there_is_any(fullgraph: bool, may_go_live: bool) -> None:
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    opts = [adam(model), adam(twin)]

    def make(model: nn.Linear, opt: torch.optim.Optimizer) -> Callable[[Tensor], int]:
        def step(x: Tensor) -> int:
            known = len(opt.state)
            model(x).sum().backward()
            opt.step()
            opt.zero_grad()
            return known

        return step

    step, wanted = ws.compile(make(model, opts[0]), backend="eager", fullgraph=fullgraph), make(twin, opts[1])
    if fullgraph:
        with pytest.raises(ws.CaptureError, match=r"looks at the state of Adam at .*, which has made no step so far"):
            step(X)
        assert not opts[0].state
        return
    assert [step(X) for _ in range(3)] == [wanted(X) for _ in range(3)] == [0, 2, 2]


def test_state_is_there_for_who_looks_behind_the_first_step() -> None:
    model = nn.Linear(4, 2)
    opt = adam(model)

    def call(x: Tensor) -> int:
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()
        return len(opt.state)

    assert ws.compile(call, backend="eager", fullgraph=True)(X) == 2


def closures(model: nn.Linear, opt: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = model(x).square().mean() * (1 + len(opt.state))
            loss.backward()
            return loss

        return opt.step(closure)

    return step


def uses_one(model: nn.Linear, opt: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        (x @ model.weight.T).sum().backward()
        opt.step()
        opt.zero_grad()
        return len(opt.state), model.bias in opt.state

    return step


def uses_another_later(model: nn.Linear, opt: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        (x @ model.weight.T).sum().backward()
        opt.step()
        known = len(opt.state)
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()
        return known, len(opt.state)

    return step


def test_a_closure_that_clears_gradients_from_before_and_makes_none_leaves_no_state() -> None:
    model = nn.Linear(4, 2)
    opt = adam(model)
    model.weight.grad = torch.ones_like(model.weight)

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            opt.zero_grad()
            return model(x).detach().mean()

        return opt.step(closure)

    ws.compile(step, backend="eager", fullgraph=True)(X)
    assert not opt.state


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("make", [closures, uses_one, uses_another_later])
@pytest.mark.parametrize("kind", [adam, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
def test_the_step_sees_the_state_that_it_would_have_made(
    make: Callable[..., Callable[[Tensor], Any]], kind: Callable[[nn.Linear], torch.optim.Optimizer], may_go_live: bool
) -> None:
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    opt, other = kind(model), kind(twin)
    step, wanted = ws.compile(make(model, opt), backend="eager"), make(twin, other)
    for _ in range(3):
        assert str(step(X)) == str(wanted(X))
        assert [len(one) for one in opt.state.values()] == [len(one) for one in other.state.values()]
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


class WithoutNames(torch.optim.AdamW):
    """Passes on whatever it is given."""

    def _init_group(self, *args: Any, **options: Any) -> Any:
        return super()._init_group(*args, **options)


def test_state_is_made_by_a_class_that_names_no_lists() -> None:
    """An error of ours came of it, in the place of a step."""
    model = nn.Linear(4, 2)
    opt = WithoutNames(model.parameters())
    captured(train, model, opt, X)
    assert set(opt.state[model.weight]) == {"step", "exp_avg", "exp_avg_sq"}
