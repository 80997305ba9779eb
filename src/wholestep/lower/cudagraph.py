"""A whole step as one CUDA graph: launched by one call, its collectives inside.

Note: two parts
    What the host computes (rates, bias corrections, counters) runs before every replay, as Python; it reaches the
    device in tensors whose place does not change. All else is the body, which is captured.

Note: who owns which memory
    Parameters and state are read and written where they live; if one has moved since (``param.data = ...``), the body
    is captured again. Arguments are copied into tensors of the graph. What the step returns is copied out of the
    graph's memory, so results may be kept; that memory is shared by all signatures of a step, which never run
    side by side.

Note: warm-up
    The first calls run the body as it is: libraries set themselves up and kernels are tuned in ordinary steps of the
    training. Then a call is captured and replayed. Capturing computes nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from wholestep.lower import captures, memsets, rewinds
from wholestep.program import edit, meta, ops
from wholestep.program.modules import module_of
from wholestep.program.numbers import pack
from wholestep.program.program import Input, InputKind, OutputKind, Program
from wholestep.program.show import Step
from wholestep.run import teardown
from wholestep.run.collector import uncollected

WARM_UP_CALLS = 2

_MOVING = (InputKind.USER, InputKind.GRAD)
"""Inputs that are other tensors in every call."""


_GROUPED = torch.ops.aten._grouped_mm.default
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A scheduled program in two: the host's and the device's."""

    host: Program
    """Takes all inputs; gives what the device needs of the host, then the results that are the host's."""
    body: Program
    """Takes the inputs on the device, then what the host gives it; returns the results that are the device's."""
    inputs: tuple[int, ...]
    """The inputs that the body takes, by their number."""
    num_handed: int
    """How many tensors the host gives the body."""
    places: tuple[tuple[bool, int], ...]
    """Per result: whether the body gives it, and its number there."""


def split(program: Program) -> Parts | str:
    """The two parts of a scheduled program, or the reason why it cannot be captured."""
    host = _host_nodes(program.graph)
    handed = [node for node in host if any(one.is_cuda for one in meta.tensors(node))]
    reason = next(filter(None, (_reason(node, host) for node in program.graph.nodes)), None) or _outer_reason(program)
    if reason is not None:
        return reason
    on_host = [isinstance(value, fx.Node) and value in host and value not in handed for value in program.results]
    at_home = [number for number, flag in enumerate(on_host) if flag]
    in_body = [number for number, flag in enumerate(on_host) if not flag]
    taken = [n for n, node in enumerate(program.placeholders) if any(one.is_cuda for one in meta.tensors(node))]
    results = program.results
    home = _part(program, [*handed, *(results[number] for number in at_home)], keep=lambda node: node in host)
    arguments = [program.placeholders[number] for number in taken] + handed
    body = _part(program, [results[number] for number in in_body], keep=lambda node: node not in host, takes=arguments)
    places = [(False, 0)] * len(results)
    for place, number in enumerate(at_home):
        places[number] = (False, len(handed) + place)
    for place, number in enumerate(in_body):
        places[number] = (True, place)
    return Parts(host=home, body=body, inputs=tuple(taken), num_handed=len(handed), places=tuple(places))


def _host_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """Calls that take nothing of a device, in order. The last of such a chain may give a tensor to a device."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if all(_is_host(arg, found) for arg in node.all_input_nodes) and (node.all_input_nodes or _is_made_here(node)):
            found[node] = None
    return found


def _is_made_here(node: fx.Node) -> bool:
    """Whether a call that takes no values is the host's: it packs constants, or makes a tensor on the CPU."""
    on_cpu = not any(one.is_cuda for one in meta.tensors(node)) and not ops.needs_peers(node.target)
    return node.target is pack or (on_cpu and not rewinds.is_one(node))


def _is_host(node: fx.Node, host: dict[fx.Node, None]) -> bool:
    if node.op == "call_function" and node not in host:
        return False
    return not any(one.is_cuda for one in meta.tensors(node))


