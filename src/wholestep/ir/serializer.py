"""Programs as bytes, from which another process has the same program without tracing.

Nodes are written as plain records, fake tensors as their layout and the number of their storage, so that what shared
memory shares it again. Everything else is pickled: operators by name, functions by module and name. The nodes of a
segment are bytes of their own, read when somebody asks for them: who has its kernels does not.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from wholestep.errors import ArtifactError
from wholestep.ir import node_meta
from wholestep.ir.lazy_graph_module import module_of
from wholestep.ir.printer import attribute
from wholestep.ir.segment import Segment
from wholestep.ir.sizes import is_data
from wholestep.util.lazy_import import lazy_import

source = lazy_import("torch._dynamo.source")

_namespaces: dict[str, tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {}


def register_namespace(namespace: str, describe: Callable[[Any], tuple[Any, ...]], make: Callable[..., Any]) -> None:
    """Tells how operators come about that are made while a step is captured, and that another process has to make.

    `describe` gives plain data for an operator of this namespace, and `make` the operator for that data.
    """
    _namespaces[namespace] = (describe, make)


class NotPortable(ArtifactError):
    """Something of a step has no meaning in another process. Says what."""


class _Arg:
    """Stands for a node among the arguments of another."""

    def __init__(self, number: int) -> None:
        self.number = number


def dumps(thing: Any) -> bytes:
    """`thing` as bytes: programs, segments, graphs, and whatever pickle takes.

    Raises:
        NotPortable: for what is tied to this process: a tensor whose size is data, a local function.
    """
    made = io.BytesIO()
    try:
        _Writer(made, protocol=5).dump(thing)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotPortable(f"it holds something that cannot be written down: {error}") from error
    return made.getvalue()


def loads(data: bytes, shapes: SavedShapes | None = None) -> Any:
    """What `dumps` was given. It runs what the bytes say, so they must be one's own.

    `shapes`: knows the sizes of arguments that move, by name; without any a shape environment is made.
    """
    return _Reader(io.BytesIO(data), SavedShapes() if shapes is None else shapes).load()


_PLAIN = frozenset({str, int, float, bool, type(None), tuple, list, dict, type})
"""Types of most of what a program consists of, and of nothing that is written in a way of its own."""


class _Writer(pickle.Pickler):
    """Numbers storages as they come by."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self._storages: dict[int, int] = {}
        self._facts: dict[Any, Any] = {}
        self._expressions: dict[Any, bytes] = {}

    def persistent_id(self, thing: Any) -> Any:
        if type(thing) in _PLAIN:  # each question below takes its time
            return None
        if isinstance(thing, FakeTensor):
            return ("fake", *self._layout(thing))
        if isinstance(thing, torch._ops.OpOverload):
            if thing.namespace in _namespaces:
                return ("made", thing.namespace, *_namespaces[thing.namespace][0](thing))
            return ("op", thing.namespace, thing._schema.name.split("::")[1], thing._overloadname)
        if isinstance(thing, torch.SymFloat):
            return ("number",)
        if isinstance(thing, torch.SymBool):
            return ("truth",)
        if isinstance(thing, torch.Generator):
            raise NotPortable("it draws from a torch.Generator, and a copy of that would not be the user's")
        if isinstance(thing, torch.SymInt) and not thing.node.has_hint():
            return ("count",)
        if isinstance(thing, torch.SymInt):
            return self._number(thing)
        return ("shapes",) if thing is _SHAPES else None

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, fx.GraphModule):
            return _graph_module, self._written(thing)
        if isinstance(thing, Segment):
            facts = {"name": thing.name, "told": thing.does, "stored": thing.stored, "told_sizes": thing.sizes}
            return _segment, (dumps(thing.module), _SHAPES, facts)
        if isinstance(thing, pytree.TreeSpec):
            return _structure, ((thing.type, thing.context, thing.children()) if thing.type is not None else ())
        return NotImplemented

    def _layout(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotPortable(f"it holds a tensor whose layout is no plain one: {tensor}")
        if any(map(is_data, (*tensor.shape, *tensor.stride(), tensor.storage_offset()))):
            raise NotPortable(f"it holds a tensor whose size is data: {tensor}")
        storage, device = tensor.untyped_storage(), tensor.device
        shape, strides = (tuple(map(self._number, numbers)) for numbers in (tensor.shape, tensor.stride()))
        return (
            self._storages.setdefault(storage._cdata, len(self._storages)), self._number(storage.nbytes()),
            tensor.dtype, shape, strides, self._number(tensor.storage_offset()), self._facts.setdefault(device, device),
        )  # fmt: skip

    def _number(self, number: int | torch.SymInt) -> Any:
        """A number as it is; one computed from ranks or from sizes of arguments as an expression of them by name."""
        if isinstance(number, int):
            return number
        expression = number.node.expr
        if expression not in self._expressions:
            self._expressions[expression] = pickle.dumps(portable(expression, number.node.shape_env))
        return ("computed", self._expressions[expression])

    def _written(self, module: fx.GraphModule) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
        numbers = {node: number for number, node in enumerate(module.graph.nodes)}
        attributes: dict[str, Any] = {}
        records = []
        for node in module.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: _Arg(numbers[arg]))  # type: ignore[arg-type,return-value]
            records.append((node.op, node.name, node.target, _plain(args), _plain(kwargs), self._facts_of(node)))
            if node.op == "get_attr":
                attributes[str(node.target)] = attribute(module, str(node.target))
        return records, attributes

    def _facts_of(self, node: fx.Node) -> dict[str, Any]:
        """Metadata, in which equal origins are one object: pickle writes and reads it once."""
        facts = node_meta.portable(node)
        return {
            key: self._facts.setdefault(one, one) if isinstance(one, node_meta.Origin) else one
            for key, one in facts.items()
        }


