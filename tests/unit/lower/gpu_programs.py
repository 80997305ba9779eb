"""Scheduled programs of a GPU, on fake tensors: none is needed to make them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit import builders
from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.ir import node_meta
from wholestep.ir.program import Input, InputKind, Program, Stage
from wholestep.ir.sizes import Size, Sizes
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars

Spec = tuple[tuple[int, ...], torch.dtype, str, InputKind]
"""Shape, dtype, device and kind of an input."""


def gpu(*shape: int, kind: InputKind = InputKind.USER, dtype: torch.dtype = torch.float32) -> Spec:
    return shape, dtype, "cuda", kind


def host(*shape: int, kind: InputKind = InputKind.HYPER, dtype: torch.dtype = torch.float64) -> Spec:
    return shape, dtype, "cpu", kind


def captured(
    fn: Callable[..., Any], specs: Sequence[Spec], *, writes: bool = False, moving: Collection[int] = ()
) -> Program:
    """As `builders.capture` does it, on fake tensors of the devices of `specs`; where `writes`, inputs are written to.

    Without: what makes a function functional asks a build of torch without CUDA for more than it has. `moving`: the
    numbers of inputs whose first dim moves between calls.
    """
    sizes = SizeEnv()
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    shapes: list[list[Any]] = [list(shape) for shape, *_ in specs]
    for number in moving:
        shapes[number][0] = sizes.fake(mode, torch.empty(shapes[number]), f"x{number}", [0]).shape[0]
    with mode, torch.no_grad():
        fakes = [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, (_, dtype, device, _) in zip(shapes, specs, strict=True)
        ]

        def flat(*args: Tensor) -> tuple[Any, ...]:
            out = fn(*args)
            return out if isinstance(out, tuple) else (out,)

        functional = torch.func.functionalize(flat, remove="mutations") if writes else flat
        module = make_fx(functional, tracing_mode="real")(*fakes)
    inputs = tuple(
        Input(kind=kind, name=f"x{index}", shape=_recorded(shape, f"x{index}", index in moving), dtype=dtype)
        for index, (shape, dtype, _, kind) in enumerate(specs)
    )
    for node in module.graph.nodes:
        node_meta.set_origin(node, node_meta.Origin(node_meta.Region.FORWARD, "", "train.py:7"))
    return builders._with_outputs(module, inputs)


def _recorded(shape: Sequence[int], name: str, moves: bool) -> Sizes:
    return (Size(name, 0, shape[0]), *shape[1:]) if moves else tuple(shape)


def scheduled(
    fn: Callable[..., Any], *specs: Spec, writes: bool = False, segments: bool = True, moving: Collection[int] = ()
) -> Program:
    """Without `segments` every call stands alone, and takes numbers of the host as they are."""
    compiled = [
        partial(pack_scalars, reads=segment_compiler.reads_packed),
        partial(form_segments, compiles=segment_compiler.compiles),
    ]
    passes = [eliminate_dead_code, *(compiled if segments else []), reinplace]
    program = run_passes(builders.without_gradients(captured(fn, specs, writes=writes, moving=moving)), passes)
    assert program.stage is Stage.SCHEDULED
    return program


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def devices(node: fx.Node) -> set[str]:
    return {one.device.type for one in node_meta.tensors(node)}
