"""Every optimizer of torch.optim, compiled against eager: what `docs/support.md` says, measured.

    python benchmarks/support_table.py > docs/support.md
    python benchmarks/support_table.py --optimizer AdamW RAdam

Each cell is one training of a small MLP, ten steps with a rate that changes before every step, once eagerly and once
compiled for the eager backend, from the same start. After every step all parameters and all optimizer state
are compared.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import wholestep as ws

VERSION = torch.__version__.partition("+")[0]

STEPS = 10
"""RAdam takes another branch from its sixth step on."""

HOWS: dict[str, dict[str, Any]] = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
"""The ways in which torch runs the same rule, in the order of the columns."""

OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": (
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
    ),
    "Adam": ({"amsgrad": True}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "AdamW": ({"amsgrad": True},),
    "NAdam": ({"decoupled_weight_decay": True, "weight_decay": 0.1},),
    "RAdam": ({"decoupled_weight_decay": True, "weight_decay": 0.1},),
    "Adagrad": ({"lr_decay": 0.1}, {"initial_accumulator_value": 0.1}),
    "RMSprop": ({"momentum": 0.9}, {"centered": True}, {"momentum": 0.9, "centered": True}),
    "ASGD": ({"t0": 2.0, "lambd": 1e-2},),
    "Muon": ({"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}),
}
"""Options of an optimizer's own; those in COMMON are tried wherever an optimizer has them."""

MAX_REASON = 68
"""Characters of a reason that a cell shows: with its neighbours it fits in a line of 120."""

COMMON: tuple[dict[str, Any], ...] = ({"weight_decay": 0.1}, {"maximize": True}, {"capturable": True}, {"lr": "tensor"})

RATES = {"SGD": 0.05, "Adadelta": 1.0, "Adagrad": 0.1, "ASGD": 0.05, "LBFGS": 0.5}


@dataclass(frozen=True, slots=True)
class Case:
    """One training: an optimizer, its options, and how torch runs it ("default" where there is no choice)."""

    optimizer: str
    options: tuple[tuple[str, Any], ...]
    how: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case."""

    text: str
    """``bitwise``, ``close (difference)``, ``refused: why``, ``DIFFERENT (difference)``, ``torch: why`` or ``-``."""

    @property
    def right(self) -> bool:
        """Whether nothing is silently wrong."""
        return not self.text.startswith("DIFFERENT")


def optimizers() -> list[str]:
    """The names of all optimizers that torch.optim offers."""
    offered = (one for one in vars(torch.optim).values() if inspect.isclass(one))
    return sorted({one.__name__ for one in offered if issubclass(one, torch.optim.Optimizer)} - {"Optimizer"})


def cases(names: Iterable[str]) -> Iterator[Case]:
    """Every case of these optimizers, row by row."""
    for name in names:
        known = inspect.signature(getattr(torch.optim, name)).parameters
        sets: list[dict[str, Any]] = [{}, *OPTIONS.get(name, ())]
        sets += [common for common in COMMON if set(common) <= set(known)]
        hows = [how for how, flags in HOWS.items() if set(flags) <= set(known)] or ["default"]
        for options in sets if name not in ("LBFGS", "SparseAdam") else [{}]:
            yield from (Case(name, tuple(options.items()), how) for how in hows)


class Training:
    """One model, its optimizer and the step; the same start every time."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.sparse = case.optimizer == "SparseAdam"
        bias = case.optimizer != "Muon"  # it takes matrices only
        first = nn.EmbeddingBag(6, 8, mode="sum", sparse=True) if self.sparse else nn.Linear(6, 8, bias=bias)
        self.model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3, bias=bias))
        params = list(first.parameters()) if self.sparse else list(self.model.parameters())
        options = {"lr": RATES.get(case.optimizer, 0.01), **dict(case.options), **HOWS.get(case.how, {})}
        if options["lr"] == "tensor":
            options["lr"] = torch.tensor(RATES.get(case.optimizer, 0.01))
        self.opt = getattr(torch.optim, case.optimizer)(params, **options)
        self.schedule = LambdaLR(self.opt, lambda call: 1.0 / (1 + 0.3 * call))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """The user's step."""

        if isinstance(self.opt, torch.optim.LBFGS):
            return self.opt.step(lambda: self.loss(x, y))
        loss = self.loss(x, y)
        self.opt.step()
        self.opt.zero_grad()
        return loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward."""
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """A batch per step."""
        draw = torch.Generator().manual_seed(1)
        shape = (5, 6)
        xs = (torch.randn(shape, generator=draw) for _ in range(STEPS))
        if self.sparse:
            xs = (torch.randint(6, shape, generator=draw) for _ in range(STEPS))
        return [(x, torch.randint(3, (5,), generator=draw)) for x in xs]

    def run(self, step: Callable[[Tensor, Tensor], Tensor]) -> list[list[Tensor]]:
        """Parameters and optimizer state after every step."""
        seen = []
        for x, y in self.batches():
            step(x, y)
            self.schedule.step()
            held = [leaf for state in self.opt.state_dict()["state"].values() for leaf in state.values()]
            tensors = [*self.model.parameters(), *(leaf for leaf in held if isinstance(leaf, Tensor))]
            seen.append([tensor.detach().clone() for tensor in tensors])
        return seen


def measure(case: Case) -> Outcome:
    """Runs one case both ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eager = Training(case)
            want = eager.run(eager.step)
        except (RuntimeError, AssertionError, ValueError) as error:
            return Outcome(f"torch: {_why(error)}")
        compiled = Training(case)
        step = ws.compile(compiled.step, backend="eager", fullgraph=True)
        try:
            came = compiled.run(step)
        except ws.WholestepError as error:
            return Outcome(f"refused: {_why(error)}")
    return Outcome(_verdict(want, came, step.cache_info().traces))


