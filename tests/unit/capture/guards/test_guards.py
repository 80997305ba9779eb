"""Everything a trace depends on is looked at before a graph is used again, with the native guards and without them."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import wholestep as ws
from wholestep.capture.guards.state_guards import ContainerGuard
from wholestep.capture.native import build
from wholestep.capture.python import tree_util
from wholestep.live.opaque.functions import clear_grads
from wholestep.util.torch_switches import torch_switches

WEIGHT_OF_LOSS = 1.0


class Body(nn.Module):
    """A linear layer, a batch norm, and a Python number that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(4, 3), nn.BatchNorm1d(3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.scale * self.linear(x))


@dataclass
class Bench:
    """A captured step with everything that can be changed about it."""

    model: Body = field(default_factory=Body)
    options: dict[str, Any] = field(default_factory=dict)
    keep_grads: bool = False
    factors: list[Any] = field(default_factory=lambda: [1.0, 2.0])
    table: dict[str, float] = field(default_factory=lambda: {"a": 1.0})
    args: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        # What guards look at is the same for every way to update; this one is the quickest to capture.
        self.opt = torch.optim.AdamW(self.model.parameters(), **{"lr": 0.01, "fused": True, **self.options})
        self.args = self.args or (torch.randn(5, 4), 1.0)
        self.handle = self.model.norm.register_forward_hook(lambda module, args, out: 2 * out)
        self.param_handle = self.model.linear.bias.register_hook(lambda grad: 2 * grad)
        model, opt, factors, table, keep = self.model, self.opt, self.factors, self.table, self.keep_grads
        offset = 0.0

        def step(x: Tensor, factor: float) -> Tensor:
            out = model(x) * factor * sum(factors) * table["a"] * WEIGHT_OF_LOSS + offset
            loss = out.square().mean()
            loss.backward()
            opt.step()
            if not keep:
                opt.zero_grad()
            return loss

        def set_offset(number: float) -> None:
            nonlocal offset
            offset = number

        self.set_offset = set_offset
        self.step = ws.compile(step, backend="eager")
        for _ in range(3):  # the second call meets gradients if they are kept, the third nothing new
            self.step(*self.args)
        assert self.why_not() is None

    def why_not(self, *args: Any) -> str | None:
        """What the guards of the last trace say to a call."""
        leaves, spec = tree_util.flatten(((args or self.args), {}))
        return self.step._last().captured.guards.why_not(leaves, spec)

    @property
    def weight(self) -> nn.Parameter:
        return self.model.linear.weight

    @property
    def group(self) -> dict[str, Any]:
        return self.opt.param_groups[0]

    def moments(self) -> dict[str, Tensor]:
        return self.opt.state[self.weight]


Change = Callable[[Bench], object]


class Special(nn.Parameter):
    """A parameter by another name."""


def replace_parameter(bench: Bench) -> None:
    bench.model.linear.weight = nn.Parameter(bench.weight.detach().clone())


def replace_parameter_of_the_optimizer(bench: Bench) -> None:
    bench.group["params"][0] = nn.Parameter(bench.weight.detach().clone())


def data_of_other_dtype(bench: Bench) -> None:
    bench.weight.data = bench.weight.data.double()


def data_of_other_shape(bench: Bench) -> None:
    bench.weight.data = torch.zeros(3, 5)


def data_of_other_strides(bench: Bench) -> None:
    bench.weight.data = bench.weight.data.t().contiguous().t()


def restride_parameter(bench: Bench) -> None:
    with torch.no_grad():
        bench.weight.as_strided_((3, 4), (1, 3))


def set_parameter(bench: Bench) -> None:
    with torch.no_grad():
        bench.weight.set_(torch.zeros(7))


def swap_parameters(bench: Bench) -> None:
    torch._C._swap_tensor_impl(bench.weight, bench.model.linear.bias)  # what torch.utils.swap_tensors does in the end


def global_changes(bench: Bench) -> None:
    globals()["WEIGHT_OF_LOSS"] = 3.0


def state_entry_replaced(bench: Bench) -> None:
    bench.moments()["exp_avg"] = torch.zeros(3, 4)


def state_data_replaced(bench: Bench) -> None:
    bench.moments()["exp_avg"].data = torch.zeros(3, 4, dtype=torch.float64)


def buffer_data_replaced(bench: Bench) -> None:
    bench.model.norm.running_mean.data = torch.zeros(3, dtype=torch.float64)  # type: ignore[union-attr]


def buffer_replaced(bench: Bench) -> None:
    bench.model.norm.running_mean = torch.zeros(3)


