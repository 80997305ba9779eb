"""States of random generators are read and set where somebody draws, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.unit import builders
from wholestep.ir import graph_edit
from wholestep.ir.ops.rng_state import GET, SET
from wholestep.ir.program import Program, Stage
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.rng_cleanup import clean_up_rng

STEPS, WIDTH = 4, 8


@pytest.fixture(autouse=True)
def noise() -> Iterator[None]:
    """An operator that draws without saying so."""
    library = torch.library.Library("test_generators", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor")
    library.impl("noise", lambda x: x + torch.rand(x.shape), "CompositeExplicitAutograd")
    torch.library.register_fake("test_generators::noise", torch.empty_like, lib=library)
    yield
    library._destroy()


class Block(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.between = nn.Linear(WIDTH, WIDTH), between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.between(self.inner(x).tanh()).sin()


def model_of(*between: Callable[[Tensor], Tensor]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(map(Block, between))


def step(model: nn.ModuleList, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    loss = x.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), torch.rand(3)


def train(model: nn.ModuleList, run: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    found = [one for _ in range(STEPS) for one in run(model, optimizer, torch.randn(4, WIDTH))]
    return [*found, *model.parameters(), torch.get_rng_state()]


def dropout(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5)


CASES = {
    "nobody draws": ((torch.relu, torch.relu), 0),
    "one block of three draws": ((torch.relu, dropout, torch.relu), 4),
    "both blocks draw": ((dropout, dropout), 8),
}


@pytest.mark.parametrize("case", CASES)
def test_states_are_saved_and_set_for_blocks_that_draw(case: str) -> None:
    between, left = CASES[case]
    compiled = ws.compile(step, backend="eager")
    found, wanted = train(model_of(*between), compiled), train(model_of(*between), step)
    assert all(map(torch.equal, found, wanted))
    before, after = (compiled.program(stage) for stage in (Stage.PLACED, Stage.SCHEDULED))
    assert builders.count(before, SET) == 2 * len(between)
    assert builders.count(after, GET, SET) == left
    notes = [note for record in after.history for note in record.notes if "random generators" in note]
    assert bool(notes) == (left < 4 * len(between))


def program_of(text: str) -> Program:
    """A program whose calls are the words of `text`: get, set N (the state that the Nth get gave), draw, unknown."""
    program = graph_edit.copy(builders.capture(lambda x: x * 2, [torch.ones(3)]))
    graph, (x,) = program.graph, program.placeholders
    gets = []
    with graph.inserting_before(graph.output_node()):
        for word in text.split():
            if word == "get":
                gets.append(graph_edit.emit(graph, GET, "cpu", like=x))
            elif word.startswith("set"):
                graph_edit.emit(graph, SET, gets[int(word[3:])], "cpu", like=x)
            elif word == "draw":
                graph_edit.emit(graph, torch.ops.aten.bernoulli.default, x, like=x)
            else:
                graph_edit.emit(graph, torch.ops.test_generators.noise.default, x, like=x)
    return builders.without_gradients(program)


def words_of(program: Program) -> str:
    words, gets = [], []
    for node in program.graph.nodes:
        if node.target is GET:
            gets.append(node)
            words.append("get")
        elif node.target is SET:
            words.append(f"set{gets.index(node.args[0])}")
        elif "bernoulli" in node.name:
            words.append("draw")
        elif "noise" in node.name:
            words.append("unknown")
    return " ".join(words)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("get", ""),
        ("get set0", ""),
        ("get get set1 set0", ""),
        ("get draw set0", "get draw set0"),  # who draws after the step sees it
        ("get draw get set0 set1", "draw"),
        ("get draw get set0 draw set1", "get draw get set0 draw set1"),
        ("get unknown get set0 unknown set1", "get unknown get set0 unknown set1"),
        ("get draw set0 get set1 draw", "get draw set0 draw"),
        ("get draw set0 get draw set1", "get draw set0 get draw set1"),
        ("get draw get set0 set1 draw get set2", "draw draw"),
        ("get draw get set0 unknown set1", "get draw get set0 unknown set1"),
    ],
)
def test_what_is_dropped(before: str, after: str) -> None:
    program = program_of(before)
    assert words_of(program) == before
    assert words_of(run_passes(program, [clean_up_rng])) == after
