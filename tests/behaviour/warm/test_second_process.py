"""A second process starts warm, and imports nothing of the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch
from tests.behaviour.warm import steps as t
from tests.behaviour.warm.test_second_process import COMPILER
import wholestep as ws
from wholestep.capture.tracing.tracer import Tracer
from wholestep.lower.foreach import multi_tensor
from wholestep.ir.segment import Segment
read = Segment.module
def fail(*_): raise AssertionError("it was traced, or nodes of a segment were asked for")
if sys.argv[1] == "warm":
    Tracer.run = multi_tensor.plan = fail
for backend in ("eager", "inductor"):
    # A fused optimizer: its operator has a twin, made while the step is captured, which another process has to make.
    scene, step = t.things(fused=True) if backend == "eager" else t.few_things(), ws.compile(t.train, backend=backend)
    Segment.module = property(fail) if sys.argv[1] == "warm" else read
    found = t.losses(step, scene)
    Segment.module = read
    print(found, [float(x.double().sum()).hex() for x in t.state_of(scene)])
    assert bool(step.explain().loaded_from) == (sys.argv[1] == "warm")
    assert any(isinstance(node.target, Segment) for node in step.graph.graph.nodes) == (backend == "inductor")
    print("loaded", step.cache_info().loaded)
print(" ".join(name for name in COMPILER if name in sys.modules))
"""
COMPILER = (
    "torch._inductor.compile_fx", "torch._inductor.select_algorithm", "torch._inductor.lowering",
    "torch._inductor.scheduler", "torch._inductor.ir", "torch._functorch.aot_autograd", "networkx",
)  # fmt: skip
"""What takes long to import, and what only a process needs that compiles something."""


def test_a_second_process_starts_warm_on_both_backends() -> None:
    def process(phase: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONHASHSEED": "1" if phase == "warm" else "2", "PYTHONWARNINGS": "ignore"}
        root = Path(__file__).parents[3]
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, phase], env=env, cwd=root, capture_output=True, text=True, check=False
        )

    cold, warm = process("cold"), process("warm")
    assert (cold.returncode, warm.returncode) == (0, 0), cold.stderr[-2000:] + warm.stderr[-2000:]
    told = [one.stdout.splitlines() for one in (cold, warm)]
    assert [lines.pop() for lines in told] == [" ".join(COMPILER), ""], "what was imported of the compiler"
    numbers, loaded = [lines[::2] for lines in told], [lines[1::2] for lines in told]
    assert loaded == [["loaded 0"] * 2, ["loaded 1"] * 2]
    assert numbers[0] == numbers[1]
    assert all("0x" in line for line in numbers[0])
