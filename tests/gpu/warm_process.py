"""A process that trains a few steps and says what it took: ``python -m tests.gpu.warm_process RANKS [ALONE]``, JSON in
the last line, an entry per rank. Run by `tests.gpu.test_warm_start`; on a machine without GPUs it trains on the CPU.

Every rank has caches of Inductor and Triton of its own, below those that the environment names, so that none finds
there what another one has made. With ALONE none finds it in the store either, and every rank compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import sys
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from tests.harness import shared_gpu  # noqa: F401  its ranks share a GPU where that is asked for
from wholestep.lower.inductor import compile_fx
from wholestep.runtime.distributed.blob_store import BlobStore

STEPS = 5  # the third call is captured as a CUDA graph


class Net(nn.Module):
    """(rows, 512) -> (rows, 4000). Its reductions are long enough for several block sizes to be tried, its
    products in bfloat16 for several algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(512, 768), nn.LayerNorm(768), nn.Dropout(0.1))
        self.up, self.down = nn.Linear(768, 1536), nn.Linear(1536, 768)
        self.head = nn.Linear(768, 4000)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            hidden = self.down(F.gelu(self.up(self.body(x)), approximate="tanh"))
        return self.head(hidden.float())


def train_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def count_compilations() -> tuple[dict[str, int], list[str]]:
    """How often Inductor and Triton compile in this process from now on, and the names of the kernels."""
    found, names = {"inductor": 0, "triton": 0}, list[str]()
    compile_segment = compile_fx.compile_fx_inner

    def counted(*args: Any, **kwargs: Any) -> Any:
        found["inductor"] += 1
        return compile_segment(*args, **kwargs)

    compile_fx.compile_fx_inner = counted
    if torch.cuda.is_available():
        from triton.compiler.compiler import ASTSource

        make_ir = ASTSource.make_ir

        def counted_ir(*args: Any, **kwargs: Any) -> Any:
            found["triton"] += 1
            names.append(str(args[0].name))
            return make_ir(*args, **kwargs)

        ASTSource.make_ir = counted_ir
    return found, names


def work(alone: bool) -> dict[str, Any]:
    """Trains on this rank."""
    (compiled, names), world, told = count_compilations(), ws.init(), io.StringIO()
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[variable] = os.path.join(os.environ[variable], str(world.rank))
    log = logging.getLogger("wholestep")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(told))
    with patch.object(BlobStore, "take", lambda blob_store, key: None) if alone else contextlib.nullcontext():
        losses, times_s, state, step = train(world)
    return {
        "losses": losses, "state": state, "loaded": step.cache_info().loaded, "backend": step.explain().backend,
        "compiled": compiled, "kernels": names, "device": str(world.device), "times_s": times_s,
        "told": [line for line in told.getvalue().splitlines() if "compile" in line or "built" in line],
    }  # fmt: skip


def train(world: Any) -> tuple[list[float], list[float], str, ws.CompiledStep]:
    """Losses, seconds per step, a digest of what was trained, and the step."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    torch.manual_seed(world.rank)
    model = Net().to(world.device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = ws.compile(train_step, backend=ws.Inductor(copy_engines=False))  # whose addition is no kernel of a segment
    losses, times_s = [], []
    for number in range(STEPS):
        draw = torch.Generator().manual_seed(100 * number + world.rank)
        x, y = torch.randn(2048, 512, generator=draw), torch.randint(4000, (2048,), generator=draw)
        start = time.perf_counter()
        losses.append(step(model, opt, x.to(world.device), y.to(world.device)).item())
        times_s.append(time.perf_counter() - start)
    state = b"".join(value.detach().cpu().numpy().tobytes() for value in model.state_dict().values())
    return losses, times_s, hashlib.sha256(state).hexdigest(), step


def main(ranks: int, alone: bool) -> None:
    """Prints what every rank says."""
    print(json.dumps([work(alone)] if ranks == 1 else ws.run(work, ranks, alone)))


if __name__ == "__main__":
    from tests.gpu import warm_process

    warm_process.main(
        int(sys.argv[1]), sys.argv[2:] == ["ALONE"]
    )  # not that of __main__, which another process would not find
