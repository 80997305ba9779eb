"""Whole recipes: reinforcement learning, adversarial and self-supervised training, diffusion."""

from __future__ import annotations

import copy
import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from benchmarks.idioms.base import (
    CLASSES,
    FEATURES,
    HIDDEN,
    Loop,
    batch,
    features,
    generator,
    idiom,
    loop,
    mlp,
    sgd,
    small_training,
    update,
)


def generator_and_critic(rate=0.05):
    """A generator from noise to features, a critic, and their optimizers."""
    make = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))
    judge = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, 1))
    opts = (torch.optim.Adam(net.parameters(), lr=rate, betas=(0.5, 0.999)) for net in (make, judge))
    return make, judge, *opts


@idiom()
def returns_computed_backwards() -> Loop:
    """REINFORCE: rewards are numbers of Python, summed from the last to the first."""
    policy, opt = small_training()
    history = []

    def step(states, targets):
        log_probs, rewards = [], []
        for state, target in zip(states, targets, strict=True):
            distribution = Categorical(logits=policy(state))
            action = distribution.sample()
            log_probs.append(distribution.log_prob(action))
            rewards.append(1.0 if action.item() == target.item() else -0.1)
        returns, running = deque(), 0.0
        for reward in reversed(rewards):
            running = reward + 0.9 * running
            returns.appendleft(running)
        returns = torch.tensor(list(returns))
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = torch.stack([-log_prob * value for log_prob, value in zip(log_probs, returns, strict=True)]).sum()
        history.append(sum(rewards))
        return update(loss, opt)

    return loop(step, model=policy, opt=opt, history=history)


