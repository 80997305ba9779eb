"""Graphs, generators and casts around a value that is asked for: what random and published programs have shown."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.harness.training import backward_and_step
from tests.unit.live.both import CALLS, AsAGraph, Compiled, Step, Training, train_both, train_by_stages


def test_a_call_that_gives_its_argument_behind_a_read_whose_backward_ran_ahead() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            out = training.model(x)
            training.notes.append(out.mean().item())
            training.update(out.float().mean())  # already of that dtype: it gives `out` itself

        return step

    train_both(make)


def test_a_backward_does_not_free_what_its_detached_input_was_computed_of() -> None:
    """The GAN of every example: the discriminator learns of `fake.detach()`, then the generator of `fake`."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            fake = training.model(x)
            loss = (training.model.last.weight.sum() * fake.detach()).sum()
            loss.backward()
            training.notes.append(loss.item())
            training.update(fake.square().mean())

        return step

    train_both(make, compiled=AsAGraph())


def test_what_is_computed_of_a_detached_value_has_a_graph_of_its_own() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            out = training.model(x)
            out.mean().backward()
            loss = (training.model.last.weight.sum().square() * out.detach()).sum()
            training.notes.append(loss.item())
            training.update(loss)

        return step

    train_both(make, compiled=AsAGraph())


def test_a_parameter_that_a_read_gives_back_is_still_state() -> None:
    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> None:
            if next(calls) > 0:
                training.model.first.bias.requires_grad_(not training.model.first.bias.requires_grad)
            training.update(training.model(x).mean())

        return step

    train_both(make, compiled=AsAGraph())