_SHAPES = object()
"""Stands for the shape environment of the reader."""


def portable(expression: Any, shapes: ShapeEnv) -> Any:
    """An expression of torch's sympy, in which ranks and sizes of arguments are symbols with names that other
    processes know. Raises NotPortable for other numbers."""
    names = {one: next(map(_name, shapes.var_to_sources.get(one, ())), "") for one in expression.free_symbols}
    if not all(names.values()):
        raise NotPortable(f"it holds {expression}, a number that depends on data")
    symbols = {one: sympy.Symbol(name, integer=True, nonnegative=True) for one, name in names.items()}
    return expression.xreplace(symbols)


def _name(origin: Any) -> str:
    """The name of a number of this project's: that of a rank, or a size of an argument."""
    return str(origin.source_name) if isinstance(origin, source.ConstantSource) else ""


class SavedShapes(ShapeEnv):
    """Knows where its symbols come from, and tells nobody: to find and log a line, torch would import its compiler."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.named: dict[str, Any] = {}
        """Symbols by the names that `portable` gives."""

    def computed(self, expression: Any) -> Any:
        """The number that an expression of `portable` is here."""
        known = {one: self._symbol_named(one.name) for one in expression.free_symbols}
        made = expression.xreplace({one: number.node.expr for one, number in known.items()})
        hints = {one: sympy.Integer(number.node.hint) for one, number in known.items()}
        return self.create_symintnode(made, hint=int(expression.xreplace(hints)))

    def _symbol_named(self, name: str) -> Any:
        if name not in self.named:
            # What a process is among others is told at every call; here it is a number like any other.
            origin = source.ConstantSource(name)
            self.named[name] = self.create_unspecified_symint_and_symbol(0, origin, DimDynamic.DYNAMIC)
        return self.named[name]

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> Any:
        return super()._get_stack_summary(is_debug, framework_loc or "a program that was saved")

    def _log_create_unbacked_symbol(self, *told: Any, **more: Any) -> None: ...


class _Reader(pickle.Unpickler):
    """Makes fake tensors in one mode of its own."""

    def __init__(self, file: io.BytesIO, shapes: SavedShapes) -> None:
        super().__init__(file)
        self._shape_env = shapes
        self._mode = FakeTensorMode(shape_env=self._shape_env, allow_non_fake_inputs=True)
        self._storages: dict[int, torch.UntypedStorage] = {}
        # One symbol for all numbers of the host: which one it is was told by the node that gives it, here as there.
        self._number = functools.cache(self._shape_env.create_unbacked_symfloat)
        self._truth = functools.cache(self._shape_env.create_unbacked_symbool)
        self._count = functools.cache(self._shape_env.create_unbacked_symint)
        self._computed = functools.cache(lambda data: shapes.computed(pickle.loads(data)))

    def persistent_load(self, mark: Any) -> Any:
        kind, *rest = mark
        makers: dict[str, Callable[..., Any]] = {
            "fake": self._fake,
            "op": _op,
            "made": _made,
            "number": self._number,
            "truth": self._truth,
            "count": self._count,
            "computed": self._computed,
            "shapes": lambda: self._shape_env,
        }
        return makers[kind](*rest)

    def _of(self, number: Any) -> Any:
        return self._computed(number[1]) if isinstance(number, tuple) else number

    def _fake(self, number: int, num_bytes: Any, dtype: torch.dtype, *layout: Any) -> torch.Tensor:
        shape, stride, offset, device = layout
        with self._shape_env.suppress_guards():  # what torch asks here is no condition of a trace
            if number not in self._storages:
                made = torch.empty(self._of(num_bytes), dtype=torch.uint8, device="meta")
                self._storages[number] = made.untyped_storage()
            shape, stride = (list(map(self._of, numbers)) for numbers in (shape, stride))
            made = torch.empty(0, dtype=dtype, device="meta")
            return FakeTensor(self._mode, made.set_(self._storages[number], self._of(offset), shape, stride), device)


def _structure(kind: Any = None, context: Any = None, children: list[pytree.TreeSpec] | None = None) -> Any:
    return pytree.tree_structure(0) if kind is None else pytree.TreeSpec(kind, context, children or [])


def _segment(data: bytes, shapes: SavedShapes, facts: dict[str, Any]) -> Segment:
    return Segment(read=functools.cache(functools.partial(loads, data, shapes)), **facts)


def _op(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _made(namespace: str, *data: Any) -> Any:
    return _namespaces[namespace][1](*data)


def _plain(tree: Any) -> Any:
    """Arguments without fx's own lists and dicts."""
    if isinstance(tree, tuple):
        return tuple(map(_plain, tree))
    if isinstance(tree, list):
        return [_plain(one) for one in tree]
    return {key: _plain(one) for key, one in tree.items()} if isinstance(tree, dict) else tree


def _graph_module(records: list[tuple[Any, ...]], attributes: dict[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def argument(tree: Any) -> Any:
        if isinstance(tree, _Arg):
            return nodes[tree.number]
        if isinstance(tree, tuple):
            return tuple(map(argument, tree))
        if isinstance(tree, list):
            return [argument(one) for one in tree]
        if isinstance(tree, slice):
            return slice(argument(tree.start), argument(tree.stop), argument(tree.step))
        return {key: argument(one) for key, one in tree.items()} if isinstance(tree, dict) else tree

    for op, name, target, args, kwargs, facts in records:
        node = graph.create_node(op, target, argument(args), argument(kwargs), name)
        node.meta = facts
        nodes.append(node)
    return module_of(attributes, graph)
