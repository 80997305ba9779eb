"""The rules of the house, read from the source itself: layers, imports, budgets, doors to torch's private parts, words.

A rule that hinders is changed here, with its reason, and never worked around.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest

import wholestep

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "wholestep"

ROOMS = """
    errors config util
    ir/ops ir ir/dtensor cost cost/calibration
    capture/python capture/scalars capture/sizes capture/native capture/wrappers capture/reach capture/effects
    capture/functionalize capture/tracing capture/guards capture/bind capture
    place
    passes/analysis passes/rewrites passes/comm passes/schedule passes/memory passes/compress passes
    runtime/distributed runtime runtime/sharding runtime/checkpoint runtime/verify
    lower/codecache lower/gemm lower/kernels lower/decompositions lower/base lower/cudagraph lower/foreach
    lower/inductor lower
    live/recording live/sizes live/opaque live/pieces live/ranks live api/report api/cache api adapters spmd __init__
    cli/common cli/workloads cli/suite cli __main__
""".split()
"""Folders below src/wholestep, and the files beside them: a file may import from its own room and from those before it.
`__init__` is the public surface, which the command line uses."""

DOOR_PLATES = {"__init__.py", "__main__.py", "py.typed"}
MAX_ENTRIES = 12
"""Files, and sub-folders, that a folder may hold; those that Python asks for do not count."""

MORE_ENTRIES = {("src/wholestep", "folders"): 13}
"""Folders that may hold more: here, the rooms of the arrow and what stands around them, each on the page of rooms."""

OPTIONAL_PACKAGES = {"cloudpickle", "lightning", "safetensors", "transformers"}
"""The only packages that may be imported inside a function: they are not dependencies."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL_PARAMETERS = 5

RAISED_BUDGETS: dict[str, str] = {}
"""`file` or `file:function` below src/wholestep -> why it may exceed a budget. Empty is the goal."""

