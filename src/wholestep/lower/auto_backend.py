"""Which backend a step gets: the one that was asked for, or the one that "auto" stands for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.fx as fx

from wholestep.config import Inductor as InductorOptions
from wholestep.cost.cost_model import CostModel
from wholestep.errors import InternalError
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.ir.segment import Compiled, Segment
from wholestep.lower.base import profitability
from wholestep.lower.base.eager_backend import EagerBackend
from wholestep.lower.base.protocol import Backend, ExecutionMode, Wait
from wholestep.lower.codecache import toolchain_hash
from wholestep.lower.inductor_backend import InductorBackend
from wholestep.lower.kernel_exchange import receives_kernels
from wholestep.passes.comm.wire_format import WireFormat
from wholestep.passes.pass_manager import Pass
from wholestep.runtime.distributed.blob_store import BlobStore
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from wholestep.lower.inductor import compile_fx, segment_compiler
else:
    compile_fx = lazy_import("wholestep.lower.inductor.compile_fx")
    segment_compiler = lazy_import("wholestep.lower.inductor.segment_compiler")

log = logging.getLogger("wholestep")

_COMPILED = b"inductor"


class AutoBackend(Backend):
    """Inductor where it can run and pays, else the eager backend: chosen at the first plan, the same on all ranks.

    On a GPU it pays: kernels are few there, and one CUDA graph launches all of them. On a CPU the calibration of the
    host says so (`wholestep.lower.base.profitability`); without one the step runs as it is.
    """

    def __init__(
        self,
        device: torch.device,
        cost: Callable[[], CostModel],
        objection: Callable[[str], str],
        blob_store: BlobStore | None = None,
    ) -> None:
        """`cost` gives what predictions are made from; `objection` takes why this rank objects to Inductor, if it does,
        and gives what the first one says that does. Both give the same on every rank. `blob_store` as for
        `InductorBackend`."""
        self._device, self._cost, self._objection, self._blob_store = device, cost, objection, blob_store
        self._chosen: EagerBackend | InductorBackend | None = None
        self._reason = ""

    @property
    def _backend(self) -> EagerBackend | InductorBackend:
        if self._chosen is None:
            raise InternalError("A backend was used before it was chosen, which happens when a step is planned.")
        return self._chosen

    @property
    def shares_kernels(self) -> bool:
        return self._backend.shares_kernels

    def prepare(self) -> None:
        if self._device.type == "cuda" and not receives_kernels(self._blob_store):  # it is known what will be chosen
            compile_fx.start_workers()
        elif self._chosen is not None:
            self._chosen.prepare()

    def passes(self, placed: Program) -> list[Pass]:
        if self._chosen is None:
            self._chosen = self._choose(placed)
            self._chosen.prepare()
        return self._chosen.passes(placed)

    def costs(self, cost: CostModel) -> CostModel:
        return cost if self._chosen is None else self._chosen.costs(cost)

    def wire_format(self, grad: fx.Node, group: str) -> WireFormat:
        return (self._chosen or EagerBackend()).wire_format(grad, group)

    def compile_segments(self, program: Program) -> Mapping[Segment, Compiled]:
        return self._backend.compile_segments(program)

    def lower(self, program: Program, wait: Wait | None = None) -> Step:
        return self._backend.lower(program, wait)

    def execution_mode(self, step: Step) -> ExecutionMode:
        mode = self._backend.execution_mode(step)
        return replace(mode, description=f"{mode.description} (auto: {self._reason})")

    def fingerprint(self) -> list[tuple[str, str]]:
        return [
            ("what speaks against compiling", segment_compiler.why_not(self._device)),
            *segment_compiler.fingerprint(self._device),
        ]

    def dump_kernels(self, program: Program) -> tuple[bytes | None, ...]:
        # The first entry says what was chosen.
        chosen = _COMPILED if isinstance(self._backend, InductorBackend) else b""
        return (chosen, *self._backend.dump_kernels(program))

    def load_kernels(self, program: Program, kernels: tuple[bytes | None, ...]) -> None:
        chosen, *rest = kernels
        if self._chosen is None:
            self._chosen = self._inductor() if chosen == _COMPILED else EagerBackend()
            self._reason = "as in the process that saved it"
        self._chosen.load_kernels(program, tuple(rest))

    def _inductor(self) -> InductorBackend:
        return InductorBackend(InductorOptions(), self._device, self._blob_store)

    def _choose(self, placed: Program) -> EagerBackend | InductorBackend:
        on_cpu = self._device.type == "cpu"
        if on_cpu and not self._cost().is_calibrated:
            self._reason = "this host is not calibrated; `wholestep calibrate` shows whether compiled kernels pay"
            return EagerBackend()
        cannot = segment_compiler.why_not(self._device)
        share = (
            profitability.saved_share(placed, self._cost(), compiles=segment_compiler.may_compile) if on_cpu else 1.0
        )
        gain = f"compiled kernels would take {share:.0%} off the computation"
        objection = self._objection(cannot or ("" if share >= profitability.ENOUGH else gain))
        if objection:
            self._reason = objection
            log.log(logging.WARNING if cannot else logging.INFO, "the step runs uncompiled: %s", objection)
            return EagerBackend()
        self._reason = f"{gain}, as predicted" if on_cpu else "there is a GPU"
        return self._inductor()


def backend_for(
    chosen: str | InductorOptions,
    device: torch.device,
    cost: Callable[[], CostModel],
    objection: Callable[[str], str],
    blob_store: BlobStore | None = None,
) -> Backend:
    """The backend that `compile` was asked for, on this device. The others are as for `AutoBackend`."""
    if chosen != "eager" and device.type == "cuda":
        # Before threads import parts of it: modules that import each other cannot be imported from two sides at once.
        importlib.import_module("wholestep.lower.inductor.segment_compiler")
        toolchain_hash.start()
    if isinstance(chosen, InductorOptions):
        return InductorBackend(chosen, device, blob_store)
    if chosen == "inductor":
        return InductorBackend(InductorOptions(), device, blob_store)
    return AutoBackend(device, cost, objection, blob_store) if chosen == "auto" else EagerBackend()
