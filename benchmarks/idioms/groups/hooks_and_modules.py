"""Modules that change or are watched while they train: hooks, modes, attributes, freezing, copies, queues, buffers."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.idioms.base import (
    CLASSES,
    FEATURES,
    HIDDEN,
    Loop,
    features,
    idiom,
    loop,
    mlp,
    sgd,
    small_training,
    update,
)


@idiom()
def activations_kept_by_a_hook() -> Loop:
    """A forward hook puts activations into a dictionary, and the loss uses them."""
    model, opt = small_training()
    kept = {}
    model[0].register_forward_hook(lambda module, args, output: kept.update(hidden=output))

    def step(x, y):
        loss = F.cross_entropy(model(x), y) + 0.1 * kept["hidden"].pow(2).mean()
        update(loss, opt)
        kept["hidden"] = kept["hidden"].detach()
        return loss.detach()

    return loop(step, model=model, opt=opt, kept=kept)


@idiom()
def hook_that_reads_a_number() -> Loop:
    """A forward hook notes the mean of what a layer gives."""
    model, opt = small_training()
    means = []
    model[0].register_forward_hook(lambda module, args, output: means.append(float(output.mean())))

    def step(x, y):
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, means=means)


@idiom()
def hook_that_changes_the_input() -> Loop:
    """A pre-hook scales by a number that it counts up itself; a backward hook clips and counts."""
    model, opt = small_training()
    counts = {"forward": 0, "backward": 0}

    def before(module, args):
        counts["forward"] += 1
        return (args[0] / counts["forward"],)

    def behind(module, grad_input, grad_output):
        counts["backward"] += 1
        return tuple(grad.clamp(-0.1, 0.1) for grad in grad_input)

    model[2].register_forward_pre_hook(before)
    model[2].register_full_backward_hook(behind)

    def step(x, y):
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, counts=counts)


@idiom()
def hooks_on_gradients() -> Loop:
    """Hooks on parameters: one scales the gradient, one notes its norm after accumulation."""
    model, opt = small_training()
    norms = []
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    model[2].weight.register_post_accumulate_grad_hook(lambda param: norms.append(param.grad.norm().item()))

    def step(x, y):
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, norms=norms)


@idiom()
def evaluation_between_updates() -> Loop:
    """`eval()`, a forward without gradients, and `train()` again, with batch norm and dropout."""
    model, opt = small_training(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.3))
    accuracies = []

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        model.eval()
        with torch.no_grad():
            accuracies.append((model(x).argmax(1) == y).float().mean().item())
        model.train()
        return loss

    return loop(step, model=model, opt=opt, accuracies=accuracies)


@idiom()
def mode_set_by_the_call() -> Loop:
    """`model.train(...)` by a counter: every third call runs, and updates, in evaluation mode."""
    model, opt = small_training(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.3))
    calls = {"n": 0}

    def step(x, y):
        model.train(calls["n"] % 3 != 2)
        calls["n"] += 1
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, calls=calls)


class WithTemperature(nn.Module):
    """A plain number as an attribute."""

    def __init__(self):
        super().__init__()
        self.net, self.temperature, self.calls = mlp(), 1.0, 0

    def forward(self, x):
        self.calls += 1
        return self.net(x) / self.temperature


@idiom(ranks=True)
def attribute_set_behind_the_forward() -> Loop:
    """The temperature is lowered between forward and backward: this call must not see it, the next must."""
    model = WithTemperature()
    opt = sgd(model)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        model.temperature *= 0.9
        return update(loss, opt)

    return loop(step, model=model, opt=opt, seen=lambda: (model.temperature, model.calls))


@idiom()
def layers_frozen_later() -> Loop:
    """After four calls the first layer is frozen, after seven it trains again."""
    model, opt = small_training()
    calls = {"n": 0}

    def step(x, y):
        if calls["n"] in (4, 7):
            model[0].requires_grad_(calls["n"] == 7)
        calls["n"] += 1
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, calls=calls)


@idiom()
def weights_made_anew() -> Loop:
    """`model.apply` draws the head again at call 3, and scales all weights at call 6."""
    model, opt = small_training()
    calls = {"n": 0}

    def shrink(module):
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(0.9)

    def step(x, y):
        calls["n"] += 1
        if calls["n"] == 3:
            nn.init.xavier_uniform_(model[2].weight)
            nn.init.zeros_(model[2].bias)
        if calls["n"] == 6:
            model.apply(shrink)
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, calls=calls)


@idiom()
def snapshot_every_third_call() -> Loop:
    """`copy.deepcopy(model)` as a teacher for the calls that follow."""
    model, opt = small_training()
    holder = {"teacher": copy.deepcopy(model), "calls": 0}

    def step(x, y):
        with torch.no_grad():
            target = holder["teacher"](x).softmax(1)
        loss = update(F.cross_entropy(model(x), y) + F.cross_entropy(model(x), target), opt)
        holder["calls"] += 1
        if holder["calls"] % 3 == 0:
            holder["teacher"] = copy.deepcopy(model)
        return loss

    return loop(step, model=model, opt=opt, holder=holder)


@idiom()
def checkpoint_saved_inside() -> Loop:
    """`torch.save` of model and optimizer every third call; call 8 goes back to what was saved."""
    model, opt = small_training()
    holder = {"calls": 0, "saved": b""}

    def step(x, y):
        holder["calls"] += 1
        if holder["calls"] == 8:
            state = torch.load(io.BytesIO(holder["saved"]), weights_only=True)
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
        loss = update(F.cross_entropy(model(x), y), opt)
        if holder["calls"] % 3 == 0:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
            holder["saved"] = file.getvalue()
        return loss

    def saved():
        return torch.load(io.BytesIO(holder["saved"]), weights_only=True) if holder["saved"] else None

    return loop(step, model=model, opt=opt, saved=saved, calls=lambda: holder["calls"])


@idiom()
def network_that_grows() -> Loop:
    """A block is added at call 4, to the model and to the optimizer."""
    blocks, head = nn.ModuleList([nn.Linear(FEATURES, FEATURES)]), nn.Linear(FEATURES, CLASSES)
    model, calls = nn.ModuleList([blocks, head]), {"n": 0}
    opt = sgd(model)

    def step(x, y):
        if calls["n"] == 4:
            blocks.append(nn.Linear(FEATURES, FEATURES))
            opt.add_param_group({"params": list(blocks[-1].parameters())})
        calls["n"] += 1
        for block in blocks:
            x = x + torch.tanh(block(x))
        return update(F.cross_entropy(head(x), y), opt)

    return loop(step, model=model, opt=opt, calls=calls)


@idiom()
def parametrized_weights() -> Loop:
    """Spectral norm on one layer, weight norm on the other: buffers move in the forward."""
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(FEATURES, HIDDEN)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(HIDDEN, CLASSES)),
    )
    opt = sgd(model)

    def step(x, y):
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def batch_norm_with_a_moving_momentum() -> Loop:
    """PointNet's way: the momentum of batch norm falls, and its counter is read."""
    norm = nn.BatchNorm1d(HIDDEN)
    model, opt = small_training(norm)
    counts = []

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        norm.momentum = max(norm.momentum * 0.8, 0.01)
        counts.append(int(norm.num_batches_tracked))
        return loss

    return loop(step, model=model, opt=opt, counts=counts, momentum=lambda: norm.momentum)


