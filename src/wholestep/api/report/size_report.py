"""What explain() says of sizes that move between calls: which, on what conditions, and which are constants, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from rich.table import Table

from wholestep.capture.guards.guards import Guards
from wholestep.capture.guards.size_guards import SizeGuard
from wholestep.ir import node_meta
from wholestep.ir.program import Program
from wholestep.ir.sizes import Size, is_data, numbers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """The sizes of one signature that are no constants."""

    moving: tuple[str, ...]
    """``args.0.shape[1]``: dims of arguments, from 2 on, that are inputs of the graph."""
    conditions: tuple[str, ...]
    """What was asked of them, with the answer: a call that does not meet all of them is another trace."""
    of_data: tuple[str, ...]
    """``nonzero (train.py:12)``: calls whose results have sizes that their values decide."""
    constant: tuple[str, ...]
    """Dims that have moved and are constants all the same, each with the reason."""

    def __bool__(self) -> bool:
        return bool(self.moving or self.of_data or self.constant)


NO_SIZES = SizeReport(moving=(), conditions=(), of_data=(), constant=())
"""All sizes are constants."""


def size_report(program: Program, guards: Guards, constant: Iterable[str]) -> SizeReport:
    """Of a program with these guards. `constant`: sentences of the step's retraces."""
    asked = [text for one in guards.values if isinstance(one, SizeGuard) for text in one.conditions.texts()]
    return SizeReport(
        moving=tuple(repr(size) for one in program.inputs for size in one.shape if isinstance(size, Size)),
        conditions=tuple(asked),
        of_data=tuple(dict.fromkeys(_of_data(program))),
        constant=tuple(constant),
    )


def _of_data(program: Program) -> Iterable[str]:
    """The calls that make such a size: none of what they are given has one."""
    for node in program.graph.nodes:
        if node.op != "call_function" or any(map(_has_size_of_data, node.all_input_nodes)):
            continue
        if _has_size_of_data(node):
            source = node_meta.origin(node).source
            yield f"{node.target.__name__.partition('.')[0]}{f' ({source})' if source else ''}"


def _has_size_of_data(node: torch.fx.Node) -> bool:
    return any(map(is_data, numbers_of(node_meta.value(node))))


def size_table(report: SizeReport) -> Table:
    """The report as a table."""
    table = Table(title="Sizes that move", title_justify="left", show_header=False)
    rows = (
        ("inputs", report.moving), ("asked, a call with another answer is another trace", report.conditions),
        ("decided by data", report.of_data), ("constant", report.constant),
    )  # fmt: skip
    for name, texts in rows:
        if texts:
            table.add_row(name, "\n".join(texts))
    return table
