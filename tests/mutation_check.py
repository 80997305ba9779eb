"""Breaks wholestep on purpose, in a copy, and checks that the tests that should notice do.

    python tests/mutation_check.py              # all mutations, more than an hour
    python tests/mutation_check.py --workers 16 # so many at the same time, a process or more each
    python tests/mutation_check.py --only hyper_parameters_baked guards_off
    python tests/mutation_check.py --list

Exit status 1 if a mutation survives, or if the same tests are not green on the unbroken copy.
A mutation is a replacement of text that must occur exactly once; when the code moves on, this script says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutations import Mutation
from mutations.capture import CAPTURE_MUTATIONS
from mutations.live import LIVE_MUTATIONS
from mutations.sharding import SHARDING_MUTATIONS
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 240
TESTS_FAILED = 1
"""pytest's exit status when tests ran and some failed; others mean that nothing was tested."""

RANKS = "tests/ranks/test_behaviour.py::test_equals_eager_ddp"
OPTIM = "tests/behaviour/test_optim.py::test_equals_eager"
CLASSES = (
    "tests/unit/capture/python/test_class_attributes.py::test_a_change_is_one_retrace_and_none_when_it_is_set_back"
)
THREADS = "tests/unit/capture/tracing/test_threads.py"
GUARDS = "tests/unit/capture/guards/test_guards.py::test_a_change_is_seen_and_named"
ACCESS = "tests/unit/capture/python/test_attribute_access.py"
STEPS = "tests/behaviour/test_steps.py::test_equals_eager"
EFFECTS = "tests/unit/capture/effects/test_side_effects.py"
WRITES = "tests/unit/capture/effects/test_python_writes.py"
LATE = "tests/unit/live/test_late_reading.py"


