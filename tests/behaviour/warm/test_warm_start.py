"""A step that was captured before starts warm: nothing is traced, the bits are the same, what differs is told."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
import wholestep.runtime.buffer_sync
from wholestep.api.cache import artifact
from wholestep.capture.tracing.tracer import Tracer
from wholestep.errors import ArtifactError
from wholestep.lower.inductor_backend import InductorBackend
from wholestep.lower.program_compiler import ProgramCompiler
from wholestep.runtime.distributed import nccl_connect
from wholestep.runtime.distributed.rendezvous import Rendezvous
from wholestep.runtime.distributed.world import init

SCALE = 1.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own, switched on."""
    monkeypatch.setenv("WHOLESTEP_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return artifact.folder()


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y) * SCALE
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def things(width: int = 8, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """A model, its optimizer and a batch, the same values at every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))
    opt = torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})
    return model, opt, torch.randn(6, 4), torch.randint(0, 3, (6,))


def few_things() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """Likewise, with few kernels to compile."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=1e-1), torch.randn(6, 4), torch.randint(0, 3, (6,))


def losses(step: Callable[..., Tensor], context: Any, num_steps: int = 3) -> list[float]:
    """Of some steps with a rate that moves."""
    model, opt, x, y = context
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (n + 1))
    found = []
    for _ in range(num_steps):
        found.append(step(model, opt, x, y).item())
        schedule.step()
    return found


def state_of(context: Any) -> list[Tensor]:
    model, opt = context[:2]
    held = [value for state in opt.state.values() for value in state.values()]
    return [*model.state_dict().values(), *held]


def run(fn: Callable[..., Tensor] = train, context: Any = None, **options: Any) -> ws.CompiledStep:
    """A new compiled step that has made one call."""
    step = ws.compile(fn, **options)
    step(*(context or things()))
    return step


def refused(step: ws.CompiledStep, caplog: pytest.LogCaptureFixture) -> str:
    """Why a step was captured although one was saved."""
    assert step.cache_info().loaded == 0
    assert step.cache_info().traces == 1
    told = [record.getMessage() for record in caplog.records if " is captured: " in record.getMessage()]
    return told[-1]


def test_the_same_bits_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, captured, first = things(), things(), ws.compile(train)
    cold = losses(first, captured)
    torch.manual_seed(0)
    things()  # draws what was drawn before the steps
    assert losses(train, eager) == cold
    monkeypatch.setattr(Tracer, "run", lambda *_: pytest.fail("it was traced"))
    loaded, second = things(), ws.compile(train)
    assert losses(second, loaded) == cold
    for context in (captured, loaded):
        assert len(state_of(context)) == len(state_of(eager))
        assert all(map(torch.equal, state_of(context), state_of(eager)))
    info = second.cache_info()
    assert (info.traces, info.loaded, info.hits) == (0, 1, 2)
    assert "loaded from" in str(second.explain())
    assert second.explain().loaded_from
    assert not first.explain().loaded_from


def test_state_that_was_there_before_the_first_call() -> None:
    """A resumed training finds the step that a fresh one has saved."""
    context = things()
    losses(ws.compile(train), context)
    plain, warm = things(), things()
    for one in (plain, warm):
        one[0].load_state_dict(context[0].state_dict())
        one[1].load_state_dict(copy.deepcopy(context[1].state_dict()))
    torch.manual_seed(1)
    expected = losses(train, plain)
    torch.manual_seed(1)
    step = ws.compile(train)
    assert losses(step, warm) == expected
    assert step.cache_info().loaded == 1
    assert all(map(torch.equal, state_of(plain), state_of(warm)))


class Averaging:
    """Keeps an average, and a sum in the same tensor at first."""

    def __init__(self) -> None:
        self.model, self.opt, self.x, self.y = things()
        self.mean = self.total = torch.zeros(())

    def step(self) -> Tensor:
        loss = train(self.model, self.opt, self.x, self.y)
        self.mean, self.total = 0.9 * self.mean + 0.1 * loss, self.total + loss
        return loss


def test_tensors_that_are_replaced_are_new_ones_in_a_loaded_step_too() -> None:
    found, infos = [], []
    for wrap in (lambda fn: fn, ws.compile, ws.compile):
        trainer = Averaging()
        step, kept = wrap(trainer.step), list[Tensor]()
        torch.manual_seed(1)
        for _ in range(4):
            step()
            kept += [trainer.mean, trainer.total]
        found.append(kept)
        infos += [step.cache_info()] if isinstance(step, ws.CompiledStep) else []
    eager, cold, warm = found
    assert all(map(torch.equal, eager, cold))
    assert all(map(torch.equal, eager, warm))
    assert [(info.traces, info.loaded) for info in infos] == [(2, 0), (0, 2)]