def _verdict(want: list[list[Tensor]], came: list[list[Tensor]], traces: int) -> str:
    pairs = [pair for one, other in zip(want, came, strict=True) for pair in zip(one, other, strict=True)]
    note = "" if traces == 1 else f", {traces} traces"
    if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
        return f"bitwise{note}"
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    word = "close" if difference < 1e-5 else "DIFFERENT"
    return f"{word} ({difference:.0e}){note}"


def _why(error: BaseException) -> str:
    """The reason in an error, in one sentence, without the place in this file."""
    text = str(error)
    if text.startswith("The step could not be captured at"):
        text = text.splitlines()[-1]
    sentence = " ".join(text.split()).partition(". ")[0].rstrip(".").replace("|", "\\|")
    if "If capturable=True" in sentence:
        return "capturable needs a GPU"
    return textwrap.shorten(sentence, MAX_REASON, placeholder=" ...")


def _spell(options: tuple[tuple[str, Any], ...]) -> str:
    return ", ".join(f"{key}={item}" for key, item in options) or "defaults"


def rows(found: dict[Case, Outcome]) -> list[str]:
    """The lines of the markdown table: one per optimizer and set of options."""
    lines = ["| optimizer | options | single | foreach | fused |", "|---|---|---|---|---|"]
    keys = dict.fromkeys((case.optimizer, case.options) for case in found)
    for name, options in keys:
        texts = {case.how: one.text for case, one in found.items() if (case.optimizer, case.options) == (name, options)}
        cells = [texts.get(how, "-") for how in HOWS]
        if "default" in texts:
            cells[0] = texts["default"]
        lines.append(f"| {name} | {_spell(options)} | {' | '.join(cells)} |")
    return lines


def document(found: dict[Case, Outcome]) -> str:
    """docs/support.md."""
    return "\n".join(
        [
            "# Optimizers: compiled against eager",
            "",
            "Written by a command; do not edit:",
            "",
            "```",
            "python benchmarks/support_table.py > docs/support.md",
            "```",
            "",
            f"torch {VERSION}, CPU, backend `eager`. A cell is {STEPS} steps of an MLP with a",
            "rate that changes before every step; parameters and optimizer state are compared after each step.",
            "",
            "- `bitwise`: equal in every bit. `N traces`: the rule branches on its step counter, or begins in another",
            "  way than it goes on, so the step is captured again at those calls.",
            "- `close (d)`: equal up to rounding; d is the largest absolute difference.",
            "- `refused: why`: no single graph, which `fullgraph=True` makes an error; everything stays as it was.",
            "- `torch: why`: torch itself refuses this on the CPU. `-`: torch does not offer this way to run the rule.",
            "- single, foreach, fused: how torch runs the rule; an optimizer without the choice stands under single.",
            "- `lr=tensor`: the rate is a tensor.",
            "",
            *rows(found),
            "",
        ]
    )


def main() -> int:
    """Prints the document; exit status 1 if any cell is silently different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", nargs="+", choices=optimizers(), help="only these (default: all of torch.optim)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("wholestep").setLevel(logging.ERROR)
    wanted = list(cases(options.optimizer or optimizers()))
    found: dict[Case, Outcome] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=len(wanted))
        for case in wanted:
            progress.update(task, description=f"{case.optimizer} {_spell(case.options)} {case.how}")
            found[case] = measure(case)
            progress.advance(task)
    print(document(found), end="")
    return 0 if all(one.right for one in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
