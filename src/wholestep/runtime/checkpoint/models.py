"""Models under the names that checkpoints know: fully qualified, without wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import SGD

from wholestep.errors import ConfigError

Models = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]
"""One model, or several by name or in a row."""


class NamedModels:
    """The models of a training and the names of their parameters."""

    def __init__(self, models: Models) -> None:
        """Raises ConfigError for what is no model, and for one that has no memory yet."""
        self._models = named(models, nn.Module, "model")
        self._is_single = isinstance(models, nn.Module)
        on_meta = [name for model in self._models.values() for name, one in _state(model) if one.is_meta]
        if on_meta:
            raise ConfigError(
                f"The model is on the meta device ({', '.join(on_meta[:3])}), where nothing can be loaded or saved. "
                f"wholestep.shard(model, *optimizers, strategy=...) gives it memory."
            )
        self.parameters: dict[str, nn.Parameter] = {}
        """By name, each once: tied ones under the first of their names."""
        for prefix, model in self._models.items():
            begin = "" if self._is_single else f"{prefix}."
            self.parameters.update((begin + name, param) for name, param in _named_parameters(model))

    def state(self) -> dict[str, Any]:
        """The live tensors of all models by name; by the name of the model first where there are several."""
        states: dict[str, Any] = {name: get_model_state_dict(model) for name, model in self._models.items()}
        return next(iter(states.values())) if self._is_single else states

    def load(self, state: dict[str, Any]) -> None:
        """Gives a state, whose tensors have their values already, to the models' own ``load_state_dict``."""
        for name, model in self._models.items():
            set_model_state_dict(model, state if self._is_single else state[name])

    def names(self) -> dict[int, str]:
        """The name of each parameter by its id."""
        return {id(param): name for name, param in self.parameters.items()}


def named(given: Any, kind: type, what: str) -> dict[str, Any]:
    """One thing of a kind, or several, as a dict; those in a row are called 0, 1, ...

    Raises ConfigError for anything else.
    """
    if isinstance(given, kind):
        return {"0": given}
    things = dict(given) if isinstance(given, Mapping) else {}
    if isinstance(given, (list, tuple)):
        things = {str(number): one for number, one in enumerate(given)}
    wrong = next((one for one in things.values() if not isinstance(one, kind)), None if things else given)
    if wrong is not None or not all(isinstance(name, str) and name and "." not in name for name in things):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        got = f"a {type(wrong).__name__}" if wrong is not None else f"the names {[*things]}"
        raise ConfigError(
            f"{what} wants {article} {kind.__name__}, or several of them in a list or by names without dots in a dict; "
            f"got {got}."
        )
    return things


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters under the names of `get_model_state_dict`, which leaves out those of wrappers.

    torch gives such names to what an optimizer holds. An optimizer without state would be stepped there, so this one
    has some.
    """
    params = [*model.parameters()]
    if not params:
        return []
    optimizer = SGD(params, lr=0.0)
    optimizer.state[params[0]]["exists"] = 0
    held: Any = get_optimizer_state_dict(model, optimizer)
    return list(zip(held["param_groups"][0]["params"], params, strict=True))
