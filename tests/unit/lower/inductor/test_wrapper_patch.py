"""Lines that Inductor writes around kernels. What it writes on a GPU: `tests/gpu/kernels/test_column_sum.py`."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from wholestep.lower.inductor import wrapper_patch
from wholestep.util.log_once import log_once

BEFORE_213 = """\
buf{name} = workspace_{space}[{place} * {rows} * 4 : ({place} + 1) * {rows} * 4].view({rows}, 4).{kind}(dim=0){rest}"""
SINCE_213 = """\
buf{name} = workspace_{space}[{place} * ({rows}) * (4) : ({place} + 1) * ({rows}) * (4)]\
.view({rows}, 4).{kind}(dim=0){rest}"""
ROWS = {
    "3": "3",
    "((s6 + 1) // 2)": "(s6 + 1) // 2",
    "(2*((s6 + 1) // 2) - 3)": "2*((s6 + 1) // 2) - 3",
    "math.floor(15/16 + (1/2)*s6)": "math.floor(15/16 + (1/2)*s6)",
}
"""Of partial sums, and without their brackets. Where sizes move they are an expression of such a number."""
FORMS = {"2.11": BEFORE_213, "2.13": SINCE_213}


def line(
    form: str, name: int, place: int, *, space: int = 0, kind: str = "sum", rest: str = "", rows: str = "3"
) -> str:
    return FORMS[form].format(name=name, place=place, space=space, kind=kind, rest=rest, rows=rows)


@pytest.fixture(autouse=True)
def forget() -> None:
    log_once.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def operator() -> Any:
    """The operator in the words of ATen, since there may be no Triton."""
    library = torch.library.Library("wholestep", "IMPL")
    library.impl(
        "column_sums",
        lambda workspace, count, rows, columns: list(
            workspace[: count * rows * columns].view(count, rows, columns).sum(1)
        ),
        "CPU",
    )
    yield
    library._destroy()


def run(lines: list[Any]) -> dict[str, torch.Tensor]:
    names: dict[str, Any] = {f"workspace_{space}": torch.arange(36.0) * (1 - 3 * space) for space in range(2)} | {
        "torch": torch,
        "math": math,
        "s6": 5,
    }
    exec("\n".join(one for one in lines if isinstance(one, str)), names)
    return {name: one for name, one in names.items() if name.startswith("buf")}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", FORMS)
def test_sums_of_one_workspace_are_one_call(form: str, rows: str) -> None:
    other = object()  # what Inductor keeps besides text
    lines = [
        "# Call mix order reduction kernel", other,
        *(line(form, 4 + 2 * place, place, rows=rows) for place in range(3)),
        line(form, 10, 0, space=1, rows=rows), "del workspace_0", other,
    ]  # fmt: skip
    found = wrapper_patch.join_sums(lines)
    number = ROWS[rows] if form == "2.11" else rows
    assert [one for one in found if "column_sums" in str(one)] == [
        f"[buf4, buf6, buf8] = torch.ops.wholestep.column_sums.default(workspace_0, 3, {number}, 4)",
        f"[buf10] = torch.ops.wholestep.column_sums.default(workspace_1, 1, {number}, 4)",
    ]
    assert not any(".sum(" in str(one) for one in found)
    assert found[:2] == lines[:2]
    assert found[-2:] == lines[-2:]
    torch.testing.assert_close(run(found), run(lines), rtol=0, atol=0)


@pytest.mark.parametrize(
    "rest", ["", ".view([4])", ".view([1, 4])", ".view([1, 4]).to(torch.bfloat16)", ".to(torch.float64)"]
)
def test_shapes_and_types_are_kept(rest: str) -> None:
    lines = [line("2.13", 1, 0), line("2.13", 2, 1, rest=rest)]
    found, wanted = run(wrapper_patch.join_sums(lines)), run(lines)
    assert [(one.shape, one.dtype) for one in found.values()] == [(one.shape, one.dtype) for one in wanted.values()]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(wrapper_patch.join_sums(lines)) == (1 if rest in ("", ".view([4])") else 2)


SHAPES = {"buf1": [4], "buf2": [1, 1, 4], "buf3": [2, 2]}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["sum", "amax"])
@pytest.mark.parametrize("cast", ["", ".to(torch.bfloat16)"])
def test_before_213_sums_get_the_shape_of_their_buffer(cast: str, kind: str, rows: str) -> None:
    sums = [line("2.11", number, number - 1, kind=kind, rest=cast, rows=rows) for number in (1, 2, 3)]
    lines = [object(), *sums, "del x"]
    found = wrapper_patch.shape_products(lines, SHAPES.__getitem__)
    assert (found[0], found[-1]) == (lines[0], lines[-1])
    flat, shaped = run(lines[1:-1]), run(wrapper_patch.join_sums(found[1:-1]))
    for name, shape in SHAPES.items():
        assert (list(shaped[name].shape), shaped[name].dtype) == (shape, flat[name].dtype)
        torch.testing.assert_close(shaped[name].flatten(), flat[name], rtol=0, atol=0)


def test_since_213_they_have_it_already() -> None:
    lines = [line("2.13", 1, 0, rest=".view([1, 4])"), line("2.13", 2, 1, rest=".view([4]).to(torch.float64)")]
    assert wrapper_patch.shape_products(lines, lambda name: [9]) == lines


@pytest.mark.parametrize(
    "lines",
    [
        [line("2.11", 1, 0, kind="amax")],
        [line("2.11", 1, 1)],  # not from the beginning
        [line("2.11", 1, 0), line("2.11", 2, 2)],
        [line("2.11", 1, 0).replace(" 3 *", " s0 *")],
        [line("2.11", 1, 0).replace("dim=0", "dim=1")],
        [line("2.11", 1, 0).replace("view(3, 4)", "view(4, 3)")],
        [line("2.11", 1, 0) + ".relu()"],
    ],
)
def test_other_lines_stay(lines: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrapper_patch.join_sums(lines) == lines
    monkeypatch.setattr(wrapper_patch, "shape_products", lambda lines, shape_of: lines)
    monkeypatch.setattr(wrapper_patch, "store_in_place", lambda graph, names: None)
    with caplog.at_level(logging.INFO, logger="wholestep"):
        for _ in range(2):
            wrapper_patch._join(lines, 0)
    assert [one.getMessage().endswith("left to ATen") for one in caplog.records] == [True]


class Whole:
    """In the place of a graph that Inductor writes: buf1 and buf3 are parts of buf9, buf2 is a buffer of its own."""

    def __init__(self, lines: list[str]) -> None:
        self.wrapper_code = self
        self.lines = lines
        self.allocated = {"buf1", "buf2", "buf3"}

    def try_get_buffer(self, name: str) -> Any:
        parts, own = ir.NonOwningLayout.__new__(ir.NonOwningLayout), ir.FixedLayout.__new__(ir.FixedLayout)
        spec = {"buf1": parts, "buf2": own, "buf3": parts}.get(name)
        return None if spec is None else SimpleNamespace(name=name, get_output_spec=lambda: spec)

    def get_buffer(self, name: str) -> Any:
        return SimpleNamespace(get_layout=lambda: SimpleNamespace(size=[4]))

    def writeline(self, line: str) -> None:
        self.lines.append(line)

    def codegen_allocation(self, buffer: Any) -> None:
        if buffer.name not in self.allocated:
            self.allocated.add(buffer.name)
            start = {"buf1": 0, "buf3": 8}[buffer.name]
            self.writeline(f"{buffer.name} = whole[{start} : {start + 4}]")


@pytest.mark.parametrize("form", FORMS)
def test_sums_that_are_part_of_another_buffer_are_copied_there(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a ``cat``. What a sum's name means afterwards is the part, with the numbers of the sum."""
    lines = [line(form, number, number - 1) for number in (1, 2, 3)]
    wanted = run(lines)
    graph = Whole(["whole = torch.full((12,), -1.0)", *lines])
    monkeypatch.setattr(wrapper_patch, "V", SimpleNamespace(graph=graph))
    wrapper_patch._join(graph.lines, 1)
    names = run([*graph.lines, "buf9 = whole"])
    assert names.keys() == {"buf1", "buf2", "buf3", "buf9"}
    torch.testing.assert_close(names["buf9"], torch.cat([wanted["buf1"], torch.full((4,), -1.0), wanted["buf3"]]))
    for name, one in wanted.items():
        torch.testing.assert_close(names[name], one)
    assert names["buf1"].data_ptr() == names["buf9"].data_ptr() != names["buf2"].data_ptr()


