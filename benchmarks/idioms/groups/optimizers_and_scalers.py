"""Updates that are more than backward and step: closures, scalers, clipping, accumulation, groups, own rules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.idioms.base import Loop, batch, idiom, loop, mlp, sgd, small_training, update


def one_infinite_batch(call):
    """Call 4 has infinities in it."""
    x, y = batch(call)
    return (x * float("inf") if call == 4 else x), y


@idiom()
def lbfgs_closure() -> Loop:
    """LBFGS calls its closure as often as it needs, and reads losses and norms between."""
    model = mlp()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, history_size=4, line_search_fn="strong_wolfe")
    evaluations = []

    def step(x, y):
        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            evaluations.append(loss.item())
            return loss

        return opt.step(closure)

    return loop(step, model=model, opt=opt, evaluations=evaluations)


@idiom(ranks=True)
def closure_of_sgd() -> Loop:
    """`opt.step(closure)`, once per call."""
    model, opt = small_training()

    def step(x, y):
        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return opt.step(closure).detach()

    return loop(step, model=model, opt=opt)


@idiom()
def grad_scaler() -> Loop:
    """GradScaler around plain SGD: it reads `found_inf` and skips; call 4 has infinities."""
    model, opt = small_training()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss.detach(), scaler.get_scale()

    return loop(step, one_infinite_batch, model=model, opt=opt, scaler=scaler)


@idiom()
def grad_scaler_with_autocast_and_clipping() -> Loop:
    """The recipe of PyTorch's documentation, in bfloat16 on the CPU."""
    model, opt = small_training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    norms = []

    def step(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)

    return loop(step, model=model, opt=opt, scaler=scaler, norms=norms)


@idiom(ranks=True)
def grad_scaler_around_a_fused_update() -> Loop:
    """A fused optimizer undoes the scale itself, and is lent scale and `found_inf` for the time of its step."""
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach(), scaler.get_scale()

    return loop(step, one_infinite_batch, model=model, opt=opt, scaler=scaler)


@idiom()
def gradients_unscaled_before_a_fused_update() -> Loop:
    """The same with clipping in between, and losses read after it: the update skips by `found_inf`."""
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    losses = []

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())

    return loop(step, one_infinite_batch, model=model, opt=opt, scaler=scaler, losses=losses)


@idiom()
def loss_read_before_a_fused_update_is_scaled() -> Loop:
    """The update undoes the scale itself, in a step that is live."""
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    losses = []

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    return loop(step, one_infinite_batch, model=model, opt=opt, scaler=scaler, losses=losses)


