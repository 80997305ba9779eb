"""A compiled ``transformers.Trainer`` on two ranks: one graph a step, and the numbers of the Trainer without it."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.ranks.adapters.launched import launched
from wholestep.adapters.transformers import compile_trainer

pytestmark = pytest.mark.ranks

transformers: Any = pytest.importorskip("transformers", minversion="5", reason="transformers>=5 is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers.Trainer needs")

MANY = 5000
"""More examples than a walk looks at."""


class HalfLoss(transformers.Trainer):
    """A Trainer of the user's, with a method and numbers of its own that move while it trains."""

    batches_seen = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        return (loss * 0.5, outputs) if return_outputs else loss * 0.5

    def floating_point_ops(self, inputs: Any) -> int:
        self.batches_seen += 1
        return super().floating_point_ops(inputs)


class Norms(transformers.TrainerCallback):
    """Reads gradients while they are there."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.seen.append(sum(float(one.grad.double().square().sum()) for one in model.parameters()))


class BeforeUpdate(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


def trainer(kind: type = transformers.Trainer, callbacks: Any = (), **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (MANY, 12), generator=generator)
    examples = [{"input_ids": one, "labels": one} for one in tokens]
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 6,
        "logging_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "linear", "eval_strategy": "steps",
        "eval_steps": 3, "save_strategy": "no", "max_grad_norm": 0.5, "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    return kind(
        transformers.LlamaForCausalLM(config),
        transformers.TrainingArguments(**arguments | settings),
        train_dataset=examples, eval_dataset=examples[:8], callbacks=list(callbacks),
    )  # fmt: skip


NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss")


def trained(one: Any) -> tuple[list[dict[str, float]], list[Tensor]]:
    one.train()
    assert one.state.global_step == 6
    log = [{key: row[key] for key in NUMBERS if key in row} for row in one.state.log_history]
    assert sum("grad_norm" in row for row in log) == 6
    assert sum("eval_loss" in row for row in log) == 2
    return log, [param.detach().clone() for param in one.model.parameters()]


def with_and_without(kind: type, settings: dict[str, Any]) -> tuple[int, int, str]:
    with launched():
        wanted, params = trained(trainer(kind, **settings))
        ours = trainer(kind, **settings)
        step = compile_trainer(ours, fullgraph=True)
        log, own = trained(ours)
    assert log == wanted  # bit by bit
    assert all(map(torch.equal, own, params))
    info = step.cache_info()
    return info.traces, info.hits, step.plan


@pytest.mark.parametrize("kind", [transformers.Trainer, HalfLoss], ids=["Trainer", "of_a_class_of_the_users"])
def test_every_step_is_one_graph_with_the_same_numbers(pool2: Any, kind: type) -> None:
    for traces, hits, plan in pool2.run(with_and_without, kind, {}):
        assert (traces, hits) == (1, 5)
        assert plan.count("all_reduce") == 1


@pytest.mark.parametrize(
    "settings",
    [{"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.0}, {"bf16": True}, {"optim": "sgd"}],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_settings_keep_their_numbers(pool2: Any, settings: dict[str, Any]) -> None:
    per_step = settings.get("gradient_accumulation_steps", 1)
    for traces, hits, _ in pool2.run(with_and_without, transformers.Trainer, settings):
        assert traces + hits == 6 * per_step
        assert traces <= (1 if per_step == 1 else 3)


def gradients_of_callbacks() -> None:
    with launched():
        eager, ours = Norms(), Norms()
        trained(trainer(callbacks=[eager]))
        compiled = trainer(callbacks=[ours])
        compile_trainer(compiled, fullgraph=True)
        trained(compiled)
    assert eager.seen == ours.seen
    assert len(ours.seen) == 6


def test_a_callback_behind_the_update_sees_gradients(pool2: Any) -> None:
    pool2.run(gradients_of_callbacks)


def refused() -> None:
    with launched():
        with pytest.raises(ws.ConfigError, match="BeforeUpdate has on_pre_optimizer_step"):
            compile_trainer(trainer(callbacks=[BeforeUpdate()]))
        one = trainer()
        compile_trainer(one)
        with pytest.raises(ws.ConfigError, match="compiled already"):
            compile_trainer(one)
        one.add_callback(BeforeUpdate())
        with pytest.raises(ws.ConfigError, match="BeforeUpdate has on_pre_optimizer_step"):
            one.train()


def test_what_one_graph_cannot_keep_is_refused_by_name(pool2: Any) -> None:
    pool2.run(refused)
    with pytest.raises(ws.ConfigError, match=r"wants a transformers.Trainer .* got object, which has no training_step"):
        compile_trainer(object())


class ForgetsToStep(transformers.Trainer):
    """A loop in another order: two batches, and no step between them."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return super().training_step(model, inputs, num_items_in_batch)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, grad_norm)


def in_another_order() -> None:
    with launched():
        one = trainer(ForgetsToStep)
        compile_trainer(one)
        one._prepare_for_training(6, one.get_train_dataloader(), None)
        batch = {"input_ids": torch.ones(2, 12, dtype=torch.long), "labels": torch.ones(2, 12, dtype=torch.long)}
        one.current_gradient_accumulation_steps = 1
        one.training_step(one.model_wrapped, batch)
        with pytest.raises(ws.ConfigError, match=r"next training_step without optimizer.step\(\)"):
            one.training_step(one.model_wrapped, batch)
        one.optimizer.step()
        before = [param.detach().clone() for param in one.model.parameters()]
        one.training_step(one.model_wrapped, batch)
        after = [param.detach().clone() for param in one.model.parameters()]
        one.optimizer.step()
        assert not all(map(torch.equal, before, after))
        assert all(map(torch.equal, after, one.model.parameters()))  # the loop's own step is done already


def test_a_loop_in_another_order_is_refused_and_updates_nothing_twice(pool2: Any) -> None:
    pool2.run(in_another_order)
