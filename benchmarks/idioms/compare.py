"""Runs an idiom eagerly and compiled, ten calls each, and says what differs: the judgement of the table and its tests.

After every call everything is compared that somebody can look at: what the step returned or raised, what it printed,
logged and warned of, its arguments, what `Loop.observe` shows, and the random states of Python, numpy and torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import logging
import math
import random
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from benchmarks.idioms.base import CALLS, Idiom, Loop
from wholestep.config import Strategy

BUILD_SEED, CALL_SEED = 7, 1000

SEQUENCES = (list, tuple, deque)

PLAIN_TYPES = (Tensor, nn.Parameter)
"""The only tensor types that may be found after a call: no fake tensor, no handle, no proxy."""

WITH_A_STATE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Objects that say by `state_dict` what they are."""

FOLDERS = re.compile(r"(?<=\s)/\S*/")
"""Before the name of a file."""

LINES = re.compile(r",? at [\w<>]+(?:\.py)?:\d+(?: in [\w<>]+)?|, \w+\.py:\d+")
"""Where in an idiom something is, which says nothing of the kind."""

NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\binf\b|\bnan\b")

Record = dict[str, object]
"""Everything observed after one call: a path such as ``model.0.weight.grad`` -> a tensor or a plain value."""

Compile = Callable[[Callable[..., object]], Callable[..., object]]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an idiom."""

    name: str
    kind: str
    """``pure``, ``live``, ``refused`` (wholestep raised an error) or ``wrong`` (something differs from eager code)."""
    pieces: int | None
    """How many programs a call is in its steady state; None where nothing ran."""
    reason: str
    """Why the step is live, was refused, or what differs first; empty for a pure step."""
    complaints: tuple[str, ...] = ()
    """One sentence per difference; empty where nothing differs."""

    @property
    def holds(self) -> bool:
        """Whether the compiled step did what eager code does."""
        return self.kind in ("pure", "live")


def leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """The leaves of anything a step may return or a user may hold, each with its path; what can move is copied."""
    if isinstance(value, DTensor):  # all ranks look at the same things in the same order
        yield f"{path}:type", nn.Parameter if isinstance(value, nn.Parameter) else Tensor
        yield path, value.detach().full_tensor().clone()
    elif isinstance(value, Tensor):
        yield f"{path}:type", type(value)
        yield path, value.detach().clone()
    elif isinstance(value, nn.Module):
        yield from _module_leaves(value, path)
    elif isinstance(value, WITH_A_STATE):
        yield from leaves(value.state_dict(), path)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from leaves({one.name: getattr(value, one.name) for one in dataclasses.fields(value)}, path)
    elif isinstance(value, Mapping):
        yield f"{path}:keys", (type(value), tuple(value))
        for key, inner in value.items():
            yield from leaves(inner, f"{path}[{key!r}]")
    elif isinstance(value, SEQUENCES):
        yield f"{path}:length", (type(value), len(value))
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    elif isinstance(value, torch.Generator):
        yield path, value.get_state()
    elif isinstance(value, np.random.Generator):
        yield path, repr(value.bit_generator.state)
    elif isinstance(value, random.Random):
        yield path, value.getstate()
    elif isinstance(value, np.ndarray):
        yield path, value.copy()
    elif isinstance(value, set):
        yield path, frozenset(value)
    elif type(value).__module__.startswith(("benchmarks.", "tests.")) and not isinstance(value, enum.Enum | type):
        yield from leaves(vars(value), path)  # an object of an idiom's own
    elif type(value).__eq__ is object.__eq__ and not isinstance(value, enum.Enum | type | FunctionType | NoneType):
        yield path, type(value)  # two runs have two of them, and nothing says whether they are equal
    else:
        yield path, value


def _module_leaves(module: nn.Module, path: str) -> Iterator[tuple[str, object]]:
    for name, param in module.named_parameters(remove_duplicate=False):
        yield from leaves(param, f"{path}.{name}")
        yield f"{path}.{name}:requires_grad", param.requires_grad
        yield from leaves(param.grad, f"{path}.{name}.grad")
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield from leaves(buffer, f"{path}.{name}")
    for name, inner in module.named_modules():
        yield f"{path}.{name}:training", inner.training


def random_states() -> Record:
    """Where the three generators of the process stand."""
    return {
        "random state of python": random.getstate(),
        "random state of numpy": repr(np.random.get_state()),
        "random state of torch": torch.get_rng_state(),
    }


class _LogRecords(logging.Handler):
    """Keeps what the user's code logs: not what wholestep and torch say of themselves."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[tuple[object, ...]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] not in ("wholestep", "torch"):
            self.seen.append((record.name, record.levelname, record.getMessage(), record.funcName, record.lineno))


