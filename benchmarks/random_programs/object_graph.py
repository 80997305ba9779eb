"""Random object graphs: numbers in nested containers, objects, classes, globals and closures, and the ways to them."""

from __future__ import annotations

import random
from dataclasses import dataclass

_HOLDERS = (
    ("user.Box({})", ".w"), ("user.Slotted({})", ".w"), ("user.Computed({})", ".w"), ("user.Mapping({})", ".w"),
    ("user.Record({})", ".w"), ("user.Table(w={})", ".w"), ("library.Box({})", ".w"), ("library.Mapping({})", ".w"),
    ("library.Slotted({})", ".w"), ("library.Table(w={})", ".w"), ("types.SimpleNamespace(w={})", ".w"),
    ("{{'w': {}}}", "['w']"), ("[0.5, {}]", "[1]"), ("OrderedDict(w={})", "['w']"),
    ("defaultdict(float, w={})", "['w']"),
    ("deque([{}, 2.0])", "[0]"),
)  # fmt: skip
"""What holds one thing: the text that makes it, and the way to the thing."""
_FIXED = (
    "Config.w", "G", "cell", "box.w", "model.scale", "user.SETTINGS['w']", "library.SETTINGS['w']",
    "user.Box.kind_scale",
)  # fmt: skip
"""Numbers that every program has: of a class, of globals, of a closure."""
_ARRAYS = ("np.array([{}])", "torch.tensor([{}])")


@dataclass(frozen=True, slots=True)
class ObjectGraph:
    """Objects of one program."""

    definitions: tuple[str, ...]
    places: tuple[str, ...]
    """Where numbers stand: what can be assigned to."""
    reads: tuple[str, ...]
    """Expressions that read one."""


def object_graph(rng: random.Random) -> ObjectGraph:
    """Some holders in holders, two names of which may be one object."""
    definitions, places, reads = list[str](), rng.sample(_FIXED, 4), list[str]()
    for number in range(rng.randint(1, 4)):
        name = f"held{number}"
        made, ways = _held(rng, rng.randint(1, 3))
        definitions.append(f"{name} = {made}")
        place = name + "".join(ways)
        places.append(place)
        if ways[-1] == ".w":
            before = name + "".join(ways[:-1])
            reads += [f"getattr({before}, chr(119))", f"operator.attrgetter('w')({before})"]
        if len(ways) > 1 and rng.random() < 0.3:
            definitions.append(f"alias{number} = {name}{ways[0]}")
            places.append(f"alias{number}" + "".join(ways[1:]))
    return ObjectGraph(
        tuple(definitions), tuple(places), (*(f"float({one})" for one in [*places, *reads]), *places[:4])
    )


def _held(rng: random.Random, depth: int) -> tuple[str, list[str]]:
    if depth == 0:
        return str(rng.choice([0.5, 0.75, 1.0, 1.25])), []
    made, ways = _held(rng, depth - 1)
    if depth == 1 and rng.random() < 0.1:
        return rng.choice(_ARRAYS).format(made), ["[0]"]
    holder, way = rng.choice(_HOLDERS)
    return holder.format(made), [way, *ways]
