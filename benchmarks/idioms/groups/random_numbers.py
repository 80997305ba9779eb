"""Random numbers drawn inside of a step, from the generators of Python, numpy and torch."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from benchmarks.idioms.base import CLASSES, FEATURES, HIDDEN, Loop, idiom, loop, mlp, sgd, small_training, update


@idiom(ranks=True)
def mixup() -> Loop:
    """The share is drawn by numpy, the partner by torch."""
    model, opt = small_training()

    def step(x, y):
        share = np.random.beta(0.4, 0.4)
        other = torch.randperm(len(x))
        logits = model(share * x + (1 - share) * x[other])
        loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])
        return update(loss, opt)

    return loop(step, model=model, opt=opt)


@idiom(inductor=True)
def random_erasing() -> Loop:
    """Python draws which columns are set to zero."""
    model, opt = small_training()

    def step(x, y):
        first = random.randrange(FEATURES - 2)
        x = x.clone()
        x[:, first : first + 2] = 0.0
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def random_number_as_a_factor() -> Loop:
    """A scale per call, drawn by Python's own generator."""
    model, opt = small_training()

    def step(x, y):
        return update(F.cross_entropy(model(x * random.uniform(0.8, 1.2)), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def stochastic_depth() -> Loop:
    """A block is left out in some calls: Python decides."""
    blocks, head = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3)), nn.Linear(FEATURES, CLASSES)
    model = nn.ModuleList([*blocks, head])
    opt = sgd(model)

    def step(x, y):
        for block in blocks:
            if random.random() < 0.7:
                x = x + torch.tanh(block(x))
        return update(F.cross_entropy(head(x), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def noise_of_numpy() -> Loop:
    """Noise from a generator of numpy that the user made."""
    model, opt = small_training()
    noise = np.random.default_rng(3)

    def step(x, y):
        x = x + torch.from_numpy(noise.normal(scale=0.1, size=tuple(x.shape))).float()
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, noise=noise)


@idiom()
def generator_of_python() -> Loop:
    """An own `random.Random`: which rows are used, by `sample`."""
    model, opt = small_training()
    draw = random.Random(5)

    def step(x, y):
        rows = torch.tensor(sorted(draw.sample(range(len(x)), 3)))
        return update(F.cross_entropy(model(x[rows]), y[rows]), opt)

    return loop(step, model=model, opt=opt, draw=draw)


@idiom()
def dropout() -> Loop:
    """Masks of torch's own generator."""
    model, opt = small_training(nn.Dropout(0.4))

    def step(x, y):
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def noise_of_torch() -> Loop:
    """`randn_like` on the input and `rand` for label noise."""
    model, opt = small_training()

    def step(x, y):
        flipped = torch.where(torch.rand(y.shape) < 0.2, torch.randint(CLASSES, y.shape), y)
        return update(F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), flipped), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def generator_of_torch() -> Loop:
    """An own `torch.Generator` that the step draws from."""
    model, opt = small_training()
    draw = torch.Generator().manual_seed(11)

    def step(x, y):
        order = torch.randperm(len(x), generator=draw)
        noise = torch.randn(x.shape, generator=draw)
        return update(F.cross_entropy(model(x[order] + 0.1 * noise), y[order]), opt)

    return loop(step, model=model, opt=opt, draw=draw)


@idiom()
def seeded_by_the_step() -> Loop:
    """All generators are seeded by a number that counts, so that a call can be repeated."""
    model, opt = small_training(nn.Dropout(0.3))
    calls = {"n": 0}

    def step(x, y):
        torch.manual_seed(calls["n"])
        random.seed(calls["n"])
        np.random.seed(calls["n"])
        calls["n"] += 1
        return update(F.cross_entropy(model(x * random.random() + np.random.rand()), y), opt)

    return loop(step, model=model, opt=opt, calls=calls)


