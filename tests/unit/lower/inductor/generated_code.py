"""What Inductor makes for GPUs, on a machine without one: ``python -m tests.unit.lower.inductor.generated_code OLD
NEW`` prints JSON.

    old, new     the text of the module of every kind of segment, as Inductor writes it for the GPU of this number
    travelled    some of them compiled for OLD by Triton, and found in Inductor's cache there, taken over for NEW, and
                 compiled for NEW
    lists        a kernel over lists, likewise
    own          kernels of ours that are built when they are first launched, likewise

Triton needs no GPU to compile for one. What loads a binary is replaced. Run by
`tests.unit.lower.codecache.test_relocate_device`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
import torch.nn.functional as F
import triton
from torch import Tensor
from torch._dynamo import device_interface
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from tests.unit.lower.foreach import test_multi_tensor
from wholestep.ir import node_meta
from wholestep.lower.codecache import segment_cache, triton_cache
from wholestep.lower.codecache.prune_imports import lightened
from wholestep.lower.decompositions import optimizers
from wholestep.lower.foreach import multi_tensor
from wholestep.lower.inductor import compile_fx
from wholestep.lower.inductor.deferred_wait import defer_waits
from wholestep.lower.kernels import add_chunks, column_sum, cross_entropy, row_sum
from wholestep.passes.rewrites.fuse_cross_entropy import CROSS_ENTROPY

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip

Make = Callable[..., Tensor]
Segment = Callable[[Make], Iterable[Tensor]]


def pointwise(make: Make) -> list[Tensor]:
    return [F.gelu(make(512, 768) * 2 + make(768))]


def reduction(make: Make) -> list[Tensor]:
    return [make(64, 65536).sum(1)]


def mix_order_reduction(make: Make) -> tuple[Tensor, ...]:
    """The backward of a layer norm: sums over rows and over columns of one tensor."""
    x, weight, mean, scale = make(8192, 768), make(768), make(8192, 1), make(8192, 1)
    grad = make(8192, 768)
    return torch.ops.aten.native_layer_norm_backward(grad, x, [768], mean, scale, weight, weight, [True] * 3)


def norm_of_few_rows(make: Make) -> tuple[Tensor, ...]:
    """The same for 1,024 rows."""
    x, weight, mean, scale = make(1024, 768), make(768), make(1024, 1), make(1024, 1)
    return torch.ops.aten.native_layer_norm_backward(make(1024, 768), x, [768], mean, scale, weight, weight, [True] * 3)


def combo_kernel(make: Make) -> list[Tensor]:
    return [make(8 * number, 33).to(torch.bfloat16) for number in range(1, 7)]


def product(make: Make) -> list[Tensor]:
    return [torch.relu(make(512, 768, dtype=torch.bfloat16) @ make(768, 768, dtype=torch.bfloat16))]


def attention(make: Make) -> list[Tensor]:
    q, k, v = (make(4, 8, 128, 64, dtype=torch.bfloat16) * 2 for _ in range(3))
    return [torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0] + 1]


def mixed_precision(make: Make) -> list[Tensor]:
    """Conversions: in comments of the text, operators of a namespace to which Inductor adds its own."""
    return [(make(512, 768, dtype=torch.bfloat16).float().exp() * make(512, 768)).to(torch.bfloat16)]


def embedding_backward(make: Make) -> list[Tensor]:
    index = make(8192, dtype=torch.int64)
    return [torch.ops.aten.embedding_dense_backward(make(8192, 768) + 1, index, 50304, -1, False)]


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


def bias_gradients(make: Make) -> list[Tensor]:
    """The backward of two linear layers: sums over the rows of what products read."""
    grads = [make(1, 1024, size, dtype=torch.bfloat16).view(1024, size) for size in (768, 3072)]
    weights = [make(size, 768, dtype=torch.bfloat16) for size in (768, 3072)]
    sums = [torch.sum(grad, [0], keepdim=True).view(grad.shape[1]).float() for grad in grads]
    return [*(torch.relu(grad @ weight) for grad, weight in zip(grads, weights, strict=True)), *sums]


SEGMENTS: tuple[Segment, ...] = (
    pointwise, reduction, mix_order_reduction, combo_kernel, product, attention, mixed_precision, embedding_backward,
    mutation, made_on_the_device, bias_gradients, norm_of_few_rows,
)  # fmt: skip


class Loader:
    """In the place of what loads binaries onto a GPU."""

    def __init__(self) -> None:
        self.loaded: list[list[Any]] = []
        """Name of the kernel and number of the GPU, of every one."""

    def _load_kernel(self, path: str, name: str, shared: int, device: int) -> tuple[int, ...]:
        assert Path(path).stat().st_size
        self.loaded.append([name, device])
        function, registers, spills = 1, 40, 0
        return (function, registers, spills) if torch.__version__ < "2.13" else (1, function, registers, spills)

    def _unload_kernel(self, module: int) -> None: ...

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        assert binary
        self.loaded.append([name, device])
        module, function, registers, spills, threads = 1, 1, 40, 0, 1024
        return module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


@contextlib.contextmanager
def gpu(number: int) -> Iterator[Loader]:
    """Has Inductor and Triton believe in H200s, of which the one with this number is the current one."""
    device, loader = torch.device("cuda", number), Loader()
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_active_torch_device=lambda: device,
        get_benchmarker=lambda: None, get_current_device=lambda: number, get_current_stream=lambda device: 0,
        utils=loader, launcher_cls=lambda source, metadata: lambda *launch: None,
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)
    known = {name: getattr(H200, name) for name in DeviceProperties._fields if hasattr(H200, name)}
    props = DeviceProperties(type="cuda", index=number, cc=90, **known)
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch(compile_fx._SETTINGS["cuda"] | {"compile_threads": 1}))
        for thing, name, value in (
            (DeviceProperties, "create", lambda device: props), (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 8), (torch.cuda, "current_device", lambda: number),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device=None: H200),
            (torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8)),
            (torch.cuda, "set_rng_state", lambda state: None), (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "_exchange_device", lambda device: number),
            (torch.cuda, "_maybe_exchange_device", lambda device: number),
            (fake_tensor, "init_gpu_context", lambda device: None),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (device_interface, "DeviceGuard", lambda interface, number: contextlib.nullcontext()),
            (StaticallyLaunchedCudaKernel, "C_impl", loader),
        ):  # fmt: skip
            stack.enter_context(patch.object(thing, name, value))
        yield loader


def graph_of(segment: Segment, number: int) -> tuple[fx.GraphModule, list[Tensor], FakeTensorMode]:
    """A segment in the operators that Inductor lowers, and its arguments."""
    mode, inputs = FakeTensorMode(shape_env=ShapeEnv()), list[Tensor]()

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        inputs.append(torch.empty(shape, dtype=dtype, device=f"cuda:{number}"))
        return inputs[-1]

    def run(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        return list(segment(lambda *shape, dtype=None: next(given)))

    with mode, torch.no_grad():
        segment(make)
        graph = make_fx(run, decomposition_table=select_decomp_table())(*inputs)
    if segment is mutation:
        _store(graph)
    row_sum.gather_sums(graph.graph)
    return graph, inputs, mode


def text_of(segment: Segment, number: int) -> str:
    """The module that Inductor writes for a segment on the GPU with this number. Nothing is compiled."""
    graph, inputs, mode = graph_of(segment, number)
    lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True)
    handlers = (V.set_fake_mode(mode), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()))
    ways = compile_fx.inductor_patches(torch.device("cuda", number), early_launches=True, own_products=True)
    settings = inductor_config.patch(compile_fx.settings_for(graph.graph, "cuda"))
    with ways, mode, tracing(TracingContext(mode)), settings, handlers[0], handlers[1], handlers[2]:
        lowering.run(*inputs)
        code, _ = lowering.codegen()
    return str(code.value)


@contextlib.contextmanager
def fresh_caches() -> Iterator[None]:
    """As in another process on another machine; Triton's cache is a folder per GPU, as where no variable names it."""
    with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder), patch.dict(os.environ):
        os.environ.pop("TRITON_CACHE_DIR", None)
        yield