@idiom()
def autocast_to_bfloat16() -> Loop:
    """Forward under autocast, the loss in float32."""
    model, opt = small_training()

    def step(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        return update(F.cross_entropy(logits.float(), y), opt), logits.dtype

    return loop(step, model=model, opt=opt)


@idiom(ranks=True, inductor=True)
def clipping_by_norm_and_value() -> Loop:
    """Both ways to clip, and the norm returned as a tensor."""
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        opt.step()
        opt.zero_grad()
        return loss.detach(), norm

    return loop(step, model=model, opt=opt)


@idiom()
def accumulation_inside() -> Loop:
    """One call goes over microbatches, then updates once."""
    model, opt = small_training()

    def step(x, y):
        opt.zero_grad()
        total = 0.0
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = F.cross_entropy(model(part_x), part_y) / 2
            loss.backward()
            total += loss.item()
        opt.step()
        return total

    return loop(step, model=model, opt=opt)


@idiom()
def accumulation_over_calls() -> Loop:
    """The update comes in every third call; gradients stay between."""
    model, opt = small_training()
    calls = {"n": 0}

    def step(x, y):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        calls["n"] += 1
        if calls["n"] % 3 == 0:
            opt.step()
            opt.zero_grad(set_to_none=False)
        return loss.detach()

    return loop(step, model=model, opt=opt, calls=calls)


@idiom()
def group_added_later() -> Loop:
    """Call 4 adds the parameters of the first layer to the optimizer."""
    model = mlp()
    opt = sgd(model[2])
    calls = {"n": 0}

    def step(x, y):
        if calls["n"] == 4:
            opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
        calls["n"] += 1
        loss = update(F.cross_entropy(model(x), y), opt)
        model.zero_grad()
        return loss

    return loop(step, model=model, opt=opt, calls=calls)


@idiom()
def rates_per_group() -> Loop:
    """Head and body have rates of their own, and the body's falls inside of the step."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters(), "lr": 0.2}]
    opt = torch.optim.SGD(groups, momentum=0.9)

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        opt.param_groups[0]["lr"] *= 0.9
        opt.param_groups[1]["momentum"] = 0.9 - opt.param_groups[0]["lr"]
        return loss

    return loop(step, model=model, opt=opt)


@idiom()
def optimizer_state_dropped() -> Loop:
    """Every fourth call forgets the moments."""
    model = mlp()
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    calls = {"n": 0}

    def step(x, y):
        if calls["n"] % 4 == 3:
            opt.state.clear()
        calls["n"] += 1
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, calls=calls)


@idiom()
def optimizer_made_anew() -> Loop:
    """From call 5 on another optimizer trains."""
    model = mlp()
    holder = {"opt": torch.optim.Adam(model.parameters(), lr=0.02), "calls": 0}

    def step(x, y):
        if holder["calls"] == 5:
            holder["opt"] = torch.optim.SGD(model.parameters(), lr=0.05)
        holder["calls"] += 1
        return update(F.cross_entropy(model(x), y), holder["opt"])

    return loop(step, model=model, holder=holder)


@idiom()
def update_by_hand() -> Loop:
    """`p -= rate * p.grad` under `no_grad`, with a rate that falls."""
    model, state = mlp(), {"rate": 0.2}

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= state["rate"] * param.grad
                param.grad = None
        state["rate"] *= 0.9
        return loss.detach()

    return loop(step, model=model, state=state)


@idiom()
def sharpness_aware_minimization() -> Loop:
    """Up along the gradient, gradients there, back, then the update."""
    model, opt = small_training()

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(step, model=model, opt=opt)


@idiom()
def gradients_edited() -> Loop:
    """Gradients are centred, a noise is added, and unused ones are skipped."""
    model, opt = small_training()

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for param in model.parameters():
            if param.grad is None:
                continue
            if param.dim() > 1:
                param.grad -= param.grad.mean(dim=1, keepdim=True)
            param.grad.add_(torch.randn_like(param.grad), alpha=0.01)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(step, model=model, opt=opt)


@idiom()
def moments_read_for_a_log() -> Loop:
    """The size of Adam's moments, read from its state every second call."""
    model = mlp()
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    sizes, calls = [], {"n": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        if calls["n"] % 2:
            sizes.append(sum(opt.state[p]["exp_avg_sq"].sum().item() for p in model.parameters()))
        calls["n"] += 1
        return loss

    return loop(step, model=model, opt=opt, sizes=sizes, calls=calls)


@idiom()
def error_of_torch_caught_inside() -> Loop:
    """Clipping is told to raise where the norm is not finite, and the step goes on without an update."""
    model, opt = small_training()
    counts = {"skipped": 0}

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        try:
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            opt.step()
        except RuntimeError as error:
            counts["skipped"] += "non-finite" in str(error)
        opt.zero_grad()
        return loss.detach()

    return loop(step, one_infinite_batch, model=model, opt=opt, counts=counts)


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own: it counts in its groups and in its states."""

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            rate = group["lr"] / group["steps"] ** 0.5
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"], state["steps"] = torch.zeros_like(param), 0
                state["steps"] += 1
                param.add_(torch.sign(state["momentum"].lerp(param.grad, 1 - group["beta"])), alpha=-rate)
                state["momentum"].lerp_(param.grad, 0.02 * state["steps"])


@idiom()
def optimizer_of_the_user() -> Loop:
    """A class of the user's own, with counters of Python in groups and states."""
    model = mlp()
    opt = Lion(model.parameters())

    def step(x, y):
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def sparse_gradients() -> Loop:
    """Bags of words by offsets, with sparse gradients and an optimizer for them beside a dense one."""
    words, head = nn.EmbeddingBag(9, 4, mode="mean", sparse=True), nn.Linear(4, 3)
    model = nn.ModuleList([words, head])
    sparse, dense = torch.optim.SparseAdam(words.parameters(), lr=0.05), sgd(head)

    def step(tokens, offsets, y):
        loss = F.cross_entropy(head(words(tokens, offsets)), y)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        model.zero_grad()
        return loss.detach()

    def arguments(call):
        draw = torch.Generator().manual_seed(call)
        offsets = torch.tensor([0, 1 + call % 3, 5])
        return torch.randint(9, (8,), generator=draw), offsets, torch.randint(3, (3,), generator=draw)

    return loop(step, arguments, model=model, sparse=sparse, dense=dense)
