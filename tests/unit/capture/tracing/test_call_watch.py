"""What happens outside of Python's objects is refused before it does; what computes is not."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import json
import logging
import math
import os
import queue
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit.capture.steps import captured
from wholestep.capture.effects.taken_locks import TakenLocks
from wholestep.capture.tracing.call_watch import OutsideEffect
from wholestep.errors import CaptureError

HERE = Path(__file__).name


def step_that(does: Callable[[], object]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        does()
        return x * 2

    return step


OUTSIDE: dict[str, Callable[[], object]] = {
    "print": lambda: print("seen"),
    "a stream": lambda: sys.stdout.write("seen"),
    "a clock": lambda: time.perf_counter(),
    "sleep": lambda: time.sleep(0.0),
    "a file": lambda: open(os.devnull),  # noqa: SIM115
    "a path": lambda: Path(os.devnull).exists(),
    "a folder": lambda: os.listdir("."),
    "the environment of the process": lambda: os.getpid(),
    "a process": lambda: subprocess.run(["true"], check=True),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_an_effect_outside_is_refused_at_its_line_before_it_happens(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    does = OUTSIDE[what]
    with pytest.raises(OutsideEffect, match=rf"at {HERE}:{does.__code__.co_firstlineno}, which does more"):
        captured(step_that(does), torch.ones(2))
    assert "seen" not in "".join(capsys.readouterr())


def test_an_effect_whose_refusal_is_caught_is_refused_all_the_same() -> None:
    def does() -> None:
        with suppress(Exception):
            print("seen")

    with pytest.raises(CaptureError, match=r"calls builtins\.print"):
        captured(step_that(does), torch.ones(2))


def test_an_effect_in_a_module_and_in_a_hook_is_refused() -> None:
    class Timed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.monotonic()
            return x

    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *args: print("seen"))
    for one in (nn.Sequential(Timed()), module):
        with pytest.raises(OutsideEffect, match=HERE):
            captured(one.forward if isinstance(one, nn.Sequential) else lambda x: module(x), torch.ones(2))


COMPUTING: dict[str, Callable[[], object]] = {
    "math": lambda: math.sqrt(2.0) + sum([1, 2]) + max(3, 4),
    "containers": lambda: sorted(Counter("abba").items()) + list(deque([1], maxlen=2)),
    "text": lambda: re.sub("a", "b", "abba").upper().split("b"),
    "copies": lambda: copy.deepcopy({"a": [1, 2]}),
    "json": lambda: json.loads(json.dumps({"a": 1})),
    "partial": lambda: functools.reduce(lambda a, b: a + b, [1, 2]),
    "numpy": lambda: np.linspace(0.0, 1.0, 3).mean(),
    "generators of its own": lambda: (random.Random(0).random(), np.random.default_rng(0).random()),
    "a future of torch": lambda: torch.futures.Future[int]().done(),
    "the rate of a schedule": lambda: torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([torch.zeros(1)], lr=0.1), 1
    ).get_last_lr(),
}


@pytest.mark.parametrize("what", COMPUTING)
def test_what_computes_is_not_refused(what: str) -> None:
    program = captured(step_that(COMPUTING[what]), torch.ones(2)).program
    assert any(node.target is torch.ops.aten.mul.Tensor for node in program.graph.nodes)


def test_what_is_told_of_collected_garbage_is_nothing_of_the_step() -> None:
    def tell(phase: str, info: dict[str, int]) -> None:
        time.perf_counter()

    number = gc.get_threshold()[0] * 2

    def makes_garbage() -> None:
        for _ in range(number):
            ring: list[Any] = []
            ring.append(ring)

    gc.callbacks.append(tell)
    try:
        assert captured(step_that(makes_garbage), torch.ones(2)).program
    finally:
        gc.callbacks.remove(tell)


def test_what_torch_logs_is_written_by_a_handler_of_the_users() -> None:
    """As it does of each number that it traces, to whoever asks for it."""

    class Writer(logging.Handler):
        lines = 0

        def emit(self, record: logging.LogRecord) -> None:
            sys.stdout.write(f"{record.name}\n")
            self.lines += record.name.startswith("torch")

    def step(x: Tensor) -> Tensor:
        return x * x.sum().item()

    def logs(x: Tensor) -> Tensor:
        logging.getLogger("users").debug("a line")
        return x * 2

    writer, loggers = Writer(), [logging.getLogger(name) for name in ("users", "torch.__trace")]
    before = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(writer)
        one.setLevel(logging.DEBUG)
    try:
        assert captured(step, torch.ones(2)).program
        assert writer.lines
        with pytest.raises(OutsideEffect):
            captured(logs, torch.ones(2))
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.removeHandler(writer)
            one.setLevel(level)


def test_a_profile_function_of_somebody_else_stays() -> None:
    def profile(*args: Any) -> None:
        pass

    sys.setprofile(profile)
    try:
        captured(step_that(lambda: None), torch.ones(2))
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    captured(step_that(lambda: None), torch.ones(2))
    assert sys.getprofile() is None


def test_an_import_is_done_by_a_trace_as_by_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for a module that is not there, and runs one that is, once in a process."""
    (tmp_path / "found_while_traced.py").write_text("import os\nFOLDER = os.listdir('.')\nFACTOR = 3.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def step(x: Tensor) -> Tensor:
        if importlib.util.find_spec("a_package_that_is_not_there") is not None:
            return x
        import found_while_traced

        return x * found_while_traced.FACTOR

    run = ws.compile(step, backend="eager", fullgraph=True)
    assert [run(torch.ones(2)).tolist() for _ in range(2)] == [[3.0, 3.0]] * 2
    sys.modules.pop("found_while_traced")


REACHES: dict[str, Callable[[], object]] = {
    "eval": lambda: eval("HERE"),
    "exec": lambda: exec("HERE"),
    "globals": lambda: globals()["HERE"],
    "under another name": lambda: (lambda look: look())(globals),
    "text": lambda: eval(compile("(lambda: globals())()", "<text>", "eval")),
}


@pytest.mark.parametrize("how", REACHES)
def test_what_no_code_names_is_refused_where_the_users_code_asks_for_it(how: str) -> None:
    with pytest.raises(OutsideEffect, match=rf"calls (eval|exec|globals) at {HERE}:\d+, which reaches what no code"):
        captured(step_that(REACHES[how]), torch.ones(2))


def test_code_that_names_it_and_does_not_run_makes_nothing_of_a_step() -> None:
    """Neither do libraries that run text of their own, as Python's own for a named tuple."""
    wanted = {"never": False}

    def reports() -> object:
        if wanted["never"]:
            return eval("HERE"), globals()
        return namedtuple("Pair", ["one", "other"])(1, 2)

    assert captured(step_that(reports), torch.ones(2)).program


def takes_and_gives_back(lock: Any) -> None:
    """Code that no ``try`` guards, as there is in `logging`."""
    lock.acquire()
    print("seen")
    lock.release()


def is_free(lock: Any) -> bool:
    """For other threads: that of a lock which this one holds may be taken again."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False) and not lock.release()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture(params=[threading.Lock, threading.RLock])
def library_lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that guards what a library alone knows, as `logging` has one."""
    lock = request.param()
    monkeypatch.setattr(json, "_lock", lock, raising=False)
    return lock


def test_a_refusal_in_the_midst_of_code_leaves_no_lock_taken(library_lock: Any) -> None:
    with pytest.raises(OutsideEffect, match=r"print"):
        captured(step_that(lambda: takes_and_gives_back(library_lock)), torch.ones(2))
    assert is_free(library_lock)


def test_a_step_that_keeps_a_lock_is_refused_and_gives_it_back(library_lock: Any) -> None:
    with pytest.raises(OutsideEffect, match="takes a lock and keeps it"):
        captured(step_that(library_lock.acquire), torch.ones(2))
    assert is_free(library_lock)


def opened_by_another_thread(lock: Any) -> threading.Thread:
    """Opens it soon, from the thread that has taken it."""
    taken = threading.Event()

    def take_and_open() -> None:
        with lock:
            taken.set()
            time.sleep(0.2)

    thread = threading.Thread(target=take_and_open)
    thread.start()
    taken.wait()
    return thread


def test_a_step_that_waits_for_a_lock_and_keeps_it_is_refused(library_lock: Any) -> None:
    """A signal: each call waits for its own."""
    thread = opened_by_another_thread(library_lock)
    with pytest.raises(OutsideEffect, match="waits for one that another thread opens"):
        captured(step_that(library_lock.acquire), torch.ones(2))
    thread.join()
    library_lock.release()
    assert is_free(library_lock)


def test_a_step_may_wait_its_turn_in_a_library(library_lock: Any) -> None:
    thread = opened_by_another_thread(library_lock)
    captured(step_that(lambda: library_lock.acquire() and library_lock.release()), torch.ones(2))
    thread.join()
    assert is_free(library_lock)


MEETINGS: dict[str, Callable[[], tuple[Callable[[], object], Callable[[], object]]]] = {
    "a queue": lambda: (lambda one: (one.get, lambda: list(one.queue)))(queue_of(1, 2)),
    "an event": lambda: (lambda one: (one.set, one.is_set))(threading.Event()),
    "a semaphore": lambda: (lambda one: (one.acquire, lambda: one._value))(threading.Semaphore(3)),
    "a lock": lambda: (lambda one: (one.acquire, one.locked))(threading.Lock()),
    "a lock around a list": lambda: (lambda one: (one.take, lambda: list(one.items)))(Shelf()),
}
"""What meets other threads, and how it stands."""


class Shelf:
    """Other threads put things on it."""

    def __init__(self) -> None:
        self.items, self.lock = [1, 2], threading.RLock()

    def take(self) -> int:
        with self.lock:
            return self.items.pop()


def queue_of(*items: Any) -> queue.Queue[Any]:
    found: queue.Queue[Any] = queue.Queue()
    for item in items:
        found.put(item)
    return found


@pytest.mark.parametrize("name", MEETINGS)
def test_a_step_that_meets_other_threads_is_refused_before_anything_is_taken(name: str) -> None:
    """Those go on meanwhile: what they put into a queue would be lost with what the step has taken out of it."""
    meets, stands = MEETINGS[name]()
    before, seen = stands(), []
    with pytest.raises(CaptureError, match=r"[lL]ock, which guards what another thread may change meanwhile"):
        captured(step_that(lambda: seen.append(meets())), torch.ones(2))
    assert stands() == before
    assert not seen


def test_a_lock_that_another_thread_has_opened_is_left_alone() -> None:
    lock, taken = threading.Lock(), TakenLocks()
    taken.note(lock.acquire)
    lock.acquire()
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    taken.give_back()
    assert is_free(lock)


def test_a_lock_that_was_taken_before_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.RLock()
    monkeypatch.setattr(json, "_lock", lock, raising=False)
    with lock:
        with pytest.raises(OutsideEffect, match=r"print"):
            captured(step_that(lambda: takes_and_gives_back(lock)), torch.ones(2))
        assert not is_free(lock)
    assert is_free(lock)


def test_a_step_may_take_a_lock_of_a_library_and_give_it_back(library_lock: Any) -> None:
    def does() -> None:
        with library_lock:
            pass
        library_lock.acquire()
        library_lock.release()

    captured(step_that(does), torch.ones(2))
    assert is_free(library_lock)


@pytest.fixture
def torch_warns_again() -> Iterator[None]:
    """Of what it warns of once in a process."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(always)


def test_what_torch_warns_of_in_cpp_is_shown_and_no_effect_of_the_step(torch_warns_again: None) -> None:
    """It has no frame of its own: the warning seems to be of the line that called the operator."""
    with pytest.warns(UserWarning, match=r"The use of `x.T`"):
        captured(lambda x: x.T * 2, torch.ones(2, 3, 4))


def test_a_warning_of_the_user_is_an_effect(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(OutsideEffect, match=r"_warnings.warn"):
        captured(step_that(lambda: warnings.warn("seen", stacklevel=1)), torch.ones(2))
    assert not [one for one in recwarn if "seen" in str(one.message)]
