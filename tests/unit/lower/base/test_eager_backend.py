"""The eager backend runs the text, gives memory back, and says where an error comes from."""

from __future__ import annotations

import gc
import linecache
import traceback

import pytest
import torch

from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.ir.test_serializer import with_segments
from wholestep.ir import node_meta, printer
from wholestep.lower.base import eager_backend


def test_results_come_in_the_order_of_the_records():
    program = builders.capture(lambda x, y: (x + y, 3, x.sum().item()), [torch.ones(2), torch.ones(2)])
    results = eager_backend.lower(program)([torch.ones(2), torch.full((2,), 2.0)])
    assert builders.same(results, (torch.full((2,), 3.0), 3, 2.0))


def test_results_that_are_none_at_the_end_are_not_returned():
    program = builders.capture(lambda x: (None, x + 1, None, None), [torch.ones(2)])
    results = eager_backend.lower(program)([torch.ones(2)])
    assert len(results) == 2
    assert results[0] is None
    assert torch.equal(results[1], torch.full((2,), 2.0))
    assert printer.source(program, comments=False).endswith("return (None, add, None, None,)\n")


def test_an_error_shows_the_generated_line_and_names_the_users_line():
    program = builders.capture(lambda w, x: (x @ w).relu(), [torch.randn(4, 3), torch.randn(2, 4)])
    (mm,) = program.graph.find_nodes(op="call_function", target=aten.mm.default)
    node_meta.set_origin(mm, node_meta.Origin(node_meta.Region.FORWARD, "layers.3", "train.py:12"))
    run = eager_backend.lower(program)
    with pytest.raises(RuntimeError) as caught:
        run([torch.randn(4, 3), torch.randn(2, 5)])
    (note,) = caught.value.__notes__
    assert (
        note
        == "while running mm (aten.mm.default) from train.py:12 in module layers.3, which gives float32[2, 3] (forward)"
    )
    assert "mm = aten_mm_default(arg1_1, arg0_1)" in "".join(traceback.format_exception(caught.value))


def test_an_error_outside_the_nodes_has_no_note():
    run = eager_backend.lower(builders.capture(lambda x: x + 1, [torch.ones(2)]))
    with pytest.raises(ValueError, match="unpack") as caught:
        run([torch.ones(2), torch.ones(2)])
    assert not hasattr(caught.value, "__notes__")


def test_the_text_goes_when_the_step_goes():
    before = set(linecache.cache)
    run = eager_backend.lower(builders.capture(lambda x: x + 1, [torch.ones(2)]))
    (name,) = (name for name in set(linecache.cache) - before if name.startswith("<wholestep step"))
    linecache.checkcache()
    assert name in linecache.cache
    del run
    gc.collect()
    assert name not in linecache.cache


def test_two_steps_do_not_share_constants():
    one, two = torch.ones(2), torch.zeros(2)
    runs = [
        eager_backend.lower(builders.capture(lambda x, c=constant: x + c, [torch.ones(2)])) for constant in (one, two)
    ]
    assert [float(run([torch.ones(2)])[0].sum()) for run in runs] == [4.0, 2.0]


def test_the_functions_of_a_program_share_its_text_and_no_segment(monkeypatch):
    program, compiled, texts = with_segments(), [], []
    render = printer.render
    monkeypatch.setattr(printer, "render", lambda *args, **options: texts.append(args) or render(*args, **options))

    def compile_segment(segment):
        compiled.append(segment.name)
        return lambda arguments: []

    def known():
        return {name for name in linecache.cache if name.startswith("<wholestep step")}

    lower, before = eager_backend.Lowering(compile_segment=compile_segment), known()
    first, second = lower(program), lower(program)
    assert len(texts) == len(known() - before) == 1
    assert len(compiled) == 2 * len(set(compiled))
    lower(with_segments())
    assert len(texts) == 2
    del lower, first
    gc.collect()
    assert len(known() - before) == 1  # that of the second
    del second
    gc.collect()
    assert not known() - before


def test_random_numbers_are_those_of_eager_code():
    def fn(x):
        return torch.nn.functional.dropout(x, 0.5, True) + torch.rand(3)

    run = eager_backend.lower(builders.capture(fn, [torch.ones(3)]))
    torch.manual_seed(3)
    expected = fn(torch.ones(3))
    torch.manual_seed(3)
    assert builders.same(run([torch.ones(3)])[0], expected)