DOORS: dict[str, dict[str, str]] = {
    # file below src/wholestep -> {private part of torch: why it is opened there}
    "capture/python/user_frame.py": {
        "torch.fx.experimental.symbolic_shapes": "the error of a traced value that drives Python"
    },
    "ir/sizes.py": {"torch.fx.experimental.symbolic_shapes": "whether two sizes are equal, without a condition"},
    "ir/size_nodes.py": {"torch.utils._sympy": "an expression of sizes as calls"},
    "capture/sizes/size_symbols.py": {
        "torch._dynamo": "ConstantSource: where a symbol comes from",
        "torch.fx.experimental.symbolic_shapes": "the ShapeEnv of a trace, which notes what is asked of sizes",
    },
    "capture/guards/size_guards.py": {
        "torch.fx.experimental.symbolic_shapes": "the functions that its conditions call",
        "torch.utils._sympy": "conditions as Python",
    },
    "capture/tracing/process_group_rules.py": {"torch._check": "a promise about a size that is data"},
    "capture/reach/arguments.py": {
        "torch.distributed._functional_collectives": "the class of what a collective gives that is on its way"
    },
    "capture/reach/library_globals.py": {
        "torch._library": "the Python of custom operators, to which what `torch.ops` gives does not lead"
    },
    "capture/reach/unwrap_compiled.py": {
        "torch._dynamo": "whether what torch.compile gives may be traced; the class of a module that it gave",
        "torch._C._dynamo": "has a compiled loop call a step without looking into it",
    },
    "capture/tracing/module_to.py": {
        "torch.nn.Module._apply": "what every move and conversion of a module goes through"
    },
    "capture/effects/c_functions.py": {"torch._C": "the module whose functions ask and set switches, told from others"},
    "capture/functionalize/constants.py": {
        "torch.fx.experimental.proxy_tensor": "up to which size make_fx knows the value of a constant"
    },
    "capture/functionalize/data_assignment.py": {
        "torch.fx.experimental.proxy_tensor": "the node that a tensor stands for after an assignment"
    },
    "capture/functionalize/functionalize.py": {
        "torch.fx.experimental.proxy_tensor": "make_fx, for the second, functional trace"
    },
    "capture/scalars/host_scalars.py": {
        "torch._C._PreserveDispatchKeyGuard": "to leave a fake kernel that branches on a number",
        "torch._C._set_meta_in_tls_dispatch_include": "likewise",
        "torch._prims_common": "the conversion of numbers to complex inside fake kernels",
        "torch.fx.experimental.proxy_tensor": "the node behind a host scalar",
        "torch.utils._python_dispatch": "to compute with no tracing mode active",
    },
    "capture/sizes/python_forms.py": {
        "torch._decomp": "operators in Python",
        "torch._dispatch": "has operators that C++ makes of others come to Python",
        "torch._subclasses": "the answer to C++ that asks for sizes",
        "torch.fx.experimental.proxy_tensor": "the trace that such a question is recorded in",
        "torch.utils._python_dispatch": "which operators C++ runs at the sizes of the traced call",
    },
    "capture/tracing/fake_kernels.py": {
        "torch._check": "a promise about a size that is data",
        "torch._prims_common": "whether strides look channels-last, as kernels ask it",
    },
    "capture/python/modules_left_alone.py": {"torch.fx._symbolic_trace": "what patches methods of modules for a trace"},
    "capture/python/node_origin.py": {
        "torch._C._current_autograd_node": "which forward operation a backward one belongs to",
        "torch.autograd._get_sequence_nr": "the number that ties the two",
        "torch.fx.experimental.proxy_tensor": "the tracer that notes where each node came from",
    },
    "capture/scalars/rank_symbols.py": {
        "torch._dynamo": "ConstantSource: where a symbol comes from",
        "torch.distributed.distributed_c10d._world": "the groups of this process, in the order in which they were made",
        "torch.fx.experimental.symbolic_shapes": "a rank is a symbol of a ShapeEnv",
    },
    "capture/tracing/rnn_unroll.py": {"torch._VF": "recurrent layers, which choose cuDNN by themselves"},
    "capture/tracing/tensor_swap.py": {
        "torch._C._swap_tensor_impl": "what is inside two tensors is exchanged, and not the objects",
    },
    "capture/native/self_test.py": {
        "torch.Tensor._make_wrapper_subclass": "a tensor that stands for another, as a DTensor does"
    },
    "ir/dtensor/shards.py": {
        "torch.distributed.tensor.DTensor._local_tensor": "the very memory of a part, which to_local() hides",
        "torch.distributed.tensor.DTensor._spec": "likewise, for the native guard",
    },
    "capture/wrappers/ddp.py": {
        "torch.utils._python_dispatch": "which parameters a reducer has is asked without the memory of its buckets",
    },
    "capture/wrappers/fully_shard_hooks.py": {
        "torch.distributed._composable": "the keys under which a module holds its sharding, new in every process",
        "torch.distributed.fsdp._fully_shard": "what its hooks call, to be silent while a step is traced",
    },
    "capture/wrappers/tensor_parallel.py": {
        "torch._C._clear_DTensor_sharding_propagator_cache": "what C++ remembers of calls with symbols is dropped",
        "torch.distributed.tensor.DTensor._op_dispatcher": "calls with symbols go by a function of ours",
        "torch.distributed.tensor._op_schema": "a call of DTensors without the symbols of a trace",
        "torch.distributed.tensor._random": "that DTensors draw random numbers on a GPU, which is refused",
        "torch.distributed.tensor._sharding_prop": "how results of such a call are placed",
        "torch.utils._python_dispatch": "to ask how a copy is placed with no tracing mode active",
    },
    "capture/wrappers/sync_batch_norm.py": {
        "torch._C._get_privateuse1_backend_name": "SyncBatchNorm refuses CPUs, for whose tensors it has no kernels"
    },
    "capture/wrappers/fully_shard_settings.py": {
        "torch.distributed.fsdp._fully_shard": "whether its communication is the default one: no getter says so"
    },
    "place/sharded_placer.py": {
        "torch.fx.experimental.symbolic_shapes": "the number of this rank is a symbol of a ShapeEnv"
    },
    "capture/tracing/backward_engine.py": {"torch.autograd._engine_run_backward": "to see every backward as it runs"},
    "capture/tracing/patches.py": {
        "torch.utils._foreach_utils": "which tensor types count as plain when torch chooses foreach kernels",
    },
    "capture/tracing/tracer.py": {
        "torch.fx.experimental.proxy_tensor": "make_fx, the tracer",
        "torch.fx.experimental.symbolic_shapes": "what it imports where it first looks for a line of the user's",
    },
    "capture/functionalize/version_counters.py": {
        "torch._C._autograd": "sets version counters; replaced while a step is traced",
        "torch._C.TensorBase": "the counter itself, where the attribute is replaced",
    },
    "lower/codecache/toolchain_hash.py": {
        "torch._inductor": "the digests that its keys and Triton's are made of, found out in threads"
    },
    "lower/kernels/copy_all_reduce.py": {
        "torch.distributed._symmetric_memory": "memory of a GPU that its peers have mapped, and meetings in it",
    },
    "lower/inductor/compile_fx.py": {
        "torch._dispatch": "has operators described by their Python forms where sizes move, as torch.compile does",
        "torch._guards": "what Inductor's cache on disk asks while it compiles",
        "torch._inductor": "the compiler of segments: its entry, its options and the operators it lowers",
        "torch.fx.experimental.proxy_tensor": "make_fx, to write a segment in the operators that Inductor lowers",
        "torch.fx.experimental.symbolic_shapes": "that cache wants the ShapeEnv of the fake tensors",
    },
    "lower/inductor/segment_sizes.py": {
        "torch._dynamo": "ConstantSource: where a symbol comes from",
        "torch.fx.experimental.symbolic_shapes": "symbols of one segment, and what Inductor asks of them",
    },
    "lower/inductor/post_grad_passes.py": {"torch._inductor": "its place for passes of others"},
    "lower/gemm/cpu_matmul.py": {"torch._inductor": "calls that write where it says"},
    "lower/inductor/segment_compiler.py": {
        "torch._inductor": "its options and its C++ compiler, and the type of what it has compiled"
    },
    "lower/inductor/cpu_isa.py": {
        "torch._inductor": "what it asks about a CPU, which another process may have answered"
    },
    "lower/codecache/segment_cache.py": {
        "torch._inductor": "how it writes what it has compiled, with the binaries of Triton, and takes it up again",
    },
    "lower/inductor/dependent_launch.py": {
        "torch._inductor": "where the kernels that it writes wait for the ones before them, and that they may",
    },
    "lower/cudagraph/grad_ownership.py": {"torch._C._storage_Use_Count": "who else has the memory of a gradient"},
    "lower/cudagraph/memset_nodes.py": {
        "torch._C._construct_storage_from_data_pointer": "memory of a captured graph as a tensor, to be filled",
    },
    "lower/decompositions/interpolate.py": {
        "torch._decomp": "linear interpolation in the operators that Inductor lowers"
    },
    "lower/foreach/kernel_plan.py": {
        "torch.fx.experimental.proxy_tensor": "make_fx, to write one index of a list out in operators on one tensor",
    },
    "lower/gemm/onednn.py": {"torch._inductor": "the cache of libraries that it has the C++ compiler build"},
    "lower/inductor/war_order.py": {"torch._inductor": "what it forgets of an order where it fits loops to each other"},
    "lower/inductor/config_fallback.py": {"torch._inductor": "what it does where Triton cannot compile a kernel"},
    "lower/cudagraph/graph_pool.py": {
        "torch._C._cuda_clearCublasWorkspaces": "to give up what a library keeps in the memory of graphs",
        "torch._C._cuda_endAllocateToPool": "to end what a capture that failed has begun in the allocator",
        "torch._C._cuda_releasePool": "likewise",
    },
    "lower/inductor/deferred_wait.py": {
        "torch._inductor": "its waits for workers, which are put off, and what it does after them"
    },
    "lower/inductor/wrapper_patch.py": {"torch._inductor": "the lines that it writes around kernels"},
    "ir/serializer.py": {
        "torch.fx.experimental.symbolic_shapes": "numbers of the host are symbols of a ShapeEnv, in a read program too",
    },
    "ir/lazy_graph_module.py": {"torch.fx._lazy_graph_module": "modules that write their Python when it is needed"},
    "ir/ops/dispatch_guard.py": {"torch._C._DisableAutocast": "a graph holds all casts that are wanted"},
    "ir/op_info.py": {"torch._C._autograd": "what the operator set_version does"},
    "ir/ops/collectives.py": {
        "torch.distributed.distributed_c10d._resolve_process_group": "the group behind the name in a collective",
        "torch._C._distributed_c10d": "ties the work of a collective to its result, for wait_tensor",
    },
    "live/recording/handle.py": {
        "torch._C._PreserveDispatchKeyGuard": "what C++ has left out is put back after calls that run late",
        "torch._C._dispatch_tls_set_dispatch_key_excluded": "those calls go through autograd",
        "torch._C._EnableTorchFunction": "a call runs as it would in eager code",
        "torch.Tensor._make_wrapper_subclass": "a tensor with a shape and no memory, until its numbers are known",
        "torch._C._len_torch_function_stack": "whether the mode of a live step is on",
        "torch._C._get_function_stack_at": "whether the step has entered modes above that one",
        "torch._C._pop_torch_function_stack": "takes that mode off for a while",
        "torch._C._push_on_torch_function_stack": "likewise",
    },
    "live/opaque/functions.py": {
        "torch.optim.optimizer._global_optimizer_post_hooks": "hooks on the steps of all optimizers, which are Python",
        "torch.optim.optimizer._global_optimizer_pre_hooks": "likewise",
    },
    "live/recording/modes.py": {
        "torch._C._autograd": "whether hooks on saved tensors are set",
        "torch._C._functorch": "whether a transform of torch.func runs",
        "torch._C._is_any_autocast_enabled": "autocast of all devices, asked at every call",
        "torch._C._len_torch_dispatch_stack": "whether a dispatch mode of the user's looks at every operator",
    },
    "util/torch_switches.py": {
        "torch.nn.utils.parametrize._cache": "parametrized weights that torch keeps, which are none of a late call",
        "torch.nn.utils.parametrize._cache_enabled": "whether it keeps them",
    },
    "live/recording/observer.py": {
        "torch.utils._python_dispatch": "the mode in which the operators of a call are seen"
    },
    "live/run.py": {"torch._C.DisableTorchFunction": "what a live step does by itself is not recorded"},
    "spmd/comm_tensor.py": {
        "torch.Tensor._make_wrapper_subclass": "how a tensor subclass that wraps another tensor is made",
        "torch._C._disabled_torch_function_impl": "calls go straight to the operators, where the wrapper sees them",
        "torch._C._distributed_c10d": "a work handle that calls back, which traced code may await",
        "torch.fx.experimental.proxy_tensor": "whether a trace by make_fx is running",
    },
    "runtime/distributed/store.py": {
        "torch._C._distributed_c10d": "the stores, which torch.distributed gives without types"
    },
}
"""torch's private modules are opened in one file each, so that a new version of torch is met in one place."""