def travel(segment: Segment, old: int, new: int, early: bool) -> dict[str, Any]:
    """Compiles a segment on GPU `old`, takes it over on GPU `new`, and compiles it there for comparison."""
    with gpu(old), fresh_caches():
        written = [segment_cache.dumps(compiled(segment, old, early)) for _ in range(2)]
        assert counters["inductor"].pop("fxgraph_cache_hit") == 1  # the second time
    taken, made, loaded, ready = list[dict[str, Any]](), list[str](), list[Any](), list[int]()
    for data in written:
        counters.clear()
        with counted(made), gpu(new) as loader, fresh_caches():
            taken.append(described(segment_cache.loads(data, torch.device("cuda", new))[0]))
        loaded.append(loader.loaded)
        ready.append(counters["inductor"]["async_compile_cache_hit"])
    made_by_taking = len(made)
    with counted(made), gpu(new), fresh_caches():
        own = described(compiled(segment, new, early))
    return {
        "made by taking": made_by_taking, "made by compiling": len(made) - made_by_taking, "loaded": loaded,
        "ready": ready, "taken": taken, "own": own,
    }  # fmt: skip


def travel_lists(old: int, new: int) -> dict[str, Any]:
    """Builds a kernel over lists on GPU `old` and takes it over on GPU `new`."""
    tensors = [torch.zeros(3), torch.zeros(4)]
    plans, made = multi_tensor.MultiTensorCompiler(), list[str]()
    with patch.object(optimizers, "on_gpu", lambda node: True):
        (segment,) = test_multi_tensor.segments(test_multi_tensor.scheduled(test_multi_tensor.doubled, tensors))
        found = plans._of(segment)
    (kernel,) = found.kernels

    def build(number: int) -> str:
        multi_tensor._build({kernel.text: torch.device("cuda", number)})
        return str(multi_tensor._binaries[kernel.text].hash)

    with counted(made), gpu(old), fresh_cache():
        first, data = build(old), plans.dumps(segment)
    made_by_building = len(made)
    multi_tensor._binaries.clear()
    other = multi_tensor.MultiTensorCompiler()
    with counted(made), gpu(new), fresh_cache(), patch.object(multi_tensor, "plan", None):  # whoever plans calls it
        other.loads(segment, data, torch.device("cuda", new))
        second = build(new)
        taken = other._of(segment)
    return {"made by building": made_by_building, "made by taking": len(made) - made_by_building,
            "same": first == second, "same plan": taken.kernels == found.kernels,
            "device": taken.device.index}  # fmt: skip