@idiom()
def shuffled_augmentations() -> Loop:
    """A list of functions, put into another order in every call."""
    model, opt = small_training()
    augmentations = [lambda x: x.flip(1), lambda x: x * 0.9, lambda x: x + 0.1, torch.tanh]

    def step(x, y):
        order = list(augmentations)
        random.shuffle(order)
        for augment in order[:2]:
            x = augment(x)
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def minibatches_inside() -> Loop:
    """One call goes through its batch in random minibatches."""
    model, opt = small_training()

    def step(x, y):
        total = 0.0
        for rows in torch.randperm(len(x)).split(2):
            total += update(F.cross_entropy(model(x[rows]), y[rows]), opt).item() * len(rows)
        return total / len(x)

    return loop(step, model=model, opt=opt)


@idiom(unrolled=True)
def random_length() -> Loop:
    """A sequence is cut to a length that numpy draws: shapes differ from call to call."""
    model = nn.ModuleDict({"rnn": nn.GRU(FEATURES, HIDDEN, batch_first=True), "head": nn.Linear(HIDDEN, CLASSES)})
    opt = sgd(model)

    def step(x, y):
        length = np.random.randint(2, 5)
        _, last = model["rnn"](x[:, :length])
        return update(F.cross_entropy(model["head"](last[-1]), y), opt)

    def arguments(call):
        draw = torch.Generator().manual_seed(call)
        return torch.randn(5, 6, FEATURES, generator=draw), torch.randint(CLASSES, (5,), generator=draw)

    return loop(step, arguments, model=model, opt=opt)


@idiom()
def distributions_that_validate() -> Loop:
    """A Normal that is reparametrized and a Categorical, both with their checks of arguments."""
    model, opt = mlp(), None
    opt = sgd(model)

    def step(x, y):
        logits = model(x)
        noise = Normal(torch.zeros_like(logits), F.softplus(logits) + 0.1, validate_args=True).rsample()
        chosen = Categorical(logits=logits + 0.1 * noise, validate_args=True)
        return update(-chosen.log_prob(y).mean() - 0.01 * chosen.entropy().mean(), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def gumbel_softmax() -> Loop:
    """Hard samples with soft gradients, at a temperature that falls."""
    model, opt = small_training()
    state = {"temperature": 2.0}

    def step(x, y):
        chosen = F.gumbel_softmax(model(x), tau=state["temperature"], hard=True)
        state["temperature"] = max(0.5, state["temperature"] * 0.9)
        return update((chosen - F.one_hot(y, CLASSES)).pow(2).mean(), opt)

    return loop(step, model=model, opt=opt, state=state)


@idiom()
def random_state_put_back() -> Loop:
    """Two forwards with the same dropout, by saving and setting the generator's state."""
    model, opt = small_training(nn.Dropout(0.5))

    def step(x, y):
        state = torch.get_rng_state()
        first = model(x)
        torch.set_rng_state(state)
        second = model(x.flip(1))
        return update(F.cross_entropy(first, y) + F.mse_loss(first, second), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def fork_of_the_generator() -> Loop:
    """A look at other samples that leaves the stream as it was."""
    model, opt = small_training(nn.Dropout(0.5))
    seen = []

    def step(x, y):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            seen.append(F.cross_entropy(model(x), y).item())
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, seen=seen)


@idiom(unrolled=True)
def teacher_forcing() -> Loop:
    """A decoder is fed the truth or its own guess, by a coin per position."""
    cell, head = nn.GRUCell(CLASSES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
    model = nn.ModuleList([cell, head])
    opt = sgd(model)

    def step(targets):
        hidden, token = torch.zeros(len(targets), HIDDEN), torch.zeros(len(targets), CLASSES)
        loss = torch.zeros(())
        for position in range(targets.size(1)):
            hidden = cell(token, hidden)
            logits = head(hidden)
            loss = loss + F.cross_entropy(logits, targets[:, position])
            given = targets[:, position] if random.random() < 0.5 else logits.argmax(1)
            token = F.one_hot(given, CLASSES).float()
        return update(loss, opt)

    def arguments(call):
        return (torch.randint(CLASSES, (4, 3), generator=torch.Generator().manual_seed(call)),)

    return loop(step, arguments, model=model, opt=opt)
