"""The contenders of one training on this rank: opened, timed in turn, profiled.

Note: what breaks a contender
    An error of a contender is its result, and the others go on: after every stage the ranks tell each other through the
    store whether it went well. Where one rank fails and the others wait for it in a collective, nobody can go on: it
    waits a little for them and ends the run. What was done by then is in the file.

Note: memory
    Contenders that take turns hold their state all at once, and a CUDA graph its own memory besides. A contender that
    would not fit any more waits until those before it are done and freed; it is then timed among fewer, and says so.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

import wholestep as ws
from wholestep.api.cache.warm_start import CACHE
from wholestep.api.report.records import Explanation
from wholestep.cli.common.options import threads_per_rank
from wholestep.cli.suite.contenders import OWN, Contender, Kind, prepare
from wholestep.cli.suite.kernel_profile import Breakdown, after_marker, breakdown, read_trace
from wholestep.cli.suite.rank_messages import RankMessages
from wholestep.cli.suite.results import LOSS_STEPS, ContenderResult, SuiteReport, breakdown_from, save
from wholestep.cli.suite.workloads import training
from wholestep.lower.kernels import copy_all_reduce

BLOCK_STEPS = 10
"""Steps of a contender before the next one takes over; each block is timed as a whole, after one step that is not."""
ALONE_BLOCKS = 2
"""Blocks that a contender runs right after it was opened: so there is a time even if the run ends early."""
PROFILED_STEPS = 5
PROFILER = "profiler"
"""The stage whose failure leaves a contender as it is."""
FIRST_OPEN_S = 20.0
"""What a contender is expected to take to be opened on a GPU, before one has been."""

_REUSES_CODE_OF = {Kind.LIMIT: Kind.OURS, Kind.OURS_BF16: Kind.OURS, Kind.DDP_COMPILED: Kind.COMPILED_DDP}
"""Contenders that run code, or kernels in the cache, of another one that was opened before: their first call is
shorter."""
_MEMORY_FACTOR = {Kind.COMPILED_DDP: 1.4, Kind.DDP_COMPILED: 1.4, Kind.FSDP: 0.7, Kind.HSDP: 0.9}
"""Memory that a contender may need, of what the largest so far did: buckets beside gradients, or state in shards."""


ENVIRONMENT = {
    # A profiler that lets go of the GPU and comes back breaks CUDA graphs that were captured before.
    "TEARDOWN_CUPTI": "0",
    "DISABLE_CUPTI_LAZY_REINIT": "1",
    # First calls are cold: no step of an earlier process.
    CACHE: "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the ranks are to do."""

    report: SuiteReport
    """Without contenders; ranks fill it."""
    earlier: tuple[SuiteReport, ...]
    """What stands in the file before it."""
    kinds: tuple[Kind, ...]
    num_steps: int
    """Steps that each contender is timed for, in blocks."""
    deadline: float
    """Of ``time.time``: no contender is begun that would not be done by then."""
    path: Path
    caches: Path
    """An empty folder for compilers."""


def on_rank(plan: Plan) -> None:
    """All contenders of `plan` on this rank; the results go into the file."""
    world = ws.init()
    os.environ.update(ENVIRONMENT)
    if world.device.type == "cpu":
        torch.set_num_threads(threads_per_rank(world.size))
    torch.set_float32_matmul_precision("high")
    # Contenders share the code of the model, and each of them needs an entry of its own.
    torch.compiler.config.recompile_limit = 256
    _Session(plan, world).run()


@dataclass(slots=True, kw_only=True)
class _Opened:
    contender: Contender
    times_ms: list[float]
    """Of blocks, per step."""


