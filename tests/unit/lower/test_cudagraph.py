"""A step in two parts, the host's and the device's, and why some cannot be captured. On fake tensors of a GPU."""

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
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.unit import builders
from tests.unit.builders import aten
from wholestep.capture.random import GET, SET
from wholestep.config import Inductor as InductorOptions
from wholestep.lower import eager, inductor, memsets
from wholestep.lower.backend import Inductor
from wholestep.lower.cudagraph import Graphed, Parts, Pool, _cause, split
from wholestep.passes.cleanup import cleanup
from wholestep.passes.pipeline import run_passes
from wholestep.passes.reinplace import reinplace
from wholestep.passes.scalars import pack_scalars
from wholestep.passes.segments import form_segments
from wholestep.program import edit, meta
from wholestep.program.numbers import element, pack
from wholestep.program.program import Input, InputKind, Output, OutputKind, Program, Stage
from wholestep.program.segment import Segment

Spec = tuple[tuple[int, ...], torch.dtype, str, InputKind]
"""Shape, dtype, device and kind of an input."""


def gpu(*shape: int, kind: InputKind = InputKind.USER, dtype: torch.dtype = torch.float32) -> Spec:
    return shape, dtype, "cuda", kind


def host(*shape: int, kind: InputKind = InputKind.HYPER, dtype: torch.dtype = torch.float64) -> Spec:
    return shape, dtype, "cpu", kind


