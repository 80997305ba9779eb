"""Transformations of a captured graph by user code, and the one that came with the older surface."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

import torch.distributed as dist
import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.errors import ConfigError
from wholestep.ir import printer
from wholestep.ir.program import Program
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.spmd.graph_exchange import GraphExchange

log = logging.getLogger("wholestep")

Transformation = Callable[[fx.GraphModule], fx.GraphModule]


class _TransformScope:
    """One graph while user code transforms it."""

    def __init__(self, program: Program) -> None:
        self.exchange = GraphExchange(program)
        self.called: list[GraphModuleTransformation] = []


_current: ContextVar[_TransformScope | None] = ContextVar("wholestep_transforming", default=None)


def as_pass(transform: Transformation, author: str, called: list[GraphModuleTransformation]) -> Pass:
    """A pass that hands the graph to user code.

    Args:
        transform: the user code.
        who: names it in errors and in the program's history.
        used: every GraphModuleTransformation that it calls is added here.
    """

    def run(program: Program) -> Program:
        transforming = _TransformScope(program)
        token = _current.set(transforming)
        try:
            returned = transform(transforming.exchange.module)
        finally:
            _current.reset(token)
        called.extend(transforming.called)
        return transforming.exchange.to_program(returned, author)

    run.__name__ = author
    return run


class GraphModuleTransformation:
    """Optimizes the graph of a compiled step, and writes it to files. Given as ``compile(gm_transformation=...)``.

    Args:
        num_iters: how many calls make one run of the training loop. Graphs of the older surface could carry work
            into the next call, which the last one finished. Here every call is complete in itself, so what is left
            of it is a count: `iteration` begins anew after so many calls, or after ``last_train_step=True``.
        enable_graph_optimization: run the default passes: cleanup, repeated collectives dropped, gradients in buckets.
        enable_inductor: refused until graphs are lowered through Inductor.
        enable_cudagraphs: refused until then, too.
        dump_graphs: write the program before and after to `folder`, a new directory for temporary files.

    Raises:
        ConfigError: for options that cannot be used yet, and a `num_iters` that is no positive whole number.
    """

    def __init__(
        self,
        num_iters: int,
        *,
        enable_graph_optimization: bool = False,
        enable_inductor: bool = False,
        enable_cudagraphs: bool = False,
        dump_graphs: bool = False,
    ) -> None:
        if isinstance(num_iters, bool) or not isinstance(num_iters, int) or num_iters < 1:
            raise ConfigError(f"GraphModuleTransformation(num_iters=...) wants 1 or more, got {num_iters!r}.")
        if enable_inductor or enable_cudagraphs:
            wanted = "enable_inductor" if enable_inductor else "enable_cudagraphs"
            raise ConfigError(
                f"GraphModuleTransformation({wanted}=True) wants kernels of Inductor, which no step is lowered to yet. "
                f"Leave it out: the graph then runs node by node with torch's own kernels."
            )
        self.num_iters = num_iters
        self.enable_graph_optimization = enable_graph_optimization
        self.dump_graphs = dump_graphs
        self.iteration = 0
        """Calls since the present run of the training loop began."""
        self.folder: Path | None = None
        """Where the graphs were written."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The transformed graph. Called by a compiled step, or by the user's own ``gm_transformation`` inside of one.

        Raises:
            ConfigError: outside of a compiled step, where nothing says what the graph's inputs mean.
        """
        transforming = _current.get()
        if transforming is None:
            raise ConfigError(
                "GraphModuleTransformation was called outside of a compiled step. "
                "Give it to wholestep.spmd.compile(gm_transformation=...), or call it in the function given there."
            )
        transforming.called.append(self)
        program = transforming.exchange.to_program(gm, "gm_transformation")
        self._dump("before", program)
        if self.enable_graph_optimization:
            # All but the last two, which let operations run in place: other transformations may follow.
            program = run_passes(program, passes_of(cost=CostModel.default("cpu+gloo"))[:-2])
        self._dump("after", program)
        transforming.exchange = GraphExchange(program)
        return transforming.exchange.module

    def count(self, *, last: bool) -> None:
        """Tells that a call is over; `last` ends the run of the training loop before its time."""
        self.iteration = 0 if last else (self.iteration + 1) % self.num_iters

    def _dump(self, when: str, program: Program) -> None:
        if not self.dump_graphs:
            return
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="wholestep_graphs_"))
            log.info("graphs are written to %s", self.folder)
        rank = dist.get_rank() if dist.is_initialized() else 0
        number = len(list(self.folder.glob(f"{when}_*"))) + 1
        file = self.folder / f"{when}_transformation_rank{rank}_{number}.py"
        file.write_text(printer.source(program), encoding="utf-8")