class _Session:
    def __init__(self, plan: Plan, world: ws.World) -> None:
        self.plan, self.world = plan, world
        self.training = training(plan.report.training)
        self.messages = RankMessages(world, deadline=plan.deadline + 60)
        self.results: dict[str, ContenderResult] = {}
        self.on_gpu = world.device.type == "cuda"
        self.status = Console(stderr=True).status("")
        first_s = FIRST_OPEN_S if self.on_gpu else 1.0
        self.longest_s = {True: first_s, False: first_s}
        """The longest that contenders of ours, and stock ones, took to be opened: their compilers have little in
        common."""
        self.largest_bytes = 0
        name = torch.cuda.get_device_name(world.device) if self.on_gpu else "cpu"
        self.report = replace(plan.report, device=name)

    def run(self) -> None:
        """Groups of contenders that fit beside each other, one after another."""
        if self.world.rank == 0:
            self.status.start()
        try:
            self._all_groups()
        finally:
            self.status.stop()

    def _all_groups(self) -> None:
        self._set_up_compiler()
        waiting, number = list(self.plan.kinds), 0
        while waiting:
            number += 1
            self._group(waiting, number)
            # Nothing of the contenders is held any more: their graphs go before the process group does.
            torch.compiler.reset()
            self._settle()

    def _group(self, waiting: list[Kind], number: int) -> None:
        """Opens, times and profiles as many contenders of `waiting` as fit together."""
        group: list[_Opened] = []
        while waiting and self._has_room(group, waiting[0]):
            if not self._has_time(group, waiting[0]):
                for kind in waiting:
                    self._note(kind, ContenderResult(outcome="not run", note="no time was left"))
                waiting.clear()
            elif (opened := self._open(waiting.pop(0))) is not None:
                group.append(opened)
        self._take_turns(group)
        alone, several = len(group) == 1, number > 1 or waiting
        for opened in group:
            how = "timed alone" if alone else f"group {number}, in turn with {len(group) - 1}" if several else ""
            self._note_times(opened, how)
        for opened in group:
            self._profile(opened)

    # ---- whether there is room and time for one more -------------------------------------------------------------

    def _has_room(self, group: list[_Opened], kind: Kind) -> bool:
        """Whether one more contender fits into the free memory of every rank."""
        if not self.on_gpu or not group:
            return True
        self._settle()
        free = min(self.messages.all(torch.cuda.mem_get_info(self.world.device)[0]))
        return bool(free > _MEMORY_FACTOR.get(kind, 1.1) * self.largest_bytes + 2 * 2**30)

    def _has_time(self, group: list[_Opened], kind: Kind) -> bool:
        """Whether one more contender and the turns of all would be done in time, by rank 0's clock."""
        turns_s = sum(1e-3 * statistics.median(one.times_ms) * (1.2 * self.plan.num_steps + 20) + 3 for one in group)
        left_s = self.plan.deadline - time.time()
        opening_s = self.longest_s[kind in OWN] * (0.4 if kind in _REUSES_CODE_OF else 1.2)
        return bool(self.messages.first(left_s > opening_s + 1.3 * turns_s))

    # ---- stages of a contender
    # ----------------------------------------------------------------------------------------

    def _attempt(self, kind: Kind, stage: str, work: Callable[[], Any]) -> tuple[Any, list[Any]] | None:
        """The result of `work` here and its payloads of all ranks; None where a rank failed."""
        # `work` gives both; a failure becomes the contender's result.
        value, why, outcome = None, "", "ok" if stage == PROFILER else "failed"
        try:
            value, payload = work()
        except Exception as error:
            payload, why = None, f"{stage}: {type(error).__name__}: {str(error).strip()[:400]}"
        replies = self.messages.all([why, payload], failed=bool(why))
        reasons = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(replies) if reason]
        if reasons:
            value = None
            self._settle()
            before = self.results.get(kind.name.lower(), ContenderResult())
            self._note(kind, replace(before, outcome=outcome, note=_joined(before.note, reasons[0])))
            return None
        return value, [reason for _, reason in replies]

    def _open(self, kind: Kind) -> _Opened | None:
        """Builds a contender, runs its first steps alone, and times a few."""
        self._begin(f"{kind.value}: the first call")
        self._use_cache(kind)
        self._settle()
        began = time.monotonic()
        done = self._attempt(kind, "first steps", lambda: self._first_steps(kind))
        took_s = self.messages.first(time.monotonic() - began)
        self.longest_s[kind in OWN] = max(self.longest_s[kind in OWN], took_s)
        if done is None:
            return None
        opened, payloads = done
        first_s, losses, peaks, reserved = ([payload[place] for payload in payloads] for place in range(4))
        self.largest_bytes = max(self.largest_bytes, *peaks, *reserved)
        note, predicted_ms, predicted_bytes = payloads[0][4:]
        if (other := _REUSES_CODE_OF.get(kind)) is not None and other.name.lower() in self.results:
            note = _joined(note, f"found what {other.value} had compiled")
        if kind is Kind.LIMIT:
            note = _joined(note, "its numbers are wrong")
        self._note(kind, ContenderResult(
            note=note, first_s=max(first_s), loss=statistics.fmean(losses),
            predicted_ms=predicted_ms, predicted_bytes=predicted_bytes if self.on_gpu else None,
            peak_bytes=max(peaks) if self.on_gpu else None, reserved_bytes=max(reserved) if self.on_gpu else None,
        ))  # fmt: skip
        self._note_times(opened, "timed alone")
        result = self.results[kind.name.lower()]
        self._say(
            f"{kind.value}: first call {result.first_s:.1f} s, {result.median_ms:.2f} ms alone, loss {result.loss:.4f}"
        )
        return opened  # type: ignore[no-any-return]

    def _first_steps(self, kind: Kind) -> tuple[_Opened, list[Any]]:
        before = self._memory()
        contender = prepare(kind, self.training, self.world)
        start = time.perf_counter()
        loss = float(contender.call())
        first_s = time.perf_counter() - start
        for _ in range(LOSS_STEPS - 1):
            loss = float(contender.call())
        peak, reserved = (now - then for now, then in zip(self._memory(), before, strict=True))
        times_ms = [self._block(contender, BLOCK_STEPS) for _ in range(ALONE_BLOCKS)]
        told = _told(contender)
        return _Opened(contender=contender, times_ms=times_ms), [first_s, loss, peak, reserved, *told]

    def _take_turns(self, group: list[_Opened]) -> None:
        """Times all contenders, a block of steps at a time, in an order that turns round."""
        if len(group) < 2 and self.plan.num_steps <= ALONE_BLOCKS * BLOCK_STEPS:
            return
        self._begin(f"{len(group)} contenders in turn")
        for opened in group:
            opened.times_ms = []
        for number in range(max(2, self.plan.num_steps // BLOCK_STEPS)):
            if number > 1 and not self.messages.first(time.time() < self.plan.deadline):
                break
            for opened in list(group):
                done = self._attempt(opened.contender.kind, "in turn", partial(self._turn, opened.contender))
                if done is None:
                    group.remove(opened)
                else:
                    opened.times_ms.append(done[0])
            group.reverse()

    def _turn(self, contender: Contender) -> tuple[float, None]:
        """ms of a step, over a block after one call that lets all ranks begin together."""
        contender.call()
        return self._block(contender, BLOCK_STEPS), None

    def _note_times(self, opened: _Opened, how: str) -> None:
        """Puts the times of all ranks into the result: a block takes as long as on its slowest rank."""
        by_rank = self.messages.all(opened.times_ms)
        slowest = sorted(max(block) for block in zip(*by_rank, strict=True))
        median_ms = statistics.median(slowest)
        before = self.results[opened.contender.kind.name.lower()]
        note = _joined(before.note.removesuffix("timed alone").removesuffix("; "), how)
        self._note(opened.contender.kind, replace(
            before, median_ms=median_ms, p10_ms=slowest[len(slowest) // 10], p90_ms=slowest[(9 * len(slowest)) // 10],
            tokens_per_s=1e3 * self.training.tokens * self.world.size / median_ms, note=note,
        ))  # fmt: skip

    def _profile(self, opened: _Opened) -> None:
        if not self.on_gpu:
            return
        kind = opened.contender.kind
        self._begin(f"{kind.value}: {PROFILED_STEPS} steps under the profiler")
        done = self._attempt(kind, PROFILER, lambda: self._profiled(opened.contender))
        if done is None:
            return
        by_rank = [breakdown_from(fields) for fields in done[1]]
        exposed = tuple(each.exposed_ms for each in by_rank if each is not None)
        before = self.results[kind.name.lower()]
        self._note(kind, replace(
            before, exposed_ms=max(exposed, default=None), exposed_ms_by_rank=exposed, breakdown=by_rank[0],
        ))  # fmt: skip

    def _profiled(self, contender: Contender) -> tuple[None, dict[str, Any] | None]:
        profile: Breakdown | None = None
        with TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                contender.call()  # here ranks meet again, whose profilers took different times to start
                torch.ones(8, dtype=torch.int32, device=self.world.device).bitwise_xor_(1)  # the marker
                for _ in range(PROFILED_STEPS):
                    contender.call()
                self._wait()
            profiler.export_chrome_trace(path)
            events = after_marker(read_trace(path))
            profile = breakdown(events, num_steps=PROFILED_STEPS, by_copies=_reduces_by_copies(contender))
        return None, None if profile is None else asdict(profile)

    # ---- small things --------------------------------------------------------------------------------------------

    def _block(self, contender: Contender, num_steps: int) -> float:
        """ms of a step, over a block of them. The device is idle before and after."""
        self._wait()
        start = time.perf_counter()
        for _ in range(num_steps):
            contender.call()
        self._wait()
        return 1e3 * (time.perf_counter() - start) / num_steps

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.world.device)

    def _settle(self) -> None:
        """Frees what nobody holds any more."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.world.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.world.device)

    def _memory(self) -> tuple[int, int]:
        """The most bytes allocated at once since `_settle`, and those held from the device now."""
        if not self.on_gpu:
            return 0, 0
        device = self.world.device
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)

    def _use_cache(self, kind: Kind) -> None:
        """Gives compilers an empty cache; contenders of ours share one, as they share kernels."""
        folder = self.plan.caches / ("ours" if kind in OWN else kind.name.lower())
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        os.environ.pop("TRITON_CACHE_DIR", None)  # Inductor puts it there, a folder per device

    def _set_up_compiler(self) -> None:
        """What a process needs once, such as the compiler's own processes, is no contender's time."""
        if all(kind is Kind.EAGER for kind in self.plan.kinds):
            return
        self._begin("setting up the compiler")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.plan.caches / "first")
        torch.compile(lambda x: torch.sin(x) * 2 + 1)(torch.ones(64, device=self.world.device))
        torch.compiler.reset()
        self.messages.all(None)

    def _note(self, kind: Kind, result: ContenderResult) -> None:
        """Takes a result down; rank 0 writes it to the file."""
        self.results[kind.name.lower()] = result
        self.report = replace(self.report, contenders=dict(self.results))
        if self.world.rank == 0:
            save(self.plan.path, [*self.plan.earlier, self.report])
            if result.outcome != "ok":
                self._say(f"{kind.value}: {result.outcome}, {result.note}")

    def _begin(self, stage: str) -> None:
        """Shows what is under way, on a terminal."""
        if self.world.rank == 0:
            self.status.update(f"{self.report.training}: {stage}")

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            self.status.console.print(f"{self.report.training}: {text}", highlight=False, markup=False, soft_wrap=True)


def _told(contender: Contender) -> tuple[str, float | None, int | None]:
    """The backend, the predicted step in ms and the predicted peak in bytes of a contender of ours."""
    told = None if contender.step is None else contender.step.explain()
    if not isinstance(told, Explanation):
        return "", None, None
    return told.backend, 1e-3 * told.predicted.step_us, told.peak.num_bytes


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _reduces_by_copies(contender: Contender) -> bool:
    if contender.step is None or contender.kind is Kind.LIMIT:
        return False
    return any(node.target in copy_all_reduce.STARTS for node in contender.step.graph.graph.nodes)
