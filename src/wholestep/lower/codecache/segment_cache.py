"""What Inductor has compiled of a segment, as bytes that another process runs without a compiler.

[Note: kernels that have run]
On a GPU a compiled segment holds its kernels twice: as text in its module, which makes them anew, and in a bundle, with
the binaries that Triton has made. Inductor writes the bundle into its own cache before anything runs. We write after
the first call, for two reasons. A segment that Inductor found in its cache runs the very kernels of its bundle, and
what has launched can be pickled only with its launchers taken off. And by then it is known which of several block
sizes is the fastest: that one travels alone, so the other process measures nothing and computes the same bits. Other
ranks of the same process group get a segment before its first call, with all its block sizes, and measure themselves.
So does every process with kernels that are launched early, which Inductor does not bundle with their choice.

[Note: another GPU]
What was compiled on one GPU runs on another of the same kind once its number is replaced
(`lower/codecache/relocate_device.py`): in the text, in what Inductor keeps of every kernel, and in the keys made of
either. Triton's own keys are the same.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
from torch._inductor.triton_bundler import TritonBundler

from wholestep.lower.codecache.prune_imports import lightened
from wholestep.lower.codecache.relocate_device import CannotRelocate, kernel_texts, relocate
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from torch._inductor import async_compile, codecache, select_algorithm
else:
    async_compile = lazy_import("torch._inductor.async_compile")
    codecache = lazy_import("torch._inductor.codecache")
    select_algorithm = lazy_import("torch._inductor.select_algorithm")

_RUNTIME_ATTRIBUTES = ("_reload_kernel", "_debug_call", "_profiler_ctx", "save_cache_hook")
"""What a kernel holds of the process that it runs in, besides what it takes off itself. The last one keeps the block
size that was measured to be the fastest in that process's cache; here it travels with the kernel."""

_TEXTS = frozenset({".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn"})
"""What Triton's files are called that nobody needs who has the binary."""


def dumps(compiled: CompiledFxGraph) -> bytes:
    """A compiled segment for another process, which finds in it all that a compiler would have to make.

    It may have run. Raises whatever pickling raises, and ValueError for what is tied to its GPU.
    """
    if any(one.is_cuda for one in (compiled.constants or {}).values()):
        raise ValueError("it has constants on its GPU")
    twin: Any = copy.copy(compiled)
    twin.prepare_for_serialization()
    text = lightened(twin.source_code, _is_torchs)
    if text != twin.source_code:
        twin.source_code, twin.cache_key = text, codecache.code_hash(text)
    with contextlib.ExitStack() as resting:
        if twin._triton_bundle is not None:
            twin._triton_bundle = _rested(twin._triton_bundle, _scope_of(compiled), resting)
        return pickle.dumps(twin)


def loads(data: bytes, device: torch.device) -> tuple[CompiledFxGraph, Callable[[list[Any]], Sequence[Any]]]:
    """What `dumps` was given, and what runs it on `device`, which is of the kind that it was compiled for. Binaries go
    to Triton's cache on disk, the text to that of Inductor.

    What runs it takes a list, which it empties, and gives a list. To call the compiled segment itself is to import the
    compiler, which keeps a list of calls for who debugs it.

    Raises CannotRelocate, OSError, and whatever reading a pickle and running a module raise.
    """
    compiled: CompiledFxGraph = pickle.loads(data)
    if device.type == "cuda":
        _relocate(compiled, device.index)
    constants, bundle = CompiledFxGraphConstants(), compiled._triton_bundle
    if bundle is None or not bundle.kernel_artifacts:
        compiled.after_deserialization(constants)
    else:
        TritonBundler.read_and_emit(bundle)
        with inductor_config.patch(compile_threads=1):  # no processes start that would wait for something to compile
            compiled.after_deserialization(constants)
        async_compile.CompiledTritonKernels.cache_clear()  # kernels that nobody has asked for
    compiled.post_compile((), constants, compiled.fx_kwargs)
    if compiled.current_callable is None:
        raise TypeError("it holds nothing that can be called")
    return compiled, compiled.current_callable


def _is_torchs(name: str) -> bool:
    """Whether a product of matrices, as compiled modules know it, is torch's function of that name."""
    known = getattr(select_algorithm.extern_kernels, name, None)
    return known is not None and known is getattr(torch, name, None)


