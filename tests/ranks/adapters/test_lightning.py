"""A compiled Trainer of Lightning, alone and on two ranks: one graph a step, and the numbers of the plain Trainer."""

from __future__ import annotations

import re
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import wholestep as ws
from tests.ranks.adapters.launched import launched
from wholestep.adapters.lightning import compile_trainer

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]  # Lightning warns of small loaders and logs

lightning: Any = pytest.importorskip("lightning", minversion="2.6", reason="lightning>=2.6 is not installed")

NUM_EPOCHS, NUM_BATCHES = 3, 6
"""Of each rank: the sampler gives each of two the half."""


class Classifier(lightning.LightningModule):
    """What most modules are: a loss, logged, and an optimizer with a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.body(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.body(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WithHooks(Classifier):
    """Hooks that compute, log, and read what is there between two of Lightning's own calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        found = self.body(x)
        loss = nn.functional.cross_entropy(found, y)
        self.log_dict({"loss": loss, "weight": self.body[0].weight[0, 0], "share": 0.5}, on_epoch=True)
        return {"loss": loss, "found": found, "number": batch_idx}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("before_zero_grad", self.body[0].weight.sum())

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("scaled_loss", loss * 2)

    def on_after_backward(self) -> None:
        for param in self.parameters():
            param.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", sum(param.grad.norm() for param in self.parameters()))

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Normed(Classifier):
    """Its averaged weights want an epoch that updates nothing but the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body.insert(0, nn.BatchNorm1d(16))


class Manual(Classifier):
    """Two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        first, second = self.optimizers()
        loss = nn.functional.cross_entropy(self.body(x) + self.other(x), y)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        second.step()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        other = torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.body.parameters(), lr=1e-2), other


class Keeps(Classifier):
    """Changes Python in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", sum(self.losses) / len(self.losses))
        self.losses.clear()


class WarmUp(Classifier):
    """The rate is set in the hook of the step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 5) * 1e-2
        optimizer.step(closure=optimizer_closure)


class Seen(lightning.Callback):
    """What hooks of the loop see after each batch."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.step: Any = None
        self.traces: list[int] = []
        """Of the compiled step, after each batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        values = {key: float(one.sum()) if isinstance(one, Tensor) else one for key, one in outputs.items()}
        grads = [None if one.grad is None else float(one.grad.double().sum()) for one in module.parameters()]
        logged = {key: float(one) for key, one in trainer.logged_metrics.items()}
        self.rows.append((values, logged, rates, grads, trainer.global_step))
        self.traces.append(self.step.cache_info().traces if self.step is not None else 0)


@dataclass
class Fitted:
    """What a training has left."""

    rows: list[tuple[Any, ...]]
    params: list[Tensor]
    metrics: dict[str, float]
    progress: dict[str, Any]
    saved: dict[str, dict[str, Any]]
    """Checkpoints by name."""
    traces: list[int]


def trainer_of(callbacks: Any = (), **settings: Any) -> Any:
    arguments: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": NUM_EPOCHS, "gradient_clip_val": 0.1, "logger": False,
        "log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "callbacks": list(callbacks),
        **({"devices": 2, "strategy": "ddp"} if dist.is_initialized() else {"devices": 1}),
    }  # fmt: skip
    return lightning.Trainer(**arguments | settings)


