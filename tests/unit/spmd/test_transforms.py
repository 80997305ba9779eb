"""GraphModuleTransformation on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.unit.spmd.steps import pair, train_step
from wholestep.errors import ConfigError
from wholestep.spmd import GraphModuleTransformation, compile


def test_calls_are_counted_in_rounds() -> None:
    transformation = GraphModuleTransformation(3)
    step, args = compile(gm_transformation=transformation)(train_step), pair()
    counts = []
    for number in range(6):
        step(*args, last_train_step=number == 4)
        counts.append(transformation.iteration)
    assert counts == [1, 2, 0, 1, 0, 1]


def test_the_program_is_written_before_and_after() -> None:
    transformation = GraphModuleTransformation(1, enable_graph_optimization=True, dump_graphs=True)
    step = compile(gm_transformation=transformation)(train_step)
    mod, opt, x = pair()
    step(mod, opt, x)
    assert transformation.folder is not None
    texts = {file.name: file.read_text(encoding="utf-8") for file in transformation.folder.iterdir()}
    assert sorted(texts) == ["after_transformation_rank0_1.py", "before_transformation_rank0_1.py"]
    before, after = texts["before_transformation_rank0_1.py"], texts["after_transformation_rank0_1.py"]
    assert "aten.detach" in before
    assert "aten.detach" not in after, "cleanup is one of the default passes"
    step(mod, opt, torch.ones(4, 3))
    assert len(list(transformation.folder.iterdir())) == 4


def test_nothing_is_written_unless_asked_for() -> None:
    transformation = GraphModuleTransformation(1)
    compile(gm_transformation=transformation)(train_step)(*pair())
    assert transformation.folder is None


@pytest.mark.parametrize("optimized", [False, True])
def test_default_passes_run_when_asked_for(optimized: bool) -> None:
    step = compile(gm_transformation=GraphModuleTransformation(1, enable_graph_optimization=optimized))(train_step)
    step(*pair())
    views = step._compiled_obj.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
    assert bool(views) is not optimized


def test_it_may_be_called_by_the_transformation_of_the_user() -> None:
    seen: list[int] = []
    inner = GraphModuleTransformation(5, enable_graph_optimization=True)

    def transformation(gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.expand.default):
            node.meta["seen"] = True
        new = inner(gm)
        seen.append(len(new.graph.nodes))
        return new

    step, args = compile(gm_transformation=transformation)(train_step), pair()
    step(*args)
    step(*args)
    assert len(seen) == 1
    assert inner.iteration == 2


def test_outside_of_a_step_it_says_so() -> None:
    with pytest.raises(ConfigError, match="outside of a compiled step"):
        GraphModuleTransformation(1)(fx.symbolic_trace(nn.ReLU()))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_iters": 0}, "1 or more"),
        ({"num_iters": 2.0}, "1 or more"),
        ({"num_iters": True}, "1 or more"),
        ({"num_iters": 1, "enable_inductor": True}, "enable_inductor=True.*torch's own kernels"),
        ({"num_iters": 1, "enable_cudagraphs": True}, "enable_cudagraphs=True.*torch's own kernels"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        GraphModuleTransformation(**options)
