"""The runner copies, checks, times and keeps what passes say."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

from tests.unit import builders
from tests.unit.builders import aten
from wholestep.errors import InternalError
from wholestep.ir import op_info, printer
from wholestep.passes.pass_manager import pass_name, run_passes


def program():
    return builders.without_gradients(builders.capture(lambda x: x.relu().sigmoid(), [torch.randn(3)]))


def drop_relu(one, *, note="dropped"):
    (relu,) = one.graph.find_nodes(op="call_function", target=aten.relu.default)
    relu.replace_all_uses_with(relu.args[0])
    one.graph.erase_node(relu)
    return one.with_notes(note, "because").with_notes("really")


def test_the_program_that_went_in_stays_as_it_was():
    before = program()
    text = printer.source(before)
    after = run_passes(before, [drop_relu])
    assert printer.source(before) == text
    assert builders.calls(after) == ["aten.sigmoid.default"]


def test_each_pass_leaves_one_record_with_its_notes():
    after = run_passes(program(), [partial(drop_relu, note="bound"), lambda one: one])
    first, second = after.history
    assert (first.name, first.notes) == ("drop_relu", ("bound", "because", "really"))
    assert first.num_nodes == len(after.graph.nodes)
    assert first.time_ms > 0
    assert second.notes == ()


def test_history_before_the_pipeline_is_kept():
    after = run_passes(run_passes(program(), [drop_relu]), [lambda one: one])
    assert [record.name for record in after.history] == ["drop_relu", "<lambda>"]


def test_a_pass_that_breaks_a_rule_is_named():
    def breaks(one):
        (relu,) = one.graph.find_nodes(op="call_function", target=aten.relu.default)
        relu.target = aten.relu_.default
        return one

    with pytest.raises(InternalError, match=r"after the pass breaks: .*writes in place"):
        run_passes(program(), [breaks])


def test_a_pass_that_changes_the_order_of_random_numbers_is_named():
    """Every mask would be that of another call, on all ranks alike, and nothing else would show it."""

    def swaps(one):
        first, second = (node for node in one.graph.nodes if node.op == "call_function" and op_info.draws(node))
        second.append(first)
        return one

    drawn = builders.without_gradients(
        builders.capture(lambda x: (torch.rand_like(x), torch.rand_like(x) + x), [torch.randn(3)])
    )
    run_passes(drawn, [lambda one: one])
    with pytest.raises(InternalError, match=r"after the pass swaps: .* draw random numbers and have changed places"):
        run_passes(drawn, [swaps])


def test_a_broken_program_is_refused_before_any_pass():
    broken = breaks_before = program()
    (relu,) = breaks_before.graph.find_nodes(op="call_function", target=aten.relu.default)
    relu.target = aten.relu_.default
    with pytest.raises(InternalError, match="writes in place"):
        run_passes(broken, [lambda one: pytest.fail("a pass ran")])


def test_the_log_has_a_line_a_pass(caplog):
    with caplog.at_level(logging.DEBUG, logger="wholestep.passes"):
        run_passes(program(), [drop_relu])
    (line,) = (record.getMessage() for record in caplog.records if record.name == "wholestep.passes")
    assert line.startswith("drop_relu: ")
    assert line.endswith("dropped; because; really")


def test_names_of_callables():
    class Mine:
        def __call__(self, one):
            return one

    assert [pass_name(one) for one in (drop_relu, partial(drop_relu), Mine())] == ["drop_relu", "drop_relu", "Mine"]
