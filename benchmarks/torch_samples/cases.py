"""A training around each operator and each module of torch, with the inputs that torch's own tests have for it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import sys
import types
import unittest
import unittest.mock
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.testing._utils as testing_utils
from torch import Tensor, nn
from torch.utils import _pytree as pytree

RATE = 1e-3
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Training:
    """One training, made anew for eager code and for the compiled step."""

    step: Callable[..., Any]
    state: Callable[[], list[Tensor]]
    """What it trains, and buffers."""


@dataclass(frozen=True)
class Case:
    """An operator, or a module with the arguments of its constructor."""

    name: str
    build: Callable[[], Training]
    calls: Sequence[Call]
    """Arguments of the step. An operator is called with all of its samples by turns, so that sizes and numbers move."""


def _torchs_own(module: str, name: str) -> Any:
    """Something of torch's tests. They inherit from a class of `expecttest`, which nothing here uses.

    To import them forbids a whole process to set ``torch.backends.*`` except by a context: the process is not theirs.
    """
    if lacks := importlib.util.find_spec("expecttest") is None:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = stand_in
    try:
        with unittest.mock.patch.object(torch.backends, "disable_global_flags"):
            return getattr(importlib.import_module(f"torch.testing._internal.{module}"), name)
    finally:
        if lacks:
            del sys.modules["expecttest"]


@dataclass(frozen=True)
class Choice:
    """Which cases, and how they train."""

    device: str = "cpu"
    samples: int = 6
    """Of each operator or module, at most."""
    only: Collection[str] = ()
    """Names; all where there are none."""
    asks: bool = False
    """Whether a step asks for its loss before the backward, so that it is live."""


def operator_cases(choice: Choice) -> Iterator[Case]:
    """One for each operator that takes float32."""
    for op in _torchs_own("common_methods_invocations", "op_db"):
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if torch.float32 in op.supported_dtypes(choice.device) and (not choice.only or name in choice.only):
            torch.manual_seed(0)
            samples = op.sample_inputs(choice.device, torch.float32, requires_grad=False)
            found = itertools.islice(samples, choice.samples)
            calls = [((one.input, *one.args), dict(one.kwargs)) for one in found]
            yield Case(name, _operator_training(op.op, choice, op.supports_autograd), calls)


def module_cases(choice: Choice) -> Iterator[Case]:
    """One for each module and set of arguments, training and evaluating."""
    module_db = _torchs_own("common_modules", "module_db")
    for info, is_training in itertools.product(module_db, (True, False)):
        if not choice.only or info.name in choice.only:
            torch.manual_seed(0)
            options: Any = {"dtype": torch.float32, "requires_grad": False, "training": is_training}
            samples = info.module_inputs_func(info, device=choice.device, **options)
            found = itertools.islice(samples, choice.samples)
            for number, one in enumerate(found):
                if one.forward_input is not None:
                    made = one.constructor_input
                    build = _module_training(info.module_cls, made.args, made.kwargs, choice, is_training)
                    call = (one.forward_input.args, one.forward_input.kwargs)
                    yield Case(f"{info.name}[{number}]{'' if is_training else ' eval'}", build, [call] * 2)


@contextlib.contextmanager
def plain_random_state() -> Iterator[None]:
    """While it is open, samples that seed the generator do so as a user's code would, and not without dispatch."""

    @contextlib.contextmanager
    def frozen() -> Iterator[None]:
        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)

    original = testing_utils.freeze_rng_state
    testing_utils.freeze_rng_state = frozen
    try:
        yield
    finally:
        testing_utils.freeze_rng_state = original


def _operator_training(op: Callable[..., Any], choice: Choice, has_gradient: bool) -> Callable[[], Training]:
    def build() -> Training:
        scale = nn.Parameter(torch.tensor(0.75, device=choice.device))  # no larger, so that probabilities stay some
        opt = torch.optim.SGD([scale], lr=RATE, momentum=0.9)

        def step(x: Any, *args: Any, **kwargs: Any) -> Any:
            factor = scale if has_gradient else scale.detach()
            return _trained(op(_scaled(x, factor), *args, **kwargs), [opt], choice.asks)

        return Training(step, lambda: [scale.detach()])

    return build


def _module_training(
    cls: type[nn.Module], args: Any, kwargs: Any, choice: Choice, is_training: bool
) -> Callable[[], Training]:
    def build() -> Training:
        torch.manual_seed(0)
        module = cls(*args, **kwargs).to(choice.device).train(is_training)
        scale = nn.Parameter(torch.tensor(0.75, device=choice.device))
        opts = [torch.optim.SGD([scale], lr=RATE)]
        if params := list(module.parameters()):
            opts.append(torch.optim.SGD(params, lr=RATE))

        def step(*args: Any, **kwargs: Any) -> Any:
            return _trained(module(*_scaled(args, scale), **kwargs), opts, choice.asks)

        return Training(step, lambda: [scale.detach(), *module.state_dict().values()])

    return build


def _scaled(tree: Any, scale: Tensor) -> Any:
    def scaled(one: Any) -> Any:
        floats = isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex())
        return one * scale.to(one.dtype) if floats and one.layout is torch.strided else one

    return pytree.tree_map(scaled, tree)


def _trained(out: Any, opts: Sequence[torch.optim.Optimizer], asks: bool) -> Any:
    """The results without gradients, after an update by the mean of each; without one where none has any. And the
    loss, where it is asked for before."""
    results = [one for one in pytree.tree_leaves(out) if isinstance(one, Tensor)]
    dense = [one if one.layout is torch.strided else one.to_dense() for one in results if one.requires_grad]
    terms = [(one.abs() if one.is_complex() else one).mean() for one in dense]
    told = None
    if terms:
        loss: Any = sum(terms)
        told = loss.item() if asks else None
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return pytree.tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, (out, told))
