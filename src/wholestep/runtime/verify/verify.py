"""verify(): a step as the ranks of a cluster would run it, on virtual ranks, against what it should be.

Note: three runs
    *optimised*: the scheduled program, as every rank would run it.   *unoptimised*: the placed program, one collective
    per gradient.   *eager*: the user's own function on the whole batch. All three start from the same state and go
    through the same batches; between steps the numbers of all parameter groups change, so that one which was frozen
    shows. Whatever changes of the user's is put back (`wholestep.runtime.verify.state_backup`).

Note: who decides what the next call looks like
    The first call may create optimizer state, or leave gradients, and then the second is another graph. The user's
    objects take on what rank 0 of the unoptimised run leaves, and the guards of the capture decide, as in a real call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.fx as fx

from wholestep.capture.bind.binding import EntryGrad, GroupNumber
from wholestep.capture.bind.captured import Captured
from wholestep.capture.python import tree_util
from wholestep.capture.reach import reachability
from wholestep.capture.reach import train_state as stating
from wholestep.capture.scalars.hyperparameters import Hyperparameter
from wholestep.config import DDP, Strategy
from wholestep.errors import ConfigError, VerificationError
from wholestep.ir.program import InputKind, MeshAxis, Output, OutputKind, Program
from wholestep.passes.comm.bucketing import choose_locally
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.place.shard_inputs import shard_inputs
from wholestep.place.strategies import place
from wholestep.runtime.compression_state import CompressionState
from wholestep.runtime.verify.eager_reference import NAME as WHOLE
from wholestep.runtime.verify.eager_reference import (
    GradientObserver,
    StepRecord,
    VirtualRun,
    compare_with_eager,
    copied,
)
from wholestep.runtime.verify.first_divergence import Comparer, Recorder, difference_at
from wholestep.runtime.verify.kernel_check import KernelCheck, Kernels
from wholestep.runtime.verify.rank_shards import RankShards
from wholestep.runtime.verify.rank_simulator import RankGenerators, rank_blocks, run
from wholestep.runtime.verify.rank_state import Batch, RankState, copies_of
from wholestep.runtime.verify.state_backup import StateBackup, overwrite
from wholestep.runtime.verify.tolerance import Gap, gap
from wholestep.runtime.verify.verification import Check, Difference, Outcome, Verification

FACTOR = 0.7
"""By what the numbers of the parameter groups are multiplied from one step to the next."""

_NUMBERS = f"Between steps rows moved on by one, and the numbers of parameter groups were multiplied by {FACTOR}."
_ORDER, _SAME, _EQUAL = "order of collectives", "optimised = unoptimised", "ranks end equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The step to verify, and how it is compiled."""

    name: str
    step: Callable[..., Any]
    capture: Callable[[tuple[Any, ...], dict[str, Any]], Captured]
    passes: Callable[..., list[Pass]]
    """The passes for a captured program, while compressed communication is where the CommState says; the functions of
    `wholestep.api.stages.Stages.passes`."""
    kernels: Kernels | None
    """What is compiled; None where that needs other ranks."""
    strategy: Strategy
    comm_state: dict[str, Any]
    """Where compressed communication of the step stands, from `CompressionState.state_dict`."""
    axes: tuple[MeshAxis, ...]
    """The axes of virtual ranks: first the one that the strategy cuts tensors over."""

    @property
    def num_ranks(self) -> int:
        """The number of virtual ranks."""
        return prod(axis.size for axis in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The number of steps and the checks; virtual ranks are those of the subject's axes."""

    num_steps: int
    whole_batch: bool
    """Whether the eager step on the whole batch is a reference: the loss is a mean over independent rows."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The step for one signature, as every rank runs it."""

    captured: Captured
    placed: Program
    scheduled: Program
    compresses: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepRun:
    """One step of all virtual ranks under both programs: the flat inputs, and the results, by rank."""

    plan: _Plan
    number: int
    """From 0."""
    start: RankGenerators
    """The random numbers of the ranks, where they stood at the beginning."""
    wanted_inputs: list[list[Any]]
    wanted: list[tuple[Any, ...]]
    inputs: list[list[Any]]
    results: list[tuple[Any, ...]]


def verify(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any], trial: Trial) -> Verification:
    """Runs a step on virtual ranks and compares. The user's objects are bitwise as before, whatever happens.

    Raises:
        ConfigError: the batch does not divide, or the step communicates over groups that virtual ranks cannot have.
        CaptureError: the step cannot become one graph.
        InternalError: a pass has left a program that breaks a rule of its stage.
    """
    if subject.num_ranks < 2 or trial.num_steps < 1:
        raise ConfigError(
            f"verify(ranks=..., steps=...) wants at least 2 virtual ranks and 1 step, got {subject.num_ranks} and "
            f"{trial.num_steps}."
        )
    found = reachability.find_reachable(subject.step, args, kwargs)
    state = stating.collect(found)
    if names := stating.parallel_parameters(found, state):
        raise ConfigError(
            f"verify() divides the batch among virtual ranks. {names[0]} is a DTensor of parallelize_module, and such "
            f"modules divide the work on one batch among real ranks. Compare with the eager step: call each on a model "
            f"of its own, and compare their parameters."
        )
    batch = Batch(args, kwargs, state, subject.num_ranks)
    saved = StateBackup(found, state)
    try:
        virtual = _VirtualRanks(subject, batch)
        checks = virtual.run(trial.num_steps)
        saved.restore()
        if trial.whole_batch:
            whole = compare_with_eager(subject.step, batch, state, virtual.ranks)
        else:
            whole = Check(name=WHOLE, outcome=Outcome.SKIPPED, text="left out with whole_batch=False")
    finally:
        saved.restore()
    return Verification(
        step=subject.name, num_ranks=subject.num_ranks, num_steps=virtual.num_steps, notes=(batch.note(), _NUMBERS),
        checks=(*checks, whole, virtual.kernels.check),
    )  # fmt: skip


