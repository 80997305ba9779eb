"""Options of Inductor that depend on what it compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.unit import builders
from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.errors import InternalError
from wholestep.ir import node_meta
from wholestep.ir.segment import Segment, segments_of
from wholestep.lower.inductor import compile_fx, segment_compiler
from wholestep.lower.inductor.compile_fx import _LENIENT, _ROWS_OF_PROGRAM, settings_for
from wholestep.lower.inductor.segment_sizes import SegmentSizes
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.form_segments import form_segments

aten = torch.ops.aten


def beside_nothing(x: Tensor) -> Tensor:
    """A ``cat`` with an empty tensor, as a cache of keys begins, seen through a view that wants rows in order."""
    whole = aten.cat.default([x.new_empty(0), x.transpose(0, 1)], 1)
    return aten.view.default(whole, [-1]) * 2 + 1


def in_steps(x: Tensor) -> Tensor:
    """The same, seen by steps in memory: no view that refuses, but one that reads what lies there."""
    whole = aten.cat.default([x.new_empty(0), x.transpose(0, 1)], 1)
    return aten.as_strided.default(whole, [6], [2], 1) * 2 + 1


@pytest.mark.parametrize("fn", [beside_nothing, in_steps])
def test_results_have_the_layout_that_they_were_captured_with(fn: Callable[[Tensor], Tensor]) -> None:
    """Inductor takes a ``cat`` of one tensor for a ``clone``, which has the strides of its input."""
    x = torch.arange(24.0).view(4, 3, 2)
    program = builders.without_gradients(builders.capture(fn, [x]))
    (segment,) = segments_of(run_passes(program, [partial(form_segments, compiles=segment_compiler.compiles)]))
    run = compile_fx.begin_compile(segment, early_launches=False, own_products=False).finish()
    (found,) = run([x.clone()])
    assert torch.equal(found, fn(x))


@pytest.mark.parametrize("may_run_one_by_one", [True])
@pytest.mark.parametrize("when", ["written", "waited for"])
@pytest.mark.parametrize("text", ["PassManager::run failed", "syntax error"])
def test_what_triton_fails_at_is_compiled_otherwise(
    monkeypatch: pytest.MonkeyPatch, when: str, text: str, may_run_one_by_one: bool
) -> None:
    x = torch.arange(24.0).view(4, 3, 2)
    program = builders.without_gradients(builders.capture(beside_nothing, [x]))
    (segment,) = segments_of(run_passes(program, [partial(form_segments, compiles=segment_compiler.compiles)]))
    inner, seen = compile_fx.compile_fx_inner, list[bool]()

    def compile_fx_inner(*args: Any) -> Any:
        seen.append(inductor_config.max_fusion_size > 1)
        if when == "written" and len(seen) == 1:
            raise RuntimeError(text)
        return inner(*args)

    def wait(workers: AsyncCompile, scope: dict[str, Any]) -> None:
        if when == "waited for" and len(seen) == 1:
            raise RuntimeError(text)
        waits(workers, scope)

    waits = AsyncCompile.wait
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)
    monkeypatch.setattr(AsyncCompile, "wait", wait)
    with fresh_cache():
        if (text, when) == ("syntax error", "waited for"):
            with pytest.raises(RuntimeError, match=text):
                compile_fx.begin_compile(segment, early_launches=False, own_products=False).finish()
            return
        begun = compile_fx.begin_compile(segment, early_launches=False, own_products=False)
        run = begun.finish()
    if text == "syntax error":
        assert begun.why_none == "RuntimeError: syntax error"
        assert run is segment
        return
    assert seen == [True, False]
    assert torch.equal(run([x.clone()])[0], beside_nothing(x))


@pytest.mark.parametrize("fault", ["no compiler", "of ours"])
def test_what_is_no_fault_of_a_segment_is_an_error(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def compile_fx_inner(*args: Any) -> Any:
        if fault == "of ours":
            raise InternalError("while a segment was compiled")
        try:
            raise InvalidCxxCompiler
        except InvalidCxxCompiler:
            raise RuntimeError("while a segment was compiled")  # noqa: B904  as torch does

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)
    program = builders.without_gradients(builders.capture(beside_nothing, [torch.arange(24.0).view(4, 3, 2)]))
    (segment,) = segments_of(run_passes(program, [partial(form_segments, compiles=segment_compiler.compiles)]))
    with pytest.raises((RuntimeError, InternalError), match="while a segment"):
        compile_fx.begin_compile(segment, early_launches=False, own_products=False)


def writes_into_one_number(x: Tensor) -> Tensor:
    """As the backward of a view does with the gradient of a sum."""
    whole = aten.expand.default(x.sum(), [3, 3])
    return aten.diagonal_scatter.default(whole, x[0]) * 2


def test_a_part_is_written_into_a_copy_with_a_place_for_each_element() -> None:
    x = torch.arange(9.0).view(3, 3)
    program = builders.without_gradients(builders.capture(writes_into_one_number, [x]))
    (segment,) = segments_of(run_passes(program, [partial(form_segments, compiles=segment_compiler.compiles)]))
    begun = compile_fx.begin_compile(segment, early_launches=False, own_products=False)
    assert not begun.why_none
    (found,) = begun.finish()([x.clone()])
    assert torch.equal(found, writes_into_one_number(x))


def test_operators_whose_kernels_take_numbers_are_compiled_for_all_sizes() -> None:
    env = SizeEnv()
    mode = FakeTensorMode(shape_env=env)
    a, b = (env.fake(mode, torch.empty(3, 3, size), f"args.{size}", [2]) for size in (4, 5))
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("a", "b", "c")]
    for node, value in zip(nodes, (a, b, torch.empty(3, 3, 3)), strict=True):
        node_meta.set_value(node, value)
    product = graph.call_function(aten.cat.default, ([nodes[0], nodes[1]], 2))
    solved = graph.call_function(aten.linalg_solve_triangular.default, (nodes[2], product), {"upper": True})
    with mode, enable_python_dispatcher():
        values = [aten.cat.default([a, b], 2)]
        values.append(aten.linalg_solve_triangular.default(mode.from_tensor(torch.empty(3, 3, 3)), *values, upper=True))
    for node, value in zip((product, solved), values, strict=True):
        node_meta.set_value(node, value)
    graph.output((solved,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    segment = Segment(name="run_segment_0", read=lambda: module)
    own = FakeTensorMode(shape_env=ShapeEnv())
    sizes = SegmentSizes(segment, own)
    made = compile_fx.decompose(segment, sizes.inputs(), own, sizes)
    assert aten.linalg_solve_triangular.default in [node.target for node in made.graph.nodes]


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.Graph:
    with FakeTensorMode():
        return make_fx(fn)(*(torch.empty(shape) for shape in shapes)).graph


def down(x: Tensor) -> Tensor:
    return aten.sum.dim_IntList(x, list(range(x.ndim - 1)))


def along(x: Tensor) -> Tensor:
    return aten.sum.dim_IntList(x, [-1])


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((511, 768), None), ((512, 768), 1), ((1000, 768), 1), ((1024, 768), 2), ((2, 512, 768), 2), ((2047, 513), 2),
        ((2048, 768), 4), ((4095, 768), 4), ((4096, 768), None), ((8, 1024, 768), None),
        ((512, 512), 4), ((2, 512, 8), 4), ((4095, 8), 4),
    ],
)  # fmt: skip
def test_programs_of_a_norms_gradient_have_few_rows_where_there_are_few(
    shape: tuple[int, ...], rows: int | None
) -> None:
    def norm(x: Tensor) -> tuple[Tensor, ...]:
        return along(x), down(x), down(x * x)

    found = settings_for(traced(norm, shape), "cuda")
    wanted = {} if rows is None else {_LENIENT: True, _ROWS_OF_PROGRAM: rows}
    assert found == compile_fx._SETTINGS["cuda"] | wanted
    assert settings_for(traced(norm, shape), "cpu") == compile_fx._SETTINGS["cpu"]


@pytest.mark.parametrize(("rows", "share"), [(100, 1), (1024, 2), (5000, None)])
def test_where_the_number_of_rows_moves_it_is_not_asked(rows: int, share: int | None) -> None:
    env = SizeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = env.fake(mode, torch.empty(rows, 768), "args.0", [0])
    with mode:
        graph = make_fx(lambda x: (along(x), down(x), down(x * x)))(x).graph
    wanted = {_LENIENT: True} | ({} if share is None else {_ROWS_OF_PROGRAM: share})
    assert settings_for(graph, "cuda") == compile_fx._SETTINGS["cuda"] | wanted
    assert not env.guards


def test_sums_of_float64_are_apart() -> None:
    with FakeTensorMode():
        graph = make_fx(lambda x: (along(x), down(x)))(torch.empty(1024, 768, dtype=torch.float64)).graph
    assert settings_for(graph, "cuda") == compile_fx._SETTINGS["cuda"] | {"triton.mix_order_reduction": False}
    with inductor_config.patch(settings_for(graph, "cuda")):
        assert not inductor_config.triton.mix_order_reduction


def test_the_shortest_row_decides_how_few_rows_a_program_may_have() -> None:
    for both in (lambda x, y: (down(x), down(y)), lambda x, y: (down(x), y.mean([0]))):
        assert settings_for(traced(both, (1024, 768), (1024, 96)), "cuda")[_ROWS_OF_PROGRAM] == 4
        assert settings_for(traced(both, (1024, 768), (1024, 640)), "cuda")[_ROWS_OF_PROGRAM] == 2


def test_other_sums_and_sums_of_several_sizes_change_nothing() -> None:
    plain = compile_fx._SETTINGS["cuda"]
    assert settings_for(traced(along, (1024, 8)), "cuda") == plain
    assert settings_for(traced(lambda x: aten.sum.dim_IntList(x, [0]), (1024, 8, 8)), "cuda") == plain
    assert settings_for(traced(lambda x: aten.sum.dim_IntList(x, None), (1024, 8)), "cuda") == plain
    assert settings_for(traced(lambda x: aten.sum.dim_IntList(x, [0]), (1024,)), "cuda") == plain
    assert settings_for(traced(lambda x, y: (down(x), down(y)), (1024, 8), (64, 8)), "cuda") == plain
    assert settings_for(traced(lambda x, y: (down(x), down(y)), (1024, 8), (8192, 8)), "cuda") == plain


def test_without_these_options_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(down, (1024, 8))
    assert _LENIENT in settings_for(graph, "cuda")
    monkeypatch.setattr(compile_fx, "_ROWS_OF_PROGRAM", "triton.no_such_option")
    assert settings_for(graph, "cuda") == compile_fx._SETTINGS["cuda"]


def test_what_is_written_can_be_read_before_its_kernels_are_there() -> None:
    """Kernels of ours that it calls are built meanwhile."""
    x = torch.arange(24.0).view(4, 3, 2)
    program = builders.without_gradients(builders.capture(beside_nothing, [x]))
    (segment,) = segments_of(run_passes(program, [partial(form_segments, compiles=segment_compiler.compiles)]))
    ours = segment_compiler.SegmentCompiler(torch.device("cpu"))
    ours.begin(segment)
    (text,) = ours.texts()
    assert "async_compile.wait" in text
    ours.finish()
    assert ours.texts() == [text]
