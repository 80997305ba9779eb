"""Values of host scalars while tracing, and the predicates over them that Python branched on.

[Note: host scalars]
A rate, a bias correction, a step counter: a number that depends only on param_groups and on 0-d CPU state of
optimizers and modules, never on data. While tracing it is a symbolic float, so the graph computes it anew at every
call. An optimizer may branch on one (``weight_decay != 0``, ``rho_t > 5``), and so may a module that counts its calls
(``n_averaged == 0`` of ``torch.optim.swa_utils.AveragedModel``). Its value at trace time is found by
running the nodes written so far on real 0-d values; the branch becomes a *predicate*: a small graph from
host inputs to the truth value, checked before each later call. What compares a uniform draw with a number that no draw
passes (`capture/scalars/random_ranges.py`) has one answer for ever: Python gets it, and nothing is checked. A branch on
data that does nothing but raise is not taken, and its condition is checked by the graph
(`capture/scalars/assert_branches.py`).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch._prims_common as prims
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from wholestep.capture.python import user_frame
from wholestep.capture.scalars import assert_branches, random_ranges
from wholestep.ir import op_info
from wholestep.ir.ops.assertions import CHECK
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped,unused-ignore]
else:  # who only imports wholestep does not need it
    sympy = lazy_import("sympy")

_UNKNOWN = object()
Known = Sequence[torch.Tensor | int | None]
"""Per placeholder: the real value of a host number, the number of a rank, or None."""
_TRUTH: Callable[[Any], bool] = bool


def running_tracer() -> Any:
    """The tracer of the make_fx trace that is running; None where none is."""
    mode = get_innermost_proxy_mode()
    return None if mode is None else mode.tracer


class HostValues:
    """Knows the values of the host scalars in a graph that is being written. Catches up when asked."""

    @classmethod
    def of_trace(cls, known: Known) -> HostValues:
        """For the trace that is running; `known` holds the real 0-d value per placeholder, or None."""
        mode = get_innermost_proxy_mode()
        assert mode is not None
        placeholders = mode.tracer.graph.find_nodes(op="placeholder")
        return cls(mode.tracer, {n.name: real for n, real in zip(placeholders, known, strict=True) if real is not None})

    def __init__(self, tracer: Any, known: dict[str, torch.Tensor | int]) -> None:
        self._tracer = tracer
        self._known = known
        """Placeholder name -> real 0-d CPU tensor, cloned before anything is computed, or a rank."""
        self._values: dict[fx.Node, Any] = {}
        self.met: dict[fx.Node, Any] = {}
        """All values that were ever known, of which those that data was written to are known no more."""
        self.certain: dict[fx.Node, Any] = {}
        """Comparisons of chance that come out the same at every call -> a function call that gives what they give."""
        self._cursor: fx.Node | None = None
        self.predicates: dict[tuple[Any, ...], tuple[fx.Node, bool, str]] = {}
        """Structure of the condition -> node, value while tracing, user's line."""

    def _catch_up(self) -> None:
        graph: fx.Graph = self._tracer.graph
        node = graph._root.next if self._cursor is None else self._cursor.next
        # These are real numbers: the trace must not see them.
        with _disable_current_modes(), _outside_of_fake_kernels(), torch.no_grad():
            while node.op != "root":
                found = self._run(node)
                if found is not _UNKNOWN:
                    self._values[node] = self.met[node] = found
                self._cursor = node
                node = node.next

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            known = self._known.get(node.name)
            return _UNKNOWN if known is None else known.clone() if isinstance(known, torch.Tensor) else known
        if node.op == "get_attr":
            held = getattr(self._tracer.root, str(node.target), None)
            return (
                held if isinstance(held, torch.Tensor) and held.dim() == 0 and held.device.type == "cpu" else _UNKNOWN
            )
        if node.op != "call_function":
            return _UNKNOWN
        if (truth := random_ranges.answer(node)) is not None and (size := _size(node)) is not None:
            self.certain[node] = (_one_truth, (truth, size))
            return _one_truth(truth, size)
        unknown = not op_info.only_computes(node.target) or node.target is op_info.VERSION
        if unknown or not node.all_input_nodes or not all(arg in self._values for arg in node.all_input_nodes):
            for position in op_info.mutated_args(node.target):  # what an unknown number is written to is unknown
                if position < len(node.args):
                    fx.node.map_arg(node.args[position], self._forget)
            return _UNKNOWN
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: self._values[arg])
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _forget(self, written: fx.Node) -> None:
        """Drops the value of a node, and of all that are seen through the same memory: views, and what they are of."""
        memory = _memory_of(self._values.get(written))
        if memory is not None:
            self._values = {node: held for node, held in self._values.items() if _memory_of(held) != memory}

    def truth(self, symbol: Any, line: str) -> bool | None:
        """The truth of a symbolic condition if it is over host scalars, recorded as a predicate; else None."""
        node = self._known_node(symbol)
        if node is None:
            return None
        result = bool(self._values[node])
        if not self._is_constant(node):
            self.predicates.setdefault(structure(node), (node, result, line))
        return result

    def symbols(self) -> dict[Any, Any]:
        """The value of each symbol that stands for a host scalar, as sympy's own number."""
        self._catch_up()
        pairs = ((node.meta.get("val"), value) for node, value in self.met.items())
        held = ((val.node.expr, value) for val, value in pairs if isinstance(val, (torch.SymFloat, torch.SymInt)))
        return {symbol: sympy.sympify(value) for symbol, value in held if symbol.is_Symbol}

    def number(self, symbol: Any) -> int | None:
        """The value of a symbolic number that is made of ranks and constants alone; else None."""
        node = self._known_node(symbol)
        return int(self._values[node]) if node is not None and self._is_constant(node) else None

    def is_chance(self, symbol: Any) -> bool:
        """Whether a symbolic condition compares a uniform draw with a number."""
        node = self._node(symbol)
        return node is not None and random_ranges.by_chance(node)

    def _known_node(self, symbol: Any) -> fx.Node | None:
        node = self._node(symbol)
        if node is None:
            return None
        self._catch_up()
        return node if node in self._values else None

    def _node(self, symbol: Any) -> fx.Node | None:
        return _node_of(symbol, self._tracer)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether the value is made of what never changes in a process: ranks, and comparisons that are certain."""
        if node in self.certain and not random_ranges.is_written(node):
            return True
        if node.op == "placeholder":
            return isinstance(self._known.get(node.name), int)
        return bool(node.all_input_nodes) and all(map(self._is_constant, node.all_input_nodes))


def _size(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of a comparison that gives one truth value, () for a symbolic one; None if it gives several."""
    made = node.meta.get("val")
    size = tuple(made.shape) if isinstance(made, torch.Tensor) else ()
    return size if math.prod(size) == 1 else None