def captured(fn: Callable[..., Any], specs: Sequence[Spec], *, writes: bool = False) -> Program:
    """As `builders.capture` does it, on fake tensors of the devices of `specs`; where `writes`, inputs are written to.

    Without: what makes a function functional asks a build of torch without CUDA for more than it has.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        fakes = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device, _ in specs]

        def flat(*args: Tensor) -> tuple[Any, ...]:
            out = fn(*args)
            return out if isinstance(out, tuple) else (out,)

        functional = torch.func.functionalize(flat, remove="mutations") if writes else flat
        module = make_fx(functional, tracing_mode="real")(*fakes)
    inputs = tuple(
        Input(kind=kind, name=f"x{index}", shape=shape, dtype=dtype)
        for index, (shape, dtype, _, kind) in enumerate(specs)
    )
    for node in module.graph.nodes:
        meta.set_origin(node, meta.Origin(meta.Region.FORWARD, "", "train.py:7"))
    return builders._with_outputs(module, inputs)


def scheduled(fn: Callable[..., Any], *specs: Spec, writes: bool = False) -> Program:
    passes = [
        cleanup, partial(pack_scalars, reads=inductor.reads_packed),
        partial(form_segments, compiles=inductor.compiles), reinplace,
    ]  # fmt: skip
    program = run_passes(builders.without_gradients(captured(fn, specs, writes=writes)), passes)
    assert program.stage is Stage.SCHEDULED
    return program


def parts_of(fn: Callable[..., Any], *specs: Spec) -> Parts:
    parts = split(scheduled(fn, *specs))
    assert isinstance(parts, Parts), parts
    return parts


def reason_of(fn: Callable[..., Any], *specs: Spec) -> str:
    reason = split(scheduled(fn, *specs))
    assert isinstance(reason, str)
    return reason


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def devices(node: fx.Node) -> set[str]:
    return {one.device.type for one in meta.tensors(node)}


def update(w: Tensor, g: Tensor, step: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
    """What an optimizer does: a counter on the host, a number made of it, a parameter on the device."""
    step.add_(1)
    number = rate.item() / (1 - 0.9 ** step.item())
    w.add_(g * number)
    return w.sum(), step * 2


UPDATE = (gpu(3, kind=InputKind.PARAM), gpu(3), host(kind=InputKind.OPTIMIZER, dtype=torch.float32), host())


def test_numbers_are_the_hosts_and_all_else_is_the_body():
    program = scheduled(update, *UPDATE, writes=True)
    parts = split(program)
    assert isinstance(parts, Parts)
    host_calls, body_calls = targets(parts.host), targets(parts.body)
    assert pack in host_calls
    assert pack not in body_calls
    assert not any(isinstance(one, Segment) for one in host_calls)
    assert any(isinstance(one, Segment) for one in body_calls)
    kept = (Segment, type(None))
    assert all(isinstance(one, kept) or one in (element, *body_calls) for one in body_calls)
    # The body reads and makes tensors of the device alone; the host reads none of them.
    for node in parts.body.graph.nodes:
        assert devices(node) <= {"cuda"}
    for node in parts.host.graph.nodes:
        if node.op == "call_function" and node.target is not pack:
            assert devices(node) <= {"cpu"}
    assert len(host_calls) + len(body_calls) == len(targets(program))


def test_inputs_and_results_go_where_they_belong():
    program = scheduled(update, *UPDATE, writes=True)
    parts = split(program)
    assert isinstance(parts, Parts)
    # Inputs on the device, then the packed numbers.
    assert parts.inputs == (0, 1)
    assert parts.num_handed == 1
    assert [record.name for record in parts.body.inputs] == ["x0", "x1", "packed"]
    assert [record.kind for record in parts.body.inputs][:2] == [InputKind.PARAM, InputKind.USER]
    assert parts.host.inputs == program.inputs
    # USER w.sum(): the first of the body's; USER step * 2: behind the packed numbers of the host's.
    assert parts.places[:2] == ((True, 0), (False, 1))
    assert len(parts.places) == len(program.outputs)
    assert len(parts.host.results) + len(parts.body.results) == len(program.outputs) + parts.num_handed


def test_the_host_part_computes_the_numbers_of_each_call():
    """It runs on the CPU as it is, once what it packs stays there."""
    parts = split(scheduled(update, *UPDATE, writes=True))
    assert isinstance(parts, Parts)
    (node,) = parts.host.graph.find_nodes(op="call_function", target=pack)
    node.args = (node.args[0], torch.device("cpu"))
    run, step = eager.lower(parts.host), torch.tensor(0.0)
    for call in (1, 2, 3):
        with torch.no_grad():
            packed, doubled = run([None, None, step, torch.tensor(0.1 * call, dtype=torch.float64)])[:2]
        assert packed.tolist() == [(0.1 * call) / (1 - 0.9**call)] or math.isclose(
            packed.item(), 0.1 * call / (1 - 0.9**call), rel_tol=1e-15
        )
        assert doubled.item() == 2 * call
        assert step.item() == call  # the counter is written by the host


def test_a_step_without_numbers_has_nothing_on_the_host():
    parts = parts_of(lambda w, x: (w @ x).exp(), gpu(3, 3), gpu(3, 3))
    assert targets(parts.host) == []
    assert parts.num_handed == 0
    assert parts.places == ((True, 0),)


def test_constants_among_the_results():
    parts = parts_of(lambda x: (3, x.exp() * 2, None), gpu(3))
    assert parts.places == ((True, 0), (True, 1), (True, 2))
    assert parts.body.results[0] == 3


def test_a_tensor_of_the_host_may_travel_to_the_device():
    """What the host makes and gives to the device is copied to it before every replay."""
    parts = parts_of(
        lambda x, count: x * aten._to_copy.default(count + 1, device=torch.device("cuda")),
        gpu(3),
        host(kind=InputKind.TENSOR),
    )
    assert parts.num_handed == 1
    assert aten._to_copy.default in targets(parts.host)
    assert aten._to_copy.default not in targets(parts.body)


def test_tensors_made_on_the_cpu_are_the_hosts():
    parts = parts_of(
        lambda x: x * aten._to_copy.default(torch.full((), 2.0).add(1), device=torch.device("cuda")), gpu(3)
    )
    assert aten.full.default in targets(parts.host)
    assert parts.num_handed == 1


def test_tensors_made_on_the_device_are_the_bodys():
    parts = parts_of(lambda x: x * torch.full((3,), 2.0, device="cuda"), gpu(3))
    assert targets(parts.host) == []


def test_random_numbers_of_the_device_are_captured():
    parts = parts_of(lambda x: torch.nn.functional.dropout(x, 0.5, True) * 2, gpu(3))
    assert targets(parts.host) == []


def test_numbers_that_the_host_draws_and_nobody_reads():
    """As models do that ask in every layer whether to skip it: drawn before every replay, in their order."""

    def skipping(x: Tensor) -> Tensor:
        for _ in range(2):
            torch.rand([])
            x = torch.nn.functional.dropout(x * 2, 0.5, True)
        torch.rand(2)
        return x

    parts = parts_of(skipping, gpu(3))
    assert targets(parts.host) == [aten.rand.default] * 3
    assert [node.args[0] for node in parts.host.graph.nodes if node.op == "call_function"] == [[], [], [2]]
    assert aten.rand.default not in targets(parts.body)
    assert parts.num_handed == 0
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        eager.lower(parts.host)([None])
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        torch.rand([]), torch.rand([]), torch.rand(2)
        assert torch.equal(torch.get_rng_state(), after)


REFUSED: dict[str, tuple[Callable[..., Any], list[Spec], str]] = {
    "a size that is data": (
        lambda x: aten.nonzero.default(x), [gpu(3)],
        "the size of what aten.nonzero.default of train.py:7 gives depends on data",
    ),
    "a tensor of the device on the CPU": (
        lambda x: aten._to_copy.default(x.exp(), device=torch.device("cpu")) + 1, [gpu(3)],
        "aten._to_copy.default of train.py:7 gives a tensor on the CPU that depends on the GPU",
    ),
    "a number that depends on the device": (
        lambda x: x * x.sum().item(), [gpu(3)],
        "aten._local_scalar_dense.default of train.py:7 gives a number of the GPU, for which the host would wait",
    ),
    "a number of the host that a call takes as it is": (
        lambda x, rate: torch.nn.functional.elu(x, rate.item()), [gpu(3), host()],
        "aten.elu.default of train.py:7 takes _local_scalar_dense, which the host computes for every call",
    ),
    "a tensor of the host that a call takes as it is": (
        lambda x, rate: torch.atan2(x, rate), [gpu(3), host(dtype=torch.float32)],
        "aten.atan2.default of train.py:7 takes arg1_1, which the host computes for every call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_reason_names_the_call_and_the_users_line(name):
    fn, specs, reason = REFUSED[name]
    assert reason_of(fn, *specs) == reason


def test_a_number_packed_for_a_call_that_is_in_no_segment():
    """It is read as it is, which waits for the device."""
    program = builders.without_gradients(captured(lambda x, rate: x * rate.item(), [gpu(3), host()]))
    passes = [partial(pack_scalars, reads=inductor.reads_packed), reinplace]
    assert split(run_passes(program, passes)) == (
        "element of train.py:7 gives a number of the GPU, for which the host would wait"
    )
    assert isinstance(split(scheduled(lambda x, rate: x * rate.item(), gpu(3), host())), Parts)


def with_generator(target: Any, *args: Any) -> Program:
    """A step that draws on the device, and a call that reads or sets a generator behind that."""
    program = scheduled(
        lambda x, state: torch.rand_like(x) * 2, gpu(3), host(16, kind=InputKind.RNG, dtype=torch.uint8)
    )
    with program.graph.inserting_before(program.graph.output_node()):
        given = [program.placeholders[1]] if target is SET else []
        node = edit.emit(program.graph, target, *given, *args)
        if target is GET:
            edit.emit(program.graph, aten.bernoulli.default, edit.emit(program.graph, aten.clone.default, node))
    meta.set_origin(node, meta.Origin(meta.Region.FORWARD, "", "train.py:9"))
    return program


@pytest.mark.parametrize("target", [GET, SET])
def test_the_generator_of_the_device_is_not_touched_in_a_graph(target):
    """Where somebody else looks at a state, or one is set that was there before the step. Others: `test_rewinds`."""
    reason = split(with_generator(target, "cuda:0"))
    assert reason == f"{target} of train.py:9 reads or sets the state of a random generator on the host"


def test_the_generator_of_the_host_is_the_hosts():
    parts = split(with_generator(SET, "cpu"))
    assert isinstance(parts, Parts)
    assert targets(parts.host) == [SET]


def ended(*outputs: Output, kind: InputKind = InputKind.PARAM, freed: bool = False) -> str | Parts:
    program = scheduled(lambda w: (w * 2).exp(), gpu(3, kind=kind))
    inputs = (replace(program.inputs[0], freed=freed),)
    return split(replace(program, outputs=outputs or program.outputs, inputs=inputs))


def test_what_the_step_does_to_things_outside_is_a_reason_too():
    state = Output(kind=OutputKind.STATE, name="opt.exp_avg.w")
    assert ended(state) == "the step creates the state opt.exp_avg.w; the calls behind it can be captured"
    write = Output(kind=OutputKind.WRITE, name="x0", target=0)
    assert ended(write, kind=InputKind.GRAD) == "the step writes to the gradient x0 that was there before it"
    assert isinstance(ended(write), Parts)
    assert ended(freed=True) == "the step frees the memory of its inputs or fills it"


def test_the_program_that_went_in_is_not_touched():
    program = scheduled(update, *UPDATE, writes=True)
    before = [node.format_node() for node in program.graph.nodes]
    split(program)
    assert [node.format_node() for node in program.graph.nodes] == before


class FakeCuda:
    """What a capture asks of torch.cuda, written down in `log`. A stream that captures is left current by an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.stream = "users"
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

    def make_Stream(self) -> str:
        return f"stream {next(self.numbers)}"

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
    assert cuda.log == ["capture into pool 1, thread_local"] * 2
    gone = str(graph)
    del graph
    assert gone not in cuda.alive
    assert len(cuda.alive) == 1
    pool.capture(lambda: ())
    assert set(cuda.log) == {"capture into pool 1, thread_local"}


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
    begun, ended, reset, *rest = cuda.log
    assert begun == "capture into pool 1, thread_local"
    assert ended.removeprefix("end of ") == reset.removeprefix("reset of ")
    # A capture that goes well, in another pool, is what frees the random generator.
    assert rest[:2] == ["_cuda_endAllocateToPool (3, 'pool 1')", "_cuda_releasePool (3, 'pool 1')"]
    assert rest[2].startswith("capture into pool ")
    assert rest[2] != begun
    pool.capture(lambda: ())
    assert cuda.log[-1] == rest[2]


