"""What a compiled module imports, less what it does not use: plain text."""

from __future__ import annotations

import pytest

from wholestep.lower.codecache.prune_imports import lightened

HEADER = """\
import torch
from torch import device, empty_strided
from torch._inductor.hooks import run_intermediate_hooks
from torch._inductor.codegen.memory_planning import _align as align
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels

aten = torch.ops.aten
inductor_ops = torch.ops.inductor
alloc_from_pool = torch.ops.inductor._alloc_from_pool
async_compile = AsyncCompile()
"""


def imports(body: str, *, torchs: tuple[str, ...] = ("mm", "addmm")) -> list[str]:
    """The lines that import something of the compiler, or of torch in its place."""
    text = HEADER + body
    found = lightened(text, torchs.__contains__)
    assert len(found.split("\n")) == len(text.split("\n"))
    assert found.endswith(body)
    lines = [line for line in found.split("\n") if "_inductor." in line or "import torch as" in line]
    return [line.rpartition(" import ")[2] if line.startswith("from") else line for line in lines]


ALL = ["run_intermediate_hooks", "_align as align", "AsyncCompile", "extern_kernels"]


def test_what_is_not_used_is_not_imported() -> None:
    assert imports("def call(args): return empty_strided(align(3))") == ["_align as align", "AsyncCompile"]


def test_products_are_taken_from_torch() -> None:
    body = "def call(args):\n    extern_kernels.mm(args[0], args[1])\n    extern_kernels.addmm(*args)\n"
    assert imports(body) == ["AsyncCompile", "import torch as extern_kernels"]


def test_products_of_ours_use_what_the_module_does() -> None:
    body = "extern_kernels = Products(extern_kernels)\n"
    assert imports(body + "extern_kernels.mm(x)") == ["AsyncCompile", "import torch as extern_kernels"]
    assert imports(body + "extern_kernels.bias_addmm(x)") == ["AsyncCompile", "extern_kernels"]


@pytest.mark.parametrize("use", ["extern_kernels.bias_addmm(x)", "getattr(extern_kernels, x)(x)"])
def test_a_product_that_is_not_torchs_keeps_them_all(use: str) -> None:
    assert imports(f"extern_kernels.mm(x)\n{use}") == ["AsyncCompile", "extern_kernels"]


@pytest.mark.parametrize(
    "use",
    ["torch.ops.prims.inductor_seeds.default(x)", "inductor_ops.other(x)", "alloc_from_pool(x)", "x = torch.ops"],
)
def test_an_operator_that_an_import_may_register_keeps_everything(use: str) -> None:
    assert imports(use) == ALL


COMMENT = "# %one : Tensor [num_users=1] = call_function[target=torch.ops.prims.convert_element_type.default](%x)"


@pytest.mark.parametrize("use", ["torch.ops.aten.sort.default(x)", "aten.sort(x)", COMMENT, "'torch.ops.prims.iota'"])
def test_operators_of_torch_need_nothing(use: str) -> None:
    """Nor do those that a comment or a text names, as Inductor does where it says what a kernel is made of."""
    assert imports(use) == ["AsyncCompile"]


def test_what_cannot_be_read_stays() -> None:
    assert lightened("from torch._inductor.utils import x\ndef (", bool) == "from torch._inductor.utils import x\ndef ("