def _one_truth(truth: bool, size: tuple[int, ...]) -> torch.Tensor:
    return torch.full(size, truth, device="cpu")


def _memory_of(held: Any) -> int | None:
    return held.untyped_storage()._cdata if isinstance(held, torch.Tensor) else None


@contextmanager
def _outside_of_fake_kernels() -> Iterator[None]:
    """A fake kernel may branch, too (``beta ** steps``). While it runs, operators are sent to their meta kernels."""
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(False)
        yield


def _node_of(symbol: Any, tracer: Any) -> fx.Node | None:
    try:
        slot = get_proxy_slot(symbol, tracer, None)
    except TypeError:  # torch 2.11 fails where it writes a sum of more than two parts anew
        return None
    if slot is None:
        return None
    proxy = slot.force() if hasattr(slot, "force") else slot
    node: fx.Node = proxy.node
    return node


def structure(node: Any) -> Any:
    """A hashable key of how a node is computed, equal for equal computations.

    What reads memory that was written to stands for itself: the same call gave something else before.
    """
    if isinstance(node, fx.Node):
        if node.op in ("placeholder", "get_attr"):
            return (node.op, node.name)
        if node.op == "call_function" and not _in_place(node) and not _reads_written(node):
            return (str(node.target), *(structure(arg) for arg in node.args))
        return ("node", node.name)
    if isinstance(node, (list, tuple)):
        return tuple(structure(item) for item in node)
    return node


def _in_place(node: fx.Node) -> bool:
    return bool(op_info.mutated_args(node.target)) or node.target is operator.getitem


def _reads_written(node: fx.Node) -> bool:
    for source in node.all_input_nodes:
        while op_info.is_view(source):
            source = source.all_input_nodes[0]
        if random_ranges.is_written(source, before=node):
            return True
    return False


