"""Calls of a live step on shards: its Python computes with whole tensors, as where nothing is sharded.

[Note: whole operands]
Under FSDP parameters and their gradients are DTensors between forwards. What torch makes of those is not what the same
lines make of plain tensors: ``float(p.grad.abs().max())`` is the maximum of this rank's part, and a penalty on weights
beside a plain loss is an error. So a call that the step's own Python makes is given whole tensors in the place of its
shards, and what it writes to them is put back into the shards. Three kinds of calls go to the shards as they are: those
of torch that act on parameters and gradients (steps of optimizers, clipping), calls in place on shards alone, and
attributes.

Calls that are recorded and run in a piece come here only where they are executed one by one.

A rank may ask for a whole tensor where others do not, as in ``if rank == 0: print(model.weight.norm())``. Those give
their part where they come to their next meeting (`Peers.whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from wholestep.capture.python.code_owner import is_library_class
from wholestep.capture.reach.train_state import states
from wholestep.capture.wrappers.fully_shard_hooks import as_of_whole_parameters, reshards_noted
from wholestep.capture.wrappers.fully_shard_settings import kept_gathered
from wholestep.ir.dtensor.shards import cut, is_dtensor, is_sharded, own_part
from wholestep.live.opaque.functions import acts_on_parameters, clear_grads, redirected
from wholestep.live.opaque.modules import OpaqueModule, OpenModule
from wholestep.live.ranks.peers import Peers
from wholestep.live.ranks.sharded_parameters import ShardedParameters, is_same_memory
from wholestep.live.recording.events import RUNS_ON_SHARDS, Event
from wholestep.live.recording.handle import CURRENT, RUNS, Recorder, RecordingMode, with_torch_functions
from wholestep.live.recording.metadata import METADATA
from wholestep.live.recording.observer import Draws, DrawWatch
from wholestep.live.recording.path import BACKWARDS
from wholestep.live.recording.structure import flatten, unflatten
from wholestep.runtime.sharding.replace_references import cut_state

_OPTIONS = ("retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched", "materialize_grads")
"""Parameters of ``torch.autograd.grad`` after the third."""
_TENSOR: Any = torch.Tensor
_SET_DATA = _TENSOR.data.__set__
_OF_THE_OBJECT = (torch.Tensor.detach, torch.detach, torch.Tensor.__deepcopy__)
"""What gives the memory of a tensor, as attributes do, or another object like it, for a ``load_state_dict``."""


@contextmanager
def whole_operands(peers: Peers) -> Iterator[None]:
    """While open, what this thread's Python computes with shards it computes with whole tensors."""
    calls = ShardCalls(peers)
    with redirected(looks=True), as_of_whole_parameters(calls.of_python), calls.of_python():
        yield


@contextmanager
def executed_on_whole(peers: Peers) -> Iterator[None]:
    """While open, calls of a live step that are executed on this thread are given whole tensors, as above."""
    calls = ShardCalls(peers)
    with as_of_whole_parameters(calls.of_python):
        CURRENT.executor = calls
        try:
            yield
        finally:
            CURRENT.executor = None
            calls.write_back()


@contextmanager
def executed_on_gathered(peers: Peers) -> Iterator[None]:
    """While open, calls of a live step on this thread are given parameters as ``fully_shard`` has them in eager code.

    It keeps some gathered between forward and backward. A recorded forward has gathered none, and Python finds shards.
    """
    CURRENT.executor = _GatheredCalls(peers)
    try:
        with reshards_noted(_note_reshard):
            yield
    finally:
        CURRENT.executor = None


def _note_reshard(module: FSDPModule) -> None:
    if (run := RUNS.get(get_ident())) is not None:
        run.note_reshard(module)


@dataclass(frozen=True, slots=True)
class _GatheredCalls:
    peers: Peers

    def execute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a call that a live step has recorded, or does not record."""
        leaves: list[Any] = []
        structure = flatten((args, kwargs), leaves)
        run = RUNS.get(get_ident())
        if run is not None and any(map(is_sharded, leaves)) and not acts_on_parameters(function, leaves):
            gathered = kept_gathered(run.gathering())
            for place, leaf in enumerate(leaves):
                if id(leaf) in gathered:
                    found = gathered[id(leaf)]
                    leaves[place] = self.peers.whole(leaf) if found is None else found
            args, kwargs = unflatten(structure, leaves)
        return with_torch_functions(function, args, kwargs)


@dataclass(slots=True)
class _Whole:
    """A whole tensor that stands for a shard, and may have views that Python holds."""

    shard: DTensor
    tensor: torch.Tensor

    def write_back(self) -> None:
        """Puts this rank's part into the shard, where it is another by now."""
        local, part = self.shard._local_tensor.detach(), self.tensor
        if is_sharded(self.shard):
            part = own_part(self.tensor, self.shard.device_mesh, self.shard.placements)
        if not _is_same(part, local):
            local.copy_(part)


