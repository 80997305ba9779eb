"""Steps that cannot become one graph: one clear error that names the line, and nothing of the user's is touched."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from tests.behaviour.small_models import FEATURES, loss_of, sgd
from tests.behaviour.untouched import assert_untouched, batch, everything, net, place_of, untouched, warm_up
from tests.harness.training import backward_and_step

HERE = Path(__file__).name

STEPS: dict[str, Callable[..., Any]] = {}


def refused(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that must be refused at the line that carries the mark."""
    STEPS[step.__name__] = step
    return step


@refused
def branch_on_a_tensor(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    if loss > 3:  # <- here
        loss = loss / 2
    return backward_and_step(loss, opt)


@refused
def branch_on_an_item(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    if loss.item() > 3:  # <- here
        loss = loss / 2
    return backward_and_step(loss, opt)


@refused
def branch_after_the_update(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = backward_and_step(loss_of(model, x, y), opt)
    if model[0].weight.isnan().any():  # <- here
        loss = loss.nan_to_num()
    return loss


@refused
def turned_into_a_float(model: Any, opt: Any, x: Tensor, y: Tensor) -> float:
    return float(backward_and_step(loss_of(model, x, y), opt))  # <- here


@refused
def turned_into_an_index(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    kept = x[: int(y.max())]  # <- here
    return backward_and_step(loss_of(model, kept, y[: len(kept)]), opt)


@refused
def converted_to_numpy(model: Any, opt: Any, x: Tensor, y: Tensor) -> Any:
    loss = backward_and_step(loss_of(model, x, y), opt)
    return loss.detach().numpy()  # <- here


@refused
def formatted_with_a_precision(model: Any, opt: Any, x: Tensor, y: Tensor) -> str:
    loss = backward_and_step(loss_of(model, x, y), opt)
    return f"{loss.detach():.3f}"  # <- here


@torch.library.custom_op("wholestep_bad_input::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x * 2


@refused
def operator_without_fake_kernel(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    doubled = without_fake(x)  # <- here
    return backward_and_step(loss_of(model, doubled, y), opt)


@refused
def shapes_that_do_not_fit(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x) @ x  # <- here
    return backward_and_step(logits.mean(), opt)


@refused
def devices_that_do_not_fit(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    far = torch.zeros(5, 3, device="meta")
    logits = model(x) + far  # <- here
    return backward_and_step(F.cross_entropy(logits, y), opt)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", STEPS)
def test_is_refused_at_its_line(name: str, warm: bool) -> None:
    module = net()
    opt = sgd(module)
    if warm:
        warm_up(module, opt)
    x, y = batch()
    step = ws.compile(STEPS[name], backend="eager", fullgraph=True)
    with (
        untouched(module=module, opt=opt, x=x, y=y),
        pytest.raises(ws.CaptureError, match=re.escape(place_of(STEPS[name])) + r"\b"),
    ):
        step(module, opt, x, y)


def test_the_models_are_usable_after_an_error() -> None:
    """The step that was refused, mended: it gives what eager code gives."""
    torch.manual_seed(0)
    twins = [net(), net()]
    twins[1].load_state_dict(twins[0].state_dict())
    opts = [sgd(module) for module in twins]
    x, y = batch()
    with pytest.raises(ws.CaptureError):
        ws.compile(branch_on_a_tensor, backend="eager", fullgraph=True)(twins[0], opts[0], x, y)
    good = ws.compile(
        lambda model, opt, x, y: backward_and_step(loss_of(model, x, y), opt), backend="eager", fullgraph=True
    )
    for _ in range(3):
        torch.manual_seed(1)
        compiled = good(twins[0], opts[0], x, y)
        torch.manual_seed(1)
        assert torch.equal(compiled, backward_and_step(loss_of(twins[1], x, y), opts[1]))
    assert_untouched(everything(module=twins[1].state_dict()), everything(module=twins[0].state_dict()))


def test_own_exception_of_the_step_comes_through() -> None:
    def step(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(model, x, y), opt)
        raise ValueError("my own complaint")  # <- here
        return loss

    module = net()
    opt = sgd(module)
    x, y = batch()
    with untouched(module=module, opt=opt), pytest.raises((ValueError, ws.CaptureError), match="my own complaint"):
        ws.compile(step, backend="eager", fullgraph=True)(module, opt, x, y)


def test_error_while_the_graph_runs_leaves_everything() -> None:
    """An index out of range is met in the forward, after the statistics of the batch norm have moved."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.table = net(), nn.Embedding(3, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.body(x) + self.table(y)).square().mean()

    module = Net()
    opt = sgd(module)

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(module(x, y), opt)

    x, y = batch()
    step(x, y)
    before = everything(module=module, opt=opt)
    with pytest.raises((IndexError, ws.WholestepError)):
        step(x, y + 3)
    after = everything(module=module, opt=opt)
    before["rng"] = after["rng"]  # the dropout before the failure has drawn, as it would have eagerly
    assert_untouched(before, after)


def lbfgs_step(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    return opt.step(closure)  # <- here


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_detection_of_anomalies_is_refused_before_the_first_call_and_later() -> None:
    """It would look at values, so it is never left out in silence."""
    model = nn.Linear(FEATURES, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return backward_and_step(model(x).square().mean(), opt)

    x, weight = torch.randn(2, FEATURES), model.weight.detach().clone()
    with torch.autograd.detect_anomaly(), pytest.raises(ws.CaptureError, match="looks at the values of all gradients"):
        step(x)
    assert torch.equal(model.weight, weight)
    with torch.autograd.detect_anomaly(check_nan=False):
        step(x)
    step(x)
    assert step.cache_info().traces == 1
    weight = model.weight.detach().clone()
    with torch.autograd.detect_anomaly(), pytest.raises(ws.CaptureError, match="without wholestep"):
        step(x)
    assert torch.equal(model.weight, weight)


def test_parameters_without_a_shape_are_refused_until_they_have_one() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.LazyLinear(3))

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    x = torch.randn(2, FEATURES)
    with pytest.raises(ws.CaptureError, match=r"1\.weight has no shape yet(.|\n)*Call the model once") as raised:
        step(x)
    assert HERE in str(raised.value)
    assert isinstance(model[1], nn.LazyLinear)
    with torch.no_grad():
        model(x)
    assert torch.equal(step(x), model(x).square().mean())


def test_lazy_modules_make_their_parameters_in_the_first_call() -> None:
    """Which is eager code, where nothing travels; the second is captured."""

    def training() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.LazyLinear(3), nn.LazyBatchNorm1d())
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            return backward_and_step(model(x).square().mean(), opt).detach()

        return model, step

    (eager, wanted), (ours, fn) = training(), training()
    step = ws.compile(fn, backend="eager")
    for call in range(4):
        x = torch.randn(5, FEATURES)
        torch.manual_seed(call)
        expected = wanted(x)
        torch.manual_seed(call)
        assert torch.equal(step(x), expected)
    pairs = zip(eager.state_dict().values(), ours.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert "in one graph" in str(step.explain())


def test_lbfgs_is_refused() -> None:
    module = net()
    opt = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=2)
    x, y = batch()
    with untouched(module=module, opt=opt), pytest.raises(ws.CaptureError, match="LBFGS") as raised:
        ws.compile(lbfgs_step, backend="eager", fullgraph=True)(module, opt, x, y)
    assert HERE in str(raised.value)


def sparse_step(model: Any, opt: Any, tokens: Tensor) -> Tensor:
    loss = model(tokens).square().mean()
    loss.backward()
    opt.step()  # <- here
    opt.zero_grad()
    return loss


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse_gradients", "dense_gradients"])
def test_sparse_adam_is_refused(sparse: bool) -> None:
    """Its step counter is a Python number: a trace would freeze it."""
    module = nn.Embedding(10, 4, sparse=sparse)
    opt = torch.optim.SparseAdam(module.parameters(), lr=0.1)
    with untouched(module=module, opt=opt), pytest.raises(ws.CaptureError, match="SparseAdam") as raised:
        ws.compile(sparse_step, backend="eager", fullgraph=True)(module, opt, torch.tensor([1, 2, 3]))
    assert HERE in str(raised.value)


def test_more_retraces_than_allowed_are_an_error_with_all_reasons() -> None:
    module = net()
    opt = sgd(module)

    @ws.compile(backend="eager", max_retraces=2, fullgraph=True, dynamic=False)
    def step(x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(loss_of(module, x, y), opt)

    x, y = batch()
    for rows in (5, 4, 3):  # the first trace and two more
        step(x[:rows], y[:rows])
    before = everything(module=module, opt=opt)
    with pytest.raises(ws.RetraceLimitError) as raised:
        step(x[:2], y[:2])
    text = str(raised.value)
    assert HERE in text
    assert all(f"{rows}, {FEATURES}" in text for rows in (5, 4, 3, 2)), f"the reasons are missing in: {text}"
    assert_untouched(before, everything(module=module, opt=opt))
    step(x[:4], y[:4])  # what is cached still runs


@pytest.mark.parametrize(
    "options",
    [{"strategy": "ddp"}, {"backend": "fast"}, {"max_retraces": -1}, {"passes": 3}, {"mesh": "world"}],
    ids=lambda options: next(iter(options)),
)
def test_options_are_checked_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ws.ConfigError, match=next(iter(options))):
        ws.compile(lambda x: x, **options)


class OneForTwo(torch.optim.Optimizer):
    """Replaces two tensors of its state that are one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for param in self.param_groups[0]["params"]:
            zeros = torch.zeros_like(param)
            self.state[param].update(first=zeros, second=zeros)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["first"], state["second"] = state["first"] + param.grad, state["second"] + param.grad.square()
            param.sub_(state["first"] / (1 + state["second"].sqrt()))


def test_one_tensor_in_two_places_that_are_given_different_values() -> None:
    """A graph has one input for both."""
    module = net()
    opt, (x, y) = OneForTwo(module.parameters()), batch()
    step = ws.compile(
        lambda model, opt, x, y: backward_and_step(loss_of(model, x, y), opt), backend="eager", fullgraph=True
    )
    said = pytest.raises(ws.CaptureError, match="holds under 2 keys")
    with untouched(module=module, opt=opt, x=x, y=y), said:
        step(module, opt, x, y)


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda leaf: leaf[:2],
    "view_of_a_result": lambda leaf: (leaf * 2)[:2],
    "result": lambda leaf: leaf * 2,
}


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("had_a_gradient", [False, True])
@pytest.mark.parametrize("may_go_live", [True])
def test_a_backward_that_leaves_the_step_is_refused_and_runs_live(
    how: str, had_a_gradient: bool, may_go_live: bool
) -> None:
    """The argument was computed from a leaf outside of the step, which gets a gradient in eager code."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    def leaf() -> Tensor:
        made = torch.ones(4, FEATURES, requires_grad=True)
        made.grad = torch.ones_like(made) if had_a_gradient else None
        return made

    module, eager, ours = nn.Linear(FEATURES, 3), leaf(), leaf()
    with pytest.raises(ws.CaptureError, match=r"backward goes on beyond (.|\n)*with torch\.autograd\.grad"):
        ws.compile(step, backend="eager", fullgraph=True)(module, COMPUTED[how](leaf()))
    live = ws.compile(step, backend="eager")
    for _ in range(3):
        assert torch.equal(step(module, COMPUTED[how](eager)), live(module, COMPUTED[how](ours)))
        assert torch.equal(eager.grad, ours.grad)
    one_graph = ws.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(one_graph(module, COMPUTED[how](eager).detach()), step(module, COMPUTED[how](ours)))


def test_a_gradient_of_what_was_computed_outside_is_returned() -> None:
    leaf = torch.ones(4, FEATURES, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.square().sum(), x)[0]

    compiled = ws.compile(step, backend="eager", fullgraph=True)
    for how in COMPUTED.values():
        assert torch.equal(compiled(how(leaf)), step(how(leaf)))
    assert leaf.grad is None
