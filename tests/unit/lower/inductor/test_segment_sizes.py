"""Symbols of sizes inside of one segment, and what is asked of them there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from wholestep.capture.guards.size_guards import SizeConditions
from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.ir import node_meta
from wholestep.ir.segment import Segment
from wholestep.lower.codecache import segment_cache
from wholestep.lower.inductor import segment_compiler
from wholestep.lower.inductor.segment_compiler import SegmentCompiler
from wholestep.lower.inductor.segment_sizes import NotForAllSizes, SegmentSizes

aten = torch.ops.aten


def sized(env: SizeEnv, name: str, rows: int, columns: int = 4) -> Segment:
    """The relu of an argument with rows that move, beside their number and twice as many."""
    mode = FakeTensorMode(shape_env=env)
    x = env.fake(mode, torch.empty(rows, columns), name, [0])
    graph = fx.Graph()
    given, count, twice = (graph.placeholder(one) for one in ("x", "count", "twice"))
    made = graph.call_function(aten.relu.default, (given,))
    values = {given: x, count: x.shape[0], twice: 2 * x.shape[0], made: aten.relu.default(x)}
    for node, value in values.items():
        node_meta.set_value(node, value)
    graph.output((made,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Segment(name="run_segment_0", read=lambda: module)


def in_compiler(segment: Segment) -> SegmentSizes:
    return SegmentSizes(segment, FakeTensorMode(shape_env=ShapeEnv()))


def test_segments_with_other_symbols_are_alike() -> None:
    env = SizeEnv()
    one, other, wider = sized(env, "args.0", 6), sized(env, "args.1", 9), sized(env, "args.2", 6, columns=5)
    assert one.symbols != other.symbols
    assert one.likeness == other.likeness != wider.likeness


def test_arguments_are_the_same_expressions_of_new_symbols() -> None:
    segment = sized(SizeEnv(), "args.0", 6)
    x, count, twice = in_compiler(segment).inputs()
    assert x.shape[0].node.expr == count.node.expr
    assert twice.node.expr == 2 * count.node.expr
    assert (count.node.hint, twice.node.hint) == (6, 12)
    assert count.node.shape_env is not segment.symbols
    assert x.shape[1] == 4


def test_what_is_asked_becomes_a_condition_of_the_trace() -> None:
    env = SizeEnv()
    segment, longer = sized(env, "args.0", 6), sized(SizeEnv(), "args.0", 20)
    sizes = in_compiler(segment)
    assert bool(sizes.inputs()[2] <= 20)
    asked, conditions = sizes.asked(), SizeConditions(env)
    assert conditions.why_not((11,), (4, 1)) is None
    asked.require(segment)
    assert conditions.why_not((10,), (4, 1)) is None
    assert "args.0.shape[0]" in (conditions.why_not((11,), (4, 1)) or "")
    assert asked.hold(segment)
    assert not asked.hold(longer)


def test_a_size_that_has_to_be_a_number_is_told() -> None:
    sizes = in_compiler(sized(SizeEnv(), "args.0", 6))
    assert int(sizes.inputs()[1]) == 6
    with pytest.raises(NotForAllSizes, match="has to be 6"):
        sizes.asked()


def test_an_expression_that_has_to_be_a_number_is_told_and_multiples_are_conditions() -> None:
    sizes = in_compiler(sized(SizeEnv(), "args.0", 6))
    count = sizes.inputs()[1]
    assert count % 3 == 0
    assert len(sizes.asked().conditions) == 1
    assert count * count == 36
    with pytest.raises(NotForAllSizes, match="has to be"):
        sizes.asked()


@pytest.mark.parametrize("rows", [11, 20])
def test_what_counts_on_sizes_travels_to_processes_where_that_is_so(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor makes is `tests/behaviour/moving_sizes/test_inductor.py`'s; here it is a word."""
    segment, other = sized(SizeEnv(), "args.0", 6), sized(SizeEnv(), "args.3", rows)
    sizes = in_compiler(segment)
    assert bool(sizes.inputs()[1] < 12)
    here, there = SegmentCompiler(torch.device("cpu")), SegmentCompiler(torch.device("cpu"))
    here._compiled[segment.likeness], here._asked[segment.likeness] = "made", sizes.asked()  # type: ignore[assignment]
    monkeypatch.setattr(segment_compiler, "CompiledFxGraph", str)
    monkeypatch.setattr(segment_cache, "dumps", lambda compiled: compiled.encode())
    monkeypatch.setattr(segment_cache, "loads", lambda data, device: (data.decode(), len))
    data = here.dumps(segment)
    assert data is not None
    there.loads(other, data)
    assert there._compiled == ({other.likeness: "made"} if rows == 11 else {})
    if rows == 11:
        there.begin(other)
        conditions = SizeConditions(other_env(other))
        assert conditions.why_not((12,), (4, 1)) is not None
        assert conditions.why_not((9,), (4, 1)) is None


def other_env(segment: Segment) -> SizeEnv:
    value: Any = node_meta.value(next(iter(segment.graph.nodes)))
    env = value.fake_mode.shape_env
    assert isinstance(env, SizeEnv)
    return env