class ActorCritic(nn.Module):
    """One body, two heads."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
        self.actor, self.critic = nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def advantages_by_numpy(rewards, values, discount=0.9, smoothing=0.95):
    """Generalized advantages, from the last to the first."""
    advantages, running = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        running = rewards[t] + discount * following - values[t] + discount * smoothing * running
        advantages[t] = running
    return advantages


@idiom()
def ppo_update() -> Loop:
    """A rollout, advantages by numpy, epochs of shuffled minibatches, and a stop when the policies are far apart."""
    model = ActorCritic()
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    stops = []

    def epoch(states, actions, old, advantages, returns):
        order = np.arange(len(states))
        np.random.shuffle(order)
        for rows in np.array_split(order, 2):
            logits, values = model(states[rows])
            policy = Categorical(logits=logits)
            change = policy.log_prob(actions[rows]) - old[rows]
            ratio, advantage = change.exp(), advantages[rows]
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -clipped.mean() + 0.5 * F.mse_loss(values, returns[rows]) - 0.01 * policy.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        return (-change).mean().item(), loss.item()

    def step(states, targets):
        with torch.no_grad():
            logits, values = model(states)
            policy = Categorical(logits=logits)
            actions = policy.sample()
            old = policy.log_prob(actions)
        rewards = (actions == targets).float().numpy()
        advantages = torch.from_numpy(advantages_by_numpy(rewards, values.numpy()))
        for number in range(3):
            divergence, loss = epoch(states, actions, old, advantages, advantages + values)
            if divergence > 0.01:
                stops.append(number)
                break
        return loss, float(rewards.sum())

    return loop(step, lambda call: batch(call, 6), model=model, opt=opt, stops=stops)


@idiom()
def deep_q_learning() -> Loop:
    """Epsilon-greedy by Python, a replay memory of arrays, a target network copied every third call."""
    online, opt = small_training()
    target, memory, state = copy.deepcopy(online), deque(maxlen=6), {"calls": 0, "epsilon": 0.9}

    def step(observation, following):
        if random.random() < state["epsilon"]:
            action = random.randrange(CLASSES)
        else:
            with torch.no_grad():
                action = online(observation).argmax().item()
        memory.append((observation.numpy(), action, float(action == 1), following.numpy()))
        state["epsilon"] *= 0.8
        state["calls"] += 1
        if len(memory) < 3:
            return None
        old, actions, rewards, new = (np.stack(one) for one in zip(*random.sample(list(memory), 3), strict=True))
        values = online(torch.from_numpy(old)).gather(1, torch.from_numpy(actions)[:, None]).squeeze(1)
        with torch.no_grad():
            best = torch.tensor(rewards, dtype=torch.float32) + 0.9 * target(torch.from_numpy(new)).max(1).values
        loss = update(F.smooth_l1_loss(values, best), opt)
        if state["calls"] % 3 == 0:
            target.load_state_dict(online.state_dict())
        return loss

    def arguments(call):
        return tuple(features(call)[0][:2].unbind())

    return loop(
        step, arguments, model=online, opt=opt, target=target, state=state, actions=lambda: [m[1] for m in memory]
    )


@idiom(ranks=True, added_on_ranks=True)
def generative_adversarial_network() -> Loop:
    """Two optimizers: the critic on real and on detached fakes, then the generator."""
    make, judge, make_opt, judge_opt = generator_and_critic()

    def step(real, noise):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = make(noise)
        judge_opt.zero_grad()
        of_real = F.binary_cross_entropy_with_logits(judge(real), ones)
        of_fake = F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        (of_real + of_fake).backward()
        judge_opt.step()
        make_opt.zero_grad()
        of_make = F.binary_cross_entropy_with_logits(judge(fake), ones)
        of_make.backward()
        make_opt.step()
        return of_real.detach(), of_fake.detach(), of_make.detach()

    def arguments(call):
        return *features(call), torch.randn(5, 4, generator=generator(call))

    return loop(step, arguments, make=make, judge=judge, make_opt=make_opt, judge_opt=judge_opt)


def frozen_by_turns(meter):
    """Each network is frozen while the other one trains, and the critic until the next call, too."""
    make, judge, make_opt, judge_opt = generator_and_critic()

    def step(real, noise):
        fake = make(noise)
        judge.requires_grad_(True)
        judged = update(F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean(), judge_opt)
        for param in judge.parameters():
            param.requires_grad = False
        made = update(F.softplus(-judge(fake)).mean(), make_opt)
        if meter is not None:
            meter.append((judged.item(), made.item()))
        return judged, made

    def arguments(call):
        return *features(call), torch.randn(5, 4, generator=generator(call))

    objects = {} if meter is None else {"meter": meter}
    return loop(step, arguments, make=make, judge=judge, make_opt=make_opt, judge_opt=judge_opt, **objects)


@idiom()
def critic_frozen_by_turns() -> Loop:
    """pix2pix: `set_requires_grad(critic, False)` while the generator trains."""
    return frozen_by_turns(None)


@idiom()
def critic_frozen_by_turns_with_a_meter() -> Loop:
    """The same, with both losses read for a meter."""
    return frozen_by_turns([])


@idiom()
def wasserstein_critic() -> Loop:
    """The critic in every call with `p.data.clamp_`, the generator in every third, losses as numbers."""
    make, judge, make_opt, judge_opt = generator_and_critic()
    state, losses = {"calls": 0}, []

    def step(real):
        fake = make(torch.randn(len(real), 4)).detach()
        distance = judge(fake).mean() - judge(real).mean()
        update(distance, judge_opt)
        for param in judge.parameters():
            param.data.clamp_(-0.1, 0.1)
        state["calls"] += 1
        if state["calls"] % 3 == 0:
            losses.append(update(-judge(make(torch.randn(len(real), 4))).mean(), make_opt).item())
        return distance.item()

    objects = {"make": make, "judge": judge, "make_opt": make_opt, "judge_opt": judge_opt}
    return loop(step, features, **objects, state=state, losses=losses)


@idiom()
def pool_of_images() -> Loop:
    """CycleGAN: the critic sees old fakes by a coin of Python."""
    make, judge, make_opt, judge_opt = generator_and_critic()
    pool = []

    def from_pool(fakes):
        chosen = []
        for fake in fakes:
            if len(pool) < 6:
                pool.append(fake)
                chosen.append(fake)
            elif random.random() > 0.5:
                at = random.randrange(len(pool))
                chosen.append(pool[at])
                pool[at] = fake
            else:
                chosen.append(fake)
        return torch.stack(chosen)

    def step(real):
        fake = make(torch.randn(len(real), 4))
        made = update(-judge(fake).mean(), make_opt)
        judged = update(
            (judge(from_pool(fake.detach())) + 1).pow(2).mean() + (judge(real) - 1).pow(2).mean(), judge_opt
        )
        return made, judged

    objects = {"make": make, "judge": judge, "make_opt": make_opt, "judge_opt": judge_opt}
    return loop(step, features, **objects, pool=pool)


@idiom()
def diffusion() -> Loop:
    """A noise level per row, and an average of the loss per level in an array of numpy."""
    model = nn.Sequential(nn.Linear(FEATURES + 1, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, FEATURES))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept, per_level = torch.linspace(0.99, 0.01, 4), np.zeros(4)

    def step(x):
        level, noise = torch.randint(0, 4, (len(x),)), torch.randn_like(x)
        share = kept[level].unsqueeze(1)
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        losses = F.mse_loss(model(torch.cat([noisy, share], 1)), noise, reduction="none").mean(1)
        np.add.at(per_level, level.numpy(), losses.detach().numpy())
        return update(losses.mean(), opt)

    return loop(step, features, model=model, opt=opt, per_level=per_level)


@idiom()
def variational_autoencoder() -> Loop:
    """Reparametrized samples, a sum of two losses, and the parts summed as numbers."""
    encode, decode = nn.Linear(FEATURES, 4), nn.Linear(2, FEATURES)
    model, sums = nn.ModuleList([encode, decode]), {"reconstruction": 0.0, "divergence": 0.0}
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x):
        mean, log_variance = encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        reconstruction = F.mse_loss(decode(z), x, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
        update(reconstruction + divergence, opt)
        sums["reconstruction"] += reconstruction.item()
        sums["divergence"] += divergence.item()

    return loop(step, features, model=model, opt=opt, sums=sums)


@idiom()
def contrastive_pairs() -> Loop:
    """SimCLR: two noisy views, and a temperature that is a parameter, clamped after the update."""
    model, temperature = mlp(), nn.Parameter(torch.tensor(0.0))
    opt = torch.optim.Adam([*model.parameters(), temperature], lr=0.05)

    def step(x):
        views = [F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2)]
        logits = views[0] @ views[1].T * temperature.exp()
        labels = torch.arange(len(x))
        loss = update((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2, opt)
        temperature.data.clamp_(-0.1, 0.1)
        return loss, (logits.argmax(1) == labels).sum().item()

    return loop(step, features, model=model, opt=opt, temperature=lambda: temperature)


@idiom(inductor=True)
def teacher_by_averages() -> Loop:
    """BYOL and DINO: a teacher by moving averages, centred by a buffer, under a schedule of its own."""
    student, opt = small_training()
    teacher, state = copy.deepcopy(student).requires_grad_(False), {"calls": 0, "center": torch.zeros(1, CLASSES)}

    def step(x):
        decay = 0.9 + 0.1 * state["calls"] / 10
        state["calls"] += 1
        with torch.no_grad():
            raw = teacher(x.flip(1))
            target = ((raw - state["center"]) / 0.5).softmax(1)
            state["center"] = 0.9 * state["center"] + 0.1 * raw.mean(0, keepdim=True)
        loss = update(-(target * student(x).log_softmax(1)).sum(1).mean(), opt)
        with torch.no_grad():
            for kept, param in zip(teacher.parameters(), student.parameters(), strict=True):
                kept.data.mul_(decay).add_((1 - decay) * param.detach().data)
        return loss

    return loop(step, features, student=student, opt=opt, teacher=teacher, state=state)


@idiom()
def expectation_maximization() -> Loop:
    """Assignments by `kmeans` in Python between updates: centres move until they stand still."""
    model = nn.Linear(FEATURES, 2)
    opt = sgd(model)
    centres, rounds = torch.randn(2, 2), []

    def step(x):
        z = model(x)
        points, count = z.detach(), 0
        while count < 5:
            nearest = torch.cdist(points, centres).argmin(1)
            new = torch.stack([points[nearest == k].mean(0) if (nearest == k).any() else centres[k] for k in range(2)])
            count += 1
            if torch.equal(new, centres):
                break
            centres.copy_(new)
        rounds.append(count)
        return update(F.mse_loss(z, centres[nearest]), opt)

    return loop(step, features, model=model, opt=opt, centres=centres, rounds=rounds)


@idiom()
def evolution_strategies() -> Loop:
    """No gradient at all: parameters as one vector, moved by samples of noise and the ranks of their scores."""
    model = mlp().requires_grad_(False)
    best = {"score": -float("inf")}

    def step(x, y):
        centre = nn.utils.parameters_to_vector(model.parameters())
        noise, scores = torch.randn(4, len(centre)), []
        for one in noise:
            nn.utils.vector_to_parameters(centre + 0.1 * one, model.parameters())
            scores.append(-F.cross_entropy(model(x), y).item())
        order = np.argsort(np.argsort(scores)) / 3 - 0.5
        move = (torch.tensor(order, dtype=torch.float32)[:, None] * noise).mean(0)
        nn.utils.vector_to_parameters(centre + 0.5 * move, model.parameters())
        best["score"] = max(best["score"], *scores)
        return scores

    return loop(step, model=model, best=best)