def travel_own(old: int, new: int) -> dict[str, Any]:
    """Builds kernels of ours as a rank on GPU `old` does before its first call, and launches them on GPU `new`."""
    graph, mode = fx.Graph(), FakeTensorMode()
    logits = torch.zeros(4, 4000, dtype=torch.bfloat16)
    tensors = [logits, torch.zeros(4, dtype=torch.int64), torch.tensor(0.25)]
    args = [graph.placeholder(f"arg{number}") for number in range(len(tensors))]
    for node, tensor in zip(args, tensors, strict=True):
        node_meta.set_value(node, mode.from_tensor(tensor))
    calls = [graph.call_function(CROSS_ENTROPY, (*args, -100, *classes)) for classes in ([], [3990])]
    made = list[str]()
    with counted(made), gpu(old), fresh_cache():
        sums = "[buf4, buf6] = torch.ops.wholestep.column_sums.default(workspace_0, 2, 512, 768)\n"
        row = "torch.ops.wholestep.sum_rows.default([buf1, buf3], 512, [768, 64], torch.bfloat16, torch.float32)"
        jobs = [
            *map(cross_entropy.build, calls), *column_sum.builds(sums),
            *row_sum.builds(f"buf5 = {row}\nbuf7 = {row}\n"),
            add_chunks.build(torch.float32, torch.float32, size=2, rank=0, averages=True),
        ]  # fmt: skip
        triton_cache.build_in_background(jobs, torch.device("cuda", old))
        data = triton_cache.dumps(triton_cache.kept_kernels())
    made_by_building, ready = len(made), [one.module is not None for one in triton_cache.kept_kernels()]
    own = (row_sum._rows_kernel, row_sum._parts_kernel, add_chunks._kernel)
    for kernel in (cross_entropy._kernel, column_sum._kernel, *own):
        kernel.device_caches.clear()  # as in another process
    with counted(made), gpu(new) as loader, fresh_cache():
        triton_cache.loads(data)
        cross_entropy.cross_entropy(*tensors, -100)
        cross_entropy.cross_entropy(*tensors, -100, 3990)
        column_sum.column_sums(torch.zeros(2 * 512 * 768), 2, 512, 768)
        matrices = [torch.zeros(512, size, dtype=torch.bfloat16) for size in (768, 64)]
        row_sum.sum_rows(matrices, 512, [768, 64], torch.bfloat16, torch.float32)
        add_chunks.add_parts(torch.zeros(2, 8192), *torch.zeros(3, 4096), rank=0, averages=True)
    return {"made by building": made_by_building, "made by launching": len(made) - made_by_building,
            "loaded": loader.loaded, "ready": ready}  # fmt: skip


