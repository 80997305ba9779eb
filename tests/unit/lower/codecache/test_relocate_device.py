"""What was compiled for one GPU, on another. None is needed: not by Inductor to write, nor by Triton to compile."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from wholestep.lower.codecache.prune_imports import lightened
from wholestep.lower.codecache.relocate_device import (
    _COMMENT,
    CannotRelocate,
    kernel_texts,
    relocate,
    without_device_index,
)

pytestmark = pytest.mark.timeout(300)  # the first test waits for `generated`

OLD, NEW = 0, 2
SEGMENTS = (
    "pointwise", "reduction", "mix_order_reduction", "combo_kernel", "product", "attention", "mixed_precision",
    "embedding_backward", "mutation", "made_on_the_device", "bias_gradients",
    "norm_of_few_rows",
)  # fmt: skip
SIGN = {
    "pointwise": "@triton_heuristics.pointwise(", "reduction": "@triton_heuristics.reduction(",
    "mix_order_reduction": "'RSPLIT_SIZE'", "combo_kernel": "'combo_grid_meta'", "product": "extern_kernels.mm(",
    "attention": "_scaled_dot_product_flash_attention.default(",
    "mixed_precision": "target=torch.ops.prims.convert_element_type.default](", "embedding_backward": "tl.atomic_add(",
    "mutation": "'mutated_arg_names': ['in_ptr0'", "made_on_the_device": "device=device(type='cuda', index=0)",
    "bias_gradients": "torch.ops.wholestep.sum_rows.default(",
    "norm_of_few_rows": "workspace_0, 1024, 768, stream=",  # one kernel for rows and columns
}  # fmt: skip
"""What tells that a text is of its kind."""


@pytest.fixture(scope="module")
def generated() -> dict[str, Any]:
    """What `tests.unit.lower.inductor.generated_code` says."""
    if importlib.util.find_spec("triton") is None or torch.version.cuda is None:
        pytest.skip("this build of torch knows no CUDA, or triton is not installed")
    command = [sys.executable, "-m", "tests.unit.lower.inductor.generated_code", str(OLD), str(NEW)]
    root = Path(__file__).parents[4]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=280)
    assert found.returncode == 0, found.stderr[-4000:]
    said: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    assert tuple(said["old"]) == tuple(said["new"]) == SEGMENTS
    return said


@pytest.mark.parametrize("kind", SEGMENTS)
def test_a_moved_module_is_the_one_that_would_have_been_written(generated: dict[str, Any], kind: str) -> None:
    old, new = generated["old"][kind], generated["new"][kind]
    assert SIGN[kind] in old
    assert old != new
    assert _COMMENT.sub("", relocate(old, OLD, NEW)) == _COMMENT.sub("", new)
    assert _COMMENT.sub("", relocate(new, NEW, OLD)) == _COMMENT.sub("", old)
    assert relocate(old, OLD, OLD) == old
    assert len(kernel_texts(new)) == new.count("async_compile.triton(") > 0


@pytest.mark.parametrize("kind", SEGMENTS)
def test_a_module_that_travels_imports_no_compiler(generated: dict[str, Any], kind: str) -> None:
    compilers = ("select_algorithm", "memory_planning", "torch._inductor.hooks")
    assert all(name in generated["old"][kind] for name in compilers)
    text = lightened(generated["old"][kind], ("mm", "addmm", "bmm").__contains__)
    assert not [name for name in compilers if name in text]


@pytest.mark.parametrize("kind", ["reduction, static", "reduction, early", "combo_kernel, early"])
@pytest.mark.parametrize("origin", [0, 1], ids=["compiled", "from Inductor's cache"])
def test_a_kernel_is_taken_over_with_its_binaries(generated: dict[str, Any], kind: str, origin: int) -> None:
    """By real Inductor and real Triton: what is loaded is what this GPU would have compiled."""
    found = generated["travelled"][kind]
    assert found["made by compiling"] > 0
    assert found["made by taking"] == 0
    loaded, taken, own = found["loaded"][origin], found["taken"][origin], found["own"]
    assert len(loaded) == found["made by compiling"]
    assert {number for _, number in loaded} == {NEW}
    assert taken["devices"] == own["devices"] == [NEW]
    assert taken["kernels"] == own["kernels"]
    # What Inductor launches by itself is ready without a look at its text.
    assert found["ready"][origin] == ("static" in kind) * len(own["kernels"])
    assert all(("gdc_wait" in text) is ("early" in kind) for text in kernel_texts(own["text"]))
    assert all(one["properties"]["index"] == NEW and set(one["meta"]) == {NEW} for one in taken["kernels"].values())
    assert _COMMENT.sub("", taken["text"]) == _COMMENT.sub("", own["text"])


def test_a_plan_and_a_kernel_over_lists_go_to_another_gpu(generated: dict[str, Any]) -> None:
    assert generated["lists"] == {
        "made by building": 1, "made by taking": 0, "same": True, "same plan": True, "device": NEW,
    }  # fmt: skip


def test_kernels_of_ours_are_built_as_they_are_launched(generated: dict[str, Any]) -> None:
    """Before a first call, from what is known of it; a GPU of another number finds them."""
    assert generated["own"] == {
        "made by building": 6, "made by launching": 0, "ready": 6 * [True],
        "loaded": [
            [name, NEW] for name in (*2 * ["_cross_entropy"], "_sum_columns", "_add_rows", "_add_parts", "_add")
        ],
    }  # fmt: skip


# What needs no triton.


@pytest.mark.parametrize(
    "line",
    [
        "with torch.cuda.device(0):",
        "torch.cuda.default_generators[0].graphsafe_get_state()",
        "buf0 = empty_on_device(0)",
        "run(buf0, device=0)",
        "run(buf0, device_index=0)",
        "run(buf0, device_idx = 0)",
        "{'device': 0}",
        "DeviceProperties(index=0, type='cuda')",
        "constant0_cuda0 = None",
        "side_stream0 = None",
        "stream0_1 = None",
        "gpu0.run()",
        "guard(0)",
        "torch.device('cuda', 0)",
    ],
)
def test_a_number_in_an_unknown_form_is_refused(line: str) -> None:
    text = f"stream0 = get_raw_stream(0)\n    {line}\n"
    with pytest.raises(CannotRelocate, match="in a form that is not known") as told:
        relocate(text, 0, 2)
    assert line[:20].rsplit("stream0", 1)[0] in str(told.value)


@pytest.mark.parametrize("line", ["torch.cuda.set_device(1)", "x.to('cuda:1')", "stream1 = get_raw_stream(1)"])
def test_a_text_that_names_two_gpus_is_refused(line: str) -> None:
    with pytest.raises(CannotRelocate, match="compiled for GPU 0 and names GPU 1"):
        relocate(f"torch.cuda.set_device(0)\n{line}\n", 0, 2)


def test_only_numbers_of_the_gpu_are_changed() -> None:
    text = (
        "# 'cuda:0', and on cuda:1 in a comment\n"
        "buf0 = empty_strided_cuda((0, 3), (1, 0), torch.float32)\n"
        "tl.device_assert((0 <= tmp0) & (tmp0 < 10), 'out of bounds: 0 <= tmp0 < 10')\n"
        "stream0 = get_raw_stream(0)\n"
        "triton_poi_fused_0.run(buf0, 0, stream=stream0)\n"
        "x = rand_strided((10,), (1,), device='cuda:0')\n"
    )
    assert relocate(text, 0, 12) == (
        "# 'cuda:12', and on cuda:1 in a comment\n"
        "buf0 = empty_strided_cuda((0, 3), (1, 0), torch.float32)\n"
        "tl.device_assert((0 <= tmp0) & (tmp0 < 10), 'out of bounds: 0 <= tmp0 < 10')\n"
        "stream12 = get_raw_stream(12)\n"
        "triton_poi_fused_0.run(buf0, 0, stream=stream12)\n"
        "x = rand_strided((10,), (1,), device='cuda:12')\n"
    )
    assert relocate(relocate(text, 0, 12), 12, 0) == text


def test_kernels_are_found_in_order_and_as_they_are_given() -> None:
    module = (
        "a = async_compile.triton('a', '''\nsay('\\\\n')\n''', device_str='cuda')\nb = async_compile.triton('b', 'B')\n"
    )
    assert kernel_texts(module) == ["\nsay('\\n')\n", "B"]
    with pytest.raises(CannotRelocate, match="is not written in its module"):
        kernel_texts("text = read()\na = async_compile.triton('a', text)\n")


def test_a_likeness_is_the_same_on_all_gpus() -> None:
    first, third = (f"aten.full {{'device': device(type='cuda', index={number})}} [1, 0, 2]" for number in (0, 2))
    assert without_device_index(first, 0) == without_device_index(third, 2) != without_device_index(first, 2)