def _reason(node: fx.Node, host: dict[fx.Node, None]) -> str | None:
    """Why a graph with this node cannot be captured; None if it can."""
    where = meta.origin(node).source
    called = node.target if ops.is_op(node) else getattr(node.target, "__name__", node.target)
    name = f"{called}{f' of {where}' if where else ''}"
    if rewinds.is_one(node) and rewinds.are_possible():
        return None
    if _handles_generator(node) and (node not in host or str(node.args[-1]).startswith("cuda")):
        return f"{name} reads or sets the state of a random generator on the host"
    if node.op != "call_function" or node in host:
        return None
    if node.target is _GROUPED and meta.tensor(node).dtype is not torch.bfloat16:
        return f"{name} asks the GPU where groups end, as ATen does for all but bfloat16"
    if isinstance(meta.value(node), _NUMBERS):
        return f"{name} gives a number of the GPU, for which the host would wait"
    if not all(isinstance(size, int) for one in meta.tensors(node) for size in one.shape):
        return f"the size of what {name} gives depends on data"
    if any(not one.is_cuda for one in meta.tensors(node)):
        return f"{name} gives a tensor on the CPU that depends on the GPU"
    for arg in node.all_input_nodes:
        frozen = arg in host or arg.op == "placeholder"
        if frozen and not any(one.is_cuda for one in meta.tensors(arg)):
            return f"{name} takes {arg.name}, which the host computes for every call"
    return None


def _handles_generator(node: fx.Node) -> bool:
    """Whether the call reads or sets the state of a generator, of the device that its last argument names."""
    return ops.is_op(node) and node.target._schema.name.startswith("wholestep::rng_")  # type: ignore[union-attr]


def _outer_reason(program: Program) -> str | None:
    for output in program.outputs:
        if output.kind is OutputKind.STATE:
            return f"the step creates the state {output.name}; the calls behind it can be captured"
        if output.kind is OutputKind.WRITE and output.target is not None:
            record = program.inputs[output.target]
            if record.kind is InputKind.GRAD:
                return f"the step writes to the gradient {record.name} that was there before it"
    if any(record.freed for record in program.inputs):
        return "the step frees the memory of its inputs or fills it"
    return None


def _part(
    program: Program, results: Sequence[Any], *, keep: Callable[[fx.Node], bool], takes: Sequence[fx.Node] | None = None
) -> Program:
    """A program of some of the nodes. `takes` are its inputs; None: those of the whole."""
    records = dict(zip(program.placeholders, program.inputs, strict=True))
    inputs = program.placeholders if takes is None else takes
    graph = fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        inside[node] = graph.placeholder(node.name)
        meta.copy_meta(node, inside[node])
    for node in program.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and keep(node)):
            inside[node] = graph.node_copy(node, inside.__getitem__)
    graph.output(tuple(inside[value] if isinstance(value, fx.Node) else value for value in results))
    edit.remove_dead_code(graph)
    return replace(
        program, module=module_of(program.module, graph), outputs=(),
        inputs=tuple(records.get(node) or _handed_record(node) for node in inputs),
    )  # fmt: skip


def _handed_record(node: fx.Node) -> Input:
    value = meta.tensor(node)
    return Input(kind=InputKind.TENSOR, name=node.name, shape=tuple(value.shape), dtype=value.dtype)