PRIVATE_BUT_STABLE = {
    "torch._ops": "OpOverload, the type of every call target of a graph",
    "torch._subclasses": "FakeTensor and FakeTensorMode, the way to trace without data",
    "torch.utils._pytree": "flattening of nested containers as torch itself does it",
}
"""Private by name, but unchanged for years and used all over torch's ecosystem: any file may import them."""

FORBIDDEN_WORDS = {
    r"/work/|/opt/|/tmp/|/home/\w|/root/": "a path of one machine",
    r"https?://[\w.-]*(?:pypi|artifactory|nexus|jfrog)[\w.-]*": "the address of a package registry",
}
"""What no tracked file may contain."""

RIDDLES = frozenset(
    """lent left ties alike nests scene beside shelf patient moved ahead behind whose part quick unread rewinds portrait
    pulse lanes""".split()
)
"""Words that tell nobody what a module, class, function, parameter or attribute is."""

SOURCES = sorted(SRC.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def room_of(path: Path) -> str:
    """The folder of a file; the file itself where it stands beside the rooms."""
    name = path.relative_to(SRC).parent.as_posix()
    return path.stem if name == "." else name


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import; `from torch import _x` counts as `torch._x`, a relative one starts with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def named_room(module: str) -> str:
    """The room of a module, or of a name that is imported from one: the longest that its path begins with."""
    parts = module.split(".")[1:]
    prefixes = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in ROOMS), "__init__")


