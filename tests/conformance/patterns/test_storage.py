"""Patterns of hand-written distributed code: hooks, storage that is freed and filled, version counters, Parameters.

Every pattern runs eagerly and compiled, from the same start, and everything it leaves is compared after each call.
What has no right graph is refused, with the line, and leaves everything as it was.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.harness.equality import equal
from tests.harness.rank_pools import Pool
from tests.unit.builders import live_bytes
from wholestep.errors import CaptureError
from wholestep.ir import op_info
from wholestep.ir.program import Stage

HERE = Path(__file__).name
CALLS = 4

row = functools.partial(pytest.mark.row, "S7")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

keep_version = torch.autograd._unsafe_preserve_version_counter


def set_version(tensor: Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and equal(a, b)


def plain(tree: Any) -> Any:
    """A copy that later calls do not change."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {"type": type(tree), **plain(vars(tree))}
    return [plain(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


class Pattern:
    """A step with its state; `seen` is what a user can look at after a call."""

    device = "cpu"

    def arguments(self, call: int) -> tuple[Any, ...]:
        return ()

    def step(self, *args: Any) -> Any:
        raise NotImplementedError

    def seen(self) -> dict[str, Any]:
        return {}


def run(pattern: Pattern, step: Callable[..., Any], calls: int = CALLS) -> list[Any]:
    found = []
    for call in range(calls):
        args = pattern.arguments(call)
        result = step(*args)
        sizes = [arg.untyped_storage().size() for arg in args if isinstance(arg, Tensor)]
        values = [arg for arg in args if isinstance(arg, Tensor) and arg.untyped_storage().size()]
        found.append(plain({"result": result, "sizes": sizes, "arguments": values, "seen": pattern.seen()}))
    return found


def check(make: Callable[[], Pattern], traces: int = 1, calls: int = CALLS) -> ws.CompiledStep:
    """Eager and compiled agree after every call, in every bit. Gives the compiled step."""
    torch.manual_seed(0)
    eager = make()
    wanted = run(eager, eager.step, calls)
    torch.manual_seed(0)
    pattern = make()
    step = ws.compile(pattern.step)
    for call, (want, got) in enumerate(zip(wanted, run(pattern, step, calls), strict=True)):
        for key in want:
            assert same(got[key], want[key]), f"call {call}, {key}: {got[key]} instead of {want[key]}"
    assert step.cache_info().traces == traces, step.cache_info().reasons
    return step


def lines(step: ws.CompiledStep) -> list[Any]:
    return [node.target for node in step.graph.graph.nodes if node.op == "call_function"]


# Tensor hooks


@dataclasses.dataclass
class Held:
    val: Tensor


class HookWithClosure(Pattern):
    def __init__(self) -> None:
        self.held = [Held(torch.tensor(88)), Held(torch.tensor(99))]

    def arguments(self, call: int) -> tuple[Any, ...]:
        return torch.randn(4, requires_grad=True), self.held[call % 2]

    def step(self, x: Tensor, held: Held) -> Tensor:
        y = x.sin()
        more = y + 1
        y.register_hook(lambda grad: grad + held.val + more)
        return torch.autograd.grad(y.sin().sum(), x)[0]


class HookOnLeaf(HookWithClosure):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = torch.ones(4, requires_grad=True)

    def arguments(self, call: int) -> tuple[Any, ...]:
        return (self.held[call % 2],)

    def step(self, held: Held) -> None:  # type: ignore[override]
        y = self.leaf.sin()
        more = y + 1
        y.register_hook(lambda grad: grad + held.val + more)
        y.sin().sum().backward()

    def seen(self) -> dict[str, Any]:
        return {"grad": self.leaf.grad}


@row("intermediate_hook_with_closure")
def test_intermediate_hook_with_closure() -> None:
    check(HookWithClosure)


@row("intermediate_hook_with_closure")
def test_intermediate_hook_that_accumulates_into_a_leaf() -> None:
    check(HookOnLeaf, traces=2)  # without and with a gradient at entry


# Storage

_watched: list[Tensor] = []
_sizes: list[int] = []


@torch.library.custom_op("patterns::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    """A copy of x. Notes down how many bytes the storages of the watched tensors have at this moment."""
    _sizes.extend(tensor.untyped_storage().size() for tensor in _watched)
    return x.clone()


look.register_fake(torch.empty_like)


@pytest.fixture(autouse=True)
def nothing_watched() -> Iterator[None]:
    yield
    _watched.clear()
    _sizes.clear()


class FreedArgument(Pattern):
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def arguments(self, call: int) -> tuple[Any, ...]:
        _watched[:] = [torch.randn(10, device=self.device)]
        return (_watched[0],)

    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        x.untyped_storage().resize_(0)
        return torch.cos(look(y))


class FreedByInductorsOperator(FreedArgument):
    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        torch.ops.inductor.resize_storage_bytes_(x, 0)
        return torch.cos(look(y))


class FreedByTypedStorage(FreedArgument):
    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        x._typed_storage()._resize_(0)
        return torch.cos(look(y))


class FreedThroughAnAlias(FreedArgument):
    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        x.detach().view(2, 5).untyped_storage().resize_(0)
        return torch.cos(look(y))


class FreedBesideACallThatMayFail(FreedArgument):
    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        x.untyped_storage().resize_(0)
        return y + look(torch.ones_like(y))


FREED = [
    FreedArgument, FreedByInductorsOperator, FreedByTypedStorage, FreedThroughAnAlias, FreedBesideACallThatMayFail,
]  # fmt: skip


@on_devices
@pytest.mark.parametrize("kind", FREED)
@row("storage_resize_zero")
@torch.no_grad()
def test_storage_resize_zero(kind: type[FreedArgument], device: str) -> None:
    check(lambda: kind(device))
    # Eager and compiled: it was gone while the step went on, which a call that may fail does not hold up. Where
    # Inductor makes one kernel of what reads it and of what reads the result of that call, it goes behind that.
    compiled = 40 if device == "cuda" and kind is FreedBesideACallThatMayFail else 0
    assert _sizes == [0] * CALLS + [compiled] * CALLS


class FilledArgument(Pattern):
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def arguments(self, call: int) -> tuple[Any, ...]:
        out = torch.randn(10, device=self.device)
        out.untyped_storage().resize_(0)
        return torch.randn(10, device=self.device), out

    def step(self, x: Tensor, out: Tensor) -> None:
        y = torch.sin(x)
        assert out.untyped_storage().size() == 0
        out.untyped_storage().resize_(x.untyped_storage().size())
        out.copy_(y.cos())


class FilledInParts(FilledArgument):
    def step(self, x: Tensor, out: Tensor) -> None:
        out.untyped_storage().resize_(40)
        out[:4].copy_(x[:4])
        out[4:].fill_(7)


class FilledFromAnotherType(FilledArgument):
    def step(self, x: Tensor, out: Tensor) -> Tensor:
        out.untyped_storage().resize_(40)
        out.copy_(x.double() * 3)
        return out * 2


class FilledTwice(FilledArgument):
    """Full, freed and full again, while a call that may fail stands between."""

    def arguments(self, call: int) -> tuple[Any, ...]:
        return torch.randn(10, device=self.device), torch.randn(10, device=self.device)

    def step(self, x: Tensor, out: Tensor) -> Tensor:
        y = x * out
        out.untyped_storage().resize_(0)
        z = look(y)
        out.untyped_storage().resize_(40)
        out.copy_(z + 1)
        return out * 2


@on_devices
@pytest.mark.parametrize("kind", [FilledArgument, FilledInParts, FilledFromAnotherType, FilledTwice])
@row("storage_resize_nonzero")
@torch.no_grad()
def test_storage_resize_nonzero(kind: type[FilledArgument], device: str) -> None:
    check(lambda: kind(device))


@row("storage_resize_nonzero")
def test_the_size_of_a_storage_belongs_to_the_signature() -> None:
    def step(x: Tensor, out: Tensor) -> Tensor:
        if out.untyped_storage().size() == 0:
            out.untyped_storage().resize_(40)
            return out.copy_(x) * 2
        return x + out

    compiled = ws.compile(step)
    x, full, freed = torch.randn(10), torch.randn(10), torch.randn(10)
    assert torch.equal(compiled(x, full), x + full)
    freed.untyped_storage().resize_(0)
    assert torch.equal(compiled(x, freed), x * 2)
    assert torch.equal(freed, x)
    assert torch.equal(compiled(x, full), x + full)
    assert compiled.cache_info().reasons == ("the storage of argument 1 had 40 bytes, has 0",)


class FreedState(Pattern):
    """A tensor of the state is freed in one step and filled in the next."""

    def __init__(self) -> None:
        self.kept = torch.arange(10.0)

    def arguments(self, call: int) -> tuple[Any, ...]:
        return (torch.randn(10),)

    def step(self, x: Tensor) -> Tensor:
        storage = self.kept.untyped_storage()
        if storage.size():
            y = x + self.kept
            storage.resize_(0)
            return y
        storage.resize_(40)
        self.kept.copy_(x)
        return x * 3

    def seen(self) -> dict[str, Any]:
        return {"size": self.kept.untyped_storage().size()}


@row("storage_resize_nonzero")
@torch.no_grad()
def test_state_that_is_freed_in_one_call_and_filled_in_the_next() -> None:
    check(FreedState, traces=2)


@row("storage_resize_zero")
@torch.no_grad()
def test_freed_state_is_kept_until_nothing_can_fail_any_more() -> None:
    buffer = torch.arange(3.0)
    table = torch.randn(5, 3)

    def step(rows: Tensor) -> Tensor:
        y = buffer.sum()
        buffer.untyped_storage().resize_(0)
        return y + nn.functional.embedding(rows, table)

    compiled = ws.compile(step)
    with pytest.raises(IndexError):
        compiled(torch.tensor([0, 9]))
    assert torch.equal(buffer, torch.arange(3.0))
    assert torch.equal(compiled(torch.tensor([0, 1])), torch.arange(3.0).sum() + table[:2])
    assert buffer.untyped_storage().size() == 0


# Storage: what is refused


def refused(step: Callable[..., Any], *args: Any, text: str, line: str = HERE) -> None:
    """The step is refused with `text` and a line of this file, and its arguments are as they were."""
    before = [(arg.untyped_storage().size(), arg._version, tuple(arg.shape)) for arg in args]
    values = [arg.clone() if arg.untyped_storage().size() else None for arg in args]
    try:
        with pytest.raises(CaptureError, match=text) as caught:
            ws.compile(step)(*args)
        assert f"{line}:" in str(caught.value)
        assert before == [(arg.untyped_storage().size(), arg._version, tuple(arg.shape)) for arg in args]
        assert all(value is None or torch.equal(arg, value) for arg, value in zip(args, values, strict=True))
    finally:
        for arg in args:  # a report of pytest would read it
            arg.untyped_storage().resize_(arg.numel() * arg.element_size())


def free(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


def read_later(x: Tensor) -> Tensor:
    free(x)
    return x * 2


def read_unfilled(x: Tensor) -> Tensor:
    free(x)
    x.untyped_storage().resize_(x.numel() * 4)
    return x * 2


def added_to_unfilled(x: Tensor) -> None:
    free(x)
    x.untyped_storage().resize_(x.numel() * 4)
    x.add_(1)


def written_while_freed(x: Tensor) -> None:
    free(x)
    x.fill_(1)


def returned_while_freed(x: Tensor) -> Tensor:
    free(x)
    return x


def view_returned(x: Tensor) -> Tensor:
    y = x[:2]
    free(x)
    return y


def needed_by_backward(x: Tensor) -> Tensor:
    w = torch.ones(4, requires_grad=True)
    loss = (w * x).sum()
    free(x)
    return torch.autograd.grad(loss, w)[0]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (read_later, r"reads argument tensor 0, whose storage was freed at .*:\d+"),
        (read_unfilled, r"reads argument tensor 0, whose storage was allocated at .* and not filled"),
        (added_to_unfilled, "whose storage was allocated at .* and not filled"),
        (written_while_freed, "writes to argument tensor 0, whose storage was freed at"),
        (returned_while_freed, "the step returns argument tensor 0, whose storage was freed"),
        (view_returned, "the step returns argument tensor 0, whose storage was freed"),
        (needed_by_backward, "reads argument tensor 0, whose storage was freed"),
        (lambda x: x.untyped_storage().resize_(4), "resized to 4 bytes, and the tensor in it.*needs 16"),
        (lambda x: x.untyped_storage().resize_(64), "resized to 64 bytes, and the tensor in it.*needs 16"),
        (lambda x: x.resize_(7).zero_(), "other storage or another shape at"),
        (lambda x: x.set_(torch.ones(4)), "other storage or another shape at"),
    ],
)
@row("storage_resize_zero")
def test_storage_that_cannot_be_right_is_refused(step: Callable[..., Any], text: str) -> None:
    refused(step, torch.randn(4), text=text)


@row("storage_resize_zero")
def test_an_assignment_to_data_of_an_argument_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        x.data = x.data * 2
        return x + 1

    refused(step, torch.randn(4), text="other storage or another shape")


@row("storage_resize_zero")
def test_freed_parts_of_a_larger_storage_are_refused() -> None:
    refused(free, torch.randn(8)[:4], text="resized to 0 bytes, and the tensor in it, .*is a part of it")
    whole = torch.randn(8)
    refused(lambda a, b: free(a), whole, whole.view(2, 4), text="which share it")


@row("storage_resize_nonzero")
def test_an_argument_that_comes_freed_is_not_read() -> None:
    x = torch.randn(4)
    free(x)
    refused(lambda x: x + 1, x, text="argument tensor 0, whose storage was freed already when the step was called")


# Version counters


class SetVersion(Pattern):
    def arguments(self, call: int) -> tuple[Any, ...]:
        w = torch.randn(16)
        for number in range((3, 0, 1, 2)[call]):
            w.fill_(number)
        self.w = w
        return w, torch.randn(16)

    def step(self, w: Tensor, x: Tensor) -> tuple[Tensor, int]:
        x = x.sin()
        version = w._version
        w.copy_(x + 1)
        set_version(w, version)
        return w, version

    def seen(self) -> dict[str, Any]:
        return {"version": self.w._version}


class SetVersionThenWrite(SetVersion):
    def step(self, w: Tensor, x: Tensor) -> tuple[Tensor, int]:
        w.mul_(2)
        version = w._version
        w.copy_(x + 1)
        set_version(w, version)
        w.add_(1)
        w.add_(1)
        return w * 1, version


class KeepVersion(SetVersion):
    def step(self, w: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        with keep_version(w):
            w.copy_(x.sin() + 1)
        return w


class SetVersionThenBackward(Pattern):
    def __init__(self) -> None:
        self.w = torch.randn(1, requires_grad=True)

    def arguments(self, call: int) -> tuple[Any, ...]:
        self.w.grad = None
        return (torch.randn(1),)

    def step(self, x: Tensor) -> Tensor:
        r = self.w.sin()
        with torch.no_grad():
            version = self.w._version
            self.w.copy_(x)
            set_version(self.w, version)
        r.backward()
        return r.detach()

    def seen(self) -> dict[str, Any]:
        return {"w": self.w, "grad": self.w.grad, "version": self.w._version}


class KeepVersionThenBackward(SetVersionThenBackward):
    def step(self, x: Tensor) -> Tensor:
        r = self.w.sin()
        with torch.no_grad(), keep_version(self.w):
            self.w.copy_(x)
        r.backward()
        return r.detach()


@pytest.mark.parametrize("kind", [SetVersion, SetVersionThenWrite])
@row("unsafe_set_version_counter1")
@torch.no_grad()
def test_unsafe_set_version_counter1(kind: type[Pattern]) -> None:
    check(kind)


@row("unsafe_set_version_counter2")
def test_unsafe_set_version_counter2() -> None:
    check(SetVersionThenBackward)


@row("unsafe_preserve_version_counter1")
@torch.no_grad()
def test_unsafe_preserve_version_counter1() -> None:
    check(KeepVersion)


@row("unsafe_preserve_version_counter2")
def test_unsafe_preserve_version_counter2() -> None:
    check(KeepVersionThenBackward)


@row("unsafe_preserve_version_counter2")
def test_backward_still_refuses_what_was_overwritten() -> None:
    w = torch.randn(1, requires_grad=True)

    def step(x: Tensor) -> None:
        r = w.sin()
        with torch.no_grad():
            w.copy_(x)
        r.backward()

    refused(step, torch.randn(1), text="modified by an inplace operation")


@row("unsafe_set_version_counter1")
@torch.no_grad()
def test_version_counters_that_python_looks_at_are_refused() -> None:
    refused(lambda w: w * 2 if w._version else w, torch.randn(3), text="decides what Python does")
    refused(lambda w: set_version(w, 5), torch.randn(3), text="sets the version counter of a tensor")
    refused(lambda w: w.detach()._version, torch.randn(3), text="version counter of a view")


# Hooks of modules


class Hooked(nn.Linear):
    def __init__(self, device: str) -> None:
        super().__init__(10, 10, device=device)
        self.calls_pre = torch.tensor(0, device=device)
        self.calls_post = torch.tensor(0, device=device)
        self.calls_forward = torch.tensor(0, device=device)
        self.register_full_backward_pre_hook(_pre_hook)
        self.register_full_backward_hook(_post_hook)
        self.register_forward_hook(_forward_hook)


def _pre_hook(module: Any, grads: Any) -> Any:
    assert module.weight.size() == (10, 10)
    module.calls_pre.add_(1)
    return (torch.sin(grads[0] + 1.2),)


def _post_hook(module: Any, grads_in: Any, grads_out: Any) -> Any:
    module.calls_post.add_(1)
    return None if grads_in[0] is None else (torch.sin(grads_in[0] + 3.4),)


def _forward_hook(module: Any, args: Any, out: Tensor) -> Tensor:
    module.calls_forward += 1
    return out * 0.5


class ModuleHooks(Pattern):
    def __init__(self, layers: int, device: str = "cpu") -> None:
        self.model = nn.Sequential(*(Hooked(device) for _ in range(layers)))
        self.inp = torch.rand(2, 10, requires_grad=True, device=device)

    def step(self, *batch: Tensor) -> Tensor:
        out = self.model(batch[0] if batch else self.inp)
        out.sum().backward()
        return out.detach()

    def seen(self) -> dict[str, Any]:
        counts = [[m.calls_pre, m.calls_post, m.calls_forward] for m in self.model]
        return {"counts": counts, "grads": [p.grad for p in [self.inp, *self.model.parameters()]]}


@on_devices
@row("module_backward_hooks")
def test_module_backward_hooks(device: str) -> None:
    check(lambda: ModuleHooks(1, device), traces=2)


@on_devices
@row("module_backward_hooks_multi_layers")
def test_module_backward_hooks_multi_layers(device: str) -> None:
    check(lambda: ModuleHooks(2, device), traces=2)


def module_hooks_on_a_rank() -> None:
    world = ws.init()
    seen: list[list[Any]] = [[], []]
    for compiled in (False, True):
        torch.manual_seed(0)
        pattern = ModuleHooks(2, str(world.device))
        layers = pattern.model
        step: Callable[..., Tensor] = pattern.step
        if compiled:
            step = ws.compile(pattern.step)
        else:
            pattern.model = DistributedDataParallel(layers)  # type: ignore[assignment]
        for call in range(CALLS):
            x = torch.randn(2, 10, generator=torch.Generator().manual_seed(10 * call + world.rank)).to(world.device)
            counts = [[m.calls_pre, m.calls_post, m.calls_forward] for m in layers]
            seen[compiled].append(plain([step(x), counts, [p.grad for p in layers.parameters()]]))
            layers.zero_grad()
    assert same(*seen), seen


@row("module_backward_hooks_multi_layers")
def test_module_backward_hooks_on_two_ranks(ranks2: Pool) -> None:
    ranks2.run(module_hooks_on_a_rank)


class Counter:
    """What a Python hook may count in."""

    total = 0

    def __init__(self) -> None:
        self.calls, self.items, self.table = 0, [0], {"n": 0}

    def attribute(self, *_: Any) -> None:
        self.calls += 1

    def item(self, *_: Any) -> None:
        self.items[0] += 1

    def entry(self, *_: Any) -> None:
        self.table["n"] += 1

    def grows(self, *_: Any) -> None:
        self.items.append(1)

    def of_the_class(self, *_: Any) -> None:
        Counter.total += 1

    def __call__(self, *_: Any) -> None:
        self.calls += 1

    def state(self) -> tuple[Any, ...]:
        return self.calls, self.items, self.table, Counter.total


def _hook_everywhere(model: nn.Linear, loose: Tensor, where: str, hook: Callable[..., None]) -> Any:
    """Hooks `hook` in; gives the handle."""
    return {
        "forward": lambda: model.register_forward_hook(hook),
        "forward_pre": lambda: model.register_forward_pre_hook(hook),
        "backward": lambda: model.register_full_backward_hook(hook),
        "backward_pre": lambda: model.register_full_backward_pre_hook(hook),
        "parameter": lambda: model.weight.register_hook(hook),
        "accumulated": lambda: model.weight.register_post_accumulate_grad_hook(hook),
        "leaf": lambda: loose.register_hook(hook),
        "global": lambda: register_module_forward_hook(hook),
    }[where]()


PLACES = ["forward", "forward_pre", "backward", "backward_pre", "parameter", "accumulated", "leaf", "global"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("how", ["grows", "of_the_class"])
@row("module_backward_hooks")
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_hook_that_counts_in_python_is_refused_at_its_line(where: str, how: str) -> None:
    counter, model, loose = Counter(), nn.Linear(4, 4), torch.ones(4, requires_grad=True)
    hook = counter if how == "__call__" else getattr(counter, how)
    before = repr(counter.state())
    code = getattr(Counter, how).__code__
    handle = _hook_everywhere(model, loose, where, hook)

    def step(x: Tensor) -> Tensor:
        loss = (model(x) * loose).sum()
        loss.backward()
        return loss

    try:
        with pytest.raises(CaptureError, match="The step changes Python state") as caught:
            ws.compile(step)(torch.rand(2, 4))
    finally:
        handle.remove()
    assert f"{HERE}:{code.co_firstlineno + 1} in {how}" in str(caught.value)
    assert repr(counter.state()) == before
    assert model.weight.grad is None


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("how", ["attribute", "item", "entry", "__call__"])
@row("module_backward_hooks")
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_hook_that_moves_a_number_goes_on_as_in_eager_code(where: str, how: str) -> None:
    counts = []
    for compiled in (False, True):
        counter, model, loose = Counter(), nn.Linear(4, 4), torch.ones(4, requires_grad=True)
        hook = counter if how == "__call__" else getattr(counter, how)
        handle = _hook_everywhere(model, loose, where, hook)

        def step(x: Tensor, model: nn.Linear = model, loose: Tensor = loose) -> Tensor:
            loss = (model(x) * loose).sum()
            loss.backward()
            return loss.detach()

        run = ws.compile(step, backend="eager") if compiled else step
        try:
            for _ in range(3):
                run(torch.rand(2, 4))
        finally:
            handle.remove()
        counts.append(repr(counter.state()))
    assert counts[0] == counts[1]
    assert counts[0] != repr(Counter().state())


@row("module_backward_hooks")
def test_what_a_hook_sets_on_a_parameter_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight.calls = 0  # type: ignore[attr-defined]

    def count(weight: Any) -> None:
        weight.calls += 1

    model.weight.register_post_accumulate_grad_hook(count)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    with pytest.raises(CaptureError, match=r"in count: model\.weight\.calls was 0, is 1"):
        ws.compile(step)(torch.rand(2, 4))
    assert model.weight.calls == 0


@row("module_backward_hooks")
def test_attributes_of_a_parameter_are_in_sight() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight.scale = 3  # type: ignore[attr-defined]
    step = ws.compile(lambda x: model(x) * model.weight.scale)
    x = torch.rand(2, 4)
    for scale in (3, 3, 5):
        model.weight.scale = scale  # type: ignore[attr-defined]
        assert torch.equal(step(x), model(x) * scale)
    assert step.cache_info().traces == 2


# Parameters as results


class NewParameter(Pattern):
    requires_grad, more = True, 0

    def arguments(self, call: int) -> tuple[Any, ...]:
        return (torch.randn(16),)

    def step(self, x: Tensor) -> Any:
        p = nn.Parameter(x + self.more if self.more else x, requires_grad=self.requires_grad)
        if not self.requires_grad:
            return p, x + 1
        r = p.sin()
        r.sum().backward()
        return p, r.detach()


class FrozenParameter(NewParameter):
    requires_grad = False


class ParameterOfSum(NewParameter):
    more = 123


class FrozenParameterOfSum(ParameterOfSum):
    requires_grad = False


@dataclasses.dataclass
class Out:
    weight: Tensor
    loss: Tensor


class ParameterInAnObject(NewParameter):
    def step(self, x: Tensor) -> Any:
        p, r = super().step(x)
        return {"out": Out(p, r), "p": [p]}


def check_parameters(kind: type[NewParameter]) -> None:
    check(kind)
    eager, pattern = kind(), kind()
    step = ws.compile(pattern.step)
    for call in range(CALLS):
        x = pattern.arguments(call)[0]
        (p, r), (q, s) = eager.step(x), step(x)
        assert type(p) is type(q) is nn.Parameter
        assert isinstance(q, nn.Parameter)
        assert (q.is_leaf, q.requires_grad) == (p.is_leaf, p.requires_grad) == (True, kind.requires_grad)
        assert same([p.detach(), p.grad, r], [q.detach(), q.grad, s])
        assert (q.data_ptr() == x.data_ptr()) == (p.data_ptr() == x.data_ptr())
    assert step.cache_info().traces == 1


@row("nn_param_return1")
def test_nn_param_return1() -> None:
    check_parameters(NewParameter)


@row("nn_param_return2")
def test_nn_param_return2() -> None:
    check_parameters(FrozenParameter)


@row("nn_param_return3")
def test_nn_param_return3() -> None:
    check_parameters(ParameterOfSum)


@row("nn_param_return4")
def test_nn_param_return4() -> None:
    check_parameters(FrozenParameterOfSum)


@row("nn_param_return1")
def test_a_new_parameter_inside_of_what_is_returned() -> None:
    check(ParameterInAnObject)
    result = ws.compile(ParameterInAnObject().step)(torch.ones(2))
    assert isinstance(result["out"], Out)
    assert isinstance(result["out"].weight, nn.Parameter)
    assert isinstance(result["p"][0], nn.Parameter)


def parameters_on_a_rank() -> None:
    world = ws.init()
    x = torch.randn(16, device=world.device) + world.rank
    p, r = ws.compile(ParameterOfSum().step)(x)
    q, s = ParameterOfSum().step(x)
    assert isinstance(p, nn.Parameter)
    assert same([p.detach(), p.grad, r], [q.detach(), q.grad, s])  # of this rank, and not reduced


@row("nn_param_return3")
def test_a_new_parameter_on_two_ranks(ranks2: Pool) -> None:
    ranks2.run(parameters_on_a_rank)


# FSDP by hand

WORLD_SIZE = 2


@torch.no_grad()
def all_gather(shard: Tensor) -> Tensor:
    """As if every rank had the same shard."""
    return torch.cat([shard] * WORLD_SIZE, 0)


@torch.no_grad()
def reduce_scatter(full: Tensor) -> Tensor:
    return full.narrow(0, 0, full.size(0) // WORLD_SIZE).clone()


def unshard(module: Any) -> None:
    full = module.full_weight
    full.untyped_storage().resize_(full.nelement() * full.element_size())
    with torch.no_grad(), keep_version(full):
        full.copy_(all_gather(module.shard))
    module.weight = full


def reshard(module: Any) -> None:
    module.weight = module.shard
    module.full_weight.untyped_storage().resize_(0)


def reduce(module: Any) -> None:
    grad = reduce_scatter(module.weight.grad)
    reshard(module)
    module.weight.grad = grad


def sharded(features: int, device: str) -> nn.Linear:
    layer = nn.Linear(features, features, bias=False, device=device)
    layer.shard = nn.Parameter(reduce_scatter(layer.weight))
    layer.full_weight = nn.Parameter(all_gather(layer.shard))
    layer.full_weight.untyped_storage().resize_(0)
    del layer.weight
    layer.register_full_backward_pre_hook(lambda module, grads: unshard(module))
    layer.register_full_backward_hook(lambda module, grads_in, grads_out: reduce(module))
    layer.register_forward_pre_hook(lambda module, args: unshard(module))
    layer.register_forward_hook(lambda module, args, out: reshard(module))
    return layer


class HandWrittenFSDP(Pattern):
    def __init__(self, layers: int = 1, features: int = 20, device: str = "cpu") -> None:
        self.model = nn.Sequential(*(sharded(features, device) for _ in range(layers)))
        self.inp = torch.rand(2, features, requires_grad=True, device=device)
        _watched[:] = [layer.full_weight for layer in self.model]

    def step(self) -> Tensor:
        out = self.model(self.inp)
        out.sum().backward()
        return out.detach()

    def seen(self) -> dict[str, Any]:
        layers = [
            [m.weight is m.shard, m.weight, m.weight.grad, m.full_weight.grad, m.full_weight._version,
             m.full_weight.untyped_storage().size()]
            for m in self.model
        ]  # fmt: skip
        return {"layers": layers, "inp": self.inp.grad}


class TrainedFSDP(HandWrittenFSDP):
    def __init__(self, layers: int = 2, features: int = 20, device: str = "cpu") -> None:
        super().__init__(layers, features, device)
        self.opt = torch.optim.AdamW([layer.shard for layer in self.model], lr=0.1)

    def step(self) -> Tensor:
        out = super().step()
        self.opt.step()
        for layer in self.model:
            layer.full_weight.grad = None
        self.opt.zero_grad()
        self.inp.grad = None
        return out


@on_devices
@pytest.mark.parametrize("layers", [1, 3])
@row("fake_distributed")
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_fake_distributed(layers: int, device: str) -> None:
    step = check(lambda: HandWrittenFSDP(layers, device=device), traces=2)
    # A weight that comes without memory and leaves without it has none in between: its values go from hand to hand.
    assert op_info.RESIZE_STORAGE_ not in lines(step)
    assert not [o for o in step.program().outputs if o.name.endswith("full_weight")]


@row("fake_distributed")
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_fake_distributed_with_an_optimizer() -> None:
    check(TrainedFSDP, traces=1)


@row("fake_distributed")
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_fake_distributed_frees_each_weight_behind_its_last_reader() -> None:
    layers, features = 6, 64
    weight_bytes = features * features * 4
    peaks = []
    for compiled in (False, True):
        pattern = HandWrittenFSDP(layers, features)
        step = ws.compile(pattern.step) if compiled else pattern.step
        for _ in range(3):
            step()
        for layer in pattern.model:
            layer.full_weight.grad = layer.shard.grad = None
        step()
        with live_bytes() as live:
            for layer in pattern.model:
                layer.full_weight.grad = layer.shard.grad = None
            step()
        peaks.append(live.peak)
    gradients = layers * weight_bytes * 3 // 2  # the whole gradient and its shard, which the step leaves
    assert peaks[1] < gradients + 3 * weight_bytes, "gathered weights are kept from the forward to the backward"
    assert peaks[1] <= peaks[0] + 3 * weight_bytes


@row("storage_resize_zero")
@torch.no_grad()
def test_a_captured_program_says_what_is_freed() -> None:
    step = ws.compile(lambda x: (x.sin(), x.untyped_storage().resize_(0))[0].cos())
    step(torch.randn(3))
    captured = step.program(Stage.CAPTURED)
    assert [n.target for n in captured.graph.nodes if n.op == "call_function"].count(op_info.RESIZE_STORAGE) == 1
    targets = lines(step)
    assert targets.index(op_info.RESIZE_STORAGE_) == 1 + targets.index(torch.ops.aten.sin.default)