def add_group(bench: Bench) -> None:
    bench.opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def set_grad(bench: Bench) -> None:
    bench.model.linear.bias.grad = torch.zeros(3)


def set_single_zero_grad(bench: Bench) -> None:
    """A gradient with one element, which is zero: its truth is False, and it is there all the same."""
    bench.weight.grad = torch.zeros(3, 4)


CHANGES: dict[str, tuple[Change, str]] = {
    "parameter_replaced": (replace_parameter, "model.linear.weight"),
    "parameter_of_the_optimizer_replaced": (replace_parameter_of_the_optimizer, "params"),
    "parameter_dtype": (data_of_other_dtype, "linear.weight was float32"),
    "parameter_shape": (data_of_other_shape, "linear.weight was float32[3, 4], is float32[3, 5]"),
    "parameter_strides": (data_of_other_strides, "strides [4, 1]"),
    "buffer_resized": (lambda b: b.model.norm.running_mean.resize_(5), "running_mean was float32[3], is float32[5]"),
    "parameter_restrided": (restride_parameter, "strides [1, 3]"),
    "parameter_set": (set_parameter, "linear.weight was float32[3, 4], is float32[7]"),
    "parameter_of_other_class": (lambda b: setattr(b.weight, "__class__", Special), "Special"),
    "parameters_swapped": (swap_parameters, "linear.weight was float32[3, 4], is float32[3]"),
    "parameter_frozen": (lambda b: b.weight.requires_grad_(False), "linear.weight was"),
    "gradient_set": (set_grad, "had no gradient"),
    "zero_gradient_set": (set_single_zero_grad, "had no gradient"),
    "parameter_hook_added": (lambda b: b.weight.register_hook(lambda g: g), "a hook of linear.weight"),
    "accumulate_hook_added": (
        lambda b: b.weight.register_post_accumulate_grad_hook(lambda p: None),
        "a hook of linear.weight",
    ),
    "parameter_hook_removed": (lambda b: b.param_handle.remove(), "a hook of linear.bias"),
    "module_hook_added": (lambda b: b.model.linear.register_forward_hook(lambda m, a, o: o), "_forward_hooks"),
    "module_pre_hook_added": (lambda b: b.model.linear.register_forward_pre_hook(lambda m, a: a), "_forward_pre_hooks"),
    "backward_hook_added": (
        lambda b: b.model.linear.register_full_backward_hook(lambda m, i, o: None),
        "model.linear",
    ),
    "module_hook_removed": (lambda b: b.handle.remove(), "_forward_hooks"),
    "module_attribute": (lambda b: setattr(b.model, "scale", 2.0), "model.scale was 1.0, is 2.0"),
    "module_attribute_of_torch": (lambda b: setattr(b.model.norm, "momentum", 0.2), "momentum"),
    "module_attribute_added": (lambda b: setattr(b.model, "other", 1), "model.other"),
    "submodule_replaced": (lambda b: setattr(b.model, "linear", nn.Linear(4, 3)), "model.linear"),
    "buffer_replaced": (buffer_replaced, "running_mean"),
    "buffer_dtype": (buffer_data_replaced, "norm.running_mean was float32"),
    "eval_mode": (lambda b: b.model.eval(), "training was True, is False"),
    "eval_mode_of_a_child": (lambda b: b.model.norm.eval(), "norm.training"),
    "global": (global_changes, "WEIGHT_OF_LOSS was 1.0, is 3.0"),
    "closure": (lambda b: b.set_offset(2.0), "offset was 0.0, is 2.0"),
    "type_of_a_number": (lambda b: b.set_offset(0), "offset was 0.0, is 0"),
    "list_item": (lambda b: b.factors.__setitem__(1, 5.0), "factors[1] was 2.0, is 5.0"),
    "list_item_of_other_type": (lambda b: b.factors.__setitem__(0, True), "factors[0] was 1.0, is True"),
    "list_grows": (lambda b: b.factors.append(5.0), "len("),
    "dict_item": (lambda b: b.table.update(a=2.0), "table.a was 1.0, is 2.0"),
    "dict_item_added": (lambda b: b.table.update(b=2.0), "table.b"),
    "state_entry_replaced": (state_entry_replaced, "exp_avg"),
    "state_dtype": (state_data_replaced, "exp_avg"),
    "state_resized": (lambda b: b.moments()["exp_avg_sq"].resize_(2, 2), "exp_avg_sq"),
    "state_restrided": (lambda b: b.moments()["exp_avg"].t_().t_().as_strided_((3, 4), (1, 3)), "exp_avg"),
    "state_requires_grad": (lambda b: b.moments()["exp_avg"].requires_grad_(), "requires_grad"),
    "state_of_other_class": (lambda b: setattr(b.moments()["exp_avg"], "__class__", Special), "Special"),
    "step_resized": (lambda b: b.moments()["step"].resize_(2), "step"),
    "step_of_other_dtype": (lambda b: setattr(b.moments()["step"], "data", torch.tensor(1)), "step"),
    "state_swapped": (
        lambda b: torch._C._swap_tensor_impl(b.moments()["exp_avg"], torch.zeros(2)),
        "exp_avg.linear.weight was float32[3, 4], is float32[2]",
    ),
    "hook_dict_written": (
        lambda b: b.model.linear._forward_hooks.__setitem__(-1, lambda m, a, o: o),
        "_forward_hooks",
    ),
    "module_hook_with_keywords_added": (
        lambda b: b.model.linear.register_forward_hook(lambda m, a, k, o: o, with_kwargs=True),
        "_forward_hooks",
    ),
    "hook_that_is_there_gets_keywords": (
        lambda b: b.model.norm._forward_hooks_with_kwargs.__setitem__(b.handle.id, True),
        "_forward_hooks_with_kwargs",
    ),
    "state_entry_removed": (lambda b: b.moments().pop("exp_avg"), "exp_avg"),
    "state_cleared": (lambda b: b.opt.state.clear(), "state"),
    "state_of_one_parameter_removed": (lambda b: b.opt.state.pop(b.weight), "state"),
    "state_object_replaced": (lambda b: setattr(b.opt, "state", defaultdict(dict)), "state"),
    "group_added": (add_group, "param_groups"),
    "optimizer_hook_added": (lambda b: b.opt.register_step_pre_hook(lambda o, a, k: None), "step_pre_hooks"),
    "optimizer_post_hook_added": (lambda b: b.opt.register_step_post_hook(lambda o, a, k: None), "step_post_hooks"),
    "flag_of_a_group": (lambda b: b.group.update(maximize=True), "maximize was False, is True"),
    "rate_becomes_a_tensor": (lambda b: b.group.update(lr=torch.tensor(0.01)), "lr"),
    "parameter_taken_from_group": (lambda b: b.group["params"].pop(), "params"),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logging.getLogger("wholestep").disabled = True
    yield
    logging.getLogger("wholestep").disabled = False
    globals()["WEIGHT_OF_LOSS"] = 1.0


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_named(kind: str, name: str) -> None:
    change, words = CHANGES[name]
    bench = Bench()
    change(bench)
    reason = bench.why_not()
    assert reason is not None
    assert words in reason
    assert "\n" not in reason
    assert bench.why_not() == reason, "a change that was told once must not be taken for granted"


def test_nothing_is_reported_when_nothing_changed(kind: str) -> None:
    bench = Bench()
    for number in range(4):
        bench.group["lr"] = 0.01 / (1 + number)
        with torch.no_grad():
            bench.weight.mul_(0.9)
            bench.moments()["exp_avg"].zero_()
        bench.model.scale = 1.0
        torch.randn(2).requires_grad_().register_hook(lambda grad: grad)  # a hook of nobody's concern
        bench.args = (torch.randn(5, 4), 1.0)
        bench.step(*bench.args)
        assert bench.why_not() is None
    assert bench.step.cache_info().traces == 1


@pytest.mark.parametrize("keep_grads", [False, True])
def test_a_gradient_at_entry_that_comes_or_goes_is_named(kind: str, keep_grads: bool) -> None:
    bench = Bench(keep_grads=keep_grads)
    assert bench.step.cache_info().traces == 1 + keep_grads
    assert (bench.step._last().captured.guards.fast.state is not None) == (kind == "native")
    if keep_grads:
        bench.weight.grad.zero_()  # type: ignore[union-attr]
        assert bench.why_not() is None
    bench.weight.grad = None if keep_grads else torch.ones(3, 4)
    assert "gradient at entry" in str(bench.why_not())


def test_a_gradient_at_entry_of_another_layout_is_named(kind: str) -> None:
    bench = Bench(keep_grads=True)
    bench.weight.grad = torch.zeros(3, 4).to_sparse()
    assert "sparse" in str(bench.why_not())


def test_the_native_look_takes_over_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is built, the guards compare in Python; what changed before it came is not taken for granted."""
    assert build.wait() == ""
    with monkeypatch.context() as patched:
        patched.setattr(build, "module", lambda: None)
        bench = Bench()
    guards = bench.step._last().captured.guards
    assert guards.fast.state is None
    bench.model.scale = 2.0
    assert "model.scale was 1.0, is 2.0" in str(bench.why_not())
    assert guards.fast.state is None
    bench.model.scale = 1.0
    assert bench.why_not() is None
    assert guards.fast.state is not None
    bench.model.scale = 2.0
    assert "model.scale was 1.0, is 2.0" in str(bench.why_not())


def test_usual_calls_take_the_shortcut(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    entry = bench.step._last()
    shortcut = entry.fast_call
    assert (shortcut is not None) == (kind == "native")
    if shortcut is None:
        return
    hits = shortcut.hits
    assert shortcut((torch.randn(3, 4), 1.0), {}) is shortcut, "another shape"
    assert shortcut.hits == hits
    bench.group["lr"] = 0.5  # what a scheduler does: looked at again, and taken for granted afterwards
    assert isinstance(shortcut(bench.args, {}), Tensor)
    monkeypatch.setattr(ContainerGuard, "why_not", lambda self, call: pytest.fail("nothing has changed"))
    assert isinstance(shortcut(bench.args, {}), Tensor)
    assert isinstance(bench.step(*bench.args), Tensor)
    assert shortcut.hits == hits + 3


def test_a_single_gradient_that_is_zero_is_there(kind: str) -> None:
    """The truth of such a gradient is False; what counts is that it is there."""
    weight = nn.Parameter(torch.ones(1))

    @ws.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        loss = (weight * x).sum()
        loss.backward()
        return loss

    x = torch.ones(1)
    step(x)
    weight.grad = None
    leaves, spec = tree_util.flatten(((x,), {}))
    guards = step._last().captured.guards
    assert guards.why_not(leaves, spec) is None
    weight.grad = torch.zeros(1)
    assert guards.why_not(leaves, spec) == "weight had no gradient at entry, now it has one"


@contextmanager
def uncached() -> Iterator[None]:
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


MODES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "nothing": (nullcontext, ""),
    "no_grad": (torch.no_grad, "grad mode was True, is False"),
    "inference": (torch.inference_mode, "inference mode"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast on CPU"),
    "cache": (uncached, "autocast's cache of weights was True, is False"),
    "anomalies": (torch.autograd.detect_anomaly, "detection of anomalies was False, is True"),
    "tracebacks": (lambda: torch.autograd.detect_anomaly(check_nan=False), ""),
    "weights": (parametrize.cached, "cache of parametrized weights was False, is True"),
    "device": (lambda: torch.device("meta"), "default device was cpu, is meta"),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_the_call_is_named(kind: str, name: str) -> None:
    bench = Bench()
    context, words = MODES[name]
    with context():
        reason = bench.why_not()
    assert (words in str(reason)) if words else reason is None
    assert bench.why_not() is None


SWITCHES: dict[str, tuple[Any, str]] = {
    "TF32 of matrix products": (torch.backends.cuda.matmul, "allow_tf32"),
    "TF32 of cuDNN": (torch.backends.cudnn, "allow_tf32"),
    "cuDNN": (torch.backends.cudnn, "enabled"),
    "benchmarks of cuDNN": (torch.backends.cudnn, "benchmark"),
    "deterministic kernels of cuDNN": (torch.backends.cudnn, "deterministic"),
    "MKLDNN": (torch.backends.mkldnn, "enabled"),
}
ATTENTION: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "memory-efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "cuDNN attention": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "attention by plain operators": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
}


@contextmanager
def switched(name: str) -> Iterator[None]:
    """One switch of `torch_switches` the other way round."""
    if name in ATTENTION:
        read, write = ATTENTION[name]
    else:
        owner, attribute = SWITCHES[name]
        read, write = partial(getattr, owner, attribute), partial(setattr, owner, attribute)
    before = read()
    write(not before)
    try:
        yield
    finally:
        write(before)


def test_every_switch_of_kernels_is_flipped_here() -> None:
    assert {name for name, _ in torch_switches()} == {*SWITCHES, *ATTENTION}


@pytest.mark.parametrize("name", [*SWITCHES, *ATTENTION])
def test_a_switch_of_kernels_is_named(kind: str, name: str) -> None:
    bench = Bench()
    with switched(name):
        assert f"{name} was" in str(bench.why_not())
    assert bench.why_not() is None


def test_a_switch_of_torch_is_named(kind: str) -> None:
    bench = Bench()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert "default dtype" in str(bench.why_not())
    finally:
        torch.set_default_dtype(before)
    try:
        torch.use_deterministic_algorithms(True)
        assert "deterministic algorithms" in str(bench.why_not())
    finally:
        torch.use_deterministic_algorithms(False)
    assert bench.why_not() is None


ARGUMENTS: dict[str, tuple[Callable[[Bench], tuple[Any, ...]], str]] = {
    "shape": (lambda b: (torch.randn(3, 4), 1.0), "argument 0 was float32[5, 4], is float32[3, 4]"),
    "dtype": (lambda b: (torch.randn(5, 4).double(), 1.0), "is float64[5, 4]"),
    "strides": (lambda b: (torch.randn(4, 5).t(), 1.0), "strides"),
    "requires_grad": (lambda b: (torch.randn(5, 4, requires_grad=True), 1.0), "requires_grad"),
    "number": (lambda b: (b.args[0], 2.0), "argument 1 was 1.0, is 2.0"),
    "type_of_a_number": (lambda b: (b.args[0], 1), "argument 1 was 1.0, is 1"),
    "no_tensor": (lambda b: (None, 1.0), "argument 0 was a tensor, is NoneType"),
    "structure": (lambda b: ((b.args[0],), 1.0), "argument 0 was one value, is a tuple of 1"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_changed_argument_is_named(kind: str, name: str) -> None:
    make, words = ARGUMENTS[name]
    bench = Bench()
    assert words in str(bench.why_not(*make(bench)))
    assert bench.why_not() is None


def test_the_same_tensor_given_twice_is_another_trace(kind: str) -> None:
    """It is one input of the graph, so another second tensor must not be ignored."""

    @ws.compile(backend="eager")
    def step(a: Tensor, b: Tensor) -> Tensor:
        return a + 10 * b

    one, two = torch.ones(2), torch.full((2,), 2.0)
    for args in ((one, one), (one, two), (two, two), (two, one)):
        assert torch.equal(step(*args), args[0] + 10 * args[1])
    assert step.cache_info().traces == 2


def test_an_argument_that_belongs_to_the_model_is_named(kind: str) -> None:
    bench = Bench(args=(torch.randn(3), 1.0), model=_Adding())
    assert "is a tensor of the model" in str(bench.why_not(bench.model.norm.running_mean, 1.0))


class _Adding(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear.weight.t()[:, :3] + x)


def test_a_dict_class_of_the_users_is_compared_in_full() -> None:
    """Its items may come from elsewhere, so no version vouches for it."""

    class Config(OrderedDict[str, float]):
        pass

    config = Config(factor=1.0)

    @ws.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        return config["factor"] * x

    x = torch.ones(2)
    assert torch.equal(step(x), x)
    config["factor"] = 2.0
    assert torch.equal(step(x), 2 * x)


def test_a_step_that_asks_whether_there_is_a_gradient_is_asked_again(kind: str) -> None:
    layer = nn.Linear(2, 2)
    step = ws.compile(
        lambda x: (layer(x) if layer.weight.grad is None else layer(x) * 2).detach(), backend="eager", fullgraph=True
    )
    x = torch.ones(1, 2)
    for _ in range(2):
        layer(x).sum().backward()
        assert torch.equal(step(x), layer(x) * 2)
        layer.zero_grad()
        assert torch.equal(step(x), layer(x))


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_that_come_and_go_within_a_step_depend_on_those_before_it(kind: str, clears: bool) -> None:
    """Nothing is left that names a gradient: what is there when a call begins has to be used and cleared."""
    layer = nn.Linear(2, 1)
    clear = partial(clear_grads, list(layer.parameters()), True)

    def call(x: Tensor) -> None:
        if not clears:
            layer(x).sum().backward()
        clear()

    step = ws.compile(call, backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    for number in range(6):
        if number in (2, 3, 5):
            for param in layer.parameters():
                param.grad = torch.ones_like(param)
        step(x)
        assert [param.grad for param in layer.parameters()] == [None, None]
    assert step.cache_info().traces == 2


def test_a_forward_alone_does_not_ask_for_gradients(kind: str) -> None:
    layer = nn.Linear(2, 1)
    step = ws.compile(lambda x: layer(x).detach(), backend="eager", fullgraph=True)
    for number in range(4):
        layer.weight.grad = torch.ones(1, 2) if number % 2 else None
        step(torch.ones(1, 2))
    assert step.cache_info().traces == 1


def test_a_backward_alone_adds_to_what_is_there(kind: str) -> None:
    layer = nn.Linear(2, 1)

    def call(x: Tensor) -> None:
        layer(x).sum().backward()

    step = ws.compile(call, backend="eager", fullgraph=True)
    for number in (1.0, 2.0):
        step(torch.ones(1, 2))
        assert torch.equal(layer.weight.grad, torch.full((1, 2), number))  # type: ignore[arg-type]
    layer.zero_grad()
    step(torch.ones(1, 2))
    assert torch.equal(layer.weight.grad, torch.ones(1, 2))  # type: ignore[arg-type]
    assert step.cache_info().traces == 2
