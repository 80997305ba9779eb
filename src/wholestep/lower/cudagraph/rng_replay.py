"""Random draws of a CUDA graph that repeat earlier ones: checkpointed blocks with dropout.

Such a step reads the state of the generator before a block and sets it for the recompute. A capture cannot: the
generator counts from zero there what is drawn, and a replay adds where it stands by then. But a graph may draw from
several states, each with a place of its own to begin at. So every part that draws again has one::

    run as it is    get at 0   draws 0..8   get at 8   set to 0   draws 0..8   set to 8   draws 8..12
    graph           main       main 0..8               other      other 0..8   main       main 8..12

Where each begins, counted from the beginning of the step, is seen in the runs before the capture; it depends on shapes
alone. Before a replay the others are set to where the generator stands, plus that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir.ops import rng_state
from wholestep.ir.program import Program

_OFFSET = slice(8, 16)
"""Of the state of a generator of a GPU, 16 bytes: a seed and an offset."""


def is_supported() -> bool:
    """Whether this torch lets a graph draw from several states."""
    graph, generator = torch.cuda.CUDAGraph, torch.Generator
    return hasattr(graph, "register_generator_state") and hasattr(generator, "graphsafe_set_state")


def is_replayed(node: fx.Node) -> bool:
    """Whether a node sets a GPU's generator to a state that the step has read, or reads a state for that alone."""
    if node.target not in (rng_state.GET, rng_state.SET) or not str(node.args[-1]).startswith("cuda"):
        return False
    read = node if node.target is rng_state.GET else node.args[0]
    is_read = isinstance(read, fx.Node) and read.target is rng_state.GET
    return is_read and all(user.target is rng_state.SET for user in read.users)  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """From which state a graph draws. State 0 is that of the device's generator."""

    starts: tuple[int, ...]
    """Where states 1, 2, ... begin, counted from the beginning of the step."""
    turns: tuple[int, ...]
    """The state that is drawn from after each setting, in order."""


def plan_replay(settings: Sequence[tuple[int, int]]) -> ReplayPlan | None:
    """The plan for a run in which the generator stood at the first number of a pair and was set to the second; None if
    the step leaves it anywhere but where it has drawn to."""
    offsets: dict[int, int] = {}
    starts: list[int] = []
    turns: list[int] = []
    now = 0
    for stood, wanted in settings:
        offsets[now] = stood
        now = next((state for state, place in offsets.items() if place == wanted), len(starts) + 1)
        if now > len(starts):
            starts.append(wanted)
        turns.append(now)
    return None if now else ReplayPlan(starts=tuple(starts), turns=tuple(turns))


@dataclass(slots=True)
class RngReplay:
    """Replays the settings of the generator in one body on one device."""

    device: torch.device
    plan: ReplayPlan | None = None
    _others: list[torch.Generator] = field(default_factory=list)

    @classmethod
    def of(cls, body: Program, device: torch.device) -> RngReplay | None:
        """The replay for a body; None if the body sets no state."""
        sets = any(node.target is rng_state.SET for node in body.graph.nodes)
        return cls(device) if sets else None

    @property
    def _generator(self) -> torch.Generator:
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.cuda.default_generators[index]

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Around a plain run of the body: records how it sets the generator."""
        generator = self._generator
        begun, settings = generator.get_offset(), list[tuple[int, int]]()

        def set_(state: Tensor) -> None:
            wanted = int.from_bytes(bytes(state[_OFFSET].tolist()), "little")
            settings.append((generator.get_offset() - begun, wanted - begun))
            generator.set_state(state)

        with rng_state.redirected(generator.get_state, set_):
            yield
        self.plan = plan_replay(settings)

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Around a capture of the body into a graph that has not begun. Raises RuntimeError without a plan."""
        if self.plan is None:
            raise RuntimeError("the step leaves the random generator in a state of its own")
        generator = self._generator
        self._others = [torch.Generator(self.device) for _ in self.plan.starts]
        for one in self._others:
            graph.register_generator_state(one)
        states = [generator.graphsafe_get_state(), *self._others]
        turns = iter(self.plan.turns)
        try:
            with rng_state.redirected(
                lambda: torch.empty(0, device="cpu"), lambda state: generator.graphsafe_set_state(states[next(turns)])
            ):
                yield
        finally:
            generator.graphsafe_set_state(states[0])

    def begin(self) -> None:
        """Sets all states to where a replay begins to draw from them."""
        assert self.plan is not None  # there is a graph
        stands, seed = self._generator.get_offset(), self._generator.initial_seed()
        for one, start in zip(self._others, self.plan.starts, strict=True):
            if one.initial_seed() != seed:
                one.manual_seed(seed)
            one.set_offset(stands + start)
