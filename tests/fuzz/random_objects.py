"""Random steps that read, replace, write to and return what objects hold, and what their owner does between calls.

A step is made from a seed alone, as text. It runs eagerly or compiled and gives all that somebody could have looked at,
in order: what calls have returned, and what stood in every place after each of them, as it is after all later calls.
Left out, since what is put there is a copy then: a tensor that moves to another place while it is replaced in its own,
one that is written to and replaced in the same step, and views of tensors that are kept. Of 1,000 seeds some three put
one new tensor into two places and write to it between calls, which are two tensors then.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.capture.python import tree_util

PLACES = (
    "self.a", "self.b", "self.c", "self.dict['x']", "self.dict['y']", "self.list[0]", "self.list[1]", "self.net.p",
)  # fmt: skip
NUM_CALLS = 5

_TORCH_LIKE = types.ModuleType("torch_of_the_user")
_TORCH_LIKE.__file__ = __file__
exec(
    """
class Box:
    def __init__(self, **items):
        vars(self).update(items)

    doubled = property(lambda self: getattr(self, "".join(["w", "_"])) * 2)

class Mapping:
    def __init__(self, **items):
        self.__dict__["_mapping"] = dict(items)

    def __getattr__(self, name):
        try:
            return self._mapping[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, item):
        self._mapping[name] = item
