"""The cost model: which ceiling bounds a node, what the host adds, and the defaults."""

import math
from dataclasses import replace

import pytest
import torch
import torch.fx as fx

from tests.unit import builders
from wholestep.cost import default_ceilings
from wholestep.cost.cost_model import CostModel
from wholestep.cost.curve import Curve
from wholestep.cost.device_model import Device
from wholestep.cost.flops import Kind, Work, attention_flops, works
from wholestep.cost.link_model import OPS
from wholestep.errors import ConfigError


def rate(per_us: float, floor_us: float = 1.0) -> Curve:
    return Curve(points=((floor_us * per_us, floor_us), (1e6 * floor_us * per_us, 1e6 * floor_us)))


CPU = Device(
    curves={"matmul/float32": rate(100.0), "softmax": rate(1.0), "pointwise": rate(10.0), "in_place": rate(20.0)},
    calls_us={"pointwise": 3.0, "view": 2.0, "number": 0.5, "convolution": 40.0},
    us_per_listed_tensor=0.25,
    host_is_device=True,
)
GPU = replace(CPU, host_is_device=False)


def model(device: Device) -> CostModel:
    return CostModel(source="a test", device=device, links=default_ceilings.LINKS["nvlink"])


def test_the_slower_of_arithmetic_and_memory_counts() -> None:
    product = Work(kind=Kind.MATMUL, amount=1e5, num_bytes=100, dtype=torch.float32)
    assert CPU.kernel_us(product) == pytest.approx(1000)
    assert CPU.kernel_us(replace(product, num_bytes=50_000)) == pytest.approx(5000)
    assert CPU.kernel_us(replace(product, amount=1, num_bytes=1)) == 1.0  # the floor


def test_a_dtype_without_a_ceiling_takes_that_of_float32() -> None:
    product = Work(kind=Kind.MATMUL, amount=1e5, dtype=torch.float64)
    assert CPU.kernel_us(product) == pytest.approx(2000)
    assert CPU.kernel_us(replace(product, dtype=torch.float16)) == pytest.approx(1000)
    measured = replace(CPU, curves={**CPU.curves, "matmul/float64": rate(1.0)})
    assert measured.kernel_us(product) == pytest.approx(1e5)


def test_kinds_have_their_own_ceiling_or_that_of_memory() -> None:
    assert CPU.kernel_us(Work(kind=Kind.IN_PLACE, amount=2000, num_bytes=2000)) == pytest.approx(100)
    assert CPU.kernel_us(Work(kind=Kind.POINTWISE, amount=2000, num_bytes=2000)) == pytest.approx(200)
    assert CPU.kernel_us(Work(kind=Kind.SOFTMAX, amount=2000, num_bytes=2000)) == pytest.approx(2000)
    assert CPU.kernel_us(Work(kind=Kind.NORM, amount=2000, num_bytes=2000)) == pytest.approx(200)


def test_a_list_is_a_loop_on_the_cpu_and_one_kernel_on_a_gpu() -> None:
    kernels = [Work(kind=Kind.IN_PLACE, amount=2000, num_bytes=2000)] * 3
    assert CPU.device_us(kernels) == pytest.approx(300)
    assert GPU.device_us(kernels) == pytest.approx(300)
    small = [Work(kind=Kind.IN_PLACE, amount=2, num_bytes=2)] * 3
    assert CPU.device_us(small) == pytest.approx(3)
    assert GPU.device_us(small) == 1.0


def test_a_kind_has_its_own_price_of_a_call_or_that_of_pointwise_and_lists_pay_by_length() -> None:
    assert GPU.host_us([Work(kind=Kind.CONVOLUTION)]) == 40
    assert GPU.host_us([Work(kind=Kind.MATMUL)]) == 3
    assert GPU.host_us([Work(kind=Kind.VIEW)], 8) == 2 + 8 * 0.25
    assert GPU.host_us([]) == 0


def nodes() -> dict[str, fx.Node]:
    program = builders.capture(lambda x: x.mm(x).t().split(2), [torch.ones(4, 4)])
    return {str(node.target).split(".")[-2 if "." in str(node.target) else 0]: node for node in program.graph.nodes}


def test_the_host_adds_to_the_time_of_a_node_where_it_is_the_device() -> None:
    found = nodes()
    assert model(CPU).node_us(found["mm"]) == pytest.approx(3.0 + 12.8)  # 128 bytes bind, 128 FLOPs do not
    assert model(GPU).node_us(found["mm"]) == pytest.approx(12.8)
    assert model(GPU).host_us(found["mm"]) == 3.0
    assert (model(CPU).node_us(found["t"]), model(GPU).node_us(found["t"])) == (2.0, 0.0)
    assert model(CPU).node_us(found["split"]) == 2.0 + 2 * 0.25  # a list of two views
    picked = found["<built-in function getitem>"]
    assert (model(CPU).node_us(picked), model(GPU).node_us(picked)) == (0.5, 0.0)
    assert model(CPU).node_us(found["output"]) == 0.0


