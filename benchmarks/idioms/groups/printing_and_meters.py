"""What a step tells while it runs: prints, logs, meters, progress bars, writers, clocks, files, warnings."""

from __future__ import annotations

import csv
import json
import logging
import sys
import tempfile
import time
import warnings
from io import StringIO
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.idioms.base import Loop, idiom, loop, small_training, update

try:
    from tqdm import tqdm as Bar
except ImportError:

    class Bar:  # type: ignore[no-redef]
        """As much of tqdm as a training loop uses."""

        def __init__(self, total, file, bar_format, **options):
            self.total, self.file, self.bar_format, self.n, self.postfix = total, file, bar_format, 0, ""

        def set_postfix(self, refresh=True, **numbers):
            self.postfix = ", ".join(f"{key}={value:.3g}" for key, value in numbers.items())

        def update(self, n=1):
            self.n += n
            self.file.write("\r" + self.bar_format.format(n=self.n, total=self.total, postfix=", " + self.postfix))


class AverageMeter:
    """The running average that every example repository has."""

    def __init__(self):
        self.value = self.sum = self.count = self.average = 0.0

    def update(self, value, n=1):
        self.value = value
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count


class SummaryWriter:
    """What TensorBoard's writer does with a scalar and a histogram."""

    def __init__(self):
        self.events = []

    def add_scalar(self, tag, value, step):
        self.events.append((tag, float(value), step))

    def add_histogram(self, tag, values, step):
        self.events.append((tag, values.detach().cpu().numpy().mean().item(), step))


@idiom(ranks=True, inductor=True)
def print_behind_the_update() -> Loop:
    """The loss as a number, printed at the end of every call."""
    model, opt = small_training()

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        print(f"loss {loss.item():.4f}")
        return loss

    return loop(step, model=model, opt=opt)


@idiom()
def print_of_a_tensor() -> Loop:
    """`print(loss)` with its graph: the text names the function that made it."""
    model, opt = small_training()

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        update(loss, opt)
        print("loss:", loss)

    return loop(step, model=model, opt=opt)


