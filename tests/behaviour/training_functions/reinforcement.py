"""Reinforcement learning: REINFORCE and actor-critic of PyTorch's examples, and the update of PPO."""

from __future__ import annotations

from collections import deque, namedtuple
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.idioms import Loop
from tests.behaviour.training_functions.base import loop, training

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Environment:
    """A point that an action moves; an episode lasts three to five steps."""

    def __init__(self) -> None:
        self.random = np.random.RandomState(0)
        self.state, self.left = np.zeros(4, np.float32), 0

    def reset(self) -> Any:
        self.state, self.left = self.random.randn(4).astype(np.float32), self.random.randint(3, 6)
        return self.state

    def step(self, action: int) -> tuple[Any, float, bool]:
        self.state = self.state + (0.1 if action else -0.1)
        self.left -= 1
        return self.state, float(-np.abs(self.state).sum()), self.left == 0


class Policy(nn.Module):
    """What to do, and for actor-critic what it is worth."""

    def __init__(self, *, critic: bool) -> None:
        super().__init__()
        self.affine1, self.dropout, self.action_head = nn.Linear(4, 8), nn.Dropout(p=0.6), nn.Linear(8, 2)
        self.value_head = nn.Linear(8, 1) if critic else None
        self.saved_actions: list[Any] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> Any:
        x = self.affine1(x)
        if self.value_head is None:
            return F.softmax(self.action_head(F.relu(self.dropout(x))), dim=1)
        return F.softmax(self.action_head(F.relu(x)), dim=-1), self.value_head(F.relu(x))


def returns_of(rewards: list[float], gamma: float = 0.99) -> list[float]:
    R, returns = 0.0, deque[float]()
    for r in rewards[::-1]:
        R = r + gamma * R
        returns.appendleft(R)
    return list(returns)


@training()
def reinforce() -> Loop:
    """A whole episode is the compiled function: actions are drawn, and the environment is stepped with them."""
    env, policy, eps = Environment(), Policy(critic=False), np.finfo(np.float32).eps.item()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    running = {"reward": 10.0, "episode": 0}

    def select_action(state: Any) -> int:
        probs = policy(torch.from_numpy(state).float().unsqueeze(0))
        m = Categorical(probs)
        action = m.sample()
        policy.saved_actions.append(m.log_prob(action))
        return int(action.item())

    def finish_episode() -> None:
        returns = torch.tensor(returns_of(policy.rewards))
        returns = (returns - returns.mean()) / (returns.std() + eps)
        policy_loss = [-log_prob * R for log_prob, R in zip(policy.saved_actions, returns, strict=True)]
        optimizer.zero_grad()
        loss = torch.cat(policy_loss).sum()
        loss.backward()
        optimizer.step()
        del policy.rewards[:]
        del policy.saved_actions[:]

    def episode() -> None:
        state, ep_reward, done = env.reset(), 0.0, False
        while not done:
            action = select_action(state)
            state, reward, done = env.step(action)
            policy.rewards.append(reward)
            ep_reward += reward
        running["reward"] = 0.05 * ep_reward + (1 - 0.05) * running["reward"]
        finish_episode()
        running["episode"] += 1
        if running["episode"] % 2 == 0:
            print(
                f"Episode {running['episode']}\tLast reward: {ep_reward:.2f}\tAverage reward: {running['reward']:.2f}"
            )

    return loop(
        episode, model=policy, opt=optimizer, running=running, left=lambda: (policy.rewards, policy.saved_actions)
    )


@training()
def actor_critic() -> Loop:
    """The end of an episode is the compiled function: it uses the graphs of calls before it."""
    env, model, eps = Environment(), Policy(critic=True), np.finfo(np.float32).eps.item()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)

    def select_action(state: Any) -> int:
        probs, state_value = model(torch.from_numpy(state).float())
        m = Categorical(probs)
        action = m.sample()
        model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
        return int(action.item())

    def finish_episode() -> float:
        policy_losses, value_losses = [], []
        returns = torch.tensor(returns_of(model.rewards))
        returns = (returns - returns.mean()) / (returns.std() + eps)
        for (log_prob, value), R in zip(model.saved_actions, returns, strict=True):
            advantage = R - value.item()
            policy_losses.append(-log_prob * advantage)
            value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        del model.rewards[:]
        del model.saved_actions[:]
        return loss.item()

    def arguments(call: int) -> tuple[()]:
        state, done = env.reset(), False
        while not done:
            state, reward, done = env.step(select_action(state))
            model.rewards.append(reward)
        return ()

    return loop(finish_episode, arguments, model=model, opt=optimizer)


class Agent(nn.Module):
    """A critic and an actor of PPO."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


@training()
def ppo_update() -> Loop:
    """Epochs over shuffled minibatches, clipped ratios and values, an early stop when the policy has moved too far."""
    agent, update_epochs, batch_size, minibatch_size, clip_coef, target_kl = Agent(), 3, 12, 4, 0.2, 0.004
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-2, eps=1e-5)
    log: list[dict[str, float]] = []

    def update(obs: Tensor, actions: Tensor, logprobs: Tensor, advantages: Tensor, returns: Tensor) -> None:
        values = agent.critic(obs).detach().view(-1)
        b_inds, clipfracs = np.arange(batch_size), []
        for epoch in range(update_epochs):  # noqa: B007
            np.random.shuffle(b_inds)
            for start in range(0, batch_size, minibatch_size):
                mb_inds = b_inds[start : start + minibatch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs[mb_inds], actions.long()[mb_inds])
                logratio = newlogprob - logprobs[mb_inds]
                ratio = logratio.exp()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfracs += [((ratio - 1.0).abs() > clip_coef).float().mean().item()]
                mb_advantages = advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                pg_loss = torch.max(
                    -mb_advantages * ratio, -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
                ).mean()
                newvalue = newvalue.view(-1)
                v_clipped = values[mb_inds] + torch.clamp(newvalue - values[mb_inds], -clip_coef, clip_coef)
                v_loss = 0.5 * torch.max((newvalue - returns[mb_inds]) ** 2, (v_clipped - returns[mb_inds]) ** 2).mean()
                loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
            if approx_kl > target_kl:
                break
        y_pred, y_true = values.cpu().numpy(), returns.cpu().numpy()
        explained_var = 1 - np.var(y_true - y_pred) / np.var(y_true)
        log.append(
            {
                "kl": approx_kl.item(),
                "epochs": epoch,
                "clipfrac": float(np.mean(clipfracs)),
                "var": float(explained_var),
            }
        )

    def arguments(call: int) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(call)
        obs = torch.randn(batch_size, 4, generator=draw)
        with torch.no_grad():
            action, logprob, _, _ = agent.get_action_and_value(obs)
        return obs, action, logprob, torch.randn(batch_size, generator=draw), torch.randn(batch_size, generator=draw)

    return loop(update, arguments, model=agent, opt=optimizer, log=log)