class ShardCalls(Recorder):
    """The calls of one call of a live step whose parameters are shards."""

    def __init__(self, peers: Peers) -> None:
        """`peers` gather and reduce."""
        self._peers = peers
        self._held: list[_Whole] = []
        """Whole tensors of which Python may hold views: they are what their shards are until they are written back."""

    @contextmanager
    def of_python(self) -> Iterator[None]:
        """While open, what this thread calls is of the step's own Python."""
        around, CURRENT.run = CURRENT.run, self
        try:
            with RecordingMode():
                yield
        finally:
            CURRENT.run = around
            self.write_back()

    def execute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a call that a live step has recorded, or does not record."""
        with self.of_python():
            if isinstance(function, (OpaqueModule, OpenModule)):
                return function(*args, **kwargs)
            return self.called(function, args, kwargs)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a torch function by the step's own Python."""
        if function in METADATA:
            return function(*args, **kwargs)
        CURRENT.run = None
        try:
            return self._called(function, args, kwargs)
        finally:
            CURRENT.run = self

    def called_module(
        self, plain: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a module: its hooks gather what it needs, so shards are as Python has left them."""
        self.write_back()
        return plain(module, *args, **kwargs)

    def unrecorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """A function with a backward of its own. Those of torch, DTensor's among them, know what they are given."""
        if args and is_library_class(args[0]):
            return function(*args, **kwargs)
        return self.called(function, args, kwargs)

    def flush(self, why: str) -> None:
        """Nothing waits."""

    def before_draws_are_told(self, function: Any) -> None:
        """Nothing waits."""

    def before_ranks_communicate(self, function: Any) -> None:
        """Nothing waits."""

    def before_another_thread_calls(self, module: nn.Module) -> None:
        """Nothing waits."""

    def write_back(self) -> None:
        """Puts into the shards what Python has written to views of whole tensors."""
        with torch.no_grad():
            for one in self._held:
                one.write_back()

    def _called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves: list[Any] = []
        structure = flatten((args, kwargs), leaves)
        if function is torch.autograd.grad and any(map(is_sharded, leaves)):
            return self._gradients(*args, **kwargs)
        if function in BACKWARDS or acts_on_parameters(function, leaves):
            return self._on_shards(function, args, kwargs)
        shards = [leaf for leaf in leaves if is_dtensor(leaf)]
        if not shards:
            return with_torch_functions(function, args, kwargs)
        if function in _OF_THE_OBJECT or _is_descriptor(function) or any(map(_is_hook, leaves)):
            return self._attribute(function, args, kwargs)
        if _is_in_place(function) and not any(_is_plain(leaf) for leaf in leaves):
            return self._in_place(function, args, kwargs, leaves)
        return self._on_whole(function, leaves, structure)

    def _on_shards(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that acts on parameters and gradients. What it gives is whole; all ranks come."""
        self.write_back()
        for opt in (one for one in args if isinstance(one, Optimizer)):
            self._cut_state(opt)
        if function not in (*BACKWARDS, clear_grads):  # ranks meet before those anyway, or need not
            self._peers.meet(Event(RUNS_ON_SHARDS))
        result = with_torch_functions(function, args, kwargs)
        self._refresh()
        return pytree.tree_map_only(DTensor, DTensor.full_tensor, result)

    def _gradients(self, outputs: Any, inputs: Any, grad_outputs: Any = None, *rest: Any, **options: Any) -> Any:
        """``torch.autograd.grad`` of parameters: whole, and averaged over the ranks, as a backward leaves them."""
        options |= dict(zip(_OPTIONS, rest, strict=False))
        if options.get("create_graph"):
            return self._on_shards(torch.autograd.grad, (outputs, inputs, grad_outputs), options)
        wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        leaves, fills = self._peers.leaves_of_forwards(), options.pop("materialize_grads", False)
        may_be_none = options.pop("allow_unused", None) or fills
        shards = {place: one for place, one in enumerate(wanted) if is_sharded(one)}
        own = [*(leaves.get(id(one), one) for one in wanted), *shards.values()]  # the latter outside of forwards
        self.write_back()
        with self._peers.shards.gradients_kept():
            grads = list(
                with_torch_functions(
                    torch.autograd.grad, (outputs, own, grad_outputs), {**options, "allow_unused": True}
                )
            )
        del grads[len(wanted) :]
        for place, shard in shards.items():
            kept = self._peers.shards.take_gradient(shard)
            grads[place] = kept if grads[place] is None else grads[place] if kept is None else grads[place] + kept
        means = self._peers.mean([grads[place] for place in shards], list(shards.values()))
        for place, mean in zip(shards, means, strict=True):
            grads[place] = mean
        if any(one is None for one in grads) and not may_be_none:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        if fills:
            like = zip(grads, wanted, strict=True)
            grads = [torch.zeros(w.shape, dtype=w.dtype, device=w.device) if g is None else g for g, w in like]
        return tuple(grads)

    def _attribute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An attribute of a shard, or what is on its memory. A plain tensor that is put there is cut."""
        self.write_back()
        owner, *values = args
        if is_sharded(owner):
            mesh, placements = owner.device_mesh, owner.placements
            given, values = values, [cut(one, mesh, placements) if _is_plain(one) else one for one in values]
            if function == _SET_DATA:
                return self._set_data(owner, values[0], given[0])
        elif function == _SET_DATA and is_dtensor(values[0]):
            values = [self._peers.whole(values[0])]
        result = with_torch_functions(function, (owner, *values), kwargs)
        if is_dtensor(owner) and is_dtensor(result) and is_same_memory(owner, result):
            self._peers.shards.note_name(result)
        self._refresh()
        return result

    def _set_data(self, owner: DTensor, value: DTensor, given: torch.Tensor) -> None:
        """Another memory for a shard. The hooks of torch gather from the one that they know, so that is written to, and
        what else is on it is given a memory of its own, with what was there. A whole tensor is on it from now on."""
        self._held = [one for one in self._held if not is_same_memory(one.shard, owner)]
        self._peers.shards.part_names(owner)
        owner._local_tensor.detach().copy_(value._local_tensor)
        self._held += [_Whole(owner, given)] if _is_plain(given) else []

    def _cut_state(self, opt: Optimizer) -> None:
        """Cuts what Python has put whole into the state of an optimizer of shards."""
        on_shards = {id(one.tensor): one.shard for one in self._held}
        for param, held in states(opt):
            for key in [key for key, item in held.items() if id(item) in on_shards]:
                held[key] = on_shards[id(held[key])].detach()
                self._peers.shards.note_name(held[key])
            if is_sharded(param):
                cut_state(param, held, param.device_mesh, param.placements)

    def _in_place(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """A call in place on shards alone: torch knows how, for most. What draws, draws for the whole tensor."""
        self.write_back()
        try:
            with DrawWatch():  # type: ignore[no-untyped-call]
                result = with_torch_functions(function, args, kwargs)
        except (NotImplementedError, Draws):
            return self._on_whole(function, leaves, flatten((args, kwargs), []))
        self._refresh()
        return result

    def _on_whole(self, function: Any, leaves: Sequence[Any], structure: Any) -> Any:
        wholes: dict[int, _Whole] = {}
        given: list[Any] = []
        for leaf in leaves:
            if is_dtensor(leaf):
                if id(leaf) not in wholes:
                    wholes[id(leaf)] = self._whole(leaf)
                given.append(self._with_graph(leaf, wholes[id(leaf)].tensor))
            else:
                given.append(leaf)
        args, kwargs = unflatten(structure, given)
        before = [(one, one.tensor.clone()) for one in wholes.values()] if self._held else []
        result = with_torch_functions(function, args, kwargs)
        with torch.no_grad():
            for one in wholes.values():
                one.write_back()
        # Views of others on the same memory would undo a write. Whether there was one is asked of the values, since
        # some operators count no version, and of the whole, since all ranks must come to refresh.
        if not all(_is_same(one.tensor, old) for one, old in before):
            self._refresh()
        stand_for = {id(tensor): leaf for leaf, tensor in zip(leaves, given, strict=True) if is_dtensor(leaf)}
        result = pytree.tree_map_only(torch.Tensor, lambda one: stand_for.get(id(one), one), result)
        self._hold(wholes.values(), result)
        return result

    def _whole(self, shard: DTensor) -> _Whole:
        known = next((one for one in self._held if is_same_memory(one.shard, shard)), None)
        if known is not None:
            return known
        self.write_back()  # of others on the same memory
        return _Whole(shard, self._peers.whole(shard))

    def _with_graph(self, leaf: DTensor, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor in the place of `leaf`, which may be one of several objects on the same memory."""
        if not (torch.is_grad_enabled() and leaf.requires_grad):
            return whole
        made: torch.Tensor = _WholeParameter.apply(leaf, whole, self._peers.shards)  # type: ignore[no-untyped-call]
        return made

    def _hold(self, wholes: Any, result: Any) -> None:
        """Keeps whole tensors on whose memory there are results: Python may write to those."""
        memory = {
            one.untyped_storage()._cdata
            for one in pytree.tree_leaves(result)
            if _is_plain(one) and one.layout is torch.strided
        }
        known = {id(one) for one in self._held}
        for one in wholes:
            if one.tensor.untyped_storage()._cdata in memory and id(one) not in known:
                self._held.append(one)

    def _refresh(self) -> None:
        """Whole tensors of which there are views see what was written to their shards."""
        with torch.no_grad():
            for one in self._held:
                one.tensor.copy_(self._peers.whole(one.shard))


class _WholeParameter(torch.autograd.Function):
    """A whole tensor in the place of a parameter's shard, in a graph. Its gradient is this rank's, and is reduced with
    those of the same backward."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor, whole: torch.Tensor, shards: ShardedParameters) -> torch.Tensor:
        ctx.shard, ctx.shards = shard, shards
        return whole.data  # no view: Python may write to the memory beside the graph

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.shards.keep_gradient(ctx.shard, grad)
        return None, None, None


def _is_descriptor(function: Any) -> bool:
    return getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__")


def _is_in_place(function: Any) -> bool:
    """Whether it writes to its first argument, as torch spells that."""
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_dtensor(leaf)


def _is_hook(leaf: Any) -> bool:
    return callable(leaf) and not isinstance(leaf, (torch.Tensor, type))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, so that a NaN is itself."""
    return bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))
