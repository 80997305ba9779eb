"""A training that is resumed equals one that was not interrupted, bit for bit, its random numbers too."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import wholestep as ws
from tests.ranks.checkpoint.training import Setup, Training, differences, rank, training, values
from wholestep.runtime.checkpoint.storage import Writer

pytestmark = pytest.mark.ranks

DDP, ZERO, FSDP = (Setup(strategy, 2) for strategy in (ws.DDP(), ws.ZeRO(), ws.FSDP()))
HSDP = Setup(ws.FSDP(), 4, mesh=(2, 2))
POWERSGD = Setup(ws.DDP(compress=ws.PowerSGD(rank=1, start_iter=2, min_compression_rate=0.5)), 2)
SETUPS = {"ddp": DDP, "zero": ZERO, "fsdp": FSDP, "hsdp": HSDP, "powersgd": POWERSGD}


def scramble() -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(12345 + rank())


def went_on(one: Training, calls: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and values after calls that also draw from Python's and numpy's generators."""
    losses = [float(loss) for loss in one.run(calls, first=4)]
    return [*losses, random.random(), float(np.random.normal())], values(one)


def resumed(name: str, path: Path, asynchronous: bool) -> tuple[list[str], int, int]:
    """What differs from a training that goes on; captures and calls of the new one."""
    setup = SETUPS[name]
    one = training(setup, seed=3)
    one.run(4)
    np.random.normal()  # it keeps a second number back
    pending = one.save(path, asynchronous=asynchronous)
    losses, whole = went_on(one)
    pending.result()
    scramble()
    other = training(setup, seed=4)
    scramble()
    other.load(path)
    their_losses, their_whole = went_on(other)
    faults = differences(whole, their_whole)
    faults += [] if losses == their_losses else [f"{losses} {their_losses}"]
    return faults, other.step.cache_info().traces, other.step.calls