@pytest.mark.parametrize("device_class", ["cpu+gloo", "h200+nvlink", "gpu+pcie", "gpu+ethernet25", "h200+ethernet25"])
def test_defaults_say_what_they_are(device_class: str) -> None:
    cost = CostModel.default(device_class)
    compute, link = device_class.split("+")
    assert cost.source == f"defaults for {compute} + {link}, not calibrated"
    assert all(0 < cost.collective_us(op, 2**20, 4) < cost.collective_us(op, 2**26, 4) for op in OPS)
    assert cost.launch_us > 0
    assert min(cost.compute_slowdown, cost.collective_slowdown) >= 1


@pytest.mark.parametrize("device_class", ["h200", "h200+carrier pigeon", "abacus+nvlink"])
def test_unknown_classes_are_refused(device_class: str) -> None:
    with pytest.raises(ConfigError, match="COMPUTE\\+LINK"):
        CostModel.default(device_class)


def test_links_are_ordered_as_they_are_in_the_world() -> None:
    times = [CostModel.default(f"h200+{link}").collective_us("all_reduce", 2**26, 4) for link in
             ("nvlink", "pcie", "ethernet25")]  # fmt: skip
    assert times == sorted(times)
    assert times[2] > 5 * times[1] > 5 * times[0]


def products(h200: Device, rows: int, features: tuple[int, int], layers: int = 1) -> float:
    """us of the three products of linear layers of one shape, forward and backward, in bfloat16."""
    flops, num_bytes = 2.0 * rows * math.prod(features), 2 * (rows * sum(features) + math.prod(features))
    return 3 * layers * h200.kernel_us(
        Work(kind=Kind.MATMUL, amount=flops, num_bytes=num_bytes, dtype=torch.bfloat16)
    )  # fmt: skip


def attention(h200: Device, shape: tuple[int, int, int, int]) -> float:
    found = 0.0
    for kind, backward in ((Kind.ATTENTION, False), (Kind.ATTENTION_BACKWARD, True)):
        flops = attention_flops(shape, shape, shape, causal=True, backward=backward)
        found += h200.kernel_us(Work(kind=kind, amount=flops, dtype=torch.bfloat16))
    return found


def test_the_defaults_of_an_h200_agree_with_steps_that_were_measured() -> None:
    """GPU time by class of kernel of two steps on an H200, torch 2.11, compiled, AdamW fused with float32 states.

    A GPT of 12 layers of 768 with a vocabulary of 50,304 on 8 x 1,024 tokens: products 8.6 ms, attention 2.0, AdamW of
    163.1 million parameters 1.4. A Llama of 20 layers of 2,048 with 5,376 hidden and a vocabulary of 32,000 on
    4 x 2,048: 77.7 ms, 12.7, and 9.5 for 1,131.5 million.
    """
    h200 = CostModel.default("h200+nvlink").device
    gpt = sum(products(h200, 8192, one, 12) for one in ((768, 2304), (768, 768), (768, 3072), (3072, 768)))
    assert gpt + products(h200, 8192, (768, 50304)) == pytest.approx(8600, rel=0.1)
    llama = 4 * products(h200, 8192, (2048, 2048), 20) + 3 * products(h200, 8192, (2048, 5376), 20)
    assert llama + products(h200, 8192, (2048, 32000)) == pytest.approx(77_700, rel=0.1)
    assert 12 * attention(h200, (8, 12, 1024, 64)) == pytest.approx(2000, rel=0.25)
    assert 20 * attention(h200, (4, 16, 2048, 128)) == pytest.approx(12_700, rel=0.25)
    for parameters, measured_us in ((163.1e6, 1400), (1131.5e6, 9500)):
        num_bytes = int(28 * parameters / 148)  # reads four float32 per parameter, writes three
        updates = [Work(kind=Kind.IN_PLACE, amount=num_bytes, num_bytes=num_bytes)] * 148
        assert h200.device_us(updates) == pytest.approx(measured_us, rel=0.05)


def test_every_kernel_of_a_training_step_takes_time() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(x.mm(w).relu(), torch.zeros(8, dtype=torch.int64))
        return torch.autograd.grad(loss, w)[0]

    cost = CostModel.default("h200+nvlink")
    graph = builders.capture(step, [torch.ones(8, 4), torch.ones(4, 4)]).graph
    times = {node: cost.node_us(node) for node in graph.nodes}
    assert sum(us > 0 for us in times.values()) > 8
    for node, us in times.items():
        kinds = {work.kind for work in works(node)} - {Kind.VIEW, Kind.NUMBER}
        assert (us > 0) == bool(kinds), node.format_node()