@contextlib.contextmanager
def counted(made: list[str]) -> Iterator[None]:
    """Writes down the names of kernels that Triton compiles."""
    make_ir = ASTSource.make_ir

    def noted(self: Any, *args: Any) -> Any:
        made.append(self.name)
        return make_ir(self, *args)

    with patch.object(ASTSource, "make_ir", noted):
        yield


def compiled(segment: Segment, number: int, early: bool) -> Any:
    """A segment as Inductor compiles it: with kernels that are launched early, or not."""
    graph, inputs, mode = graph_of(segment, number)
    ways = compile_fx.inductor_patches(torch.device("cuda", number), early_launches=early, own_products=True)
    settings, context = inductor_config.patch(compile_fx.settings_for(graph.graph, "cuda")), TracingContext(mode)
    with ways, mode, tracing(context), settings, defer_waits() as rest:
        found = compile_fx_inner(graph, inputs)
    with tracing(context), mode:
        rest()
    return found


def described(segment: Any) -> dict[str, Any]:
    """What a compiled segment that is ready to run knows of its device, and which binaries it has."""
    scope = segment.compiled_fn_runner.call.__globals__
    found = {name: one for name, one in scope.items() if isinstance(one, CachingAutotuner)}
    return {
        "devices": sorted(segment.device_idxs), "key": segment.cache_key,
        "text": lightened(segment.source_code, segment_cache._is_torchs),  # a module that has travelled is that
        "kernels": {
            name: {
                "properties": one.device_props._asdict(),
                "meta": [one.triton_meta["device"], *(result.compile_meta["device"] for result in one.compile_results)],
                "binaries": sorted(result.kernel.hash for result in one.compile_results),
                "block sizes": sorted(str(result.config) for result in one.compile_results),
                "launchers": len(one.launchers),
            }
            for name, one in found.items()
        },
    }  # fmt: skip


def _store(graph: fx.GraphModule) -> None:
    """Writes the first result into the first argument, as segments do at their end."""
    end, target = graph.graph.output_node(), graph.graph.find_nodes(op="placeholder")[0]
    first, *rest = end.args[0]
    with graph.graph.inserting_before(end):
        stored = graph.graph.call_function(torch.ops.aten.copy_.default, (target, first))
    stored.meta["val"] = target.meta["val"]
    end.args = ([None, *rest],)
    graph.recompile()


def main(old: int, new: int) -> None:
    """Prints what is said above."""
    texts: dict[int, dict[str, str]] = {}
    for number in (old, new):
        with gpu(number):
            texts[number] = {segment.__name__: text_of(segment, number) for segment in SEGMENTS}
    travelled = {
        f"{segment.__name__}, {'early' if early else 'static'}": travel(segment, old, new, early)
        for segment, early in ((reduction, False), (reduction, True), (combo_kernel, True))
    }
    found = {"old": texts[old], "new": texts[new], "travelled": travelled, "lists": travel_lists(old, new),
             "own": travel_own(old, new)}  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