@contextlib.contextmanager
def _heard() -> Iterator[Record]:
    """What is printed, logged and warned of inside; it is in the record after the block."""
    heard: Record = {}
    out, err, handler, root = io.StringIO(), io.StringIO(), _LogRecords(), logging.getLogger()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        root.addHandler(handler)
        try:
            yield heard
        finally:
            root.removeHandler(handler)
    heard["printed"], heard["printed to stderr"], heard["logged"] = out.getvalue(), err.getvalue(), handler.seen
    heard["warned"] = [(one.category.__name__, str(one.message), one.lineno) for one in caught if _is_of_an_idiom(one)]


def _is_of_an_idiom(warning: warnings.WarningMessage) -> bool:
    """Whether a line of an idiom gave it. What torch's C++ warns of it says once in a process: no two runs agree."""
    here = Path(__file__).parent in Path(warning.filename).parents
    return here and "Triggered internally at" not in str(warning.message)


def _called(step: Callable[..., object], arguments: tuple[object, ...], raises: type[Exception] | None) -> object:
    """What the step returns; an error of the user's own counts as what it returned."""
    try:
        return step(*arguments)
    except ws.WholestepError:
        raise
    except Exception as error:
        if raises is None or not isinstance(error, raises):
            raise
        return type(error).__name__, str(error)


def _record_of_a_call(
    loop: Loop, step: Callable[..., object], call: int, raises: type[Exception] | None
) -> tuple[Record, object]:
    arguments = loop.arguments(call)
    with _heard() as heard:
        returned = _called(step, arguments, raises)
    seen = dict(leaves(returned, "returned"))
    seen.update(leaves(arguments, "arguments"))
    seen.update(heard)
    seen.update(random_states())
    for name, value in loop.observe().items():
        seen.update(leaves(value, name))
    return seen, returned