class WithBatch(Averaging):
    """Is given its batch in an attribute."""

    def step(self) -> Tensor:
        return train(self.model, self.opt, self.x, self.y)


def test_a_step_whose_tensors_move_finds_both_of_its_traces() -> None:
    found, infos = [], []
    for wrap in (lambda fn: fn, ws.compile, ws.compile):
        trainer = WithBatch()
        step = wrap(trainer.step)
        torch.manual_seed(1)
        found.append([])
        for call in range(12):
            trainer.x = torch.full((6, 4), 0.1 * call)
            found[-1].append(step())
        infos += [step.cache_info()] if isinstance(step, ws.CompiledStep) else []
    eager, cold, warm = found
    assert eager == cold == warm
    assert [(info.traces, info.loaded) for info in infos] == [(2, 0), (0, 2)]


def test_a_global_of_the_name_of_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """``step``, as many a compiled step is called: the code of ``opt.step()`` names it."""
    for loaded in (0, 1):
        monkeypatch.setattr(sys.modules[__name__], "step", ws.compile(train), raising=False)
        step(*things())  # type: ignore[name-defined]  # noqa: F821
        assert step.cache_info().loaded == loaded  # type: ignore[name-defined]  # noqa: F821


def test_it_is_captured_again_where_its_guards_fail() -> None:
    run()
    context, step = things(), ws.compile(train)
    step(*context)
    context[0].eval()
    step(*context)
    assert step.cache_info().loaded == 1
    assert step.cache_info().traces == 1
    assert "training" in step.cache_info().reasons[0]


