"""Small models, steps and measures that the tests of capture share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.capture.bind.captured import Captured
from wholestep.capture.capture import capture
from wholestep.capture.guards.guards import Guards
from wholestep.capture.guards.value_guards import BranchGuard
from wholestep.ir import node_meta, op_info
from wholestep.ir.program import InputKind, Program


class Block(nn.Module):
    """Norm, two linear layers, dropout, and the way around them."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.drop(self.act(self.up(self.norm(x))))))


class Blocks(nn.Module):
    """Blocks in a row, each one checkpointed when `reentrant` is not None."""

    def __init__(self, depth: int = 2, width: int = 8, dropout: float = 0.0, reentrant: bool | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)  # so that what enters a checkpoint requires a gradient
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return backward_and_step(model(x).square().mean(), opt)


def branch_guard(guards: Guards) -> BranchGuard | None:
    """The guard of conditions on host numbers; None where a trace has none."""
    return next((guard for guard in guards.values if isinstance(guard, BranchGuard)), None)


Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def twins(make: Make) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The same model and optimizer twice, for an eager run and for a compiled one."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(make())
    return made[0], made[1]


def run_both(
    make: Make,
    num_calls: int,
    before: Callable[[int, Any], object] = lambda call, opt: None,
    *,
    step: Callable[..., Tensor] = train,
    batch: Callable[[], Tensor] = lambda: torch.randn(3, 4),
) -> ws.CompiledStep:
    """Runs ``step(model, opt, x)`` eagerly and compiled side by side, equal bit for bit; returns the compiled step.

    ``before(call, opt)`` may change the optimizer before each call.
    """
    eager, ours = twins(make)
    compiled = ws.compile(step, backend="eager", fullgraph=True)
    for call in range(num_calls):
        for _, opt in (eager, ours):
            before(call, opt)
        x = batch()
        assert torch.equal(step(*eager, x), compiled(*ours, x))
        assert differing(eager[0], ours[0]) == []
    return compiled


def captured(step: Callable[..., Any], *args: Any) -> Captured:
    return capture(step, args, {})


def program_of(step: Callable[..., Any], *args: Any) -> Program:
    return captured(step, *args).program


def finish(model: nn.Module, opt: torch.optim.Optimizer, loss: Tensor, *, clip: bool) -> Tensor:
    """What follows the loss in a step, which gives it back."""
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def names(program: Program, *kinds: InputKind) -> list[str]:
    return [record.name for record in program.inputs if record.kind in kinds]


def calls(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def mutating(program: Program) -> list[fx.Node]:
    return [node for node in calls(program) if op_info.mutated_args(node.target)]


def differing(a: nn.Module, b: nn.Module) -> list[str]:
    """Parameters and buffers whose bits are not the same."""
    other = b.state_dict()
    return [name for name, tensor in a.state_dict().items() if not torch.equal(tensor, other[name])]


def peak_bytes(program: Program) -> int:
    """The most bytes of intermediate values alive at once when the nodes run in order and die at their last reader.

    Views and results of in-place operators are the memory of what they were made of; inputs do not count.
    """
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    root: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        owner = next(_viewed(node), None) if node.op == "call_function" else None
        root[node] = node if owner is None else root[owner]
        for arg in node.all_input_nodes:
            last[root[arg]] = order[node]
    alive = peak = 0
    dying: dict[int, int] = {}
    for node, index in order.items():
        if node.op == "call_function" and root[node] is node:
            alive += node_meta.num_bytes(node)
            peak = max(peak, alive)
            end = last.get(node, index)
            dying[end] = dying.get(end, 0) + node_meta.num_bytes(node)
        alive -= dying.pop(index, 0)
    return peak


def _viewed(node: fx.Node) -> Iterable[fx.Node]:
    for position in op_info.viewed_args(node.target):
        if position < len(node.args) and isinstance(node.args[position], fx.Node):
            yield node.args[position]
