"""Fused optimizers written out on tensors, for compilers of kernels: rates and betas are tensors there.

On a GPU a fused kernel of ATen takes betas, decay and epsilon as arguments, which a CUDA graph freezes. Kernels over
lists (`lower/foreach/multi_tensor.py`) compute this arithmetic, one index of it, in one pass over the same memory;
Inductor gets all of it where they cannot. On the CPU ATen's own kernels stay.

Sources: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015; Loshchilov and Hutter, "Decoupled Weight
Decay Regularization", 2019. The order of operations is that of torch's fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir import node_meta, op_info
from wholestep.ir.ops.library import LIBRARY

LIBRARY.define("in_memory(Tensor self) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("in_memory", lambda self: self.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("wholestep::in_memory", torch.empty_like, lib=LIBRARY)
_in_memory = torch.ops.wholestep.in_memory.default
"""A copy that a compiler does not see through, so that what few numbers cost is not paid again for every element."""

_TWIN = "wholestep_functional::aten___fused_"


def _table(columns: Sequence[Any], like: Tensor, count: int) -> list[list[Tensor]]:
    """Per column, which is a number or a vector of `count`, the number of every index in the type that is computed in.

    For several indices they lie in memory. For one there is nothing to share: they stay tensors without dimensions.
    """
    rows = [_as_tensor(column, like.device) for column in columns]
    if count == 1:
        return [[row.to(_computed_in(like))] for row in rows]
    held = _in_memory(torch.stack([row.expand(count) for row in rows]).to(_computed_in(like)))
    return [list(row.unbind(0)) for row in held.unbind(0)]


def _as_tensor(number: Any, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)


def _rest(share: Any) -> Any:
    """``1 - share`` in float64. In float32 it is 0.00099999 for 0.999, and the first squares are that much of those of
    gradients."""
    return 1 - (share.to(torch.float64) if isinstance(share, Tensor) else share)


def _computed_in(param: Tensor) -> torch.dtype:
    """What torch's kernels compute in for parameters of this type."""
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def _adam(decoupled: bool) -> Callable[..., list[list[Tensor]]]:
    def update(
        lists: Sequence[list[Tensor]], *, lr: Any, beta1: Any, beta2: Any, weight_decay: Any, eps: Any, amsgrad: bool,
        maximize: bool,
    ) -> list[list[Tensor]]:  # fmt: skip
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps = lists
        count = len(params)
        steps = (torch.stack(state_steps) if count > 1 else state_steps[0]).to(torch.float64)
        rate = lr / (1 - torch.pow(beta1, steps))
        root = torch.sqrt(1 - torch.pow(beta2, steps))
        decay = 1 - lr * weight_decay if decoupled else weight_decay
        columns = [rate, root, decay, _rest(beta1), _rest(beta2), eps]
        rates, roots, decays, shares1, shares2, epsilons = _table(columns, params[0], count)
        done: list[list[Tensor]] = [[], [], [], [], []]
        for index, old in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
            weight, given, mean, square = (one.to(_computed_in(params[0])) for one in old)
            grad = -given if maximize else given
            if decoupled:
                weight = weight * decays[index]
            else:
                grad = grad + decays[index] * weight
            mean_ = mean + shares1[index] * (grad - mean)
            square_ = square + shares2[index] * (grad * grad - square)
            largest = torch.maximum(max_exp_avg_sqs[index], square_) if amsgrad else square_
            weight = weight - rates[index] * mean_ / (torch.sqrt(largest) / roots[index] + epsilons[index])
            new = (weight, given, mean_, square_, *((largest,) if amsgrad else ()))
            for place, (one, before) in enumerate(zip(new, (*old, old[-1]), strict=False)):
                done[place].append(one.to(before.dtype))
        return done

    return update


def _sgd(
    lists: Sequence[list[Tensor]], *, weight_decay: Any, momentum: Any, lr: Any, dampening: Any, nesterov: bool,
    maximize: bool, is_first_step: bool,
) -> list[list[Tensor]]:  # fmt: skip
    params, grads, buffers = lists
    columns = [weight_decay, momentum, lr, 1 - dampening]
    decays, momenta, rates, shares = _table(columns, params[0], len(params))
    done: list[list[Tensor]] = [[], [], []]
    for index, (param, given) in enumerate(zip(params, grads, strict=True)):
        dtype = _computed_in(params[0])
        weight, grad = param.to(dtype), -given.to(dtype) if maximize else given.to(dtype)
        grad = grad + decays[index] * weight
        if buffers:
            buffer = grad if is_first_step else momenta[index] * buffers[index].to(dtype) + shares[index] * grad
            done[2].append(buffer.to(buffers[index].dtype))
            grad = grad + momenta[index] * buffer if nesterov else buffer
        done[0].append((weight - rates[index] * grad).to(param.dtype))
        done[1].append(given)
    return done


_RULES: dict[str, Callable[..., list[list[Tensor]]]] = {
    "adam": _adam(decoupled=False),
    "adamw": _adam(decoupled=True),
    "sgd": _sgd,
}


def _name(target: Any) -> str:
    """``adamw`` for the functional form of ``_fused_adamw_``; empty for what is no fused optimizer."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.startswith(_TWIN):
        return ""
    return target._schema.name.removeprefix(_TWIN).partition("___")[0]


def on_gpu(node: fx.Node) -> bool:
    """Whether all that a call gives is on a GPU."""
    return all(one.is_cuda for one in node_meta.tensors(node))


def is_written_out(node: fx.Node) -> bool:
    """Whether the call is a fused optimizer on a GPU that `written_out` knows."""
    return _name(node.target) in _RULES and on_gpu(node)


def written_out(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Tensor]]:
    """What the functional form of a fused optimizer gives: the lists it would have written to."""
    names, given = op_info.argument_names(target), op_info.by_name(target, args, kwargs)
    lists = {name: list(given[name]) for name in names if isinstance(given.get(name), (list, tuple))}
    rest = {name: value for name, value in given.items() if name not in lists}
    scale, found_inf = rest.pop("grad_scale", None), rest.pop("found_inf", None)
    old = list(lists.values())
    if scale is not None:
        lists["grads"] = [_unscaled(grad, scale, lists["self"][0]) for grad in lists["grads"]]
    new = _RULES[_name(target)](list(lists.values()), **rest)[: len(target._schema.returns)]
    if scale is None and found_inf is None:
        return new
    return [[_unless(found_inf, *pair) for pair in zip(*row, strict=True)] for row in zip(old, new, strict=False)]


def _unscaled(grad: Tensor, scale: Tensor, param: Tensor) -> Tensor:
    """In the type that is computed in: it is rounded where it is written back."""
    return grad.to(_computed_in(param)) / scale.to(_computed_in(param))


def _unless(found_inf: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    """What a GradScaler wants: where a gradient is no number, nothing changes."""
    new = new.to(old.dtype)
    return new if found_inf is None else torch.where(found_inf == 1, old, new)
