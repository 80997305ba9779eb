"""compile_trainer(trainer): the loop of ``transformers.Trainer``, with one compiled call for each of its batches.

[Note: where the update is]
The loop of a Trainer calls ``training_step`` for each batch and then, after the last one of an update, clips, steps
and clears. All of it is in one graph, which runs where the loop calls ``training_step``: the loss is known there. What
the loop calls afterwards finds the work done, once: it gets the norm of the gradients, and nothing is updated twice. A
loop that calls in another order is an error.
Batches before the last one of an update are calls of their own, which accumulate gradients and communicate nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from wholestep.adapters.method_swaps import MethodSwaps
from wholestep.api.compiled_step import CompiledStep
from wholestep.api.entry_points import compile
from wholestep.errors import ConfigError
from wholestep.runtime.options import Backend, Passes

NEEDED = ("training_step", "_clip_grad_norm", "_get_grad_norm", "callback_handler", "accelerator", "args")
"""What a Trainer has since transformers 5."""


def compile_trainer(
    trainer: Any, *, backend: Backend = "auto", passes: Passes = None, max_retraces: int = 8, fullgraph: bool = False
) -> CompiledStep:
    """Has ``trainer.train()`` train through one graph a step: forward, loss, backward, communication, clipping, update.

    Call it once, before ``train()``. Everything else is the Trainer's own: data, schedules, logs, evaluation,
    checkpoints. Strategies come from what the Trainer has wrapped the model in.

    Args:
        trainer: a ``transformers.Trainer``, also one of a class of yours.
        backend, passes, max_retraces, fullgraph: as `wholestep.compile` takes them.

    Returns the compiled step, for `CompiledStep.explain` and `CompiledStep.cache_info`.

    Raises ConfigError for what is no Trainer or an older one, and here or in ``train()`` for what a Trainer was told
    that a compiled step cannot keep.
    """
    if missing := [name for name in NEEDED if not hasattr(trainer, name)]:
        raise ConfigError(
            f"compile_trainer wants a transformers.Trainer of version 5 or later, got {type(trainer).__name__}, which "
            f"has no {missing[0]}. Install transformers>=5."
        )
    if isinstance(vars(trainer).get("training_step"), _TrainingStep):
        raise ConfigError("This Trainer is compiled already. Call compile_trainer once.")
    _refuse_settings(trainer)
    compiled = compile(_train_on_batch, backend=backend, passes=passes, max_retraces=max_retraces, fullgraph=fullgraph)
    _TrainingStep(trainer, compiled).begin()
    return compiled


def _train_on_batch(
    trainer: Any, batch: tuple[Any, ...], *, is_update: bool, keeps_gradients: bool
) -> tuple[torch.Tensor, Any]:
    """The loss of this rank's batch, and the norm of all gradients where the batch is the last one of an update.

    `batch`: the arguments of ``training_step``.
    """
    loss: torch.Tensor = trainer.training_step(*batch)
    if not is_update:
        return loss, None
    model = batch[0]
    clipped = trainer._clip_grad_norm(model) if trainer.args.max_grad_norm > 0 else None
    norm = trainer._get_grad_norm(model, grad_norm=clipped)
    trainer.optimizer.step()
    if not keeps_gradients:
        model.zero_grad()
    return loss, norm


class _TrainingStep:
    """What stands in the place of a Trainer's ``training_step``."""

    def __init__(self, trainer: Any, compiled: CompiledStep) -> None:
        self._trainer, self._compiled = trainer, compiled
        self._of_trainer, self._behind_update = MethodSwaps(), MethodSwaps()
        self._norm: Any = None
        self._is_update_pending = False
        """Whether the graph has updated, and the loop has not come to its own update yet."""

    def begin(self) -> None:
        """From here on the Trainer calls this object."""
        self._of_trainer.put(self._trainer, "training_step", self)

    def __call__(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One batch, and the update if it is the last one of it. Gives the loss, as ``Trainer.training_step``."""
        trainer = self._trainer
        if self._is_update_pending:
            raise ConfigError(
                f"{type(trainer).__name__} came to its next training_step without optimizer.step(): its loop is not "
                f"the one of transformers.Trainer, whose whole update compile_trainer runs with the last batch. "
                f"Compile a step of that loop with wholestep.compile instead."
            )
        _refuse_settings(trainer)
        is_update = bool(trainer.accelerator.sync_gradients)
        _set_train_mode(model, trainer.optimizer)  # a step sees one mode, whatever an evaluation has left
        keeps_gradients = is_update and bool(_callbacks_with(trainer, "on_optimizer_step"))
        loss: torch.Tensor
        self._of_trainer.undo()
        try:
            loss, self._norm = self._compiled(
                trainer, (model, inputs, num_items_in_batch), is_update=is_update, keeps_gradients=keeps_gradients
            )
        finally:
            self.begin()
        if is_update:
            self._expect_update()
        return loss

    def _expect_update(self) -> None:
        trainer, behind = self._trainer, self._behind_update
        self._is_update_pending = True
        behind.put(trainer, "_clip_grad_norm", lambda model: self._norm)
        behind.put(trainer, "_get_grad_norm", lambda model, grad_norm=None: self._norm)
        behind.put(trainer.optimizer, "step", self._already_stepped)

    def _already_stepped(self, closure: Any = None) -> None:
        """The loop's own ``optimizer.step()``, which the graph has done."""
        self._behind_update.undo()
        self._is_update_pending = False
        if closure is not None:
            raise ConfigError("optimizer.step(closure) runs a loss again, which compile_trainer has run already.")


def _set_train_mode(model: Any, optimizer: Any) -> None:
    model.train()
    if callable(train := getattr(optimizer, "train", None)):
        train()


def _callbacks_with(trainer: Any, event: str) -> list[str]:
    """Names of classes of callbacks that do something at an event."""
    from transformers import TrainerCallback

    plain = {vars(base).get(event) for base in (TrainerCallback, type(trainer.callback_handler))}
    callbacks = trainer.callback_handler.callbacks
    return [type(one).__name__ for one in callbacks if getattr(type(one), event, None) not in plain]


def _refuse_settings(trainer: Any) -> None:
    """Raises ConfigError for what a Trainer was told that one graph cannot keep."""
    accelerator = trainer.accelerator
    refused = {
        "the DeepSpeed plugin, whose engine updates parameters itself: use DDP or FSDP2 (fsdp_version=2)":
            accelerator.state.deepspeed_plugin is not None,
        "fp16=True, whose GradScaler reads at every step whether to skip it: use bf16=True":
            accelerator.scaler is not None,
        "several GPUs in one process (DataParallel): start one process a GPU, with torchrun":
            trainer.args.n_gpu > 1,
    }  # fmt: skip
    for what, is_there in refused.items():
        if is_there:
            raise ConfigError(f"compile_trainer cannot keep {what}.")
    if names := _callbacks_with(trainer, "on_pre_optimizer_step"):
        raise ConfigError(
            f"The callback {names[0]} has on_pre_optimizer_step, which runs between clipping and update. They are one "
            f"graph in a compiled Trainer: use on_step_end, or on_optimizer_step, where gradients are still there."
        )