class _VirtualRanks:
    """The optimised and the unoptimised run, step by step side by side."""

    def __init__(self, subject: Subject, batch: Batch) -> None:
        self._subject, self._batch = subject, batch
        self._ranks = range(subject.num_ranks)
        self._compression = _comm_states(subject)
        self._shards = RankShards(subject.axes[0], subject.num_ranks)
        self._optimised, self._unoptimised = RankState(self._shards, self._compression), RankState(self._shards)
        self._plans: list[_Plan] = []
        self._hypers: dict[tuple[int, str, int | None], Hyperparameter] = {}
        self._num_rounded = 0  # values that differ as rounding explains
        self._streams = RankGenerators([(torch.initial_seed() + rank) % 2**63 for rank in self._ranks], batch.device)
        self._optimised_streams = self._streams.copy()
        self.num_steps = 0
        self.kernels = KernelCheck("other ranks are there" if subject.kernels is None else "nothing is compiled")
        self._step_records: list[
            tuple[StepRecord, Callable[[], None]]
        ] = []  # of rank 0, unoptimised; and what came then

    @property
    def ranks(self) -> VirtualRun:
        """The run so far, for the comparison with the eager step."""
        programs = [plan.captured.program for plan in self._plans]
        return VirtualRun(
            strategy=self._subject.strategy,
            step_records=self._step_records,
            programs=programs,
            draws_random=self._streams.have_advanced,
        )

    def run(self, num_steps: int) -> list[Check]:
        """The checks of virtual ranks, over `num_steps` steps or up to the first fault."""
        order = same = equal = None
        while self.num_steps < num_steps and not (order or same or equal):
            number = self.num_steps
            self.num_steps += 1
            num_plans = len(self._plans)
            plan = self._plan_for(self._batch.of_rank(0, number))
            try:
                if len(self._plans) > num_plans:
                    self._run_kernels(plan, number)
                step_run = self._step(plan, number)
            except VerificationError as error:
                order = Check(name=_ORDER, outcome=Outcome.FAILED, text=f"step {number + 1}: {error}")
                continue
            same = self._compare(step_run)
            self._apply(step_run)
            equal = self._unequal(step_run)
            self._step_records[-1][1]()
        finished = Outcome.PASSED if self._step_records else Outcome.SKIPPED
        return [
            order or Check(name=_ORDER, outcome=Outcome.PASSED, text="no value is used before the wait for it"),
            same or self._same(finished),
            equal or Check(name=_EQUAL, outcome=finished, text="the parameters, after every step"),
        ]

    def _run_kernels(self, plan: _Plan, number: int) -> None:
        """Runs a step of its own, whose segments compare what they are compiled to with their operators."""
        kernels = self._subject.kernels
        if kernels is None:
            return
        passes = self._subject.passes(plan.captured, None, choose_locally, kernels.passes(plan.placed))
        program = run_passes(plan.placed, passes)
        self.kernels.watch(program, kernels.compile(program), number + 1)
        inputs = self._inputs(RankState(self._shards), program, plan, number)
        run(program, inputs, self._blocks(program), self._streams.copy())

    def _same(self, finished: Outcome) -> Check:
        if any(plan.compresses for plan in self._plans):
            text = "compression changes the gradients on purpose"
            return Check(name=_SAME, outcome=Outcome.SKIPPED, text=text)
        text = "every output of every rank has the same bits"
        if self._num_rounded:
            text = f"{self._num_rounded} outputs differ as another order of additions explains, no other bits differ"
        return Check(name=_SAME, outcome=finished, text=text)

    def _plan_for(self, leaves: list[Any]) -> _Plan:
        """The plan whose guards hold for a call with these arguments, captured if there is none yet."""
        subject, spec = self._subject, self._batch.spec
        comm = self._compression[0] if self._compression else None
        compresses = comm is not None and comm.started
        for plan in self._plans:
            if plan.compresses is compresses and plan.captured.guards.why_not(leaves, spec) is None:
                return plan
        args, kwargs = tree_util.unflatten(leaves, spec)
        captured = subject.capture(args, kwargs)
        if any(record.shard is not None for record in captured.program.inputs):
            raise ConfigError(
                "verify() shards whole tensors for its virtual ranks, and those of this step are sharded over real "
                "ranks already. Verify before the first call, or in one process without torchrun."
            )
        sharded = shard_inputs(captured.program, subject.strategy, subject.axes)
        placed = place(sharded, subject.strategy, subject.axes)
        plan = _Plan(captured, placed, run_passes(placed, subject.passes(captured, comm, choose_locally)), compresses)
        hypers = [one.hyper for _, one in captured.binding.inputs_of(GroupNumber)]
        self._hypers |= {(id(one.group), one.key, one.position): one for one in hypers}
        self._plans.append(plan)
        return plan

    def _step(self, plan: _Plan, number: int) -> _StepRun:
        start, step_record = self._streams.copy(), StepRecord()
        wanted_inputs = self._inputs(self._unoptimised, plan.placed, plan, number)
        notes = GradientObserver(step_record, plan.placed, self._subject.axes[-1].group, self._shards)
        wanted = run(plan.placed, wanted_inputs, self._blocks(plan.placed), self._streams, notes)
        inputs = self._inputs(self._optimised, plan.scheduled, plan, number)
        with self._optimised.call():
            results = run(plan.scheduled, inputs, self._blocks(plan.scheduled), self._optimised_streams)
        self._step_records.append((step_record, self._hyperparameter_change()))
        return _StepRun(
            plan=plan, number=number, start=start, wanted_inputs=wanted_inputs, wanted=wanted, inputs=inputs,
            results=results,
        )  # fmt: skip

    def _inputs(self, side: RankState, program: Program, plan: _Plan, number: int) -> list[list[Any]]:
        return side.inputs(program, plan.captured, [self._batch.of_rank(rank, number) for rank in self._ranks])

    def _blocks(self, program: Program) -> dict[str, list[list[int]]]:
        return {axis.group: rank_blocks(axis, len(self._ranks)) for axis in program.mesh}

    def _hyperparameter_change(self) -> Callable[[], None]:
        """Changes the numbers that the programs so far read from parameter groups."""
        hypers = list(self._hypers.values())

        def change() -> None:
            for one in hypers:
                one.write(FACTOR * one.read())

        return change

    def _compare(self, step_run: _StepRun) -> Check | None:
        """The first output of a rank that is not as it should be. None if there is none."""
        if step_run.plan.compresses:
            return None
        num_rounded = 0
        for output, rank, one in _gaps(step_run, self._shards):
            if one.is_fault:
                found = self._first_divergence(step_run, output, rank, one)
                text = f"{output.kind.value} {output.name} of rank {rank} differs after step {step_run.number + 1}"
                return Check(name=_SAME, outcome=Outcome.FAILED, text=text, difference=found)
            num_rounded += 1
        self._num_rounded += num_rounded
        return None

    def _first_divergence(self, step_run: _StepRun, output: Output, rank: int, one: Gap) -> Difference:
        """Runs the step once more under both programs from one state, and follows the values node by node."""
        plan, where = step_run.plan, (step_run.number + 1, rank)
        inputs = [copies_of(flat) for flat in step_run.wanted_inputs]
        recorder = Recorder(rank)
        comparer = Comparer(recorder)
        run(plan.placed, step_run.wanted_inputs, self._blocks(plan.placed), step_run.start.copy(), recorder)
        run(plan.scheduled, inputs, self._blocks(plan.scheduled), step_run.start.copy(), comparer)
        result = plan.placed.results[plan.placed.outputs.index(output)]
        node = result if isinstance(result, fx.Node) else None
        return comparer.difference(where) or difference_at(node, one, where, name=output.name)

    def _apply(self, step_run: _StepRun) -> None:
        """All sides, and the user's objects, are what the step has left."""
        plan, captured, (step_record, _) = step_run.plan, step_run.plan.captured, self._step_records[-1]
        program, binding = captured.program, captured.binding
        step_record.old = self._params(step_run)
        entry_grads = {index: one.param.grad for index, one in binding.inputs_of(EntryGrad)}
        results = zip(plan.placed.outputs, zip(*step_run.wanted, strict=True), strict=True)
        whole = [self._shards.whole(values, output.shard) for output, values in results]
        binding.finish((*whole, *binding.entry_grads()))
        self._unoptimised.keep_results(plan.placed, captured, step_run.wanted_inputs, step_run.wanted)
        self._optimised.keep_results(plan.scheduled, captured, step_run.inputs, step_run.results)
        if self._num_rounded:
            self._optimised.copy_from(self._unoptimised)  # so that rounding does not grow over the steps
        step_record.new = self._params(step_run)
        for output in program.outputs:
            if output.kind is OutputKind.WRITE and output.target is not None:
                live = entry_grads.get(output.target, binding.tensors[output.target])
                if isinstance(live, torch.Tensor):
                    overwrite(live, self._whole_input(step_run, output.target))

    def _params(self, step_run: _StepRun) -> dict[str, torch.Tensor]:
        """Copies of the parameters of the unoptimised run, by name."""
        records = enumerate(step_run.plan.placed.inputs)
        found = [(index, record.name) for index, record in records if record.kind is InputKind.PARAM]
        return {name: copied(self._whole_input(step_run, index)) for index, name in found}

    def _whole_input(self, step_run: _StepRun, index: int) -> torch.Tensor:
        """An input of the unoptimised run as the first group of ranks has it."""
        values = [flat[index] for flat in step_run.wanted_inputs]
        found: torch.Tensor = self._shards.whole(values, step_run.plan.placed.inputs[index].shard)
        return found

    def _unequal(self, step_run: _StepRun) -> Check | None:
        """The first parameter that a rank holds other values of than the first rank that should hold the same ones."""
        ignored = self._subject.strategy.ignore
        for index, record in enumerate(step_run.plan.captured.program.inputs):
            if record.kind is not InputKind.PARAM or record.name in ignored:
                continue
            live = step_run.plan.captured.binding.tensors[index]
            assert isinstance(live, torch.Tensor)  # a parameter
            for rank in self._ranks[1:]:
                first = self._shards.first_alike(rank, self._optimised.spec_of(live))
                one = gap(self._optimised.of_rank(rank, live), self._optimised.of_rank(first, live))
                if one is not None:
                    where = (step_run.number + 1, rank)
                    text = f"rank {rank} holds other values of {record.name} than rank {first} after step {where[0]}"
                    found = difference_at(None, one, where, name=record.name, op="parameter")
                    return Check(name=_EQUAL, outcome=Outcome.FAILED, text=text, difference=found)
        return None


