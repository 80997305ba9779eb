"""The Inductor backend on the CPU: few compilations, since each takes seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.lr_scheduler import OneCycleLR

import wholestep as ws
from tests.unit import builders
from tests.unit.lower.gpu_programs import captured, devices, gpu, host
from wholestep.ir import node_meta
from wholestep.ir.program import InputKind
from wholestep.ir.segment import Segment
from wholestep.lower.inductor.segment_compiler import SegmentCompiler, compiles
from wholestep.lower.inductor_passes import form_inductor_segments
from wholestep.passes.analysis.task_graph import live_bytes
from wholestep.passes.pass_manager import run_passes

STEPS = 50
TOLERANCE = 1e-8
"""Rounding of float64 (1e-16) through 50 steps of a small model; a frozen rate or beta shows from 1e-4 up."""


def train_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def train(
    step: Callable[..., Tensor], *, rank: int = 0, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> tuple[Tensor, nn.Module, list[int]]:
    """Losses, the model, and where its parameters lay before. What `wrap` makes of the model is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)).double()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = OneCycleLR(opt, 3e-2, total_steps=STEPS + 1)  # moves the rate and the first beta
    wrapped = wrap(model)
    before, losses = [param.data_ptr() for param in model.parameters()], []
    for number in range(STEPS):
        draw = torch.Generator().manual_seed(number + 1000 * rank)
        x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
        losses.append(step(wrapped, opt, x, torch.randint(5, (8,), generator=draw)))
        schedule.step()
    return torch.stack(losses), model, before


@pytest.fixture(scope="module")
def step() -> ws.CompiledStep:
    return ws.compile(train_step, backend="inductor")


@pytest.fixture(scope="module")
def trained(step: ws.CompiledStep) -> tuple[Tensor, nn.Module, list[int]]:
    return train(step)


