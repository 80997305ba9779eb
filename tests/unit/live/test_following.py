"""A live step follows the path of an earlier call, and runs what it recorded as pieces."""

from __future__ import annotations

import copy
import logging
import random
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.live.both import CALLS, Compiled, Net, Step, Training, Unguarded, batch, train_both
from wholestep.errors import CaptureError
from wholestep.live.live_step import MAX_EAGER_CALLS, LiveStep
from wholestep.live.recording import observer
from wholestep.live.run import Run


def appends_the_loss(training: Training) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = training.model(x).square().mean()
        training.update(loss)
        training.notes.append(loss.item())
        return loss

    return step


def test_a_known_path_is_one_launch_and_executes_nothing() -> None:
    compiled = Compiled()
    live = train_both(appends_the_loss, compiled=compiled)
    first = live.stats.executed
    assert len(compiled.pieces) == 1
    assert compiled.launches == CALLS - 1
    assert first == len(live.pieces[0].path.records) + 1  # those of the first call alone, and its read


def test_a_piece_gives_only_what_somebody_holds() -> None:
    live = train_both(appends_the_loss, compiled=Compiled())
    assert [piece.spec.wanted for piece in live.pieces] == [((2, 0),)]  # the loss, of three


@pytest.mark.parametrize("other", [None, 1.5])
def test_what_comes_in_the_place_of_a_parameter_may_be_no_tensor(other: float | None) -> None:
    def make(training: Training) -> Step:
        training.model.scale = nn.Parameter(torch.full((8,), 2.0))

        def step(x: Tensor) -> Tensor:
            out, scale = training.model.first(x), training.model.scale
            loss = (F.layer_norm(out, (8,), scale) if other is None else torch.mul(out, scale)).square().mean()
            training.notes.append(loss.item())
            return training.update(loss)

        return step

    def between(training: Training, call: int) -> None:
        if call == 3:
            del training.model.scale
            training.model.scale = other

    train_both(make, between=between)


def test_a_value_that_is_asked_for_in_the_middle_ends_a_piece() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = training.model(x).abs().max().item()
            training.notes.append(scale)
            return training.update(training.model(x).mean() * 0.5)

        return step

    compiled = Compiled()
    live = train_both(make, compiled=compiled)
    assert len(compiled.pieces) == 2
    assert compiled.launches == 2 * (CALLS - 1)
    assert [read.name for read in live.reads] == ["item"]


def test_a_read_between_forward_and_backward_keeps_the_graph() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor | None:
            loss = training.model(x).mean()
            if loss.item() > 1e9:
                return None
            return training.update(loss)

        return step

    train_both(make)


def test_a_graph_that_outlives_the_call_is_eager() -> None:
    def make(training: Training) -> Step:
        held: list[Tensor] = []

        def step(x: Tensor) -> Tensor:
            held.append(training.model(x).mean())
            if len(held) == 2:
                torch.stack(held).sum().backward()
                training.opt.step()
                training.opt.zero_grad()
                held.clear()
            return held[-1].detach() if held else torch.zeros(())

        return step

    train_both(make, calls=8)


def test_another_path_is_executed_first_and_followed_later() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor, twice: bool) -> Tensor:
            loss = training.model(x).mean()
            return training.update(loss * 2 if twice else loss)

        return step

    compiled = Compiled()
    train_both(make, lambda call: (*batch(call), call % 2 == 1), compiled=compiled, calls=8)
    assert len(compiled.pieces) == 2
    assert compiled.launches == 6


def test_numbers_that_vary_are_arguments_of_one_piece() -> None:
    def make(training: Training) -> Step:
        return lambda x: training.update(training.model(x).mean() * random.random())

    compiled = Compiled()
    train_both(make, compiled=compiled, calls=10)
    assert len(compiled.pieces) == 1
    assert compiled.launches == 8


def test_tensors_made_inside_are_inputs() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            rows = torch.tensor([random.random() for _ in range(3)])
            return training.update((training.model(x).squeeze(1) * rows).mean())

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert len(compiled.pieces) == 1
    assert compiled.launches == CALLS - 1


def test_tensors_from_nowhere_are_inputs_once_they_have_varied() -> None:
    def make(training: Training) -> Step:
        source = deque(torch.randn(3, 4, generator=torch.Generator().manual_seed(n)) for n in range(10))
        return lambda x: training.update(training.model(source.popleft()).mean())

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == CALLS - 2


def test_handles_are_kept_by_whoever_has_them() -> None:
    def make(training: Training) -> Step:
        last: deque[Tensor] = deque(maxlen=2)

        def step(x: Tensor) -> Any:
            out = training.model(x)
            last.append(out.detach())
            training.update(out.mean())
            return {"mean": torch.stack(tuple(last)).mean(), "last": list(last)}

        return step

    train_both(make, calls=8)


