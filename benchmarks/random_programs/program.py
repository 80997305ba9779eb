"""One random program: its text, made from a seed alone, and the training loop that the text is."""

from __future__ import annotations

import dataclasses
import linecache
import random
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.idioms.base import Loop
from benchmarks.random_programs.grammar import STAGES, expanded, rules_of
from benchmarks.random_programs.object_graph import ObjectGraph, object_graph

CALLS = 7
_OBJECTS = Path(__file__).parent / "user_objects.py"
_SOURCE = _OBJECTS.read_text(encoding="utf-8")

_STEPS: dict[str, tuple[str, ...]] = {
    "plain": ("<start>", "<forward>", "<reshape>", "loss.backward()", "<backward>", "<update>", "<updated>"),
    "cleared first": (
        "<start>", "opt.zero_grad()", "<forward>", "<reshape>", "loss.backward()", "<backward>", "opt.step()",
        "<updated>",
    ),
    "accumulated": (
        "<start>", "<forward>", "<reshape>", "(loss / 2).backward()", "<backward>", "if count % 2 == 0:",
        "    <update>",
        "count += 1", "<updated>",
    ),
    "micro-batches": (
        "<start>", "for x, y in zip(x.chunk(2), y.chunk(2)):", "    <forward>", "    <reshape>",
        "    loss.backward()",
        "    <backward>", "<update>", "<updated>",
    ),
    "two backwards": (
        "<start>", "<forward>", "loss.backward(retain_graph=True)", "<backward>", "<reshape>", "loss.backward()",
        "<backward>", "<update>", "<updated>",
    ),
    "by torch.autograd.grad": (
        "<start>", "<forward>", "<reshape>", "params = [p for p in model.parameters() if p.requires_grad]",
        "for p, g in zip(params, torch.autograd.grad(loss, params)): p.grad = g", "<backward>", "<update>",
        "<updated>",
    ),
    "by hand": (
        "<start>", "<forward>", "<reshape>", "loss.backward()", "<backward>", "with torch.no_grad():",
        "    for p in model.parameters():", "        if p.grad is not None: p -= 0.1 * p.grad", "opt.zero_grad()",
        "<updated>",
    ),
    "closure": (
        "<start>", "def closure():", "    nonlocal out, loss, average, cell, count, table, known, alias, raw, x, y",
        "    global G",
        "    opt.zero_grad()",
        "    <forward>", "    <reshape>", "    loss.backward()", "    <backward>", "    return loss",
        "opt.step(closure)", "<updated>",
    ),
}  # fmt: skip
"""The calls of a step in order, and where statements may stand between them."""

_OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "torch.optim.AdamW(model.parameters(), lr=0.02)",
    "torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)",
    "torch.optim.RMSprop(model.parameters(), lr=0.02)",
    "torch.optim.Adam([{'params': model.first.parameters()}, dict(params=model.last.parameters(), lr=0.01)], lr=0.02)",
)  # fmt: skip
_SCHEDULERS = (
    "StepLR(opt, 2, 0.5)", "CosineAnnealingLR(opt, 6)", "LambdaLR(opt, lambda n: 1 / (1 + n))",
    "ExponentialLR(opt, 0.8)",
    "OneCycleLR(opt, 0.2, total_steps=60)",
)  # fmt: skip

_HEAD = """\
import copy, logging, math, operator, random, types
from collections import OrderedDict, defaultdict, deque
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import *
from torch.utils.checkpoint import checkpoint

G = 1.0
log = logging.getLogger("training")

class Config:
    w = 1.0

def build():
    global G
    model = user.Net(norm={norm}, dropout={dropout}, counts={counts}, talks={talks})
    opt = {optimizer}
    scheduler = {scheduler}
    history, table, count, cell, known = [], {{}}, 0, 1.0, 0.75
    box, array, average = user.Box(1.25), np.full(3, 0.5, np.float32), torch.tensor(1.0)
    numbers, shadow = user.endless(), [p.detach().clone() for p in model.parameters()]
    alias, raw = model.first.weight.detach(), model.last.bias.data
    flat = user.flat_gradients(model) if {flat} else torch.ones(3)
    shown = model.last.weight.detach().numpy() if {shown} else np.ones((2, 2), np.float32)
"""
_TAIL = """\
    def seen():
        found = dict(model=model, opt=opt, rates=scheduler.get_last_lr(), history=history, table=table, count=count)
        found.update(cell=cell, known=known, G=G, box=vars(box), array=array, average=average, shadow=shadow)
        found.update(calls=model.calls, net_scale=model.scale, scale=user.SCALE, alias=alias, raw=raw, flat=flat)
        return dict(found, places=[{places}])
    return step, between, seen
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the step, or a statement with its ``else``."""

    text: str
    can_go: bool
    """Whether the program is one without it."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that can be taken apart."""

    seed: int
    head: str
    lines: tuple[Line, ...]
    """Of the step."""
    between: tuple[tuple[str, ...], ...]
    """What its owner does before each call."""
    places: tuple[str, ...]

    @property
    def text(self) -> str:
        """The file."""
        begin = ["nonlocal average, cell, count, table, known, alias, raw", "global G"]
        step = ["def step(x, y):", *_indented([*begin, "out = loss = None", *(one.text for one in self.lines)])]
        moves = [
            line
            for number, done in enumerate(self.between)
            for line in (f"{'elif' if number else 'if'} call == {number}:", *_indented(done or ("pass",)))
        ]
        between = [
            "def between(call):",
            *_indented(
                [f"{begin[0]}, shown", begin[1], "x, y = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)", *moves]
            ),
        ]
        return self.head + "\n".join([*_indented([*step, *between]), _TAIL.format(places=", ".join(self.places))])

    def smaller(self) -> Iterator[Program]:
        """The programs that lack one statement."""
        for number, line in enumerate(self.lines):
            if line.can_go:
                yield dataclasses.replace(self, lines=(*self.lines[:number], *self.lines[number + 1 :]))
        for number, done in enumerate(self.between):
            if done:
                yield dataclasses.replace(self, between=(*self.between[:number], (), *self.between[number + 1 :]))

    def loop(self, grad_weight: float | None = None) -> Loop:
        """The training, built anew; with a weight for the gradients of the network, where a rank has one."""
        name = f"random_program_{self.seed}.py"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(True), name)
        scope: dict[str, Any] = {
            "__name__": name[:-3],
            "user": _loaded("user_objects"),
            "library": _loaded("library_objects", installed=True),
        }
        scope["user"].GRAD_WEIGHT = grad_weight
        exec(compile(self.text, name, "exec"), scope)
        step, between, seen = scope["build"]()

        def arguments(call: int) -> tuple[Any, ...]:
            between(call)
            return _batch(call)

        return Loop(step=step, arguments=arguments, observe=seen)


