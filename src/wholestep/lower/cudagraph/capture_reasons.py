"""Why a CUDA graph cannot hold a call or a step, as sentences; and which calls are the host's.

Reasons are rows of a predicate and a sentence: the first predicate that is true gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import node_meta, op_info
from wholestep.ir.ops import rng_state
from wholestep.ir.ops.packed_scalars import pack
from wholestep.ir.program import InputKind, OutputKind, Program
from wholestep.ir.sizes import is_data, is_of_arguments
from wholestep.lower.cudagraph import rng_replay

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (int, float, *_SYMBOLIC)

HostNodes = Collection[fx.Node]
"""Calls that run on the host before all else."""


def host_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """Calls that take nothing of a device, in order. The last of such a chain may give a tensor to a device."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or _handles_gpu_generator(node):
            continue
        inputs = node.all_input_nodes
        if all(_is_host_value(one, found) for one in inputs) and (inputs or _starts_on_host(node)):
            found[node] = None
    return found


def _starts_on_host(node: fx.Node) -> bool:
    """Whether a call that takes no values is the host's: it packs constants, or makes a tensor on the CPU."""
    return node.target is pack or not (on_gpu(node) or op_info.needs_peers(node.target))


def _is_host_value(node: fx.Node, host: HostNodes) -> bool:
    return (node.op != "call_function" or node in host) and not on_gpu(node)


def on_gpu(node: fx.Node) -> bool:
    """Whether a node gives a tensor on a GPU."""
    return any(one.is_cuda for one in node_meta.tensors(node))


# ---- calls -----------------------------------------------------------------------------------------------------------


def uncapturable_calls(program: Program, host: HostNodes, refused: Mapping[Any, str]) -> dict[fx.Node, str]:
    """The calls that no graph can hold, with the reasons, in order. `refused` as for `partition`."""
    graph, inputs = program.graph, zip(program.placeholders, program.inputs, strict=True)
    same_in_every_call = {node for node, record in inputs if record.kind is InputKind.RANK}
    cuts: dict[fx.Node, str] = {}
    num_cuts_before: dict[fx.Node, int] = {}
    """Of calls that set the generator back."""
    for node in graph.nodes:
        if node.target in refused and node not in host:
            cuts[node] = f"{call_name(node)} could not be captured: {refused[node.target]}"
        elif (reason := _why_not_call(node, host, same_in_every_call)) is not None:
            cuts[node] = reason
        elif rng_replay.is_replayed(node):
            num_cuts_before[node] = len(cuts)
    if len(set(num_cuts_before.values())) > 1:
        # A graph sets the generator to what it has read itself.
        cuts |= {node: _GENERATOR.format(call=call_name(node)) for node in num_cuts_before}
    return {node: cuts[node] for node in graph.nodes if node in cuts}


_GENERATOR = "{call} reads or sets the state of a random generator on the host"


def _why_not_call(node: fx.Node, host: HostNodes, same_in_every_call: Collection[fx.Node]) -> str | None:
    """Why a CUDA graph cannot hold a call; None if it can, or need not."""
    if node in host or (rng_replay.is_replayed(node) and rng_replay.is_supported()):
        return None
    if _handles_generator(node):
        return _GENERATOR.format(call=call_name(node))
    if node.op != "call_function":
        return None
    for is_true, sentence in _CALL_REASONS:
        if is_true(node):
            return sentence.format(call=call_name(node))
    for arg in node.all_input_nodes:
        if arg in same_in_every_call:
            continue
        for is_true_of, sentence in _ARGUMENT_REASONS:
            if is_true_of(arg, host):
                return sentence.format(call=call_name(node), arg=arg.name)
    return None


def _finds_groups_on_gpu(node: fx.Node) -> bool:
    return node.target is torch.ops.aten._grouped_mm.default and node_meta.tensor(node).dtype is not torch.bfloat16


def _gives_number(node: fx.Node) -> bool:
    return isinstance(node_meta.value(node), _NUMBERS) and not _is_size(node)


def _is_size(node: fx.Node) -> bool:
    """Whether the node gives a number that sizes of arguments decide: a graph is captured for some sizes."""
    value = node_meta.value(node)
    return isinstance(value, _SYMBOLIC) and is_of_arguments(value)


def _has_data_size(node: fx.Node) -> bool:
    return any(is_data(size) for one in node_meta.tensors(node) for size in one.shape)


def _gives_cpu_tensor(node: fx.Node) -> bool:
    return any(not one.is_cuda for one in node_meta.tensors(node))


