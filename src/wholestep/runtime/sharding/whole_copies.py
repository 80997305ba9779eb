"""``copy.deepcopy`` of a module that wholestep has sharded: a plain module with whole parameters, as of the plain one.

Torch copies no module of ``fully_shard``. It does not know who has asked for the shards. Where nobody but a strategy
has, training code goes on as it was written: ``teacher = copy.deepcopy(model)``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.distributed.tensor import DTensor

from wholestep.capture.wrappers.fully_shard_hooks import is_own_hook, key_text

_copied: WeakSet[nn.Module] = WeakSet()
"""Modules that may be copied, among others of the same class."""
_refusals: WeakKeyDictionary[type, Callable[..., Any]] = WeakKeyDictionary()
"""What torch has as ``__deepcopy__`` of the classes of those modules."""


def allow_copies(module: nn.Module) -> None:
    """From now on ``copy.deepcopy(module)`` gives a plain module. All ranks have to come: parameters are gathered.

    The copy has the class that the module had before it was sharded, and none of the hooks of ``fully_shard``.
    """
    kind: Any = type(module)
    if kind not in _refusals:
        _refusals[kind] = kind.__deepcopy__
        kind.__deepcopy__ = _deepcopy
    _copied.add(module)


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> Any:
    return _whole_copy(module, memo) if module in _copied else _refusals[type(module)](module, memo)


def _whole_copy(module: Any, memo: dict[int, Any]) -> nn.Module:
    for param in module.parameters():
        if isinstance(param, DTensor) and id(param) not in memo:
            held = param.detach().clone()  # in a live step that is whole by itself
            whole = held.full_tensor() if isinstance(held, DTensor) else held
            memo[id(param)] = nn.Parameter(whole, requires_grad=param.requires_grad)
    plain: Any = type(module).__bases__[1]
    made: nn.Module = plain.__new__(plain)
    memo[id(module)] = made
    items = {key: item for key, item in vars(module).items() if key_text(key) is None}
    for key, item in items.items():
        if isinstance(item, dict) and any(map(is_own_hook, item.values())):
            items[key] = type(item)((one, hook) for one, hook in item.items() if not is_own_hook(hook))
    vars(made).update({key: copy.deepcopy(item, memo) for key, item in items.items()})
    return made
