"""What Inductor writes for GPUs, on a machine without one: ``python -m tests.unit.lower.generated NUMBER...`` prints
JSON, ``{number: {kind of segment: text of its module}}``. Needs triton. Run by `tests.unit.lower.test_moved`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from wholestep.lower import inductor

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip

Make = Callable[..., Tensor]


def pointwise(make: Make) -> Tensor:
    return F.gelu(make(512, 768) * 2 + make(768))


def reduction(make: Make) -> list[Tensor]:
    x = make(64, 65536)
    return [x.sum(1), x.amax(1), torch.logsumexp(x, 1)]


def mix_order_reduction(make: Make) -> tuple[Tensor, ...]:
    """The backward of a layer norm: sums over rows and over columns of one tensor."""
    x, weight, mean, scale = make(8192, 768), make(768), make(8192, 1), make(8192, 1)
    grad = make(8192, 768)
    return torch.ops.aten.native_layer_norm_backward(grad, x, [768], mean, scale, weight, weight, [True] * 3)


def combo_kernel(make: Make) -> list[Tensor]:
    return [make(8 * number, 33).to(torch.bfloat16) for number in range(1, 7)]


def product(make: Make) -> Tensor:
    return torch.relu(make(512, 768, dtype=torch.bfloat16) @ make(768, 768, dtype=torch.bfloat16))


def attention(make: Make) -> Tensor:
    q, k, v = (make(4, 8, 128, 64, dtype=torch.bfloat16) * 2 for _ in range(3))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0] + 1


def embedding_backward(make: Make) -> Tensor:
    index = make(8192, dtype=torch.int64)
    return torch.ops.aten.embedding_dense_backward(make(8192, 768) + 1, index, 50304, -1, False)


def mutation(make: Make) -> list[Tensor]:
    """The first result is stored in the first argument; see `_store`."""
    state = make(300, 7) * 0.9 + make(300, 7)
    return [state, state.sum()]


def made_on_the_device(make: Make) -> list[Tensor]:
    """Fills, ranges, and a call that is left to ATen, which is told the device."""
    where = make(3).device
    return [
        torch.full((10,), 3.0, device=where) + make(10), torch.arange(7, device=where) * 2,
        torch.ops.aten.randperm.default(9, device=where), torch.scalar_tensor(2.0, device=where) * make(4),
    ]  # fmt: skip


SEGMENTS: tuple[Callable[[Make], Any], ...] = (
    pointwise, reduction, mix_order_reduction, combo_kernel, product, attention, embedding_backward, mutation,
    made_on_the_device,
)  # fmt: skip


@contextlib.contextmanager
def gpu(number: int) -> Iterator[None]:
    """Has Inductor believe in H200s, of which the one with this number is the current one."""
    import triton
    from triton.backends.compiler import GPUTarget

    device = torch.device("cuda", number)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_active_torch_device=lambda: device,
        get_benchmarker=lambda: None, get_current_device=lambda: number,
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)
    known = {name: getattr(H200, name) for name in DeviceProperties._fields if hasattr(H200, name)}
    props = DeviceProperties(type="cuda", index=number, cc=90, **known)
    with contextlib.ExitStack() as stack:
        for thing, name, value in (
            (DeviceProperties, "create", lambda device: props), (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 8), (torch.cuda, "current_device", lambda: number),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device=None: H200),
            (fake_tensor, "init_gpu_context", lambda device: None),
        ):  # fmt: skip
            stack.enter_context(patch.object(thing, name, value))
        yield


def text_of(segment: Callable[[Make], Any], number: int) -> str:
    """The module that Inductor writes for a segment on the GPU with this number."""
    mode, inputs = FakeTensorMode(shape_env=ShapeEnv()), list[Tensor]()

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        inputs.append(torch.empty(shape, dtype=dtype, device=f"cuda:{number}"))
        return inputs[-1]

    def run(*tensors: Tensor) -> Any:
        given = iter(tensors)
        return segment(lambda *shape, dtype=None: next(given))

    with mode, torch.no_grad(), inductor_config.patch(inductor._SETTINGS["cuda"]), tracing(TracingContext(mode)):
        segment(make)
        graph = make_fx(run, decomposition_table=select_decomp_table())(*inputs)
        if segment is mutation:
            _store(graph)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True)
        with V.set_fake_mode(mode), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
    return str(code.value)


def _store(graph: fx.GraphModule) -> None:
    """Writes the first result into the first argument, as segments do at their end."""
    end, target = graph.graph.output_node(), graph.graph.find_nodes(op="placeholder")[0]
    first, *rest = end.args[0]
    with graph.graph.inserting_before(end):
        stored = graph.graph.call_function(torch.ops.aten.copy_.default, (target, first))
    stored.meta["val"] = target.meta["val"]
    end.args = ([None, *rest],)
    graph.recompile()


def main(numbers: list[int]) -> None:
    """Prints all texts."""
    found: dict[int, dict[str, str]] = {}
    for number in numbers:
        with gpu(number):
            found[number] = {segment.__name__: text_of(segment, number) for segment in SEGMENTS}
    print(json.dumps(found))


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
