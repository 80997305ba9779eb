"""Objects around the tensors: trainers, callbacks, configurations, contexts, metrics, of the user and of libraries."""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import functools
import itertools
import os
import sys
import threading
import types
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.idioms.base import Loop, batch, idiom, loop, small_training, update

GLOBAL_STATE = {"scale": 1.0, "calls": 0}


@dataclass
class TrainerState:
    """What a Hugging Face trainer keeps."""

    global_step: int = 0
    total_loss: float = 0.0
    best: float | None = None


class Trainer:
    """A class with its step as a method, and callbacks."""

    def __init__(self, model, opt, callbacks):
        self.model, self.opt, self.callbacks, self.state, self.control = model, opt, callbacks, TrainerState(), {}

    def training_step(self, x, y):
        for callback in self.callbacks:
            callback.on_step_begin(self.state, self.control)
        loss = update(F.cross_entropy(self.model(x), y), self.opt)
        self.state.global_step += 1
        self.state.total_loss += loss.item()
        self.state.best = min(loss.item(), self.state.best or 1e9)
        for callback in self.callbacks:
            callback.on_step_end(self.state, self.control)
        return loss


class LogEveryThird:
    """A callback that writes into the trainer's control."""

    def __init__(self):
        self.lines = []

    def on_step_begin(self, state, control):
        control["log"] = (state.global_step + 1) % 3 == 0

    def on_step_end(self, state, control):
        if control["log"]:
            self.lines.append(f"{state.global_step}: {state.total_loss / state.global_step:.4f}")


@idiom(ranks=True)
def trainer_with_callbacks() -> Loop:
    """The step is a bound method; `self.state` and a callback's list move."""
    model, opt = small_training()
    callback = LogEveryThird()
    trainer = Trainer(model, opt, [callback])
    return loop(trainer.training_step, model=model, opt=opt, state=lambda: trainer.state, lines=callback.lines)


@dataclass
class Output:
    """What a model of the user returns."""

    loss: torch.Tensor
    logits: torch.Tensor
    hits: int = 0


@idiom()
def dataclass_returned() -> Loop:
    """A dataclass of tensors and a number."""
    model, opt = small_training()

    def step(x, y):
        logits = model(x)
        output = Output(loss=F.cross_entropy(logits, y), logits=logits.detach())
        update(output.loss, opt)
        output.loss = output.loss.detach()
        output.hits = int((logits.argmax(1) == y).sum())
        return output

    return loop(step, model=model, opt=opt)


class Box:
    """A class of a user's own file torch_utils.py."""

    def __init__(self, w):
        self.w, self.n = w, 0


Box.__module__ = "torch_utils"
sys.modules.setdefault("torch_utils", types.ModuleType("torch_utils")).Box = Box  # type: ignore[attr-defined]


@idiom(ranks=True)
def object_of_torch_utils() -> Loop:
    """A user's module whose name begins like torch's: its attributes move inside and outside."""
    model, opt = small_training()
    box = Box(w=1.0)

    def step(x, y):
        loss = update((box.w * model(x)).pow(2).mean(), opt)
        box.n += 1
        return loss, box.n

    def arguments(call):
        box.w = 1.0 + 0.1 * call
        return batch(call)

    return loop(step, arguments, model=model, opt=opt, box=lambda: vars(box))


class Mode(enum.Enum):
    """Which loss."""

    WARM = "warm"
    HARD = "hard"


class Config:
    """Slots, a property that counts its reads, and a class attribute."""

    __slots__ = ("_reads", "mode", "smoothing")
    total = 0

    def __init__(self):
        self._reads, self.mode, self.smoothing = 0, Mode.WARM, 0.1

    @property
    def scale(self):
        self._reads += 1
        return 1.0 / self._reads


@idiom()
def configuration_object() -> Loop:
    """Slots, an enum, a property with an effect, a class attribute, and `getattr` by a computed name."""
    model, opt = small_training()
    config = Config()
    Config.total = 0

    def step(x, y):
        Config.total += 1
        logits = model(x) * config.scale
        match config.mode:
            case Mode.WARM:
                loss = F.cross_entropy(logits, y, label_smoothing=getattr(config, "smooth" + "ing"))
            case Mode.HARD:
                loss = F.cross_entropy(logits, y)
        config.mode = Mode.HARD if Config.total % 4 == 3 else Mode.WARM
        return update(loss, opt)

    def arguments(call):
        config.smoothing = 0.02 * call
        return batch(call)

    return loop(step, arguments, model=model, opt=opt, config=lambda: (config._reads, config.mode, Config.total))


net = optimizer = None
iteration = 0


def train_one(x, y):
    """The step of a script: everything it uses is a global of its file."""
    global iteration
    loss = update(F.cross_entropy(net(x), y), optimizer)
    iteration += 1
    if iteration % 2 == 0:
        print("iteration", iteration, "loss", loss.item())
    return loss


@idiom()
def script_with_globals() -> Loop:
    """Model, optimizer and counter are variables of the file, and the step assigns to one of them."""
    global net, optimizer, iteration
    net, optimizer = small_training()
    iteration = 0
    return loop(train_one, model=net, opt=optimizer, iteration=lambda: iteration)


