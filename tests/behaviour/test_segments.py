"""Steps whose nodes run in segments, as a backend that compiles them forms them, but node by node: the bits of eager.

A part of the cases of this folder: what touches numbers, writes to inputs, memory, randomness, and results.
"""

from __future__ import annotations

from functools import partial

import pytest

import wholestep.api.stages
from tests.behaviour.cases import OPTIM_CASES, STEP_CASES
from tests.behaviour.harness import Run, check
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.ir.segment import Segment
from wholestep.lower.base import eager_backend
from wholestep.lower.base.eager_backend import EagerBackend
from wholestep.lower.base.protocol import Wait
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.pass_manager import Pass
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars

CASES = {name: (STEP_CASES | OPTIM_CASES)[name] for name in (
    "backward_and_step", "zero_grad_to_zeros_at_end", "gradients_never_zeroed", "accumulation", "gradient_penalty",
    "two_updates_in_one_step", "gan", "returns_its_input", "returns_a_parameter", "returns_views", "returns_item",
    "returns_twice", "evaluation_no_grad", "clip_norm", "clip_value_single_tensor", "weight_ema",
    "input_written_in_the_step",
    "loose_tensor_written", "tied_weights", "unused_parameters_adam", "batch_norm_called_twice", "dropout",
    "recurrent_lstm", "transformer_layer_with_dropout", "bf16_autocast", "mixed_dtypes", "complex_parameters",
    "zero_dimensional_parameter", "empty_batch", "not_a_number", "channels_last", "custom_operator_that_mutates",
    "optimizer_in_backward", "checkpoint_dropout_reentrant", "rate_set_by_hand", "parameter_data_replaced",
    "sgd_nesterov_foreach", "adamw_amsgrad_single", "adamw_fused", "nadam_decoupled_foreach", "radam_single",
    "adafactor_foreach", "rate_as_tensor", "schedule_one_cycle_adamw",
)}  # fmt: skip


class Segmented(EagerBackend):
    """Forms segments and packs numbers as Inductor's backend does; runs them as they are."""

    name = "segments"

    def __init__(self) -> None:
        self.num_segments = 0

    def passes(self, placed: Program) -> list[Pass]:
        pack = partial(pack_scalars, reads=segment_compiler.reads_packed)
        return [pack, partial(form_segments, compiles=segment_compiler.compiles)]

    def lower(self, program: Program, wait: Wait | None = None) -> Step:
        self.num_segments += sum(isinstance(node.target, Segment) for node in program.graph.nodes)
        return eager_backend.lower(program, wait=wait)


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Segmented()
    monkeypatch.setattr(wholestep.api.stages, "backend_for", lambda *chosen: backend)
    complaints = check(CASES[name], Run())
    assert not complaints, "\n".join(complaints)
    assert backend.num_segments
