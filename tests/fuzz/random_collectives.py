"""Random steps that mix compute with collectives: the same text run eagerly and compiled.

A step is drawn from a number, so a failure names the number and prints the step. Instructions are plain records;
`run` reads them. An asynchronous collective's tensors are out of bounds until its ``wait()``, as in any right program.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

ROWS, COLUMNS = 4, 6
SIZE = 2
OPS = {"sum": dist.ReduceOp.SUM, "product": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
COMPUTE = ("add", "multiply", "relu", "tanh", "matmul", "transpose", "scale_in_place", "add_in_place", "norm")
COLLECTIVES = [
    "all_reduce", "all_reduce_rows", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "funcol_all_reduce", "funcol_all_gather",
    "funcol_reduce_scatter",
]  # fmt: skip
if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13):  # before it, gloo had no all_to_all of lists
    COLLECTIVES.append("all_to_all")
IN_PLACE = ("scale_in_place", "add_in_place", "all_reduce", "all_reduce_rows", "broadcast")
"""Instructions whose result is the tensor they were given."""
FUNCTIONAL = tuple(name for name in COLLECTIVES if name.startswith("funcol"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a step. `a` and `b` are numbers of values; a result is appended to the values."""

    name: str
    a: int = 0
    b: int = 0
    op: str = "sum"
    group: str = "default"
    root: int = 0
    is_async: bool = False
    handle: int = -1
    """Which asynchronous collective is waited for."""

    def __str__(self) -> str:
        if self.name == "wait":
            return f"wait for {self.handle}"
        if self.name in COMPUTE:
            return f"{self.name} v{self.a}, v{self.b}"
        tail = f", async {self.handle}" if self.is_async else ""
        return f"{self.name} v{self.a}, {self.op}, group={self.group}, root={self.root}{tail}"


@dataclass(slots=True)
class _Draft:
    """A step while it is drawn: how many values there are and which of them are in flight."""

    dice: random.Random
    lines: list[Instruction] = field(default_factory=list)
    memory: list[int] = field(default_factory=lambda: [0, 1])
    """Per value: the first value in the same memory."""
    in_flight: dict[int, set[int]] = field(default_factory=dict)
    """handle -> memory that may not be touched."""
    num_handles: int = 0

    def free(self) -> int:
        while not (free := [v for v, memory in enumerate(self.memory) if memory not in self._busy()]):
            self.wait(next(iter(self.in_flight)))
        return self.dice.choice(free)

    def _busy(self) -> set[int]:
        return set().union(*self.in_flight.values())

    def add(self, line: Instruction) -> None:
        self.lines.append(line)
        self.memory.append(self.memory[line.a] if line.name in IN_PLACE else len(self.memory))

    def wait(self, handle: int) -> None:
        del self.in_flight[handle]
        self.lines.append(Instruction(name="wait", handle=handle))

    def compute(self) -> None:
        self.add(Instruction(name=self.dice.choice(COMPUTE), a=self.free(), b=self.free()))

    def communicate(self) -> None:
        dice, name = self.dice, self.dice.choice(COLLECTIVES)
        is_async = name not in FUNCTIONAL and dice.random() < 0.5
        a = self.free()
        self.add(
            Instruction(
                name=name, a=a, op=dice.choice(list(OPS)), group=dice.choice(("default", "world", "pair", "alone")),
                root=dice.randrange(SIZE), is_async=is_async, handle=self.num_handles if is_async else -1,
            )
        )  # fmt: skip
        if is_async:
            self.in_flight[self.num_handles] = {self.memory[a], self.memory[-1]}
            self.num_handles += 1


def draw(number: int) -> tuple[Instruction, ...]:
    """The step of that number: 1 to 6 collectives with compute between them, every wait somewhere after its start."""
    draft = _Draft(random.Random(number))
    for _ in range(draft.dice.randint(1, 6)):
        draft.compute()
        draft.communicate()
        for _ in range(draft.dice.randrange(3)):
            draft.compute()
        for handle in [h for h in draft.in_flight if draft.dice.random() < 0.4]:
            draft.wait(handle)
    for handle in list(draft.in_flight):
        draft.wait(handle)
    draft.compute()
    return tuple(draft.lines)


def communicates(line: Instruction) -> bool:
    """Whether the line is a collective."""
    return line.name in COLLECTIVES


Groups = dict[str, dist.ProcessGroup | None]


def run(lines: tuple[Instruction, ...], groups: Groups, first: Tensor, second: Tensor) -> list[Tensor]:
    """Every value of the step, the two given ones first: they may have been written."""
    values, works = [first, second], {}
    for line in lines:
        if line.name == "wait":
            works.pop(line.handle).wait()
        elif line.name in COMPUTE:
            values.append(_compute(line.name, values[line.a], values[line.b]))
        else:
            result, work = _RUN[line.name](line, values[line.a], groups[line.group])
            values.append(result)
            if line.is_async:
                works[line.handle] = work
    return values


