"""The page: what a compiled step tells about itself, its options, and how it is called."""

from __future__ import annotations

import copy
import gc
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
import wholestep.api.stages
from tests.unit.capture.steps import Blocks, differing, train, twins
from wholestep.api.cache.warm_start import StepCache
from wholestep.ir import graph_edit, node_meta, printer
from wholestep.ir.program import OutputKind, Program, Stage
from wholestep.lower.base.eager_backend import EagerBackend
from wholestep.runtime.distributed import nccl_connect
from wholestep.runtime.executable import Executable

FACTOR = 1.0


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks(depth=1, width=4, dropout=0.2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


def batch(rows: int = 3) -> Tensor:
    return torch.ones(rows, 4)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RAdam, torch.optim.SGD])
def test_a_default_device_is_not_taken_for_ours(optimizer: Any) -> None:
    """A call under it computes what it computes without: what the step makes by itself says where it belongs."""

    class Loop:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model, self.calls = Blocks(depth=1, width=4, dropout=0.2), 0
            self.opt = optimizer(self.model.parameters(), lr=0.1)

        def step(self, x: Tensor, factor: float) -> tuple[float, Tensor]:
            loss = self.model(x).square().mean() * math.cos(self.calls / 10) * factor
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            return loss.item(), loss.detach()

    eager, ours = Loop(), Loop()
    step = ws.compile(ours.step, backend="eager", fullgraph=True)
    for number in range(4):
        eager.calls = ours.calls = number
        torch.manual_seed(number)
        wanted = eager.step(batch(), 1 + number / 10)
        torch.manual_seed(number)
        x = batch()
        with torch.device("meta"):
            assert step(x, 1 + number / 10) == wanted
    assert differing(eager.model, ours.model) == []


def test_cache_info_counts_and_tells_why() -> None:
    model, opt = make()
    step = ws.compile(train)
    assert step.cache_info().traces == step.cache_info().hits == 0
    for rows in (3, 3, 2, 3, 2):
        step(model, opt, batch(rows))
    info = step.cache_info()
    assert (info.traces, info.hits) == (2, 3)
    assert info.reasons == ("argument 2 was float32[3, 4], is float32[2, 4]",)


def test_ranks_connect_while_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the plan, until when a step is likely to fail on one rank alone."""
    happened: list[str] = []

    def noted(name: str, of: Any, work: Any) -> None:
        monkeypatch.setattr(of, name, lambda *args, **kwargs: (happened.append(name), work(*args, **kwargs))[1])

    noted("run_passes", wholestep.api.stages, wholestep.api.stages.run_passes)
    noted("begin", nccl_connect, nccl_connect.begin)
    noted("lower", EagerBackend, EagerBackend.lower)
    ws.compile(scaled)(batch())
    assert happened == ["run_passes", "begin", "lower"]


def test_nothing_is_collected_until_a_first_call_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs live, and the collector would look at all of them again and again: its last turn comes after it."""
    happened: list[tuple[str, bool]] = []

    def noted(name: str, work: Any) -> Any:
        return lambda *args: (happened.append((name, gc.isenabled())), work(*args))[1]

    monkeypatch.setattr(StepCache, "store", noted("store", StepCache.store))
    monkeypatch.setattr(Executable, "__call__", noted("run", Executable.__call__))
    step = ws.compile(scaled)
    step(batch())
    assert happened == [("run", False), ("store", False)]
    assert gc.isenabled()
    step(batch())
    assert happened[2:] in ([("run", True)], [])  # the native way goes past it