def test_a_generator_that_is_another_one_at_every_call_makes_no_path_of_its_own() -> None:
    """The sampler of every shuffling loader: nothing is compiled, or pieces that never run again."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            loss = training.model(x).mean()
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
            training.notes.append(order.tolist())
            training.update(loss)

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches >= CALLS - 2 >= len(compiled.pieces)


def test_a_backward_in_front_of_a_read_is_not_executed_again_when_python_goes_another_way() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            loss = training.model(x).square().mean()
            loss.backward(retain_graph=True)
            training.update(loss * (1 + loss.detach().numpy().item()))

        return step

    train_both(make, compiled=AsAGraph())


def test_a_read_inside_of_autocast() -> None:
    """As a metric of the logits in the block of the forward."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    opt, seen = torch.optim.SGD(model.parameters(), lr=0.1), []

    def step(x: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model[0](x)
            seen.append(hidden.max().item())
            out = model[1](hidden)
        backward_and_step(out.float().square().mean(), opt)

    live = ws.compile(step, backend="eager")
    for _ in range(3):
        live(torch.ones(2, 3))
    assert len(set(seen)) == 3


def written_in_front_of_a_block(layer: Any, x: Tensor, number: int) -> list[Tensor]:
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(layer(x))
        for _ in range((2 * number + len(found) - 1) % 3):  # the third call leaves a known way in the next block
            layer.weight.detach().mul_(0.99)
    return found


def written_in_another_block(layer: Any, x: Tensor, number: int) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        first = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        layer.weight.detach().mul_(0.5)
        return [first, layer(x)]


def written_in_the_block(layer: Any, x: Tensor, number: int) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        first = layer(x)
        with torch.no_grad():
            layer.weight.mul_(0.5)
        with torch.autocast("cpu", enabled=False):
            other = layer(x)
        return [first, other, layer(x)]


@pytest.mark.parametrize("goes_off", [False, True])
@pytest.mark.parametrize("forward", [written_in_front_of_a_block, written_in_another_block, written_in_the_block])
def test_autocast_casts_a_parameter_once_in_a_block(forward: Any, goes_off: bool) -> None:
    """Whoever writes to it meanwhile."""

    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> None:
            number = next(calls)
            found = forward(training.model.first, x, number)
            if goes_off and number > 3:
                found.append(found[0] * number)
            training.notes += [one.detach() for one in found]
            training.update(torch.stack([one.float().square().mean() for one in found[:2]]).sum())

        return step

    train_both(make, calls=8)
    train_by_stages(make, calls=6)


def test_a_backward_frees_what_it_has_saved_and_no_more() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            moved = -(training.model.last.weight + 1.0)  # nothing of which is saved
            moved.sum().backward()
            training.notes.append(moved.detach().sum().item())
            training.update(moved.mean())

        return step

    train_both(make, compiled=AsAGraph())


def test_what_one_call_gives_is_freed_together() -> None:
    recurrent = torch.nn.LSTM(4, 4)

    def make(training: Training) -> Step:
        rnn, held = copy.deepcopy(recurrent), []
        opt = torch.optim.SGD(rnn.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            out, hidden = rnn(x)
            out.sum().backward()
            opt.step()
            opt.zero_grad()
            held[:] = [hidden]
            training.notes.append([one.detach().clone() for one in rnn.parameters()])

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == CALLS - 1


def test_a_parameter_that_is_frozen_between_calls_has_no_gradient_to_give() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            training.opt.zero_grad()
            layer = training.model.first
            torch.nn.functional.linear(x, layer.weight, layer.bias).square().mean().backward()
            training.notes.append([None if p.grad is None else p.grad.sum() for p in training.model.parameters()])
            training.opt.step()

        return step

    def between(training: Training, call: int) -> None:
        if call in (3, 5, 6):
            training.model.last.bias.requires_grad_(not training.model.last.bias.requires_grad)

    train_both(make, between=between, calls=10)


@pytest.mark.parametrize("behind_forward", [False, True])
def test_whether_there_is_a_gradient_is_asked_at_every_call(behind_forward: bool) -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            found = training.model(x) if behind_forward else None
            training.notes.append([p.grad is None for p in training.model.parameters()])
            out = training.model(x) if found is None else found
            out.square().mean().backward()
            training.opt.step()

        return step

    def between(training: Training, call: int) -> None:
        if call in (3, 5, 6, 7):
            training.opt.zero_grad()

    compiled = Compiled()
    train_both(make, between=between, calls=12, compiled=compiled)
    assert compiled.launches >= 6


def test_a_parameter_of_another_shape_is_another_way() -> None:
    """Python looks at shapes of results that have not been computed yet."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = x @ training.model.first.weight.t()
            training.notes.append(out.shape)
            return out.detach()

        return step

    def between(training: Training, call: int) -> None:
        if call == 3:
            training.model.first.weight.data = torch.ones(2, 4)

    train_both(make, between=between)


SEEDS = {
    "a function": lambda generator: torch.manual_seed(50),
    "a method": lambda generator: generator.manual_seed(50),
    "a state": lambda generator: generator.set_state(torch.Generator().manual_seed(6).get_state()),
}


@pytest.mark.parametrize("how", SEEDS)
@pytest.mark.parametrize("own", [False, True])
def test_a_generator_that_is_set_behind_recorded_draws(how: str, own: bool) -> None:
    """The draws before it are of the old state, those after it of the new one, and so is what is left."""

    def make(training: Training) -> Step:
        mine = torch.Generator().manual_seed(3)

        def step(x: Tensor) -> Tensor:
            out = training.model(x + torch.rand(3, 4, generator=mine) * training.model.first.bias[:4])
            SEEDS[how](mine if own else torch.default_generator)
            noise = torch.rand(3, 1, generator=mine) + torch.rand(3, 1)
            training.notes.append(mine.get_state())
            return training.update((training.model(x) * noise + out).mean())

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches >= CALLS - 1


def test_who_asks_where_a_generator_stands_is_told_it_behind_recorded_draws() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            training.notes.append(torch.get_rng_state())
            with torch.random.fork_rng():
                torch.manual_seed(3)
            return training.update(out.mean())

        return step

    train_both(make)


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_what_is_recorded_runs_under_no_mode_of_the_line_that_asks(around: Any) -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            (out * 1.0).mean().backward()
            with around():
                training.notes.append(training.model(x).mean().item())
            scaled = out.detach() * 0.5
            with around():
                training.notes.append(out.sum().item())
            scaled.mul_(0.5)
            training.opt.step()
            training.opt.zero_grad()
            return scaled

        return step

    train_both(make, compiled=AsAGraph())


def test_a_value_that_is_asked_for_in_inference_mode() -> None:
    """Gradients that wait to be computed are none of inference tensors."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            loss = training.model(x).square().mean()
            loss.backward()
            with torch.inference_mode():
                training.notes.append(training.model(x).mean().item())
            training.opt.step()
            training.opt.zero_grad()
            return loss.detach()

        return step

    train_by_stages(make)


def test_an_output_that_retains_its_gradient_behind_a_read() -> None:
    """C++ holds it weakly from then on, so no record may stand for it."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            with torch.no_grad():
                training.notes.append(training.model(x).mean().item())
            out.retain_grad()
            if training.model.last.bias.sum() > 100:
                return out
            loss = training.update(out.square().mean())
            training.notes.append(out.grad)
            return loss.detach()

        return step

    train_by_stages(make)


@pytest.mark.parametrize("kept", ["array", "part"])
def test_an_array_of_a_forward_that_gets_its_graph_back_stays_on_its_memory(kept: str) -> None:
    """It is made before Python goes another way, where the forward runs once more."""

    def make(training: Training) -> Step:
        calls = itertools.count()

        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            loss = (out * 3.0).sin().mean()
            seen: Any = out.detach()[1:].numpy() if kept == "part" else out.detach().numpy()
            training.notes.append(str(seen))
            if next(calls) % 3 == 1:
                out.detach()[1].mul_(2.0)
            training.notes.append(str(seen))
            return training.update(loss)

        return step

    train_both(make, calls=9)


@pytest.mark.parametrize("held", [False, True])
def test_a_row_of_a_weight_that_is_written_without_gradients(held: bool) -> None:
    """Torch raises an error for `grad_fn` of such a view. Eager code does not ask for it."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            loss = training.update(training.model(x).mean())
            with torch.no_grad():
                row = training.model.first.weight[1]
                row.mul_(0.5)
                if held:
                    training.notes.append((row + 1).sum().item())
                    training.notes.append(training.model(row.expand(2, 4)).sum().item())
            training.notes.append(loss.item())

        return step

    train_both(make)
    train_by_stages(make)
