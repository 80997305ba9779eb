"""Which modules ``fully_shard`` gathers as one in eager code. A compiled step plans its own buckets."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from torch import nn

from wholestep.errors import PlacementError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def units_of(root: nn.Module, units: tuple[str, ...] | Literal["auto"]) -> list[nn.Module]:
    """Modules to shard one by one, inner ones first; `root` is the last and takes what the others have left.

    A list or dict of modules has no forward: each of its modules takes what is left in it, and parameters that lie in
    none of them stay whole.

    Args:
        units: patterns of fully qualified names, as ``fnmatch`` takes them; "auto": the outermost modules that stand
            side by side in a list or sequence with others of their class, such as the layers of a transformer.

    A module is no unit if it shares a parameter with one outside of it: the root takes both, so they stay tied.

    Raises:
        PlacementError: for a pattern that no module has, or one that shares parameters.
    """
    named = {name: module for name, module in root.named_modules() if name}
    if units == "auto":
        chosen = [module for module in _repeated(root) if not _shares(root, module)]
    else:
        chosen = _matching(root, named, units)
    return [*chosen, *(one for one in dict.fromkeys(_with_forward(root)) if one not in chosen)]


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """A module that can be called, or those in a container of modules."""
    if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
        for child in module.children():
            yield from _with_forward(child)
    else:
        yield module


def _matching(root: nn.Module, named: dict[str, nn.Module], patterns: tuple[str, ...]) -> list[nn.Module]:
    unknown = [pattern for pattern in patterns if not fnmatch.filter(named, pattern)]
    if unknown:
        raise PlacementError(f"FSDP(units=...) has the patterns {unknown}; the modules of the step are {[*named]}.")
    names = [name for name in named if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    shared = [name for name in names if _shares(root, named[name])]
    if shared:
        raise PlacementError(
            f"FSDP(units=...) names {shared}, which share parameters with modules outside of them. Leave them to the "
            f"root, or name one module that holds all that is shared."
        )
    return [named[name] for name in sorted(names, key=lambda name: -name.count("."))]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that have siblings of their class in a list or a sequence."""
    kinds = Counter(type(child) for child in module.children())
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for child in module.children():
        if is_list and kinds[type(child)] > 1 and next(child.children(), None) is not None and _has_parameters(child):
            yield child
        else:
            yield from _repeated(child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shares(root: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of the module is one of a module outside of it, too."""
    inside = {id(one) for one in module.modules()}
    own = {id(param) for param in module.parameters()}
    outer = (one for one in root.modules() if id(one) not in inside)
    return any(id(param) in own for one in outer for param in one.parameters(recurse=False))
