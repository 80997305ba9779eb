"""Values of tensors that Python reads in the middle of a step, and what it decides by them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.idioms.base import (
    CLASSES,
    FEATURES,
    Loop,
    batch,
    generator,
    idiom,
    loop,
    mlp,
    sgd,
    small_training,
    update,
)

try:
    from scipy.optimize import linear_sum_assignment
except ImportError:

    def linear_sum_assignment(costs):
        """The cheapest assignment of a small square matrix, by trying them all."""
        rows = range(len(costs))
        best = min(itertools.permutations(rows), key=lambda columns: sum(costs[r, columns[r]] for r in rows))
        return np.array(rows), np.array(best)


def batch_with_a_bad_one(call):
    """Call 4 has infinities in it."""
    x, y = batch(call)
    return (x * math.inf if call == 4 else x), y


@idiom(ranks=True)
def number_returned() -> Loop:
    """`return float(loss)`."""
    model, opt = small_training()

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return float(loss)

    return loop(step, model=model, opt=opt)


@idiom(inductor=True)
def return_if_not_finite() -> Loop:
    """A batch whose loss is no number is skipped, as detection references do."""
    model, opt = small_training()
    skipped = []

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        if not math.isfinite(loss):
            skipped.append(float(loss))
            return None
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    return loop(step, batch_with_a_bad_one, model=model, opt=opt, skipped=skipped)


@idiom()
def guard_between_backward_and_update() -> Loop:
    """No update where a gradient is not finite."""
    model, opt = small_training()
    counts = {"skipped": 0}

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if all(torch.isfinite(param.grad).all() for param in model.parameters()):
            opt.step()
        else:
            counts["skipped"] += 1
        return loss.detach()

    return loop(step, batch_with_a_bad_one, model=model, opt=opt, counts=counts)


@idiom()
def branch_on_the_loss() -> Loop:
    """A large loss is made smaller before the backward."""
    model, opt = small_training()
    large = []

    def step(x, y):
        loss = F.cross_entropy(3 * model(x), y)
        if loss.item() > 1.5:
            large.append(loss.item())
            loss = loss * 0.5
        return update(loss, opt)

    return loop(step, model=model, opt=opt, large=large)


@idiom()
def update_skipped_when_the_norm_is_large() -> Loop:
    """The norm that clipping returns decides."""
    model, opt = small_training()
    norms = []

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(norm.item())
        if norm < 1.0:
            opt.step()
        return loss.detach()

    return loop(step, model=model, opt=opt, norms=norms)


@idiom()
def metric_by_numpy_before_the_backward() -> Loop:
    """An accuracy that numpy computes between forward and backward."""
    model, opt = small_training()
    accuracies = []

    def step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        predicted = logits.detach().cpu().numpy().argmax(axis=1)
        accuracies.append(float((predicted == y.numpy()).mean()))
        return update(loss, opt)

    return loop(step, model=model, opt=opt, accuracies=accuracies)


@idiom()
def tolist_before_the_backward() -> Loop:
    """Predictions as a list of Python, joined to text."""
    model, opt = small_training()
    texts = []

    def step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        texts.append("".join("abc"[one] for one in logits.argmax(1).tolist()))
        return update(loss, opt)

    return loop(step, model=model, opt=opt, texts=texts)


@idiom()
def hungarian_matching() -> Loop:
    """scipy assigns queries to targets, and the loss is of the pairs, as in DETR."""
    model, opt = small_training()

    def step(x, targets):
        boxes = model(x)
        costs = torch.cdist(boxes, targets, p=1)
        rows, columns = linear_sum_assignment(costs.detach().numpy())
        loss = F.l1_loss(boxes[torch.as_tensor(rows)], targets[torch.as_tensor(columns)])
        update(loss, opt)
        return loss.item(), columns.tolist()

    def arguments(call):
        return batch(call, 4)[0], torch.rand(4, CLASSES, generator=generator(call))

    return loop(step, arguments, model=model, opt=opt)


@idiom()
def return_early_without_positives() -> Loop:
    """Nothing to learn from where no row is of class 0."""
    model, opt = small_training()
    empty = []

    def step(x, y):
        positive = y == 0
        if not positive.any():
            empty.append(y.tolist())
            return None
        return update(F.cross_entropy(model(x), y, weight=torch.tensor([2.0, 1.0, 1.0])), opt)

    def arguments(call):
        x, y = batch(call)
        return x, y.clamp(min=1) if call % 4 == 2 else y

    return loop(step, arguments, model=model, opt=opt, empty=empty)


@idiom(ranks=True)
def try_around_the_forward() -> Loop:
    """A batch whose columns do not fit is caught, counted and left out."""
    model, opt = small_training()
    counts = {"bad": 0}

    def step(x, y):
        try:
            logits = model(x)
        except RuntimeError:
            counts["bad"] += 1
            return None
        return update(F.cross_entropy(logits, y), opt)

    def arguments(call):
        x, y = batch(call)
        return (x[:, :-1] if call in (3, 6) else x), y

    return loop(step, arguments, model=model, opt=opt, counts=counts)


@idiom(raises=ValueError)
def error_of_the_user() -> Loop:
    """Call 5 raises an error of the user's own, between backward and update; the caller goes on."""
    model, opt = small_training()
    calls = {"n": 0}

    def step(x, y):
        calls["n"] += 1
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if calls["n"] == 6:
            raise ValueError("the fifth batch is broken")
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(step, model=model, opt=opt, calls=calls)