def test_a_retrace_is_logged_in_one_line_that_names_the_change(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ws.compile(scaled)
    with caplog.at_level(logging.INFO, logger="wholestep"):
        step(batch())
        step(batch())
        assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
        monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
        assert step(batch())[0, 0] == 3
        step(batch())
    said = [one.getMessage() for one in caplog.records if one.name == "wholestep" and one.levelno >= logging.WARNING]
    assert said == [f"scaled is captured again: globals of {__name__}.FACTOR was 1.0, is 3.0"]


def test_too_many_retraces_list_their_reasons() -> None:
    step = ws.compile(scaled, max_retraces=1, fullgraph=True, dynamic=False)
    step(batch(1))
    step(batch(2))
    with pytest.raises(ws.RetraceLimitError, match=r"max_retraces=1") as raised:
        step(batch(3))
    assert "1. argument 0 was float32[1, 4], is float32[2, 4]" in str(raised.value)
    assert "2. argument 0 was" in str(raised.value)
    assert torch.equal(step(batch(1)), batch(1) * FACTOR)


@pytest.mark.parametrize("stage", list(Stage), ids=lambda stage: stage.value)
@pytest.mark.parametrize("comments", [True, False], ids=["comments", "plain"])
def test_every_stage_prints_as_python_that_runs_the_step(stage: Stage, comments: bool) -> None:
    eager, ours = twins(make)
    step = ws.compile(train)
    x = batch()
    step(*ours, x)
    eager[0].load_state_dict(ours[0].state_dict())
    eager[1].load_state_dict(copy.deepcopy(ours[1].state_dict()))
    program = step.program(stage)
    assert program.stage is stage
    state: dict[str, Any] = {name: param.detach().clone() for name, param in ours[0].named_parameters()}
    for name, param in ours[0].named_parameters():
        state |= {f"opt.{key}.{name}": held.clone() for key, held in ours[1].state[param].items()}
    state["args.0"], group = x, ours[1].param_groups[0]
    state |= {f"opt.groups.0.{key}": group[key] for key in ("lr", "eps", "weight_decay")}
    state |= {f"opt.groups.0.betas.{i}": beta for i, beta in enumerate(group["betas"])}
    inputs = [state[record.name] for record in program.inputs]
    namespace = printer.namespace(program)
    exec(printer.source(program, comments=comments), namespace)

    torch.manual_seed(8)
    want = train(*eager, x)
    torch.manual_seed(8)
    with torch.no_grad():
        results = namespace["step"](list(inputs))
    assert torch.equal(results[0], want)
    for output, result in zip(program.outputs, results, strict=True):
        if output.kind is OutputKind.WRITE and result is not None:  # None: the scheduled program wrote it itself
            inputs[output.target] = result  # type: ignore[index]
    values = dict(zip((record.name for record in program.inputs), inputs, strict=True))
    for name, param in eager[0].named_parameters():
        assert torch.equal(values[name], param), name
        assert torch.equal(values[f"opt.exp_avg.{name}"], eager[1].state[param]["exp_avg"]), name
        assert torch.equal(values[f"opt.step.{name}"], eager[1].state[param]["step"]), name


def test_the_last_signature_used_is_looked_at() -> None:
    step = ws.compile(scaled, dynamic=False)
    for look in (step.program, step.explain, lambda: step.plan, lambda: step.graph):
        with pytest.raises(ws.ConfigError, match="scaled has not been called yet"):
            look()
    step(batch(2))
    step(batch(3))
    assert step.program().inputs[0].shape == (3, 4)
    step(batch(2))
    assert step.program().inputs[0].shape == (2, 4)
    assert step.graph is step.program().module


def negated(program: Program) -> Program:
    """A pass of the user: the first result changes its sign."""
    program = graph_edit.copy(program)
    first, *rest = program.results
    with program.graph.inserting_before(program.graph.output_node()):
        minus = graph_edit.emit(program.graph, torch.ops.aten.neg.default, first, like=first)
    graph_edit.set_results(program.graph, [minus, *rest])
    program.module.recompile()
    return program


@pytest.mark.parametrize("passes", [negated, [negated], (negated, negated)], ids=["one", "list", "two"])
def test_passes_of_the_user_run_and_are_recorded(passes: Any) -> None:
    step = ws.compile(lambda x: x + 1, passes=passes)
    number = 1 if callable(passes) else len(passes)
    assert torch.equal(step(batch()), (batch() + 1) * (-1) ** number)
    assert [record.name for record in step.program().history].count("negated") == number
    assert [line.name for line in step.explain().passes].count("negated") == number
    assert torch.ops.aten.neg.default not in {node.target for node in step.program(Stage.PLACED).graph.nodes}


def test_a_pass_that_breaks_the_program_is_named() -> None:
    def broken(program: Program) -> Program:
        program = graph_edit.copy(program)
        graph_edit.set_results(program.graph, [])
        return program

    with pytest.raises(ws.InternalError, match="0 results for 1 outputs"):
        ws.compile(scaled, passes=broken)(batch())


def test_a_failing_pass_leaves_no_optimizer_state() -> None:
    def failing(program: Program) -> Program:
        raise RuntimeError("my pass")

    model, opt = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="my pass"):
        ws.compile(train, passes=failing)(model, opt, batch())
    assert dict(opt.state) == {}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_plan_and_explain_tell_the_schedule_and_the_parameters() -> None:
    model, opt = make()
    step = ws.compile(train)
    step(model, opt, batch())
    lines = step.plan.splitlines()
    assert lines[0] == f"torch {torch.__version__}"
    assert lines[1].startswith("mesh ")
    assert "param blocks.0.up.weight float32[16, 4] trainable" in lines
    assert len([line for line in lines if line.startswith("param ")]) == len(list(model.parameters()))
    again = ws.compile(train)
    again(model, opt, batch())
    assert again.plan == step.plan
    told = step.explain()  # what else it holds: tests/unit/api/report/test_explain.py
    assert (told.step, told.strategy, told.num_ranks, told.collectives) == ("train", "no communication", 1, ())
    assert told.num_params == len(list(model.parameters()))


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no_function": (3, {}, "wants a function, got int"),
    "module": (nn.Linear(1, 1), {}, "got a module"),
    "strategy": (scaled, {"strategy": "ddp"}, "strategy"),
    "backend": (scaled, {"backend": "inductor2"}, "backend"),
    "mesh": (scaled, {"mesh": 2}, "DeviceMesh"),
    "passes": (scaled, {"passes": 3}, "passes"),
    "passes_in_list": (scaled, {"passes": [negated, 3]}, "passes"),
    "max_retraces": (scaled, {"max_retraces": -1}, "0 or more"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    fn, options, said = BAD[name]
    with pytest.raises(ws.ConfigError, match=said) as raised:
        ws.compile(fn, **options)
    assert isinstance(raised.value, ValueError)


def test_a_decorator_with_and_without_options_keeps_name_and_docs() -> None:
    @ws.compile(fullgraph=True)
    def bare(x: Tensor) -> Tensor:
        """Doc."""
        return x + 1

    @ws.compile(max_retraces=0, fullgraph=True)
    def with_options(x: Tensor) -> Tensor:
        return x + 2

    assert isinstance(bare, ws.CompiledStep)
    assert (bare.__name__, bare.__doc__, with_options.__name__) == ("bare", "Doc.", "with_options")
    assert bare(batch())[0, 0] == 2
    assert with_options(batch())[0, 0] == 3
    with pytest.raises(ws.RetraceLimitError):
        with_options(batch(1))


class Trainer:
    def __init__(self, factor: float) -> None:
        self.model, self.factor = nn.Linear(4, 1), factor

    @ws.compile
    def step(self, x: Tensor) -> Tensor:
        return (self.model(x) * self.factor).detach()


def test_a_method_is_compiled_per_instance() -> None:
    one, other = Trainer(1.0), Trainer(2.0)
    for _ in range(2):
        for trainer in (one, other):
            assert torch.equal(trainer.step(batch()), trainer.model(batch()) * trainer.factor)
    assert one.step is one.step
    assert one.step is not other.step
    for step in (one.step, other.step):
        assert (step.cache_info().traces, step.cache_info().hits) == (1, 1)
    assert (Trainer.step.cache_info().traces, Trainer.step.cache_info().hits) == (2, 2)


def test_a_method_of_a_class_without_hash_is_refused() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        @ws.compile
        def step(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ws.ConfigError, match="Make the class hashable"):
        Unhashable().step(batch())


def test_a_step_inside_a_step_is_part_of_its_graph() -> None:
    model, opt = make()
    twin, twin_opt = make()
    twin.load_state_dict(model.state_dict())
    inner = ws.compile(train)

    def outer(x: Tensor) -> Tensor:
        return inner(model, opt, x) + inner(model, opt, 2 * x)

    step = ws.compile(outer)
    for call in range(2):
        torch.manual_seed(call)
        came = step(batch())
        torch.manual_seed(call)
        assert torch.equal(came, train(twin, twin_opt, batch()) + train(twin, twin_opt, 2 * batch()))
        assert differing(model, twin) == []
    assert (step.cache_info().traces, inner.cache_info().traces) == (1, 0)
    updates = {output.name for output in step.program(Stage.CAPTURED).outputs if output.kind is OutputKind.WRITE}
    assert "head.weight" in updates


def test_the_graph_reads_data_by_name_not_by_place() -> None:
    step = ws.compile(lambda a, *, b: a - b)
    assert torch.equal(step(batch(), b=3 * batch()), -2 * batch())
    assert torch.equal(step(3 * batch(), b=batch()), 2 * batch())
    assert [record.name for record in step.program().inputs] == ["args.0", "args.1"]
    assert all(node_meta.tensor(node).shape == (3, 4) for node in step.program().placeholders)
