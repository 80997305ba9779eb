"""The same language model, step and batch under JAX, jit over a mesh: data parallel or fully sharded.

``python -m wholestep.cli.suite.jax_baseline jax W1 4 60`` trains on four devices and prints one line of JSON; under
``jax_fsdp`` parameters and optimizer state are cut over the devices. It is a process of its own because JAX and torch
want the same GPUs for themselves, and is run where JAX is installed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wholestep.cli.suite.contenders import LEARNING_RATE, Kind
from wholestep.cli.suite.rank_session import BLOCK_STEPS
from wholestep.cli.suite.results import LOSS_STEPS
from wholestep.cli.suite.workloads import draw_tokens
from wholestep.cli.workloads.reference_lm import REFERENCE, LanguageModelSize

# The defaults of torch.optim.AdamW.
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01

AXIS = "data"
"""Of the mesh, which has no other one."""

Tree = Any


def parameters(size: LanguageModelSize, key: Any) -> Tree:
    """Weights in float32, drawn as the torch model draws them; biases as small, norms at one."""
    width, inner, plain = size.width, size.gated or 4 * size.width, not size.gated
    keys = iter(jax.random.split(key, 3 + 8 * size.num_layers))

    def matrix(*shape: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), shape, jnp.float32)

    def norm(biased: bool) -> Tree:
        return {"scale": jnp.ones(width), **({"bias": jnp.zeros(width)} if biased else {})}

    def linear(rows: int, columns: int) -> Tree:
        return {"weight": matrix(rows, columns), **({"bias": jnp.zeros(columns)} if plain else {})}

    def block() -> Tree:
        gate = {} if plain else {"gate": linear(width, inner)}
        return {
            "attention_norm": norm(plain), "qkv": linear(width, 3 * width), "attention_out": linear(width, width),
            "mlp_norm": norm(plain), "up": linear(width, inner), "down": linear(inner, width), **gate,
        }  # fmt: skip

    return {
        "tokens": matrix(size.vocabulary, width), "positions": matrix(size.length, width), "norm": norm(True),
        "head": matrix(width, size.vocabulary), "blocks": [block() for _ in range(size.num_layers)],
    }  # fmt: skip


def loss_of(params: Tree, tokens: Any, targets: Any, size: LanguageModelSize) -> Any:
    """Mean cross-entropy on float32 logits; products in bfloat16, norms and the residual stream in float32."""
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    for one in params["blocks"]:
        q, k, v = jnp.split(_linear(_norm(x, one["attention_norm"]), one["qkv"]), 3, axis=-1)
        heads = [part.reshape(*part.shape[:2], size.num_heads, -1) for part in (q, k, v)]
        fused = "cudnn" if jax.default_backend() == "gpu" else None
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True, implementation=fused)
        x = x + _linear(mixed.reshape(x.shape), one["attention_out"])
        y = _norm(x, one["mlp_norm"])
        up = _linear(y, one["up"])
        hidden = jax.nn.silu(_linear(y, one["gate"])) * up if size.gated else jax.nn.gelu(up, approximate=True)
        x = x + _linear(hidden, one["down"])
    logits = (_norm(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()


def _linear(x: Any, layer: Tree) -> Any:
    y = x @ layer["weight"].astype(jnp.bfloat16)
    return y + layer["bias"].astype(jnp.bfloat16) if "bias" in layer else y


def _norm(x: Any, layer: Tree) -> Any:
    """LayerNorm where there is a bias, else RMSNorm with torch's epsilon; in float32, and bfloat16 out of it."""
    x = x.astype(jnp.float32)
    if "bias" in layer:
        centred = x - x.mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * layer["scale"] + layer["bias"]
    else:
        y = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + jnp.finfo(jnp.float32).eps) * layer["scale"]
    return y.astype(jnp.bfloat16)


def train_step(state: Tree, tokens: Any, targets: Any, *, size: LanguageModelSize) -> tuple[Tree, Any]:
    """Forward, backward and AdamW. The mean over the global batch makes XLA reduce gradients over the mesh."""
    params, means, squares, count = state
    loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets, size)
    count = count + 1
    rate = LEARNING_RATE / (1 - BETA1**count)
    root = jnp.sqrt(1 - BETA2**count)
    means = jax.tree.map(lambda mean, grad: BETA1 * mean + (1 - BETA1) * grad, means, grads)
    squares = jax.tree.map(lambda square, grad: BETA2 * square + (1 - BETA2) * grad * grad, squares, grads)
    params = jax.tree.map(
        lambda param, mean, square: (
            param * (1 - LEARNING_RATE * DECAY) - rate * mean / (jnp.sqrt(square) / root + EPSILON)
        ),
        params, means, squares,
    )  # fmt: skip
    return (params, means, squares, count), loss


def cut(array: Any, mesh: Mesh) -> NamedSharding:
    """An array in equal parts over all devices, along the first dim that allows it; whole on each where none does."""
    count = mesh.devices.size
    dim = next((dim for dim, length in enumerate(array.shape) if length and length % count == 0), None)
    return NamedSharding(mesh, PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, AXIS))


def start(size: LanguageModelSize, mesh: Mesh, *, sharded: bool) -> tuple[Tree, Tree]:
    """Parameters, averages and count, and how each of them lies on the devices. No device ever holds more than that."""

    def made() -> Tree:
        params = parameters(size, jax.random.key(0))
        means, squares = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return params, means, squares, jnp.zeros((), jnp.float32)

    whole = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda one: cut(one, mesh) if sharded else whole, jax.eval_shape(made))
    return jax.jit(made, out_shardings=shardings)(), shardings


def measure(kind: Kind, name: str, nproc: int, num_steps: int) -> dict[str, Any]:
    """What a `ContenderResult` of this contender holds."""
    size, devices = REFERENCE[name], jax.devices()[:nproc]
    if len(devices) < nproc:
        raise RuntimeError(f"JAX sees {len(devices)} devices, and {nproc} were asked for")
    mesh = Mesh(np.array(devices), (AXIS,))
    drawn = zip(*(draw_tokens(size, rank) for rank in range(nproc)), strict=True)
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    tokens, targets = (jax.device_put(np.concatenate([one.numpy() for one in each]), rows) for each in drawn)
    state, shardings = start(size, mesh, sharded=kind is Kind.JAX_FSDP)
    whole = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(partial(train_step, size=size), donate_argnums=0, out_shardings=(shardings, whole))
    began = time.perf_counter()
    state, loss = step(state, tokens, targets)
    loss.block_until_ready()
    first_s = time.perf_counter() - began
    for _ in range(LOSS_STEPS - 1):
        state, loss = step(state, tokens, targets)
    behind = float(loss)
    times_ms = []
    for _ in range(max(2, num_steps // BLOCK_STEPS)):
        began = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            state, loss = step(state, tokens, targets)
        loss.block_until_ready()
        times_ms.append(1e3 * (time.perf_counter() - began) / BLOCK_STEPS)
    times_ms.sort()
    median_ms = statistics.median(times_ms)
    memory = devices[0].memory_stats() or {}
    return {
        "note": f"jax {jax.__version__}, timed in a process of its own",
        "median_ms": median_ms, "p10_ms": times_ms[len(times_ms) // 10], "p90_ms": times_ms[9 * len(times_ms) // 10],
        "tokens_per_s": 1e3 * tokens.size / median_ms, "first_s": first_s, "loss": behind,
        "peak_bytes": memory.get("peak_bytes_in_use"), "reserved_bytes": memory.get("peak_pool_bytes"),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(Kind[sys.argv[1].upper()], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