def test_torch_is_mended_where_a_graph_cannot_be_made_ready(cuda: FakeCuda) -> None:
    pool = Pool(torch.device("cpu"))
    pool.capture(lambda: ())
    del cuda.log[:]
    cuda.full = True
    with pytest.raises(RuntimeError, match="out of memory"):
        pool.capture(lambda: ())
    assert cuda.stream == "users"
    assert [line.split()[0] for line in cuda.log] == ["capture"]  # that went well, so there is nothing to mend
    cuda.full = False
    assert pool.capture(lambda: ("result",))[1] == ("result",)


def test_torch_is_mended_where_fills_cannot_be_captured(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for memsets is captured behind the step, which keeps its graph."""

    def as_kernels(graph: Any, capture: Callable[[Callable[[], object]], Any], device: torch.device) -> int:
        with pytest.raises(RuntimeError, match="previous error"):
            capture(lambda: [][0])
        return 0

    pool = Pool(torch.device("cpu"))
    monkeypatch.setattr(memsets, "as_kernels", as_kernels)
    graph, results = pool.capture(lambda: ("result",))
    assert results == ("result",)
    assert str(graph) in cuda.alive
    assert cuda.stream == "users"
    assert f"reset of {graph}" not in cuda.log
    assert [line.split()[0] for line in cuda.log if "pool" not in line] == ["end", "reset"]


def test_a_step_whose_capture_fails_runs_as_it_is(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    def step(x: Tensor) -> Tensor:
        return x * 2

    program = scheduled(step, gpu(3))
    backend = Inductor(InductorOptions(), torch.device("cuda", 0))
    calls = []

    def lower(part: Program) -> Callable[[list[Any]], tuple[Any, ...]]:
        def run(inputs: list[Any]) -> tuple[Any, ...]:
            calls.append(cuda.stream)
            if cuda.stream != "users":
                error = RuntimeError("illegal")
                error.add_note("while running mul")
                raise error
            return tuple(one * 2 for one in inputs) if part is parts.body else ()

        return run

    parts = split(program)
    assert isinstance(parts, Parts)
    graphed = Graphed(program, parts, lower, Pool(torch.device("cpu")), backend._has_failed)
    assert backend.name == "inductor, one CUDA graph"
    with caplog.at_level(logging.WARNING):
        found = [graphed([torch.ones(3)])[0] for _ in range(5)]
    assert all(torch.equal(one, torch.full((3,), 2.0)) for one in found)
    assert len([stream for stream in calls if stream != "users"]) == 1
    assert backend.name == "inductor, no CUDA graph: its capture failed: illegal, while running mul"
    own = [record for record in caplog.records if record.name == "wholestep"]
    assert [record.getMessage() for record in own] == [
        "the step runs without a CUDA graph, since its capture failed: illegal, while running mul"
    ]