def seed(number: int) -> None:
    """Sets all three generators."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def play(
    idiom: Idiom,
    compile_: Compile,
    begin: Callable[[Loop], object] = lambda loop: None,
    rank: int = 0,
    *,
    calls: int = CALLS,
) -> list[Record]:
    """Builds the idiom's loop, calls its step some times, and gives a record per call, and one of all results as they
    are after the last call: no call may write to what an earlier one has returned, if eager code does not."""
    with _random_states_kept():
        seed(BUILD_SEED)
        loop = idiom.build()
        begin(loop)
        step = compile_(loop.step)
        seed(CALL_SEED + rank)
        records, results = zip(
            *(_record_of_a_call(loop, step, call, idiom.raises) for call in range(calls)), strict=True
        )
        return [*records, dict(leaves(results, "results of all calls"))]


def same(want: Any, came: Any, *, rounds: bool = False) -> bool:
    """Equality of two leaves: bit for bit and NaN equal to NaN, or with `rounds` up to what sums in another order cost:
    2 ** 10 roundings of the dtype, relative to the value or to one."""
    if type(want) is not type(came):
        return False
    if isinstance(want, Tensor):
        if (want.shape, want.dtype, want.device) != (came.shape, came.dtype, came.device):
            return False
        if not (want.is_floating_point() or want.is_complex()):
            return torch.equal(want, came)
        most = 2**10 * torch.finfo(want.dtype).eps if rounds else 0.0
        return torch.equal(want, came) or torch.allclose(want, came, rtol=most, atol=most, equal_nan=True)
    if isinstance(want, np.ndarray):
        return want.dtype == came.dtype and same(torch.from_numpy(want), torch.from_numpy(came), rounds=rounds)
    if isinstance(want, float):
        most = 2**10 * torch.finfo(torch.float32).eps if rounds else 0.0
        return want == came or (want != want and came != came) or math.isclose(want, came, rel_tol=most, abs_tol=most)
    if isinstance(want, str) and rounds:
        pair = [[float(number) for number in NUMBER.findall(text)] for text in (want, came)]
        return NUMBER.sub("#", want) == NUMBER.sub("#", came) and same(*pair, rounds=True)
    if isinstance(want, list | tuple):
        return len(want) == len(came) and all(same(*pair, rounds=rounds) for pair in zip(want, came, strict=True))
    return bool(want == came)


def _in_words(want: object, came: object) -> str:
    if isinstance(want, Tensor) and isinstance(came, Tensor) and (want.shape, want.dtype) == (came.shape, came.dtype):
        many = int((want != came).sum())
        return f"{many} of {want.numel()} elements differ, the largest by {float((want - came).abs().max()):.1e}"
    shown = [f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else repr(v)[:200] for v in (want, came)]
    return f"wanted {shown[0]}, came {shown[1]}"


def differences(want: Sequence[Record], came: Sequence[Record], *, rounds: bool = False) -> list[str]:
    """One sentence per path and call where two runs do not agree."""
    found = []
    for call, (one, other) in enumerate(zip(want, came, strict=True)):
        found += [f"call {call}: {path} is missing" for path in one if path not in other]
        found += [f"call {call}: {path} exists only in the compiled run" for path in other if path not in one]
        found += [
            f"call {call}: {path}: {_in_words(value, other[path])}"
            for path, value in one.items()
            if path in other and not same(value, other[path], rounds=rounds)
        ]
        found += [f"call {call}: {path[:-5]} is a {kind}" for path, kind in other.items() if _is_no_tensor(path, kind)]
    return found


def _is_no_tensor(path: str, kind: object) -> bool:
    return path.endswith(":type") and kind not in PLAIN_TYPES


def front(step: Any) -> tuple[str, int, str]:
    """How a compiled step ran: pure or live, in how many pieces, and why it is live."""
    try:
        live = getattr(step.explain(), "live", None)
    except ws.WholestepError as error:
        return "live", 0, first_sentence(error)
    return ("pure", 1, "") if live is None else ("live", live.pieces, LINES.sub("", first_sentence(live.reason)))


def first_sentence(told: BaseException | str) -> str:
    """The reason in an error or its text, without the place in the user's file."""
    places = ("The step could not be captured at", "The step is ", "    ")
    text = " ".join(line for line in str(told).splitlines() if not line.startswith(places))
    return FOLDERS.sub("", " ".join(text.split()).partition(". ")[0].rstrip("."))


@contextlib.contextmanager
def _distributions_validate() -> Iterator[None]:
    """torch.compile, once used, ends the validation of distributions for the whole process; it is read in the step."""
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(True)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


@_distributions_validate()
def outcome(
    idiom: Idiom,
    backend: str = "eager",
    *,
    begin: Callable[[Loop], object] = lambda loop: None,
    rank: int = 0,
    rounds: bool = False,
    calls: int = CALLS,
    strategy: Strategy | None = None,
    want: Sequence[Record] | None = None,
) -> Outcome:
    """Runs one idiom both ways; `begin` is given the eager loop before its first call. With `rounds`, and on another
    backend than the eager one, equal means up to rounding. With `want`, what eager code has done, it runs one way."""
    steps: list[Any] = []

    def compiled(step: Callable[..., object]) -> Callable[..., object]:
        steps.append(ws.compile(step, backend=backend, strategy=strategy))  # type: ignore[call-overload]
        return steps[-1]

    want = want or play(idiom, lambda step: step, begin, rank, calls=calls)
    try:
        came = play(idiom, compiled, rank=rank, calls=calls)
    except ws.WholestepError as error:
        told = f"{type(error).__name__}: {first_sentence(error)}"
        return Outcome(idiom.name, "refused", None, told, (told,))
    except Exception as error:
        told = f"raised {type(error).__name__}: {first_sentence(error)}, and eager code did not"
        return Outcome(idiom.name, "wrong", None, told, (told,))
    found = differences(want, came, rounds=rounds or idiom.unrolled or backend != "eager")
    if found:
        return Outcome(idiom.name, "wrong", front(steps[0])[1], found[0], tuple(found))
    return Outcome(idiom.name, *front(steps[0]))
