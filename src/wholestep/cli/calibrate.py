"""`wholestep calibrate`: measures this host and its links, for the cost model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

import wholestep as ws
from wholestep.cli.common.options import AsJson, Nproc, choose_nproc, threads_per_rank
from wholestep.cost.calibration import calibrate
from wholestep.cost.calibration.device_probe import Sizes
from wholestep.cost.cost_model import CostModel
from wholestep.cost.curve import Curve
from wholestep.errors import ConfigError
from wholestep.ir.printer import bytes_text
from wholestep.lower.gemm import onednn
from wholestep.runtime.shared_costs import host_fingerprint

PLOT_SIZE = (64, 14)
"""Columns and rows of characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """What was measured, and where it was put."""

    model: CostModel
    fingerprint: calibrate.Fingerprint
    file: str

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"file": self.file, "fingerprint": dict(self.fingerprint), **calibrate.to_json(self.model)}

    def __rich__(self) -> Group:
        ranks = int(self.fingerprint["ranks"])
        sections: list[Any] = [Text(self.model.source), self._device_table(), self._host_line()]
        if ranks > 1:
            links = {op: table[ranks] for op, table in self.model.links.tables.items()}
            sections += [_link_table(links, ranks), self._overlap_line(), Text(plot(links))]
        else:
            sections.append(Text("One rank: links were not measured, and are those of the defaults."))
        return Group(*sections, Text(f"kept in {self.file}"))

    def _device_table(self) -> Table:
        table = Table(title="Kernels: floor, and rate at the largest size measured", title_justify="left")
        table.add_column("kind")
        for column in ("floor (us)", "amount", "us", "per us"):
            table.add_column(column, justify="right")
        for name, curve in self.model.device.curves.items():
            amount, us = curve.points[-1]
            table.add_row(name, f"{curve.floor_us:.2f}", f"{amount:.3g}", f"{us:,.1f}", f"{amount / us:,.0f}")
        return table

    def _host_line(self) -> Text:
        device = self.model.device
        calls = ", ".join(f"{us:.2f} for {kind}" for kind, us in device.calls_us.items())
        return Text(
            "Amounts are FLOPs of matmul, convolution and attention, bytes of pointwise, in_place and reduction, and "
            f"elements of the others.\nA call costs the host, in us, besides its kernel: {calls}; of other kinds as "
            f"much as of pointwise. Each tensor in a list: {device.us_per_listed_tensor:.2f}.\n"
        )

    def _overlap_line(self) -> Text:
        links = self.model.links
        return Text(
            f"A collective costs the host {links.launch_us:.1f} us, however short. While one is in flight compute is "
            f"{links.compute_slowdown:.2f} times as long, and the collective {links.collective_slowdown:.2f} times.\n"
        )


def _link_table(links: dict[str, Curve], ranks: int) -> Table:
    table = Table(title=f"Collectives on {ranks} ranks, us by bytes of the whole message", title_justify="left")
    table.add_column("bytes", justify="right")
    for op in links:
        table.add_column(op, justify="right")
    for num_bytes in sorted({amount for curve in links.values() for amount, _ in curve.points}):
        known = [dict(curve.points).get(num_bytes) for curve in links.values()]
        table.add_row(bytes_text(int(num_bytes)), *("" if us is None else f"{us:,.0f}" for us in known))
    return table


def plot(curves: dict[str, Curve], size: tuple[int, int] = PLOT_SIZE) -> str:
    """Curves of us against bytes as text, with logarithmic axes."""
    columns, rows = size
    points = [point for curve in curves.values() for point in curve.points]
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    grid = [[" "] * columns for _ in range(rows)]
    marks = dict(zip(curves, "abcdefghij", strict=False))
    for column in range(columns):
        amount = left * (right / left) ** (column / (columns - 1))
        for name, curve in curves.items():
            if amount <= curve.points[-1][0] * 1.0001:
                height = math.log(curve.us(amount) / low) / max(1e-9, math.log(high / low))
                grid[rows - 1 - min(rows - 1, max(0, round(height * (rows - 1))))][column] = marks[name]
    edge = {0: f"{high:,.0f} us", rows - 1: f"{low:,.0f} us"}
    lines = [f"{edge.get(index, ''):>14} |{''.join(row)}" for index, row in enumerate(grid)]
    foot = f"{bytes_text(int(left)):<{columns // 2}}{bytes_text(int(right)):>{columns - columns // 2}}"
    legend = "  ".join(f"{mark} {name}" for name, mark in marks.items())
    return "\n".join([*lines, f"{'':>14} +{'-' * columns}", f"{'':>16}{foot}", f"{'':>16}{legend}"])


def run_calibration(*, nproc: int, quiet: bool = False, sizes: Sizes | None = None) -> CalibrationReport:
    """Measures on `nproc` new processes, and saves what rank 0 found.

    Raises ConfigError where it cannot be written.
    """
    reports: Sequence[CalibrationReport | None] = ws.run(_calibrate_on_rank, nproc, nproc, quiet, sizes)
    if (report := reports[0]) is None:
        raise ConfigError("Rank 0 brought no calibration.")
    return report


def _calibrate_on_rank(nproc: int, quiet: bool, sizes: Sizes | None) -> CalibrationReport | None:
    world = ws.init()
    torch.set_num_threads(threads_per_rank(nproc))
    group = world.mesh.get_group() if world.mesh is not None and world.size > 1 else None
    marks = host_fingerprint(world)
    with _progress(quiet or world.rank != 0) as report:
        name = None if group is None else group.group_name
        instead = onednn.replacements() if world.device.type == "cpu" else {}
        model = calibrate.calibrate(world.device, name, marks, sizes=sizes, report=report, instead=instead)
    if world.rank != 0:
        return None
    try:
        file = calibrate.save(model, marks)
    except OSError as error:
        raise ConfigError(
            f"The calibration cannot be written: {error}. Set XDG_CACHE_HOME to a folder that can be written to."
        ) from error
    return CalibrationReport(model=model, fingerprint=marks, file=str(file))


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """What is being measured, on stderr."""
    if quiet:
        yield lambda what: None
        return
    with Console(stderr=True).status("measuring") as status:
        yield lambda what: status.update(f"measuring {what}")


def command(*, nproc: Nproc = None, as_json: AsJson = False) -> None:
    """Measure this host and its links for some seconds, print the numbers, and keep them: plans are made from them."""
    report = run_calibration(nproc=choose_nproc(nproc), quiet=as_json)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        Console().print(report)
