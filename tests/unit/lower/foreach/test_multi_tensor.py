"""Lists of tensors as kernels of our own. Where triton is, kernels run in its interpreter, on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import wholestep.api.stages
from tests.behaviour.cases import OPTIM_CASES, STEP_CASES
from tests.behaviour.harness import Run, check
from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.lower import triton_interpreter
from wholestep.capture.functionalize.functionalize import functional_twin
from wholestep.config import Inductor as InductorOptions
from wholestep.cost.cost_model import CostModel
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.ops.collectives import ALL_REDUCE_BY_COPIES_, ALL_REDUCE_ROWS_
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.ir.segment import Segment
from wholestep.lower.base import eager_backend
from wholestep.lower.base.eager_backend import EagerBackend
from wholestep.lower.base.protocol import Wait
from wholestep.lower.decompositions import optimizers
from wholestep.lower.foreach import multi_tensor, triton_codegen
from wholestep.lower.foreach.kernel_plan import Plan, plan
from wholestep.lower.foreach.triton_codegen import BLOCK, CHUNK, NotPointwise
from wholestep.lower.inductor import segment_compiler
from wholestep.lower.inductor_backend import InductorBackend
from wholestep.lower.kernels import copy_all_reduce
from wholestep.lower.kernels.copy_all_reduce import PendingMessage
from wholestep.passes.comm import use_copy_engine
from wholestep.passes.default_passes import passes_of
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.schedule import form_segments as segments_pass
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars
from wholestep.passes.schedule.sink_waits import sink_waits

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-9}
FORM: list[Pass] = [
    partial(pack_scalars, reads=segment_compiler.reads_packed),
    partial(form_segments, compiles=segment_compiler.compiles, separate_nodes=multi_tensor.apart),
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of these tests count as those of a GPU, also counters."""
    monkeypatch.setattr(optimizers, "on_gpu", lambda node: True)


