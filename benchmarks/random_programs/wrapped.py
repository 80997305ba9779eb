"""Random programs whose network is wrapped: DistributedDataParallel or `fully_shard`, with settings of the seed.

[Note: what fully_shard does otherwise]
Torch keeps the parameters of an outermost module gathered between its forward and its backward, and after a forward
without one. There it loses what is written to them, an optimizer sees none of their gradients, and a training after an
evaluation starts from old parameters. A compiled step does what the lines say. So those lines are not compared: none
uses parameters there, and each evaluation ends with ``reshard()``. In eager code gradients that wait for the last
micro-batch are nowhere to be seen, and nothing clears them.

Where a parameter is frozen after its wrapping, DistributedDataParallel waits for its gradient and reduces none that
lies in a bucket with it: each rank trains on with its own.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator

from benchmarks.random_programs.program import Line, Program

WRAPPERS = ("wrapped_ddp", "fully_shard")
_DDP_SETTINGS = (
    "", "", "bucket_cap_mb=0.00005", "gradient_as_bucket_view=True", "broadcast_buffers=False",
    "find_unused_parameters=True", "static_graph=True", "bucket_cap_mb=0.00005, find_unused_parameters=True",
)  # fmt: skip
_FSDP_SETTINGS = ("", "", "reshard_after_forward=False")
_MADE, _FREEZES = "net = torch.", "requires_grad_(not"
_BUILT, _FORWARD, _ACCUMULATES = "    opt = ", "out = model(x)", "if count % 2 == 0:"
_EVALUATES = "table['eval'] = model(x).mean().item()"
_OF_WAITING = (".grad", "zero_grad", "clip_grad", "norm_of", "count +=")
_OF_PARAMETERS = (".weight", ".bias", "parameters()", "state_dict", "user.decay")


def wrapped(program: Program, wrapper: str) -> Program | None:
    """The program with a wrapped network, ``net`` beside ``model``, whose accumulation goes without reductions.

    None for what is not compared.
    """
    rng = random.Random(program.seed)
    if _MADE in program.head:
        return program
    return _in_ddp(program, rng) if wrapper == "wrapped_ddp" else _fully_sharded(program, rng)


def _in_ddp(program: Program, rng: random.Random) -> Program:
    settings = rng.choice(_DDP_SETTINGS)
    if "bucket_view" in settings and "user.flat_gradients(model) if True" in program.head:
        settings = ""  # gradients become views of buckets, and of the flat one no more
    made = f"net = torch.nn.parallel.DistributedDataParallel(model, {settings})"
    begin = "with net.no_sync() if count % 2 else torch.enable_grad(): " if _accumulates(program) else ""
    moves = [(f": {_FORWARD}", ": out = net(x)"), (_FORWARD, f"{begin}out = net(x)")]
    lines = [line for line in program.lines if not (line.can_go and _FREEZES in line.text)]
    between = tuple(tuple(one for one in done if _FREEZES not in one) for done in program.between)
    return _with(dataclasses.replace(program, between=between), made, moves, lines)


def _fully_sharded(program: Program, rng: random.Random) -> Program | None:
    if "torch.autograd.grad(" in program.text:
        return None
    parts = "[model.first, model.last, model]" if rng.random() < 0.5 else "[model]"
    made = f"for one in {parts}: net = torch.distributed.fsdp.fully_shard(one, {rng.choice(_FSDP_SETTINGS)})"
    lines = list(_without_gathered(program.lines))
    if _accumulates(program):
        begin = Line("net.set_requires_gradient_sync(count % 2 == 0)", can_go=True)
        lines = [begin, *(one for one in lines if not (one.can_go and _names(one, _OF_WAITING)))]
    return _with(program, made, [(_FORWARD, "out = net(x)"), (_EVALUATES, f"{_EVALUATES}; user.reshard(model)")], lines)


def _accumulates(program: Program) -> bool:
    return any(line.text == _ACCUMULATES for line in program.lines)


def _without_gathered(lines: Iterable[Line]) -> Iterator[Line]:
    is_gathered = False
    for line in lines:
        if not (is_gathered and line.can_go and _names(line, _OF_PARAMETERS)):
            yield line
        is_gathered = (is_gathered or _FORWARD in line.text) and ".backward(" not in line.text


def _names(line: Line, names: Iterable[str]) -> bool:
    return any(name in line.text for name in names)


def _with(program: Program, made: str, moves: Iterable[tuple[str, str]], lines: Iterable[Line]) -> Program:
    def moved(text: str) -> str:
        for old, new in moves:
            text = text.replace(old, new)
        return text

    before, found, behind = program.head.partition(_BUILT)
    changed = tuple(dataclasses.replace(line, text=moved(line.text)) for line in lines)
    return dataclasses.replace(program, head=f"{before}    {made}\n{found}{behind}", lines=changed)
