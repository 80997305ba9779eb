"""Compare a compiled training step with the same step run eagerly, after every call.

A *case* is a function that builds a small job (models, optimizers, batches and a step) from a `Run`. The run decides
what compiling, wrapping and reducing mean, so one description serves three runs:

    Run          plain eager code on one process: the reference of the single-process tests
    EagerDDP     eager code around DistributedDataParallel: the reference of the tests on several ranks
    Compiled     `wholestep.compile`: the thing under test

Everything a user can look at between two calls is recorded after each call: what the step returned, the batch it was
given, parameters, buffers, gradients, the state of every optimizer, extra tensors and the state of the random number
generator. The records must be equal bit for bit, unless the case carries a tolerance and the reason for it.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import wholestep as ws
from wholestep.api.report.live_explanation import LiveExplanation
from wholestep.config import Strategy

PLAIN_TYPES = (Tensor, nn.Parameter)
"""The only tensor types a user may find after a call: no fake tensor, no proxy, no functional wrapper."""

BUILD_SEED = 7
CALL_SEED = 1000

Record = dict[str, object]
"""Everything observed after one call: a path such as ``model.0.weight.grad`` -> a tensor or a Python value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run: a step, what it is called with, and what to look at after each call."""

    step: Callable[..., object]
    batches: Sequence[tuple[object, ...]]
    """The positional arguments of each call."""
    objects: Mapping[str, object]
    """Modules, optimizers, tensors, or functions without arguments that return a value to record."""
    between: Callable[[int], object] | None = None
    """Called after each call with its index: schedulers, ``load_state_dict``, ``eval()`` and the like."""


def recording(job: Job, **objects: object) -> Job:
    """The job, with more to look at after each call."""
    return dataclasses.replace(job, objects={**job.objects, **objects})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named job, and what is allowed to differ."""

    name: str
    build: Callable[[Any], Job]
    ranks: bool = True
    """Whether eager DistributedDataParallel can be the reference of this case."""
    traces: tuple[int, ...] = (1,)
    """The numbers of traces that are right, all compiled functions of the case together; empty: any number."""
    tolerance: float = 0.0
    """Largest absolute difference allowed on floating-point tensors."""
    tolerance_reason: str = ""
    live: bool = False
    """Whether the step is no graph, and runs live."""

    def __post_init__(self) -> None:
        if self.tolerance and not self.tolerance_reason:
            raise ValueError(f"case {self.name}: a tolerance needs the reason why the arithmetic differs")


