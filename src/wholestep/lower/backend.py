"""The backends: which passes they add, and how they make a function of a scheduled program."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from wholestep.config import Inductor as InductorOptions
from wholestep.lower import copies, cudagraph, eager, inductor
from wholestep.passes.average import average_on_the_way
from wholestep.passes.by_copies import reduce_by_copies
from wholestep.passes.cross_entropy import lean_cross_entropy
from wholestep.passes.pipeline import Pass
from wholestep.passes.scalars import pack_scalars
from wholestep.passes.segments import form_segments
from wholestep.passes.waits import delay_waits
from wholestep.passes.wide import widen_products
from wholestep.program.collectives import averages
from wholestep.program.program import Program
from wholestep.program.show import Step

log = logging.getLogger("wholestep")


class Eager:
    """Runs the graph's own text, node by node."""

    name = "eager"
    shares_kernels = False
    """Whether a rank can use what another one has compiled."""

    def passes(self) -> list[Pass]:
        """Passes before the one that lets operators write in place."""
        return []

    def lower(self, program: Program, wait: eager.Wait | None = None) -> Step:
        """A function from flat inputs to flat results. `wait` stands in for ``wait_tensor``."""
        return eager.lower(program, wait=wait)


class Inductor:
    """Runs segments of the graph as Inductor compiles them and, on a GPU, all of it as one CUDA graph."""

    def __init__(self, options: InductorOptions, device: torch.device) -> None:
        self._options, self._on_gpu = options, device.type == "cuda"
        # Inductor writes the number of the GPU into what it makes, so each rank has to make its own there.
        self.shares_kernels = not self._on_gpu
        self._by_copies = self._on_gpu and bool(options.copy_engines)
        self._inductor = inductor.Inductor()
        self._pool: Any = None
        self.why_no_graph = "" if self._on_gpu else "there is no GPU"
        """Why the last program did not become a CUDA graph; empty if it did."""

    @property
    def name(self) -> str:
        """What runs, for people."""
        return f"inductor, no CUDA graph: {self.why_no_graph}" if self.why_no_graph else "inductor, one CUDA graph"

    def passes(self) -> list[Pass]:
        """See `Eager.passes`."""
        return [
            lean_cross_entropy,
            # Before products are widened: the path from a gradient to its reduction is shorter then.
            partial(average_on_the_way, averages=averages),
            *([partial(reduce_by_copies, why_not=copies.why_not)] if self._by_copies else []),
            partial(widen_products, widens=inductor.widens),
            # Before segments are formed, whose calls read packed numbers.
            partial(pack_scalars, reads=inductor.reads_packed),
            # A segment ends where a wait stands.
            delay_waits,
            partial(
                form_segments,
                compiles=inductor.compiles,
                postpones=inductor.follows,
                pays_alone=inductor.pays_alone,
            ),
        ]

    def lower(self, program: Program, wait: eager.Wait | None = None) -> Step:
        """See `Eager.lower`. With `wait` there is no CUDA graph, in which nobody could be seen to wait."""
        lower = partial(eager.lower, wait=wait, compile_segment=self._inductor.compile)
        if not self._on_gpu or wait is not None:
            return lower(program)
        parts = cudagraph.split(program) if self._options.cuda_graph else "it was not asked for"
        if isinstance(parts, str):
            self._goes_without(parts)
            return lower(program)
        self.why_no_graph = ""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return cudagraph.Graphed(program, parts, lower, self._pool, self._goes_without)

    def _goes_without(self, reason: str) -> None:
        self.why_no_graph = reason
        log.info("no CUDA graph: %s", reason)


Backend = Eager | Inductor


def backend_for(chosen: str | InductorOptions, device: torch.device) -> Backend:
    """The backend that `compile` was asked for, on this device."""
    if isinstance(chosen, InductorOptions):
        return Inductor(chosen, device)
    return Inductor(InductorOptions(), device) if chosen == "inductor" else Eager()