WAYS: dict[str, tuple[Any, type, str]] = {
    "sums": (wrapper_patch.patch_sums, SIMDScheduling, wrapper_patch._METHOD),
    "products": (wrapper_patch.patch_products, PythonWrapperCodegen, wrapper_patch._HEADER),
}


@pytest.mark.parametrize("what", WAYS)
def test_inductor_has_the_method_and_gets_it_back(what: str) -> None:
    way, owner, name = WAYS[what]
    before, config = getattr(owner, name), torch.compiler.config
    tag = config.cache_key_tag
    seen = []

    def compile_badly() -> None:
        with way():
            seen.extend([getattr(owner, name), config.cache_key_tag])
            raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        compile_badly()
    assert seen[0] is not before
    assert seen[1] != tag  # what others find in a cache does not call us
    assert getattr(owner, name) is before
    assert config.cache_key_tag == tag


@pytest.mark.parametrize("what", WAYS)
def test_a_torch_without_the_method_is_left_alone(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    way, owner, name = WAYS[what]
    monkeypatch.delattr(owner, name)
    with caplog.at_level(logging.INFO, logger="wholestep"):
        for _ in range(2):
            with way():
                assert not hasattr(owner, name)
    assert [what in one.getMessage() for one in caplog.records] == [True]


def test_the_option_that_makes_such_sums_exists() -> None:
    """What is written where it is off has no such lines, and nothing would tell."""
    assert hasattr(inductor_config.triton, "mix_order_reduction")
