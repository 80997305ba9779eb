"""Pickles a function call for another process: by name, with hints where names do not suffice."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wholestep.errors import ConfigError


def dump_function(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """A call as bytes.

    Raises:
        ConfigError: the function or its arguments cannot be pickled; says what to do.
    """
    if not callable(fn):
        raise ConfigError(f"A function was wanted, got {fn!r} of type {type(fn).__name__}.")
    homes = {name: getattr(sys.modules.get(name), "__file__", None) for name in _home_modules(fn)}
    typed_in = "__main__" in homes and homes["__main__"] is None
    try:
        payload = _pickled_by_value(fn, args) if typed_in else pickle.dumps((fn, tuple(args)))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{getattr(fn, '__qualname__', fn)!r} or its arguments cannot be sent to another process: {error} "
            "Use a function defined at the top level of a module (no lambda, no function inside a function), and "
            "pass what it needs as arguments that pickle can handle."
        ) from error
    return pickle.dumps((homes, payload))


def _home_modules(fn: Any) -> Iterator[str]:
    """Names of the modules that a function, or a partial of functions, was defined in."""
    if isinstance(fn, functools.partial):
        for part in (fn.func, *fn.args):
            yield from _home_modules(part)
    elif callable(fn):
        yield getattr(fn, "__module__", None) or ""


def _pickled_by_value(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """For functions typed into a notebook or a console, which a new process cannot import."""
    try:
        import cloudpickle  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError(
            f"{getattr(fn, '__qualname__', fn)!r} was defined in a notebook or a console, where a new process cannot "
            "import it. Put it into a module (in a notebook: a cell that starts with %%writefile steps.py) and import "
            "it from there, or install cloudpickle."
        ) from None
    data: bytes = cloudpickle.dumps((fn, tuple(args)))
    return data


def load_function(message: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call that `dump_function` made bytes of, in another process.

    Raises:
        ConfigError: the function cannot be imported here.
    """
    homes, payload = pickle.loads(message)
    try:
        for module, file in homes.items():
            if file is not None and module not in sys.modules and _cannot_be_found(module):
                _load_from_file(module, file)
        fn, args = pickle.loads(payload)
    except Exception as error:
        raise ConfigError(
            f"A function of {', '.join(homes)}, or one of its arguments, cannot be loaded in a new process: {error}. "
            "Define it at the top level of a module that can be imported without side effects."
        ) from error
    return fn, args


def _load_from_file(module: str, file: str) -> None:
    """Test runners and runpy load files under names that no path leads to."""
    spec = importlib.util.spec_from_file_location(module, file)
    if spec is not None and spec.loader is not None:
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)


def _cannot_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True
