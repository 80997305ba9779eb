"""Checkpoints on one process: what is saved, what comes back, and what is refused before anything has changed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

import wholestep as ws
from wholestep.runtime.checkpoint.storage import Writer


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.4), nn.BatchNorm1d(5), nn.Linear(5, 3))


def step_of(model: nn.Module, opt: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def compiled(function: Callable[..., Any] = step_of) -> ws.CompiledStep:
    return ws.compile(function, backend="eager", fullgraph=True)


X = torch.linspace(-1, 1, 24).view(6, 4)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "tensor rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)),
    "tensor betas": lambda params: torch.optim.Adam(params, betas=(torch.tensor(0.9), torch.tensor(0.99))),  # type: ignore[arg-type]
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def state_of(model: nn.Module, *opts: Any) -> list[dict[str, Any]]:
    return [copy.deepcopy(one.state_dict()) for one in (model, *opts)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on(tmp_path: Path, name: str) -> None:
    """Between calls, without a capture, and in a training that has not run."""
    model, step = net(), compiled()
    opt = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        step(model, opt, X)
    saved = state_of(model, opt)
    ws.save_checkpoint(tmp_path / "run", model, opt, step)
    want, traces = [float(step(model, opt, X)) for _ in range(3)], step.cache_info().traces
    ws.load_checkpoint(tmp_path / "run", model, opt, step)
    assert equal(saved, state_of(model, opt))
    assert [float(step(model, opt, X)) for _ in range(3)] == want
    assert step.cache_info().traces == traces
    assert step.calls == 6

    other, other_step = net(1), compiled()
    other_opt = OPTIMIZERS[name](other.parameters())
    ws.load_checkpoint(tmp_path / "run", other, other_opt, other_step)
    assert equal(saved, state_of(other, other_opt))
    assert [float(other_step(other, other_opt, X)) for _ in range(3)] == want
    assert other_step.calls == 6


def test_a_save_changes_nothing(tmp_path: Path) -> None:
    """torch's get_optimizer_state_dict steps an optimizer without state; a first step after a save is a first step."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = state_of(model, opt)
    ws.save_checkpoint(tmp_path / "run", model, opt)
    assert equal(before, state_of(model, opt))
    assert opt.state == {}
    assert all(param.grad is None for param in model.parameters())
    ws.load_checkpoint(tmp_path / "run", model, opt)
    assert equal(before, state_of(model, opt))


