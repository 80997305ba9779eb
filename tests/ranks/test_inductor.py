"""The Inductor backend on two ranks: the same training as eager DDP, compiled once."""

from __future__ import annotations

import io
import logging
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.unit.lower.inductor.test_segment_compiler import TOLERANCE, train, train_step
from wholestep.cost.cost_model import CostModel
from wholestep.ir.segment import Segment
from wholestep.lower.inductor import compile_fx, segment_compiler
from wholestep.lower.kernel_exchange import KernelExchange
from wholestep.runtime.distributed.blob_store import BlobStore


def _train() -> tuple[torch.Tensor, str, int]:
    """Losses, plan, and how often Inductor was called."""
    world = ws.init()
    step = ws.compile(train_step, backend="inductor", strategy=ws.DDP(bucket_bytes=800), fullgraph=True)
    with patch.object(compile_fx, "compile_fx_inner", wraps=compile_fx.compile_fx_inner) as called:
        losses, model, _ = train(step, rank=world.rank)
    wanted, eager, _ = train(train_step, rank=world.rank, wrap=DistributedDataParallel)
    torch.testing.assert_close(losses, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=TOLERANCE, atol=TOLERANCE)
    return losses, step.plan, called.call_count


def test_two_ranks_train_as_eager_ddp_does_and_one_compiles(pool2: Any) -> None:
    (first, plan, made), (second, _, asked) = pool2.run(_train, timeout_s=240.0)
    assert not torch.equal(first, second)  # each on its own batch
    assert plan.count("all_reduce") == 2
    assert made > 0
    assert asked == 0


def _alone() -> tuple[int, int, str]:
    """How often Inductor is called for a shape that all ranks have, and for one that this rank alone has; what rank 1
    said about it."""
    world, told = ws.init(), io.StringIO()
    step = ws.compile(lambda x: x.sin().cos().sum(0) * 3, backend="inductor", strategy=ws.DDP(), fullgraph=True)
    handler, log = logging.StreamHandler(told), logging.getLogger("wholestep")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with patch.object(compile_fx, "compile_fx_inner", wraps=compile_fx.compile_fx_inner) as called:
            step(torch.ones(8, 5))
            together = called.call_count
            step(torch.ones(8 + world.rank, 6))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return together, called.call_count - together, told.getvalue()


def test_what_no_other_rank_has_is_compiled_where_it_is_needed(pool2: Any) -> None:
    """Nobody waits for it: a rank whose batch is smaller has other segments."""
    (together, again, _), (none, own, told) = pool2.run(_alone)
    assert (together, again) == (1, 1)
    assert (none, own) == (0, 1)
    assert "this rank compiles for itself" not in told  # but for all


def _with_the_second_rank_first() -> tuple[int, int]:
    """How often Inductor is called in a training, and in one of the same plan, by another optimizer, whose kernels rank
    0 comes to after rank 1."""
    world, compiles = ws.init(), KernelExchange.compiles
    step = ws.compile(train_step, backend="inductor", strategy=ws.DDP(bucket_bytes=800), fullgraph=True)

    def late(exchange: KernelExchange, key: str) -> bool:
        end = time.monotonic() + 30
        while world.rank == 0 and not exchange._store._store.check([f"{key}/claims"]) and time.monotonic() < end:
            time.sleep(0.01)
        return compiles(exchange, key)

    with patch.object(compile_fx, "compile_fx_inner", wraps=compile_fx.compile_fx_inner) as called:
        train(step, rank=world.rank)
        before, plan = called.call_count, step.plan
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)).double()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with patch.object(KernelExchange, "compiles", late):
            step(model, opt, torch.ones(8, 6, dtype=torch.float64), torch.zeros(8, dtype=torch.int64))
        assert step.plan == plan
    return before, called.call_count - before


def test_a_plan_that_is_agreed_on_may_be_compiled_by_whoever_comes_first(pool2: Any) -> None:
    """Ranks do not meet before it. On GPUs the device of the one that compiles waited for a broadcast of the one
    that waited for its kernels."""
    (first, none), (waits, second) = pool2.run(_with_the_second_rank_first, timeout_s=240.0)
    assert (none, waits) == (0, 0)
    assert first > 0
    assert second > 0


def _with_a_blob_store_that(fails: str) -> tuple[int, str]:
    """How often Inductor is called where the shelf fails, and what was said."""
    ws.init()
    told = io.StringIO()
    handler, log = logging.StreamHandler(told), logging.getLogger("wholestep")
    step = ws.compile(lambda x: x.cos().sin().sum(0) * 5, backend="inductor", strategy=ws.DDP(), fullgraph=True)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with (
            patch.object(compile_fx, "compile_fx_inner", wraps=compile_fx.compile_fx_inner) as called,
            patch.object(BlobStore, fails, side_effect=OSError("the store is broken")),
        ):
            step(torch.ones(4, 3))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return called.call_count, told.getvalue()


@pytest.mark.parametrize("fails", ["put", "take"])
def test_every_rank_compiles_where_the_blob_store_fails(pool2: Any, fails: str) -> None:
    (first, of_rank_0), (second, of_rank_1) = pool2.run(_with_a_blob_store_that, fails)
    assert (first, second) == (1, 1)
    told = of_rank_0 if fails == "put" else of_rank_1
    assert "OSError: the store is broken" in told


def _one_cannot_compile() -> tuple[str, int]:
    world = ws.init()
    costs = replace(CostModel.default("cpu+gloo"), source="calibrated on this host")
    no_compiler = "there is no C++ compiler" if world.rank == 1 else ""
    with (
        patch("wholestep.api.stages.agreed_costs", lambda *_: costs),
        patch.object(segment_compiler, "why_not", lambda _: no_compiler),
    ):
        step = ws.compile(train_step, strategy=ws.DDP(), fullgraph=True)
        step(*small())
        backend = step.explain().backend
    return backend, sum(isinstance(node.target, Segment) for node in step.graph.graph.nodes)


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    return model, torch.optim.AdamW(model.parameters()), torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)


def test_no_rank_compiles_where_one_cannot(pool2: Any) -> None:
    told = "eager (auto: rank 1: there is no C++ compiler)"
    assert pool2.run(_one_cannot_compile) == [(told, 0)] * 2