def is_first() -> bool:
    """Whether this rank writes checkpoints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def loader() -> DataLoader[Any]:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    generator = torch.Generator().manual_seed(1)
    num = 8 * NUM_BATCHES * num_ranks
    return DataLoader(
        TensorDataset(torch.randn(num, 16, generator=generator), torch.randint(4, (num,), generator=generator)),
        batch_size=8,
    )


def fitted(kind: type, settings: dict[str, Any], *, compiled: bool, **options: Any) -> tuple[Fitted, Any]:
    with launched() if dist.is_initialized() else nullcontext(), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        module, seen = kind(), Seen()
        saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=4)
        own = [make() for make in settings.get("callbacks", ())]
        rest = {key: one for key, one in settings.items() if key != "callbacks"}
        trainer = trainer_of([seen, saves, *own], **{"enable_checkpointing": True} | rest)
        seen.step = step = compile_trainer(trainer, **options) if compiled else None
        trainer.fit(module, loader(), loader())
        saved = {path.name: torch.load(path, weights_only=False) for path in sorted(Path(folder).glob("*.ckpt"))}
    metrics = {key: float(one) for key, one in trainer.callback_metrics.items()}
    params = [param.detach().clone() for param in module.parameters()]
    return Fitted(seen.rows, params, metrics, trainer.fit_loop.state_dict(), saved, seen.traces), step


def both(kind: type, settings: dict[str, Any], options: dict[str, Any]) -> tuple[Any, list[int]]:
    """Trains with and without, and compares everything. Gives the compiled step, and its traces after each batch."""
    wanted, _ = fitted(kind, settings, compiled=False)
    found, step = fitted(kind, settings, compiled=True, **options)
    assert len(found.rows) >= NUM_EPOCHS * NUM_BATCHES
    assert found.rows == wanted.rows  # bit by bit
    assert all(map(torch.equal, found.params, wanted.params))
    assert found.metrics == wanted.metrics
    assert found.progress == wanted.progress
    assert found.saved.keys() == wanted.saved.keys()
    assert bool(found.saved) == is_first()
    for name, one in found.saved.items():
        assert all(map(torch.equal, one["state_dict"].values(), wanted.saved[name]["state_dict"].values()))
        assert str(one["optimizer_states"]) == str(wanted.saved[name]["optimizer_states"])
        assert one["loops"] == wanted.saved[name]["loops"]
    return step, found.traces


def graphs(kind: type, settings: dict[str, Any]) -> tuple[list[int], int, int]:
    step, traces = both(kind, settings, {"fullgraph": True})
    return traces, step.cache_info().hits, step.plan.count("all_reduce")


CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "plain": (Classifier, {}),
    "hooks": (WithHooks, {}),
    "accumulated": (Classifier, {"accumulate_grad_batches": 4}),
    "manual": (Manual, {"gradient_clip_val": None}),
    "bf16": (Classifier, {"precision": "bf16-mixed"}),
    "by_value": (Classifier, {"gradient_clip_algorithm": "value"}),
}


def check_graphs(name: str, traces: list[int], hits: int) -> None:
    second, third = 2 * NUM_BATCHES - 1, 3 * NUM_BATCHES - 1
    assert traces[-1] + hits == len(traces)
    assert traces[second] <= (8 if name == "accumulated" else 4)
    assert traces[third] == traces[second]  # the third epoch brings nothing new


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_one_graph_with_the_same_numbers(name: str) -> None:
    traces, hits, num_reductions = graphs(*CASES[name])
    check_graphs(name, traces, hits)
    assert num_reductions == 0


@pytest.mark.parametrize("name", ["plain", "hooks", "accumulated", "manual"])
def test_every_step_on_two_ranks_is_one_graph_with_the_same_numbers(pool2: Any, name: str) -> None:
    for traces, hits, num_reductions in pool2.run(graphs, *CASES[name]):
        check_graphs(name, traces, hits)
        assert num_reductions == 1


LIVE: dict[str, tuple[type, dict[str, Any], str]] = {
    "keeps": (Keeps, {}, r"len\(module\.losses\) was 0, is 1"),
    "warm_up": (WarmUp, {}, r"changes .*groups\.0\.lr"),
    "averaged": (
        Normed, {"callbacks": [partial(lightning.pytorch.callbacks.StochasticWeightAveraging, 1e-2)]},
        "A BatchNorm that averages over all batches",
    ),
}  # fmt: skip
"""What runs, and why it is no single graph."""


def told(kind: type, settings: dict[str, Any]) -> str:
    step, _ = both(kind, settings, {})
    return " ".join(str(step.explain()).split())


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("name", LIVE)
def test_hooks_that_change_python_run_at_every_step_and_are_told(name: str, may_go_live: bool) -> None:
    kind, settings, reason = LIVE[name]
    assert re.search(f"live, its Python runs at every call.*{reason}", told(kind, settings))


@pytest.mark.parametrize("name", ["keeps", "warm_up"])
def test_hooks_that_change_python_run_at_every_step_of_two_ranks(pool2: Any, name: str) -> None:
    kind, settings, reason = LIVE[name]
    for found in pool2.run(told, kind, settings):
        assert re.search(f"live, its Python runs at every call.*{reason}", found)


def test_a_training_goes_on_from_a_checkpoint_of_the_plain_trainer(tmp_path: Path) -> None:
    def trained(num_epochs: int, compiled: bool, start: Path | None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module, trainer = Classifier(), trainer_of(max_epochs=num_epochs)
        if compiled:
            compile_trainer(trainer, fullgraph=True)
        torch.manual_seed(1)
        trainer.fit(module, loader(), ckpt_path=start)
        return module, trainer

    _, plain = trained(1, compiled=False, start=None)
    plain.save_checkpoint(tmp_path / "first.ckpt")
    wanted, _ = trained(3, compiled=False, start=tmp_path / "first.ckpt")
    found, trainer = trained(3, compiled=True, start=tmp_path / "first.ckpt")
    assert trainer.global_step == 3 * NUM_BATCHES
    assert all(map(torch.equal, found.parameters(), wanted.parameters()))


def test_what_is_logged_is_what_the_step_had_then() -> None:
    """A weight, which the update after it writes to."""
    found, _ = fitted(WithHooks, {}, compiled=True, fullgraph=True)
    logged = [row[1]["weight_step"] for row in found.rows]
    assert len(set(logged)) == len(logged)
    assert logged[-1] != float(found.params[0][0, 0])


class Engine(lightning.pytorch.strategies.SingleDeviceStrategy):
    """As that of DeepSpeed."""

    handles_gradient_accumulation = True


def test_what_one_graph_cannot_keep_is_refused_by_name() -> None:
    with pytest.raises(ws.ConfigError, match="cannot keep Engine, whose engine accumulates and updates itself"):
        compile_trainer(trainer_of(strategy=Engine(device=torch.device("cpu"))))
    with pytest.raises(ws.ConfigError, match=r"Trainer as Lightning .* got object, which has no fit_loop\."):
        compile_trainer(object())
    trainer = trainer_of()
    compile_trainer(trainer)
    with pytest.raises(ws.ConfigError, match="compiled already"):
        compile_trainer(trainer)