def test_names_are_those_of_torch(tmp_path: Path) -> None:
    """So that torch alone reads what we save."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_of(model, opt, X)
    ws.save_checkpoint(tmp_path / "run", model, opt)
    want = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, opt)}
    want = copy.deepcopy(want)
    step_of(model, opt, X)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, opt)}
    dcp.load(state, checkpoint_id=tmp_path / "run")
    assert equal(want, state)


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    model = net()
    wrapped = torch.compile(model)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_of(model, opt, X)
    saved = state_of(model, opt)
    ws.save_checkpoint(tmp_path / "run", wrapped, opt)  # type: ignore[arg-type]
    step_of(model, opt, X)
    ws.load_checkpoint(tmp_path / "run", model, opt)
    assert equal(saved, state_of(model, opt))


@pytest.mark.parametrize("form", ["dict", "list"])
def test_several_models_and_optimizers(tmp_path: Path, form: str) -> None:
    models = {"generator": net(), "critic": net(1)}
    opts = {
        "slow": torch.optim.SGD(models["generator"].parameters(), lr=0.1, momentum=0.9),
        "fast": torch.optim.AdamW(models["critic"].parameters(), lr=0.2),
    }
    for model, opt in zip(models.values(), opts.values(), strict=True):
        step_of(model, opt, X)
    given: Any = (models, opts) if form == "dict" else ([*models.values()], tuple(opts.values()))
    saved = [state_of(*pair) for pair in zip(models.values(), opts.values(), strict=True)]
    ws.save_checkpoint(tmp_path / "run", *given)
    for model, opt in zip(models.values(), opts.values(), strict=True):
        step_of(model, opt, X)
    ws.load_checkpoint(tmp_path / "run", *given)
    assert equal(saved, [state_of(*pair) for pair in zip(models.values(), opts.values(), strict=True)])


def test_one_optimizer_of_two_models(tmp_path: Path) -> None:
    models = {"actor": net(), "critic": net(1)}
    opt = torch.optim.AdamW([*models["actor"].parameters(), *models["critic"].parameters()], lr=0.1)
    for model in models.values():
        step_of(model, opt, X)
    saved = state_of(*models.values(), opt)
    ws.save_checkpoint(tmp_path / "run", models, opt)
    step_of(models["actor"], opt, X)
    ws.load_checkpoint(tmp_path / "run", models, opt)
    assert equal(saved, state_of(*models.values(), opt))


def test_schedulers_and_scalers_are_extra(tmp_path: Path) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(opt, [1, 3], 0.5)  # its state counts by whole numbers
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # its numbers are made then
    extra = {"scheduler": scheduler, "scaler": scaler}
    for _ in range(2):
        opt.step()
        scheduler.step()
    saved = [copy.deepcopy(one.state_dict()) for one in extra.values()]
    ws.save_checkpoint(tmp_path / "run", model, opt, extra=extra)
    rates = []
    for _ in range(3):
        opt.step()
        scheduler.step()
        rates.append(opt.param_groups[0]["lr"])
    scaler.update(2.0)
    ws.load_checkpoint(tmp_path / "run", model, opt, extra=extra)
    assert [one.state_dict() for one in extra.values()] == saved
    assert type(scheduler.state_dict()["milestones"]) is type(saved[0]["milestones"])
    for want in rates:
        opt.step()
        scheduler.step()
        assert opt.param_groups[0]["lr"] == want


@pytest.mark.parametrize("may_go_live", [True])
def test_a_live_step_goes_on(tmp_path: Path, may_go_live: bool) -> None:
    def talks(model: nn.Module, opt: Optimizer, x: Tensor) -> float:
        return float(step_of(model, opt, x))

    model, step = net(), ws.compile(talks, backend="eager")
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, opt, X)
    ws.save_checkpoint(tmp_path / "run", model, opt, step)
    want = [step(model, opt, X) for _ in range(2)]
    other, other_step = net(1), ws.compile(talks, backend="eager")
    other_opt = torch.optim.AdamW(other.parameters(), lr=0.1)
    ws.load_checkpoint(tmp_path / "run", other, other_opt, other_step)
    assert other_step.calls == 3
    assert [other_step(other, other_opt, X) for _ in range(2)] == want
    assert other_step.calls == step.calls == 5


def test_state_keeps_its_type(tmp_path: Path) -> None:
    """torch casts state that an optimizer loads to the type of the parameter; the optimizer may want another one."""

    class Precise(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in (param for group in self.param_groups for param in group["params"]):
                self.state[param].setdefault("sum", torch.full(param.shape, 1 / 3))

    model = net().bfloat16()
    opt = Precise(model.parameters(), lr=0.1)
    opt.step()
    ws.save_checkpoint(tmp_path / "run", model, opt)
    for known in (True, False):
        other = net(1).bfloat16()
        other_opt = Precise(other.parameters(), lr=0.1)
        if known:
            other_opt.step()
        ws.load_checkpoint(tmp_path / "run", other, other_opt)
        assert equal(opt.state_dict()["state"], other_opt.state_dict()["state"])


class Trainer:
    @ws.compile(backend="eager", fullgraph=True)
    def step(self, model: nn.Module, opt: Optimizer, x: Tensor) -> Tensor:
        return step_of(model, opt, x)


def refused(path: Path, match: str, model: Any, opt: Any = None, step: Any = None, **options: Any) -> None:
    """Says what is wrong, and has changed nothing."""
    things = [one for one in (model, opt) if hasattr(one, "state_dict")]
    before = [copy.deepcopy(one.state_dict()) for one in things]
    with pytest.raises(ws.WholestepError, match=match):
        ws.load_checkpoint(path, model, opt, step, **options)
    assert equal(before, [one.state_dict() for one in things])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_of(model, opt, X)
    ws.save_checkpoint(path, model, opt)
    step_of(model, opt, X)
    refused(path, r"model\.0\.weight is \[6, 4\] here and \[5, 4\] in the checkpoint", nn.Sequential(nn.Linear(4, 6)))
    refused(path, r"model\.3\.bias is only in the checkpoint", net()[:3])  # type: ignore[index]
    refused(path, r"model\.4\.weight is only here", nn.Sequential(*net(), nn.Linear(3, 3)))  # type: ignore[misc]
    refused(path, r"model\.0\.0\.bias is only here", [net()])
    two = torch.optim.AdamW([{"params": net()[0].parameters()}], lr=0.1)  # type: ignore[index]
    refused(path, r"holds a parameter of shape \[5, 4\] in group 0 that no model has", model, two)
    first, last = [*model.parameters()][:1], [*model.parameters()][1:]
    groups = torch.optim.AdamW([{"params": last}, {"params": first}], lr=0.1)
    refused(path, r"AdamW has 2 parameter groups, and in the checkpoint 1", model, groups)
    refused(path, r"does not hold the parameters .*0\.weight only there", model, torch.optim.SGD(last, lr=0.1))
    refused(path, "nothing of step was saved", model, opt, compiled())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    refused(path, "nothing of extra rates was saved", model, opt, extra={"rates": scheduler})
    refused(path, "wants a step that wholestep.compile has made, got a function", model, opt, step_of)
    refused(path, r"extra\['x'\] is a int", model, opt, extra={"x": 1})
    refused(path, r"extra\['ema'\] is a Sequential .* Models and optimizers are", model, opt, extra={"ema": net()})
    trainer = Trainer()
    trainer.step(model, opt, X)
    ws.save_checkpoint(tmp_path / "method", model, opt, trainer.step)
    with pytest.raises(ws.ConfigError, match="the step of one instance"):
        ws.save_checkpoint(tmp_path / "method", model, opt, Trainer.step)
    refused(path, "model wants a Module, or several", 3)
    refused(path, "optimizer wants an Optimizer, or several .* got a Linear", model, [model[0]])  # type: ignore[index]
    with torch.device("meta"):
        on_meta = net()
    with pytest.raises(ws.ConfigError, match=r"on the meta device .*wholestep\.shard"):
        ws.load_checkpoint(path, on_meta)
    ws.save_checkpoint(path, model)
    refused(path, "nothing of optimizer was saved", model, opt)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    path, model = tmp_path / "run", net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step_of(model, opt, X)
    ws.save_checkpoint(path, model, opt)
    good = state_of(model, opt)
    step_of(model, opt, X)
    opt.state[model[0].weight]["seen"] = {3: 4}  # type: ignore[index]
    with pytest.raises(ws.CheckpointError, match=r"optimizer\.state\.0\.weight\.seen has the key 3, a int"):
        ws.save_checkpoint(path, model, opt)
    opt.state[model[0].weight]["seen"] = threading.Lock  # type: ignore[index]
    with pytest.raises(ws.CheckpointError, match=r"optimizer\.state\.0\.weight\.seen is a builtins"):
        ws.save_checkpoint(path, model, opt)
    del opt.state[model[0].weight]["seen"]  # type: ignore[index]
    ws.load_checkpoint(path, model, opt)
    assert equal(good, state_of(model, opt))
    ws.save_checkpoint(path, model, opt)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]  # what the refused ones had begun is gone


class HeldBack:
    """Writers wait, and then write or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write, self.fails = threading.Event(), False
        write_data = Writer.write_data

        def held_back(writer: Writer, *args: Any) -> Any:
            assert self.may_write.wait(30)
            if self.fails:
                raise OSError("the disk is full")
            return write_data(writer, *args)

        monkeypatch.setattr(Writer, "write_data", held_back)


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> HeldBack:
    return HeldBack(monkeypatch)


