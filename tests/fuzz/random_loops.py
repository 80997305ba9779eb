"""Random training loops around random networks: what people write in a step, and what they do between calls.

A loop is made from a seed alone. It runs eagerly or compiled and gives all that somebody could have looked at, in
order, so that two runs can be compared. In float64: differences are faults, not roundings.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.fuzz.random_steps import WIDTH, Net

Wrap = Callable[[nn.Module], Callable[[Tensor], Tensor]]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "one by one": lambda params: torch.optim.Adam(params, lr=0.01, foreach=False),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}
RETURNS = ("loss", "item", "cpu", "log", "logits", "gradients", "nothing")
BETWEEN = ("hold", "hold a part", "none", "add", "move", "rate", "load", "evaluate", "collect", "backward", "scale")


class RandomLoop:
    """The loop of a seed, with batches of a rank."""

    def __init__(self, seed: int, device: torch.device, *, rank: int = 0) -> None:
        self._seed, self._device, self._rank, self._rng = seed, device, rank, random.Random(seed)
        choose = self._rng.choice
        torch.manual_seed(seed)
        # First: a bias before a norm has a gradient of nothing but roundings, which some optimizers blow up.
        norm = [nn.BatchNorm1d(WIDTH)] if seed % 4 == 0 else []
        self._model = nn.Sequential(*norm, Net(self._rng, dropout=True))
        self._model = self._model.double().to(device)
        self._params = list(self._model.parameters())
        self._forward: Callable[[Tensor], Tensor] = self._model
        self._wrapped = False
        self._opt = OPTIMIZERS[choose(sorted(OPTIMIZERS))](self._params)
        self._average = [p.detach().clone() for p in self._params] if self._rng.random() < 0.3 else []
        self._zero = choose(["first", "last", "last", "with zeros", "outside", "never"])
        self._clip = choose(["no", "no", "norm", "value", "by hand"])
        self._scale = choose(["no", "no", "no", "by a number", "by a tensor"])
        self._accumulates, self._by_hand = self._rng.random() < 0.3, self._rng.random() < 0.15
        self._schedule = choose(["no", "no", "in the step", "between calls"])
        self._scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self._opt, T_0=4)
        self._returns, self._sizes = choose(RETURNS), choose([[4], [4], [4, 7]])

    def run(self, compile_: Compile, wrap: Wrap | None = None) -> list[Any]:
        """All that can be seen of some calls, tensors as copies on the CPU. `wrap` goes around the model; with it no
        backward runs outside of the step, where nothing of ours reduces gradients."""
        self._wrapped = wrap is not None
        self._forward = self._model if wrap is None else wrap(self._model)
        step, evaluate = compile_(self._step), self._evaluate
        if self._rng.random() < 0.3 or list(self._model.buffers()):  # which ranks share where they are read
            evaluate = compile_(self._evaluate)
        seen, held = list[Any](), list[Any]()
        torch.manual_seed(self._seed)
        for call in range(10):
            x, y = self._batch(call)
            updates = not self._accumulates or call % 3 == 2
            result = step(x, y, updates)
            if self._zero == "outside" and updates:
                self._opt.zero_grad()
            seen.append(_copies(result))
            if self._rng.random() < 0.3:
                held.append(result)
            if self._schedule == "between calls":
                self._scheduler.step()
            match self._rng.choice(["nothing"] * 8 + [*BETWEEN]):
                case "evaluate":
                    held.append(evaluate(x))
                    seen.append(_copies(held[-1]))
                case action:
                    self._between(action, x, y, held)
            seen.append([None if p.grad is None else _copies(p.grad) for p in self._params])
        states = [self._opt.state[p] for p in self._params if p in self._opt.state]
        return [*seen, _copies(held), _copies([self._params, self._average, states, list(self._model.buffers())])]

    def _evaluate(self, x: Tensor) -> Any:
        self._model.eval()
        with torch.no_grad():
            logits = self._forward(x)
        self._model.train()
        return logits, logits.argmax(1), next(iter(self._model.parameters())).detach().view(-1)[:1]

    def _batch(self, call: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self._seed + call + 100 * self._rank)
        rows = self._rng.choice(self._sizes)
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        return x.to(self._device), torch.randint(0, 3, (rows,), generator=generator).to(self._device)

    def _step(self, x: Tensor, y: Tensor, updates: bool) -> Any:
        if self._zero == "first" and not self._accumulates:
            self._opt.zero_grad()
        logits = self._forward(x)
        loss = F.cross_entropy(logits, y)
        match self._scale:
            case "by a number":
                (loss * (1 / (1 + loss.item()))).backward()
            case "by a tensor":
                (loss / (1 + loss.detach())).backward()
            case _:
                loss.backward()
        norm = self._clipped()
        if updates:
            self._update()
        return self._result(loss.detach(), logits.detach(), norm)

    def _clipped(self) -> Tensor | None:
        grads = [p.grad for p in self._params if p.grad is not None]
        match self._clip:
            case "norm":
                return nn.utils.clip_grad_norm_(self._params, 0.1)
            case "value":
                nn.utils.clip_grad_value_(self._params, 0.05)
            case "by hand":
                norm = torch.stack([grad.norm() for grad in grads]).norm()
                factor = 0.1 / (norm.item() + 1e-6)
                for grad in grads:
                    grad.mul_(factor)
                return norm
        return None

    def _update(self) -> None:
        if self._by_hand:
            with torch.no_grad():
                for param in self._params:
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=0.1)
        else:
            self._opt.step()
        with torch.no_grad():
            for average, param in zip(self._average, self._params, strict=False):
                average.lerp_(param, 0.1)
        if self._schedule == "in the step":
            self._scheduler.step()
        if self._zero == "last" or (self._zero == "first" and self._accumulates):
            self._opt.zero_grad()
        elif self._zero == "with zeros":
            self._opt.zero_grad(set_to_none=False)

    def _result(self, loss: Tensor, logits: Tensor, norm: Tensor | None) -> Any:
        match self._returns:
            case "loss":
                return loss
            case "item":
                return loss.item(), None if norm is None else norm.item()
            case "cpu":
                return loss.cpu()
            case "log":
                mean = self._params[0].detach().mean()
                return {"loss": loss, "norm": norm, "perplexity": loss.exp().item(), "mean": mean}
            case "logits":
                return logits, logits[0], loss
            case "gradients":
                return loss, [p.grad for p in self._params if p.grad is not None][:2]
        return None

    def _between(self, action: str, x: Tensor, y: Tensor, held: list[Any]) -> None:
        with_grad = [p for p in self._params if p.grad is not None]
        grads = [p.grad for p in with_grad if p.grad is not None]
        match action:
            case "hold" if grads:
                held.append([grads[0], grads[-1]])
            case "hold a part" if grads:
                held.append(grads[0].view(-1)[1:])
            case "none":
                self._params[0].grad = None
            case "add" if grads:
                grads[0].add_(0.01)
            case "move":
                self._params[0].data = self._params[0].data.clone()
            case "rate":
                for group in self._opt.param_groups:
                    group["lr"] *= 0.5
            case "load":
                self._opt.load_state_dict(self._opt.state_dict())
            case "collect":
                gc.collect()
            case "backward" if not self._wrapped:
                F.cross_entropy(self._model(x), y).backward()
            case "scale":
                with torch.no_grad():
                    self._params[-1].mul_(0.99)


def _copies(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), value)


def difference(one: Any, other: Any) -> str | None:
    """Where two runs parted first; None if they did not, but for rounding."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    if spec != other_spec:
        return f"{spec} against {other_spec}"
    for number, (a, b) in enumerate(zip(leaves, others, strict=True)):
        try:
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
        except AssertionError as error:
            return f"value {number} of {len(leaves)}: {error}"
    return None