MUTATIONS = (
    *CAPTURE_MUTATIONS,
    *LIVE_MUTATIONS,
    *SHARDING_MUTATIONS,
    Mutation(
        name="attributes_not_observed",
        what="nobody looks at attributes that a step comes to by names which no code has",
        file="capture/python/attribute_access.py",
        old="        if one is None or one.names is None:",
        new="        if True:",
        tests=(f"{ACCESS}::test_what_moves_between_calls_is_read_at_every_call[vars]",),
    ),
    Mutation(
        name="no_room_for_frames",
        what="a trace asks the system for memory wherever its calls cross from one chunk of frames into the next",
        file="api/dispatch.py",
        old="    @with_frame_room\n",
        new="",
        tests=("tests/unit/util/test_frame_room.py::test_a_first_call_has_it[0]",),
    ),
    Mutation(
        name="writes_not_observed",
        what="nobody looks at attributes that a step writes under names which no code has",
        file="capture/python/attribute_access.py",
        old='"__setattr__": self._write, ',
        new="",
        tests=(f"{ACCESS}::test_what_is_written_under_a_computed_name_is_seen_and_undone",),
    ),
    Mutation(
        name="hidden_things_not_refused",
        what="a step may take from iterators and read clocks that nobody can look at",
        file="capture/capture.py",
        old="        refuse_hidden(context.reachable.hidden, context.reachable.codes)\n",
        new="",
        tests=(f"{ACCESS}::test_what_nobody_can_see_is_refused_before_anything_is_taken[zip]",),
    ),
    Mutation(
        name="caches_keep_traced_tensors",
        what="lru_cache keeps what a function gave while a step was traced",
        file="capture/effects/side_effects.py",
        old="            if function.cache_info().currsize != size:",
        new="            if False:",
        tests=(f"{ACCESS}::test_what_nobody_can_see_is_refused_before_anything_is_taken[lru_cache]",),
    ),
    Mutation(
        name="order_of_keys_not_guarded",
        what="a dict whose keys stand in another order counts as the same",
        file="capture/guards/state_guards.py",
        old="            if snapshot.reordered():",
        new="            if False:",
        tests=(f"{ACCESS}::test_what_moves_between_calls_is_read_at_every_call[the order of a dict]",),
    ),
    Mutation(
        name="conditions_on_rates_remembered",
        what="a condition on a rate is not looked at again when the rate has changed",
        file="capture/guards/value_guards.py",
        old="        if bits is not None and bits in self._known:",
        new="        if bits is not None and self._known:",
        tests=(
            "tests/unit/capture/scalars/test_host_scalars.py::"
            "test_a_flip_is_one_retrace_that_names_the_condition_and_the_old_graph_is_kept",
        ),
    ),
    Mutation(
        name="environment_not_guarded",
        what="variables of the environment that a step reads are constants of its trace",
        file="capture/bind/make_guards.py",
        old="    if spec.reads.environment:",
        new="    if False:",
        tests=(f"{ACCESS}::test_what_moves_between_calls_is_read_at_every_call[the environment]",),
    ),
    Mutation(
        name="owners_by_name",
        what="a class counts as a library's by what the name of its module begins with",
        file="capture/python/code_owner.py",
        old="    return owner_of_module(str(kind.__module__))",
        new='    names = {"torch": Owner.TORCH, "threading": Owner.PYTHON}\n'
        "    found = [one for name, one in names.items() if kind.__module__.startswith(name)]\n"
        "    return found[0] if found else owner_of_module(str(kind.__module__))",
        tests=("tests/unit/capture/python/test_code_owner.py::test_a_name_that_begins_like_a_librarys_is_not_its",),
    ),
    Mutation(
        name="second_run_not_undone",
        what="what only the second run of a capture changed in Python stays",
        file="capture/capture.py",
        old="        outcome.effects.restore()\n",
        new="        pass\n",
        tests=(f"{STEPS}[scale_in_every_second_call]",),
        says="differ",
    ),
    Mutation(
        name="runs_compared_by_their_graphs",
        what="two runs of a capture count as alike whatever they return and leave",
        file="capture/capture.py",
        old="_outline(trace) != setup.outline:",
        new="trace.module.code != setup.outline.code:",
        tests=(f"{STEPS}[the_first_call_differs_in_plain_python_only]",),
    ),
    Mutation(
        name="hooks_left_by_a_step",
        what="nobody looks whether a step leaves hooks",
        file="capture/tracing/tracer.py",
        old="        flags.check_hooks()\n",
        new="",
        tests=("tests/behaviour/test_side_effects.py::test_side_effect_is_refused_and_undone",),
    ),
    Mutation(
        name="gradients_not_reduced",
        what="placement leaves every gradient local to its rank",
        file="place/strategies.py",
        old="        if name in self.config.ignore:\n            return grad\n",
        new="        return grad\n",
        tests=(f"{RANKS}[clip_norm-ddp]", f"{RANKS}[tied_weights-ddp]"),
    ),
    Mutation(
        name="hyper_parameters_baked",
        what="numbers of parameter groups enter the graph as constants",
        file="capture/scalars/hyperparameters.py",
        old="symbol = hyper.box.item()",
        new="symbol = hyper.read()",
        tests=(f"{OPTIM}[sgd_momentum_single]", f"{OPTIM}[adamw_foreach]", f"{OPTIM}[schedule_cosine_sgd]"),
    ),
    Mutation(
        name="writes_to_python_accepted",
        what="a step whose Python changes at every run is one graph",
        file="capture/capture.py",
        old="        if side_effects.changed:",
        new="        if False:",
        tests=(f"{WRITES}::test_a_write_to_python_is_refused_at_its_line_and_undone[writes_a_number]",),
    ),
    Mutation(
        name="writes_to_arguments_accepted",
        what="nobody looks at what a step writes to containers among its arguments",
        file="capture/tracing/tracer.py",
        old="        arguments.check()\n",
        new="",
        tests=(f"{WRITES}::test_a_write_to_python_is_refused_at_its_line_and_undone[writes_plain_to_an_argument]",),
    ),
    Mutation(
        name="tensors_of_a_trace_left",
        what="a tensor of the trace may stay in an object of the user's",
        file="capture/effects/side_effects.py",
        old="                self._leaves_tensors |= self._holds_new_tensor(left)\n",
        new="",
        tests=(f"{EFFECTS}::test_tensors_within_what_a_trace_leaves_are_refused_at_once",),
    ),
    Mutation(
        name="rates_of_a_step_taken",
        what="a rate that the step itself changes is that of the graph",
        file="capture/tracing/tracer.py",
        old="        if changed := lifter.changed():",
        new="        if changed := None:",
        tests=(f"{WRITES}::test_a_write_to_python_is_refused_at_its_line_and_undone[writes_a_rate]",),
    ),
    Mutation(
        name="box_not_loaded",
        what="a number that moves between calls stays what it was when it became an input",
        file="capture/scalars/varying_numbers.py",
        old="            self.box.fill_(number)\n",
        new="            pass\n",
        tests=(f"{STEPS}[number_of_the_batch_given]",),
    ),
    Mutation(
        name="two_updates_of_one_rate",
        what="two steps of an optimizer in one piece take the rate of the later one",
        file="live/followed_calls.py",
        old="            taken.optimizer is now.optimizer and taken is not now and not taken.equals(now)",
        new="            False",
        tests=(f"{LATE}::test_a_rate_that_moves_between_two_updates_of_one_call_is_that_of_each",),
    ),
    Mutation(
        name="guards_off",
        what="every call uses the first trace",
        file="capture/guards/guards.py",
        old="return _first_reason(self.arguments, call) or self._state_why_not(leaves, call.changed)",
        new="return None",
        tests=(f"{STEPS}[train_and_eval_flips]", f"{STEPS}[module_number_changed]", f"{STEPS}[last_batch_is_smaller]"),
    ),
    Mutation(
        name="captures_are_of_all_threads",
        what="what another thread calls while a step is captured runs as eager code",
        file="capture/python/tracing_thread.py",
        old="return threading.get_ident() in CAPTURING",
        new="return bool(CAPTURING)",
        tests=(f"{THREADS}::test_a_first_call_beside_a_capture_waits_for_it_and_is_captured_itself",),
    ),
    Mutation(
        name="thawed_gradients_stay_local",
        what="what is frozen when a step begins is not averaged, though the step trains it",
        file="capture/tracing/grad_markers.py",
        old="            if not param.is_leaf:",
        new="            if not (param.is_leaf and param.requires_grad):",
        tests=(f"{RANKS}[thawed_in_the_step-ddp]",),
    ),
    Mutation(
        name="flags_not_set",
        what="a parameter that a step freezes takes gradients after it",
        file="capture/bind/bind.py",
        old="        if spec.requires_grad:",
        new="        if False:",
        tests=(f"{STEPS}[frozen_from_the_first_step_on]",),
    ),
    Mutation(
        name="one_rank_plans_differently",
        what="rank 1 fills its buckets to another bound",
        file="config.py",
        old='        return None if self.bucket_bytes == "auto" else self.bucket_bytes\n',
        new=(
            "        import torch.distributed as dist\n\n"
            "        return 64 if dist.is_initialized() and dist.get_rank() == 1 else 1 << 20\n"
        ),
        tests=(f"{RANKS}[clip_norm-ddp]",),
        says="RankMismatchError",
    ),
    Mutation(
        name="agreement_skipped",
        what="ranks never compare their plans",
        file="runtime/distributed/consensus.py",
        old="    if size == 1:\n        return\n    agreement =",
        new="    if size > 0:\n        return\n    agreement =",
        tests=("tests/ranks/test_consensus.py::test_a_mismatch_is_the_same_on_every_rank",),
    ),
    Mutation(
        name="tensors_not_looked_at",
        what="dtype, shape and requires_grad of the state are taken for unchanged",
        file="capture/guards/state_guards.py",
        old="for slot, then in self.layouts if TENSORS in call.changed else ():",
        new="for slot, then in ():",
        tests=(f"{GUARDS}[native-parameter_dtype]", f"{GUARDS}[plain-state_dtype]"),
    ),
    Mutation(
        name="dicts_not_looked_at",
        what="attributes, groups and optimizer state are taken for unchanged",
        file="capture/guards/state_guards.py",
        old="for snapshot in (*(self.snapshots[number] for number in numbers), *self.opaque):",
        new="for snapshot in ():",
        tests=(f"{GUARDS}[native-module_attribute]", f"{GUARDS}[plain-state_cleared]"),
    ),
    Mutation(
        name="classes_not_looked_at",
        what="methods and attributes of classes are taken for unchanged",
        file="capture/python/class_attributes.py",
        old="if not is_library_class(kind):",
        new="if False:",
        tests=(f"{CLASSES}[native-number of a base]", f"{CLASSES}[plain-method]"),
    ),
    Mutation(
        name="gradients_at_entry_not_looked_at",
        what="a gradient that the caller left is taken for none",
        file="capture/guards/state_guards.py",
        old="if bool(then) != bool(now):",
        new="if False:",
        tests=(
            f"{STEPS}[gradients_preset]",
            "tests/unit/capture/guards/test_guards.py::test_a_single_gradient_that_is_zero_is_there",
        ),
    ),
    Mutation(
        name="ranks_choose_rows_alone",
        what="every rank decides by its own batch whether the table of an embedding travels as rows",
        file="passes/comm/bucketing.py",
        old='return choose(f"as rows:\\n{_text(reductions)}", plan) if',
        new="return plan() if",
        tests=("tests/unit/passes/comm/test_wire_format.py::test_ranks_with_other_batches_do_as_rank_0_said",),
    ),
    Mutation(
        name="native_look_without_dicts",
        what="the native guard takes every dict for unchanged; its test keeps it from being used",
        file="capture/native/dict_versions.h",
        old="for (const size_t index : written_) {",
        new="return;\n    for (const size_t index : written_) {",
        tests=("tests/unit/capture/guards/test_guards.py::test_the_native_look_takes_over_when_it_comes",),
    ),
    Mutation(
        name="native_look_without_traits",
        what="the native guard takes type, device and flags for unchanged; its test keeps it from being used",
        file="capture/native/tensor_desc.h",
        old="(Traits::of(impl) == traits_) & ",
        new="",
        tests=("tests/unit/capture/guards/test_guards.py::test_the_native_look_takes_over_when_it_comes",),
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What pytest said."""

    status: int
    summary: str
    output: str = ""


def copy_package(folder: Path) -> Path:
    """A copy of the package below `folder`; returns the folder that belongs on the path."""
    shutil.copytree(ROOT / "src" / "wholestep", folder / "wholestep", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def mutate(folder: Path, mutation: Mutation) -> None:
    """Breaks the copy. Raises SystemExit if the text is not there exactly once."""
    path = folder / "wholestep" / mutation.file
    text = path.read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise SystemExit(
            f"{mutation.name}: the text to replace must occur exactly once in {mutation.file}, but occurs "
            f"{count} times:\n{mutation.old}\nThe code has moved on: bring MUTATIONS in this script up to date."
        )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def run(folder: Path, tests: tuple[str, ...], *options: str, timeout_s: float = TIMEOUT_S) -> Result:
    """Runs tests of this repository on the package in `folder`, with further options for pytest."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    where = [sys.executable, "-c", "import wholestep; print(wholestep.__file__)"]
    used = subprocess.run(where, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(used).resolve().is_relative_to(folder.resolve()):
        raise SystemExit(f"the tests would import {used} and not the copy in {folder}")
    pytest = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    pytest += ["--timeout", str(TIMEOUT_S // 2)]  # a test that waits for ever has failed
    command = [sys.executable, "-m", "pytest", *pytest, *options, *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Result(-1, f"no end after {timeout_s} s")
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
    return Result(done.returncode, lines[-1].strip("= "), done.stdout)


def verdict(result: Result, mutation: Mutation) -> str:
    """``killed``, ``survived``, or what went wrong."""
    if result.status == 0:
        return "survived"
    if result.status == TESTS_FAILED and re.search(r"\d+ failed", result.summary):
        return "killed" if mutation.says in result.output else f"failed, but not with {mutation.says}"
    return "broken run"


def check(mutations: list[Mutation], workers: int, console: Console) -> bool:
    """Runs everything, `workers` at the same time, and prints the table; whether all is well."""
    table = Table(title="mutations", title_justify="left")
    for column in ("mutation", "what is wrong", "verdict", "pytest"):
        table.add_column(column)
    columns = ("{task.description}", "{task.completed}/{task.total}")
    shown = Progress(SpinnerColumn(), *map(TextColumn, columns), TimeElapsedColumn(), console=console)
    with (
        tempfile.TemporaryDirectory(prefix="wholestep-") as name,
        shown as progress,
        ThreadPoolExecutor(workers) as pool,
    ):
        task = progress.add_task("unbroken", total=len(mutations) + 1)

        def broken(mutation: Mutation) -> Result:
            folder = copy_package(Path(name) / mutation.name)
            mutate(folder, mutation)
            result = run(folder, mutation.tests)
            progress.update(task, description=mutation.name, advance=1)
            return result

        every = tuple(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
        at_once = (
            ("-n", str(workers), "--maxprocesses", str(workers), "--dist", "worksteal") if workers > 1 else ("-n0",)
        )
        unbroken = run(copy_package(Path(name) / "unbroken"), every, *at_once, timeout_s=TIMEOUT_S * len(mutations))
        progress.advance(task)
        table.add_row("none", "nothing", "green" if unbroken.status == 0 else "NOT GREEN", unbroken.summary)
        good = unbroken.status == 0
        for mutation, result in zip(mutations, pool.map(broken, mutations), strict=True):
            said = verdict(result, mutation)
            good &= said == "killed"
            style = "green" if said == "killed" else "bold red"
            table.add_row(mutation.name, mutation.what, f"[{style}]{said}[/]", f"{result.summary}")
    console.print(table)
    return good


def main() -> int:
    """Exit status 0 if every mutation is killed and the unbroken run is green."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--workers", type=int, default=1, help="how many at the same time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="name the mutations and end")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{mutation.name}: {mutation.what}" for mutation in MUTATIONS))
        return 0
    chosen = [mutation for mutation in MUTATIONS if mutation.name in options.only and mutation.exists()]
    return 0 if check(chosen, options.workers, Console(width=None if sys.stdout.isatty() else 160)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