def _relocate(compiled: CompiledFxGraph, number: int) -> None:
    """Has a compiled segment that is not ready yet run on the GPU with this number. Raises CannotRelocate."""
    if len(compiled.device_idxs) != 1:
        raise CannotRelocate(f"it was compiled for the GPUs {sorted(compiled.device_idxs)}")
    (old,) = compiled.device_idxs
    if old == number:
        return
    text = relocate(compiled.source_code, old, number)
    bundle: Any = compiled._triton_bundle
    if bundle is not None:
        key = async_compile.CompiledTritonKernels.key
        pairs = zip(kernel_texts(compiled.source_code), kernel_texts(text), strict=True)
        keys = {key(before): key(after) for before, after in pairs}
        if stray := [one.kernel_name for one in bundle.static_autotuners if one.cache_key not in keys]:
            raise CannotRelocate(f"the kernel {stray[0]} belongs to no text of its module")
        for entry in bundle.static_autotuners:
            _relocate_kernel(entry.kernel, number)
        compiled._triton_bundle = replace(
            bundle,
            static_autotuners=[replace(one, cache_key=keys[one.cache_key]) for one in bundle.static_autotuners],
            kernel_artifacts=[replace(one, device=number) for one in bundle.kernel_artifacts],
        )
    compiled.source_code, compiled.cache_key = text, codecache.code_hash(text)
    compiled.device_idxs = type(compiled.device_idxs)([number])


def _relocate_kernel(kernel: Any, number: int) -> None:
    """Writes the number of another GPU into a kernel that has not been loaded."""
    kernel.device_props = kernel.device_props._replace(index=number)
    for held in (kernel.triton_meta, *(result.compile_meta for result in kernel.compile_results)):
        held["device"] = number


def _scope_of(compiled: CompiledFxGraph) -> Mapping[str, Any]:
    """What the module of a compiled segment holds, by name."""
    call = getattr(compiled.compiled_fn_runner, "call", None)
    scope: Mapping[str, Any] = getattr(call, "__globals__", {})
    return scope


def _rested(bundle: Any, scope: Mapping[str, Any], resting: contextlib.ExitStack) -> Any:
    """The bundle as if nothing had run, but with the choices that were made; good until `resting` is left."""
    kinds = tuple({type(entry.kernel) for entry in bundle.static_autotuners})
    running = {one.inductor_meta.get("kernel_name"): one for one in scope.values() if isinstance(one, kinds)}
    entries, compiled, kept = [], set[str](), set[str]()
    for entry in bundle.static_autotuners:
        kernel = running.get(entry.kernel_name, entry.kernel)
        compiled |= _hashes(kernel)
        rested = resting.enter_context(_at_rest(kernel))
        kept |= _hashes(rested)
        entries.append(replace(entry, kernel=rested))
    wanted = [one for one in bundle.kernel_artifacts if one.kernel_hash not in compiled - kept]
    return replace(bundle, static_autotuners=entries, kernel_artifacts=list(map(_without_texts, wanted)))


def _without_texts(binary: Any) -> Any:
    """A kernel's files without the texts that Triton has gone through, which are most of them."""
    files = [one for one in binary.artifacts if PurePath(one.filename).suffix not in _TEXTS]
    return replace(binary, artifacts=files)


def _hashes(kernel: Any) -> set[str]:
    return {triton_hash_to_path_key(result.kernel.hash) for result in kernel.compile_results}


@contextlib.contextmanager
def _at_rest(kernel: Any) -> Iterator[Any]:
    """A kernel that can be pickled, of one that may have run; meanwhile that one cannot be launched."""
    chosen = [launcher.config for launcher in kernel.launchers]
    held = kernel.prepare_for_pickle()
    try:
        state = kernel.__getstate__()
        state |= {name: None for name in _RUNTIME_ATTRIBUTES if name in state}
        if len(chosen) == 1:
            state["compile_results"] = [one for one in kernel.compile_results if one.config is chosen[0]]
        if chosen:
            # It was made ready, and what block sizes that adds are among the others.
            state["inductor_meta"] = {**kernel.inductor_meta, "dynamic_scale_rblock": False}
            state.pop("_could_rblock_scale", None)
        rested = object.__new__(type(kernel))
        rested.__setstate__(state)
        yield rested
    finally:
        kernel.restore_after_unpickle(held)
