"""The eager backend: the program's own text, compiled by Python and run node by node."""

from __future__ import annotations

import itertools
import linecache
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info, printer
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.ir.segment import Compiled, Segment
from wholestep.lower.base import cpu_collectives
from wholestep.lower.base.protocol import Backend, ExecutionMode, Wait
from wholestep.passes.comm.wire_format import WireFormat, unchanged
from wholestep.passes.pass_manager import Pass

_numbers = itertools.count()

_NODE = "_wholestep_node"
"""The attribute of an error that names its node."""

Compile = Callable[[Segment], Compiled]


class EagerBackend(Backend):
    """Runs the program's own text, node by node. Has nothing to compile, to write or to load."""

    shares_kernels = False

    def prepare(self) -> None: ...

    def passes(self, placed: Program) -> list[Pass]:
        return []

    def costs(self, cost: CostModel) -> CostModel:
        return cost

    def wire_format(self, grad: fx.Node, group: str) -> WireFormat:
        return unchanged(grad, group)

    def fingerprint(self) -> list[tuple[str, str]]:
        return []

    def dump_kernels(self, program: Program) -> tuple[bytes | None, ...]:
        return ()

    def load_kernels(self, program: Program, kernels: tuple[bytes | None, ...]) -> None: ...

    def compile_segments(self, program: Program) -> Mapping[Segment, Compiled]:
        return {}

    def lower(self, program: Program, wait: Wait | None = None) -> Step:
        return lower(program, wait=wait)

    def execution_mode(self, step: Step) -> ExecutionMode:
        return ExecutionMode("eager")


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Text:
    """A program's text, as Python has compiled it."""

    program: Program
    """Kept, since a text is found by the `id` of its program."""
    rendered: printer.Rendered
    filename: str
    code: types.CodeType


class Lowering:
    """Makes functions of programs. One program may have any number: its text is written and compiled once."""

    def __init__(
        self,
        *,
        wait: Wait | None = None,
        compile_segment: Compile | None = None,
        replacements: Mapping[torch._ops.OpOverload, Callable[..., Any]] | None = None,
    ) -> None:
        """
        Args:
            wait: stands in for ``wait_tensor``.
            compile_segment: what it makes of a segment, anew for each function, stands in for running its nodes.
            replacements: what stands in for other operators, besides collectives on CPUs.
        """
        self._compile_segment = compile_segment
        others = {**cpu_collectives.REPLACEMENTS, **(replacements or {})}
        self._functions: dict[Any, Callable[..., Any]] = {one._op: function for one, function in others.items()}
        if wait is not None:
            self._functions[op_info.WAIT._op] = wait
        self._texts: dict[int, _Text] = {}

    def __call__(self, program: Program) -> Step:
        """As `lower`."""
        text = self._texts.get(id(program))
        if text is None:
            text = self._texts[id(program)] = _text(program)
        functions, namespace = self._functions, dict(text.rendered.namespace)
        calls = {name: thing for name, thing in namespace.items() if isinstance(thing, types.BuiltinFunctionType)}
        namespace.update({name: functions[thing] for name, thing in calls.items() if thing in functions})
        if self._compile_segment is not None:
            segments = {name: thing for name, thing in namespace.items() if isinstance(thing, Segment)}
            namespace.update({name: self._compile_segment(segment) for name, segment in segments.items()})
        exec(text.code, namespace)
        step: Step = namespace["step"]

        def run(inputs: list[Any]) -> tuple[Any, ...]:
            try:
                return step(inputs)
            except Exception as error:
                node = text.rendered.nodes.get(_line_in(text.filename, error.__traceback__))
                if node is not None:
                    error.add_note(_describe(node))
                    setattr(error, _NODE, node)
                raise

        return run


def _text(program: Program) -> _Text:
    rendered, filename = printer.render(program, short_names=True), f"<wholestep step {next(_numbers)}>"
    made = _Text(program, rendered, filename, compile(rendered.text, filename, "exec"))
    # No modification time: linecache then never tries to read the file again.
    linecache.cache[filename] = (len(rendered.text), None, rendered.text.splitlines(keepends=True), filename)
    weakref.finalize(made, linecache.cache.pop, filename, None)
    return made


def lower(
    program: Program,
    *,
    wait: Wait | None = None,
    compile_segment: Compile | None = None,
    replacements: Mapping[torch._ops.OpOverload, Callable[..., Any]] | None = None,
) -> Step:
    """A function from inputs to results, in the order of the program's records. Arguments are those of `Lowering`.

    Writes that are done, whose result is None, are left out at the end, where they stand in a scheduled program.
    The caller turns gradients off (``torch.no_grad()``). The generated line shows up in tracebacks, and an
    error from a node carries a note with the user's line, module and shape of that node.
    """
    return Lowering(wait=wait, compile_segment=compile_segment, replacements=replacements)(program)


def failing_node(error: BaseException) -> fx.Node | None:
    """The node of a lowered program that an error comes from, if it has gone through one."""
    found: fx.Node | None = getattr(error, _NODE, None)
    return found


def first_error(error: BaseException) -> BaseException:
    """The error that made a capture fail: one within a node ends in a second one, which knows no node."""
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    return next((one for one in chain if getattr(one, "__notes__", ())), error)


def first_line(error: BaseException) -> str:
    """What an error says, in a line; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _line_in(filename: str, traceback: TracebackType | None) -> int:
    """The line of the generated text that was running; 0 if it was none."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == filename:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _describe(node: fx.Node) -> str:
    origin = node_meta.origin(node)
    where = f" from {origin.source}" if origin.source else ""
    module = f" in module {origin.module}" if origin.module else ""
    shapes = ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in node_meta.tensors(node))
    gives = f", which gives {shapes}" if shapes else ""
    return f"while running {node.name} ({node.target}){where}{module}{gives} ({origin.region.value})"
