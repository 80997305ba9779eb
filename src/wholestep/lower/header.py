"""What the text of a compiled segment imports, less what it does not use.

Inductor begins every module with the same imports, and two of them (`select_algorithm`, for products of matrices, and
`memory_planning`) bring the whole compiler: hundreds of modules, for a namespace in which the module finds ``torch.mm``
and a function that it mostly does not call. A module that travels to a process that compiles nothing imports what it
uses, and takes from torch what is torch's.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Mapping

_COMPILER = "torch._inductor."
_PRODUCTS = "extern_kernels"
_OPERATORS = re.compile(r"\btorch\.ops\b(?:\.(\w+))?")
_NAMED_OPERATORS = re.compile(r"^(\w+) = torch\.ops\.(\w+)", re.MULTILINE)
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
    if _may_need_operators(text, uses):
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
    """What is used of the namespace; a name that no module has, for a use of all of it."""
    found = {id(node.value): node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {
        found.get(id(node), "") for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == _PRODUCTS
    }  # fmt: skip


def _may_need_operators(text: str, uses: Mapping[str, int]) -> bool:
    """Whether a module uses operators that are not there without a compiler, or may."""
    named = _NAMED_OPERATORS.findall(text)
    if any(namespace not in _THERE and uses[name] > 1 for name, namespace in named):  # its definition is one use
        return True
    return any(namespace not in _THERE for namespace in _OPERATORS.findall(_NAMED_OPERATORS.sub("", text)))
