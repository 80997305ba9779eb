"""Optimizers of libraries, compiled against eager: what `docs/optimizers.md` says, measured.

    pip install timm pytorch_optimizer schedulefree
    python benchmarks/library_optimizers.py > docs/optimizers.md
    python benchmarks/library_optimizers.py --library schedulefree --only AdamW
    python benchmarks/library_optimizers.py --updates 3 > /dev/null

Each is one training of a small net with a convolution, an embedding and a norm, eight steps, once eagerly and once
compiled for the eager backend, from the same start. Losses, parameters, all state and all numbers of the groups are
compared at the end. With `--updates 3` each call makes three updates.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from wholestep.api.report.live_explanation import LiveExplanation

STEPS = 8
LIBRARIES = ("torch.optim", "timm.optim", "pytorch_optimizer", "schedulefree")
MAX_REASON = 96
"""Characters of a reason that a line shows."""
MAX_COLUMNS = 120

Make = Callable[[nn.Module], Any]


class Net(nn.Module):
    """Parameters of four, two and one dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.embed = nn.Conv2d(3, 4, 3, bias=False), nn.Embedding(7, 8)
        self.inner, self.norm, self.out = nn.Linear(144, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, image: Tensor, word: Tensor) -> Tensor:
        """(rows, 3, 8, 8) and (rows,) to (rows, 5)."""
        hidden = self.inner(F.relu(self.conv(image)).flatten(1)) + self.embed(word)
        return self.out(self.norm(F.gelu(hidden)))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one optimizer: ``bitwise`` as one graph, ``live``, ``different``, or ``eager`` (does not run)."""

    name: str
    kind: str
    why: str = ""


def offered(library: str) -> Iterator[tuple[str, Make]]:
    """The optimizers of a library by name, and what makes each for a net."""
    found = importlib.import_module(library)
    if library == "timm.optim":
        for name in found.list_optimizers():
            yield name, lambda net, name=name: found.create_optimizer_v2(net, opt=name, lr=1e-3, weight_decay=0.01)  # type: ignore[misc]
    elif library == "pytorch_optimizer":
        for name in found.get_supported_optimizers():
            yield str(name), lambda net, name=name: found.load_optimizer(name)(net.parameters(), lr=1e-3)  # type: ignore[misc]
    else:
        for name, kind in sorted(vars(found).items()):
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
                yield name, lambda net, kind=kind: kind(net.parameters(), lr=1e-3)  # type: ignore[misc]


def step_of(updates: int) -> Callable[..., Tensor]:
    """The user's step."""

    def step(net: nn.Module, opt: Any, image: Tensor, word: Tensor, target: Tensor) -> Tensor:
        for number in range(updates):
            loss = F.cross_entropy(net(image + number, word), target)
            loss.backward()
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return step


def trained(make: Make, run: Callable[..., Tensor]) -> list[Any]:
    """Losses, parameters, state and numbers of the groups after all steps, as a flat list."""
    torch.manual_seed(0)
    net = Net()
    opt = make(net)
    if hasattr(opt, "train"):
        opt.train()
    torch.manual_seed(1)
    batches = [(torch.randn(6, 3, 8, 8), torch.randint(7, (6,)), torch.randint(5, (6,))) for _ in range(STEPS)]
    torch.manual_seed(2)
    with redirect_stdout(sys.stderr):  # some tell what they do
        losses = [run(net, opt, *batch).clone() for batch in batches]
    held = opt.state_dict()
    groups = [{key: value for key, value in group.items() if key != "params"} for group in held["param_groups"]]
    return list(_flat([losses, [one.detach() for one in net.parameters()], held["state"], groups]))


def _flat(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        for key in sorted(thing, key=str):
            yield from _flat(thing[key])
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from _flat(item)
    else:
        yield thing


def outcome(name: str, make: Make, updates: int = 1) -> Outcome:
    """Trains twice and compares."""
    step = step_of(updates)
    try:
        wanted = trained(make, step)
    except Exception as error:
        return Outcome(name, "eager", _short(str(error) or type(error).__name__))
    compiled = ws.compile(step, backend="eager")
    came = trained(make, compiled)
    same = len(wanted) == len(came) and all(map(_equal, wanted, came))
    why = _why_live(compiled)
    return Outcome(name, ("live" if why else "bitwise") if same else "different", why)


def _why_live(step: Any) -> str:
    told = step.explain() if isinstance(step, ws.CompiledStep) else None
    return _short(told.live.reason) if isinstance(told, LiveExplanation) else ""


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    return type(a) is type(b) and bool(a == b)


def _short(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    known = ("The step could not be captured", "The step is ", "the value of a tensor decides")
    told = [line for line in lines if not line.startswith(known)]
    return textwrap.shorten(" / ".join(told), MAX_REASON, placeholder=" ...").replace("|", "/")


def page(library: str, outcomes: list[Outcome]) -> Iterator[str]:
    """The section of one library."""
    yield f"\n## {library} {version(library.partition('.')[0])}\n"
    told = {"bitwise": "Equal in every bit", "different": "DIFFERENT", "eager": "Does not run eagerly"}
    for kind, text in told.items():
        names = [one.name for one in outcomes if one.kind == kind]
        if names:
            yield textwrap.fill(f"{text} ({len(names)}): {', '.join(names)}.", MAX_COLUMNS) + "\n"
    live = [one for one in outcomes if one.kind == "live"]
    if live:
        yield f"Equal in every bit, and live ({len(live)}):\n"
        yield from (f"- {one.name}: `{one.why}`" for one in live)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", nargs="+", default=LIBRARIES, help="modules that offer optimizers")
    parser.add_argument("--only", default="", help="names that hold this text")
    parser.add_argument("--updates", type=int, default=1, help="updates in each call (default: 1)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("wholestep").setLevel(logging.ERROR)
    print(HEAD.format(version=torch.__version__.partition("+")[0], steps=STEPS))
    wrong = []
    for library in options.library:
        todo = [(name, make) for name, make in offered(library) if options.only in name]
        found = [
            outcome(*one, options.updates) for one in track(todo, library, console=Console(stderr=True), transient=True)
        ]
        print("\n".join(page(library, found)))
        wrong += [one.name for one in found if one.kind == "different"]
    if wrong:
        raise SystemExit(f"silently wrong: {', '.join(wrong)}")


HEAD = """# Optimizers of libraries: compiled against eager

Written by a command; do not edit:

```
python benchmarks/library_optimizers.py > docs/optimizers.md
```

torch {version}, CPU, backend `eager`: {steps} steps of a small net. Losses, parameters, state and the numbers of groups
are compared. What is live is no single graph: it counts in Python, or asks for the value of a tensor. Optimizers that
do not run eagerly here want a GPU, a closure, other arguments or another library. [support.md](support.md) gives those
of torch.optim what they want, such as matrices alone for Muon."""


if __name__ == "__main__":
    main()