def layer_faults(room: str, tree: ast.AST) -> list[str]:
    faults = []
    for line, module in imported_modules(tree):
        if module.startswith("."):
            faults.append(f"line {line}: {module}: imports are absolute here")
        elif module.split(".")[0] == "wholestep" and ROOMS.index(named_room(module)) > ROOMS.index(room):
            faults.append(f"line {line}: {room} may not import {module}: its room comes later")
    return faults


def crowded_folders(names: Iterable[str]) -> list[str]:
    """Folders of more files, or of more sub-folders, than one looks over."""
    files: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        files.setdefault(path.parent.as_posix(), set()).update({path.name} - DOOR_PLATES)
        for inner, outer in pairwise((path.parent, *path.parent.parents)):
            folders.setdefault(outer.as_posix(), set()).add(inner.name)
    found = [
        (folder, kind, len(inside))
        for kind in ("files", "folders")
        for folder, inside in (files if kind == "files" else folders).items()
    ]
    return [
        f"{folder}: {count} {kind}"
        for folder, kind, count in found
        if count > MORE_ENTRIES.get((folder, kind), MAX_ENTRIES)
    ]


def hidden_imports(tree: ast.AST) -> list[str]:
    inside = {found for function in functions(tree) for found in imported_modules(function)}
    hidden = [(line, module) for line, module in sorted(inside) if module.split(".")[0] not in OPTIONAL_PACKAGES]
    return [f"line {line}: {module}" for line, module in hidden]


