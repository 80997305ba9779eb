"""What a tensor call does besides computing tensors of known shapes, seen while it runs."""

from __future__ import annotations

import logging
import random
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.capture.functionalize.version_counters import lists_counted, written_tensors

_of_fakes = logging.getLogger(FakeTensorMode.__module__)
_known_shapes: dict[Any, bool] = {}
"""By operator: whether shapes of its results follow from shapes of its arguments."""


class Observer(TorchDispatchMode):
    """Runs every operator of one call, and looks at what kind it is.

    A call can be recorded only if its results have shapes that are known before it runs. Whether they are is asked of
    the operator itself: it runs once more on fake tensors, which is what a capture would do with it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = False
        """Whether a value went to Python, or decided a shape."""
        self.drawn: dict[torch.Generator, None] = {}
        """The generators of which it has drawn random numbers."""
        self._operators = self._pointwise = 0

    @property
    def is_pointwise(self) -> bool:
        """Whether shapes of what it gives follow from those of tensors alone, and from no number.

        A call without any operator says nothing: ``x.flatten(1)`` gives `x` itself where there are two dims.
        """
        return 0 < self._operators == self._pointwise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._operators += 1
        self._pointwise += torch.Tag.pointwise in func.tags
        is_known = _has_known_shapes(func, args, kwargs)
        self.reads |= torch.Tag.data_dependent_output in func.tags or not is_known
        draws = torch.Tag.nondeterministic_seeded in func.tags
        result = (self._run_with_draws if draws else _run)(func, args, kwargs)
        _known_shapes.setdefault(func, is_known)  # not of a call that raises an error: its arguments may be wrong
        return result

    def _run_with_draws(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Looks which generators move: attention that drops out nothing moves none, whatever its operator may do."""
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Generator)]
        states = {one: one.get_state() for one in (*default_generators(), *given)}
        result = _run(func, args, kwargs)
        self.drawn.update(
            dict.fromkeys(one for one, state in states.items() if not torch.equal(one.get_state(), state))
        )
        return result


def default_generators() -> list[torch.Generator]:
    """Those of which is drawn where no generator is given."""
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    with lists_counted(func, written_tensors(func, args, kwargs)):
        return func(*args, **kwargs)


def _has_known_shapes(func: Any, args: Any, kwargs: Any) -> bool:
    if torch.Tag.dynamic_output_shape in func.tags:  # some of its calls have known shapes, such as x[index]
        return _runs_on_fakes(func, args, kwargs)
    return _known_shapes[func] if func in _known_shapes else _runs_on_fakes(func, args, kwargs)


def _runs_on_fakes(func: Any, args: Any, kwargs: Any) -> bool:
    mode, stream = FakeTensorMode(), random.getstate()  # torch draws the numbers of fake collectives from it
    was_silent, _of_fakes.disabled = _of_fakes.disabled, True  # an error is an answer, and no fault to report
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda one: mode.from_tensor(one.detach()), (args, kwargs))
    try:
        with mode:
            func(*args, **kwargs)
    except Exception:  # whatever it raises, a capture would meet it, too
        return False
    finally:
        random.setstate(stream)
        _of_fakes.disabled = was_silent
    return True


class DrawWatch(TorchDispatchMode):
    """Raises `Draws` before the first operator that draws random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Draws
        return _run(func, args, kwargs or {})


class Draws(Exception):
    """A call draws random numbers while others wait to draw theirs."""
