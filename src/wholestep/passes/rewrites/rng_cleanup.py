"""Drops what reads and sets the state of a random generator, where that changes no number.

Activation checkpointing saves the states of all generators before a block and sets them for its recompute. In a
block without dropout nobody draws in between::

    then = rng_get("cuda")                        forward
    forward                                ->     recompute
    now = rng_get("cuda")
    rng_set(then, "cuda");  recompute
    rng_set(now, "cuda")

What is left where numbers are drawn is needed; a CUDA graph has a way of its own for it
(`wholestep.lower.cudagraph.rng_replay`).
"""

from __future__ import annotations

import torch
import torch.fx as fx

from wholestep.ir import node_meta, op_info
from wholestep.ir.ops.rng_state import GET, SET
from wholestep.ir.program import Program

_KNOWN = ("aten", "prims", "wholestep", "_c10d_functional")


def clean_up_rng(program: Program) -> Program:
    """The program without settings of generators to the state that they are in, or that nobody draws from, and without
    states that nobody sets. The note says how many calls went."""
    graph = program.graph
    calls = [node for node in graph.nodes if node.op == "call_function" and _may_draw(node)]
    dropped: list[fx.Node] = []
    # What nobody saw may have been the only other state that was ever set, and a state that nobody reads a look at it.
    while needless := _unused_states(calls) or _redundant_sets(calls) or _overwritten_sets(calls):
        for call in needless:
            graph.erase_node(call)
        gone = {*needless}
        calls = [call for call in calls if call not in gone]
        dropped += needless
    if not dropped:
        return program
    return program.with_notes(f"dropped {len(dropped)} calls about random generators that change no number")


def _unused_states(calls: list[fx.Node]) -> list[fx.Node]:
    """States that nobody sets."""
    return [call for call in calls if call.target is GET and not call.users]


def _may_draw(node: fx.Node) -> bool:
    """Whether a call draws or sets a generator; unknown operators may."""
    if not op_info.is_op(node):
        return False
    space, name = node.target._schema.name.split("::")  # type: ignore[union-attr]
    is_twin = space == "wholestep_functional" and name.startswith("aten__")
    return op_info.draws(node) or not (space in _KNOWN or is_twin)


def _redundant_sets(calls: list[fx.Node]) -> list[fx.Node]:
    """Calls that set a generator to the state that it is in."""
    # `calls` are all that may draw, in order.
    redundant = []
    states: dict[fx.Node, object] = {}
    current: dict[str, object] = {}
    for call in calls:
        if call.target is GET:
            states[call] = current.setdefault(_device(call), call)
        elif call.target is SET:
            wanted = states.get(call.args[0], call)  # type: ignore[arg-type]
            if current.get(_device(call)) is wanted:
                redundant.append(call)
            current[_device(call)] = wanted
        else:
            for device in _drawn_from(call) or [*current]:
                current.pop(device, None)
    return redundant


def _overwritten_sets(calls: list[fx.Node]) -> list[fx.Node]:
    """Calls that set a generator which is set again before anything draws or reads it."""
    unused = []
    overwritten: set[str] = set()
    for call in reversed(calls):
        if call.target is SET:
            if _device(call) in overwritten:
                unused.append(call)
            overwritten.add(_device(call))
        elif call.target is GET:
            overwritten.discard(_device(call))
        else:
            overwritten -= _drawn_from(call) or overwritten
    return unused


def _drawn_from(call: fx.Node) -> set[str]:
    """The devices whose generators a call draws from; empty if that is not known."""
    own = call.kwargs.get("generator") is not None or call.target.namespace != "aten"  # type: ignore[union-attr]
    return set() if own else {_canonical_name(one.device) for one in node_meta.tensors(call)}


def _device(call: fx.Node) -> str:
    return _canonical_name(torch.device(str(call.args[-1])))


def _canonical_name(device: torch.device) -> str:
    """A device as it is always written."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return f"{device.type}:{index}"
