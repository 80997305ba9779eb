"""What a step keeps in containers of Python: lists, deques, dictionaries, sets, counters, heaps, arrays."""

from __future__ import annotations

import copy
import heapq
import random
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.idioms.base import CLASSES, Loop, idiom, loop, small_training, update


@idiom(ranks=True, inductor=True)
def list_of_numbers() -> Loop:
    """`losses.append(loss.item())`: the most common line of all."""
    model, opt = small_training()
    losses = []

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        losses.append(loss.item())

    return loop(step, model=model, opt=opt, losses=losses)


@idiom()
def list_of_tensors() -> Loop:
    """Detached losses, stacked every fifth call."""
    model, opt = small_training()
    losses, means = [], []

    def step(x, y):
        losses.append(update(F.cross_entropy(model(x), y), opt))
        if len(losses) % 5 == 0:
            means.append(torch.stack(losses).mean())
            del losses[:]

    return loop(step, model=model, opt=opt, losses=losses, means=means)


@idiom()
def list_in_the_arguments() -> Loop:
    """The caller hands the list over and reads it afterwards."""
    model, opt = small_training()
    outputs = []

    def step(x, y, into):
        logits = model(x)
        loss = update(F.cross_entropy(logits, y), opt)
        into.append(logits.detach().argmax(1))
        return loss

    def arguments(call):
        draw = torch.Generator().manual_seed(call)
        return torch.randn(5, 6, generator=draw), torch.randint(CLASSES, (5,), generator=draw), outputs

    return loop(step, arguments, model=model, opt=opt, outputs=outputs)


@idiom()
def deque_of_the_last_three() -> Loop:
    """It fills up, then forgets; its mean is what is returned."""
    model, opt = small_training()
    window = deque(maxlen=3)

    def step(x, y):
        window.append(update(F.cross_entropy(model(x), y), opt))
        return sum(window) / len(window)

    return loop(step, model=model, opt=opt, window=window)


@idiom(ranks=True)
def dictionary_of_lists() -> Loop:
    """A history with a list per number, made when first needed."""
    model, opt = small_training()
    history = defaultdict(list)

    def step(x, y):
        logits = model(x)
        loss = update(F.cross_entropy(logits, y), opt)
        history["loss"].append(loss.item())
        history["accuracy"].append((logits.argmax(1) == y).float().mean().item())
        if len(history["loss"]) > 3:
            history["late"].append(len(history["loss"]))

    return loop(step, model=model, opt=opt, history=history)


