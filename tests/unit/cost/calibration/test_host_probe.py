"""What a call costs the host: measured in a program like those that run, a line at a time."""

import pytest
import torch

from wholestep.cost.calibration import host_probe
from wholestep.cost.flops import Kind
from wholestep.ir.printer import Rendered


def test_calls_of_every_kind_are_measured_and_more_work_costs_more() -> None:
    for _ in range(3):  # a core that others use as well may be taken away in any line
        with torch.no_grad():
            calls_us, listed_us = host_probe.probe_host(torch.device("cpu"))
        rising = [0, *(calls_us[kind] for kind in ("number", "view", "convolution", "convolution_backward"))]
        if rising == sorted({*rising}):
            break
    assert calls_us.keys() == set(Kind)
    assert rising == sorted({*rising}), calls_us
    assert 0 < listed_us < calls_us["convolution"]


def test_a_line_takes_from_its_second_look_at_the_clock_to_the_next_less_what_a_look_takes() -> None:
    assert host_probe._between_us([0, 10, 1010, 1030, 1035, 1040]) == pytest.approx([0.99, 0.0])


def test_what_is_timed_is_each_line_of_a_node_with_what_it_deletes() -> None:
    text = "def step(inputs):\n    (x,) = inputs\n    a = f(x)\n    del x\n    b = g(a)\n    return ()\n"
    timed = host_probe._ticking(Rendered(text=text, namespace={}, nodes={3: None, 5: None}))  # type: ignore[dict-item]
    look = ["    tick(clock())"] * 2
    assert timed.splitlines() == [
        "def step(inputs):", "    (x,) = inputs", *look, "    a = f(x)", "    del x", *look, "    b = g(a)",
        *look, "    return ()",
    ]  # fmt: skip
