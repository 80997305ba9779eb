"""Settings that live outside of what Python objects show: each with a value that a step sets and one of the user's."""

from __future__ import annotations

import decimal
import gc
import locale
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_LOCAL = threading.local()
_VARIABLE: ContextVar[int] = ContextVar("_VARIABLE", default=0)
_LOGGER = "a_logger_of_the_hidden_state_tests"


@dataclass(frozen=True)
class Setting:
    """How a setting is set and read. `own` is what the step sets, `other` what the user sets between calls."""

    set: Callable[[Any], object]
    get: Callable[[], Any]
    own: Any
    other: Any


def _filters(action: str) -> None:
    warnings.simplefilter(action, UserWarning)  # type: ignore[arg-type]


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def _zone(name: str) -> None:
    os.environ["TZ"] = name
    time.tzset()


def _ignore(number: int, frame: Any) -> None: ...


def _other_ignore(number: int, frame: Any) -> None: ...


def _hook(*args: Any) -> None: ...


def _other_hook(*args: Any) -> None: ...


def _precision(value: int) -> None:
    decimal.getcontext().prec = value


def _local(value: int) -> None:
    _LOCAL.value = value


def _python_seed(value: int) -> None:
    random.seed(value)


def _numpy_seed(value: int) -> None:
    np.random.seed(value)


def _torch_seed(value: int) -> None:
    torch.manual_seed(value)


def _hook_of_exceptions(hook: Any) -> None:
    sys.excepthook = hook


def _environment(value: str) -> None:
    os.environ["WHOLESTEP_HIDDEN_STATE"] = value


def _benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


def _mkldnn(value: bool) -> None:
    torch.backends.mkldnn.set_flags(value)


def _collector(value: bool) -> None:
    (gc.enable if value else gc.disable)()


def _local_decimal(value: int) -> None:
    decimal.setcontext(decimal.Context(prec=value))


HERE, ELSEWHERE = os.path.realpath(tempfile.gettempdir()), os.path.realpath("/")

SETTINGS: dict[str, Setting] = {
    "decimal_precision": Setting(_precision, lambda: decimal.getcontext().prec, 9, 12),
    "decimal_context": Setting(_local_decimal, lambda: decimal.getcontext().prec, 9, 12),
    "recursion_limit": Setting(sys.setrecursionlimit, sys.getrecursionlimit, 3456, 4567),
    "switch_interval": Setting(sys.setswitchinterval, sys.getswitchinterval, 0.25, 0.125),
    "digits_of_int": Setting(sys.set_int_max_str_digits, sys.get_int_max_str_digits, 5000, 6000),
    "hook_of_exceptions": Setting(_hook_of_exceptions, lambda: sys.excepthook, _hook, _other_hook),
    "warning_filters": Setting(_filters, lambda: warnings.filters[0][0], "ignore", "always"),
    "threads": Setting(torch.set_num_threads, torch.get_num_threads, 1, 2),
    "numpy_errors": Setting(lambda how: np.seterr(over=how), lambda: np.geterr()["over"], "ignore", "raise"),
    "numpy_print": Setting(
        lambda value: np.set_printoptions(precision=value), lambda: np.get_printoptions()["precision"], 3, 5
    ),
    "torch_print": Setting(
        lambda value: torch.set_printoptions(precision=value), lambda: torch._tensor_str.PRINT_OPTS.precision, 3, 5
    ),
    "level_of_a_logger": Setting(
        lambda level: logging.getLogger(_LOGGER).setLevel(level), lambda: logging.getLogger(_LOGGER).level, 10, 30
    ),
    "logging_disabled": Setting(logging.disable, lambda: logging.root.manager.disable, 10, 20),
    "attribute_of_a_thread": Setting(_local, lambda: _LOCAL.value, 1, 2),
    "context_variable": Setting(_VARIABLE.set, _VARIABLE.get, 1, 2),
    "collector_thresholds": Setting(gc.set_threshold, lambda: gc.get_threshold()[0], 800, 900),
    "collector": Setting(_collector, gc.isenabled, False, True),
    "locale": Setting(
        lambda name: locale.setlocale(locale.LC_NUMERIC, name),
        lambda: locale.setlocale(locale.LC_NUMERIC),
        "C",
        "POSIX",
    ),
    "environment": Setting(_environment, lambda: os.environ["WHOLESTEP_HIDDEN_STATE"], "a", "b"),
    "mask_of_files": Setting(os.umask, _umask, 0o22, 0o27),
    "folder": Setting(os.chdir, os.getcwd, HERE, ELSEWHERE),
    "python_seed": Setting(_python_seed, lambda: random.getstate()[1][:3], 3, 4),
    "numpy_seed": Setting(_numpy_seed, lambda: int(np.random.get_state()[1][0]), 3, 4),  # type: ignore[index]
    "torch_seed": Setting(_torch_seed, torch.initial_seed, 3, 4),
    "time_zone": Setting(_zone, lambda: time.tzname[0], "UTC", "EST"),
    "signal": Setting(
        lambda handler: signal.signal(signal.SIGUSR2, handler),
        lambda: signal.getsignal(signal.SIGUSR2),
        _ignore,
        _other_ignore,
    ),
    "cudnn_benchmark": Setting(_benchmark, lambda: torch.backends.cudnn.benchmark, True, False),
    "mkldnn": Setting(
        _mkldnn, torch.backends.mkldnn.is_available and (lambda: torch._C._get_mkldnn_enabled()), True, False
    ),
    "default_dtype": Setting(torch.set_default_dtype, torch.get_default_dtype, torch.float32, torch.float64),
    "deterministic": Setting(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True, False
    ),
    "grad_mode": Setting(torch.set_grad_enabled, torch.is_grad_enabled, True, False),
    "validation_of_distributions": Setting(
        torch.distributions.Distribution.set_default_validate_args,
        lambda: torch.distributions.Distribution._validate_args,
        True,
        False,
    ),
    "flush_denormal": Setting(torch.set_flush_denormal, lambda: float(torch.tensor([1e-39]) * 1.0), True, False),
    "matmul_precision": Setting(
        torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "high", "highest"
    ),
    "call_of_numpy_errors": Setting(np.seterrcall, np.geterrcall, _hook, _other_hook),
}
