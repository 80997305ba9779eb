"""Captures of CUDA graphs, of pieces of a step by turns with calls that run as they are."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.builders import aten
from tests.unit.lower.gpu_programs import Spec, gpu, host, scheduled
from wholestep.config import Inductor as InductorOptions
from wholestep.ir.program import InputKind, MeshAxis, Output, OutputKind, Program
from wholestep.lower.base import eager_backend
from wholestep.lower.base.protocol import ExecutionMode
from wholestep.lower.cudagraph import memset_nodes
from wholestep.lower.cudagraph.graph_pool import Pool
from wholestep.lower.cudagraph.graph_runner import WARM_UP_CALLS, GraphRunner, _cause
from wholestep.lower.cudagraph.partition import Partition, partition
from wholestep.lower.inductor_backend import InductorBackend


class FakeStream(str):
    """A stream by its name; `log` is that of `FakeCuda`."""

    log: list[str]

    def wait_stream(self, other: str) -> None:
        self.log.append(f"{self} waits for {other}")


class FakeCuda:
    """What a capture asks of torch.cuda, written down in `log`. A stream that captures is left current by an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.stream = self.make_Stream("users")
        self.full = False
        """Whether there is no memory for another graph."""
        self.numbers = itertools.count(1)
        self.alive: set[str] = set()
        for name in ("graph", "CUDAGraph", "device", "Stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"make_{name}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {next(self.numbers)}")
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            told = partial(lambda what, *args: self.log.append(f"{what} {args}"), name)
            monkeypatch.setattr(torch._C, name, told, raising=False)

    def make_CUDAGraph(self, keep_graph: bool = False) -> Any:
        fake, name = self, f"graph {next(self.numbers)}"
        self.alive.add(name)

        class Graph:
            def instantiate(self) -> None:
                assert keep_graph
                if fake.full:
                    raise RuntimeError("out of memory")

            def capture_end(self) -> None:
                fake.log.append(f"end of {name}")

            def reset(self) -> None:
                fake.log.append(f"reset of {name}")

            def __del__(self) -> None:
                fake.alive.discard(name)

            def __str__(self) -> str:
                return name

        return Graph()

    def make_Stream(self, name: str = "") -> FakeStream:
        made = FakeStream(name or f"stream {next(self.numbers)}")
        made.log = self.log
        return made

    @contextlib.contextmanager
    def make_stream(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    make_device = contextlib.nullcontext

    @contextlib.contextmanager
    def make_graph(self, graph: Any, *, pool: str, stream: str, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"capture into {pool}, {capture_error_mode}")
        before, self.stream = self.stream, stream
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self.stream = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_pool_outlives_its_graphs(cuda: FakeCuda) -> None:
    pool = Pool(torch.device("cpu"))
    assert cuda.log == []
    graph, results = pool.capture(lambda: ("result",))
    assert results == ("result",)
    # What a capture has its own stream do comes before what the user's does with the graph.
    assert cuda.log == ["capture into pool 1, thread_local", "users waits for stream 2"] * 2
    gone = str(graph)
    del graph
    assert gone not in cuda.alive
    assert len(cuda.alive) == 1
    pool.capture(lambda: ())
    assert set(cuda.log) == {"capture into pool 1, thread_local", "users waits for stream 2"}


def test_nothing_is_collected_during_a_capture(cuda: FakeCuda) -> None:
    pool, seen = Pool(torch.device("cpu")), []

    def body() -> tuple[()]:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise ValueError("refused")
        return ()

    pool.capture(body)
    with pytest.raises(RuntimeError, match="previous error"):
        pool.capture(body)
    assert seen == [False, False]
    assert gc.isenabled()


def test_torch_is_mended_after_a_capture_that_failed(cuda: FakeCuda) -> None:
    pool = Pool(torch.device("cpu"))
    pool.capture(lambda: ())
    del cuda.log[:]

    def body() -> tuple[()]:
        assert cuda.stream != "users"
        error = RuntimeError("operation not permitted when stream is capturing\nand more")
        error.add_note("while running item (my::op) from train.py:7")
        raise error

    with pytest.raises(RuntimeError, match="previous error") as found:
        pool.capture(body)
    assert _cause(found.value) == (
        "operation not permitted when stream is capturing, while running item (my::op) from train.py:7"
    )
    assert cuda.stream == "users"
    begun, ended, waits, reset, *rest = cuda.log
    assert begun == "capture into pool 1, thread_local"
    assert ended.removeprefix("end of ") == reset.removeprefix("reset of ")
    # A capture that goes well, in another pool, is what frees the random generator.
    assert rest[:2] == ["_cuda_endAllocateToPool (3, 'pool 1')", "_cuda_releasePool (3, 'pool 1')"]
    assert rest[2].startswith("capture into pool ")
    assert rest[2] != begun
    assert (waits, rest[3]) == ("users waits for stream 2", "users waits for stream 7")
    pool.capture(lambda: ())
    assert cuda.log[-2] == rest[2]


def test_torch_is_mended_where_a_graph_cannot_be_made_ready(cuda: FakeCuda) -> None:
    pool = Pool(torch.device("cpu"))
    pool.capture(lambda: ())
    del cuda.log[:]
    cuda.full = True
    with pytest.raises(RuntimeError, match="out of memory"):
        pool.capture(lambda: ())
    assert cuda.stream == "users"
    assert [line.split()[0] for line in cuda.log] == ["capture", "users"]  # that went well, so there is nothing to mend
    cuda.full = False
    assert pool.capture(lambda: ("result",))[1] == ("result",)


def test_torch_is_mended_where_fills_cannot_be_captured(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for memsets is captured behind the step, which keeps its graph."""

    def as_kernels(graph: Any, capture: Callable[[Callable[[], object]], Any], device: torch.device) -> int:
        with pytest.raises(RuntimeError, match="previous error"):
            capture(lambda: [][0])
        return 0

    pool = Pool(torch.device("cpu"))
    monkeypatch.setattr(memset_nodes, "replace_memsets", as_kernels)
    graph, results = pool.capture(lambda: ("result",))
    assert results == ("result",)
    assert str(graph) in cuda.alive
    assert cuda.stream == "users"
    assert f"reset of {graph}" not in cuda.log
    assert [line.split()[0] for line in cuda.log if "pool" not in line] == [
        "users",
        "users",
        "end",
        "users",
        "reset",
        "users",
    ]


def test_a_step_whose_capture_fails_runs_as_it_is(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    def step(x: Tensor) -> Tensor:
        return x * 2

    program = scheduled(step, gpu(3))
    calls = []

    def lower(part: Program) -> Callable[[list[Any]], tuple[Any, ...]]:
        def run(inputs: list[Any]) -> tuple[Any, ...]:
            calls.append(cuda.stream)
            if cuda.stream != "users":
                error = RuntimeError("illegal")
                error.add_note("while running mul")
                raise error
            return tuple(one * 2 for one in inputs) if part is parts.pieces[0].program else ()

        return run

    parts = partition(program)
    assert isinstance(parts, Partition)
    backend = InductorBackend(InductorOptions(), torch.device("cuda", 0))
    graphed = GraphRunner(program, parts, lower, Pool(torch.device("cpu")), refused={})
    assert backend.execution_mode(graphed) == ExecutionMode("inductor, one CUDA graph", is_one_launch=True)
    with caplog.at_level(logging.WARNING):
        found = [graphed([torch.ones(3)])[0] for _ in range(5)]
    assert all(torch.equal(one, torch.full((3,), 2.0)) for one in found)
    assert len([stream for stream in calls if stream != "users"]) == 1
    assert backend.execution_mode(graphed) == ExecutionMode(
        "inductor, no CUDA graph: its capture failed: illegal, while running mul", is_one_launch=False
    )
    own = [record for record in caplog.records if record.name == "wholestep"]
    assert [record.getMessage() for record in own] == [
        "the step runs without a CUDA graph, since its capture failed: illegal, while running mul"
    ]


# ---- steps of several pieces, on the CPU: a graph is a function of the memory that was there when it was captured ----


class Replays(Pool):
    """A pool whose graphs run on the CPU. What they leave is nan until they have run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls: list[str] = []
        """What ran, in order."""
        self._captured_calls: list[tuple[Callable[..., Any], list[Any], Any]] | None = None

    def lower(self, part: Program) -> Callable[[list[Any]], tuple[Any, ...]]:
        run = eager_backend.lower(part)

        def step(inputs: list[Any]) -> tuple[Any, ...]:
            if self._captured_calls is None:
                self.calls.append("run")
                return run(inputs)
            before = [one.clone() for one in inputs]
            outputs = run(list(inputs))
            for one, value in zip(inputs, before, strict=True):
                one.copy_(value)
            kept = {one.untyped_storage().data_ptr() for one in inputs}
            for one in outputs:
                if one.untyped_storage().data_ptr() not in kept:
                    one.fill_(math.nan)
            self._captured_calls.append((run, inputs, outputs))
            return outputs

        return step

    def capture(self, body: Callable[[], Any], rewound: Any = None) -> tuple[Any, Any]:
        self._captured_calls, pool = [], self
        self.calls.append("capture")
        CAPTURING.append(True)
        try:
            results = body()
            ((run, inputs, outputs),) = self._captured_calls
        finally:
            del CAPTURING[:]
            self._captured_calls = None

        class Graph:
            def replay(self) -> None:
                pool.calls.append("replay")
                for old, new in zip(outputs, run(list(inputs)), strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.untyped_storage().copy_(new.untyped_storage())

            def reset(self) -> None:
                pool.calls.append("reset")

        return Graph(), results


CAPTURING: list[bool] = []
"""Holds something while a pool captures."""


@torch.library.custom_op("wholestep_unit_tests::waits", mutates_args=())
def waits(x: Tensor) -> Tensor:
    """What looks at a number inside does while CUDA captures."""
    if CAPTURING:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
    return x * 2


@waits.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("wholestep_unit_tests::breaks", mutates_args=())
def breaks(x: Tensor) -> Tensor:
    """Has no memory for a capture."""
    if CAPTURING:
        raise torch.OutOfMemoryError("no memory, with so much of it in private pools that captures have")
    return x * 2


@breaks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def layers(x: Tensor) -> Tensor:
    for scale in (0.5, 0.25, 2.0, 1.0):
        x = (x @ x) * scale
    return x


def number_between(x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    return layers(y * y.sum().item()), y


def two_numbers(x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    z = layers(y + y.sum().item())
    return layers(z * z.amax().item()), z.amin().item(), y


def sizes(x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    return layers(y + aten.nonzero.default(y.relu()).sum()), y


def trains(w: Tensor, g: Tensor, x: Tensor, rate: Tensor) -> tuple[Any, ...]:
    g.add_(layers(w * x))
    norm = g.norm().item()
    w.sub_(layers(g) * (rate.item() / (1 + norm)))
    x.mul_(2)
    return layers(w), norm, w.sum()


def views(x: Tensor) -> tuple[Any, ...]:
    """What is computed outside of a graph is read in two ways behind it."""
    y = layers(x)
    z = y * y.sum().item()
    flat = z.view(-1)
    u = layers(z)
    return u.add(flat.sum()), flat, layers(u + z.t())


def updates_twice(w: Tensor, x: Tensor) -> tuple[Any, ...]:
    """A parameter is written outside of a graph, and behind that within one."""
    y = layers(w * x)
    w.add_(y.sum().item())
    w.mul_(layers(x))
    return y, w.sum()


PARAM, GRAD = InputKind.PARAM, InputKind.GRAD
STEPS: dict[str, tuple[Callable[..., Any], list[Spec], int]] = {
    "one graph": (layers, [gpu(3, 3)], 1),
    "a number in the middle": (number_between, [gpu(3, 3)], 2),
    "two numbers": (two_numbers, [gpu(3, 3)], 3),
    "a size that is data": (sizes, [gpu(3, 3)], 2),
    "a parameter written twice": (updates_twice, [gpu(3, 3, kind=PARAM), gpu(3, 3)], 2),
    "views across pieces": (views, [gpu(3, 3)], 2),
    "a training step": (trains, [gpu(3, 3, kind=PARAM), gpu(3, 3, kind=GRAD), gpu(3, 3), host()], 3),
}  # fmt: skip


def tensors_for(specs: list[Spec], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, dtype=dtype, generator=generator) for shape, dtype, _, _ in specs]


def same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether tensors, numbers and what is None because it was written in place are the same bits."""
    return all(
        torch.equal(one, other) if isinstance(one, Tensor) else one == other
        for one, other in zip(found, wanted, strict=True)
    )


def graphed_of(program: Program, pool: Replays, refused: dict[Any, str] | None = None) -> GraphRunner:
    parts = partition(program, refused := {} if refused is None else refused)
    assert isinstance(parts, Partition), parts
    return GraphRunner(program, parts, pool.lower, pool, refused=refused)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("moves", [(), (3,), (3, 4, 5, 6, 7, 8)])
def test_pieces_give_what_the_program_gives(name: str, moves: tuple[int, ...]) -> None:
    """In every call; also where parameters and gradients have moved before some of them."""
    fn, specs, num_graphs = STEPS[name]
    program, pool = scheduled(fn, *specs, writes=True, segments=False), Replays()
    graphed = graphed_of(program, pool)
    plain = eager_backend.lower(program)
    ours, theirs = tensors_for(specs, 0), tensors_for(specs, 0)
    kept = []
    for call in range(10):
        fresh = tensors_for(specs, 100 + call)
        for place, (_, _, _, kind) in enumerate(specs):
            if kind not in (PARAM, GRAD):
                ours[place], theirs[place] = fresh[place].clone(), fresh[place].clone()
            elif call in moves:
                ours[place] = ours[place].clone()
        del pool.calls[:]
        with torch.no_grad():
            found, wanted = graphed(list(ours)), plain(list(theirs))
        found = found[: len(wanted)]  # behind them are those that were written in place
        assert same([*found, *ours], [*wanted, *theirs]), call
        kept.append((found, wanted))
        assert pool.calls.count("replay") == (num_graphs if call >= WARM_UP_CALLS else 0)
        assert pool.calls.count("capture") == num_graphs or call != WARM_UP_CALLS
    assert pool.calls.count("capture") == 0  # in the last call, by which all is settled
    assert not graphed.why_none
    assert all(same(*pair) for pair in kept)  # results are the caller's own


def counts(name: str, moves: Callable[[int], set[int]]) -> list[int]:
    """How many captures there were in each of ten calls, where the tensors at some places have moved before."""
    fn, specs, _ = STEPS[name]
    pool = Replays()
    graphed = graphed_of(scheduled(fn, *specs, writes=True, segments=False), pool)
    tensors, found, alive = tensors_for(specs, 0), [], []
    for call in range(10):
        alive.append(tensors)
        tensors = [one.clone() if place in moves(call) else one for place, one in enumerate(tensors)]
        del pool.calls[:]
        with torch.no_grad():
            graphed(list(tensors))
        found.append(pool.calls.count("capture"))
    assert not graphed.why_none
    return found


MOVES: dict[str, tuple[Callable[[int], set[int]], list[int]]] = {
    "arguments, which are copied": (lambda call: {2, 3}, [0, 0, 3, 0, 0, 0, 0, 0, 0, 0]),
    "a parameter": (lambda call: {0} if call in (4, 5, 6, 7) else set(), [0, 0, 3, 0, 3, 3, 3, 3, 0, 0]),
    "gradients, copied after a while": (lambda call: {1}, [0, 0, 3, 3, 3, 3, 0, 0, 0, 0]),
    "gradients, now and then": (lambda call: {1} if call in (5, 7) else set(), [0, 0, 3, 0, 0, 3, 0, 3, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_what_has_moved_is_captured_again(name: str) -> None:
    moves, wanted = MOVES[name]
    assert counts("a training step", moves) == wanted


def test_a_step_whose_values_wander_runs_as_it_is() -> None:
    """Two values with the memory of one, which a piece without a graph allocates in every call: none is copied."""

    def step(x: Tensor) -> tuple[Any, ...]:
        y = layers(x)
        number = y.sum().item()
        z = x * number
        flat = z.view(-1)
        return flat, flat * number, layers(z), layers(flat.outer(flat))

    pool, specs = Replays(), [gpu(3, 3)]
    program = scheduled(step, *specs, segments=False)
    graphed = graphed_of(program, pool)
    (x,), alive = tensors_for(specs, 0), []
    for _ in range(8):
        alive.append(graphed([x]))
        assert same(alive[-1], alive[0])
    assert graphed.why_none == "its capture failed: what is computed outside of a graph lies elsewhere in every call"
    assert pool.calls[-3:] == ["run", "run", "run"]
    assert all(piece.graph is None for piece in graphed._pieces)


def test_a_call_that_turns_out_to_wait_cuts_the_step() -> None:
    def step(w: Tensor, x: Tensor) -> tuple[Any, ...]:
        y = layers(w * x)
        w.sub_(layers(torch.ops.wholestep_unit_tests.waits(y)))
        return y, layers(torch.ops.wholestep_unit_tests.waits(w))

    pool, specs = Replays(), [gpu(3, 3, kind=PARAM), gpu(3, 3)]
    program = scheduled(step, *specs, writes=True, segments=False)
    graphed = graphed_of(program, pool)
    plain = eager_backend.lower(program)
    (w, x), kept = tensors_for(specs, 0), []
    theirs = w.clone()
    for call in range(8):
        del pool.calls[:]
        found, wanted = graphed([w, x]), plain([theirs, x])
        assert same([*found[:2], w], [*wanted[:2], theirs])
        kept.append((found[:2], wanted[:2]))
        # It is captured in vain once, runs as it is in that call and two others, and in pieces from then on.
        assert pool.calls.count("replay") == (3 if call >= 2 * WARM_UP_CALLS + 1 else 0)
    assert all(same(*pair) for pair in kept)
    assert graphed.description == (
        "3 CUDA graphs, cut where wholestep_unit_tests.waits.default of train.py:7 could not be captured: "
        "operation not permitted when stream is capturing, and 1 more"
    )


def test_what_cuts_one_program_cuts_all() -> None:
    """Another one need not find out by itself, unless it was begun before. Each says how it runs."""

    def step(x: Tensor) -> Tensor:
        return layers(torch.ops.wholestep_unit_tests.waits(layers(x)))

    def other(x: Tensor) -> Tensor:
        return layers(x)

    pool, specs, refused = Replays(), [gpu(3, 3)], dict[Any, str]()
    backend = InductorBackend(InductorOptions(), torch.device("cuda", 0))

    def made(fn: Callable[..., Any]) -> GraphRunner:
        return graphed_of(scheduled(fn, *specs, segments=False), pool, refused)

    first, early, whole = made(step), made(step), made(other)
    (x,) = tensors_for(specs, 0)
    for _ in range(WARM_UP_CALLS + 1):
        first([x])
    cut = first.description
    assert cut.startswith("2 CUDA graphs, cut where wholestep_unit_tests.waits.default")
    assert (early.description, whole.description) == ("one CUDA graph",) * 2
    late = made(step)
    assert late.description == cut
    assert len(late._pieces) == 3
    for _ in range(WARM_UP_CALLS + 1):
        early([x])
        late([x])
    assert [backend.execution_mode(one).description for one in (early, late)] == [f"inductor, {cut}"] * 2
    assert backend.execution_mode(whole).description == "inductor, one CUDA graph"


def test_a_capture_that_fails_for_another_reason_cuts_nothing() -> None:
    def step(x: Tensor) -> Tensor:
        return layers(torch.ops.wholestep_unit_tests.breaks(layers(x)))

    pool, specs = Replays(), [gpu(3, 3)]
    graphed = graphed_of(scheduled(step, *specs, segments=False), pool)
    (x,) = tensors_for(specs, 0)
    found = [graphed([x]) for _ in range(6)]
    assert all(same(one, found[0]) for one in found)
    assert graphed.why_none.startswith(
        "its capture failed: no memory, with so much of it in private pools that captures have, while running breaks"
    )
    assert pool.calls.count("capture") == 1


def test_all_behind_a_piece_that_is_captured_again_are_captured_again() -> None:
    """It may leave what it computes elsewhere, where a later one has had its own memory until then."""

    def step(w: Tensor, x: Tensor) -> tuple[Any, ...]:
        y = layers(w * x)
        return layers(x * y.sum().item()), y

    pool, specs = Replays(), [gpu(3, 3, kind=PARAM), gpu(3, 3)]
    program = scheduled(step, *specs, segments=False)
    graphed = graphed_of(program, pool)
    assert [len(piece._piece.inputs) for piece in graphed._pieces] == [2, 2, 1]
    w, x = tensors_for(specs, 0)
    for _ in range(4):
        graphed([w, x])
    assert [len(piece._static) for piece in graphed._pieces] == [1, 0, 1]  # the argument; what is computed in between
    del pool.calls[:]
    graphed([w.clone(), x])
    assert pool.calls == ["run", "capture", "reset", "replay", "run", "capture", "replay"]


def leaves(fn: Callable[..., Any], pool: Replays, *, num_params: int = 2, **more: Any) -> GraphRunner:
    """A step that gives its first inputs, parameters, the first results of `fn` as gradients."""
    specs = [*[gpu(3, 3, kind=PARAM)] * num_params, gpu(3, 3)]
    program = scheduled(fn, *specs, segments=False)
    outputs = [Output(kind=OutputKind.GRAD, name=f"x{number}", target=number) for number in range(num_params)]
    program = replace(program, outputs=(*outputs, *program.outputs[num_params:]), **more)
    return graphed_of(program, pool)


def two_grads(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    y = layers(v @ x)
    return y, layers(w @ y), y.sum()


def trained(graphed: GraphRunner, params: list[nn.Parameter], x: Tensor) -> tuple[Any, ...]:
    """A call, behind which parameters have their new gradients; the other results."""
    grads = graphed([*params, x])
    for param, grad in zip(params, grads, strict=False):
        param.grad = grad
    return grads[len(params) :]


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(one) for one in tensors_for([gpu(3, 3)] * count, 1)]


def test_gradients_that_nobody_holds_stay_in_the_memory_of_the_graph() -> None:
    pool, params = Replays(), parameters()
    graphed, places = leaves(two_grads, pool), list[list[int]]()
    for call in range(8):
        if call == 7:  # captured again, and the new graph leaves them elsewhere
            params[0].data = params[0].data.clone()
        x = tensors_for([gpu(3, 3)], 10 + call)[0]
        with torch.no_grad():
            others = trained(graphed, params, x)
            wanted = two_grads(*params, x)
        assert same([*(param.grad for param in params), *others], wanted)
        places.append([param.grad.data_ptr() for param in params])
        if call == 5:
            params[0].grad = None
        if call == 6:
            params[1].grad.add_(1)
    assert all(one == places[WARM_UP_CALLS] for one in places[WARM_UP_CALLS:7])
    assert pool.calls.count("capture") == 2


def test_gradients_that_somebody_holds_keep_their_values() -> None:
    """The graph is given up once, and gradients are copied from then on."""
    pool, params = Replays(), parameters()
    graphed, held, wanted = leaves(two_grads, pool), list[Any](), list[Any]()
    for call in range(9):
        x = tensors_for([gpu(3, 3)], 10 + call)[0]
        with torch.no_grad():
            trained(graphed, params, x)
            wanted.append(two_grads(*params, x)[:2])
        if call in (4, 6):
            held.append((wanted[-1], [params[0].grad, params[1].grad[1:]]))
        assert same([param.grad for param in params], wanted[-1])
        assert pool.calls.count("capture") == (0 if call < 2 else 1 if call < 5 else 2)
    for (first, second), (one, other) in held:
        assert same([one, other], [first, second[1:]])


def test_gradients_of_one_signature_stay_in_the_pool() -> None:
    """Graphs from before use the memory that they have, so these are captured again; those from behind leave it alone,
    and copy their own."""
    pool, params = Replays(), parameters()
    before, lends, behind = (leaves(two_grads, pool) for _ in range(3))
    (x,) = tensors_for([gpu(3, 3)], 10)
    with torch.no_grad():
        before([*params, x]), before([*params, x])
        before._may_keep_grads = False  # as one that leaves no gradients
        before([*params, x])
        for _ in range(3):
            trained(lends, params, x)
        places = [param.grad.data_ptr() for param in params]
        assert all(piece.graph is None for piece in before._pieces)
        del pool.calls[:]
        for _ in range(4):
            trained(behind, params, x)
            assert [param.grad.data_ptr() for param in params] != places
        assert behind._kept_grads is None
        before([*params, x])
        assert pool.calls.count("capture") == 2
        trained(lends, params, x)
        assert [param.grad.data_ptr() for param in params] == places
        assert pool.calls.count("capture") == 2


def test_a_signature_whose_gradients_cannot_stay_leaves_the_pool_to_others() -> None:
    """Neither are their graphs given up for it, nor may they not leave gradients."""
    pool, params = Replays(), parameters()
    (x,) = tensors_for([gpu(3, 3)], 10)
    before, copies, lends = leaves(grad_twice, pool), leaves(grad_twice, pool), leaves(two_grads, pool)
    with torch.no_grad():
        for _ in range(4):
            trained(before, params, x)
        graphs = [piece.graph for piece in before._pieces]
        for _ in range(4):
            trained(copies, params, x)
        assert [piece.graph for piece in before._pieces] == graphs
        for _ in range(4):
            trained(lends, params, x)
    assert lends._kept_grads is not None
    assert sorted(lends._kept_grads.fresh()) == [0, 1]


def grad_twice(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    return y, y, y.sum()


def grad_of_argument(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    return x.view(3, 3), layers(x), x.sum()


def grad_expanded(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    return layers(x).sum().expand(3, 3), layers(x), x.sum()


def grad_returned(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    return y, layers(y), y.select(0, 0), x.sum()


@pytest.mark.parametrize(
    ("fn", "stays"), [(grad_twice, []), (grad_of_argument, [1]), (grad_expanded, [1]), (grad_returned, [1])]
)
def test_gradients_with_memory_of_something_else_are_copied(fn: Callable[..., Any], stays: list[int]) -> None:
    pool, params = Replays(), parameters()
    graphed = leaves(fn, pool)
    for call in range(6):
        x = tensors_for([gpu(3, 3)], 10 + call)[0]
        with torch.no_grad():
            trained(graphed, params, x)
            assert same([param.grad for param in params], fn(*params, x)[:2])
            assert params[0].grad.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or call < WARM_UP_CALLS
            params[0].grad = params[0].grad.clone().add_(1)
            assert same([params[1].grad], fn(*params, x)[1:2])
    assert graphed._kept_grads is not None
    assert sorted(graphed._kept_grads.fresh()) == stays


def test_results_share_what_they_share_without_a_graph() -> None:
    """With each other, with gradients and with inputs; and with nothing of the next call."""

    def step(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
        y = layers(x)
        return y, layers(y), y, y.select(0, 1), v.t(), x, x.select(0, 0), w

    pool, params = Replays(), parameters()
    graphed, kept, wanted = leaves(step, pool), list[Any](), list[Any]()
    for call in range(6):
        (x,) = tensors_for([gpu(3, 3)], 10 + call)
        with torch.no_grad():
            results = trained(graphed, params, x)
            assert same([param.grad for param in params], step(*params, x)[:2])
            assert same(results, step(*params, x)[2:])
            grad, row, turned, given, first, weight = results
            assert grad is params[0].grad
            assert given is x
            assert weight is params[1]
            grad[1], x[0], params[0].data[2] = 5.0, 6.0, float(call)
            assert row.tolist() == [5] * 3
            assert first.tolist() == [6] * 3
            assert turned[:, 2].tolist() == [call] * 3
            kept += [grad, row]
            wanted += [grad.clone(), row.clone()]
    assert pool.calls.count("capture") == 1
    assert same(kept, wanted)


def test_gradients_of_a_step_that_reads_them_are_copied() -> None:
    def step(w: Tensor, grad: Tensor, x: Tensor) -> tuple[Any, ...]:
        return grad @ layers(w @ x), x.sum()

    pool, specs = Replays(), [gpu(3, 3, kind=PARAM), gpu(3, 3, kind=GRAD), gpu(3, 3)]
    program = scheduled(step, *specs, segments=False)
    grad = Output(kind=OutputKind.GRAD, name="x0", target=0)
    graphed = graphed_of(replace(program, outputs=(grad, *program.outputs[1:])), pool)
    (param,), x = parameters(1), tensors_for([gpu(3, 3)], 3)[0]
    param.grad = torch.eye(3)
    with torch.no_grad():
        for _ in range(9):
            wanted = step(param, param.grad, x)[:1]
            param.grad = graphed([param, param.grad, x])[0]
            assert same([param.grad], wanted)
    assert graphed._kept_grads is not None
    assert not graphed._kept_grads.fresh()


def test_gradients_from_before_give_their_memory_to_those_that_replace_them() -> None:
    """They are gone before results are copied, and stay where a call is no replay, which may fail."""
    pool, params = Replays(), parameters()
    graphed, (x,) = leaves(two_grads, pool), tensors_for([gpu(3, 3)], 3)
    for call in range(5):
        for param in params:
            param.grad = torch.ones(3, 3)
        with torch.no_grad():
            graphed([*params, x])
        assert [param.grad is None for param in params] == [call >= WARM_UP_CALLS] * 2


def test_graphs_are_given_up_with_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized = list[Any]()
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    fn, specs, _ = STEPS["a number in the middle"]
    pool = Replays()
    program = replace(scheduled(fn, *specs, segments=False), mesh=(MeshAxis(name="data", size=2, group="its group"),))
    graphed = graphed_of(program, pool)
    inputs = tensors_for(specs, 0)
    graphed.release_group("its group")
    assert not synchronized
    for _ in range(3):
        graphed(list(inputs))
    graphed.release_group("another")
    assert "reset" not in pool.calls
    graphed.release_group("its group")
    assert synchronized == [torch.device("cpu")]
    assert pool.calls[-2:] == ["reset", "reset"]
    del pool.calls[:]
    graphed(list(inputs))
    assert pool.calls.count("capture") == 2
