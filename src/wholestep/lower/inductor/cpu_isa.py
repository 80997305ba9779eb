"""Which vector instructions the CPU and its compiler have, asked once per kind of CPU and not once per process.

Inductor compiles headers of torch and starts a process for every kind that the CPU may have. What it was answered can
be written down for another process, where all else of the question (setting up AMX, say) is done as ever.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

_answers: dict[str, bool] = {}
"""Digest of what was tried -> whether it can be compiled and run. Inductor, too, remembers that for the process."""
_check_build = VecISA.check_build
_lock = Lock()


def probe() -> None:
    """Has Inductor find out what the CPU can do. Takes seconds where nobody knows."""
    with _lock, _with_answers():
        pick_vec_isa()


def dump_answers() -> bytes:
    """What was answered in this process, for `load_answers` in another one."""
    return json.dumps(_answers, sort_keys=True).encode()


def load_answers(said: bytes) -> None:
    """Uses what `dump_answers` gave where the CPU, its compiler and torch are the same."""
    _answers.update(json.loads(said))
    probe()


@contextmanager
def _with_answers() -> Iterator[None]:
    VecISA.check_build = _answered  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        VecISA.check_build = _check_build  # type: ignore[method-assign]


def _answered(isa: VecISA, code: str) -> bool:
    tried = hashlib.sha256(f"{isa.build_arch_flags()}\n{code}".encode()).hexdigest()
    if tried not in _answers:
        _answers[tried] = bool(_check_build(isa, code))
    return _answers[tried]