@pytest.fixture
def counters_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_pass, "known_at_start", lambda graph: set())


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in Triton's interpreter."""
    triton_interpreter.prepare(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    multi_tensor._built.cache_clear()
    yield
    multi_tensor._built.cache_clear()


class Listed(EagerBackend):
    """Segments over lists run as kernels, the rest as it is."""

    name = "lists"

    def __init__(self) -> None:
        self.plans = multi_tensor.MultiTensorCompiler()
        self.num_segments = 0

    def passes(self, placed: Program) -> list[Pass]:
        return [*FORM, self.plans.note_updates]

    def lower(self, program: Program, wait: Wait | None = None) -> Step:
        return eager_backend.lower(program, wait=wait, compile_segment=self.compile)

    def compile(self, segment: Segment) -> Callable[[list[Any]], Any]:
        found = self.plans.compile(segment)
        self.num_segments += found is not None
        return found or segment


CASES = (
    "adamw_fused", "adam_amsgrad_fused", "sgd_nesterov_fused", "adam_decay_foreach", "sgd_maximize_foreach",
    "adamw_amsgrad_foreach", "rmsprop_centered_foreach", "adagrad_foreach", "adafactor_foreach",
    "clip_norm",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_optimizers_train_as_eager_code_does(name: str, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Listed()
    monkeypatch.setattr(wholestep.api.stages, "backend_for", lambda *chosen: backend)
    # Parameters of these cases are below 1 and move by less than 1: some roundings of float32 in some steps.
    case = dataclasses.replace(
        (OPTIM_CASES | STEP_CASES)[name], tolerance=50 * UNIT[torch.float32], tolerance_reason="other roundings"
    )
    complaints = check(case, Run())
    assert not complaints, "\n".join(complaints)
    assert backend.num_segments


def scheduled(fn: Callable[..., Any], tensors: list[Tensor]) -> Program:
    program = builders.without_gradients(builders.capture(fn, tensors))
    return run_passes(program, [eliminate_dead_code, *FORM, partial(reinplace, hold_updates=True)])


def segments(program: Program) -> list[Segment]:
    return [node.target for node in program.graph.nodes if isinstance(node.target, Segment)]


def planned(fn: Callable[..., Any], tensors: list[Tensor]) -> Plan | str:
    (segment,) = segments(scheduled(fn, tensors))
    return plan(segment, {})


def run(fn: Callable[..., Any], tensors: list[Tensor]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The tensors as the kernels leave them, and what the step gives."""
    program, given = scheduled(fn, tensors), [builders_copy(one) for one in tensors]
    plans = multi_tensor.MultiTensorCompiler()
    step = eager_backend.lower(
        program, compile_segment=lambda segment: plans.compile(segment) or pytest.fail(segment.name)
    )
    with torch.no_grad():
        results = step(list(given))
    assert segments(program)
    return given, results


def builders_copy(one: Tensor) -> Tensor:
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).copy_(one)


SIZES = [(3, 5), (0,), (1,), (), (CHUNK + BLOCK + 7,), (2, BLOCK)]


def draw(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(0.25 + torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes]


def adamw(*given: Tensor) -> None:
    """The update as torch's optimizer makes it where counters lie on the device, in the form that capture gives it."""
    count = len(given) // 5
    params, grads, means, squares, steps = (list(given[n * count : (n + 1) * count]) for n in range(5))
    torch._foreach_add_(steps, 1)
    op = functional_twin(aten._fused_adamw_.default, op_info.mutated_args(aten._fused_adamw_.default))
    new = op(
        params, grads, means, squares, [], steps, lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    for old, updated in zip([*params, *means, *squares], [*new[0], *new[2], *new[3]], strict=True):
        old.copy_(updated)


def doubled(a: Tensor, b: Tensor) -> None:
    torch._foreach_mul_([a, b], 2.0)
    torch._foreach_add_([a, b], 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_counters_change_behind_all_that_reads_them(dtype, interpreted, counters_are_the_devices):
    """A program of a large tensor that saw its counter one too high would be off by far more than a rounding."""
    tensors = [one for seed in range(4) for one in draw(SIZES, dtype, seed)]
    tensors += [torch.tensor(float(place)) for place in range(len(SIZES))]
    wanted = [one.clone() for one in tensors]
    adamw(*wanted)
    came, _ = run(adamw, tensors)
    for one, other in zip(wanted, came, strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=64 * UNIT[dtype])
    found = planned(adamw, tensors)
    assert isinstance(found, Plan)
    names = [re.search(r"def (\w+)", kernel.text)[1] for kernel in found.kernels]  # type: ignore[index]
    assert names == ["update_lists", "update_numbers", "update_numbers"]  # the last one: all of what has no dimensions
    assert [len(kernel.rows) for kernel in found.kernels] == [len(SIZES) - 1, len(SIZES) - 1, 1]
    assert not found.fresh


def test_slices_of_a_bucket_at_odd_places(interpreted):
    """Addresses that are no multiples of 16 bytes, and memory next to a tensor that must stay as it is."""

    def fn(flat: Tensor, *params: Tensor) -> None:
        grads, start = [], 1
        for one in params:
            grads.append(flat[start : start + one.numel()].view(one.shape))
            start += one.numel()
        torch._foreach_add_(list(params), torch._foreach_mul(grads, 0.5))

    params = draw(SIZES, torch.float32, 0)
    tensors = [*draw([(sum(one.numel() for one in params) + 9,)], torch.float32, 1), *params]
    wanted = [one.clone() for one in tensors]
    fn(*wanted)
    assert builders.same(run(fn, tensors)[0], wanted)


def test_elements_meet_in_whatever_order_they_lie(interpreted):
    def fn(w: Tensor, g: Tensor, v: Tensor, h: Tensor, few: Tensor) -> tuple[Tensor, ...]:
        product = torch._foreach_mul([g, h], 2.0)
        torch._foreach_add_([w, v], torch._foreach_add(product, [few.expand(g.shape), h]))
        return tuple(product)

    shape = (2, 3, 4, 5)
    w, g, v, h = draw([shape] * 4, torch.float64, 0)
    tensors = [w.to(memory_format=torch.channels_last), g, v.permute(1, 0, 2, 3), h.permute(1, 0, 2, 3), w[0, 0, 0, :1]]
    wanted = [builders_copy(one) for one in tensors]
    products = fn(*wanted)
    came, results = run(fn, tensors)
    assert builders.same(came, wanted)
    assert builders.same(list(results[:2]), list(products))
    assert [one.stride() for one in results[:2]] == [one.stride() for one in products]
    found = planned(fn, tensors)
    assert isinstance(found, Plan)
    assert len(found.turned) == 2


def test_half_sized_types_are_rounded_once(interpreted):
    def fn(w: Tensor, v: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch._foreach_sqrt(torch._foreach_addcmul([w, v], [g, h], [g, h], 0.3)))

    tensors = draw([(40,), (3, 7)] * 2, torch.float16, 0)  # the interpreter cuts bfloat16 off
    sums = [a + 0.3 * (b.float() * b.float()) for a, b in zip(tensors[:2], tensors[2:], strict=True)]
    wanted = [one.half().float().sqrt().half() for one in sums]
    for one, other in zip(wanted, run(fn, tensors)[1], strict=True):
        torch.testing.assert_close(other, one, rtol=2.0**-10, atol=0.0)  # neighbours, where float32 was on the border
        assert (one != other).sum() <= 1


def test_what_is_no_number_stays_none_and_zeros_divide(interpreted):
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        lowest = torch._foreach_minimum([a], [b])
        return *torch._foreach_clamp_min(lowest, 0.5), *torch._foreach_div([a], [b]), *torch._foreach_sign([b])

    nan, inf = float("nan"), float("inf")
    tensors = [torch.tensor([nan, 1.0, 0.0, -2.0, 7.0]), torch.tensor([1.0, nan, 0.0, -0.0, inf])]
    for one, other in zip(fn(*tensors), run(fn, tensors)[1], strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=0.0, equal_nan=True)


def test_functions_of_a_segment_have_tables_of_their_own_and_a_layout_in_common(interpreted):
    """A graph reads its table in every replay, on addresses of its own."""
    tensors = draw([(40,), (3, 7)], torch.float32, 0)
    (segment,) = segments(scheduled(doubled, tensors))
    plans = multi_tensor.MultiTensorCompiler()
    first, second = plans.compile(segment), plans.compile(segment)
    assert first._layout is second._layout
    assert first._captured.data_ptr() != second._captured.data_ptr()
    assert first._held.data_ptr() != second._held.data_ptr()
    others = [one.clone() for one in tensors]
    for function, given in ((first, tensors), (second, others), (first, tensors)):
        wanted = [2 * one + 1 for one in given]
        function(list(given))
        assert all(map(torch.equal, given, wanted))


def test_nothing_of_them_is_saved(interpreted):
    """The text is made again in another process, and Triton has its own cache."""
    program = scheduled(doubled, draw([(3,), (4,)], torch.float32, 0))
    backend = InductorBackend(InductorOptions(), torch.device("cpu"))
    backend.lower(program)
    _, *kernels = backend.dump_kernels(program)
    assert kernels == [None]


def updated_by_bucket(*given: Tensor) -> None:
    """Two parameters, of which the second one's gradient comes last. All numbers are exact."""
    xs, ys, params = given[:2], given[2:4], given[4:]
    grads = [builders.gradient(y.t() @ x, f"w{place}") for place, (x, y) in enumerate(zip(xs, ys, strict=True))]
    torch._foreach_sub_(list(params), grads)


SIDES = (20, 200)


def by_copies_last(
    monkeypatch: pytest.MonkeyPatch, *, hold_updates: bool = False, least_bytes: int = 10_000
) -> Program:
    """The scheduled step of `updated_by_bucket`, with its last reduction by copies."""
    monkeypatch.setattr(use_copy_engine, "MIN_BYTES", least_bytes)
    placed = builders.place(builders.capture(updated_by_bucket, whole_numbers()))
    lowering = [
        partial(use_copy_engine.use_copy_engine, why_not=lambda group, device: ""),
        *FORM[:1],
        sink_waits,
        FORM[1],
    ]
    cost = CostModel.default("cpu+gloo")
    return run_passes(placed, passes_of(cost=cost, bucket_bytes=1, lowering=lowering, hold_updates=hold_updates))


def whole_numbers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, side) for side in SIDES] * 2 + [(side, side) for side in SIDES]
    return [torch.randint(-9, 9, shape, generator=generator).float() for shape in shapes]


class Arrives:
    """An event after which some elements of a message are there."""

    def __init__(self, log: list[Any], target: Tensor, source: Tensor) -> None:
        self.log, self.target, self.source = log, target, source

    def wait(self) -> None:
        self.log.append(self.target.numel())
        self.target.copy_(self.source)


def test_the_last_update_begins_with_what_has_arrived(interpreted, monkeypatch):
    program, plans, log = by_copies_last(monkeypatch), multi_tensor.MultiTensorCompiler(), []
    stops = (10_000, 30_000, 40_000)

    def start(message: Tensor, reduce_op: str, group: str) -> PendingMessage:
        flat, came = message.view(-1), message.flatten().clone()
        flat.fill_(torch.nan)  # what is read too early stays that
        cuts = zip((0, *stops), stops, strict=False)
        events = [Arrives(log, flat[begin:stop], came[begin:stop]) for begin, stop in cuts]
        unread = torch.full_like(message, torch.nan)
        return PendingMessage(message=unread, result=message, pieces=list(zip(stops, events, strict=True)))

    launch = multi_tensor.MultiTensorSegment._launch
    monkeypatch.setattr(copy_all_reduce, "STARTS", {ALL_REDUCE_BY_COPIES_: start})
    monkeypatch.setattr(multi_tensor.MultiTensorSegment, "_launch", lambda *args: (log.append(args[2:]), launch(*args)))
    lowered = plans.overlap_last_update(program)
    given = whole_numbers()
    step = eager_backend.lower(lowered, compile_segment=lambda one: plans.compile(one) or one)
    with torch.no_grad():
        step(list(given))
    before = whole_numbers()
    for x, y, old, new in zip(before[:2], before[2:4], before[4:], given[4:], strict=True):
        assert torch.equal(new, old - 0.5 * y.t() @ x)
    assert log == [(0, 0, 1), 10_000, 20_000, (0, 0, 2), 10_000, (0, 2, 5)]  # 8,192 elements a program, an even number


def test_an_update_waits_for_all_where_others_read_its_gradients_or_inputs_are_held(monkeypatch):
    def starts(program: Program) -> int:
        lowered = multi_tensor.MultiTensorCompiler().overlap_last_update(program)
        assert builders.count(lowered, op_info.WAIT) + builders.count(lowered, copy_all_reduce.start) == 2
        return builders.count(lowered, copy_all_reduce.start)

    assert starts(by_copies_last(monkeypatch)) == 1
    assert starts(by_copies_last(monkeypatch, hold_updates=True)) == 0
    program = by_copies_last(monkeypatch)
    wait = program.graph.find_nodes(op="call_function", target=op_info.WAIT)[-1]
    graph_edit.set_results(program.graph, [wait, *program.results[1:]])
    assert starts(program) == 0
    program = by_copies_last(monkeypatch, least_bytes=0)
    wait = program.graph.find_nodes(op="call_function", target=op_info.WAIT)[-1]
    assert starts(program) == 1
    op_info.waited_for(wait).target = ALL_REDUCE_ROWS_  # which come as one, and after which nothing has to be early
    assert starts(program) == 0


# What needs no triton.


def grouped(numbers: Tensor, *tensors: Tensor) -> None:
    """Two groups of parameters with rates of their own."""
    half = len(tensors) // 2
    for place, number in enumerate(numbers.tolist() if numbers.ndim else [numbers.item()] * 2):
        params, grads = tensors[place:half:2], tensors[half + place :: 2]
        torch._foreach_add_(list(params), list(grads), alpha=-number)


def test_groups_with_other_rates_share_a_kernel():
    tensors = [torch.tensor(0.1, dtype=torch.float64), *draw([(3,), (4, 2), (5,), (1,)] * 2, torch.float32, 0)]
    found = planned(grouped, tensors)
    assert isinstance(found, Plan)
    assert [len(kernel.rows) for kernel in found.kernels] == [4]
    assert sorted(row[-1].offset for row in found.kernels[0].rows) == [1, 3, 5, 8]


def test_types_have_kernels_of_their_own():
    tensors = [torch.tensor(0.1, dtype=torch.float64), *draw([(3,), (4, 2)], torch.float32, 0)]
    tensors[2] = tensors[2].double()
    found = planned(grouped, [*tensors, *(one.clone() for one in tensors[1:])])
    assert isinstance(found, Plan)
    assert [len(kernel.rows) for kernel in found.kernels] == [1, 1]


def test_what_reads_an_updated_value_goes_into_its_kernel():
    """An average of the new weights is one more result of the kernel that makes them, whatever its index is."""

    def fn(a: Tensor, b: Tensor, ema_b: Tensor, ema_a: Tensor) -> None:
        torch._foreach_mul_([a, b], 2.0)
        torch._foreach_lerp_([ema_b, ema_a], [b, a], 0.1)

    found = planned(fn, draw([(3,), (4,), (4,), (3,)], torch.float32, 0))
    assert isinstance(found, Plan)
    assert [len(kernel.rows) for kernel in found.kernels] == [2]
    assert found.kernels[0].text.count("tl.store(q") == 2


def exchanged(a: Tensor, b: Tensor) -> None:
    """Both are computed from what was there before: capture refuses the lists of which eager code would not."""
    new = torch._foreach_add([a, b], torch._foreach_mul([b, a], 2.0))
    a.copy_(new[0])
    b.copy_(new[1])


def test_what_one_index_reads_and_another_one_overwrites_are_computed_together(interpreted):
    a, b = draw([(BLOCK + 3,), (BLOCK + 3,)], torch.float32, 0)
    (new_a, new_b), _ = run(exchanged, [a, b])
    assert torch.equal(new_a, a + 2 * b)
    assert torch.equal(new_b, b + 2 * a)


def test_an_index_that_reads_what_another_one_overwrites_in_another_order_is_left_to_others():
    (segment,) = segments(scheduled(exchanged, [torch.ones(3, 2), torch.ones(2, 3).t()]))
    assert len(segment.stored) == 2
    found = plan(segment, {})
    assert isinstance(found, str)
    assert "overwritten by another" in found
    assert multi_tensor.MultiTensorCompiler().compile(segment) is None


def test_a_tensor_that_is_shared_is_no_number():
    def fn(a: Tensor, b: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch._foreach_mul(torch._foreach_neg([a, b]), rate))

    program = scheduled(fn, draw([(2,), (2,), ()], torch.float32, 0))
    (segment,) = segments(program)
    assert isinstance(plan(segment, {}), Plan)
    with FakeTensorMode():
        node_meta.set_value(segment.graph.find_nodes(op="placeholder")[-1], torch.empty(2))
    found = plan(segment, {})
    assert isinstance(found, str)
    assert "the same tensor for all indices" in found


def test_a_view_in_another_type_is_refused():
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch._foreach_neg(torch._foreach_abs([a, b.view(torch.float32)])))

    found = planned(fn, [torch.ones(4), torch.ones(2, dtype=torch.float64)])
    assert isinstance(found, str)
    assert "another type" in found


def test_notes_say_what_is_updated_and_what_is_not():
    program = builders.without_gradients(builders.capture(doubled, draw([(3,), (4,)], torch.float32, 0)))
    after = run_passes(program, [*FORM, multi_tensor.MultiTensorCompiler().note_updates])
    assert after.history[-1].notes == ("2 tensors are updated by 1 kernels over lists",)


def call(op: Any, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
    graph = fx.Graph()
    given = graph.placeholder("x")
    made = graph.call_function(op, ([given],))
    with FakeTensorMode():
        node_meta.set_value(given, torch.empty(shape, dtype=dtype))
        node_meta.set_value(made, [torch.empty(shape, dtype=dtype)])
    return made


def test_which_calls_are_taken(monkeypatch):
    assert multi_tensor.takes(call(aten._foreach_sqrt.default, 3))
    assert not multi_tensor.takes(call(aten._foreach_norm.Scalar, 3))
    assert not multi_tensor.takes(call(aten._foreach_erf.default, 3))
    assert not multi_tensor.takes(call(aten._foreach_neg.default, 3, dtype=torch.int64))
    assert not multi_tensor.takes(call(aten.sum.default, 3))
    monkeypatch.undo()
    assert not multi_tensor.takes(call(aten._foreach_sqrt.default, 3))  # on the CPU


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Graph:
    program = builders.capture(lambda *given: (fn(*given),), [torch.ones(shape, dtype=dtype) for shape in shapes])
    return program.graph


def test_numbers_are_computed_once_in_a_program():
    graph = traced(lambda x, rate: x * (1 - rate.double() ** 3).sqrt(), (4,), ())
    head, _, body = triton_codegen.kernel("update_lists", graph, elementwise=[True, False]).partition("whole = 0")
    assert "libdevice.pow" in head
    assert "tl.sqrt(" in head
    assert "libdevice" not in body
    assert "tl.sqrt" not in body
    assert "tl.full((), 3.0, tl.float64)" in head


def test_what_has_no_text_is_refused():
    for fn in (torch.erf, lambda x: x.sum(), lambda x: torch.div(x, 2, rounding_mode="floor")):
        with pytest.raises(NotPointwise):
            triton_codegen.kernel("update_lists", traced(fn, (4,)), elementwise=[True])
    with pytest.raises(NotPointwise, match="int64"):
        triton_codegen.kernel("update_lists", traced(torch.neg, (4,), dtype=torch.int64), elementwise=[True])


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, "v4.b32"), (torch.bfloat16, "v4.b32")])
def test_the_kernel_compiles_and_reads_vectors(dtype, wide, counters_are_the_devices, tmp_path, monkeypatch):
    """Compiled for a GPU that need not be here; memory is read and written 16 bytes at a time."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    multi_tensor._built.cache_clear()
    tensors = [one for seed in range(4) for one in draw([(3,), (4,)], dtype, seed)]
    tensors += [torch.tensor(float(place)) for place in range(2)]
    found = planned(adamw, tensors)
    assert isinstance(found, Plan)
    for kernel in found.kernels:
        aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
        source = triton.compiler.ASTSource(
            fn=multi_tensor._built(kernel.text),
            signature={"table": "*i64", "blocks": "*i32"},
            constexprs={},
            attrs=aligned,
        )
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
        if "update_lists" in kernel.text:
            assert len(re.findall(rf"ld\.global\.{wide}", ptx)) >= 4
            assert len(re.findall(rf"st\.global\.{wide}", ptx)) >= 3
        assert not re.search(r"(sqrt|rcp|div)\.(approx|full)[.a-z]*\.f32", ptx)
    multi_tensor._built.cache_clear()


def test_one_call_is_enough_where_it_reads_a_number_of_the_host():
    """As a fused optimizer does, which is one call for everything."""

    def fn(a: Tensor, b: Tensor, rate: Tensor) -> None:
        torch._foreach_mul_([a, b], rate.item())

    found = planned(fn, [*draw([(3,), (4,)], torch.float32, 0), torch.tensor(0.1, dtype=torch.float64)])
    assert isinstance(found, Plan)
    assert [len(kernel.rows) for kernel in found.kernels] == [2]


def test_kernels_are_built_in_a_thread_while_others_compile(counters_are_the_devices, monkeypatch):
    tensors = [one for seed in range(4) for one in draw([(3,), (4,)], torch.float32, seed)]
    found = planned(adamw, [*tensors, *(torch.tensor(float(place)) for place in range(2))])
    assert isinstance(found, Plan)
    may_end, threads, built = threading.Event(), [], []

    class Kernel:
        def warmup(self, *types: Any, grid: tuple[int], num_warps: int) -> None:
            assert may_end.wait(timeout=10)
            threads.append(threading.current_thread())
            built.append((types, num_warps))

    monkeypatch.setattr(multi_tensor, "segments_of", lambda program: [None])
    monkeypatch.setattr(multi_tensor, "_built", lambda text: Kernel())
    monkeypatch.setattr(multi_tensor.MultiTensorCompiler, "_of", lambda self, segment: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    plans: Any = multi_tensor.MultiTensorCompiler()
    plans.begin(None)
    compiled = plans.compile(None)
    assert not built
    there = []
    monkeypatch.setattr(multi_tensor.MultiTensorSegment, "_launch", lambda *launch: there.append(len(built)))
    threading.Timer(0.05, may_end.set).start()
    compiled([*tensors, *(torch.tensor(float(place)) for place in range(2))])  # needs them
    assert built == [((torch.int64, torch.int32), 4)] * len({kernel.text for kernel in found.kernels})
    assert there
    assert set(there) == {len(built)}
    assert threading.main_thread() not in threads


def test_another_process_finds_the_binaries_of_kernels(counters_are_the_devices, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    multi_tensor._built.cache_clear()
    tensors = [one for seed in range(4) for one in draw([(3,), (4,)], torch.float32, seed)]
    found = planned(adamw, [*tensors, *(torch.tensor(float(place)) for place in range(2))])
    assert isinstance(found, Plan)
    monkeypatch.setattr(multi_tensor, "plan", lambda segment, texts: found)
    monkeypatch.setattr(multi_tensor, "_binaries", {})
    plans, segment = multi_tensor.MultiTensorCompiler(), object()
    assert plans.dumps(segment) is None  # nothing is built yet

    def build() -> dict[str, Any]:
        sources = {
            kernel.text: triton.compiler.ASTSource(
                fn=multi_tensor._built(kernel.text),
                signature={"table": "*i64", "blocks": "*i32"},
                constexprs={},
                attrs={},
            )
            for kernel in found.kernels
        }
        return {text: triton.compile(one, target=GPUTarget("cuda", 90, 32)) for text, one in sources.items()}

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    multi_tensor._binaries.update(build())
    data = plans.dumps(segment)
    assert data is not None
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    other = multi_tensor.MultiTensorCompiler()
    other.loads(segment, data, torch.device("cuda", 3))
    monkeypatch.setattr(triton.compiler.ASTSource, "make_ir", None)  # whoever compiles calls it
    monkeypatch.setattr(multi_tensor, "plan", None)  # and whoever plans
    taken = other._of(segment)
    assert (taken.kernels, taken.num_results) == (found.kernels, found.num_results)
    assert taken.device == torch.device("cuda", 3)
    fresh = [[(number, like.stride(), like.dtype) for number, like in one.fresh] for one in (found, taken)]
    assert fresh[0] == fresh[1]
    again = build()
    assert {text: one.asm["cubin"] for text, one in again.items()} == {
        text: one.asm["cubin"] for text, one in multi_tensor._binaries.items()
    }
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "third"))
    with pytest.raises(TypeError):
        build()
    multi_tensor._built.cache_clear()


def test_binaries_that_cannot_be_read_are_told(counters_are_the_devices, monkeypatch, caplog):
    found = planned(adamw, [*draw([(3,), (4,)] * 4, torch.float32, 0), *(torch.tensor(0.0) for _ in range(2))])
    monkeypatch.setattr(multi_tensor.MultiTensorCompiler, "_of", lambda self, segment: found)
    named: Any = type("Named", (), {"name": "segment_7"})
    plans = multi_tensor.MultiTensorCompiler()
    plans.loads(named, b"no pickle", torch.device("cuda", 0))
    assert plans._of(named) is found
    assert "segment_7 is built anew: UnpicklingError" in caplog.text
