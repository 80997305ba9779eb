"""Override: other code for a module while the step is captured, and a say in the graph afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from weakref import ref

import torch
import torch.fx as fx
from torch import nn

from wholestep.errors import ConfigError


class Override(ABC):
    """How a module that cannot be captured, or should not be, takes part in a compiled step.

    `replacement` gives another module to capture in its place, such as one that calls a placeholder operator.
    `transform` may then rewrite the placed graph, for example put real operators where the placeholders are.
    """

    @abstractmethod
    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """The module to capture in the place of `orig_submodule`; the very same one where nothing is to change.

        Asked once per submodule of the step's modules, with the fully qualified name inside of its root. The user's
        module itself is not changed: the replacement is in place while the step is captured.
        """

    @abstractmethod
    def transform(self, gm: fx.GraphModule, flat_state: list[torch.Tensor]) -> fx.GraphModule:
        """The graph that is to run, once per captured graph: `gm` itself, rewritten or not, or another one.

        `gm` is functional and has its collectives. `flat_state` are parameters, buffers and optimizer state, in the
        order of the graph's first placeholders. As with every GraphModule an edit counts when ``gm.recompile()`` was
        called. New nodes may call operators or functions of torch that write to none of their arguments.
        """


class Replacements:
    """The replacements of one step, asked for once per module: they keep their parameters over retraces."""

    def __init__(self, overrides: Sequence[Override]) -> None:
        self._overrides = overrides
        self._chosen: dict[tuple[str, int], tuple[ref[nn.Module], nn.Module]] = {}

    def __call__(self, fqn: str, original: nn.Module) -> nn.Module:
        """The replacement of one module. Raises ConfigError where an override gives something else than a module."""
        key = (fqn, id(original))
        known = self._chosen.get(key)
        if known is not None and known[0]() is original:
            return known[1]
        chosen = original
        for one in self._overrides:
            chosen = one.replacement(fqn, chosen)
            if not isinstance(chosen, nn.Module):
                raise ConfigError(
                    f"{type(one).__name__}.replacement({fqn!r}, ...) gave {type(chosen).__name__}, wanted a module. "
                    f"Return the module it was given where nothing is to be replaced."
                )
        if chosen is not original:
            self._chosen[key] = (ref(original), chosen)
        return chosen
