"""Speeds of classes of devices and links where nothing is calibrated, each with its source."""

from __future__ import annotations

from collections.abc import Mapping

from wholestep.cost.curve import Curve, straight
from wholestep.cost.device_model import Device
from wholestep.cost.link_model import Links, uniform

_PRODUCT_US = ((0.001, 2.0), (1.3, 4.0), (50.0, 57.0), (340.0, 368.0), (1400.0, 1400.0))
"""(time of a product at the rate of very large ones, time it takes), us: how a GPU gets up to its rate."""

_SHARES = {"convolution": 0.6, "convolution_backward": 0.5, "attention": 0.45, "attention_backward": 0.38}
"""Rate of other kernels as a share of that of very large products: flash attention of 64 to 128 wide heads, cuDNN."""

_UPDATE_SHARE = 0.77
"""Share of the bandwidth of a copy that an update in place reaches, which reads and writes several tensors at once."""


def _gpu(*, flops_per_us: Mapping[str, float], bytes_per_us: float, floor_us: float) -> Device:
    """A GPU by the rate of very large matrix products per dtype, and the bandwidth of a copy (read plus write)."""
    curves = {
        "pointwise": straight(floor_us=floor_us, per_us=bytes_per_us),
        "in_place": straight(floor_us=floor_us, per_us=_UPDATE_SHARE * bytes_per_us),
    }
    for dtype, rate in flops_per_us.items():
        curves[f"matmul/{dtype}"] = Curve(points=tuple((rate * ideal_us, us) for ideal_us, us in _PRODUCT_US))
        for kind, share in _SHARES.items():
            curves[f"{kind}/{dtype}"] = straight(floor_us=floor_us, per_us=share * rate)
    calls_us = {"pointwise": 6.0, "view": 2.5, "number": 0.3}
    return Device(curves=curves, calls_us=calls_us, us_per_listed_tensor=0.2, host_is_device=False)


DEVICES: Mapping[str, Device] = {
    # One core of a server with AVX-512; small kernels and cold memory as `probe_device` finds them.
    "cpu": Device(
        curves={
            "matmul/float32": Curve(points=((1e3, 0.7), (2.6e5, 3.5), (2e6, 15.0), (3.4e7, 210.0), (5.4e8, 3200.0))),
            "convolution/float32": Curve(points=((3e5, 40.0), (3e7, 350.0), (1.5e8, 920.0))),
            "convolution_backward/float32": Curve(points=((6e5, 90.0), (5e7, 750.0), (3e8, 1850.0))),
            "attention/float32": Curve(points=((8e3, 7.0), (1e6, 45.0), (3e7, 680.0), (1.3e8, 2250.0))),
            "attention_backward/float32": Curve(points=((2e4, 27.0), (2.6e6, 100.0), (7e7, 1500.0), (3.4e8, 5600.0))),
            "function": straight(floor_us=0.1, per_us=1.2e3),
            "norm": straight(floor_us=2.0, per_us=1.3e3),
            "norm_backward": straight(floor_us=3.0, per_us=1.1e3),
            "batch_norm": straight(floor_us=5.0, per_us=4e2),
            "softmax": straight(floor_us=0.1, per_us=9e2),
            "softmax_backward": straight(floor_us=0.1, per_us=1.1e3),
            "reduction": straight(floor_us=0.5, per_us=2.0e4),
            "in_place": straight(floor_us=0.1, per_us=5.0e4),
            "pointwise": straight(floor_us=0.1, per_us=1.9e4),
        },
        calls_us={"pointwise": 3.3, "in_place": 2.8, "view": 2.7, "number": 0.1},
        us_per_listed_tensor=1.1,
        host_is_device=True,
    ),
    # Measured ceilings: 790 TFLOP/s bf16 products, 4.3 TB/s device copy.
    "h200": _gpu(
        flops_per_us={"bfloat16": 7.9e8, "float16": 7.9e8, "float32": 5.0e7, "float64": 5.5e7},
        bytes_per_us=4.3e6,
        floor_us=2.0,
    ),
    # A GPU of the class of an A100 with 40 GB, at 80% of what its data sheet says.
    "gpu": _gpu(
        flops_per_us={"bfloat16": 2.5e8, "float16": 2.5e8, "float32": 1.6e7, "float64": 7.7e6},
        bytes_per_us=1.25e6,
        floor_us=2.5,
    ),
}
"""Classes of devices."""

_NVLINK_US = {
    "all_reduce": (7.0, 7.5, 7.6, 7.7, 12.5, 17.4, 37.9, 82.6, 257.0, 902.0),
    "all_gather": (6.4, 6.6, 6.9, 9.1, 9.2, 14.2, 28.3, 54.2, 159.0, 551.0),
    "reduce_scatter": (7.5, 7.6, 7.7, 7.8, 9.0, 12.5, 26.9, 53.6, 162.0, 564.0),
    "broadcast": (5.2, 7.2, 7.3, 7.4, 7.5, 12.1, 24.6, 59.0, 200.0, 744.0),
    "all_to_all": (11.5, 11.6, 11.7, 11.8, 11.9, 14.5, 20.9, 55.5, 141.0, 481.0),
}
"""us of messages of 1 KiB, 4 KiB, 16 KiB, ... 256 MiB on two ranks."""


def _curve_by_kib(times_us: tuple[float, ...]) -> Curve:
    return Curve(points=tuple((1024.0 * 4**power, us) for power, us in enumerate(times_us)))


LINKS: Mapping[str, Links] = {
    # Two processes of one host over loopback.
    "gloo": uniform(latency_us=150.0, bus_bytes_per_us=1.2e3, launch_us=500.0, slowdown=1.5),
    # Measured with `probe_links` between two H200s of one host (NVLink 4, NCCL 2.28 without multicast); the slowdowns
    # beside products that fill the GPU.
    "nvlink": Links(
        tables={op: {2: _curve_by_kib(us)} for op, us in _NVLINK_US.items()},
        launch_us=20.0,
        compute_slowdown=1.4,
        collective_slowdown=1.3,
    ),
    # 16 lanes of PCIe 4: 32 GB/s per direction on paper, three quarters of it through host bridges.
    "pcie": uniform(latency_us=25.0, bus_bytes_per_us=2.2e4, launch_us=20.0, slowdown=1.1),
    # 25 Gb/s, TCP: nine tenths of 3.1 GB/s.
    "ethernet25": uniform(latency_us=60.0, bus_bytes_per_us=2.8e3, launch_us=20.0, slowdown=1.05),
}
"""Classes of links."""