def test_a_second_save_waits_for_the_first(tmp_path: Path, held_back: HeldBack) -> None:
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_of(model, opt, X)
    saved = state_of(model, opt)
    first = ws.save_checkpoint(tmp_path / "first", model, opt, asynchronous=True)
    step_of(model, opt, X)
    assert not first.done()
    with pytest.raises(TimeoutError, match=r"first is not written after 0\.01 s"):
        first.result(timeout_s=0.01)
    threading.Timer(0.2, held_back.may_write.set).start()
    second = ws.save_checkpoint(tmp_path / "second", model, opt)
    assert first.done()
    assert second.done()
    assert second.result() == tmp_path / "second"
    ws.load_checkpoint(tmp_path / "first", model, opt)
    assert equal(saved, state_of(model, opt))


@pytest.mark.parametrize("where", ["result", "save", "load"])
def test_an_error_in_the_thread_surfaces_once(tmp_path: Path, held_back: HeldBack, where: str) -> None:
    path, model = tmp_path / "run", net()
    held_back.may_write.set()
    ws.save_checkpoint(path, model)
    saved = state_of(model)
    held_back.fails = True
    with torch.no_grad():
        model[0].weight.add_(1)  # type: ignore[index,operator,union-attr]
    pending = ws.save_checkpoint(path, model, asynchronous=True)
    asked: dict[str, Callable[[], Any]] = {
        "result": pending.result,
        "save": lambda: ws.save_checkpoint(path, model),
        "load": lambda: ws.load_checkpoint(path, model),
    }
    with pytest.raises(ws.CheckpointError, match=r"saving .*run failed on rank 0: OSError: the disk is full"):
        asked[where]()
    ws.load_checkpoint(path, model)
    assert equal(saved, state_of(model))


def test_an_error_of_a_save_is_one_at_once(tmp_path: Path, held_back: HeldBack) -> None:
    held_back.fails = True
    held_back.may_write.set()
    with pytest.raises(ws.CheckpointError, match="the disk is full"):
        ws.save_checkpoint(tmp_path / "run", net())


def test_ranks_that_do_not_share_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "run", net()
    ws.save_checkpoint(path, model)
    write_data = Writer.write_data

    def elsewhere(writer: Writer, *args: Any) -> Any:
        written = write_data(writer, *args)
        for file in tmp_path.glob(".run.*.saving/*.distcp"):
            file.unlink()
        return written

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write_data", elsewhere)
        with pytest.raises(ws.CheckpointError, match=r"do not share .*run: .*__0_0\.distcp is missing"):
            ws.save_checkpoint(path, model)
    ws.load_checkpoint(path, model)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ws.CheckpointError, match=r"cannot be written: (FileExists|NotADirectory)Error"):
        ws.save_checkpoint(tmp_path / "file" / "run", net())


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    ws.save_checkpoint(tmp_path / "run", model)
    from wholestep.runtime.checkpoint import save_and_load

    read = save_and_load.read
    writes = iter([True])

    def replaced(*args: Any, **options: Any) -> None:
        read(*args, **options)
        if next(writes, False):
            ws.save_checkpoint(tmp_path / "run", model)

    monkeypatch.setattr(save_and_load, "read", replaced)
    with pytest.raises(ws.CheckpointError, match="was replaced by a newer checkpoint while it was read"):
        ws.load_checkpoint(tmp_path / "run", model)
    ws.load_checkpoint(tmp_path / "run", model)