@idiom()
def print_between_forward_and_backward() -> Loop:
    """Somebody looks at the logits while debugging."""
    model, opt = small_training()

    def step(x, y):
        logits = model(x)
        print("logits", tuple(logits.shape), f"mean {logits.mean().item():.5f}")
        return update(F.cross_entropy(logits, y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def print_of_shapes_and_modules() -> Loop:
    """Nothing of it needs a value of a tensor."""
    model, opt = small_training()

    def step(x, y):
        print(f"batch {tuple(x.shape)} of {x.dtype} on {x.device}")
        print(model)
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt)


@idiom(ranks=True)
def meter_printed_every_third_call() -> Loop:
    """An average that moves in every call, and a print that comes in some."""
    model, opt = small_training()
    meter, calls = AverageMeter(), {"n": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        meter.update(loss.item(), x.size(0))
        calls["n"] += 1
        if calls["n"] % 3 == 0:
            print(f"[{calls['n']}] loss {meter.value:.4f} ({meter.average:.4f})")

    return loop(step, model=model, opt=opt, meter=lambda: vars(meter), calls=calls)


@idiom()
def logger_in_the_step() -> Loop:
    """`logging` with lazy arguments, on two levels."""
    model, opt = small_training()
    logger = logging.getLogger("training")
    logger.setLevel(logging.INFO)

    def step(x, y):
        logger.debug("batch of %d rows", len(x))
        loss = update(F.cross_entropy(model(x), y), opt)
        logger.info("loss %.4f at rate %g", loss, opt.param_groups[0]["lr"])
        if loss < 1.2:
            logger.warning("low loss %s", loss.item())

    return loop(step, model=model, opt=opt)


@idiom()
def progress_bar() -> Loop:
    """tqdm with the loss after the bar."""
    model, opt = small_training()
    shown = StringIO()
    bar = Bar(total=10, file=shown, bar_format="{n}/{total}{postfix}", mininterval=0, miniters=1)

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        bar.set_postfix(loss=loss.item(), refresh=False)
        bar.update()
        return loss

    return loop(step, model=model, opt=opt, shown=shown.getvalue, count=lambda: bar.n)


@idiom()
def summary_writer() -> Loop:
    """TensorBoard's scalars in every call, its histograms of parameters in every fourth."""
    model, opt = small_training()
    writer, calls = SummaryWriter(), {"n": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        writer.add_scalar("loss", loss, calls["n"])
        writer.add_scalar("rate", opt.param_groups[0]["lr"], calls["n"])
        if calls["n"] % 4 == 0:
            for name, param in model.named_parameters():
                writer.add_histogram(name, param, calls["n"])
        calls["n"] += 1

    return loop(step, model=model, opt=opt, events=writer.events, calls=calls)


@idiom()
def run_log_with_gradient_norms() -> Loop:
    """A dictionary of numbers per call, as wandb takes it: the norms are read before the update."""
    model, opt = small_training()
    history = []

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norms = {f"norm/{name}": param.grad.norm().item() for name, param in model.named_parameters()}
        opt.step()
        opt.zero_grad()
        history.append({"loss": loss.item(), **norms, "memory": torch.cuda.memory_allocated() if x.is_cuda else 0})

    return loop(step, model=model, opt=opt, history=history)


@idiom()
def time_measured_inside() -> Loop:
    """Seconds of forward and backward, summed up by the step itself."""
    model, opt = small_training()
    times, order = {"forward": 0.0, "backward": 0.0}, []

    def step(x, y):
        begin = time.perf_counter()
        loss = F.cross_entropy(model(x), y)
        middle = time.perf_counter()
        update(loss, opt)
        times["forward"] += middle - begin
        times["backward"] += time.perf_counter() - middle
        order.append(begin)
        return loss.detach()

    def moved():
        return {"calls": len(order), "in order": order == sorted(set(order)), "positive": min(times.values()) > 0}

    return loop(step, model=model, opt=opt, times=moved)


@idiom()
def rate_of_samples() -> Loop:
    """Throughput since the last report, every third call."""
    model, opt = small_training()
    state = {"samples": 0, "since": time.monotonic(), "reports": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        state["samples"] += len(x)
        if state["samples"] >= 15:
            rate = state["samples"] / max(time.monotonic() - state["since"], 1e-9)
            state.update(samples=0, since=time.monotonic(), reports=state["reports"] + (rate > 0))
        return loss

    return loop(step, model=model, opt=opt, seen=lambda: (state["samples"], state["reports"]))


@idiom(ranks=True)
def file_written_inside() -> Loop:
    """A line of a CSV file and a line of JSON per call."""
    model, opt = small_training()
    folder = tempfile.TemporaryDirectory()
    table, lines = Path(folder.name) / "losses.csv", Path(folder.name) / "losses.jsonl"

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        with table.open("a", newline="") as file:
            csv.writer(file).writerow([len(x), f"{loss.item():.6f}"])
        with lines.open("a") as file:
            file.write(json.dumps({"loss": round(float(loss), 5)}) + "\n")
        return loss

    def texts(folder=folder):
        return [path.read_text() if path.exists() else "" for path in (table, lines)]

    return loop(step, model=model, opt=opt, texts=texts)


@idiom()
def standard_error() -> Loop:
    """Dots on the terminal, flushed."""
    model, opt = small_training()

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        sys.stderr.write("." if loss > 1.0 else "!")
        sys.stderr.flush()
        return loss

    return loop(step, model=model, opt=opt)


@idiom()
def warning_of_the_user() -> Loop:
    """`warnings.warn` where a loss is unusual, and a count of them."""
    model, opt = small_training()
    counts = {"warned": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        if loss.item() > 1.0:
            warnings.warn(f"loss is {loss.item():.2f}", UserWarning, stacklevel=1)
            counts["warned"] += 1
        return loss

    return loop(step, model=model, opt=opt, counts=counts)


@idiom(ranks=True)
def smoothed_loss() -> Loop:
    """An exponential average in a variable of the enclosing function."""
    model, opt = small_training()
    smoothed = None

    def step(x, y):
        nonlocal smoothed
        loss = update(F.cross_entropy(model(x), y), opt)
        smoothed = loss.item() if smoothed is None else 0.9 * smoothed + 0.1 * loss.item()
        return smoothed

    return loop(step, model=model, opt=opt, smoothed=lambda: smoothed)


@idiom()
def record_function_and_profiler() -> Loop:
    """Ranges for the profiler around forward and update, and a profiler around every fourth call."""
    model, opt = small_training()
    names, calls = [], {"n": 0}

    def forward_and_update(x, y):
        with torch.profiler.record_function("forward"):
            loss = F.cross_entropy(model(x), y)
        with torch.profiler.record_function("update"):
            return update(loss, opt)

    def step(x, y):
        calls["n"] += 1
        if calls["n"] % 4:
            return forward_and_update(x, y)
        with torch.profiler.profile() as profile:
            loss = forward_and_update(x, y)
        names.append(sorted({one.key for one in profile.key_averages()} & {"forward", "update"}))
        return loss

    return loop(step, model=model, opt=opt, names=names, calls=calls)


@idiom()
def accuracy_meter() -> Loop:
    """Correct predictions counted on the way, as the examples of PyTorch do."""
    model, opt = small_training(nn.ReLU())
    totals = {"correct": 0, "seen": 0}

    def step(x, y):
        logits = model(x)
        loss = update(F.cross_entropy(logits, y), opt)
        totals["correct"] += (logits.argmax(dim=1) == y).sum().item()
        totals["seen"] += y.size(0)
        print(f"accuracy {100.0 * totals['correct'] / totals['seen']:.1f} %, loss {loss:.3f}")

    return loop(step, model=model, opt=opt, totals=totals)
