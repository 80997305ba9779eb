"""What Inductor writes around its kernels, changed where a kernel of ours is faster: the only file that does so.

Gradients of norms' weights (`lower/kernels/column_sum.py`): Inductor adds up its partial sums by a call of ATen for
each::

    buf4 = workspace_0[0 * 512 * 768 : (0 + 1) * 512 * 768].view(512, 768).sum(dim=0)
    buf6 = workspace_0[1 * 512 * 768 : (1 + 1) * 512 * 768].view(512, 768).sum(dim=0)

becomes::

    [buf4, buf6] = torch.ops.wholestep.column_sums.default(workspace_0, 2, 512, 768)

Before torch 2.13 such lines gave vectors whatever the shape of the buffer is, as of a sum with ``keepdim``. They give
that shape here.

Such a line makes memory of its own and gives it the name of the buffer. The place of a sum may be a part of another
buffer, as of a ``cat`` that is made of it (a bucket of gradients). torch leaves that part unwritten, up to 2.13 at
least. Here sums are copied there::

    buf4_sum = buf4
    buf4 = reinterpret_tensor(buf9, (768,), (1,), 2304)  # alias
    buf4.copy_(buf4_sum)

Products of matrices (`lower/gemm/matmul_autotune.py`): what Inductor calls them by is put into a namespace of ours, in
which they are ours, after its own imports.

Lines of another form stay as they are. Code that calls us must not be found by a process that does not know us: it has
keys of its own in Inductor's cache.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.compiler.config
from torch._inductor import ir
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.virtualized import V

from wholestep.lower.kernels import column_sum  # noqa: F401  # the operator that is called
from wholestep.util.log_once import log_once

_OPERATOR = "wholestep.column_sums"
_OWN_PRODUCTS = (
    "from wholestep.lower.gemm.matmul_autotune import Products",
    "extern_kernels = Products(extern_kernels)",
)
_METHOD = "_codegen_mix_order_reduction"
_HEADER = "write_header"

# Sizes stand in brackets since torch 2.13, which views the sum besides. Another type is cast to afterwards. Where sizes
# move the number of rows is an expression, in brackets of its own or a call.
_SUM = re.compile(
    r"(?P<name>\w+) = (?P<workspace>\w+)"
    r"\[(?P<index>\d+) \* (?P<open>\()?(?P<rows>[\w. +*/()-]+?)(?(open)\)) \* \(?(?P<columns>\d+)\)? : "
    r"\((?P=index) \+ 1\) \* \(?(?P=rows)\)? \* \(?(?P=columns)\)?\]"
    r"\.view\((?:(?P=rows)|\((?P=rows)\)), (?P=columns)\)\.sum\(dim=0\)"
    r"(?P<rest>(\.view\(\[[\d, ]*\]\))?(\.to\([\w.]+\))?)"
)
_ASSIGNED = re.compile(r"(\w+) = ")
_LAST_OF_WORKSPACE = re.compile(
    r"(?P<vector>(?P<name>\w+) = \w+\[[^\]]+\]\.view\([^\[\]]+\)\.\w+\(dim=0\))(?P<cast>(\.to\([\w.]+\))?)"
)
"""Without a shape."""


def join_sums(lines: Sequence[Any]) -> list[Any]:
    """Lines of a wrapper, those that sum up one workspace as one. What is no text stays where it is."""
    found: list[Any] = []
    matches = [_SUM.fullmatch(line) if isinstance(line, str) else None for line in lines]
    keys = [match and match.group("workspace", "rows", "columns") for match in matches]
    for key, places in itertools.groupby(range(len(lines)), keys.__getitem__):
        run = list(places)
        sums = [match for match in map(matches.__getitem__, run) if match is not None]
        if key is None or [int(one["index"]) for one in sums] != list(range(len(sums))):
            found += [lines[place] for place in run]
            continue
        names, (workspace, rows, columns) = ", ".join(one["name"] for one in sums), key
        found.append(
            f"[{names}] = torch.ops.wholestep.column_sums.default({workspace}, {len(sums)}, {rows}, {columns})"
        )
        found += [
            f"{one['name']} = {one['name']}{one['rest']}"
            for one in sums
            if one["rest"] not in ("", f".view([{columns}])")
        ]
    return found


def shape_products(lines: Sequence[Any], shape_of: Callable[[str], Sequence[int]]) -> list[Any]:
    """Lines of a wrapper, those that end the reduction of a workspace with the shape of their buffer."""
    found: list[Any] = []
    for line in lines:
        match = _LAST_OF_WORKSPACE.fullmatch(line) if isinstance(line, str) else None
        if match is not None:
            shape = ", ".join(map(str, shape_of(match["name"])))
            line = f"{match['vector']}.view([{shape}]){match['cast']}"
        found.append(line)
    return found


def store_in_place(graph: Any, names: Sequence[str]) -> None:
    """Writes lines that copy buffers, which have been given memory of their own, to where they belong.

    `graph` is what Inductor is writing; `names` are of buffers that were assigned to, in its last lines.
    """
    wrapper = graph.wrapper_code
    for name in names:
        buffer = graph.try_get_buffer(name)
        if buffer is None or not isinstance(buffer.get_output_spec(), ir.NonOwningLayout):
            continue
        wrapper.writeline(f"{name}_sum = {name}")
        wrapper.allocated.discard(name)
        wrapper.codegen_allocation(buffer)
        wrapper.writeline(f"{name}.copy_({name}_sum)")
        wrapper.writeline(f"del {name}_sum")


def patch_sums() -> AbstractContextManager[None]:
    """Meanwhile what this thread has Inductor compile for a GPU sums up workspaces by one kernel each."""

    def write_joined(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        lines = V.graph.wrapper_code.lines
        start = len(lines)
        result = write(*args, **kwargs)
        _join(lines, start)
        return result

    unknown = "sums of gradients of norms' weights are made in a way that is not known, and are left to ATen"
    return _replaced_method((SIMDScheduling, _METHOD), write_joined, tag="wholestep::sums_in_place", unknown=unknown)


def patch_products() -> AbstractContextManager[None]:
    """Meanwhile what this thread has Inductor compile takes products of matrices from
    `wholestep.lower.gemm.matmul_autotune`."""

    def write_header(write: Callable[..., Any], module: Any) -> None:
        write(module)
        for line in _OWN_PRODUCTS:
            module.imports.writeline(line)

    unknown = "modules begin in a way that is not known, and their products are left to torch"
    return _replaced_method((PythonWrapperCodegen, _HEADER), write_header, tag="wholestep::products", unknown=unknown)


@contextlib.contextmanager
def _replaced_method(where: tuple[type, str], method: Callable[..., Any], *, tag: str, unknown: str) -> Iterator[None]:
    """Has this thread run `method` in the place of one of Inductor's, which it is given, with a tag in the keys of
    Inductor's cache. Says `unknown` and changes nothing where there is no such method."""
    owner, name = where
    if not hasattr(owner, name):
        log_once(logging.INFO, unknown)
        yield
        return
    before, thread = getattr(owner, name), threading.get_ident()
    config: Any = torch.compiler.config

    def run(*args: Any, **kwargs: Any) -> Any:
        return method(before, *args, **kwargs) if threading.get_ident() == thread else before(*args, **kwargs)

    setattr(owner, name, run)
    try:
        with config.patch(cache_key_tag=f"{config.cache_key_tag} {tag}".strip()):
            yield
    finally:
        setattr(owner, name, before)


def _join(lines: list[Any], start: int) -> None:
    graph = V.graph
    assigned = [match[1] for line in lines[start:] if isinstance(line, str) and (match := _ASSIGNED.match(line))]
    fresh = join_sums(shape_products(lines[start:], lambda name: graph.get_buffer(name).get_layout().size))
    if not any(isinstance(line, str) and _OPERATOR in line for line in fresh):
        log_once(
            logging.INFO, "sums of gradients of norms' weights have a form that is not known, and are left to ATen"
        )
    lines[start:] = fresh
    store_in_place(graph, assigned)
