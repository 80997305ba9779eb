"""Whether a compiled training does what eager code does, with the samples of one operator or module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import wholestep as ws
from benchmarks.torch_samples.cases import Call, Case

ROUNDS = 3
"""Of all calls: in the first one a step is captured, in later ones it is found again, and sizes move."""
ROUNDING = 2.0**-13
"""Of a compiler that adds up in another order: the share of the largest element by which a float32 may differ."""


@dataclass(frozen=True)
class Verdict:
    """What came of a case."""

    complaint: str
    """What differs first; empty where nothing does."""
    compared: int
    """Calls that were compared. Those are not at which eager code fails; nor any from the first one on that gives
    something else each time in eager code, such as `empty`."""


def judged(case: Case, backend: str | None, device: str) -> Verdict:
    """Trains both ways, one call beside the other."""
    eager, again, ours = case.build(), case.build(), case.build()
    compiled = ws.compile(ours.step) if backend is None else ws.compile(ours.step, backend=backend)
    exact, failed, compared = backend == "eager", set[int](), 0
    for turn in range(ROUNDS):
        for number, call in enumerate(case.calls):
            if number in failed:
                continue
            where = f"round {turn}, sample {number}"
            torch.manual_seed(number)
            try:
                wanted = _called(eager.step, call)
            except Exception:  # whatever an operator raises for inputs that it does not take
                failed.add(number)
                continue
            drawn = _random_state(device)
            torch.manual_seed(number)
            if _difference(_called(again.step, call), wanted, exact):
                return Verdict("", compared)
            torch.manual_seed(number)
            try:
                found = _called(compiled, call)
            except Exception as error:
                line = (str(error).splitlines() or [""])[0]
                return Verdict(f"{where}: raised {type(error).__name__}: {line}", compared)
            why = _difference(found, wanted, exact) or _difference(ours.state(), eager.state(), exact)
            if why:
                return Verdict(f"{where}: {why}", compared)
            if not torch.equal(_random_state(device), drawn):
                return Verdict(f"{where}: the generator is elsewhere", compared)
            compared += 1
    return Verdict("", compared)


def _called(step: Any, call: Call) -> Any:
    """Its result; arguments are the call's own, since steps may write to them."""
    args, kwargs = pytree.tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, call)
    return step(*args, **kwargs)


def _random_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def _difference(found: Any, wanted: Any, exact: bool) -> str:
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, and not {len(theirs)}"
    return next(filter(None, (_of_one(*pair, exact) for pair in zip(ours, theirs, strict=True))), "")


def _of_one(found: Any, wanted: Any, exact: bool) -> str:
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        return "" if type(found) is type(wanted) and (found == wanted or found != found) else f"{found}, not {wanted}"
    own, theirs = ((one.shape, one.dtype, one.layout) for one in (found, wanted))
    if own != theirs:
        return f"{own}, and not {theirs}"
    if wanted.layout is not torch.strided:
        found, wanted = found.to_dense(), wanted.to_dense()
    elif exact and found.stride() != wanted.stride():
        return f"strides {found.stride()}, and not {wanted.stride()}"
    found, wanted = (one.to(torch.complex128 if one.is_complex() else torch.float64) for one in (found, wanted))
    if torch.equal(found, wanted) or not wanted.numel():
        return ""
    largest = wanted.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    allowed = 0.0 if exact else ROUNDING * max(largest, 1.0)
    if torch.allclose(found, wanted, rtol=0.0, atol=allowed, equal_nan=True):
        return ""
    return f"differs by {(found - wanted).abs().nan_to_num(0.0).max().item():.1e}, of {largest:.1e} at most"
