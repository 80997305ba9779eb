"""CostModel: microseconds of nodes and collectives, from a calibration or defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch.fx as fx

from wholestep.cost import default_ceilings
from wholestep.cost.device_model import Device
from wholestep.cost.flops import Kind, num_listed
from wholestep.cost.fusion_model import fused, is_of_host, kernels
from wholestep.cost.link_model import Links
from wholestep.errors import ConfigError
from wholestep.ir.segment import Segment

_NOT_MEASURED = "not calibrated"


def _none(graph: fx.Graph) -> Set[fx.Node]:
    return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Predicted times. The same numbers on every rank, or ranks would plan differently (`calibrate.shared`)."""

    source: str
    """Where the numbers come from: "calibrated on this host at ..." or "defaults for cpu + gloo, not calibrated"."""
    device: Device
    """Ceilings of compute."""
    links: Links
    """Times of collectives."""
    compiles: Callable[[fx.Node], bool] | None = None
    """Which nodes a compiler makes kernels of before the program runs; None: each is a call as it is."""
    at_once: Callable[[fx.Graph], Set[fx.Node]] = _none
    """Those of a graph of which it makes one kernel though they are not connected: updates of many parameters."""

    def node_us(self, node: fx.Node) -> float:
        """Time of one node from its fake values, in microseconds.

        Where host and device are one thread (the CPU) that includes what it costs to call it. On other devices views,
        picking a result and arithmetic of Python are 0.0. Collectives and waits are 0.0 everywhere: see `collective_us`
        and `launch_us`.
        """
        return self.device_us(node) + (self.host_us(node) if self.device.host_is_device else 0.0)

    def device_us(self, node: fx.Node) -> float:
        """Time of one node on the device, in microseconds, without what it costs to call it."""
        return self.device.device_us(kernels(node), apart=isinstance(node.target, Segment))

    def times_us(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, float]:
        """Times of the nodes of a graph, given in its order, in microseconds.

        That is `node_us`, but for nodes of which `compiles` says that a compiler makes kernels: these share the time of
        their kernel in proportion, and views are no calls any more.
        """
        times = {node: self.node_us(node) for node in nodes}
        if self.compiles is None:
            return times
        times.update((node, 0.0) for node in nodes if is_of_host(node) and self.compiles(node))
        for kernel in fused(nodes, joins=self.compiles, at_once=self.at_once(nodes[0].graph) if nodes else set()):
            apart_us = sum(times[node] for node in kernel.members)
            call_us = self.device.host_us([kernel.work]) if self.device.host_is_device else 0.0
            share = min(1.0, (self.device.kernel_us(kernel.work) + call_us) / apart_us)
            times.update((node, share * times[node]) for node in kernel.members)
        return times

    def host_us(self, node: fx.Node) -> float:
        """Time on the host for one node, in microseconds: what bounds a step of small kernels.

        The eager backend's, but for a compiled segment, which pays for each kernel as eager code does.
        """
        if isinstance(node.target, Segment):
            return sum(self.device.host_us([one]) for one in kernels(node))
        return self.device.host_us(kernels(node), num_listed(node))

    def collective_us(self, op: str, num_bytes: int, ranks: int) -> float:
        """Time of a collective on `ranks` ranks from its start to its end, in microseconds; see `Links.us`.

        `op` is all_reduce, all_gather, reduce_scatter, broadcast or all_to_all; `num_bytes` are the bytes of the full
        (unsharded) message. One rank: 0.0. Raises ConfigError for another `op`.
        """
        return self.links.us(op, num_bytes, ranks)

    @property
    def is_calibrated(self) -> bool:
        """Whether these are numbers of a host, and not the defaults of its class."""
        return not self.source.endswith(_NOT_MEASURED)

    @property
    def call_us(self) -> float:
        """Time of one more call of an operator, however small its tensors are, in microseconds; as `node_us` counts."""
        device = self.device
        return device.curves[Kind.POINTWISE].floor_us + (
            device.calls_us[Kind.POINTWISE] if device.host_is_device else 0.0
        )

    @property
    def launch_us(self) -> float:
        """What one collective costs the host, however short it is (`Links.launch_us`)."""
        return self.links.launch_us

    @property
    def compute_slowdown(self) -> float:
        """Factor on the time of compute while a collective is in flight; at least 1."""
        return self.links.compute_slowdown

    @property
    def collective_slowdown(self) -> float:
        """Factor on the time of a collective while compute runs; at least 1."""
        return self.links.collective_slowdown

    @classmethod
    def default(cls, device_class: str) -> CostModel:
        """The defaults of ``compute+link``: "cpu+gloo", "h200+nvlink", "gpu+pcie", "gpu+ethernet25", or any other pair.

        Compute is one of `defaults.DEVICES`, the link one of `defaults.LINKS`. Raises ConfigError for unknown ones.
        """
        compute, _, link = device_class.partition("+")
        if compute not in default_ceilings.DEVICES or link not in default_ceilings.LINKS:
            raise ConfigError(
                f"CostModel.default wants COMPUTE+LINK, one of {', '.join(default_ceilings.DEVICES)} and one of "
                f"{', '.join(default_ceilings.LINKS)}; got {device_class!r}."
            )
        source = f"defaults for {compute} + {link}, {_NOT_MEASURED}"
        return cls(source=source, device=default_ceilings.DEVICES[compute], links=default_ceilings.LINKS[link])
