"""The interpreter of placement for programs with sharded inputs.

[Note: what decides]
Inputs say how they are cut (`Input.shard`), and everything follows from that: with parameters and optimizer state cut
this is FSDP, with optimizer state alone ZeRO. Every value of the new graph is whole or has a layout
(`wholestep.place.layouts`). A rule of `wholestep.place.sharded_rules` computes on parts what it can. Where there is
none, parts are gathered and the operator runs on the whole tensors, on every rank alike; in the forward and in the
backward that is what sharding means, elsewhere it is noted.

[Note: gathered once a phase]
A value that the forward gathers and the backward gathers again need not live in between. So gathers belong to a phase,
and views of parameters are made in the phase that reads them: else a transposed weight that autograd has saved would
keep all of it alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import Bucket, BucketKind, Region
from wholestep.ir.program import (
    Input,
    InputKind,
    Output,
    OutputKind,
    Placement,
    PlacementFallback,
    Program,
    ShardSpec,
)
from wholestep.place import layouts
from wholestep.place.interpreter import Placer, Rule, Strategy
from wholestep.place.layouts import LazyView, NormOfShard, Unreduced
from wholestep.util.lazy_import import lazy_import

source = lazy_import("torch._dynamo.source")

_aten = torch.ops.aten
_COMPUTED_WHOLE = frozenset({Region.FORWARD, Region.BACKWARD, Region.RECOMPUTE})
"""Parts of the step that want whole parameters in any case."""


class ShardedPlacer(Placer):
    """One placement of a program with sharded inputs."""

    def __init__(
        self, program: Program, strategy: Strategy, rules: Mapping[Any, Rule], *,
        again: Collection[str] | None, shard_grads: bool,
    ) -> None:  # fmt: skip
        """`again`: names of the inputs that each phase gathers for itself; None for all that a phase reads.
        `shard_grads`: gradients that the step leaves are parts."""
        super().__init__(program, strategy, rules)
        self._again, self._shard_grads = again, shard_grads
        self.layouts: dict[fx.Node, Any] = {}
        """New node -> its layout, or lists of layouts; a node that is not in here is whole."""
        self.param_specs = specs_by_param(program)
        """How the gradient of a parameter is cut that an optimizer needs in parts, by name."""
        self._entry_gradients: set[fx.Node] = set()
        self._whole: dict[tuple[Any, str], fx.Node] = {}
        self._own: dict[tuple[fx.Node, ShardSpec], fx.Node] = {}
        self._rank: fx.Node | None = None
        self._has_begun = False
        self._labels: dict[fx.Node, str] = {}
        """Names of parameters and state, also of casts of them."""
        self._gathered: Counter[str] = Counter()
        self._gathered_bytes: Counter[str] = Counter()

    # What rules ask.

    def layout(self, value: Any) -> Any:
        """The layout of a value of the new graph, or the lists of them; None for a whole one."""
        if isinstance(value, LazyView):
            return value
        return self.layouts.get(value) if isinstance(value, fx.Node) else None

    def on_shards(self, node: fx.Node, args: Any, kwargs: Any, layout: Any) -> fx.Node:
        """The call of `node` on other arguments, whose result has `layout`."""
        made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        node_meta.copy_meta(node, made)
        with node_meta.fake_mode(node.graph):
            node_meta.set_value(made, _value_on_shards(node_meta.value(node), layout))
        if layout is not None:
            self.layouts[made] = layout
        if len(made.all_input_nodes) == 1 and (label := self._labels.get(made.all_input_nodes[0])):
            self._labels[made] = label
        return made

    def valid(self, shard: fx.Node, spec: ShardSpec) -> fx.Node:
        """A part with zeros in the place of its padding, which may hold anything."""
        if not spec.padding:
            return shard
        length = spec.whole_shape[spec.dim]
        line = ShardSpec(axis=spec.axis, num_ranks=spec.num_ranks, dim=0, whole_shape=(length,))
        device = node_meta.tensor(shard).device
        ones = self.emit(_aten.ones.default, [length], like=shard, dtype=torch.bool, device=device)
        is_valid = layouts.own_shard(self, ones, line, self.rank())
        later = len(spec.whole_shape) - spec.dim - 1
        beside = self.emit(_aten.view.default, is_valid, [spec.shard_length, *[1] * later], like=shard)
        return self.emit(_aten.where.ScalarOther, beside, shard, 0, like=shard)

    def is_entry_gradient(self, value: fx.Node) -> bool:
        """Whether a value is the gradient that a parameter has when the call begins."""
        return value in self._entry_gradients

    def whole(self, value: Any, phase: str) -> Any:
        """A value, gathered where it is not whole. Values of other kinds are what they are."""
        if isinstance(value, Unreduced):
            gathered = self.whole(value.reduced, phase)
            return self.emit(_aten.add.Tensor, gathered, value.local, like=value.local)
        layout = self.layout(value)
        if layout is None or isinstance(layout, list):
            return value
        key = (value if isinstance(value, fx.Node) else id(value), phase)
        if key not in self._whole:
            self._whole[key] = self._make_whole(value, layout, phase)
        return self._whole[key]

    def own_shard(self, value: Any, spec: ShardSpec) -> Any:
        """This rank's part of a value that is whole, or that is cut so already."""
        layout = self.layout(value)
        if layout == spec:
            return value
        assert isinstance(value, fx.Node)
        if (value, spec) not in self._own:
            made = layouts.own_shard(self, value, spec, self.rank())
            self.layouts[made] = spec
            self._own[value, spec] = made
        return self._own[value, spec]

    def rank(self) -> fx.Node:
        """The number of this process on the axis that state is cut over: an input more, after all others."""
        assert self._rank is not None
        return self._rank

    # The walk.

    def run(self) -> Program:
        """The placed program."""
        placed = super().run()
        inputs = [self._input(record) for record in self.program.inputs]
        if self._rank is not None:
            inputs.append(Input(kind=InputKind.RANK, name=self._rank_name, shape=(), dtype=torch.int64))
        fallbacks = tuple(
            PlacementFallback(operator=name, count=count, num_bytes=self._gathered_bytes[name])
            for name, count in sorted(self._gathered.items())
        )
        outputs = tuple(
            one if one.kind is OutputKind.WRITE else replace(one, shard=self.layout(value))
            for one, value in zip(self.program.outputs, self._results, strict=True)
        )
        return replace(placed, inputs=tuple(inputs), outputs=outputs, fallbacks=fallbacks)

    @property
    def _rank_name(self) -> str:
        return f"rank.{self.strategy.axis.name} of the strategy"

    def _input(self, record: Input) -> Input:
        if record.shard is None:
            return record
        return replace(record, shape=record.shard.shard_shape, placement=Placement.SHARD)

    def _write(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._write_input(node)
        if not self._has_begun:
            self._has_begun = True
            self._rank = self._write_rank(node.graph)
            self.strategy.begin(self)
        if node.op == "output":
            return self._write_output(node)
        if node.op != "call_function" or not any(self.is_cut(self.values[one]) for one in node.all_input_nodes):
            return super()._write(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: self.values[one])
        with torch.no_grad():
            rule = self.rules.get(node.target)
            if rule is not None:
                return rule(self, node, args, kwargs)
            made = self.sharded_rule(node, args, kwargs)
            return self._write_whole(node) if made is None else made

    def sharded_rule(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """What computes the node on parts; None where nothing does."""
        raise NotImplementedError

    def is_cut(self, value: Any) -> bool:
        """Whether a value is anything but whole."""
        return isinstance(value, (LazyView, Unreduced)) or self.layout(value) is not None

    def _write_input(self, node: fx.Node) -> fx.Node:
        record = self.program.inputs[len(self.values)]
        new: fx.Node = super()._write(node)
        if record.shard is not None:
            with node_meta.fake_mode(node.graph):
                like = node_meta.tensor(node)
                node_meta.set_value(new, torch.empty(record.shard.shard_shape, dtype=like.dtype, device=like.device))
            self.layouts[new] = record.shard
            self._labels[new] = record.name
            if record.kind is InputKind.GRAD:
                self._entry_gradients.add(new)
        return new

    def _write_rank(self, old: fx.Graph) -> fx.Node:
        new = self.graph.placeholder("rank_of_strategy")
        shape_env = node_meta.fake_mode(old).shape_env
        assert shape_env is not None  # capture makes one
        made = shape_env.create_unspecified_symint_and_symbol(
            0, source.ConstantSource("rank_of_strategy"), DimDynamic.DYNAMIC
        )
        node_meta.set_value(new, made)
        return new

    def _write_output(self, node: fx.Node) -> fx.Node:
        self._results: list[Any] = []
        with torch.no_grad():
            for output, old in zip(self.program.outputs, self.program.results, strict=True):
                self._results.append(self._result(output, old) if isinstance(old, fx.Node) else old)
        made: fx.Node = self.graph.output(tuple(self._results))
        if self._rank is not None and not self._rank.users:  # a program without it can be saved for other processes
            self.graph.erase_node(self._rank)
            self._rank = None
        return made

    def _result(self, output: Output, old: fx.Node) -> Any:
        value = self.values[old]
        if output.kind is OutputKind.WRITE:
            assert isinstance(output.target, int)  # by the spec of a WRITE
            spec = self.program.inputs[output.target].shard
            if isinstance(value, fx.Node):
                self._labels.setdefault(value, self.program.inputs[output.target].name)
            return self.whole(value, "end") if spec is None else self.own_shard(self._unless_cut_so(value, spec), spec)
        is_grad = output.kind is OutputKind.GRAD and self._shard_grads
        if (is_grad or output.kind is OutputKind.STATE) and isinstance(self.layout(value), ShardSpec):
            return value
        whole = self.whole(value, "end")
        return self._cut_gradient(output, whole) if is_grad else whole

    def _cut_gradient(self, output: Output, whole: fx.Node) -> fx.Node:
        """This rank's part of a gradient that a fallback has made whole, in memory of its own."""
        assert output.target is not None  # by the spec of a GRAD
        spec = self.param_specs.get(self.program.inputs[output.target].name)
        if spec is None or node_meta.tensor(whole).layout is not torch.strided:
            return whole
        made = self.emit(_aten.clone.default, self.own_shard(whole, spec), like=whole)
        self.layouts[made] = spec
        return made

    def _unless_cut_so(self, value: Any, spec: ShardSpec) -> Any:
        return value if self.layout(value) == spec else self.whole(value, "end")

    def _write_whole(self, node: fx.Node) -> fx.Node:
        """The node on whole tensors, which are gathered for it."""
        region = node_meta.origin(node).region
        if not computes_whole(node):
            name = str(node.target)
            self._gathered[name] += 1
            self._gathered_bytes[name] += sum(
                node_meta.num_bytes(one) for one in node.all_input_nodes if self.is_cut(self.values[one])
            )
        phase = _phase(region)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: self.whole(self.values[one], phase))
        made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        node_meta.copy_meta(node, made)
        return made

    def _make_whole(self, value: Any, layout: Any, phase: str) -> fx.Node:
        if isinstance(layout, LazyView):
            base = self.whole(layout.base, phase)
            rest = fx.node.map_arg(layout.node.args[1:], lambda one: self.values[one])
            return self.emit(layout.node.target, base, *rest, like=layout.node, **layout.node.kwargs)
        if isinstance(layout, NormOfShard):
            return self.combined_norms([value], layout.order)[0]
        is_kept = self._again is not None and self._labels.get(value) not in self._again
        if is_kept and ((value, "") in self._whole or phase in node_meta.COMPUTING_PHASES):
            return self._kept(value, layout)
        return self._gather(value, layout, phase)

    def _kept(self, value: fx.Node, spec: ShardSpec) -> fx.Node:
        if (value, "") not in self._whole:
            self._whole[value, ""] = self._gather(value, spec, "")
        return self._whole[value, ""]

    def _gather(self, value: fx.Node, spec: ShardSpec, phase: str) -> fx.Node:
        num_bytes = node_meta.num_bytes(value) * spec.num_ranks
        label = self._labels.get(value, value.name)
        bucket = Bucket(0, (label,), num_bytes, node_meta.UNBUCKETED, kind=BucketKind.GATHER, phase=phase)
        return layouts.gather(self, value, spec, self.strategy.axis, bucket)

    def combined_norms(self, parts: list[fx.Node], order: float) -> list[fx.Node]:
        """The norms of whole tensors, of those of their parts: one reduction for all of them.

        Powers are added in float32 where norms are in half precision.
        """
        like, is_max = parts[-1], order == float("inf")
        dtype = node_meta.tensor(like).dtype
        powers = self.emit(_aten.stack.default, parts, like=like)
        if dtype in (torch.float16, torch.bfloat16):
            powers = self.emit(_aten._to_copy.default, powers, like=like, dtype=torch.float32)
        if not is_max:
            powers = self.emit(_aten.pow.Tensor_Scalar, powers, order, like=like)
        operation = "max" if is_max else "sum"
        start = self.emit(op_info.c10d.all_reduce.default, powers, operation, self.strategy.axis.group, like=like)
        total = self.emit(op_info.WAIT, start, like=like)
        if not is_max:
            total = self.emit(_aten.pow.Tensor_Scalar, total, 1.0 / order, like=like)
        if dtype in (torch.float16, torch.bfloat16):
            total = self.emit(_aten._to_copy.default, total, like=like, dtype=dtype)
        return [self.emit(_aten.select.int, total, 0, place, like=like) for place in range(len(parts))]


def _value_on_shards(whole: Any, layout: Any) -> Any:
    """What stands for the result of a call on shards, from what stands for that on whole tensors.

    No kernel is asked: some look at numbers of the host, which are symbols.
    """
    if isinstance(layout, list):
        return type(whole)(_value_on_shards(one, own) for one, own in zip(whole, layout, strict=True))
    if not isinstance(layout, ShardSpec):
        return whole
    order = sorted(range(whole.dim()), key=lambda dim: -whole.stride(dim))
    return torch.empty_permuted(layout.shard_shape, order, dtype=whole.dtype, device=whole.device)


def computes_whole(node: fx.Node) -> bool:
    """Whether a node belongs to a part of the step in which values differ from rank to rank, as activations do."""
    return node_meta.origin(node).region in _COMPUTED_WHOLE


def _phase(region: Region) -> str:
    return Region.BACKWARD.value if region is Region.RECOMPUTE else region.value


def specs_by_param(program: Program) -> dict[str, ShardSpec]:
    """How parameters are cut, or else their gradients at entry, or what optimizers keep of them; by their names."""
    params = {one.name: one for one in program.inputs if one.kind is InputKind.PARAM}
    specs = {name: one.shard for name, one in params.items() if one.shard is not None}
    for record in program.inputs:
        if record.kind in (InputKind.GRAD, InputKind.OPTIMIZER) and record.shard is not None:
            owner = param_of(record, params)
            if owner is not None:
                specs.setdefault(owner.name, record.shard)
    return specs


def param_of(record: Input, params: Mapping[str, Input]) -> Input | None:
    """The parameter whose gradient the input is, or whose state of the same shape. `params`: all, by name."""
    if record.kind is InputKind.GRAD:
        return params.get(record.name.removesuffix(".grad"))
    parts = record.name.split(".")
    names = (".".join(parts[first:]) for first in range(1, len(parts)))
    owner = next((params[name] for name in names if name in params), None)  # the longest name
    whole = record.shape if record.shard is None else record.shard.whole_shape
    owner_shape = owner and (owner.shape if owner.shard is None else owner.shard.whole_shape)
    return owner if whole == owner_shape else None