@contextmanager
def host_branches(values: Callable[[], HostValues | None], raised: list[Exception] | None = None) -> Iterator[None]:
    """While open, Python may branch on symbolic numbers that are host scalars; on others it is the usual error.

    `raised` gets such errors too, since a handler of the user's may catch them.
    """

    def truth_or(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def truth(symbol: Any) -> bool:
            host = values()
            known = None if host is None else host.truth(symbol, user_frame.current_line())
            if known is not None:
                return known
            try:
                return original(symbol)
            except user_frame.ASKS_FOR_A_NUMBER as error:
                if host is not None and host.is_chance(symbol):
                    error.add_note(user_frame.CHANCE)
                    raise
                check = assert_branches.asserted_branch_at(_asking()) if host is not None else None
                if check is None:
                    if host is not None and raised is not None:
                        raised.append(error)
                    raise
                CHECK(symbol, check.wanted, check.error, check.message)
                return check.wanted

        return truth

    def constructor(dtype: torch.dtype) -> Callable[[Any], Any]:
        make = original_constructor(dtype)
        # Fake kernels of complex operators convert numbers to complex, which needs a value; the dtype is all they use.
        return lambda number: number if dtype.is_complex and isinstance(number, torch.SymFloat) else make(number)

    def truth_of_tensor(tensor: torch.Tensor) -> bool:
        # torch would ask for the truth in C++, where nobody is asked first.
        if not (isinstance(tensor, FakeTensor) and tensor.device.type in ("cpu", "cuda") and tensor.numel() == 1):
            return original_truth(tensor)
        number = tensor.item()
        return bool(number != 0 if isinstance(number, torch.SymInt) else number)

    original_constructor, original_truth = prims.dtype_to_type_ctor, torch.Tensor.__bool__
    with (
        patch.object(torch.Tensor, "__bool__", truth_of_tensor),
        patch.object(prims, "dtype_to_type_ctor", constructor),
        patch.object(torch.SymBool, "__bool__", truth_or(torch.SymBool.__bool__)),
        patch.object(torch.SymFloat, "__bool__", truth_or(torch.SymFloat.__bool__)),
    ):
        yield


def _asking() -> FrameType | None:
    """The frame that asks for a truth value, which led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


@contextmanager
def kernels_branch(numbers: Mapping[Any, float]) -> Iterator[None]:
    """While open, branches of fake kernels on symbols go as for these numbers: shapes and types do not depend on it.

    ``sub`` asks whether its `alpha` is 1. For after the trace, when Python has asked all that it asks.
    """
    original: Callable[[Any], bool] = torch.SymBool.__bool__

    def truth(symbol: Any) -> bool:
        try:
            return original(symbol)
        except user_frame.ASKS_FOR_A_NUMBER:
            found = str(symbol.node.expr.xreplace(numbers))
            if found not in ("True", "False"):
                raise
            return found == "True"

    with patch.object(torch.SymBool, "__bool__", truth):
        yield


def predicate_graph(values: HostValues) -> tuple[fx.GraphModule, list[bool], list[str]] | None:
    """A graph from the traced graph's placeholders to every predicate, with the values and lines found.

    Writes in it fall on clones that the caller passes. None where Python branched on nothing.
    """
    if not values.predicates:
        return None
    wanted = [node for node, _, _ in values.predicates.values()]
    needed = _ancestors(wanted, values)
    graph = fx.Graph()
    memo: dict[fx.Node, fx.Node] = {}
    for node in wanted[0].graph.find_nodes(op="placeholder"):
        memo[node] = graph.placeholder(node.name)
    for node in wanted[0].graph.nodes:
        if node in values.certain:
            memo[node] = graph.call_function(*values.certain[node])
        elif node in needed and node not in memo:
            memo[node] = graph.node_copy(node, lambda arg: memo[arg])
    graph.output(tuple(graph.call_function(_TRUTH, (memo[node],)) for node in wanted))
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
    module = fx.GraphModule(values._tracer.root, graph)
    found = list(values.predicates.values())
    return module, [result for _, result, _ in found], [line for _, _, line in found]


def _ancestors(wanted: list[fx.Node], values: HostValues) -> set[fx.Node]:
    """Every node that the wanted ones need, including earlier writes to the memory of the tensors they read.

    What a comparison that is certain was made of is not needed: nothing is drawn for a predicate.
    """
    met = values.met
    order = {node: index for index, node in enumerate(wanted[0].graph.nodes)}
    last = max(order[node] for node in wanted)
    writers: dict[int | None, list[fx.Node]] = {}
    for node in met:
        for position in op_info.mutated_args(node.target) if order[node] < last else ():
            written: list[fx.Node] = []
            if position < len(node.args):
                fx.node.map_arg(node.args[position], written.append)
            for one in written:
                writers.setdefault(_memory_of(met.get(one)), []).append(node)
    needed: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        stack.extend(() if node in values.certain else node.all_input_nodes)
        if (memory := _memory_of(met.get(node))) is not None:
            stack.extend(writers.get(memory, ()))
    return needed
