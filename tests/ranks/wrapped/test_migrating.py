"""docs/migrating.md: both sides of each diff run on two ranks and give the same losses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.adapters.launched import launched

pytestmark = pytest.mark.ranks

PAGE = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
START = next(iter(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
DIFFS: dict[str, str] = dict(re.findall(r"## From (.*?)\n.*?```diff\n(.*?)```", PAGE, re.DOTALL))
RUNS_NO_MORE = {"DeepSpeed ZeRO", "torch.distributed._spmd"}
"""Left sides that need what is not installed, or is gone since torch 2.4."""


PACKAGES = {
    "an Accelerate loop": ("accelerate",),
    "a Fabric loop": ("lightning",),
    "transformers.Trainer": ("transformers", "accelerate"),
    "a Lightning Trainer": ("lightning",),
}
"""What a section needs and may not be installed."""


def side(diff: str, sign: str) -> str:
    """The lines of one side. What torch.compile makes of a module is not compiled by Inductor, which takes long."""
    lines = "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))
    return lines.replace("DistributedDataParallel(model))", "DistributedDataParallel(model), backend='aot_eager')")


def losses(code: str) -> list[float]:
    """Of a program on this rank, whose process group is there already."""
    start = "\n".join(line for line in START.splitlines() if not line.startswith("dist.init_process_group"))
    scope: dict[str, Any] = {"__name__": "migrating"}
    exec(compile(f"{start}\n{code}", "train.py", "exec"), scope)
    return [float(one) for one in scope["losses"]]


def of_ddp(kind: str) -> list[float]:
    """Of eager DistributedDataParallel, for a left side that does not run."""
    scale = "loss.backward()" if kind == "DeepSpeed ZeRO" else "(loss * dist.get_world_size()).backward()"
    diff = DIFFS["a DDP loop"].replace("loss.backward()", scale)
    if kind == "torch.distributed._spmd":
        diff = diff.replace("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=1e-3, foreach=True)")
        diff = diff.replace("     nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "")
    return losses(side(diff, "-"))


def both(kind: str) -> tuple[list[float], list[float]]:
    with launched():
        before = of_ddp(kind) if kind in RUNS_NO_MORE else losses(side(DIFFS[kind], "-"))
    with launched():
        return before, losses(side(DIFFS[kind], "+"))


def test_every_section_is_a_diff() -> None:
    assert set(DIFFS) == set(re.findall(r"## From (.*)", PAGE))
    assert all(side(diff, "-") != side(diff, "+") for diff in DIFFS.values())


@pytest.mark.parametrize("kind", DIFFS)
def test_both_sides_of_a_diff_give_the_same_losses(pool2: Any, kind: str) -> None:
    for package in PACKAGES.get(kind, ()):
        pytest.importorskip(package, reason=f"{package} is not installed")
    for before, after in pool2.run(both, kind):
        assert len(before) == len(after) == 50
        torch.testing.assert_close(torch.tensor(after), torch.tensor(before), rtol=2**-16, atol=0)
        if kind in ("a DDP loop", "an FSDP2 loop", *PACKAGES):
            assert after == before  # bit by bit