def positional_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (bool(names) and names[0] in ("self", "cls"))


def budget_faults(name: str, source: str) -> list[str]:
    num_lines = len(source.splitlines())
    faults = [f"{name}: {num_lines} lines"] if num_lines > MAX_FILE_LINES and name not in RAISED_BUDGETS else []
    for function in functions(ast.parse(source)):
        where = f"{name}:{function.name}"
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if where in RAISED_BUDGETS:
            continue
        if length > MAX_FUNCTION_LINES:
            faults.append(f"{where}: {length} lines")
        if positional_parameters(function) > MAX_POSITIONAL_PARAMETERS:
            faults.append(f"{where}: {positional_parameters(function)} positional parameters")
    return faults


def private_modules(tree: ast.AST) -> set[str]:
    """The private parts of torch that a file touches, by import or by a dotted name, cut after the private segment.

    `torch.fx.experimental` and private names of public modules count as private, too; operators under `torch.ops` do
    not: they are the language of the graph.
    """
    names = {module for _, module in imported_modules(tree)}
    known_as = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := dotted_name(node)):
            first, _, rest = dotted.partition(".")
            names.add(f"{known_as.get(first, first)}.{rest}")
    found = set()
    for name in names:
        segments = name.split(".")
        if segments[0] != "torch" or segments[1:2] == ["ops"]:
            continue
        if segments[1:3] == ["fx", "experimental"]:
            found.add(".".join(segments[:4]))
            continue
        private = [i for i, one in enumerate(segments) if one.startswith("_") and not one.startswith("__")]
        if private:
            depth = 2 if segments[1] == "_C" else 1  # torch._C is too large for one door
            found.add(".".join(segments[: private[0] + depth]))
    if any(name.startswith("torch._C.") for name in found):
        found.discard("torch._C")  # seen on the way to the name below it
    return found


