"""Which backend a step gets: the one that was asked for, or the one that "auto" stands for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.fx as fx

from wholestep.config import Inductor as InductorOptions
from wholestep.cost.cost_model import CostModel
from wholestep.errors import InternalError
from wholestep.ir.printer import Step
from wholestep.ir.program import Program
from wholestep.lower.base import eager_backend, profitability
from wholestep.lower.codecache import toolchain_hash
from wholestep.lower.inductor_backend import Eager, Form, Inductor, finds
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


class Auto:
    """Inductor where it can run and pays, else the eager backend. Decided once, at the first plan, alike on all ranks.

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
        `Inductor`."""
        self._device, self._cost, self._objection, self._blob_store = device, cost, objection, blob_store
        self._chosen: Eager | Inductor | None = None
        self._why = ""

    @property
    def _backend(self) -> Eager | Inductor:
        if self._chosen is None:
            raise InternalError("A backend was used before it was chosen, which happens when a step is planned.")
        return self._chosen

    @property
    def shares_kernels(self) -> bool:
        """See `Eager.shares_kernels`."""
        return self._backend.shares_kernels

    def prepare(self) -> None:
        """See `Eager.prepare`. On a GPU it is known what will be chosen."""
        if self._device.type == "cuda" and not finds(self._blob_store):
            compile_fx.start_workers()
        elif self._chosen is not None:
            self._chosen.prepare()

    def passes(self, placed: Program) -> list[Pass]:
        """See `Eager.passes`."""
        if self._chosen is None:
            self._chosen = self._choose(placed)
            self._chosen.prepare()
        return self._chosen.passes(placed)

    def costs(self, cost: CostModel) -> CostModel:
        """See `Eager.costs`. Before anything is chosen they are those of nodes one by one."""
        return cost if self._chosen is None else self._chosen.costs(cost)

    def travels_as(self, grad: fx.Node, group: str) -> WireFormat:
        """See `Eager.travels_as`."""
        return (self._chosen or Eager()).travels_as(grad, group)

    def lower(self, program: Program, wait: eager_backend.Wait | None = None) -> Step:
        """See `Eager.lower`."""
        return self._backend.lower(program, wait)

    def form(self, step: Step) -> Form:
        """See `Eager.form`, and why it was chosen."""
        form = self._backend.form(step)
        return replace(form, told=f"{form.told} (auto: {self._why})")

    def _choose(self, placed: Program) -> Eager | Inductor:
        on_cpu = self._device.type == "cpu"
        if on_cpu and not self._cost().is_calibrated:
            self._why = "this host is not calibrated; `wholestep calibrate` shows whether compiled kernels pay"
            return Eager()
        cannot = segment_compiler.why_not(self._device)
        share = (
            profitability.saved_share(placed, self._cost(), compiles=segment_compiler.may_compile) if on_cpu else 1.0
        )
        gain = f"compiled kernels would take {share:.0%} off the computation"
        objection = self._objection(cannot or ("" if share >= profitability.ENOUGH else gain))
        if objection:
            self._why = objection
            log.log(logging.WARNING if cannot else logging.INFO, "the step runs uncompiled: %s", objection)
            return Eager()
        self._why = f"{gain}, as predicted" if on_cpu else "there is a GPU"
        return Inductor(InductorOptions(), self._device, self._blob_store)

    def marks(self) -> list[tuple[str, str]]:
        """See `Eager.marks`."""
        return [
            ("what speaks against compiling", segment_compiler.why_not(self._device)),
            *segment_compiler.marks(self._device),
        ]

    def kernels(self, program: Program) -> tuple[bytes | None, ...]:
        """See `Eager.kernels`. The first entry says what was chosen."""
        chosen = _COMPILED if isinstance(self._backend, Inductor) else b""
        return (chosen, *self._backend.kernels(program))

    def give(self, program: Program, kernels: tuple[bytes | None, ...]) -> None:
        """See `Eager.give`. The choice is that of the process that compiled."""
        chosen, *rest = kernels
        if self._chosen is None:
            compiled = chosen == _COMPILED
            self._chosen = Inductor(InductorOptions(), self._device, self._blob_store) if compiled else Eager()
            self._why = "as in the process that saved it"
        self._chosen.give(program, tuple(rest))


Backend = Eager | Inductor | Auto


def backend_for(
    chosen: str | InductorOptions,
    device: torch.device,
    cost: Callable[[], CostModel],
    objection: Callable[[str], str],
    blob_store: BlobStore | None = None,
) -> Backend:
    """The backend that `compile` was asked for, on this device. `cost`, `objection` and `blob_store` as for `Auto`."""
    if chosen != "eager" and device.type == "cuda":
        # Before threads import parts of it: modules that import each other cannot be imported from two sides at once.
        importlib.import_module("wholestep.lower.inductor.segment_compiler")
        toolchain_hash.begun()
    if isinstance(chosen, InductorOptions):
        return Inductor(chosen, device, blob_store)
    if chosen == "inductor":
        return Inductor(InductorOptions(), device, blob_store)
    return Auto(device, cost, objection, blob_store) if chosen == "auto" else Eager()