def _compute(name: str, a: Tensor, b: Tensor) -> Tensor:
    if name == "matmul":
        return torch.tanh(a @ b.t()) @ b
    if name == "transpose":
        return a.t().contiguous().view(ROWS, COLUMNS)
    if name == "scale_in_place":
        return a.mul_(0.5)
    if name == "add_in_place":
        return a.add_(b.detach().clone(), alpha=0.25)
    if name == "norm":
        return a / (1 + a.norm())
    plain: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": torch.add,
        "multiply": lambda x, y: x * y * 0.1,
        "relu": lambda x, y: torch.relu(x),
        "tanh": lambda x, y: torch.tanh(x),
    }
    return plain[name](a, b)


Made = tuple[Tensor, dist.Work | None]


def _root(line: Instruction, group: dist.ProcessGroup | None) -> int:
    return line.root if dist.get_world_size(group) == SIZE else dist.get_rank()


def _all_reduce(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    return a, dist.all_reduce(a, OPS[line.op], group, async_op=line.is_async)


def _all_reduce_rows(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    rows = a[1:3]
    return a, dist.all_reduce(rows, op=OPS[line.op], group=group, async_op=line.is_async)


def _broadcast(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    return a, dist.broadcast(a, src=_root(line, group), group=group, async_op=line.is_async)


def _reduce(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    mine = a.clone()
    work = dist.reduce(mine, _root(line, group), OPS[line.op], group=group, async_op=line.is_async)
    # What a rank that is not the root holds afterwards is left open by the collective: nothing may depend on it.
    return mine if dist.get_rank() == _root(line, group) else a.clone(), work


def _all_gather(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    parts = [torch.empty_like(a) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(parts, a, group, async_op=line.is_async)
    return parts[-1], work


def _all_gather_into_tensor(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    size = dist.get_world_size(group)
    out = a.new_zeros(size * ROWS, COLUMNS)
    work = dist.all_gather_into_tensor(out, a, group=group, async_op=line.is_async)
    return out[(size - 1) * ROWS :], work


def _gather(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    size, root = dist.get_world_size(group), _root(line, group)
    parts = [torch.zeros_like(a) for _ in range(size)]
    mine = parts if dist.get_rank() == root else None
    return parts[0], dist.gather(a, mine, dst=root, group=group, async_op=line.is_async)


def _scatter(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    size, root = dist.get_world_size(group), _root(line, group)
    out = torch.empty_like(a)
    parts = [a * (k + 1) for k in range(size)] if dist.get_rank() == root else None
    return out, dist.scatter(out, parts, src=root, group=group, async_op=line.is_async)


def _reduce_scatter(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    parts = [a + k for k in range(dist.get_world_size(group))]
    out = torch.empty_like(a)
    return out, dist.reduce_scatter(out, parts, OPS[line.op], group=group, async_op=line.is_async)


def _reduce_scatter_tensor(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    whole = torch.cat([a - k for k in range(dist.get_world_size(group))])
    out = torch.empty_like(a)
    return out, dist.reduce_scatter_tensor(out, whole, OPS[line.op], group, async_op=line.is_async)


def _all_to_all(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    size = dist.get_world_size(group)
    parts, outs = [a * (k + 2) for k in range(size)], [torch.empty_like(a) for _ in range(size)]
    return outs[0], dist.all_to_all(outs, parts, group=group, async_op=line.is_async)


def _all_to_all_single(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    out = torch.empty_like(a)
    return out, dist.all_to_all_single(out, a, group=group, async_op=line.is_async)


def _funcol_all_reduce(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    return funcol.all_reduce(a, line.op, group or dist.group.WORLD) * 1, None


def _funcol_all_gather(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    return funcol.all_gather_tensor(a, 0, group or dist.group.WORLD)[:ROWS] * 1, None


def _funcol_reduce_scatter(line: Instruction, a: Tensor, group: dist.ProcessGroup | None) -> Made:
    whole = torch.cat([a] * dist.get_world_size(group))
    return funcol.reduce_scatter_tensor(whole, line.op, 0, group or dist.group.WORLD) * 1, None


_RUN: dict[str, Callable[[Instruction, Tensor, dist.ProcessGroup | None], Made]] = {
    "all_reduce": _all_reduce, "all_reduce_rows": _all_reduce_rows, "broadcast": _broadcast, "reduce": _reduce,
    "all_gather": _all_gather, "all_gather_into_tensor": _all_gather_into_tensor, "gather": _gather,
    "scatter": _scatter, "reduce_scatter": _reduce_scatter, "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all, "all_to_all_single": _all_to_all_single, "funcol_all_reduce": _funcol_all_reduce,
    "funcol_all_gather": _funcol_all_gather, "funcol_reduce_scatter": _funcol_reduce_scatter,
}  # fmt: skip