def aliases(tree: ast.AST) -> dict[str, str]:
    """What a name of the file stands for: `import torch.distributed as dist` gives dist -> torch.distributed."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted_name(node.value)):
        return f"{start}.{node.attr}"
    return None


def given_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every class, function, parameter and attribute that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def riddles(names: Iterable[tuple[int, str]]) -> list[str]:
    return [f"line {line}: {name}" for line, name in names if name.strip("_").lower() in RIDDLES]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:  # an unpacked archive, no clone
        return [path for path in ROOT.rglob("*") if path.is_file() and not any(p.startswith(".") for p in path.parts)]
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    assert room_of(path) in ROOMS, f"{relative(path)} is in no room; the rooms are {ROOMS}"
    assert layer_faults(room_of(path), parsed(path)) == []


def test_no_room_is_listed_that_is_not_there() -> None:
    assert [room for room in ROOMS if not (SRC / room).is_dir() and not (SRC / f"{room}.py").is_file()] == []


@pytest.mark.parametrize("room", [room for room in ROOMS if (SRC / room).is_dir()])
def test_every_room_has_a_charter(room: str) -> None:
    """One line: what enters, what leaves, what does not belong."""
    charter = ast.get_docstring(parsed(SRC / room / "__init__.py")) or ""
    assert charter.splitlines()[1:] == []
    assert len(charter) > 40


def test_no_folder_is_crowded() -> None:
    watched = ("src", "tests", "benchmarks")
    names = [path.relative_to(ROOT).as_posix() for path in tracked_files()]
    assert crowded_folders(name for name in names if name.startswith(watched)) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_import_hides_in_a_function(path: Path) -> None:
    assert hidden_imports(parsed(path)) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_budgets(path: Path) -> None:
    assert budget_faults(relative(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_private_parts_of_torch_have_one_door_each(path: Path) -> None:
    allowed = set(DOORS.get(relative(path), {})) | set(PRIVATE_BUT_STABLE)
    assert private_modules(parsed(path)) - allowed == set()


def test_no_door_is_listed_that_nobody_uses() -> None:
    opened = {name: private_modules(parsed(SRC / name)) for name in DOORS if (SRC / name).is_file()}
    assert [(name, door) for name, doors in DOORS.items() for door in doors if door not in opened.get(name, ())] == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_names_are_no_riddles(path: Path) -> None:
    assert riddles([(0, path.stem), *given_names(parsed(path))]) == []


def test_every_public_name_has_a_docstring() -> None:
    names = [name for name in wholestep.__all__ if not name.startswith("__")]
    assert names
    missing = []
    for name in names:
        thing = getattr(wholestep, name)
        members = [(name, thing)]
        if inspect.isclass(thing):
            own = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")]
            members += [(f"{name}.{key}", it) for key, it in own if isinstance(it, property) or callable(it)]
        missing += [label for label, member in members if not (member.__doc__ or "").strip()]
    assert missing == []


def test_no_tracked_file_names_a_machine() -> None:
    faults = []
    for path in tracked_files():
        if path == Path(__file__).resolve():
            continue  # it spells the words out
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for pattern, what in FORBIDDEN_WORDS.items():
            hits = re.finditer(pattern, text)
            faults += [f"{path.relative_to(ROOT)}: {hit.group()!r} is {what}" for hit in hits]
    assert faults == []


# The rules are code, so they are tested: each must be able to fail.


def test_a_wrong_arrow_is_found() -> None:
    assert layer_faults("ir", ast.parse("from wholestep.passes.comm.bucketing import bucket"))
    assert layer_faults("api", ast.parse("import wholestep as ws"))
    assert layer_faults("api", ast.parse("from .config import DDP"))
    assert layer_faults("passes/comm", ast.parse("from wholestep.passes import default_passes"))
    assert layer_faults("passes", ast.parse("from wholestep.ir.graph_edit import copy\nimport torch")) == []


def test_a_crowded_folder_is_found() -> None:
    files = [f"src/room/file_{number}.py" for number in range(MAX_ENTRIES)]
    assert crowded_folders([*files, "src/room/__init__.py"]) == []
    assert crowded_folders([*files, "src/room/more.py"]) == ["src/room: 13 files"]
    rooms = [f"src/room_{number}/inner/file.py" for number in range(MAX_ENTRIES + 1)]
    assert crowded_folders(rooms) == ["src: 13 folders"]


def test_a_hidden_import_is_found() -> None:
    assert hidden_imports(ast.parse("def f():\n    import torch"))
    assert hidden_imports(ast.parse("class A:\n    def f(self):\n        from os import path"))
    assert hidden_imports(ast.parse("def f():\n    from transformers import GPT2Model")) == []


def test_a_broken_budget_is_found() -> None:
    long_function = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert budget_faults("x.py", long_function) == ["x.py:f: 61 lines"]
    assert budget_faults("x.py", "#\n" * (MAX_FILE_LINES + 1)) == ["x.py: 401 lines"]
    assert budget_faults("x.py", "def f(a, b, c, d, e, g): ...") == ["x.py:f: 6 positional parameters"]
    assert budget_faults("x.py", "class A:\n    def f(self, a, b, c, d, e, *, g): ...") == []


def test_a_riddle_is_found() -> None:
    source = "class Lent:\n    behind: int\n    def _left(self, part, *, other):\n        self.moved = other.whose"
    assert riddles(given_names(ast.parse(source))) == [
        "line 1: Lent",
        "line 2: behind",
        "line 3: _left",
        "line 3: part",
        "line 4: moved",
    ]
    assert riddles([(1, "partition"), (2, "left_operand")]) == []


def test_a_private_part_is_found() -> None:
    assert private_modules(ast.parse("from torch._functorch.aot_autograd import x")) == {"torch._functorch"}
    assert private_modules(ast.parse("from torch import _dynamo")) == {"torch._dynamo"}
    assert private_modules(ast.parse("import torch\nf = torch._C._tracing()")) == {"torch._C._tracing"}
    assert private_modules(ast.parse("from torch.distributed.distributed_c10d import _get_default_group")) == {
        "torch.distributed.distributed_c10d._get_default_group"
    }
    aliased = "import torch.distributed as dist\nfrom torch import nn\ndist._group(nn.functional.relu)"
    assert private_modules(ast.parse(aliased)) == {"torch.distributed._group"}
    proxy = "from torch.fx.experimental.proxy_tensor import make_fx"
    assert private_modules(ast.parse(proxy)) == {"torch.fx.experimental.proxy_tensor"}
    public = "import torch\nx = torch.nn.functional.relu(torch.__version__), torch.ops._c10d_functional.wait_tensor"
    assert private_modules(ast.parse(public)) == set()


def test_mutants_change_what_is_there(monkeypatch: pytest.MonkeyPatch, collected: set[str]) -> None:
    """Each text that `mutation_check` breaks occurs once, and the tests that are to see it exist.

    With their parameters, where all tests of their files have been collected, as they are for the whole suite.
    """
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    mutations = importlib.import_module("mutation_check").MUTATIONS
    stale = [one.name for one in mutations if (SRC / one.file).read_text().count(one.old) != 1]
    assert stale == []
    assert len({one.name for one in mutations}) == len(mutations)
    places = {test.partition("[")[0] for one in mutations for test in one.tests}
    assert sorted(place for place in places if not _has_test(*place.split("::"))) == []
    assert [one.name for one in mutations if one.old == one.new] == []
    files = {test.partition("::")[0] for test in collected}
    known = files | collected | {test.partition("[")[0] for test in collected}
    named = [test for one in mutations if one.exists() for test in one.tests]
    assert sorted(test for test in named if test.partition("::")[0] in files and test not in known) == []


def _has_test(file: str, name: str = "", *rest: str) -> bool:
    path = ROOT / file
    return path.exists() and (path.is_dir() or f"def {name}" in path.read_text() or f"class {name}" in path.read_text())