@pytest.mark.parametrize("name", SETUPS)
def test_equals_training_that_was_not_interrupted(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    pool = request.getfixturevalue(f"pool{SETUPS[name].ranks}")
    found = pool.run(resumed, name, tmp_path / "run", name in ("zero", "fsdp"))
    assert found == [([], 1, 7)] * SETUPS[name].ranks


def equal_on_all_ranks(names: list[str]) -> list[str]:
    """Without buffers: each rank has its own after a step, and all start the next one from rank 0's."""
    return [name for name in names if "running" not in name]


def written_while_training_goes_on(name: str, path: Path) -> tuple[list[str], list[bool], int]:
    """A checkpoint whose files are written once more calls have run; whether it was done by then."""
    one = training(SETUPS[name], seed=5)
    one.run(2)
    want, may_write, write_data = values(one), threading.Event(), Writer.write_data

    def held_back(self: Writer, *args: Any) -> Any:
        assert may_write.wait(60)
        return write_data(self, *args)

    Writer.write_data = held_back  # type: ignore[method-assign]
    try:
        pending = one.save(path, asynchronous=True)
        one.run(3)
        done = [pending.done()]
        may_write.set()
        one.save(path.with_name("second"))  # waits for the first
        done.append(pending.done())
    finally:
        Writer.write_data = write_data  # type: ignore[method-assign]
    other = training(SETUPS[name], seed=6)
    other.load(path)
    return equal_on_all_ranks(differences(want, values(other))), done, one.step.cache_info().traces


@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp"])
def test_a_thread_writes_what_was_there_when_it_was_asked(pool2: Any, tmp_path: Path, name: str) -> None:
    assert pool2.run(written_while_training_goes_on, name, tmp_path / "run") == [([], [False, True], 1)] * 2


def new_state_under_zero(path: Path) -> tuple[set[str], set[str]]:
    """Types of state that was loaded before the first call: with the step, and without."""
    one = training(ZERO)
    one.run(1)
    one.save(path)
    kinds = []
    for with_step in (True, False):
        other = training(ZERO)
        ws.load_checkpoint(path, other.model, other.opt, other.step if with_step else None)
        kinds.append({type(held["exp_avg"]).__name__ for param, held in other.opt.state.items() if param.dim()})
    return kinds[0], kinds[1]


def test_new_state_is_cut_while_it_is_read(pool2: Any, tmp_path: Path) -> None:
    assert pool2.run(new_state_under_zero, tmp_path / "run") == [({"DTensor"}, {"Tensor"})] * 2


def sharded_first(path: Path) -> tuple[set[str], set[str], list[str]]:
    """Types of parameters and state of a model that was sharded before the load, and what differs after a call."""
    one = training(FSDP)
    one.run(1)
    one.save(path)
    one.run(1)
    other = training(FSDP, seed=1)
    ws.shard(other.model, other.opt, strategy=ws.FSDP())
    other.load(path)
    params = [param for param in other.model.parameters() if param.dim() and param.requires_grad]
    kinds = {type(one).__name__ for one in params}, {type(other.opt.state[one]["exp_avg"]).__name__ for one in params}
    other.run(1)
    return *kinds, differences(values(one), values(other))


def test_new_state_of_a_model_that_is_sharded_first(pool2: Any, tmp_path: Path) -> None:
    assert pool2.run(sharded_first, tmp_path / "run") == [({"DTensor"}, {"DTensor"}, [])] * 2


def saved_compressed(path: Path) -> None:
    one = training(POWERSGD)
    one.run(4)
    one.save(path)


def compressed_on_others(path: Path) -> tuple[list[Any], int, bool]:
    """The memory of PowerSGD after a load on another number of ranks, calls, and whether it goes on."""
    one = training(Setup(POWERSGD.strategy, 4))
    one.run(3)
    one.load(path)
    memory = one.step.state_dict()
    goes_on = bool(one.run(1)[0].isfinite())
    errors = [tensor.abs().sum() > 0 for tensor in one.step.state_dict()["tensors"].values()]
    return [memory["calls"], len(memory["tensors"])], one.step.calls, goes_on and any(map(bool, errors))


def test_compression_begins_with_no_errors_on_another_number_of_ranks(pool2: Any, pool4: Any, tmp_path: Path) -> None:
    pool2.run(saved_compressed, tmp_path / "run")
    assert pool4.run(compressed_on_others, tmp_path / "run") == [([4, 0], 5, True)] * 4


def by_users(name: str, path: Path) -> tuple[list[str], list[str], list[str], int]:
    """Checkpoints that a user writes with torch alone, between calls; and what is in them."""
    one = training(SETUPS[name], seed=7)
    one.run(2)
    want = values(one)
    model, opt = get_state_dict(one.model, one.opt)
    dcp.save({"model": model, "optimizer": opt}, checkpoint_id=path)
    torch.save(one.model.state_dict(), path / f"model-{rank()}.pt")
    one.run(1)
    model, opt = get_state_dict(one.model, one.opt)
    state = {"model": model, "optimizer": opt}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(one.model, one.opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    by_torch = differences(want, values(one))
    one.run(1)
    one.model.load_state_dict(torch.load(path / f"model-{rank()}.pt", weights_only=False))
    loaded = values(one)
    by_file = [key for key in one.model.state_dict() if not torch.equal(want[key], loaded[key])]
    one.run(1)
    ws.load_checkpoint(path, one.model, one.opt)
    return *map(equal_on_all_ranks, (by_torch, by_file, differences(want, values(one)))), one.step.cache_info().traces


@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp", "hsdp"])
def test_users_save_and_load_with_torch_alone(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    """ws.load_checkpoint reads what torch has saved, too: the names are the same."""
    pool = request.getfixturevalue(f"pool{SETUPS[name].ranks}")
    for by_torch, by_file, by_us, traces in pool.run(by_users, name, tmp_path / "run"):
        assert by_torch == by_file == by_us == []
        assert traces <= 2  # torch puts new objects in the place of an optimizer's state
