"""Calibration: measured once per kind of host and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from wholestep.cost.calibration.device_probe import Sizes, probe_device, sizes_for
from wholestep.cost.calibration.link_probe import probe_links
from wholestep.cost.cost_model import CostModel
from wholestep.cost.curve import Curve
from wholestep.cost.device_model import Device
from wholestep.cost.link_model import Links

log = logging.getLogger("wholestep")

VERSION = 2
"""Of the file and of what is measured; a file of another version is not used."""

Fingerprint = Mapping[str, str | int]
Report = Callable[[str], None]


def fingerprint(device: torch.device, backend: str, ranks: int) -> Fingerprint:
    """What the numbers of a calibration depend on. `backend` is that of the process group; "none" without one."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_model(),
        "count": torch.cuda.device_count() if cuda else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backend": backend,
        "ranks": ranks,
    }


def cpu_model() -> str:
    """The name of the processor as Linux gives it, else the kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def calibrate(
    device: torch.device,
    group: str | None,
    marks: Fingerprint,
    *,
    sizes: Sizes | None = None,
    report: Report = lambda what: None,
    instead: Mapping[Any, Callable[..., Any]] | None = None,
) -> CostModel:
    """Measures the device and the process group called `group`; every rank of it must call. Some seconds.

    All ranks compute at once, as they do in a step. Without a group the links are those of the defaults. By default
    the probes have the sizes that suit the device; `report` is called with the name of what is measured next; `instead`
    as for `probe_device`. What looks like a stall of the machine however often it is measured is kept, and
    `CostModel.source` says so (note *stalls*).
    """
    sizes = sizes or sizes_for(device)
    links, doubt = CostModel.default(default_class(device)).links, ""
    if group is not None:
        links, doubt = probe_links(group, device, sizes.messages_bytes, usual=links, report=report)
    place = f"{marks['device']}, {marks['backend']}, {marks['ranks']} rank{'s' if marks['ranks'] != 1 else ''}"
    source = f"calibrated on this host at {datetime.now():%Y-%m-%d %H:%M} ({place})"
    if doubt:
        source += f", in doubt: {doubt}"
    return CostModel(source=source, device=probe_device(device, sizes, report, instead), links=links)


def default_class(device: torch.device) -> str:
    """The class of defaults that is closest, for `CostModel.default`."""
    if device.type != "cuda":
        return "cpu+gloo"
    server = any(name in torch.cuda.get_device_name(device) for name in ("H100", "H200", "B200", "GH200"))
    return "h200+nvlink" if server else "gpu+pcie"


def find(device: torch.device, marks: Fingerprint) -> CostModel:
    """The calibration of this host, else the defaults of its class; `CostModel.source` says which."""
    return load(marks) or CostModel.default(default_class(device))


def folder() -> Path:
    """The folder of calibrations, below the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wholestep" / "calibration"


def path_of(marks: Fingerprint) -> Path:
    """Where the calibration of such a host lies, made or not."""
    text = json.dumps([VERSION, dict(marks)], sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def save(model: CostModel, marks: Fingerprint) -> Path:
    """Writes the calibration; whoever reads sees the old one or the new one, whole. Raises OSError."""
    path = path_of(marks)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        made.write_text(
            json.dumps({"version": VERSION, "fingerprint": dict(marks), **to_json(model)}), encoding="utf-8"
        )
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
    return path


def load(marks: Fingerprint) -> CostModel | None:
    """The calibration of such a host; None where there is none that can be used, and a line in the log says why."""
    path = path_of(marks)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION or found["fingerprint"] != dict(marks):
            raise ValueError(f"it is of version {found['version']}, for {found['fingerprint']}")
        return from_json(found)
    except FileNotFoundError:
        log.info("costs are not calibrated on this host; `wholestep calibrate` measures them")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the calibration in %s is not used: %s: %s", path, type(error).__name__, error)
    return None


def to_json(model: CostModel) -> dict[str, Any]:
    """Plain values; floats keep all their digits."""
    device = asdict(replace(model.device, curves={}))
    links = asdict(replace(model.links, tables=dict(model.links.tables)))
    links["tables"] = {
        op: {str(ranks): curve.points for ranks, curve in table.items()} for op, table in model.links.tables.items()
    }
    device["curves"] = {name: curve.points for name, curve in model.device.curves.items()}
    return {"source": model.source, "device": device, "links": links}


def from_json(found: Mapping[str, Any]) -> CostModel:
    """The model that `to_json` wrote. Raises KeyError, TypeError, AttributeError or ValueError for anything else."""
    device, links = dict(found["device"]), dict(found["links"])
    device["curves"] = {name: _curve(points) for name, points in device["curves"].items()}
    links["tables"] = {
        op: {int(ranks): _curve(points) for ranks, points in table.items()} for op, table in links["tables"].items()
    }
    return CostModel(source=str(found["source"]), device=Device(**device), links=Links(**links))


def _curve(points: Any) -> Curve:
    return Curve(points=tuple((float(amount), float(us)) for amount, us in points))
