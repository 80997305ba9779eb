"""Updates that are more than backward and step: closures, scalers, clipping, accumulation, averages, several groups."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.idioms.base import Loop, idiom, loop, mlp, sgd, small_training, update


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

    def arguments(call):
        draw = torch.Generator().manual_seed(call)
        x = torch.randn(5, 6, generator=draw)
        return (x * float("inf") if call == 4 else x), torch.randint(3, (5,), generator=draw)

    return loop(step, arguments, model=model, opt=opt, scaler=scaler)


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
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)

    return loop(step, model=model, opt=opt, scaler=scaler, norms=norms)


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
def ema_with_a_moving_decay() -> Loop:
    """The decay follows the number of updates, as `min(decay, (1 + n) / (10 + n))`."""
    model, opt = small_training()
    ema, state = copy.deepcopy(model), {"updates": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        state["updates"] += 1
        decay = min(0.999, (1 + state["updates"]) / (10 + state["updates"]))
        with torch.no_grad():
            for kept, param in zip(ema.parameters(), model.parameters(), strict=True):
                kept.mul_(decay).add_(param, alpha=1 - decay)
        return loss, decay

    return loop(step, model=model, opt=opt, ema=ema, state=state)


class ExponentialMovingAverage:
    """What torch_ema keeps: shadows of parameters, and how to swap them in."""

    def __init__(self, parameters, decay):
        self.decay, self.updates = decay, 0
        self.parameters = list(parameters)
        self.shadow = [p.clone().detach() for p in self.parameters]
        self.stored = []

    def update(self):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            for shadow, param in zip(self.shadow, self.parameters, strict=True):
                difference = shadow - param
                difference.mul_(1.0 - decay)
                shadow.sub_(difference)

    def store(self):
        self.stored = [p.clone() for p in self.parameters]

    def copy_to(self):
        for shadow, param in zip(self.shadow, self.parameters, strict=True):
            param.data.copy_(shadow.data)

    def restore(self):
        for stored, param in zip(self.stored, self.parameters, strict=True):
            param.data.copy_(stored.data)


@idiom()
def ema_object_swapped_in() -> Loop:
    """torch_ema: updated in every call; every third call is also evaluated with the averages."""
    model, opt = small_training()
    ema, losses = ExponentialMovingAverage(model.parameters(), 0.99), []

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        ema.update()
        if ema.updates % 3 == 0:
            ema.store()
            ema.copy_to()
            with torch.no_grad():
                losses.append(F.cross_entropy(model(x), y).item())
            ema.restore()
        return loss

    return loop(step, model=model, opt=opt, shadow=lambda: ema.shadow, updates=lambda: ema.updates, losses=losses)


@idiom()
def data_of_parameters_replaced() -> Loop:
    """Lookahead: every second call `p.data = ...` puts an average of slow and fast weights in."""
    model, opt = small_training()
    slow, calls = [p.detach().clone() for p in model.parameters()], {"n": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        calls["n"] += 1
        if calls["n"] % 2 == 0:
            for number, param in enumerate(model.parameters()):
                slow[number] = 0.5 * slow[number] + 0.5 * param.data
                param.data = slow[number].clone()
        return loss

    return loop(step, model=model, opt=opt, slow=slow, calls=calls)


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