def within_a_weight(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    return model, opt, model[0].weight.detach()[: len(x)], y


CHANGES: dict[str, tuple[Callable[[], ws.CompiledStep], str]] = {
    "shape of the batch": (lambda: run(context=(*things()[:2], torch.randn(5, 4), torch.ones(5, dtype=torch.int64))),
                           "argument 2 was .*6, 4"),
    "width of the model": (lambda: run(context=things(width=9)), "weight was"),
    "a flag of the optimizer": (lambda: run(context=things(amsgrad=True)), "amsgrad was bool False, is bool True"),
    "a number that becomes a branch": (lambda: run(context=things(weight_decay=0.0)), "he condition at .* was True"),
    "an option of the strategy": (lambda: run(strategy=ws.DDP(hold_updates=True)), "strategy was"),
    "a batch that is a part of a weight": (lambda: run(context=within_a_weight(*things())), r"share was \[\], is \[\("),
    "an option of the passes": (lambda: run(passes=ws.default_passes(memory_budget=0.9)), "passes was"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_refused_by_name(what: str, caplog: pytest.LogCaptureFixture) -> None:
    run()
    change, reason = CHANGES[what]
    with caplog.at_level(logging.INFO, "wholestep"):
        told = refused(change(), caplog)
    assert re.search(reason, told), told


FACTORS = np.ones(3, dtype=np.float32)
GENERATOR = torch.Generator()


def with_array(x: Tensor) -> Tensor:
    return x * torch.from_numpy(FACTORS)


def with_generator(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=GENERATOR)


@pytest.mark.parametrize("fn", [with_array, with_generator])
def test_what_belongs_to_this_process_is_not_copied(fn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that the caller writes to, and a generator that goes on."""
    if fn is with_generator and torch.__version__ < "2.13":
        pytest.skip("torch traces no generator as an argument")
    monkeypatch.setattr(sys.modules[__name__], "FACTORS", FACTORS.copy())
    for _ in range(2):
        step, x = ws.compile(fn, backend="eager"), torch.ones(3)
        for factor in (1.0, 2.0):
            FACTORS[:] = factor
            GENERATOR.manual_seed(3)
            want = fn(x)
            GENERATOR.manual_seed(3)
            assert torch.equal(step(x), want)
        FACTORS[:] = 1.0


def test_a_global_constant(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run()
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    with caplog.at_level(logging.INFO, "wholestep"):
        assert "SCALE was float 1.0, is float 2.0" in refused(run(), caplog)


def test_a_switch_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    run()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with caplog.at_level(logging.INFO, "wholestep"):
            assert "flash attention was True, is False" in refused(run(), caplog)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_another_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run()
    monkeypatch.setattr(torch.version, "git_version", "another")
    with caplog.at_level(logging.INFO, "wholestep"):
        assert "the build: torch was" in refused(run(), caplog)


HELPER = """
import os
WEIGHT = {weight}
def scaled(loss):
    if os.environ.get("DOUBLED"):
        loss = loss * 2
    return loss * WEIGHT{more}
"""


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Writes and imports a module of the user's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(weight: float = 1.0, more: str = "") -> Any:
        path = tmp_path / "users_helper.py"
        path.write_text(HELPER.format(weight=weight, more=more))
        os.utime(path, (0, 0))  # as if it had been there before this process
        sys.modules.pop("users_helper", None)
        importlib.invalidate_caches()
        return importlib.import_module("users_helper")

    yield make
    sys.modules.pop("users_helper", None)


def with_helper(module: Any) -> Callable[..., Tensor]:
    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = module.scaled(nn.functional.cross_entropy(model(x), y))
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def test_a_line_of_a_helper_module(helper: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    assert run(with_helper(helper())).cache_info().traces == 1
    assert run(with_helper(helper())).cache_info().loaded == 1
    with caplog.at_level(logging.INFO, "wholestep"):
        assert "the code of scaled was" in refused(run(with_helper(helper(more=" + 1"))), caplog)


def test_a_constant_of_a_helper_module(helper: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    module = helper()
    run(with_helper(module))
    module.WEIGHT = 3.0  # the file is the same
    with caplog.at_level(logging.INFO, "wholestep"):
        assert "WEIGHT was float 1.0, is float 3.0" in refused(run(with_helper(module)), caplog)


def test_a_file_that_no_walk_would_reach(helper: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    module = helper()
    run()
    Path(module.__file__).write_text("print('something else')\n")
    with caplog.at_level(logging.INFO, "wholestep"):
        assert "users_helper.py was" in refused(run(), caplog)


def test_a_file_that_was_written_while_the_process_ran(helper: Callable[..., Any], cache: Path) -> None:
    """What was imported may be what it said before."""
    Path(helper().__file__).touch()
    run()
    assert not list(cache.glob("*"))


def test_a_variable_of_the_environment(
    helper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = helper()
    run(with_helper(module))
    monkeypatch.setenv("DOUBLED", "1")
    with caplog.at_level(logging.INFO, "wholestep"):
        assert "environment: DOUBLED was not set, is 1" in refused(run(with_helper(module)), caplog)


def test_a_damaged_file_of_the_cache_is_captured_anew(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    run()
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    with caplog.at_level(logging.INFO, "wholestep"):
        assert "is damaged" in refused(run(), caplog)
    assert run().cache_info().loaded == 1, "and written anew"


def test_a_file_that_others_can_write_to_is_not_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    run()
    (file,) = cache.iterdir()
    file.chmod(0o666)
    with caplog.at_level(logging.INFO, "wholestep"):
        assert "can be written to by others" in refused(run(), caplog)


def test_the_cache_can_be_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE", "0")
    run()
    assert not cache.exists()


def test_what_cannot_be_compared_is_not_kept(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = iter([1])

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train(model, opt, x, y) + (0 if odd is None else 1)

    with caplog.at_level(logging.INFO, "wholestep"):
        run(step)
    assert "odd holds a list_iterator, of which nothing can be seen" in caplog.text
    assert not list(cache.glob("*"))


def test_save_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, step = things(), ws.compile(train, backend="eager", max_retraces=3)
    cold = losses(step, context)
    path = tmp_path / "saved.step"
    step.save(path)
    monkeypatch.setenv("WHOLESTEP_CACHE", "0")
    with pytest.raises(ArtifactError, match="trusted=True"):
        ws.load(path)
    loaded = ws.load(path, trusted=True)
    again = things()
    assert losses(loaded, again) == cold
    assert loaded.cache_info().loaded == 1
    assert loaded.cache_info().traces == 0
    assert all(map(torch.equal, state_of(context), state_of(again)))


def test_a_file_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "saved.step"
    run().save(path)
    step = ws.load(path, train, trusted=True)
    before = things(width=9)
    with pytest.raises(ArtifactError, match="was saved for something else"):
        step(*before)
    assert not before[1].state, "no state of the optimizer is left behind"


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "saved.step"
    path.write_bytes(b"no step at all")
    with pytest.raises(ArtifactError, match="is no step"):
        ws.load(path, trusted=True)


def test_a_function_that_cannot_be_found(tmp_path: Path) -> None:
    def local(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train(model, opt, x, y)

    path = tmp_path / "saved.step"
    run(local).save(path)
    with pytest.raises(ArtifactError, match="Pass the function"):
        ws.load(path, trusted=True)
    step = ws.load(path, local, trusted=True)
    step(*things())
    assert step.cache_info().loaded == 1


def test_a_step_that_means_nothing_elsewhere_is_not_saved(tmp_path: Path) -> None:
    step = run(context=things())
    with pytest.raises(ArtifactError, match="cannot be written"):
        step.save(tmp_path / "no folder" / "saved.step")


SCRIPT = """
import sys, torch
from tests.behaviour import test_warm as t
import wholestep as ws
from wholestep.capture.tracing.tracer import Tracer
from wholestep.lower.foreach import multi_tensor
from wholestep.ir.segment import Segment
read = Segment.module
def fail(*_): raise AssertionError("it was traced, or nodes of a segment were asked for")
if sys.argv[1] == "warm":
    Tracer.run = multi_tensor.plan = fail
for backend in ("eager", "inductor"):
    # A fused optimizer: its operator has a twin, made while the step is captured, which another process has to make.
    scene, step = t.things(fused=True) if backend == "eager" else t.few_things(), ws.compile(t.train, backend=backend)
    Segment.module = property(fail) if sys.argv[1] == "warm" else read
    found = t.losses(step, scene)
    Segment.module = read
    print(found, [float(x.double().sum()).hex() for x in t.state_of(scene)])
    assert bool(step.explain().loaded_from) == (sys.argv[1] == "warm")
    assert any(isinstance(node.target, Segment) for node in step.graph.graph.nodes) == (backend == "inductor")
    print("loaded", step.cache_info().loaded)
print(" ".join(name for name in t.COMPILER if name in sys.modules))
"""
COMPILER = (
    "torch._inductor.compile_fx", "torch._inductor.select_algorithm", "torch._inductor.lowering",
    "torch._inductor.scheduler", "torch._inductor.ir", "torch._functorch.aot_autograd", "networkx",
)  # fmt: skip
"""What takes long to import, and what only a process needs that compiles something."""


def test_a_second_process_starts_warm_on_both_backends() -> None:
    def process(phase: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONHASHSEED": "1" if phase == "warm" else "2", "PYTHONWARNINGS": "ignore"}
        root = Path(__file__).parents[2]
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, phase], env=env, cwd=root, capture_output=True, text=True, check=False
        )

    cold, warm = process("cold"), process("warm")
    assert (cold.returncode, warm.returncode) == (0, 0), cold.stderr[-2000:] + warm.stderr[-2000:]
    told = [one.stdout.splitlines() for one in (cold, warm)]
    assert [lines.pop() for lines in told] == [" ".join(COMPILER), ""], "what was imported of the compiler"
    numbers, loaded = [lines[::2] for lines in told], [lines[1::2] for lines in told]
    assert loaded == [["loaded 0"] * 2, ["loaded 1"] * 2]
    assert numbers[0] == numbers[1]
    assert all("0x" in line for line in numbers[0])


def start(width: int) -> tuple[list[float], int, int]:
    """Three steps of a new compiled step on one rank; its own batch and cache."""
    world = init()
    model, opt, x, y = things(width=width)
    step = ws.compile(train)
    torch.manual_seed(world.rank)
    found = losses(step, (model, opt, x + world.rank, y))
    return found, step.cache_info().traces, step.cache_info().loaded


def own_cache(folder: str) -> Any:
    """While it is open, a cache of this rank's is switched on."""
    return patch.dict(os.environ, {"XDG_CACHE_HOME": f"{folder}/{init().rank}", "WHOLESTEP_CACHE": "1"})


def start_twice(folder: str, spoilt: int | None = None) -> list[Any]:
    with own_cache(folder):
        first = start(8)
        if spoilt == init().rank:
            for file in artifact.folder().iterdir():
                file.unlink()
        return [first, start(8)]


def test_two_ranks_start_warm(pool2: Any, tmp_path: Path) -> None:
    for cold, warm in pool2.run(start_twice, str(tmp_path)):
        assert cold[1:] == (1, 0)
        assert warm[1:] == (0, 1)
        assert cold[0] == warm[0]


def test_a_rank_without_a_file_keeps_the_other_from_loading(pool2: Any, tmp_path: Path) -> None:
    for cold, warm in pool2.run(start_twice, str(tmp_path), 1):
        assert cold[1:] == (1, 0)
        assert warm[1:] == (1, 0)
        assert cold[0] == warm[0]


def start_twice_with_room_for_one(folder: str) -> list[Any]:
    with patch.dict(os.environ, {"XDG_CACHE_HOME": folder, "WHOLESTEP_CACHE": "1"}), patch.object(artifact, "_KEPT", 1):
        return [start(8), start(8)]


def test_ranks_do_not_push_each_other_out_of_the_cache(pool2: Any, tmp_path: Path) -> None:
    """So many files are kept of each, however many ranks share a folder."""
    assert [warm[1:] for _, warm in pool2.run(start_twice_with_room_for_one, str(tmp_path))] == [(0, 1)] * 2
    assert len(list(tmp_path.glob("**/*train*"))) == 2


def waves(x: Tensor) -> Tensor:
    return x.cos().sin().sum(0) * 5


def order_of_two_starts(folder: str) -> list[list[str]]:
    """What a first call does once there is a plan, in order: of a step that is captured, and of one that is loaded."""
    done: list[tuple[Any, ...]] = []
    watched = [
        (nccl_connect, "begin"), (nccl_connect, "wait"), (ProgramCompiler, "loads"), (InductorBackend, "lower"),
        (Rendezvous, "agree"), (wholestep.runtime.buffer_sync, "broadcast_tensors"),
    ]  # fmt: skip

    def noted(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def noting(*args: Any) -> Any:
            done.append((name, *args))
            return real(*args)

        return patch.object(owner, name, noting)

    found = []
    with own_cache(folder), ExitStack() as watch:
        for one in watched:
            watch.enter_context(noted(*one))
        for loaded in (0, 1):
            done.clear()
            step = ws.compile(waves, backend="inductor", strategy=ws.DDP())
            step(torch.ones(4, 3))
            assert step.cache_info().loaded == loaded
            # Meetings at which rank 0 makes a choice agree on something else.
            found.append([name for name, *args in done if name != "agree" or step.plan in args])
    return found


def test_what_was_loaded_is_lowered_before_the_ranks_meet(pool2: Any, tmp_path: Path) -> None:
    """On all of them, as each has its kernels. Else the others look behind the meeting for what rank 0 has compiled.

    GPUs connect meanwhile, and have done so before anything is sent.
    """
    (first, warm), (second, also_warm) = pool2.run(order_of_two_starts, str(tmp_path))
    assert first == ["begin", "lower", "agree", "wait", "broadcast_tensors"]
    assert second == ["begin", "agree", "wait", "broadcast_tensors", "lower", "loads"]
    assert warm == also_warm == ["begin", "loads", "lower", "agree", "wait", "broadcast_tensors"]


class Counts(torch.optim.Optimizer):
    """Counts in Python, in every place that an optimizer has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(seen=0, mean=torch.zeros_like(param))
                state["seen"] += 2
                state["mean"].lerp_(param.grad, 0.1)
                param.sub_(state["mean"], alpha=group["lr"] / (group["k"] + self.calls * state["seen"]))


def counting() -> Any:
    model, _, x, y = things()
    return model, Counts(model.parameters()), x, y


def test_a_step_that_moves_numbers_starts_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of its programs: the one that makes the state, and the one that goes on from there."""

    def counts(opt: Any) -> Any:
        return opt.calls, opt.param_groups[0]["k"], [one["seen"] for one in opt.state.values()]

    def tensors(context: Any) -> list[Tensor]:
        return [*context[0].parameters(), *(one["mean"] for one in context[1].state.values())]

    wanted, came = counting(), counting()
    first, second = ws.compile(train), ws.compile(train)
    cold = losses(first, wanted)
    assert first.cache_info().traces == 2
    monkeypatch.setattr(Tracer, "run", lambda *_: pytest.fail("it was traced"))
    torch.manual_seed(0)
    things()  # draws what was drawn before the steps
    assert losses(second, came) == cold
    assert (second.cache_info().traces, second.cache_info().loaded) == (0, 2)
    assert counts(wanted[1]) == counts(came[1]) == (3, 3, [6] * 4)
    assert all(map(torch.equal, tensors(wanted), tensors(came)))


def test_another_number_to_begin_with_is_another_step(caplog: pytest.LogCaptureFixture) -> None:
    one, other = counting(), counting()
    other[1].calls = 5
    run(train, one)
    with caplog.at_level(logging.INFO, "wholestep"):
        assert "opt.calls was int 0, is int 5" in refused(run(train, other), caplog)


def test_a_step_that_calls_a_scheduler_is_not_saved(tmp_path: Path) -> None:
    model, opt, x, y = things()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, opt, x, y)
        scheduler.step()
        return loss

    compiled = ws.compile(step, backend="eager")
    compiled(x, y)
    with pytest.raises(ws.ArtifactError, match="it calls a scheduler"):
        compiled.save(tmp_path / "saved.step")
