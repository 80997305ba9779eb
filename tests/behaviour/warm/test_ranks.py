"""Ranks start warm together, or capture together."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
import wholestep.runtime.buffer_sync
from tests.behaviour.warm.steps import losses, things, train
from wholestep.api.cache import artifact
from wholestep.capture.wrappers import fully_shard_hooks
from wholestep.config import Strategy
from wholestep.lower.inductor_backend import InductorBackend
from wholestep.lower.program_compiler import ProgramCompiler
from wholestep.runtime.distributed import nccl_connect
from wholestep.runtime.distributed.rendezvous import Rendezvous
from wholestep.runtime.distributed.world import init

CONTRACT = sys.modules["torch.distributed._composable.contract"]  # in the package the name is that of a function
POLICY = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


def start(width: int, strategy: Strategy | None = None) -> tuple[list[float], int, int]:
    """Three steps of a new compiled step on one rank; its own batch and cache."""
    world = init()
    model, opt, x, y = things(width=width)
    step = ws.compile(train, strategy=strategy)
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


def start_under(folder: str, width: int, *strategies: Strategy) -> list[Any]:
    """Starts under one strategy after another. Torch's key for its own state of a module is another in each."""
    found = []
    with own_cache(folder):
        for number, strategy in enumerate(strategies):
            key = f"{fully_shard_hooks.STATE_KEY} {number}"
            with patch.object(fully_shard_hooks, "STATE_KEY", key), patch.object(CONTRACT, "STATE_KEY", key):
                found.append(start(width, strategy))
    return found


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("strategy", [ws.ZeRO(), ws.FSDP(), ws.FSDP(reshard_after_forward=True)], ids=repr)
def test_sharded_steps_start_warm(pool2: Any, tmp_path: Path, strategy: Strategy, width: int) -> None:
    """In 7 rows, and in parameters that are whole, a rank has its own rows: its number is in the graph."""
    for cold, warm in pool2.run(start_under, str(tmp_path), width, strategy, strategy):
        assert cold[1:] == (1, 0)
        assert warm[1:] == (0, 1)
        assert cold[0] == warm[0]


def start_wrapped(ignored: list[str], frozen: list[str] | None = None) -> tuple[list[float], int, int]:
    """Three steps with a DistributedDataParallel, of which some parameters stay local; `frozen`: when it was made."""
    world = init()
    module, _, x, y = things(width=8)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    named = dict(module.named_parameters())
    for name in frozen or ():
        named[name].requires_grad_(False)
    model = DistributedDataParallel(module)
    model.requires_grad_()
    step = ws.compile(train)
    torch.manual_seed(world.rank)
    found = losses(step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x + world.rank, y))
    return found, step.cache_info().traces, step.cache_info().loaded


def wrapped_starts(folder: str) -> list[Any]:
    with own_cache(folder):
        name = next(fqn for fqn, _ in things(width=8)[0].named_parameters())
        return [start_wrapped([]), start_wrapped([]), start_wrapped([name]), start_wrapped([], frozen=[name])]


def test_wrapped_steps_start_warm_under_the_same_settings(pool2: Any, tmp_path: Path) -> None:
    for cold, warm, *others in pool2.run(wrapped_starts, str(tmp_path)):
        assert cold[1:] == (1, 0)
        assert warm[1:] == (0, 1)
        assert cold[0] == warm[0]
        assert [other[1:] for other in others] == [(1, 0), (1, 0)]


def test_another_policy_of_types_is_another_step(pool2: Any, tmp_path: Path) -> None:
    ranks = pool2.run(start_under, str(tmp_path), 8, ws.FSDP(), ws.FSDP(mp_policy=POLICY))
    assert [mixed[1:] for _, mixed in ranks] == [(1, 0)] * 2
    # Three losses of one rank may be the same by chance.
    assert [plain[0] for plain, _ in ranks] != [mixed[0] for _, mixed in ranks]


def start_twice_with_room_for_one(folder: str) -> list[Any]:
    shared = {"XDG_CACHE_HOME": folder, "WHOLESTEP_CACHE": "1"}
    with patch.dict(os.environ, shared), patch.object(artifact, "_MAX_FILES", 1):
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
    """On all of them, as each has its kernels. Else the others look after the meeting for what rank 0 has compiled.

    GPUs connect meanwhile, and have done so before anything is sent.
    """
    (first, warm), (second, also_warm) = pool2.run(order_of_two_starts, str(tmp_path))
    assert first == ["begin", "lower", "agree", "wait", "broadcast_tensors"]
    assert second == ["begin", "agree", "lower", "loads", "wait", "broadcast_tensors"]
    assert warm == also_warm == ["begin", "loads", "lower", "agree", "wait", "broadcast_tensors"]
