"""Virtual ranks' slices of the user's batch, and their copies of the state from step to step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from wholestep.capture.bind.binding import ArgumentLeaf, Constant, EntryGrad, GroupNumber
from wholestep.capture.bind.captured import Captured
from wholestep.capture.bind.effects import ClearGradients, SetGradients, SetOptimizerState
from wholestep.capture.functionalize.storage_resize import is_freed
from wholestep.capture.python import tree_util
from wholestep.capture.reach.train_state import TrainState
from wholestep.capture.scalars.rank_symbols import ranks
from wholestep.errors import ConfigError
from wholestep.ir.program import Input, InputKind, OutputKind, Program, ShardSpec
from wholestep.runtime.compression_state import CompressionBuffers, CompressionState
from wholestep.runtime.verify.rank_shards import RankShards, RankValues
from wholestep.runtime.verify.rank_simulator import rank_blocks
from wholestep.runtime.verify.state_backup import freed_like, overwrite


class Batch:
    """The arguments of one call, divided among virtual ranks along their first dimension.

    Divided are the tensors whose first dimension is the batch size: the size that most of them share. Every step sees
    the rows one place further on. Everything else is given whole.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: TrainState, num_ranks: int) -> None:
        """Raises ConfigError where the batch size is no multiple of `num_ranks`."""
        self._leaves, self.spec = tree_util.flatten((args, kwargs))
        data = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in state.index]
        sizes = Counter(leaf.shape[0] for leaf in {id(leaf): leaf for leaf in data}.values() if leaf.dim())
        self.num_rows = sizes.most_common(1)[0][0] if sizes else 0
        self._data = {id(leaf) for leaf in data}
        self._split = {id(leaf) for leaf in data if leaf.dim() and leaf.shape[0] == self.num_rows}
        self.num_ranks = num_ranks
        if self.num_rows % num_ranks:
            raise ConfigError(
                f"verify(ranks={num_ranks}) divides the batch among its virtual ranks, and {self.num_rows} rows do not "
                f"divide into {num_ranks} equal parts. Give a batch with a multiple of {num_ranks} rows, or ask for a "
                f"number of ranks that divides {self.num_rows}."
            )

    @property
    def device(self) -> torch.device:
        """Where the arguments live; the CPU where they hold no tensor."""
        return next((leaf.device for leaf in self._leaves if id(leaf) in self._data), torch.device("cpu"))

    def note(self) -> str:
        """How the arguments were divided."""
        if not self._split:
            return "No argument has rows to divide: every rank got the arguments whole."
        whole = len(self._data) - len(self._split)
        rest = f" {whole} other tensors were given whole." if whole else ""
        rows = self.num_rows // self.num_ranks
        return f"Each rank got {rows} of {self.num_rows} rows of {len(self._split)} arguments.{rest}"

    def of_rank(self, rank: int, step: int) -> list[Any]:
        """The flat arguments of one rank in one step: copies, so that a step may write to them."""
        rows = self.num_rows // self.num_ranks
        return self._leaves_of(step, slice(rank * rows, (rank + 1) * rows))

    def whole(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the eager step, copied."""
        args, kwargs = tree_util.unflatten(self._leaves_of(step, slice(None)), self.spec)
        return args, kwargs

    def _leaves_of(self, step: int, rows: slice) -> list[Any]:
        made: dict[int, torch.Tensor] = {}
        for leaf in self._leaves:
            if id(leaf) in self._split and id(leaf) not in made:
                rows_of_rank = leaf.detach().roll(step, 0)[rows].clone()
                made[id(leaf)] = rows_of_rank.requires_grad_(leaf.requires_grad)
            elif id(leaf) in self._data and id(leaf) not in made:
                made[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return [made.get(id(leaf), leaf) for leaf in self._leaves]


class RankState:
    """The state of all virtual ranks under one program: every rank has copies of its own, which outlive a step."""

    def __init__(self, shards: RankShards, comms: Sequence[CompressionState] = ()) -> None:
        """`comms`: per rank, what its compressed communication remembers; none where the program has no such inputs."""
        self._shards, self._num_ranks, self._compression = shards, shards.num_ranks, comms
        self._copies = RankValues(shards)
        """By id of a tensor of the user's, the rank's own."""
        self._grads = RankValues(shards)
        """By id of a parameter, its gradient between calls."""
        self._held: list[CompressionBuffers] = []
        self._kept_alive: list[Any] = []  # ids stay valid while their objects live

    def inputs(self, program: Program, captured: Captured, leaves: list[list[Any]]) -> list[list[Any]]:
        """The flat inputs of every rank, in parts where the program takes parts. `leaves`: arguments of each rank."""
        binding = captured.binding
        self._add_copies([tensor for tensor in binding.tensors if isinstance(tensor, torch.Tensor)])
        self._add_copies([one.param.grad for _, one in binding.inputs_of(EntryGrad) if one.param.grad is not None])
        self._cut(program, captured)
        self._held = [comm.buffers_for(program) for comm in self._compression]
        flat: list[list[Any]] = []
        for rank in range(self._num_ranks):
            own = self._inputs_of_rank(rank, program, captured, leaves[rank])
            memory = iter(self._held[rank].tensors if self._held else ())
            flat.append([next(memory if record.kind is InputKind.COMM else own) for record in program.inputs])
        return flat

    def _cut(self, program: Program, captured: Captured) -> None:
        """Brings what the ranks hold into the parts that the program takes."""
        for record, source in zip(program.inputs, captured.binding.inputs, strict=False):
            if isinstance(source, EntryGrad):
                key = id(source.param)
                for grads, copies in zip(self._grads.by_rank, self._copies.by_rank, strict=True):
                    grads.setdefault(key, copies.get(id(source.param.grad)))
                self._grads.cut_as(key, record.shard)
            elif isinstance(source, Constant) and isinstance(source.value, torch.Tensor):
                self._copies.cut_as(id(source.value), record.shard)

    def _inputs_of_rank(self, rank: int, program: Program, captured: Captured, leaves: list[Any]) -> Iterator[Any]:
        """The inputs of the program on one rank: those that were captured, and what placement has added."""
        for record, source in zip(captured.program.inputs, captured.binding.inputs, strict=True):
            match source:
                case GroupNumber(hyper):
                    yield hyper.read()
                case ArgumentLeaf(leaf):
                    yield leaves[leaf].detach()
                case EntryGrad(param):
                    yield self._grads.by_rank[rank][id(param)]
                case Constant() if record.kind is InputKind.RANK:
                    yield _rank_number(record, rank, self._num_ranks)
                case Constant(tensor):
                    yield self._copies.by_rank[rank][id(tensor)]
        for record in program.inputs[len(captured.binding.inputs) :]:
            if record.kind is InputKind.RANK:
                yield self._shards.position(rank)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call with the inputs that were made last."""
        with ExitStack() as stack:
            for comm, held in zip(self._compression, self._held, strict=True):
                stack.enter_context(comm.call(held))
            yield

    def _add_copies(self, tensors: list[torch.Tensor]) -> None:
        """Gives every rank copies of tensors that are new."""
        fresh = [tensor for tensor in tensors if id(tensor) not in self._copies.by_rank[0]]
        self._kept_alive += fresh
        for copies in self._copies.by_rank:
            copies.update(zip(map(id, fresh), copies_of(fresh), strict=True))

    def keep_results(self, program: Program, captured: Captured, flat: list[list[Any]], results: list[Any]) -> None:
        """Keeps what a step left: inputs that it wrote, gradients, and the optimizer state that it created.

        The user's objects have taken on the step by then: new state is known by the tensor that the optimizer holds.
        """
        binding = captured.binding
        cleared = [param for one in binding.effects_of(ClearGradients) for param in one.params]
        params = [param for one in binding.effects_of(SetGradients) for param in one.params]
        entries = [entry for one in binding.effects_of(SetOptimizerState) for entry in one.entries]
        for rank, (inputs, outputs) in enumerate(zip(flat, results, strict=True)):
            for param in cleared:
                self._grads.by_rank[rank][id(param)] = None
            of_kind: dict[OutputKind, list[Any]] = {kind: [] for kind in OutputKind}
            for output, value in zip(program.outputs, outputs, strict=True):
                of_kind[output.kind].append((output, value))
            writes = [(output.target, _unaliased(value, inputs)) for output, value in of_kind[OutputKind.WRITE]]
            for target, value in writes:
                if value is not None:
                    overwrite(inputs[target], value)
            for param, (output, value) in zip(params, of_kind[OutputKind.GRAD], strict=True):
                self._grads.by_rank[rank][id(param)] = value
                self._grads.note(id(param), output.shard)
            for (holder, key), (output, value) in zip(entries, of_kind[OutputKind.STATE], strict=True):
                held = holder()[key]
                self._kept_alive.append(held)
                self._copies.by_rank[rank][id(held)] = value
                self._copies.note(id(held), output.shard)

    def copy_from(self, other: RankState) -> None:
        """Takes over the state of another side, copied."""
        for mine, theirs in zip(self._copies.by_rank, other._copies.by_rank, strict=True):
            for key, value in theirs.items():
                if key in mine:
                    overwrite(mine[key], value)
        for rank, grads in enumerate(other._grads.by_rank):
            self._grads.by_rank[rank] = {key: None if grad is None else grad.clone() for key, grad in grads.items()}
        self._grads.specs = dict(other._grads.specs)

    def of_rank(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """What a rank holds of a tensor of the user's: its copy, or its part without padding."""
        key = id(tensor)
        found: torch.Tensor = self._shards.valid(self._copies.by_rank[rank][key], self._copies.specs.get(key), rank)
        return found

    def spec_of(self, tensor: torch.Tensor) -> ShardSpec | None:
        """How the ranks hold a tensor of the user's; None: whole."""
        return self._copies.specs.get(id(tensor))


def _unaliased(value: Any, inputs: list[Any]) -> Any:
    """`value`, copied where it lives in the memory of an input: two inputs may exchange their values."""
    if not _has_memory(value):
        return value
    memory = value.untyped_storage().data_ptr()
    held = (one.untyped_storage().data_ptr() for one in inputs if _has_memory(one))
    return value.clone() if memory in held else value


def _rank_number(record: Input, rank: int, num_ranks: int) -> int:
    found = [one.axis for one in ranks() if f"rank.{one.axis.name}" == record.name]
    if len(found) != 1:
        raise ConfigError(f"The step asks for its {record.name}: {len(found)} groups of this process have that name.")
    block = next(block for block in rank_blocks(found[0], num_ranks) if rank in block)
    return block.index(rank)


def copies_of(values: Iterable[Any]) -> list[Any]:
    """Copies of tensors with the same shapes and strides; those that shared memory share it again. Numbers stay."""
    values = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
    spans: dict[tuple[int, torch.dtype], tuple[int, int]] = {}
    for tensor in filter(_has_memory, values):
        key, (start, stop) = _storage_key(tensor), _span(tensor)
        low, high = spans.get(key, (start, stop))
        spans[key] = (min(low, start), max(high, stop))
    bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    made = []
    for value in values:
        if not _has_memory(value):
            made.append(_copy(value))
            continue
        key = _storage_key(value)
        start, stop = spans[key]
        if key not in bases:
            bases[key] = value.as_strided((stop - start,), (1,), start).clone()
        made.append(bases[key].as_strided(value.shape, value.stride(), value.storage_offset() - start))
    return made


def _copy(value: Any) -> Any:
    """Of what has no memory to share: a number, a sparse or an empty tensor, one whose memory is freed."""
    if not isinstance(value, torch.Tensor):
        return value
    return freed_like(value) if is_freed(value) else value.clone()


def _has_memory(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    return tensor.layout is torch.strided and tensor.numel() > 0 and not is_freed(tensor)


def _storage_key(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First element and the one after the last, counted in the storage."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()), int(tensor.storage_offset() + reach + 1)