def test_rates_and_betas_move_as_in_eager_code(trained):
    losses, model, _ = train(train_step)
    torch.testing.assert_close(trained[0], losses, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(trained[1].state_dict(), model.state_dict(), rtol=TOLERANCE, atol=TOLERANCE)


def test_parameters_are_written_where_they_lie(step, trained):
    assert [param.data_ptr() for param in trained[1].parameters()] == trained[2]
    stored = [len(node.target.stored) for node in step.graph.graph.nodes if isinstance(node.target, Segment)]
    assert sum(stored) == 3 * len(trained[2])  # each parameter and its two moments; the counters are the host's


def test_no_memory_is_predicted_for_what_is_written_where_it_lies(step, trained):
    nodes = [node for node in step.graph.graph.nodes if isinstance(node.target, Segment) and node.target.stored]
    live = live_bytes(step.program())
    for node in nodes:
        results = node_meta.value(node)
        assert [results[result] for _, result in node.target.stored] == [None] * len(node.target.stored)
        assert live[node] <= sum(map(node_meta.num_bytes, node.all_input_nodes)) + node_meta.num_bytes(node)
    peak = step.explain().peak.by_category
    assert peak["other"] < peak["parameters"]  # the batch and the loss; not each parameter and moment once more


def test_one_capture_and_few_calls(step, trained):
    assert step.cache_info().traces == 1
    assert "inductor" in step.explain().backend
    assert "there is no GPU" in step.explain().backend
    notes = [note for record in step.program().history for note in record.notes]
    assert any("in 3 segments" in note for note in notes)
    assert any("numbers of the host travel packed" in note for note in notes)


@pytest.mark.parametrize("wrong", [5, -1])
def test_an_answer_out_of_range_raises_and_leaves_state_as_it_was(step, trained, wrong):
    """A kernel that looks up what is not there must not write a parameter, nor read another row in its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)).double()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 5
    step(model, opt, x, y)
    state = [*model.parameters(), *(one for kept in opt.state.values() for one in kept.values())]
    before = [one.detach().clone() for one in state]
    y[3] = wrong
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        step(model, opt, x, y)
    assert builders.same([one.detach() for one in state], before)


def test_results_keep_the_strides_of_eager_code():
    def turned(x: Tensor) -> Tensor:
        return x.permute(1, 0).exp() * 2

    x = torch.randn(3, 4, dtype=torch.float64)
    result = ws.compile(turned, backend="inductor")(x)
    assert result.stride() == turned(x).stride() == (1, 4)
    torch.testing.assert_close(result, turned(x), rtol=TOLERANCE, atol=0.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_look_ups_stay_with_aten_on_the_cpu(device):
    """In a compiled kernel of several threads an index out of range would end the process."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    with mode:
        values = [torch.empty(5, 3, device=device), torch.empty(4, dtype=torch.int64, device=device)]
    args = [graph.placeholder(name) for name in ("rows", "index")]
    for node, value in zip(args, values, strict=True):
        node_meta.set_value(node, value)
    call = graph.call_function(torch.ops.aten.embedding.default, tuple(args))
    node_meta.set_value(call, values[0])
    assert compiles(call) is (device == "cuda")


@pytest.mark.parametrize(
    ("fn", "tensors", "wanted"),
    [
        (lambda x: x + 1, [torch.rand(3)], True),
        (lambda x: x * 1j, [torch.rand(3)], False),
        (lambda x: torch.rand_like(x), [torch.rand(3)], False),
        (lambda x: x.to_sparse(), [torch.rand(3, 3)], False),
        (lambda x: x.nonzero(), [torch.rand(3)], False),  # of a size that is data
        (lambda x: x * 2 + x.nonzero().shape[0], [torch.rand(3)], False),  # with a number that is data
    ],
)
def test_what_the_compiler_may_have(fn, tensors, wanted):
    calls = [node for node in builders.capture(fn, tensors).graph.nodes if node.op == "call_function"]
    assert compiles(calls[-1]) is wanted


@pytest.mark.parametrize(("device", "count", "wanted"), [("cuda", 16, True), ("cuda", 17, False), ("cpu", 17, True)])
def test_many_parts_are_put_together_by_aten_on_gpus(device: str, count: int, wanted: bool):
    """Triton takes 19 s for the small gradients of W1, which ATen puts together with one kernel."""
    with FakeTensorMode():
        parts = [torch.empty(8, device=device) for _ in range(count)]
        graph = make_fx(lambda parts: torch.cat(parts), tracing_mode="fake")(parts).graph
    (cat,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert compiles(cat) is wanted


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_beside_a_gpu_what_is_computed_on_the_host_is_left_to_aten(device: str) -> None:
    """The first kernel takes the C++ compiler a minute: targets of a loss, made by ``torch.ones``, took one."""

    def step(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin().cos() * 2, torch.cat([lengths + 1, torch.ones(3), torch.zeros(3)]).mul(2)

    specs = [(gpu if device == "cuda" else host)(3), host(3, kind=InputKind.USER, dtype=torch.float32)]
    formed = run_passes(builders.without_gradients(captured(step, specs)), [form_inductor_segments(device)])
    segments = [node for node in formed.graph.nodes if isinstance(node.target, Segment)]
    assert {one for node in segments for one in devices(node)} == {device}
    assert bool(formed.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)) is (device == "cuda")


def test_a_segment_of_constants_has_no_input():
    """A causal mask and what it is multiplied by: they are made before anything is read."""
    with FakeTensorMode():
        made = make_fx(lambda: (torch.ones(3, 3).tril() * 2,))()
    with FakeTensorMode() as mode:
        for node in made.graph.nodes:
            if node.op == "call_function":
                node_meta.set_value(node, mode.from_tensor(torch.zeros(3, 3)))
    run = SegmentCompiler(torch.device("cpu")).compile(Segment(name="mask", read=lambda: made))
    assert torch.equal(next(iter(run([]))), torch.ones(3, 3).tril() * 2)


@pytest.mark.parametrize("first", ["plain", "negative"])
def test_what_is_lazily_negative_is_what_it_stands_for(first):
    """The imaginary part of a conjugate has the memory of that of the number itself."""
    z = torch.randn(8, dtype=torch.complex64)
    given = {"plain": z.imag, "negative": z.conj().imag}
    assert given["negative"].is_neg()
    assert given["negative"].data_ptr() == given["plain"].data_ptr()

    def double(x):
        return (x * 2).sin() + x

    step = ws.compile(double, backend="inductor")
    for name in sorted(given, key=lambda name: name != first):
        torch.testing.assert_close(step(given[name]), double(given[name]))
    assert step.cache_info().traces == 2
    assert "lazily negative" in step.cache_info().reasons[-1]
