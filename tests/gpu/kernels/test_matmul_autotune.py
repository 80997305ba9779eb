"""Products of matrices by algorithms of cublasLt, on a GPU."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from tests.gpu.switches import deterministic
from wholestep.lower.gemm import matmul_autotune
from wholestep.lower.gemm.cublaslt import Algorithm, Epilogue

pytestmark = pytest.mark.gpu

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
SHAPES = [(1024, 768, 3072), (256, 2304, 768), (40, 24, 4096), (1, 8, 16), (129, 1001, 77), (8192, 50257, 64)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is chosen yet."""
    monkeypatch.setattr(matmul_autotune, "_chosen", {})


def drawn(rows: int, columns: int, dtype: torch.dtype, *, transposed: bool, seed: int = 0) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    sizes = (columns, rows) if transposed else (rows, columns)
    made = torch.randn(*sizes, generator=draw, device="cuda").to(dtype)
    return made.t() if transposed else made


def near(found: Tensor, exact: Tensor, inner: int) -> bool:
    """Whether a product is as exact as one that is added up in float32, by any tree, and rounded once."""
    room = UNIT[found.dtype] * exact.abs() * 2 + UNIT[torch.float32] * 4 * inner * math.sqrt(inner)
    return bool(((found.double() - exact).abs() <= room).all())


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("rows", "columns", "inner"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_float64(
    rows: int, columns: int, inner: int, transposed: tuple[bool, bool], dtype: torch.dtype
) -> None:
    a = drawn(rows, inner, dtype, transposed=transposed[0])
    b = drawn(inner, columns, dtype, transposed=transposed[1], seed=1)
    bias = torch.randn(columns, device="cuda").to(dtype)
    exact = a.double() @ b.double()
    out = torch.full((rows, columns), math.nan, device="cuda", dtype=dtype)
    assert matmul_autotune.mm(a, b, out=out) is out
    assert near(out, exact, inner)
    assert near(
        matmul_autotune.addmm(bias, a, b, alpha=1, beta=1, out=torch.empty_like(out)), exact + bias.double(), inner
    )
    wide = matmul_autotune.mm_dtype(a, b, torch.float32)
    assert wide.dtype is torch.float32
    assert near(wide, exact, inner)
    again = matmul_autotune.mm(a, b, out=torch.empty_like(out))
    assert torch.equal(again, out)  # what was chosen stays
    assert len(matmul_autotune._chosen) == 3  # none of them was left to torch unasked


def test_every_algorithm_that_is_tried_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them would be the fastest on another day."""
    tried: list[Algorithm | None] = []
    a, b = drawn(512, 768, torch.bfloat16, transposed=False), drawn(768, 1024, torch.bfloat16, transposed=True)
    bias = torch.randn(1024, device="cuda").to(torch.bfloat16)
    exact = a.double() @ b.double()
    for number in range(1 + matmul_autotune._TRIED):
        monkeypatch.setattr(matmul_autotune, "_chosen", {})
        monkeypatch.setattr(
            matmul_autotune,
            "_times_ms",
            lambda runs, number=number: [float(one != number) for one, _ in enumerate(runs)],
        )
        out = torch.empty(512, 1024, device="cuda", dtype=torch.bfloat16)
        matmul_autotune.addmm(bias, a, b, out=out)
        tried.append(next(iter(matmul_autotune._chosen.values())))
        assert near(out, exact + bias.double(), 768)
    assert tried[0] is None
    assert len({one.data for one in tried[1:] if one is not None}) > 1


def test_a_slice_of_a_bucket_is_written_and_nothing_beside_it() -> None:
    a, b = drawn(96, 512, torch.bfloat16, transposed=True), drawn(512, 72, torch.bfloat16, transposed=False)
    bucket = torch.full((3 + 96 * 72 + 5,), math.nan, device="cuda")
    out = bucket[3:-5].view(96, 72)  # 12 bytes after the start of an allocation
    matmul_autotune.mm_dtype_out(a, b, torch.float32, out=out)
    assert near(out, a.double() @ b.double(), 512)
    assert bucket[:3].isnan().all()
    assert bucket[-5:].isnan().all()


def test_choices_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has them times nothing, and computes the same bits."""
    a, b = drawn(1024, 768, torch.bfloat16, transposed=False), drawn(768, 3072, torch.bfloat16, transposed=True)
    first = matmul_autotune.mm(a, b, out=torch.empty(1024, 3072, device="cuda", dtype=torch.bfloat16))
    found = pickle.loads(pickle.dumps(matmul_autotune.choices()))
    monkeypatch.setattr(matmul_autotune, "_chosen", {})
    monkeypatch.setattr(matmul_autotune, "_calls", {})
    monkeypatch.setattr(matmul_autotune, "_fastest", None)  # whoever times calls it
    matmul_autotune.load_choices(found)
    second = matmul_autotune.mm(a, b, out=torch.empty_like(first))
    assert torch.equal(first, second)


def test_a_capture_times_nothing_and_replays_what_was_chosen() -> None:
    a, b = drawn(1024, 768, torch.bfloat16, transposed=False), drawn(768, 3072, torch.bfloat16, transposed=True)
    new, out = drawn(64, 768, torch.bfloat16, transposed=False), torch.empty(1024, 3072, device="cuda").bfloat16()
    matmul_autotune.mm(a, b, out=out)
    asked = dict(matmul_autotune._chosen)
    graph, unseen = torch.cuda.CUDAGraph(), torch.empty(64, 3072, device="cuda").bfloat16()
    with torch.cuda.graph(graph):
        matmul_autotune.mm(a, b, out=out)
        matmul_autotune.mm(new, b, out=unseen)
    assert matmul_autotune._chosen == asked
    expected = out.clone()
    for tensor in (out, unseen):
        tensor.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, expected)
    assert near(unseen, new.double() @ b.double(), 768)


def gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """GELU by tanh in float64, and its derivative."""
    leaf = x.detach().requires_grad_()
    value = F.gelu(leaf, approximate="tanh")
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope


def choose(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the run of this number be the fastest: 0 is torch, 1 is what cublasLt holds for the best."""
    monkeypatch.setattr(matmul_autotune, "_chosen", {})
    monkeypatch.setattr(matmul_autotune, "_times_ms", lambda runs: [float(one != number) for one, _ in enumerate(runs)])


TANH = 2.0**-11
"""Relative error of the tanh that GPUs have an instruction for."""


@pytest.mark.parametrize("number", [0, 1], ids=["apart", "in one"])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1024, 3072, 768), (40, 24, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_with_its_product(
    rows: int, columns: int, inner: int, dtype: torch.dtype, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(number, monkeypatch)
    a = drawn(rows, inner, dtype, transposed=False)
    b = (drawn(inner, columns, dtype, transposed=True, seed=1) / math.sqrt(inner)).to(dtype)
    bias = torch.randn(columns, device="cuda").to(dtype)
    hidden, pre = matmul_autotune.product_gelu(bias, a, b)
    (algorithm,) = (
        one for product, one in matmul_autotune._chosen.items() if product.epilogue is Epilogue.BIAS_AND_GELU
    )
    assert (algorithm is None) is (number == 0)
    sums = a.double() @ b.double() + bias.double()
    assert near(pre, sums, inner)
    exact, _ = gelu_and_slope(pre.double() if number == 0 else sums)
    room = 2 * UNIT[dtype] * exact.abs() + TANH * sums.abs() + UNIT[torch.float32] * 8 * inner
    assert bool(((hidden.double() - exact).abs() <= room).all())

    grad, back = drawn(rows, inner, dtype, transposed=False, seed=2), b
    found = matmul_autotune.product_gelu_backward(grad, back, pre)
    sums = grad.double() @ back.double()
    x = pre.double()
    _, slope = gelu_and_slope(x)
    rounded = 4 * UNIT[dtype] * (sums * slope).abs() + 2 * UNIT[dtype] * sums.abs() * (number == 0)
    room = rounded + TANH * sums.abs() * (1 + x.abs() * (1 + 0.2 * x**2)) + UNIT[torch.float32] * 8 * inner
    assert bool(((found.double() - sums * slope).abs() <= room).all())


def test_deterministic_algorithms_are_torchs() -> None:
    a, b = drawn(1024, 768, torch.bfloat16, transposed=False), drawn(768, 3072, torch.bfloat16, transposed=True)
    out = torch.empty(1024, 3072, device="cuda", dtype=torch.bfloat16)
    with deterministic():
        matmul_autotune.mm(a, b, out=out)
    assert not matmul_autotune._chosen
    assert torch.equal(out, a @ b)


class Mlp(nn.Module):
    """(rows, 512) -> loss"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y = self.down(F.gelu(self.up(x), approximate="tanh"))
        return F.mse_loss(y.float(), x)


@pytest.mark.parametrize("tuned", [True, False])
def test_a_step_uses_them_and_trains_as_eager_code_does(tuned: bool) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = []
    for backend in (None, ws.Inductor(tune_products=tuned)):
        model = Mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        step = train if backend is None else ws.compile(train, backend=backend)
        draw = torch.Generator("cuda").manual_seed(3)
        x = torch.randn(1024, 512, generator=draw, device="cuda")
        losses.append(torch.stack([step(model, optimizer, x).detach() for _ in range(8)]))
    # Losses of products in bfloat16 with float32 sums.
    torch.testing.assert_close(losses[1], losses[0], rtol=2.0**-7, atol=0.0)
    assert bool(matmul_autotune._chosen) is tuned
    if tuned:
        kinds = {(one.rows, one.columns, one.epilogue) for one in matmul_autotune._chosen}
        weights = {(rows, columns, Epilogue.NOTHING) for rows, columns in ((2048, 512), (512, 2048))}
        activated = {(1024, 2048, Epilogue.BIAS_AND_GELU), (1024, 2048, Epilogue.GELU_BACKWARD)}
        assert kinds >= {(1024, 512, Epilogue.BIAS)} | activated | weights
