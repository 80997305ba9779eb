"""The work of a first call grows with the step and no faster: counted in calls of functions, so no clock decides."""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx

from wholestep.capture.capture import capture
from wholestep.cli.suite.workloads import autocast_step, draw_tokens
from wholestep.cli.workloads.reference_lm import LanguageModelSize, build
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.ir import graph_edit
from wholestep.ir.printer import plan_text
from wholestep.ir.program import MeshAxis, Program
from wholestep.lower.base import eager_backend
from wholestep.lower.inductor import segment_compiler
from wholestep.passes import pass_manager
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.place import strategies

LAYERS = (1, 2, 4)
MOST = 2.1
"""Four layers less two, over two less one: 2 where work is linear, 4 where it is quadratic."""


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """What `call` gives, and how many calls of functions it takes."""
    profile = cProfile.Profile()
    gc.disable()  # or what is freed by chance calls functions here
    try:
        result = profile.runcall(call)
    finally:
        gc.enable()
    return result, pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def first_call(layers: int, bucket_bytes: int = 1 << 12) -> dict[str, int]:
    """Function calls of each stage of a language model's training, as `wholestep bench` has it."""
    size = LanguageModelSize(num_layers=layers, width=16, num_heads=2, vocabulary=32, length=8, rows=1)
    model = build(size, torch.device("cpu"))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    args, axis = (model, opt, *draw_tokens(size, 0)), MeshAxis(name="data", size=4, group="counted")
    cost, found = CostModel.default("cpu+gloo"), {}
    captured, found["capture"] = counted(lambda: capture(autocast_step, args, {}))
    placed, found["place"] = counted(lambda: strategies.place(captured.program, DDP(), (axis,)))
    segments = partial(form_segments, compiles=segment_compiler.compiles, may_postpone=segment_compiler.may_follow)
    # Buckets of a size: the search for the best ones has a bound of its own on what it tries.
    passes = passes_of(cost=cost, bucket_bytes=bucket_bytes, lowering=[segments])
    planned, found["plan"] = counted(lambda: run_passes(placed, passes))
    _, found["text"] = counted(lambda: (plan_text(planned), eager_backend.lower(planned)))
    return found


def test_the_work_is_linear_in_the_layers() -> None:
    first_call(1)  # what is found once and kept
    one, two, four = map(first_call, LAYERS)
    growth = {stage: (four[stage] - two[stage]) / (two[stage] - one[stage]) for stage in one}
    assert {stage: round(times, 2) for stage, times in growth.items() if times > MOST} == {}


def test_arguments_that_editing_writes_are_linear_in_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing the items of a list one by one writes every reader of the list, as long as it is, once per item."""
    lengths: list[int] = []
    one_by_one, at_once = fx.Node.replace_all_uses_with, graph_edit.replace_nodes

    def count(replaced: Iterable[fx.Node]) -> None:
        readers = dict.fromkeys(user for old in replaced for user in old.users)
        lengths.extend(len(reader.all_input_nodes) for reader in readers)

    def replace_one(old: fx.Node, *args: Any, **kwargs: Any) -> Any:
        count([old])
        return one_by_one(old, *args, **kwargs)

    def replace_many(replaced: Mapping[fx.Node, fx.Node]) -> None:
        count(replaced)
        at_once(replaced)

    monkeypatch.setattr(fx.Node, "replace_all_uses_with", replace_one)
    monkeypatch.setattr(graph_edit, "replace_nodes", replace_many)

    def written(layers: int) -> int:
        lengths.clear()
        first_call(layers, bucket_bytes=1 << 30)  # each bucket takes its items from the optimizer's lists by itself
        return sum(lengths)

    one, two, four = map(written, LAYERS)
    assert two > one > 0
    assert (four - two) / (two - one) <= MOST


def test_no_graph_is_turned_into_python_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager backend writes its own text of the scheduled graph; nobody reads that of the others."""
    written: list[fx.GraphModule] = []
    recompile = fx.GraphModule.recompile
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda module: (written.append(module), recompile(module))[1])
    first_call(1)
    assert written == []


def test_programs_are_checked_behind_every_stage_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Program] = []
    for module in (strategies, pass_manager):
        verify = module.verify
        monkeypatch.setattr(module, "verify", lambda program, verify=verify: (checked.append(program), verify(program)))
    first_call(1)
    passes = len(passes_of(cost=CostModel.default("cpu+gloo"))) + 1  # that of the backend
    assert len(checked) == 1 + 1 + passes
