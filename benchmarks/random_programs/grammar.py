"""The sentences that random steps are made of: a table of symbols, each with the texts that may stand in its place.

``<symbol>`` in a text is replaced by one of the symbol's own texts. Statements are a line each, or a line and its
``else``. Numbers are kept between 0.5 and 1.5 where they scale something, so that nothing explodes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

STAGES = ("start", "forward", "backward", "updated")
"""Between which calls a statement may stand: each may use what the ones before it may."""

Rules = Mapping[str, Sequence[str]]

ANYWHERE: Rules = {
    "word": ("loss", "step", "note"),
    "bounded": ("(0.5 + <number> % 1.0)", "<place>", "0.9"),
    "number": (
        "<place>", "<place>", "<place>", "<known>", "0.5", "random.random()", "float(np.random.rand())",
        "count * 0.25",
        "torch.rand(()).item()", "len(history) * 0.1", "opt.param_groups[0]['lr']", "x.mean().item()",
        "float(array[1])", "user.scaled(0.5)", "library.scaled(0.5)", "box.times(0.5)", "box.doubled",
        "model.first.weight[0, 0].item()", "sum(h for h in history if isinstance(h, float)) % 1.0",
        "max((len(items) for items in table.values() if isinstance(items, list)), default=0) * 0.1",
        "average.item()", "model.seen.item() * 0.1", "getattr(box, 'w' + ''.join([]))", "vars(box)['w']",
        "len(opt.state) * 0.1", "len(opt.state.get(model.last.bias, ())) * 0.1", "len(x) * 0.25",
        "user.drawn_and_put_back()", "user.drawn_by_numpy_and_put_back()", "library.drawn_and_put_back()",
        "torch.initial_seed() % 7 * 0.1", "float(x.requires_grad)", "float(x.grad is None)", "float(array.sum())",
        "float(model.last.bias.requires_grad)",
        "float(model.first.weight.grad is not None)", "sum(p.numel() for p in model.parameters()) * 0.01",
        "(lambda z: z * <place>)(0.5)", "operator.attrgetter('w')(box)", "float(torch.tensor([<place>, 2.0]).sum())",
    ),
    "tensor": (
        "x.mean()", "torch.tensor(<number>)", "torch.rand(())", "average", "average * <place>",
        "torch.full((), <place>)",
        "torch.from_numpy(array).mean()", "torch.as_tensor(array)[1]",
        "model.last.bias.detach().abs().max()", "box.times(x.std())",
    ),
    "condition": (
        "count % 2 == 0", "count % 3 == 1", "<place> > 1.0", "<number> > 0.5", "len(history) % 2", "model.training",
        "random.random() < 0.5", "x.sum() > 0", "<tensor> > 0.4", "not box.kept", "'loss' in table",
        "opt.param_groups[0]['lr'] < 0.05", "model.first.weight.grad is None", "model.last.bias.requires_grad",
        "len(opt.state) > 2", "any(h is average for h in history)", "isinstance(box.w, float) and box.w < 1.0",
    ),
    "simple": (
        "print('<word>', <number>)", "print('<word> {:.5f}'.format(<number>), end=' ')", "print(<tensor>)",
        "history.append(<number>)", "history.append(<number>)", "history.append(<tensor>)", "<write>", "<write>",
        "count += 1", "count += 1", "table.setdefault('<word>', []).append(<number>)", "table['last'] = <number>",
        "del history[:-2]", "log.warning('%s %s', '<word>', <number>)", "box.keep(<tensor>)", "box.keep(<number>)",
        "opt.param_groups[0]['lr'] = 0.02 + 0.1 * (<number> % 1.0)",
        "opt.param_groups[0]['weight_decay'] = 0.01 * <place>",
        "model.train(not model.training)", "model.eval()", "model.train()", "model.scale = <bounded>",
        "model.dropout.p = 0.5 - model.dropout.p", "average.lerp_(<tensor>, 0.25)", "average.mul_(<place>)",
        "average = average * 0.5 + <tensor>", "array[1] = <bounded>", "array[:] = array * 0.5 + <bounded>",
        "history.append(next(numbers))", "user.SCALE = <bounded>", "library.SCALE = <bounded>",
        "user.Box.kind_scale = <bounded>", "model.first.weight.data.mul_(0.99)",
        "table = dict(table, other=<number>)",
        "history.sort(key=str)", "history.append(str(<number>))",
        "opt.load_state_dict(copy.deepcopy(opt.state_dict()))",
        "model.load_state_dict(copy.deepcopy(model.state_dict()))",
        "model.first.weight.data[0].mul_(<bounded>)", "model.last.bias.detach().mul_(0.99)",
        "average.view(1).mul_(<bounded>)", "average.data.lerp_(<tensor>, 0.25)", "history.append(average)",
        "history.append(average.view(1))", "history.append(model.seen)", "shadow[0].copy_(model.first.weight.detach())",
        "history.append([p.grad is None for p in model.parameters()])", "table.pop('last', None)",
        "torch.manual_seed(count)", "random.seed(count)", "np.random.seed(count)",
        "model.first.weight.data = model.first.weight.data.clone()",
        "alias.mul_(<bounded>)", "raw.mul_(<bounded>)", "raw[1:].add_(0.01)", "history.append(alias.sum().item())",
        "table['raw'] = raw.clone()", "flat.mul_(<bounded>)", "history.append(flat.norm().item())", "flat.zero_()",
        "alias = model.first.weight.detach()", "raw = model.last.bias.data", "history.append(float(shown.sum()))",
        "model.first.weight.data = model.first.weight.data * <bounded>",
        "model.first.weight.data, shadow[0] = shadow[0], model.first.weight.data",
    ),
    "result": (
        "None", "<number>", "<tensor>", "(<number>, <tensor>)", "{'<word>': <number>, 'x': x}", "history[-1:]",
        "dict(table)", "average", "(average, average)", "[x, x]", "model.seen", "model.last.weight.detach()[1]",
        "(model.last.weight, shadow[0][:2].t(), <tensor>)", "dict(bias=model.last.bias.data, x=x[:1])",
    ),
}  # fmt: skip

START: Rules = {
    "simple": (
        "x = x * <bounded>", "x.mul_(<bounded>)", "x = x + 0.1 * torch.randn_like(x)", "x[0] = <number>",
        "x = x[torch.randperm(len(x))]", "x = x + torch.from_numpy(array).float().mean()",
        "x = x.clamp(min=-<number>)",
        "user.decay(model.last.weight)", "user.decay(model.first.weight[1])", "opt.zero_grad(set_to_none=False)",
        "table['row'] = user.clamped_row(model.last.weight, <bounded>)",
        "history.append(user.clamped_row(model.last.weight.t(), <bounded>).sum().item())",
        "model.last.bias.requires_grad_(not model.last.bias.requires_grad)", "model.zero_grad()", "opt.state.clear()",
        "model.last.weight.grad = torch.ones_like(model.last.weight)", "x.requires_grad_()", "x, y = x[:3], y[:3]",
        "model.first.requires_grad_(not model.first.bias.requires_grad)",
        "x = (x * <bounded>).requires_grad_()", "x = x.clone(); x.requires_grad = True",
        "x = x + torch.zeros_like(x, requires_grad=True)", "x = x.detach().requires_grad_(bool(count % 3))",
        "noise = torch.zeros_like(x).requires_grad_(); "
        "x = x + <bounded> * torch.autograd.grad(model(x + noise).sum(), noise)[0].sign()",
        "near = (x * <bounded>).requires_grad_(); model(near).mean().backward(); table['near'] = near",
        "near = x.detach().clone().requires_grad_(); model(near).sum().backward(); history.append(near.grad)",
        "model.last.weight.requires_grad = bool(count % 3)",
    ),
}  # fmt: skip

FORWARD: Rules = {
    "number": (
        "loss.item()", "loss.item()", "float(loss)", "round(loss.item(), 3)", "loss.detach().numpy().item()",
        "out.max().item()", "float(out.detach().numpy().sum())", "(out.argmax(1) == y).float().mean().item()",
        "loss.tolist()", "float(out.detach()[out.detach() > 0].numel())",
    ),
    "tensor": ("loss.detach()", "loss.detach() * <place>", "out.detach().mean()", "out.detach().abs().amax()"),
    "condition": (
        "loss.item() > 1.0", "loss > 1.1", "bool(torch.isfinite(loss))", "out.argmax().item() % 2", "(out > 1).any()",
        "out.requires_grad", "loss.grad_fn is None",
    ),
    "simple": (
        "print('loss', loss)", "print(loss.detach())", "history.append(loss.item())", "history.append(out.argmax(1))",
        "array[:2] = out.detach().numpy()[0, :2]", "box.keep(loss.detach())", "table['out'] = out.detach()",
        "table['share'] = out.detach().numpy()", "out.detach().mul_(<bounded>)", "table['row'] = out.detach()[0]",
        "table['row'] = out.detach()[0]; table['row'].mul_(<bounded>)", "loss.detach().mul_(<bounded>)",
        "out.retain_grad()", "out.register_hook(lambda grad: grad * 0.5)", "average = loss.detach()",
        "loss.register_hook(lambda grad: history.append(grad.item()))",
        "model.last.bias.requires_grad_(not model.last.bias.requires_grad)",
    ),
    "reshape": (
        "loss = loss * <bounded>", "loss = loss * <bounded>", "loss = loss * (<tensor> % 1.0 + 0.5)",
        "loss = loss + 0.1 * user.scaled(loss)", "loss = loss + 0.1 * box.times(loss)",
        "loss = loss + 0.1 * out[out > 0].sum()",
        "loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())",
        "loss = loss + user.Square.apply(out).mean()",
        "loss = loss + out[:, torch.randperm(3)[0]].mean()",
        "loss = loss * torch.from_numpy(array).float().abs().mean()",
        "loss = loss + 0.1 * checkpoint(torch.tanh, out, use_reentrant=False).mean()",
        "loss = sum([loss, 0.1 * loss.square()])",
        "loss = torch.where(loss > 1.0, loss, loss * 0.5)",
    ),
    "result": (
        "loss", "loss.item()", "loss.detach()", "out", "out.detach()", "{'loss': loss.item(), 'out': out.detach()}",
    ),
}  # fmt: skip

BACKWARD: Rules = {
    "number": ("user.norm_of(model.first.weight)", "user.norm_of(model.last.bias)"),
    "simple": (
        "table['norm'] = nn.utils.clip_grad_norm_(model.parameters(), <bounded>)",
        "history.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())",
        "nn.utils.clip_grad_value_(model.parameters(), 0.05)", "user.scale_grads([model.last.weight], <bounded>)",
        "model.last.bias.grad = None",
        "history.append([p.grad.clone() for p in model.parameters() if p.grad is not None][:1])",
        "user.decay(model.last.weight.view(-1)[2:])", "user.replace_grads(model.parameters(), <bounded>)",
        "history.append(out.grad)", "history.append(x.grad)", "table['grad'] = model.first.weight.grad",
        "history.append(sum(p.grad.norm() for p in model.parameters() if p.grad is not None).item())",
        "model.first.weight.grad = model.first.weight.detach() * 0.1",
        "model.last.weight.grad[0].mul_(<bounded>)", "table['slope'] = model.first.weight.grad[1]",
        "model.first.bias.grad.view(-1)[1:].zero_()", "model.last.weight.grad.t().div_(<bounded> + 1)",
        "model.last.weight.grad.data = model.last.weight.grad.data * <bounded>", "user.decay(model.last.weight.grad)",
        "model.first.weight.grad.data.mul_(<bounded>)", "table['slope'] = model.last.bias.grad.data",
        "torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], <bounded>)",
        "history.append(user.decay(flat))",
    ),
}  # fmt: skip

UPDATED: Rules = {
    "simple": (
        "scheduler.step()", "scheduler.step()", "opt.state.clear()",
        "history.append(opt.param_groups[0]['lr'])", "shadow[0].lerp_(model.first.weight.detach(), 0.1)",
        "torch._foreach_lerp_(shadow, [p.detach() for p in model.parameters()], 0.1)",
        "table['lr'] = scheduler.get_last_lr()[0]", "model.requires_grad_(True)",
        "for p in model.first.parameters(): p.requires_grad = not p.requires_grad",
    ),
}  # fmt: skip

COMPOUND = (
    "<simple>", "<simple>", "<simple>", "<simple>", "<simple>; <simple>", "if <condition>: <simple>",
    "if <condition>: <simple>",
    "if <condition>: <simple>\nelse: <simple>", "for _ in range(count % 3): <simple>",
    "if <condition>: return <result>",
    "with torch.no_grad(): table['eval'] = model(x).mean().item()", "try: [][count]\nexcept IndexError: <simple>",
    "known = <number>", "log.info('%s', <tensor>)", "with torch.no_grad(): <simple>", "while count % 4: count += 1",
    "with torch.inference_mode(): table['eval'] = model(x).mean().item()",
    "try: 1 / 0\nexcept ZeroDivisionError: <simple>",
)  # fmt: skip


def rules_of(stage: str, places: Rules) -> dict[str, list[str]]:
    """What may stand at a stage: everything that earlier ones may, and `places`."""
    found: dict[str, list[str]] = {"statement": list(COMPOUND), "known": ["known"]}
    tables = dict(zip(STAGES, (START, FORWARD, BACKWARD, UPDATED), strict=True))
    parts = [ANYWHERE, places, *(tables[one] for one in STAGES[1 : STAGES.index(stage) + 1])]
    for part in [*parts, START] if stage == "start" else parts:
        for symbol, texts in part.items():
            found.setdefault(symbol, []).extend(texts)
    return found


def expanded(text: str, rules: Mapping[str, Sequence[str]], rng: random.Random, depth: int = 0) -> str:
    """The text with every symbol replaced; past some depth the last and plainest alternatives are taken."""
    plain = {"number": "0.75", "tensor": "x.mean()", "bounded": "0.9", "condition": "count % 2 == 0"}

    def replacement(found: re.Match[str]) -> str:
        symbol = found[1]
        if depth > 4 and symbol in plain:
            return plain[symbol]
        return expanded(rng.choice(rules[symbol]), rules, rng, depth + 1)

    return re.sub(r"<(\w+)>", replacement, text)