class Queue(nn.Module):
    """MoCo: two encoders, a queue of keys, and a pointer in a buffer."""

    def __init__(self):
        super().__init__()
        self.online, self.momentum = mlp(), mlp().requires_grad_(False)
        self.momentum.load_state_dict(self.online.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(CLASSES, 8), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        query = F.normalize(self.online(x), dim=1)
        with torch.no_grad():
            for kept, param in zip(self.momentum.parameters(), self.online.parameters(), strict=True):
                kept.data = kept.data * 0.9 + param.data * 0.1
            key = F.normalize(self.momentum(x + 0.1), dim=1)
        positive, negative = (query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()
        self.enqueue(key)
        return torch.cat([positive, negative], dim=1) / 0.2

    @torch.no_grad()
    def enqueue(self, keys):
        at = int(self.pointer)
        self.queue[:, at : at + len(keys)] = keys.T
        self.pointer[0] = (at + len(keys)) % self.queue.size(1)


@idiom()
def queue_with_a_pointer() -> Loop:
    """MoCo: the pointer is a buffer that Python reads to write a slice."""
    model = Queue()
    opt = sgd(model.online)

    def step(x):
        logits = model(x)
        return update(F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)), opt)

    return loop(step, lambda call: (features(call)[0][:4],), model=model, opt=opt)


@idiom(inductor=True)
def memory_bank() -> Loop:
    """Features by the number of the row, kept from epoch to epoch in a plain tensor."""
    model, opt = small_training()
    bank = torch.zeros(10, CLASSES)

    def step(x, y, rows):
        z = model(x)
        loss = F.cross_entropy(z, y) + F.mse_loss(z, bank[rows])
        update(loss, opt)
        bank[rows] = 0.5 * bank[rows] + 0.5 * z.detach()
        return loss.detach()

    def arguments(call):
        draw = torch.Generator().manual_seed(call)
        rows = torch.randperm(10, generator=draw)[:5]
        return torch.randn(5, FEATURES, generator=draw), torch.randint(CLASSES, (5,), generator=draw), rows

    return loop(step, arguments, model=model, opt=opt, bank=bank)


class Branching(nn.Module):
    """A forward that asks its own counter, a list of children and a value."""

    def __init__(self):
        super().__init__()
        self.layers, self.head, self.calls = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3)), None, 0
        self.head = nn.Linear(FEATURES, CLASSES)
        self.used = []

    def forward(self, x):
        self.calls += 1
        depth = 1 + self.calls % 3
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x))
            if x.abs().max() > 0.9:
                break
        self.used.append(depth)
        return self.head(x)


@idiom()
def module_that_branches() -> Loop:
    """Depth by a counter, an early exit by a value, and a list that grows, all inside of `forward`."""
    model = Branching()
    opt = sgd(model)

    def step(x, y):
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, used=model.used, calls=lambda: model.calls)


@idiom()
def module_exchanged() -> Loop:
    """Another activation from call 5 on: a child of the model is replaced."""
    model, opt = small_training()
    calls = {"n": 0}

    def step(x, y):
        if calls["n"] == 5:
            model[1] = nn.ReLU()
        calls["n"] += 1
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, calls=calls)