def random_program(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    graph = object_graph(rng)
    head = _HEAD.format(
        norm=rng.random() < 0.3, dropout=rng.choice([0.0, 0.25]), counts=rng.random() < 0.3, talks=rng.random() < 0.1,
        optimizer=rng.choice(_OPTIMIZERS), scheduler=rng.choice(_SCHEDULERS), flat=rng.random() < 0.2,
        shown=rng.random() < 0.1,
    ) + "".join(f"    {line}\n" for line in graph.definitions)  # fmt: skip
    kind = rng.choice(["plain", *_STEPS])
    density = rng.choice([0.1, 0.4, 0.8, 1.2])
    lines = [line for text in _STEPS[kind] for line in _written(text, graph, rng, density)]
    rules = _rules("updated", graph)
    lines.append(Line(f"return {expanded('<result>', rules, rng)}", can_go=True))
    moves = _rules("start", graph)
    quiet = [one for one in moves["simple"] if not one.startswith(("print", "log."))]  # nobody hears it between calls
    moves["simple"] = [*quiet, "history.clear()", "table.clear()", "shown *= <bounded>"]
    between = tuple(
        tuple(expanded("<simple>", moves, rng) for _ in range(rng.randint(1, 2))) if rng.random() < 0.4 else ()
        for _ in range(CALLS)
    )
    return Program(seed, head, tuple(lines), between, graph.places)


def _written(text: str, graph: ObjectGraph, rng: random.Random, density: float) -> Iterator[Line]:
    """What stands for one text of `_STEPS`."""
    body = text.lstrip()
    begin, symbol = text[: len(text) - len(body)], body.strip("<>")
    if symbol == body:
        yield Line(text, can_go=False)
    elif symbol == "forward":
        if rng.random() < 0.08:
            yield Line(f"{begin}with torch.autocast('cpu', torch.bfloat16): out = model(x)", can_go=False)
            yield Line(f"{begin}out = out.float()", can_go=False)
        else:
            yield Line(f"{begin}out = model(x)", can_go=False)
        yield Line(f"{begin}loss = F.cross_entropy(out, y)", can_go=False)
    elif symbol == "update":
        yield Line(f"{begin}opt.step()", can_go=False)
        yield from _statements("updated", begin, graph, rng, density / 2)
        yield Line(f"{begin}opt.zero_grad()", can_go=False)
    if symbol == "reshape":
        rules = _rules("forward", graph)
        yield from (
            Line(begin + expanded("<reshape>", rules, rng), can_go=True) for _ in range(rng.choice([0, 1, 1, 2]))
        )
    elif symbol in STAGES:
        yield from _statements(symbol, begin, graph, rng, density)


def _statements(stage: str, begin: str, graph: ObjectGraph, rng: random.Random, density: float) -> Iterator[Line]:
    rules = _rules(stage, graph)
    while rng.random() < density / (1 + density):
        lines = expanded("<statement>", rules, rng).split("\n")
        yield Line("\n".join(begin + one for one in lines), can_go=True)


def _rules(stage: str, graph: ObjectGraph) -> dict[str, list[str]]:
    writes = [
        one
        for place in graph.places
        for one in (f"{place} = <bounded>", f"{place} = 0.5 * {place} + 0.5 * <bounded>", f"{place} *= 0.9")
    ]
    return rules_of(stage, {"place": graph.reads, "write": writes})


def _indented(lines: Any) -> list[str]:
    return [f"    {one}" for line in lines for one in line.split("\n")]


def _batch(call: int) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(call)
    return torch.randn(4, 4, generator=draw), torch.randint(3, (4,), generator=draw)


def _loaded(name: str, *, installed: bool = False) -> types.ModuleType:
    """`user_objects.py` as a fresh module: a file of the user's, or of a package."""
    module = types.ModuleType(name)
    file = Path(sysconfig.get_path("purelib"), f"{name}.py") if installed else _OBJECTS
    module.__file__ = str(file)
    sys.modules[name] = module  # where classes say that they are
    exec(compile(_SOURCE, str(file), "exec"), vars(module))
    return module