def test_no_call_of_a_known_path_is_compared_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module, a backward, the step of an optimizer, a read: each is surely the next one."""
    slow: list[Any] = []
    by_the_long_way = Run._called

    def counted(self: Run, function: Any, *args: Any) -> Any:
        slow.append(function)
        return by_the_long_way(self, function, *args)

    monkeypatch.setattr(Run, "_called", counted)

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            slow.clear()
            loss = F.dropout(training.model(x), 0.5).square().mean()
            training.update(loss)
            training.notes.append(loss.item())
            return loss

        return step

    live = train_both(make, calls=6)
    assert live.stats.launches == 5
    assert slow == []


def test_a_write_to_what_a_recorded_call_reads_comes_behind_it() -> None:
    def make(training: Training) -> Step:
        buffer = torch.ones(3, 4)

        def step(x: Tensor) -> Tensor:
            loss = training.model(x * buffer).mean() + training.model(buffer).mean()
            loss.backward()
            buffer.add_(x)  # no parameter has a part in it
            training.opt.step()
            training.opt.zero_grad()
            return loss

        return step

    train_both(make)


def test_what_is_no_piece_is_executed_and_given_up() -> None:
    def refuse(function: Step, number: int) -> Step:
        def run(*args: Any) -> Any:
            raise CaptureError("not this one")

        return Unguarded(run)

    live = train_both(appends_the_loss, compiled=refuse, calls=MAX_EAGER_CALLS + 4)
    assert live.stats.reasons == {"not this one": MAX_EAGER_CALLS - 1}
    assert not live.is_recorded


def test_an_error_of_the_step_comes_behind_what_stood_before_it() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            training.update(training.model(x).mean())
            training.notes.append("raises")
            raise ValueError("no more")

        def caught(x: Tensor) -> str:
            try:
                step(x)
            except ValueError as error:
                return str(error)
            return ""

        return caught

    train_both(make)


def test_an_error_leaves_what_was_recorded_done() -> None:
    def step(training: Training, x: Tensor) -> None:
        training.update(training.model(x).mean())
        raise ValueError("no more")

    eager, live = Training(), Training()
    live_step = LiveStep(lambda x: step(live, x), "step", "", Compiled())
    for call in range(4):
        for run in (lambda x: step(eager, x), lambda x: live_step((x,), {})):
            torch.manual_seed(call)
            with pytest.raises(ValueError, match="no more"):
                run(*batch(call))
    assert all(map(torch.equal, eager.model.state_dict().values(), live.model.state_dict().values()))


def test_the_text_of_a_result_is_that_of_eager_code() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> str:
            loss = training.model(x).mean()
            training.update(loss)
            return str(loss) + str(loss.requires_grad)

        return step

    train_both(make)


def test_masks_of_data_are_no_reads_of_the_step() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            kept = x[x[:, 0] > -9]
            return training.update(training.model(kept).mean())

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == CALLS - 1


def test_a_size_that_is_data_is_read() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            return training.update(out[out > -9].mean() + F.mse_loss(out, x[:, :1]))

        return step

    train_both(make)


def test_a_model_that_is_evaluated_inside() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            model: Net = training.model
            model.eval()
            with torch.no_grad():
                training.notes.append(float(model(x).mean()))
            model.train()
            return training.update(model(x).mean())

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == 2 * (CALLS - 1)


@torch.library.custom_op("wholestep_tests::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    """An operator of which nobody knows what it gives before it has run."""
    return x[x > 0].clone()


@pytest.mark.parametrize("chosen", [lambda out: out[out > 0], positive], ids=["mask", "operator"])
def test_a_size_that_is_another_one_at_every_call(chosen: Step) -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            with torch.no_grad():
                training.notes.append(len(chosen(out)))
            return training.update(out.mean())

        return step

    live = train_both(make, calls=8)
    assert live.stats.calls == 8


def test_a_call_in_another_mode_is_another_call() -> None:
    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> Tensor:
            with torch.set_grad_enabled(next(calls) % 3 != 2):
                scaled = training.model.last.weight * 2
            loss = (training.model(x) * scaled).mean()
            training.notes.append(scaled.requires_grad)
            return training.update(loss)

        return step

    train_both(make, calls=8)


def test_an_update_by_hand_is_a_piece() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            loss = training.model(x).mean()
            loss.backward()
            with torch.no_grad():
                for param in training.model.parameters():
                    param.sub_(0.1 * param.grad)  # which gives the parameter
                    param.grad = None
            training.notes.append(loss.item())

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == CALLS - 1


def test_wrong_arguments_of_one_call_do_not_make_an_operator_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of shapes is of that call; steps after it in the same process are pieces."""
    monkeypatch.setattr(observer, "_known_shapes", {})
    training = Training()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        LiveStep(appends_the_loss(training), "step", "", Compiled())((torch.ones(3, 5),), {})
    assert train_both(appends_the_loss).stats.launches == CALLS - 1


def test_what_runs_on_no_fakes_is_no_error_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """``copy.deepcopy`` sets a storage, which torch reports with a traceback when a fake is asked for it."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            loss = training.update(training.model(x).square().mean())
            training.notes.append(loss.item())
            training.opt.load_state_dict(copy.deepcopy(training.opt.state_dict()))
            return loss

        return step

    reported: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", reported.append)
    monkeypatch.setattr(observer, "_known_shapes", {})
    of_fakes = logging.getLogger(FakeTensorMode.__module__)
    of_fakes.addHandler(handler)
    try:
        train_both(make)
    finally:
        of_fakes.removeHandler(handler)
    assert reported == []
    assert not of_fakes.disabled


def scaled_by_their_norm(training: Training) -> Step:
    """Asks for the same gradients twice, and writes to those that it was given first."""

    def step(x: Tensor) -> Tensor:
        loss, params = training.model(x).square().mean(), list(training.model.parameters())
        loss.backward()
        grads = [p.grad for p in params]
        norm = sum(p.grad.norm() for p in params if p.grad is not None)
        training.notes.append([p.grad is grad for p, grad in zip(params, grads, strict=True)])
        for grad in grads:
            assert grad is not None
            grad.mul_(1 / (1 + norm))
        training.opt.step()
        training.opt.zero_grad()
        return loss.detach()

    return step


def test_a_gradient_that_is_asked_for_twice_is_one_object() -> None:
    compiled = Compiled()
    live = train_both(scaled_by_their_norm, compiled=compiled)
    assert len(compiled.pieces) == 1
    assert compiled.launches == CALLS - 1
    assert live.stats.executed == len(live.pieces[0].path.records)  # the first call