class Run:
    """Plain eager code; the base of the other runs."""

    rank = 0
    size = 1
    device = torch.device("cpu")
    more_calls = 0
    """With the last batch, beyond those that a case asks for."""

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What decorates the step."""
        return fn

    def model(self, module: nn.Module, **ddp_options: object) -> Any:
        """What the step calls in place of `module`."""
        return module

    def grads(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """What ``torch.autograd.grad`` with respect to parameters should have returned."""
        return grads

    def no_sync(self, *models: Any) -> AbstractContextManager[object]:
        """Around every forward and backward of a step that is not the last one to reach the parameters."""
        return nullcontext()

    def made_here(self) -> AbstractContextManager[object]:
        """Around what makes tensors that do not say where."""
        return nullcontext() if self.device.type == "cpu" else self.device

    def batches(self, calls: int, *shapes: tuple[int, ...], classes: int = 0) -> list[tuple[Tensor, ...]]:
        """Random batches, different on every rank; with `classes`, class indices of the first dimension at the end."""
        generator = torch.Generator().manual_seed(self.rank + 1)
        made = []
        for _ in range(calls):
            batch = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
            if classes:
                batch.append(torch.randint(classes, shapes[0][:1], generator=generator, device="cpu"))
            made.append(tuple(one.to(self.device) for one in batch))
        return made


class EagerDDP(Run):
    """Eager code around DistributedDataParallel over the default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def model(self, module: nn.Module, **ddp_options: object) -> Any:
        if not any(p.requires_grad for p in module.parameters()):
            return module  # DistributedDataParallel refuses a module without anything to reduce
        with warnings.catch_warnings():
            # torch 2.13 warns of `broadcast_buffers`, whose new name 2.11 does not know.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(module, **ddp_options)

    def grads(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        reduced = [grad / self.size for grad in grads]
        for grad in reduced:
            dist.all_reduce(grad)
        return reduced

    def no_sync(self, *models: Any) -> AbstractContextManager[object]:
        stack = ExitStack()
        for model in models:
            if isinstance(model, DistributedDataParallel):
                stack.enter_context(model.no_sync())
        return stack


class Compiled(Run):
    """`wholestep.compile`, over the world when a process group exists."""

    def __init__(
        self, backend: ws.config.Backend = "eager", *, live: bool = False, strategy: Strategy | None = None
    ) -> None:
        """`live`: whether steps may be no graphs. `strategy`: among several ranks, by default `ws.DDP`."""
        self.steps: list[ws.CompiledStep] = []
        self._fullgraph = not live
        self.strategy, self.backend = None, backend
        if dist.is_initialized():
            self.rank, self.size, self.strategy = dist.get_rank(), dist.get_world_size(), strategy or ws.DDP()

    def model(self, module: nn.Module, **ddp_options: object) -> Any:
        if self.strategy is not None and "broadcast_buffers" in ddp_options:
            self.strategy = dataclasses.replace(self.strategy, broadcast_buffers=bool(ddp_options["broadcast_buffers"]))
        return module

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        step = ws.compile(fn, strategy=self.strategy, backend=self.backend, fullgraph=self._fullgraph)
        self.steps.append(step)
        return step

    @property
    def traces(self) -> int:
        return sum(step.cache_info().traces for step in self.steps)


def observe(value: object, path: str) -> Iterator[tuple[str, object]]:
    """The leaves of any value a step may return or a user may hold, each with its path; tensors are copied."""
    if isinstance(value, DTensor):  # sharded: what it stands for is what counts
        yield f"{path}:type", nn.Parameter if isinstance(value, nn.Parameter) else Tensor
        yield path, value.full_tensor().detach().clone()
    elif isinstance(value, Tensor):
        if type(value) not in PLAIN_TYPES:
            raise AssertionError(f"{path} is a {type(value).__name__} after the call")
        yield f"{path}:type", type(value)
        yield path, value.detach().clone()
    elif isinstance(value, nn.Module):
        yield from observe_module(value, path)
    elif isinstance(value, Optimizer):
        yield from observe(value.state_dict(), path)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{path}:type", type(value)
        for one in dataclasses.fields(value):
            yield from observe(getattr(value, one.name), f"{path}.{one.name}")
    elif isinstance(value, Mapping):
        yield f"{path}:keys", (type(value), tuple(value))
        for key, inner in value.items():
            yield from observe(inner, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield f"{path}:length", (type(value), len(value))
        for index, inner in enumerate(value):
            yield from observe(inner, f"{path}[{index}]")
    else:
        yield path, value


def observe_module(module: nn.Module, path: str) -> Iterator[tuple[str, object]]:
    """Parameters with their gradients, buffers and training flags, under every name they have."""
    for name, param in module.named_parameters(remove_duplicate=False):
        yield from observe(param, f"{path}.{name}")
        yield f"{path}.{name}:stride", param.stride()
        yield f"{path}.{name}:requires_grad", param.requires_grad
        yield from observe(param.grad, f"{path}.{name}.grad")
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield from observe(buffer, f"{path}.{name}")
    for name, inner in module.named_modules():
        yield f"{path}.{name}:training", inner.training


def owned_params(objects: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Which named parameter each entry of each optimizer is: swapping objects must not break the identity."""
    modules = [(name, one) for name, one in objects.items() if isinstance(one, nn.Module)]
    names = {id(p): f"{name}.{fqn}" for name, one in modules for fqn, p in one.named_parameters()}
    for name, one in objects.items():
        if isinstance(one, Optimizer):
            yield f"{name}:params", [[names.get(id(p)) for p in group["params"]] for group in one.param_groups]


def record(job: Job, returned: object, batch: object) -> Record:
    """Everything a user can look at after one call."""
    seen: Record = {}
    seen.update(observe(returned, "returned"))
    seen.update(observe(batch, "batch"))
    for name, one in job.objects.items():
        if callable(one) and not isinstance(one, nn.Module):
            one = one()
        seen.update(observe(one, name))
    seen.update(owned_params(job.objects))
    seen["rng"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        seen["rng of the GPU"] = torch.cuda.get_rng_state()
    return seen


def play(case: Case, run: Run) -> list[Record]:
    """Build the case under `run` and call its step on every batch; one record per call."""
    records = []
    with warnings.catch_warnings():
        torch.manual_seed(BUILD_SEED)
        with run.made_here():
            job = case.build(run)
        torch.manual_seed(CALL_SEED + run.rank)
        # A compiled step must count as a step of its optimizers, or the first scheduler.step() warns.
        warnings.filterwarnings("error", message="Detected call of `lr_scheduler.step")
        for call, batch in enumerate([*job.batches, *[job.batches[-1]] * run.more_calls]):
            returned = job.step(*batch)
            records.append(record(job, returned, batch))
            if job.between is not None and call < len(job.batches):
                with run.made_here():
                    job.between(call)
    return records


def same(want: object, came: object, tolerance: float = 0.0, *, rounds: bool = False) -> bool:
    """Equality of two leaves: bit for bit, NaN equal to NaN, or within `tolerance` on floating-point tensors; with
    `rounds`, and on plain numbers, within what the dtype leaves of a few steps whose sums have another order."""
    if isinstance(want, Tensor) and isinstance(came, Tensor):
        if (want.shape, want.dtype, want.device, want.layout) != (came.shape, came.dtype, came.device, came.layout):
            return False
        if (tolerance or rounds) and (want.is_floating_point() or want.is_complex()):
            relative = 2**10 * torch.finfo(want.dtype).eps if rounds else 0.0
            return torch.allclose(want, came, rtol=relative, atol=max(tolerance, relative), equal_nan=True)
        # NaN is not equal to itself, in complex tensors least of all: `equal_nan` of allclose covers both.
        return torch.equal(want, came) or (
            (want.is_floating_point() or want.is_complex())
            and torch.allclose(want, came, rtol=0.0, atol=0.0, equal_nan=True)
        )
    if isinstance(want, float) and isinstance(came, float) and want != want:
        return came != came
    if rounds and isinstance(want, float) and isinstance(came, float):
        return math.isclose(want, came, rel_tol=1e-6, abs_tol=1e-6)
    return type(want) is type(came) and want == came


def difference(want: object, came: object) -> str:
    """Two leaves that are not the same, in words."""
    if isinstance(want, Tensor) and isinstance(came, Tensor) and want.shape == came.shape and want.dtype == came.dtype:
        most = (want - came).abs().max().item() if want.is_floating_point() or want.is_complex() else "integers"
        return f"tensors of shape {tuple(want.shape)} differ, largest difference {most}"
    shown = [f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else repr(v) for v in (want, came)]
    return f"wanted {shown[0]}, came {shown[1]}"


def differences(
    want: Sequence[Record], came: Sequence[Record], tolerance: float = 0.0, *, rounds: bool = False
) -> list[str]:
    """One sentence per path and call where two runs do not agree."""
    found = []
    if len(want) != len(came):
        found.append(f"{len(want)} calls recorded in the reference, {len(came)} in the compiled run")
    for call, (one, other) in enumerate(zip(want, came, strict=False)):
        for path in one.keys() - other.keys():
            found.append(f"call {call}: {path} is missing, wanted {difference(one[path], None)}")
        for path in other.keys() - one.keys():
            found.append(f"call {call}: {path} exists only in the compiled run")
        for path in one:
            if path in other and not same(one[path], other[path], tolerance, rounds=rounds):
                found.append(f"call {call}: {path}: {difference(one[path], other[path])}")
    return found


@dataclass(slots=True)
class Registry:
    """The cases of one file, in order of definition."""

    cases: dict[str, Case] = field(default_factory=dict)

    def add(self, **options: Any) -> Callable[[Callable[[Any], Job]], Callable[[Any], Job]]:
        """Register a builder as a case under the name of the function, or under ``name=``."""

        def register(build: Callable[[Any], Job]) -> Callable[[Any], Job]:
            name = options.pop("name", None) or build.__name__
            case = Case(name=name, build=build, **options)
            if case.name in self.cases:
                raise ValueError(f"two cases are named {case.name}")
            self.cases[case.name] = case
            return build

        return register


def compare(case: Case, reference: Run, compiled: Compiled, *, rounds: bool = False) -> list[str]:
    """Play the case under `reference` and compiled, and say what differs.

    Starts the compiled run from the same random state; leaves the process's random state as it was.
    """
    with torch.random.fork_rng(devices=[]):
        want, came = play(case, reference), play(case, compiled)
    return differences(want, came, case.tolerance, rounds=rounds)


def check(case: Case, reference: Run, strategy: Strategy | None = None) -> list[str]:
    """Every complaint about one case, empty when the compiled run is right. Under a strategy that adds in another order
    than DistributedDataParallel, differences that come of rounding are right."""
    compiled = Compiled(live=case.live, strategy=strategy)
    found = compare(case, reference, compiled, rounds=strategy is not None)
    if case.live and not any(isinstance(step.explain(), LiveExplanation) for step in compiled.steps):
        found.append("is one graph, and said to be live")
    if not case.live and case.traces and compiled.traces not in case.traces:
        found.append(f"traced {compiled.traces} times, wanted {' or '.join(map(str, case.traces))}")
    return found
