"""Finds the first value in which two programs of one step part: by node, with the user's line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import node_meta, op_info
from wholestep.runtime.verify.rank_simulator import Pending, node_text
from wholestep.runtime.verify.tolerance import Gap, gap
from wholestep.runtime.verify.verification import Difference

Where = tuple[int, int]
"""Step, from 1, and virtual rank."""


class Recorder:
    """Keeps what every call gives on one rank, by the name of the node. To be told of a run of the reference."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.values: dict[str, Any] = {}

    def __call__(self, node: fx.Node, args: list[Any], found: list[Any]) -> None:
        self.values[node.name] = _snapshot_of(found[self.rank])


class Comparer:
    """Compares what calls give with what a `Recorder` has kept, and remembers the first fault.

    Passes leave the names of nodes that they do not replace, and an in-place call knows which one it stands for.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.first: tuple[fx.Node, Gap] | None = None

    def __call__(self, node: fx.Node, args: list[Any], found: list[Any]) -> None:
        """One call of the run that is compared."""
        rank, name = self._recorder.rank, node_meta.stands_for(node)
        if self.first is not None or name not in self._recorder.values:
            return
        value = found[rank]
        if value is None and (written := op_info.mutated_args(node.target)):
            lists = [args[rank][position] for position in written if position < len(args[rank])]
            value = lists[0] if len(lists) == 1 else lists
        one = None if _is_pending(value) else gap(value, self._recorder.values[name])
        if one is not None and one.is_fault:
            self.first = node, one

    def difference(self, where: Where) -> Difference | None:
        """The first fault as a record."""
        if self.first is None:
            return None
        node, one = self.first
        return difference_at(node, one, where, name=node_meta.stands_for(node), made_by=self._collectives_before(node))

    def _collectives_before(self, node: fx.Node) -> Sequence[str]:
        """Collectives that passes have made between the last values that can be compared and this one."""
        found: dict[fx.Node, None] = {}
        todo, seen = list(node.all_input_nodes), set[fx.Node]()
        while todo:
            one = todo.pop()
            if one in seen or one.op != "call_function" or node_meta.stands_for(one) in self._recorder.values:
                continue
            seen.add(one)
            todo += one.all_input_nodes
            if op_info.is_collective(one):
                found[one] = None
        return [node_text(one) for one in sorted(found)]


def difference_at(
    node: fx.Node | None, one: Gap, where: Where, *, name: str, op: str = "", made_by: Sequence[str] = ()
) -> Difference:
    """The record of a gap, with what is known of the node."""
    origin = node_meta.UNKNOWN if node is None else node_meta.origin(node)
    return Difference(
        step=where[0], rank=where[1], name=name, op=op or ("" if node is None else str(node.target)),
        region=origin.region.value, module=origin.module, source=origin.source, index=one.index, got=one.got,
        wanted=one.wanted, made_by=tuple(made_by),
    )  # fmt: skip


def _snapshot_of(value: Any) -> Any:
    if isinstance(value, Pending):
        return None
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_snapshot_of(one) for one in value] if isinstance(value, (list, tuple)) else value


def _is_pending(value: Any) -> bool:
    return isinstance(value, Pending) or (isinstance(value, list) and any(isinstance(one, Pending) for one in value))