def _comm_states(subject: Subject) -> list[CompressionState]:
    """The state of compressed communication on each rank; none without compression."""
    how = subject.strategy.compress if isinstance(subject.strategy, DDP) else None
    comms = [CompressionState(how) for _ in range(subject.num_ranks)] if how is not None else []
    for comm in comms:
        comm.load_state_dict(subject.comm_state)
    return comms


def _gaps(step_run: _StepRun, shards: RankShards) -> Iterator[tuple[Output, int, Gap]]:
    """Every output, rank by rank, that is not bitwise what the unoptimised program gives. Padding is left out."""
    placed, scheduled = step_run.plan.placed, step_run.plan.scheduled
    # Passes may add what communication remembers; the outputs of the step itself stay, in their order.
    places = [index for index, output in enumerate(scheduled.outputs) if not _is_memory(scheduled, output)]
    for index, (output, other) in enumerate(zip(placed.outputs, places, strict=True)):
        target = scheduled.outputs[other].target
        for rank, wanted in enumerate(step_run.wanted):
            got, old, spec = step_run.results[rank][other], None, output.shard
            if output.kind is OutputKind.WRITE:
                assert isinstance(target, int)  # by the spec of a WRITE
                assert isinstance(output.target, int)
                got, old = step_run.inputs[rank][target], step_run.wanted_inputs[rank][output.target]
                spec = placed.inputs[output.target].shard
            one = gap(*(shards.valid(value, spec, rank) for value in (got, wanted[index], old)))
            if one is not None:
                yield output, rank, one


def _is_memory(program: Program, output: Output) -> bool:
    return output.target is not None and program.inputs[output.target].kind is InputKind.COMM
