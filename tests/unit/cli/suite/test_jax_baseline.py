"""The contenders of JAX on two CPU devices, where JAX is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")

LAYOUT = """
import jax, json, numpy as np
from wholestep.cli.suite import jax_baseline as baseline
mesh = jax.sharding.Mesh(np.array(jax.devices()), (baseline.AXIS,))
state, _ = baseline.start(baseline.REFERENCE["tiny"], mesh, sharded=True)
parts = [(one.size, one.addressable_shards[0].data.size) for one in jax.tree.leaves(state)]
print(json.dumps(parts))
"""


def run(*arguments: str) -> str:
    two = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **two}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_every_device_holds_half_of_each_array_but_the_count() -> None:
    parts = [tuple(one) for one in json.loads(run("-c", LAYOUT))]
    assert parts.count((1, 1)) == 1
    assert all(size == 2 * held for size, held in parts if size > 1)


def test_sharded_training_has_the_losses_of_data_parallel_training() -> None:
    whole, cut = (
        json.loads(run("-m", "wholestep.cli.suite.jax_baseline", kind, "tiny", "2", "20"))
        for kind in ("jax", "jax_fsdp")
    )
    assert cut["loss"] == pytest.approx(whole["loss"], rel=2.0**-8)  # sums of bfloat16 products, in another order
    assert cut["loss"] < 5.5  # it learns: a guess among 256 words is 5.55
    assert cut["median_ms"] > 0