""",
    vars(sys.modules.setdefault(_TORCH_LIKE.__name__, _TORCH_LIKE)),
)

READS = (
    "self.box.w_", "self.map.w_", "self.box.doubled", "getattr(self.box, 'w' + str('_'))", "vars(self.box)['w_']",
    "(2.0 if self.box.on else 1.0)", "self.map.m", "self.box.m", "NUMBERS[0]",
)  # fmt: skip
"""Factors of the loss."""
WRITES = (
    "self.box.w_ *= 0.9", "self.map.w_ *= 0.9", "self.map.m = loss", "self.box.m = self.box.m * 0.5 + loss",
    "self.map.m = self.map.m * 0.5 + loss", "self.opt.param_groups[0]['lr'] *= 0.9", "self.scheduler.step()",
)  # fmt: skip
MOVES = (
    "self.box.w_ = 1.5", "self.map.w_ /= 2", "self.map.m = torch.full_like(self.map.m, 0.75)",
    "self.box.m = self.box.m + 1", "self.box.on = not self.box.on", "NUMBERS[0] += 1", "self.box.w_ = -self.box.w_",
)  # fmt: skip
NUMBERS = [1.0]

Compile = Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]


class Objects:
    """What a step finds: a tensor in each of `PLACES`, some of them the same one at first."""

    def __init__(self, alike: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 3).double().to(device)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05)
        numbers = {"all": [0] * 8, "some": [0, 0, 1, 2, 2, 3, 4, 5], "none": list(range(8))}[alike]
        made = [torch.full((), float(number), dtype=torch.float64, device=device) for number in range(8)]
        tensors = [made[number] for number in numbers]
        self.a, self.b, self.c = tensors[:3]
        self.dict, self.list = {"x": tensors[3], "y": tensors[4]}, tensors[5:7]
        self.net.p = tensors[7]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.8)
        kinds: Any = sys.modules[_TORCH_LIKE.__name__]
        self.box = kinds.Box(w_=1.0, on=False, m=torch.ones_like(made[0]))
        self.map = kinds.Mapping(w_=1.0, m=torch.ones_like(made[0]))
        self.calls, NUMBERS[0] = 0, 1.0

    def seen(self) -> list[Tensor]:
        """The tensors, in the order of `PLACES`, and what else moves."""
        rate, epoch = self.opt.param_groups[0]["lr"], self.scheduler.last_epoch
        numbers = [self.box.w_, self.map.w_, self.calls, rate, epoch]
        tensors = [self.a, self.b, self.c, *self.dict.values(), *self.list, self.net.p, self.box.m, self.map.m]
        return [*tensors, *(torch.tensor(number, dtype=torch.float64, device=self.a.device) for number in numbers)]  # type: ignore[arg-type]


class RandomObjects:
    """The step of a seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        places = rng.sample(PLACES, len(PLACES))
        cut = rng.randint(0, 4)
        self._written, self._replaced = places[:cut], places[cut:]
        self._known, self._rng = ["loss"], rng
        lines = ["out = self.net(x).square().mean()", "loss = out.detach()"]
        lines += [self._line(number) for number in range(rng.randint(1, 6))]
        lines += ["out.backward()", "self.opt.step()", "self.opt.zero_grad()", f"return {self._result()}"]
        moved = self._add_moved(lines, random.Random(f"moved {seed}"))
        self.text = "def step(self, x):\n" + "".join(f"    {line}\n" for line in lines)
        self._between = [self._deed(call) if rng.random() < 0.4 else "" for call in range(NUM_CALLS)]
        self._between = [
            f"{deed}; {one}" if deed and one else deed or one for deed, one in zip(self._between, moved, strict=True)
        ]
        self._alike = rng.choice(["all", "some", "none"])

    def _add_moved(self, lines: list[str], rng: random.Random) -> list[str]:
        """Adds lines that use what moves in hidden ways; gives what their owner does to it between calls."""
        if rng.random() < 0.4:
            return [""] * NUM_CALLS
        lines[1:1] = [f"out = out * {one}" for one in rng.sample(READS, rng.randint(1, 3))]
        lines[-1:-1] = rng.sample(WRITES, rng.randint(0, 2))
        if rng.random() < 0.6:
            lines[-1:-1] = ["self.calls += 1", f"if self.calls % 2 == 0: {rng.choice(WRITES)}"]
        return [rng.choice(MOVES) if rng.random() < 0.5 else "" for _ in range(NUM_CALLS)]

    def _value(self) -> str:
        return self._rng.choice([*self._known, self._rng.choice(PLACES)])

    def _line(self, number: int) -> str:
        kind = self._rng.choice(["replace", "replace", "choose", "write", "alias", "clone", "read", "name"])
        place, other = self._rng.choice(self._replaced), self._rng.choice(PLACES)
        if kind in ("read", "name"):
            line = f"t{number} = {other} * 2 + {self._value()}" if kind == "read" else f"t{number} = {other}"
            self._known.append(f"t{number}")
            return line
        if kind == "write" and self._written:
            return f"{self._rng.choice(self._written)}.{self._rng.choice(['add_', 'copy_'])}({self._value()})"
        if kind == "choose":
            return f"{place} = torch.where({other} > 0.5, {self._value()}, {self._value()})"
        if kind in ("alias", "clone"):
            return f"{place} = {other}{'.clone()' if kind == 'clone' else ''}"
        return f"{place} = {self._value()} * 0.5 + {self._value()}"

    def _result(self) -> str:
        return self._rng.choice(
            ["loss", f"(loss, {self._value()})", f"{{'loss': loss, 'place': {self._value()}}}", f"[{self._value()}]"]
        )

    def _deed(self, call: int) -> str:
        place, other = self._rng.choice(PLACES), self._rng.choice(PLACES)
        another = f"{place} = torch.full_like({place}, {call}.5)"
        return self._rng.choice([another, f"{place}.add_(1)", f"{place} = {other}", f"{place} = {place}.clone()"])

    def run(self, device: torch.device, compile: Compile = lambda step: step) -> list[Tensor]:
        """The values of all tensors that were ever there to be seen, after every call."""
        scope: dict[str, Any] = {"torch": torch, "NUMBERS": NUMBERS}
        exec(self.text, scope)
        objects, made = Objects(self._alike, device), scope["step"]
        step, kept, found = compile(lambda x: made(objects, x)), list[Tensor](), []
        for call in range(NUM_CALLS):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(call), dtype=torch.float64).to(device)
            kept += [*tree_util.flatten(step(x))[0], *objects.seen()]
            exec(self._between[call], {**scope, "self": objects})
            found.append(torch.stack(kept).cpu())
        return found

    def __repr__(self) -> str:
        return f"{self.text}between calls: {self._between}; {self._alike} of the tensors are one at first"
