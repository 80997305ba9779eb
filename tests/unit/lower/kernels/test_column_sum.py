"""The kernel that adds up partial sums, run by Triton's interpreter. Builds of torch for CPUs come without Triton."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.lower import triton_interpreter
from wholestep.lower.codecache import triton_cache
from wholestep.lower.kernels import column_sum

triton = pytest.importorskip("triton")

UNIT = 2.0**-24


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = triton_interpreter.prepare(monkeypatch)
    monkeypatch.setattr(column_sum, "_kernel", interpreter.InterpretedFunction(column_sum._sum_columns))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(512, 24), (1, 8), (511, 7), (1300, 17), (3, 1)])
def test_sums_are_those_of_float64(count: int, rows: int, columns: int, interpreted: None) -> None:
    workspace = torch.randn(count * rows * columns + 5, generator=torch.Generator().manual_seed(0))
    workspace[count * rows * columns :] = torch.nan
    found = column_sum.column_sums(workspace, count, rows, columns)
    parts = workspace[: count * rows * columns].view(count, rows, columns).double()
    assert [one.shape for one in found] == [(columns,)] * count
    # A sum is rounded once per number at most, whatever the order.
    bound = rows * UNIT * parts.abs().sum(1)
    assert bool(((torch.stack(found).double() - parts.sum(1)).abs() <= bound).all())
    again = column_sum.column_sums(workspace, count, rows, columns)
    assert all(map(torch.equal, found, again))


def test_a_program_reads_vectors_and_another_process_finds_its_binary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for a GPU that need not be here."""
    from triton.backends.compiler import GPUTarget

    signature = {
        "workspace": "*fp32", "results": ("*fp32", "*fp32"), "size": ("i32", "i32"),
        "count": "constexpr", "block": "constexpr",
    }  # fmt: skip
    aligned = {place: [["tt.divisibility", 16]] for place in ((0,), (1, 0), (1, 1), (2, 0), (2, 1))}

    def build() -> SimpleNamespace:
        source = triton.compiler.ASTSource(
            fn=column_sum._kernel, signature=signature, constexprs={(3,): 2, (4,): column_sum._BLOCK}, attrs=aligned
        )
        made: SimpleNamespace = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": column_sum._WARPS}
        )
        return made

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    made = build()
    height, width = column_sum._BLOCK
    vectors = height * width // (32 * column_sum._WARPS * 4)
    assert len(re.findall(r"ld\.global\.v4\.b32", made.asm["ptx"])) == vectors
    data = triton_cache.dumps([made])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    triton_cache.loads(data)
    monkeypatch.setattr(triton.compiler.ASTSource, "make_ir", None)  # whoever compiles calls it
    assert build().asm["cubin"] == made.asm["cubin"]
