"""Programs that two processes train together under a strategy, compared with eager code on one.

Both ranks have the same batches and random numbers, so their Python goes one way, and the average of their gradients is
that of eager code in every bit. In every other program the gradients of the network count twice on rank 0 and nothing
on rank 1: a gradient that nobody reduces is seen. A wrapped network is compared with itself in eager code, on both.
"""

from __future__ import annotations

import dataclasses
import re

import torch.distributed as dist

import wholestep as ws
from benchmarks.idioms.on_ranks import NPROC, STRATEGIES, Ranks
from benchmarks.random_programs.judge import Verdict, judged
from benchmarks.random_programs.program import CALLS, Program
from benchmarks.random_programs.wrapped import WRAPPERS, wrapped

_GRADIENTS_OF_A_RANK = ("x.requires_grad", "out.retain_grad", "out.register_hook", "loss.register_hook")
"""What shows gradients that are averaged nowhere: with one of these both ranks count alike, too."""
_NORM, _BLIND_TO_ROUNDING = "norm=True", "torch.optim.SGD("
"""A bias before a norm has a gradient of zero. Optimizers but SGD scale its rounding: shards round otherwise."""
_SHARDS = (".weight", ".bias", "parameters()", "shadow")
"""What is torch's own business between two calls: a parameter is a DTensor there."""
_OTHER_NAMES = {
    "alias, raw = model.first.weight.detach(), model.last.bias.data": "alias, raw = torch.ones(5, 4), torch.ones(3)",
    "alias = model.first.weight.detach()": "alias = model.first.weight.detach().clone()",
    "raw = model.last.bias.data": "raw = model.last.bias.data.clone()",
    "user.flat_gradients(model) if True": "torch.ones(38) if True",
    "model.last.weight.detach().numpy() if True": "np.ones((3, 5), np.float32) if True",
}
"""Other names for memory of a parameter, and what is none. They keep what they had when parameters became shards."""

_VIEWS = f"call {CALLS}: results of all calls"
"""A result that is a view of a parameter is a copy under FSDP (docs/strategies.md), and shows no later writes."""
_WAITING = r"\.grad(:type)?(: wanted None| exists only|: .* elements differ)"
"""Gradients that wait for the last micro-batch: eager code shows none, or those of the micro-batches before."""
_NOTHING = r"(?!)"


def judged_under(ranks: Ranks, strategy: str, program: Program) -> Verdict:
    """What came of a program on the rank that complains first, or on rank 0."""
    try:
        found: list[Verdict] = ranks.call(judged_on_a_rank, program, strategy)
    except Exception as error:  # whatever a rank raised, or that one has gone
        return Verdict(program, "wrong", (f"{type(error).__name__}: {error}",))
    return next((one for one in found if not one.holds), found[0])


def judged_on_a_rank(program: Program, strategy: str) -> Verdict:
    """What this rank finds; both call it."""
    if strategy in WRAPPERS:
        alike = any(one in program.text for one in _GRADIENTS_OF_A_RANK)
        if _NORM in program.text and (_BLIND_TO_ROUNDING not in program.text or "torch.autograd.grad(" in program.text):
            return Verdict(program, "discarded, scales a rounding", ())
        changed = wrapped(program, strategy)
        if changed is None:
            return Verdict(program, "discarded, fully_shard does otherwise", ())
        known = _VIEWS if strategy == "fully_shard" else _NOTHING
        known = f"{_WAITING}|{known}" if "set_requires_gradient_sync" in changed.text else known
        return _without(known, judged(changed, None, _weight(alike), is_wrapped=True))
    is_fsdp = isinstance(STRATEGIES[strategy], ws.FSDP)
    if is_fsdp:
        program = _with_shards(program)
    has_norm = _NORM in program.text
    if has_norm and _BLIND_TO_ROUNDING not in program.text and not isinstance(STRATEGIES[strategy], ws.DDP):
        return Verdict(program, "discarded, scales a rounding", ())
    alike = has_norm or program.seed % 2 == 0 or any(one in program.text for one in _GRADIENTS_OF_A_RANK)
    found = judged(program, STRATEGIES[strategy], _weight(alike))
    return _without(_VIEWS, found) if is_fsdp else found


def _without(known: str, found: Verdict) -> Verdict:
    """The verdict without complaints of a known kind, a regular expression."""
    told = tuple(one for one in found.complaints if not re.search(known, one))
    kind = found.kind if told == found.complaints or told else "holds but for what is known"
    return dataclasses.replace(found, kind=kind, complaints=told)


def _weight(alike: bool) -> float | None:
    """What the gradients of the network count on this rank; None where they count alike."""
    return None if alike else 0.0 if dist.get_rank() else float(NPROC)


def _with_shards(program: Program) -> Program:
    """The program without what shards do otherwise."""
    quiet = tuple(tuple(one for one in done if not any(name in one for name in _SHARDS)) for done in program.between)
    lines = tuple(dataclasses.replace(line, text=_with_own_memory(line.text)) for line in program.lines)
    return dataclasses.replace(program, head=_with_own_memory(program.head), lines=lines, between=quiet)


def _with_own_memory(text: str) -> str:
    for name, own in _OTHER_NAMES.items():
        text = text.replace(name, own)
    return text