class Pool:
    """The memory that the CUDA graphs of a device share. Nothing uses the device before the first capture.

    [Note: what keeps a pool]
    The allocator gives a pool up when its last graph goes, and captures into it fail from then on: so does a step's
    second capture, before which its only graph goes. A graph that does next to nothing stays in the pool therefore.

    [Note: a capture that failed]
    torch leaves its stream current then, the allocator waiting for the end and, up to 2.11, the random generator in the
    belief that a capture goes on, which only one that succeeds takes from it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    def capture(
        self, body: Callable[[], Sequence[Any]], rewound: rewinds.Rewinds | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """What `body` does, as a graph, and the tensors in which that leaves the results of `body`. `rewound` are its
        settings of the random generator, if there are any.

        Raises what `body` raises, or RuntimeError for what CUDA cannot capture. Nothing has run then, and torch is as
        it was before.
        """
        gc.collect()  # and nothing meanwhile: to destroy a graph, a kernel or a group ends a capture
        with torch.cuda.device(self.device), uncollected():
            if self._keeper is None:
                self._renew()
            graph, results = self._captured(body, rewound)
            memsets.as_kernels(graph, lambda fill: self._captured(fill)[0], self.device)
            graph.instantiate()
            return graph, results

    def _captured(
        self, body: Callable[[], Any], rewound: rewinds.Rewinds | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """What `body` does, as a graph that cannot run yet, and what `body` gives."""
        graph, before = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.current_stream()
        try:
            rewinding = rewound.captured(graph) if rewound is not None else contextlib.nullcontext()
            with captures.settled(), rewinding, self._capturing(graph):
                results = body()
        except BaseException:
            self._mend(graph, before)
            raise
        return graph, results

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Any:
        # The threads of NCCL go on with their own calls meanwhile.
        return torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local")

    def _renew(self) -> None:
        """A pool that nobody uses, with the graph that keeps it, and a stream to capture on."""
        self._handle, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        number, keeper = torch.zeros(1, device=self.device), torch.cuda.CUDAGraph()
        with self._capturing(keeper):
            number.zero_()
        self._keeper = keeper

    def _mend(self, graph: torch.cuda.CUDAGraph, before: torch.cuda.Stream) -> None:
        """Makes torch usable after a capture that failed, wherever that was."""
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._stream):
            graph.capture_end()  # where it was not come to
        torch.cuda.set_stream(before)
        graph.reset()
        index = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # raised by the first where the allocator knows that it has ended
            torch._C._cuda_endAllocateToPool(index, self._handle)
            torch._C._cuda_releasePool(index, self._handle)
        self._keeper = None
        self._renew()


def _cause(error: BaseException) -> str:
    """What went wrong, in a line, with the node that it happened in, where that is known.

    A capture that fails within a node ends in a second error, which knows no node.
    """
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    first = next((one for one in chain if getattr(one, "__notes__", ())), error)
    said = str(first).strip().splitlines()[:1] or [type(first).__name__]
    return ", ".join([*said, *getattr(first, "__notes__", [])[:1]])


class Graphed:
    """Runs a scheduled program as a CUDA graph: a function from flat inputs to flat results."""

    def __init__(
        self, program: Program, parts: Parts, lower: Callable[[Program], Step], pool: Pool, fails: Callable[[str], None]
    ) -> None:
        """`fails` is told why the body could not be captured; it runs as it is from then on."""
        self._parts, self._pool, self._fails, self._failed = parts, pool, fails, False
        self._host, self._body = lower(parts.host), lower(parts.body)
        records = [program.inputs[number] for number in parts.inputs]
        self._moving = [place for place, record in enumerate(records) if record.kind in _MOVING]
        self._resting = [place for place, record in enumerate(records) if record.kind not in _MOVING]
        written = {o.target for o in program.outputs if o.kind is OutputKind.WRITE}
        self._given_back = [place for place in self._moving if parts.inputs[place] in written]
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._outputs: Sequence[Any] = ()
        self._rewinds = rewinds.Rewinds.of(parts.body, pool.device)
        self._device, self._groups = pool.device, {axis.group for axis in program.mesh}
        teardown.goes_first(self)

    def let_go(self, group: str) -> None:
        """Gives up the graph if it may hold collectives of the group. The next call captures again."""
        if self._graph is not None and group in self._groups:
            torch.cuda.synchronize(self._device)
            self._graph.reset()
            self._graph, self._outputs = None, ()

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """One step. Results are the caller's own."""
        home = self._host(list(inputs))
        handed = home[: self._parts.num_handed]
        given = [inputs[number] for number in self._parts.inputs]
        self._calls += 1
        if self._calls <= WARM_UP_CALLS or self._failed:
            with self._rewinds.seen() if self._rewinds is not None else contextlib.nullcontext():
                return self._results(home, self._body([*given, *handed]), copy=False)
        resting = [given[place] for place in self._resting]
        addresses = list(map(torch.Tensor.data_ptr, resting))
        if self._graph is None or addresses != self._addresses:
            if not self._capture(given, handed):
                return self._results(home, self._body([*given, *handed]), copy=False)
            self._addresses = addresses
        sources = [*(given[place] for place in self._moving), *handed]
        targets = [self._static[place] for place in (*self._moving, *range(len(given), len(self._static)))]
        if targets:
            torch.ops.aten._foreach_copy_.default(targets, sources, True)
        assert self._graph is not None
        if self._rewinds is not None:
            self._rewinds.begin()
        self._graph.replay()
        for place in self._given_back:
            given[place].copy_(self._static[place])
        return self._results(home, self._outputs, copy=True)

    def _capture(self, given: list[Any], handed: Sequence[torch.Tensor]) -> bool:
        """Captures the body on tensors that stay where they are. Whether that went well."""
        self._graph, self._outputs = None, ()
        moving = set(self._moving)
        self._static = [one.clone() if place in moving else one for place, one in enumerate(given)]
        self._static += [one.clone() for one in handed]
        try:
            self._graph, self._outputs = self._pool.capture(lambda: self._body(list(self._static)), self._rewinds)
        except Exception as error:
            self._failed, self._static = True, []
            self._fails(_cause(error))
            return False
        return True

    def _results(self, home: Sequence[Any], body: Sequence[Any], *, copy: bool) -> tuple[Any, ...]:
        found = []
        for in_body, place in self._parts.places:
            source = body if in_body else home
            value = source[place] if place < len(source) else None  # trailing results that are None are left out
            found.append(value.clone() if copy and in_body and isinstance(value, torch.Tensor) else value)
        return tuple(found)
