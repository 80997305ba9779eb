"""What the text of a compiled segment imports, less what it does not use.

Inductor begins every module with the same imports, and two of them (`select_algorithm`, for products of matrices, and
`memory_planning`) bring the whole compiler: hundreds of modules, for a namespace in which the module finds ``torch.mm``
and a function that it mostly does not call. A module that travels to a process that compiles nothing imports what it
uses, and takes from torch what is torch's.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping

_COMPILER = "torch._inductor."
_PRODUCTS = "extern_kernels"
_THERE = ("aten", "wholestep")
"""Namespaces whose operators are there without a compiler."""


def lightened(text: str, is_torchs: Callable[[str], bool]) -> str:
    """The same module with fewer imports, line for line: numbers of lines stay.

    `is_torchs` says whether ``extern_kernels.<name>`` is ``torch.<name>``; where all that is used is, torch stands in
    for it. A text that may need an operator which an import registers is given back as it is, and so is one that
    cannot be read.

    >>> lightened("from torch._inductor.hooks import run\\nfrom torch._inductor.utils import profile\\nrun()", bool)
    'from torch._inductor.hooks import run\\n\\nrun()'
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    if _may_need_operators(tree, uses):
        return text
    lines = text.split("\n")
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not f"{node.module}.".startswith(_COMPILER):
            continue
        used = [one for one in node.names if uses[one.asname or one.name] or one.name == "*"]
        if node.lineno != node.end_lineno:
            continue
        if not used:
            lines[node.lineno - 1] = ""
        elif [(one.name, one.asname) for one in used] == [(_PRODUCTS, None)] and all(map(is_torchs, _products(tree))):
            lines[node.lineno - 1] = f"import torch as {_PRODUCTS}"
    return "\n".join(lines)


def _products(tree: ast.Module) -> set[str]:
    """What is used of the namespace; a name that no module has, for a use of all of it.
    `wholestep.lower.inductor.wrapper_patch` has it put into one of ours, which uses what the module does."""
    own = {id(one) for node in tree.body if isinstance(node, ast.Assign) and _only_name(node) == _PRODUCTS
           for one in ast.walk(node)}  # fmt: skip
    found = {id(node.value): node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {
        found.get(id(node), "") for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == _PRODUCTS and id(node) not in own
    }  # fmt: skip


def _may_need_operators(tree: ast.Module, uses: Mapping[str, int]) -> bool:
    """Whether a module uses operators that are not there without a compiler, or may. Comments, in which Inductor says
    what a kernel was made of, use none."""
    attributes = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named = {id(one.value): _only_name(one) for one in tree.body if isinstance(one, ast.Assign)}
    for node in filter(_is_ops, ast.walk(tree)):
        space = attributes.get(id(node))
        if space is None:
            return True  # all operators, for whatever
        # ``name = torch.ops.space`` and ``name = torch.ops.space.operator``, which every module has for some.
        name = named.get(id(space)) or named.get(id(attributes.get(id(space)))) or ""
        if space.attr not in _THERE and uses[name] != 1:  # its definition is one use
            return True
    return False


def _is_ops(node: ast.AST) -> bool:
    """Whether this is ``torch.ops``."""
    return (
        isinstance(node, ast.Attribute) and node.attr == "ops"
        and isinstance(node.value, ast.Name) and node.value.id == "torch"
    )  # fmt: skip


def _only_name(node: ast.Assign) -> str:
    """What an assignment to one name calls its value."""
    target = node.targets[0]
    return target.id if len(node.targets) == 1 and isinstance(target, ast.Name) else ""
