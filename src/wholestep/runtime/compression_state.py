"""State of compressed communication from call to call: tensors of the compiled step, and counts.

Every rank counts calls alike and draws the same random factors, so nothing here is ever sent. The draws are those of
PyTorch's ``powerSGD_hook``: a seed for each bucket from numpy's generator, the factors from torch's CPU generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from wholestep.config import CastCompress, CommHook, Compress, PowerSGD
from wholestep.errors import ConfigError
from wholestep.ir import node_meta
from wholestep.ir.ops.comm_hook import BucketFunction
from wholestep.ir.program import Input, InputKind, OutputKind, Placement, Program
from wholestep.passes.compress.compress import compress
from wholestep.passes.pass_manager import Pass

_LARGEST_SEED = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionBuffers:
    """The state that one program reads."""

    tensors: list[torch.Tensor]
    """One per COMM input, in order."""
    redrawn: list[list[torch.Tensor]]
    """By bucket, those that are random at every call: nobody writes them."""
    reduces: bool
    """Whether a call reduces gradients, and so counts."""
    phase: tuple[bool, int]
    """Of the memory when the program was made."""


class _Seeds:
    """A row of seeds, of which those that are next may be looked at before they are used."""

    def __init__(self, seed: int, used: int = 0) -> None:
        self._generator = np.random.RandomState(seed)
        self._generator.randint(_LARGEST_SEED, size=used)
        self.used = used
        self._next: list[int] = []

    def peek(self, number: int) -> int:
        """The seed that is `number` places after the last one used."""
        while len(self._next) <= number:
            self._next.append(int(self._generator.randint(_LARGEST_SEED)))
        return self._next[number]

    def use(self, count: int) -> None:
        """Goes on after the next `count` seeds."""
        for number in range(count):
            self.peek(number)
        del self._next[:count]
        self.used += count


class CompressionState:
    """The memory of one compiled step whose strategy compresses gradients."""

    def __init__(self, how: Compress) -> None:
        self._how = how
        self._tensors: dict[str, torch.Tensor] = {}
        self._calls = self._loads = 0
        self._seeds = self._seeds_from(0)
        self._functions: list[BucketFunction] = []
        """What graphs call by number."""

    @property
    def started(self) -> bool:
        """Whether the next call compresses."""
        return not isinstance(self._how, PowerSGD) or self._calls >= self._how.start_iter

    @property
    def _phase(self) -> tuple[bool, int]:
        return self.started, self._loads

    def __str__(self) -> str:
        """The same on every rank, for the plan that they agree on."""
        ours = isinstance(self._how, (CastCompress, PowerSGD))
        if isinstance(self._how, CommHook):
            return f"reduced by {getattr(self._how.hook, '__qualname__', type(self._how.hook).__qualname__)}"
        return str(self._how) if ours else f"compressed by {type(self._how).__qualname__}"

    def as_pass(self) -> Pass:
        """The pass that compresses what the next call sends."""
        return partial(compress, how=self._how, started=self.started, keep=self._functions.append)

    def buffers_for(self, program: Program) -> CompressionBuffers:
        """The tensors behind the COMM inputs of `program`, on their devices.

        What belongs to a rank is zeros at first; what is the same on all of them is random.

        Raises:
            ConfigError: what was loaded has another shape or type than the program needs.
        """
        written = {output.target for output in program.outputs if output.kind is OutputKind.WRITE}
        pairs = zip(program.inputs, program.placeholders, strict=True)
        wanted = [
            (record, node_meta.tensor(node).device, index in written)
            for index, (record, node) in enumerate(pairs)
            if record.kind is InputKind.COMM
        ]
        tensors: list[torch.Tensor] = []
        redrawn: list[list[torch.Tensor]] = []
        for _, bucket in groupby(wanted, key=lambda one: one[0].bucket):
            once: list[torch.Tensor] = []
            each_call: list[torch.Tensor] = []
            for record, device, is_written in bucket:
                is_new = record.name not in self._tensors
                tensors.append(self._tensor(record, device, keep=is_written))
                if record.placement is Placement.REPLICATE and (is_new or not is_written):
                    (once if is_written else each_call).append(tensors[-1])
            if once:
                _draw(once, self._seeds.peek(0))
                self._seeds.use(1)
            redrawn += [each_call] if each_call else []
        reduces = any(node_meta.bucket(node) is not None for node in program.graph.nodes)
        return CompressionBuffers(tensors=tensors, redrawn=redrawn, reduces=reduces, phase=self._phase)

    def is_outdated(self, held: CompressionBuffers) -> bool:
        """Whether the next call wants another program: compression starts, or other state was loaded."""
        return held.phase != self._phase

    @contextmanager
    def call(self, held: CompressionBuffers) -> Iterator[None]:
        """Around a call. One after a call that failed starts from the same numbers."""
        for number, tensors in enumerate(held.redrawn):
            _draw(tensors, self._seeds.peek(number))
        yield
        self._calls += held.reduces
        self._seeds.use(len(held.redrawn))

    def state_dict(self) -> dict[str, Any]:
        """Two numbers, and the tensors themselves by name. Errors are the rank's own, so each rank saves its state."""
        return {"calls": self._calls, "draws": self._seeds.used, "tensors": dict(self._tensors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; tensors are copied.

        Raises:
            ConfigError: it is no state of a compiled step.
        """
        try:
            calls, draws = int(state["calls"]), int(state["draws"])
            tensors = {str(name): tensor.detach().clone() for name, tensor in state["tensors"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"CompiledStep.load_state_dict wants what state_dict of a step with DDP(compress=...) has given: "
                f"calls, draws and tensors. Got {state!r:.200} ({type(error).__name__}: {error})."
            ) from error
        self._calls, self._tensors, self._seeds = calls, tensors, self._seeds_from(draws)
        self._loads += 1

    def _seeds_from(self, used: int) -> _Seeds:
        return _Seeds(self._how.seed if isinstance(self._how, PowerSGD) else 0, used)

    def _tensor(self, record: Input, device: torch.device, *, keep: bool) -> torch.Tensor:
        """The tensor of that name; a new one is zeros, and remembered where it is to be kept."""
        found = self._tensors.get(record.name)
        if found is None:
            found = torch.zeros(record.constant_shape, dtype=record.dtype, device=device)
        elif (tuple(found.shape), found.dtype) != (record.constant_shape, record.dtype):
            raise ConfigError(
                f"The state {record.name} is {found.dtype}{list(found.shape)}, the step needs "
                f"{record.dtype}{list(record.constant_shape)}. Load what the same model and PowerSGD(...) have saved."
            )
        if keep:
            self._tensors[record.name] = found = found.to(device)
        return found


def _draw(tensors: list[torch.Tensor], seed: int) -> None:
    """Fills `tensors`, one after the other, with normal numbers that do not depend on the device."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator))