@idiom()
def running_sums_of_tensors() -> Loop:
    """Sums in a dictionary that stay tensors, and are set to zero again."""
    model, opt = small_training()
    sums = {"loss": torch.zeros(()), "rows": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        sums["loss"] += loss * len(x)
        sums["rows"] += len(x)
        if sums["rows"] == 20:
            sums["loss"].zero_()
            sums["rows"] = 0
        return sums["loss"] / max(sums["rows"], 1)

    return loop(step, model=model, opt=opt, sums=sums)


@dataclass
class Report:
    """A row of a history."""

    number: int
    loss: float
    hits: list = field(default_factory=list)


@idiom()
def list_of_records() -> Loop:
    """A dataclass of numbers and lists per call."""
    model, opt = small_training()
    reports = []

    def step(x, y):
        logits = model(x)
        loss = update(F.cross_entropy(logits, y), opt)
        reports.append(Report(len(reports), loss.item(), (logits.argmax(1) == y).tolist()))
        return reports[-1]

    return loop(step, model=model, opt=opt, reports=reports)


@idiom()
def counter_of_predictions() -> Loop:
    """How often each class was predicted, by `collections.Counter`."""
    model, opt = small_training()
    counts = Counter()

    def step(x, y):
        logits = model(x)
        loss = update(F.cross_entropy(logits, y), opt)
        counts.update(logits.argmax(1).tolist())
        return loss

    return loop(step, model=model, opt=opt, counts=counts)


@idiom()
def set_of_seen_labels() -> Loop:
    """A batch with a class that is new is weighted twice."""
    model, opt = small_training()
    seen = set()

    def step(x, y):
        new = set(y.tolist()) - seen
        seen.update(new)
        loss = F.cross_entropy(model(x), y)
        return update(2.0 * loss if new else loss, opt)

    return loop(step, model=model, opt=opt, seen=seen)


@idiom()
def ring_of_numpy() -> Loop:
    """Losses in an array of numpy, written at a position that turns round."""
    model, opt = small_training()
    ring, position = np.zeros(4, dtype=np.float32), {"at": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        ring[position["at"] % 4] = loss.item()
        position["at"] += 1
        return float(ring.mean())

    return loop(step, model=model, opt=opt, ring=ring, position=position)


@idiom()
def best_state_kept() -> Loop:
    """A copy of the parameters whenever the loss is the lowest so far."""
    model, opt = small_training()
    best = {"loss": float("inf"), "state": None, "times": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        if loss.item() < best["loss"]:
            best.update(loss=loss.item(), state=copy.deepcopy(model.state_dict()), times=best["times"] + 1)
        return loss

    return loop(step, model=model, opt=opt, best=best)


@idiom()
def replay_of_old_batches() -> Loop:
    """Each batch is kept, and one of those kept is drawn and trained on as well."""
    model, opt = small_training()
    memory = []

    def step(x, y):
        old_x, old_y = random.choice(memory) if memory else (x, y)
        memory.append((x, y))
        if len(memory) > 4:
            memory.pop(0)
        loss = F.cross_entropy(model(torch.cat([x, old_x])), torch.cat([y, old_y]))
        return update(loss, opt)

    return loop(step, model=model, opt=opt, memory=memory)


@idiom()
def heap_of_hard_examples() -> Loop:
    """The four largest losses of single rows, in a heap."""
    model, opt = small_training()
    hardest, calls = [], {"n": 0}

    def step(x, y):
        losses = F.cross_entropy(model(x), y, reduction="none")
        update(losses.mean(), opt)
        for row, loss in enumerate(losses.tolist()):
            heapq.heappush(hardest, (loss, calls["n"], row))
            if len(hardest) > 4:
                heapq.heappop(hardest)
        calls["n"] += 1

    return loop(step, model=model, opt=opt, hardest=hardest, calls=calls)


@idiom()
def confusion_matrix() -> Loop:
    """A matrix of counts, written in place by label and prediction."""
    model, opt = small_training()
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)

    def step(x, y):
        logits = model(x)
        loss = update(F.cross_entropy(logits, y), opt)
        matrix.index_put_((y, logits.argmax(1)), torch.ones_like(y), accumulate=True)
        return loss

    return loop(step, model=model, opt=opt, matrix=matrix)


@idiom()
def predictions_by_number() -> Loop:
    """A dictionary whose keys are the numbers of the calls; the oldest is dropped."""
    model, opt = small_training()
    kept, calls = OrderedDict(), {"n": 0}

    def step(x, y):
        logits = model(x)
        loss = update(F.cross_entropy(logits, y), opt)
        kept[calls["n"]] = logits.detach()
        if len(kept) > 3:
            kept.popitem(last=False)
        calls["n"] += 1
        return loss

    return loop(step, model=model, opt=opt, kept=kept, calls=calls)


@idiom()
def layered_settings() -> Loop:
    """Settings in a ChainMap: the step writes an override of its own from call 5 on."""
    model, opt = small_training()
    settings = ChainMap({}, {"smoothing": 0.0, "calls": 0})

    def step(x, y):
        settings["calls"] += 1
        if settings["calls"] == 5:
            settings["smoothing"] = 0.1
        return update(F.cross_entropy(model(x), y, label_smoothing=settings["smoothing"]), opt)

    return loop(step, model=model, opt=opt, settings=lambda: dict(settings))


Result = namedtuple("Result", "loss accuracy logits")


@idiom()
def named_tuple_returned() -> Loop:
    """Tensors and numbers in one result."""
    model, opt = small_training()
    results = []

    def step(x, y):
        logits = model(x)
        loss = update(F.cross_entropy(logits, y), opt)
        result = Result(loss, (logits.argmax(1) == y).float().mean().item(), logits.detach())
        results.append(result)
        return result

    return loop(step, model=model, opt=opt, results=results)


@idiom()
def best_and_worst_as_tensors() -> Loop:
    """Losses stay tensors, and Python's own `<`, `max` and `sorted` compare them."""
    model, opt = small_training()
    best, window = {"loss": None, "times": 0}, deque(maxlen=4)

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        if best["loss"] is None or loss < best["loss"]:
            best.update(loss=loss, times=best["times"] + 1)
        window.append(loss)
        return max(window), sorted(window)[len(window) // 2]

    return loop(step, model=model, opt=opt, best=best, window=window)