@idiom(raises=AssertionError)
def assert_on_a_value() -> Loop:
    """An assertion on the loss, which one batch breaks."""
    model, opt = small_training()

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        assert torch.isfinite(loss), f"loss is {loss.item()}"
        return update(loss, opt)

    return loop(step, batch_with_a_bad_one, model=model, opt=opt)


@idiom()
def backtracking_line_search() -> Loop:
    """Halves the step until the loss falls: a loop whose length is data."""
    model, trials = mlp(), []

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rate, count = 8.0, 0
        with torch.no_grad():
            while True:
                for param, grad in zip(model.parameters(), grads, strict=True):
                    param.sub_(rate * grad)
                if F.cross_entropy(model(x), y) < loss or count == 6:
                    break
                for param, grad in zip(model.parameters(), grads, strict=True):
                    param.add_(rate * grad)
                rate, count = rate / 2, count + 1
        trials.append(count)
        return loss.item()

    return loop(step, model=model, trials=trials)


@idiom()
def early_stopping() -> Loop:
    """Patience runs out after three calls without a lower loss; then only the loss is computed."""
    model, opt = small_training()
    state = {"best": math.inf, "patience": 3, "stopped": False}

    def step(x, y):
        if state["stopped"]:
            with torch.no_grad():
                return F.cross_entropy(model(x), y)
        loss = update(F.cross_entropy(model(x), y), opt)
        if loss.item() < state["best"] - 1e-3:
            state.update(best=loss.item(), patience=3)
        else:
            state["patience"] -= 1
            state["stopped"] = state["patience"] == 0
        return loss

    return loop(step, model=model, opt=opt, state=state)


@idiom()
def weights_of_losses_by_their_size() -> Loop:
    """Two losses, weighted by plain numbers read off both."""
    model, opt = small_training()

    def step(x, y):
        logits = model(x)
        first, second = F.cross_entropy(logits, y), logits.pow(2).mean()
        a, b = first.item(), second.item()
        return update(first * (b / (a + b)) + second * (a / (a + b)), opt), a, b

    return loop(step, model=model, opt=opt)


@idiom()
def rate_cut_when_the_loss_rises() -> Loop:
    """A rate that follows the losses, written into the optimizer before its step."""
    model, opt = small_training()
    previous = {"loss": math.inf}

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.param_groups[0]["lr"] *= 0.8 if loss.item() > previous["loss"] else 1.05
        previous["loss"] = loss.item()
        opt.step()
        opt.zero_grad()

    return loop(step, model=model, opt=opt, previous=previous)


@idiom()
def expert_chosen_by_value() -> Loop:
    """The whole batch goes to the expert that the gate prefers."""
    gate, experts = nn.Linear(FEATURES, 2), nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))
    model = nn.ModuleList([gate, experts])
    opt = sgd(model)
    chosen = []

    def step(x, y):
        shares = gate(x).softmax(1).mean(0)
        best = int(shares.argmax())
        chosen.append(best)
        return update(F.cross_entropy(experts[best](x) * shares[best], y), opt)

    return loop(step, model=model, opt=opt, chosen=chosen)


@idiom()
def hardest_rows_only() -> Loop:
    """Online hard example mining: how many rows count depends on their losses."""
    model, opt = small_training()
    counts = []

    def step(x, y):
        losses = F.cross_entropy(model(x), y, reduction="none")
        kept = max(1, int((losses > 1.0).sum()))
        counts.append(kept)
        return update(losses.topk(kept).values.mean(), opt)

    return loop(step, model=model, opt=opt, counts=counts)


@idiom(ranks=True)
def scale_halved_every_second_call() -> Loop:
    """A branch on a counter of Python, with a write of its own in it."""
    model, opt = small_training()
    count, scale = {"n": 0}, {"v": 1.0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x) * scale["v"], y), opt)
        count["n"] += 1
        if count["n"] % 2 == 0:
            scale["v"] *= 0.5
        return loss

    return loop(step, model=model, opt=opt, count=count, scale=scale)


@idiom()
def comparison_with_the_last_call() -> Loop:
    """`torch.equal` and `torch.allclose` between predictions of this call and of the last."""
    model, opt = small_training()
    last, same = {"classes": None}, []

    def step(x, y):
        logits = model(x)
        classes = logits.argmax(1)
        if last["classes"] is not None:
            same.append((torch.equal(classes, last["classes"]), torch.allclose(logits, logits.round(), atol=0.3)))
        last["classes"] = classes
        return update(F.cross_entropy(logits, y), opt)

    return loop(step, model=model, opt=opt, last=last, same=same)
