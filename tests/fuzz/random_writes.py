"""Random steps that write to tensors: as a whole and in part, through views and in lists; that copy, swap and return
them. A step is made from a seed alone, as text, and runs eagerly or compiled. In float64: differences are faults.

Eager code says nothing of writes that read what they overwrite through other places, so there are none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMES = "abcd"
NUM_CALLS = 3

Step = Callable[..., Any]

_UNARY = ("sin()", "tanh()", "abs()", "neg()", "clone()", "t()", "contiguous()")
_SEEN = ("t()", "clone()", "detach()", "view(4, 4)", "flip(0)", "t().clone()", "roll(1, 0)")
_PARTS = (
    ("{}", "{}"), ("{}", "{}"), ("{}", "{}"), ("{}.t()", "{}"), ("{}[1:3]", "({})[:2]"), ("{}[:, 2]", "({})[0]"),
    ("{}.view(-1)[3:7]", "({})[0]"), ("{}.view(2, 8)[:, :4]", "({})[:2]"),
)  # fmt: skip
"""A part of a tensor, and what of a (4, 4) value has its shape."""


class RandomWrites:
    """The step of a seed."""

    unary, seen, parts = _UNARY, _SEEN, _PARTS

    def __init__(self, seed: int) -> None:
        self._rng, self._known = random.Random(seed), ["x"]
        lines = [self._line(number) for number in range(self._rng.randint(3, 9))]
        results = [self._value() for _ in range(self._rng.randint(1, 3))] + self._rng.sample(self._known, 1)
        lines.append(f"return {', '.join(results)}")
        self.text = "def step(a, b, c, d, x):\n" + "".join(f"    {line}\n" for line in lines)

    def _value(self, depth: int = 0) -> str:
        choose, kind = self._rng.choice, self._rng.random()
        if depth < 2 and kind < 0.35:
            return f"({self._value(depth + 1)} {choose('+-*')} {self._value(depth + 1)})"
        if depth < 2 and kind < 0.5:
            return f"{self._value(depth + 1)}.{choose(self.unary)}"
        if kind < 0.7:
            return choose(self._known)
        return choose(NAMES) if kind > 0.8 else f"{choose(NAMES)}.{choose(self.seen)}"

    def _line(self, number: int) -> str:
        choose, kind = self._rng.choice, self._rng.random()
        one, other, third = self._rng.sample(NAMES, 3)
        if kind < 0.25:
            line = f"t{number} = {self._value()}"
            self._known.append(f"t{number}")
            return line
        if kind < 0.65:
            part, value = choose(self.parts)
            return f"{part.format(one)}.{choose(['copy_', 'add_', 'mul_'])}(({value.format(self._value())}).clone())"
        if kind < 0.72:
            part, _ = choose(self.parts)
            return f"{part.format(one)}.{choose(['zero_()', 'sin_()', 'mul_(0.5)', 'clamp_(min=0)'])}"
        if kind < 0.82:
            return f"s{number} = {one}.clone(); {one}.copy_({other}); {other}.copy_(s{number})"
        if kind < 0.9:
            return f"torch._foreach_copy_([{one}, {other}], [{other}.clone(), {third}.clone()])"
        return f"torch._foreach_add_([{one}, {other}], [({self._value()}).clone(), x])"

    def run(self, device: torch.device, compile: Callable[[Step], Step] = lambda step: step) -> list[list[Tensor]]:
        """What every call returns, and what it leaves in its arguments, as copies."""
        scope: dict[str, Any] = {"torch": torch}
        exec(self.text, scope)
        step, generator = compile(scope["step"]), torch.Generator().manual_seed(0)

        def make() -> Tensor:
            return torch.randn(4, 4, generator=generator, dtype=torch.float64).tanh().to(device)

        tensors, seen = [make() for _ in NAMES], []
        for _ in range(NUM_CALLS):
            x = make()
            results = step(*tensors, x)
            seen.append([one.clone() for one in (*results, *tensors, x)])
            for one in tensors:
                one.tanh_()
        return seen


_ROWS = "torch.tensor([{}], device=x.device)"
_PLACES = "torch.tensor([[0, 3, 2, 1]] * 4, device=x.device)"
_CALLS = (
    f"{{0}}.index_copy_(0, {_ROWS.format('1, 3')}, ({{3}})[:2].clone())",
    f"{{0}}.index_add_(1, {_ROWS.format('2, 0')}, ({{3}})[:, 1:3].clone())",
    f"{{0}}.scatter_(1, {_PLACES}, ({{3}}).clone())",
    f"{{0}}[{_ROWS.format('0, 2')}] = ({{3}})[:2].clone()",
    f"{{0}}[{_ROWS.format('1, 0, 3, 2')}] = {{0}}.clone()",
    "{0}.masked_fill_(x > 0, 0.25)",
    "{0}.lerp_(({3}).clone(), 0.25)",
    "{0}.addcmul_(({3}).clone(), x, value=0.5)",
    "torch._foreach_mul_([{0}, {1}], 0.5); torch._foreach_lerp_([{1}, {2}], [({3}).clone(), x], 0.25)",
    "torch._foreach_addcdiv_([{0}, {1}], [({3}).clone(), x], [{2}.abs() + 1, x.abs() + 1], 0.5)",
    "{0}.copy_({1} @ {2})",
    "{0}.add_({1} @ {0})",
    "{0}.copy_(torch.where(x > 0, {1}, {2}))",
)
"""Of three tensors and a value."""


class RandomCalls(RandomWrites):
    """Steps with sums, products, look-ups and writes by an index as well."""

    unary = (
        *_UNARY, "softmax(0)", "cumsum(1)", "matmul(x)", "sum(0, keepdim=True).expand(4, 4)", "mean().expand(4, 4)",
        "amax(1, keepdim=True).expand(4, 4)", f"index_select(0, {_ROWS.format('2, 0, 1, 1')})",
        f"gather(1, {_PLACES})", "tril()", "masked_fill(x > 0, 0.5)", "float().double()", "sort(1)[0]",
        "repeat(2, 1)[2:6]", "chunk(2)[1].repeat(2, 1)",
    )  # fmt: skip
    seen = (
        *_SEEN, "matmul(x)", "softmax(1)", "unsqueeze(0).squeeze(0)", "transpose(0, 1).contiguous()",
        "reshape(2, 8).reshape(4, 4)", "diagonal().expand(4, 4)", f"index_select(1, {_ROWS.format('3, 3, 0, 1')})",
    )  # fmt: skip
    parts = (
        *_PARTS, ("{}.diagonal()", "({})[0]"), ("{}[::2]", "({})[:2]"), ("{}.t()[1]", "({})[0]"), ("{}[3]", "({})[0]"),
    )  # fmt: skip

    def _line(self, number: int) -> str:
        if self._rng.random() < 0.7:
            return super()._line(number)
        return self._rng.choice(_CALLS).format(*self._rng.sample(NAMES, 3), self._value())