def _is_read_on_host(arg: fx.Node) -> bool:
    return arg.op != "get_attr" and not on_gpu(arg) and not _is_replayed_state(arg) and not _is_size(arg)


_CALL_REASONS: tuple[tuple[Callable[[fx.Node], bool], str], ...] = (
    (_finds_groups_on_gpu, "{call} asks the GPU where groups end, as ATen does for all but bfloat16"),
    (_gives_number, "{call} gives a number of the GPU, for which the host would wait"),
    (_has_data_size, "the size of what {call} gives depends on data"),
    (_gives_cpu_tensor, "{call} gives a tensor on the CPU that depends on the GPU"),
)

_ARGUMENT_REASONS: tuple[tuple[Callable[[fx.Node, HostNodes], bool], str], ...] = (
    (
        lambda arg, host: _is_read_on_host(arg) and (arg in host or arg.op == "placeholder"),
        "{call} takes {arg}, which the host computes for every call",
    ),
    (lambda arg, _: _is_read_on_host(arg), "{call} takes {arg}, for which the host waits"),
    (lambda arg, _: _has_data_size(arg), "the size of what {call} takes depends on data"),
)


def call_name(node: fx.Node) -> str:
    """A call for people: what is called, and where."""
    where = node_meta.origin(node).source
    called = node.target if op_info.is_op(node) else getattr(node.target, "__name__", node.target)
    return f"{called}{f' of {where}' if where else ''}"


def _handles_generator(node: fx.Node) -> bool:
    """Whether the call reads or sets the state of a generator, of the device that its last argument names."""
    return op_info.is_op(node) and node.target._schema.name.startswith("wholestep::rng_")  # type: ignore[union-attr]


def _handles_gpu_generator(node: fx.Node) -> bool:
    return _handles_generator(node) and str(node.args[-1]).startswith("cuda")


def _is_replayed_state(node: fx.Node) -> bool:
    return node.target is rng_state.GET and rng_replay.is_replayed(node)


# ---- whole steps -----------------------------------------------------------------------------------------------------


def why_not_step(program: Program, host: HostNodes) -> str | None:
    """Why nothing of a scheduled program can be captured; None if something can, as far as single calls allow it."""
    for find, sentence in _STEP_REASONS:
        if found := find(program):
            return sentence.format(found=found)
    return _why_not_reordered(program, host)


def _created_state(program: Program) -> str:
    return next((output.name for output in program.outputs if output.kind is OutputKind.STATE), "")


def _resizes_inputs(program: Program) -> bool:
    resizes = (op_info.RESIZE_STORAGE, op_info.RESIZE_STORAGE_)
    return any(node.target in resizes for node in program.graph.nodes) or any(one.freed for one in program.inputs)


def _reads_version(program: Program) -> bool:
    return any(node.target is op_info.VERSION for node in program.graph.nodes)


_STEP_REASONS: tuple[tuple[Callable[[Program], str | bool], str], ...] = (
    (_created_state, "the step creates the state {found}; the calls after it can be captured"),
    (_resizes_inputs, "the step frees the memory of its inputs or fills it"),
    (_reads_version, "the step reads the version of a tensor, and a graph has tensors of its own"),
)


def _why_not_reordered(program: Program, host: HostNodes) -> str | None:
    """Why calls of the host cannot run first: it writes to a tensor of its own on one side, early or in a piece, and
    looks at it on the other; or it draws random numbers on both."""
    roots: dict[fx.Node, fx.Node] = {}
    written: dict[bool, set[fx.Node]] = {True: set(), False: set()}
    seen: dict[bool, set[fx.Node]] = {True: set(), False: set()}
    drawing: dict[bool, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            roots[node] = node
            continue
        early = node in host
        changed = op_info.argument_nodes(node, op_info.written_by(node.target, node.kwargs))
        shared = changed or op_info.argument_nodes(node, op_info.viewed_args(node.target))
        roots[node] = next((roots[one] for one in shared), node)
        written[early] |= {roots[one] for one in changed if not on_gpu(one)}
        seen[early] |= {roots[one] for one in node.all_input_nodes if not on_gpu(one)}
        if op_info.draws(node) and not on_gpu(node) and not _handles_gpu_generator(node):
            drawing[early] = node
    both = (written[True] & seen[False]) | (written[False] & seen[True])
    first = next((node for node in roots if node in both), None)
    if first is not None:
        return f"{first.name} is written on the host beside calls that wait for the GPU"
    if len(drawing) > 1:
        return f"{call_name(drawing[False])} draws on the host what depends on the GPU, and other calls draw there, too"
    return None