@idiom()
def global_of_a_module() -> Loop:
    """A dictionary of the file and a variable of the environment, both moved between calls."""
    model, opt = small_training()
    GLOBAL_STATE.update(scale=1.0, calls=0)

    def step(x, y):
        GLOBAL_STATE["calls"] += 1
        scale = GLOBAL_STATE["scale"] * float(os.environ.get("IDIOM_SCALE", "1"))
        return update(scale * F.cross_entropy(model(x), y), opt)

    def arguments(call):
        GLOBAL_STATE["scale"] = 1.0 + call % 3
        os.environ["IDIOM_SCALE"] = str(1 + call % 2)
        return batch(call)

    return loop(step, arguments, model=model, opt=opt, state=lambda: dict(GLOBAL_STATE))


class Timed:
    """A context manager of the user that counts and swallows an error."""

    def __init__(self):
        self.entered, self.swallowed = 0, 0

    def __enter__(self):
        self.entered += 1
        return self

    def __exit__(self, kind, error, trace):
        self.swallowed += kind is KeyError
        return kind is KeyError


@idiom()
def context_manager_of_the_user() -> Loop:
    """It counts, and hides a KeyError that comes after the backward of every fourth call."""
    model, opt = small_training()
    timed, settings = Timed(), {}

    def step(x, y):
        with timed:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if timed.entered % 4 == 0:
                settings["missing"]
            opt.step()
            opt.zero_grad()

    return loop(step, model=model, opt=opt, timed=lambda: vars(timed))


@idiom()
def no_sync_or_nothing() -> Loop:
    """`nullcontext` or a context of the model's own, as accumulation with DDP is written."""
    model, opt = small_training()
    calls = {"n": 0, "synced": 0}

    @contextlib.contextmanager
    def no_sync():
        yield
        calls["synced"] -= 1

    def step(x, y):
        calls["n"] += 1
        last = calls["n"] % 2 == 0
        with contextlib.nullcontext() if last else no_sync():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            calls["synced"] += 1
        if last:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return loop(step, model=model, opt=opt, calls=calls)


@idiom(inductor=True)
def partial_and_keywords() -> Loop:
    """`functools.partial` binds model and optimizer; options come by keyword with defaults."""
    model, opt = small_training()

    def train(model, opt, x, y, *, smoothing=0.0, reduce=torch.mean):
        losses = F.cross_entropy(model(x), y, label_smoothing=smoothing, reduction="none")
        return update(reduce(losses), opt)

    return loop(functools.partial(train, model, opt, smoothing=0.1), model=model, opt=opt)


@idiom()
def cycle_of_losses() -> Loop:
    """`itertools.cycle` over functions: another loss in every call."""
    model, opt = small_training()
    losses = itertools.cycle(
        [F.cross_entropy, functools.partial(F.cross_entropy, label_smoothing=0.2), F.multi_margin_loss]
    )

    def step(x, y):
        return update(next(losses)(model(x), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def cached_and_thread_local() -> Loop:
    """`lru_cache` around what is made of sizes, a thread-local counter, and a lock."""
    model, opt = small_training()
    local, lock, made = threading.local(), threading.Lock(), []

    @functools.lru_cache(maxsize=2)
    def weights(rows):
        made.append(rows)
        return torch.linspace(0.5, 1.5, rows)

    def step(x, y):
        with lock:
            local.calls = getattr(local, "calls", 0) + 1
        losses = F.cross_entropy(model(x), y, reduction="none")
        return update((losses * weights(len(x))).mean() / local.calls, opt)

    return loop(
        step,
        lambda call: batch(call, 3 + call % 3),
        model=model,
        opt=opt,
        made=made,
        calls=lambda: getattr(local, "calls", 0),
    )


class Accuracy:
    """A metric with tensors as its state, as torchmetrics has."""

    def __init__(self):
        self.correct, self.total = torch.tensor(0), torch.tensor(0)

    def __call__(self, logits, y):
        self.correct += (logits.argmax(1) == y).sum()
        self.total += y.numel()
        return self.correct / self.total


@idiom()
def metric_object() -> Loop:
    """Its state is written in place and computed in every call; it is made anew at call 6."""
    model, opt = small_training()
    holder = {"metric": Accuracy(), "calls": 0}

    def step(x, y):
        if holder["calls"] == 6:
            holder["metric"] = Accuracy()
        holder["calls"] += 1
        logits = model(x)
        loss = update(F.cross_entropy(logits, y), opt)
        return loss, holder["metric"](logits.detach(), y)

    return loop(step, model=model, opt=opt, metric=lambda: vars(holder["metric"]), calls=lambda: holder["calls"])


@torch.library.custom_op("idioms::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    """An operator of a library that has no fake kernel: nothing can be known of it without running it."""
    return x - float(x.mean())


@idiom()
def operator_without_a_fake_kernel() -> Loop:
    """A library's operator prepares the batch, and nobody has told torch what shape it gives."""
    model, opt = small_training()

    def step(x, y):
        return update(F.cross_entropy(model(centred(x)), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def state_saved_by_a_thread() -> Loop:
    """Every third call hands a copy of the parameters to a worker thread, which begins with the next call."""
    # The event is why: how many pieces there are would else depend on how soon the worker looks.
    model, opt = small_training()
    workers, pending, sums = concurrent.futures.ThreadPoolExecutor(1), [], []
    calls, begins = {"n": 0}, threading.Event()

    def total(state):
        begins.wait(timeout=5)
        begins.clear()
        return sum(value.double().sum().item() for value in state.values())

    def step(x, y):
        while pending:
            begins.set()
            sums.append(pending.pop().result())
        loss = update(F.cross_entropy(model(x), y), opt)
        calls["n"] += 1
        if calls["n"] % 3 == 0:
            state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
            pending.append(workers.submit(total, state))
        return loss

    return loop(step, model=model, opt=opt, sums=sums, calls=calls)
