"""Programs from small functions, as capture and placement deliver them, and ways to run and measure them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import Input, InputKind, MeshAxis, Output, OutputKind, Program, Stage
from wholestep.lower.base import eager_backend

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def capture(
    fn: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    *,
    names: Sequence[str] = (),
    kinds: Sequence[InputKind] = (),
) -> Program:
    """The program of `fn(*tensors)`: what it returns is USER, what it writes to in place is WRITE."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]

    def flat(*args: torch.Tensor) -> tuple[Any, ...]:
        out = fn(*args)
        return out if isinstance(out, tuple) else (out,)

    with mode, torch.autograd.set_multithreading_enabled(False):
        raw = make_fx(flat, tracing_mode="real")(*fakes)
    _unfuse_writes(raw.graph)
    raw.recompile()
    fakes = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in tensors]
    with mode, torch.no_grad():
        module = make_fx(torch.func.functionalize(raw, remove="mutations"), tracing_mode="real")(*fakes)
    names = names or [f"x{index}" for index in range(len(tensors))]
    kinds = kinds or [InputKind.TENSOR] * len(tensors)
    inputs = tuple(
        Input(kind=kind, name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        for kind, name, tensor in zip(kinds, names, tensors, strict=True)
    )
    return _with_outputs(module, inputs)


def _unfuse_writes(graph: fx.Graph) -> None:
    """``_fused_adamw_(...)`` -> ``_fused_adamw(...)`` and copies; torch refuses the empty lists of the former."""
    for node in list(graph.nodes):
        if not str(node.target).startswith("aten._fused_") or not op_info.mutated_args(node.target):
            continue
        functional = getattr(getattr(aten, node.target._schema.name.split("::")[1][:-1]), node.target._overloadname)
        with graph.inserting_before(node):
            call = graph.call_function(functional, node.args, node.kwargs)
            for group in op_info.written_by(node.target, node.kwargs):
                values = graph.call_function(operator.getitem, (call, group))
                for index, old in enumerate(node.args[group]):
                    new = graph.call_function(operator.getitem, (values, index))
                    graph.call_function(aten.copy_.default, (old, new))
        graph.erase_node(node)


def _with_outputs(module: fx.GraphModule, inputs: tuple[Input, ...]) -> Program:
    """Turns the ``copy_`` nodes on inputs, which functionalisation leaves at the end, into WRITE outputs."""
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    results = list(graph.output_node().args[0])
    outputs = [Output(kind=OutputKind.USER, name=f"out{index}") for index in range(len(results))]
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in placeholders:
            target = placeholders.index(node.args[0])
            results.append(node.args[1])
            outputs.append(Output(kind=OutputKind.WRITE, name=inputs[target].name, target=target))
            graph.erase_node(node)
    graph_edit.set_results(graph, results)
    return Program(module=module, inputs=inputs, outputs=tuple(outputs), stage=Stage.CAPTURED)


def gradient(grad: torch.Tensor, name: str) -> torch.Tensor:
    """Marks a gradient, as the hook of capture does."""
    return op_info.GRADIENT(grad, name)


def place(program: Program, *, size: int = 2, mean: bool = True, group: str = "") -> Program:
    """Data parallelism: each marker becomes a product with 1/size, an all-reduce and a wait.

    The group that runs has this process alone; the size says what the program believes.
    """
    program = graph_edit.copy(program)
    group = group or world_group()
    for index, node in enumerate(program.graph.find_nodes(op="call_function", target=op_info.GRADIENT)):
        grad, name = node.args
        with program.graph.inserting_before(node):
            scaled = graph_edit.emit(program.graph, aten.mul.Tensor, grad, 1 / size, like=node) if mean else grad
            reduced = graph_edit.emit(program.graph, c10d.all_reduce.default, scaled, "sum", group, like=node)
            node_meta.set_bucket(
                reduced, node_meta.Bucket(index, (name,), node_meta.num_bytes(reduced), node_meta.UNBUCKETED)
            )
            waited = graph_edit.emit(program.graph, op_info.WAIT, reduced, like=node)
        graph_edit.replace_node(node, waited)
    axis = MeshAxis(name="data", size=size, group=group)
    return replace(program, stage=Stage.PLACED, mesh=(axis,))


def without_gradients(program: Program) -> Program:
    """The placed program of a step on one process: no mesh, no marker."""
    program = graph_edit.copy(program)
    for node in program.graph.find_nodes(op="call_function", target=op_info.GRADIENT):
        graph_edit.replace_node(node, node.args[0])
    return replace(program, stage=Stage.PLACED)


def world_group() -> str:
    """The name of the group of this process alone, which is started when first asked for."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD.group_name


def execute(program: Program, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Runs the program on copies of `tensors`: what it returns, and the inputs as it leaves them."""
    inputs = [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in tensors]
    with torch.no_grad():
        results = eager_backend.lower(program)(list(inputs))
        pairs = list(zip_longest(results, program.outputs))  # writes that are done stand last and are left out
        returned = [one for one, output in pairs if output.kind is not OutputKind.WRITE]
        returned = [one.clone() if isinstance(one, torch.Tensor) else one for one in returned]
        writes = [
            (output.target, new.clone()) for new, output in pairs if output.kind is OutputKind.WRITE and new is not None
        ]
        for target, new in writes:
            inputs[target].copy_(new)
    return returned, inputs


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of two nests of tensors and numbers."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a).equal(_bits(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(one, other) for one, other in zip(a, b, strict=True))
    return bool(a == b)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def count(program: Program, *targets: Any) -> int:
    """How many calls of `targets` the program makes."""
    return sum(node.target in targets for node in program.graph.nodes)


def calls(program: Program) -> list[str]:
    """What the program calls, in order: ``aten.mul.Tensor``; ``getitem`` for what is no operator."""
    return [
        str(node.target) if op_info.is_op(node) else node.target.__name__
        for node in program.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]


class Layouts(fx.Interpreter):
    """Compares what nodes are said to give with what they give."""

    def run_node(self, node: fx.Node) -> Any:
        found = super().run_node(node)
        if node.op == "call_function":
            said = [(one.shape, one.stride(), one.dtype) for one in node_meta.tensors(node)]
            given = [(one.shape, one.stride(), one.dtype) for one in node_meta.tensors_in(found)]
            assert given == said, node.format_node()
        return found


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Counts bytes of the storages that come to life inside."""
    with LiveBytes() as counter:
        yield counter


class LiveBytes(TorchDispatchMode):
    """Bytes of storages born under the mode: those alive now, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: set[int] = set()

    def know(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves `tensors` out of the count."""
        self._seen.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in node_meta.tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _drop(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes
