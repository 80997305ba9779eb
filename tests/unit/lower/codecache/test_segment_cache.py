"""Compiled segments as bytes, with kernels that behave like those of a GPU. The real ones:
`tests/gpu/test_warm_start.py`."""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wholestep.lower.codecache import segment_cache
from wholestep.lower.codecache.relocate_device import CannotRelocate
from wholestep.lower.inductor import segment_compiler


@dataclass
class Binary:
    hash: str


@dataclass(eq=False)
class Result:
    """One block size of a kernel, compiled."""

    config: str
    kernel: Binary


class Kernel:
    """What is pickled only while nothing of it can be launched, as Inductor's autotuned kernels."""

    def __init__(self, name: str, *configs: str) -> None:
        self.inductor_meta = {"kernel_name": name, "dynamic_scale_rblock": True}
        self.compile_results = [Result(config, Binary(f"{name} {config}")) for config in configs]
        self.launchers: list[Any] = []
        self._reload_kernel = self.save_cache_hook = None

    def run(self, *configs: str) -> Kernel:
        """As after a launch of all of `configs`, the best of which alone is left in the end."""
        made = [result for result in self.compile_results if result.config in configs]
        self.launchers = [launcher_of(result) for result in made]
        self._reload_kernel = self.save_cache_hook = lambda: None  # type: ignore[assignment]
        return self

    def prepare_for_pickle(self) -> list[Any]:
        held, self.launchers = self.launchers, []
        return held

    def restore_after_unpickle(self, held: list[Any]) -> None:
        self.launchers = held

    def __getstate__(self) -> dict[str, Any]:
        assert not self.launchers
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def launcher_of(result: Result) -> Any:
    """It cannot be pickled."""
    return SimpleNamespace(config=result.config, run=lambda: None)


@dataclass(frozen=True)
class Entry:
    kernel_name: str
    kernel: Any


@dataclass(frozen=True)
class File:
    filename: str


@dataclass(frozen=True)
class Artifact:
    kernel_hash: str
    artifacts: list[File] = field(default_factory=list)


@dataclass(frozen=True)
class Bundle:
    static_autotuners: list[Entry]
    kernel_artifacts: list[Artifact]


@dataclass
class Compiled:
    """A compiled segment, as far as it is looked at."""

    _triton_bundle: Bundle | None
    compiled_fn_runner: Any = None
    constants: Any = None
    current_callable: Any = field(default=print)
    source_code: str = ""
    cache_key: str = "as compiled"

    def prepare_for_serialization(self) -> None:
        self.current_callable = self.compiled_fn_runner = None


def path_key(name: str) -> str:
    return f"<{name}>"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cache, "triton_hash_to_path_key", path_key)


def bundle_of(*entries: Kernel) -> Bundle:
    files = [File(f"k.{suffix}") for suffix in ("json", "source", "ttir", "ttgir", "llir", "ptx", "cubin")]
    hashes = [path_key(result.kernel.hash) for kernel in entries for result in kernel.compile_results]
    binaries = [Artifact(one, [*files, File("__grp__k.json")]) for one in hashes]
    names = [kernel.inductor_meta["kernel_name"] for kernel in entries]
    return Bundle([Entry(str(name), kernel) for name, kernel in zip(names, entries, strict=True)], binaries)


def module_of(**things: Any) -> Any:
    """What has a ``call`` whose globals are `things`."""
    scope = dict(things)
    exec("def call(args): ...", scope)
    return SimpleNamespace(call=scope["call"])


def travelled(compiled: Any) -> Bundle:
    found = pickle.loads(segment_cache.dumps(compiled))._triton_bundle
    assert isinstance(found, Bundle)
    return found


def test_kernels_of_the_cache_travel_after_they_have_run() -> None:
    """Those are in the bundle themselves."""
    kernel = Kernel("sum", "small", "large").run("large")
    launchers = kernel.launchers
    found = travelled(Compiled(bundle_of(kernel)))
    (there,) = found.static_autotuners
    assert [result.config for result in there.kernel.compile_results] == ["large"]
    assert there.kernel.launchers == []
    assert there.kernel._reload_kernel is there.kernel.save_cache_hook is None
    assert there.kernel.inductor_meta["dynamic_scale_rblock"] is False
    (binary,) = found.kernel_artifacts
    assert binary.kernel_hash == "<sum large>"
    assert [one.filename for one in binary.artifacts] == ["k.json", "k.cubin", "__grp__k.json"]
    # The one that runs is as it was.
    assert kernel.launchers is launchers
    assert len(kernel.compile_results) == 2
    assert kernel._reload_kernel is kernel.save_cache_hook is not None
    assert kernel.inductor_meta["dynamic_scale_rblock"] is True


def test_what_ran_is_found_in_the_module() -> None:
    """The bundle of what was compiled here holds copies that never ran, and know of no block size that was added."""
    kept, runs = Kernel("sum", "small", "large"), Kernel("sum", "small", "large", "added").run("added")
    compiled = Compiled(bundle_of(kept), module_of(triton_sum=runs, other=1))
    found = travelled(compiled)
    assert [result.config for result in found.static_autotuners[0].kernel.compile_results] == ["added"]
    assert found.kernel_artifacts == []  # in this bundle there was none of the winner
    assert len(kept.compile_results) == 2


def test_all_sizes_travel_where_none_was_chosen() -> None:
    found = travelled(Compiled(bundle_of(Kernel("sum", "small", "large"), Kernel("max", "small").run("small"))))
    assert [len(one.kernel.compile_results) for one in found.static_autotuners] == [2, 1]
    assert len(found.kernel_artifacts) == 3
    assert found.static_autotuners[0].kernel.inductor_meta["dynamic_scale_rblock"] is True


def test_block_sizes_that_were_made_ready_are_not_added_to() -> None:
    """Before the first call none was chosen, and those that come on top of the written ones are among them."""
    found = travelled(Compiled(bundle_of(Kernel("sum", "small", "large").run("small", "large"))))
    (there,) = found.static_autotuners
    assert [result.config for result in there.kernel.compile_results] == ["small", "large"]
    assert there.kernel.inductor_meta["dynamic_scale_rblock"] is False


def test_constants_on_a_gpu_stay() -> None:
    """To read them would begin to use the GPU that they were on."""
    compiled: Any = Compiled(None, constants={"constant0": SimpleNamespace(is_cuda=True)})
    with pytest.raises(ValueError, match="constants on its GPU"):
        segment_cache.dumps(compiled)


def test_a_binary_that_one_kernel_chose_stays_where_another_did_not() -> None:
    first, second = Kernel("sum", "small", "large").run("large"), Kernel("sum", "small", "large").run("small")
    found = travelled(Compiled(bundle_of(first, second)))
    assert {one.kernel_hash for one in found.kernel_artifacts} == {"<sum large>", "<sum small>"}


def test_a_kernel_can_be_launched_again_after_a_failure() -> None:
    kernel = Kernel("sum", "small").run("small")
    compiled = Compiled(bundle_of(kernel))
    compiled.extra = lambda: None  # type: ignore[attr-defined]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        segment_cache.dumps(compiled)  # type: ignore[arg-type]
    assert len(kernel.launchers) == 1


def test_a_module_travels_without_the_compiler_as_a_file_of_another_name() -> None:
    compiled = Compiled(None, source_code="from torch._inductor.utils import maybe_profile\nx = 1\n")
    found = pickle.loads(segment_cache.dumps(compiled))  # type: ignore[arg-type]
    assert found.source_code == "\nx = 1\n"
    assert found.cache_key != compiled.cache_key == "as compiled"
    assert pickle.loads(segment_cache.dumps(found)).cache_key == found.cache_key


@pytest.mark.parametrize(("name", "is_torchs"), [("mm", True), ("addmm", True), ("bias_addmm", False), ("none", False)])
def test_which_products_are_torchs(name: str, is_torchs: bool) -> None:
    assert segment_cache._is_torchs(name) is is_torchs


@dataclass(frozen=True)
class Named:
    """Stands for a segment."""

    name: str
    symbols: tuple[Any, ...] = ()

    @property
    def likeness(self) -> str:
        return self.name


def test_one_segment_that_cannot_be_written_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dumps(compiled: Any) -> bytes:
        assert compiled.is_good, "it has launchers"
        return b"good"

    class Fake:
        def __init__(self, is_good: bool) -> None:
            self.is_good = is_good

    monkeypatch.setattr(segment_compiler, "CompiledFxGraph", Fake)
    monkeypatch.setattr(segment_cache, "dumps", dumps)
    compiler = segment_compiler.SegmentCompiler(torch.device("cuda"))
    compiler._compiled = {"first": Fake(False), "second": Fake(True)}  # type: ignore[dict-item]
    with caplog.at_level(logging.WARNING):
        found = [compiler.dumps(Named(one)) for one in compiler._compiled]  # type: ignore[arg-type]
    assert [one and pickle.loads(one) for one in found] == [None, (b"good", None)]
    (told,) = caplog.records
    assert told.getMessage().startswith("first is compiled in every process: AssertionError: it has launchers")
    assert told.exc_info is None


def test_a_segment_that_cannot_be_read_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    compiler = segment_compiler.SegmentCompiler(torch.device("cuda"))
    segment: Any = Named("first")
    compiler.loads(segment, b"no pickle")
    assert compiler._compiled == {}
    assert "first is compiled anew: what another process made cannot be used: UnpicklingError" in caplog.text


@dataclass
class Moving:
    """A compiled segment, as far as it is moved."""

    source_code: str
    device_idxs: set[int]
    _triton_bundle: Any = None
    cache_key: str = "before"


def test_what_was_compiled_for_two_gpus_stays() -> None:
    segment: Any = Moving("'cuda:0', 'cuda:1'", {0, 1})
    with pytest.raises(CannotRelocate, match=r"compiled for the GPUs \[0, 1\]"):
        segment_cache._relocate(segment, 2)


def test_a_kernel_without_a_text_stays() -> None:
    bundle = SimpleNamespace(static_autotuners=[SimpleNamespace(kernel_name="triton_sum", cache_key="unknown")])
    segment: Any = Moving("x = 'cuda:0'\n", {0}, bundle)
    with pytest.raises(CannotRelocate, match="triton_sum belongs to no text"):
        segment_cache._relocate(segment, 2)
    assert (segment.source_code, segment.device_idxs, segment.cache_key) == ("x = 'cuda:0'\n", {0}, "before")


def test_a_segment_that_stays_where_it_is_is_not_touched() -> None:
    segment: Any = Moving("device_index=3", {3})  # a form that is not known
    segment_cache._relocate(segment, 3)
    assert segment == Moving("device_index=3", {3})


def test_ranks_on_gpus_of_one_kind_have_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    props = {number: SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132) for number in range(4)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: props[device.index])
    props[2].name = "H100"
    props[3].multi_processor_count = 16  # a part of a GPU

    def key(number: int, what: str = "sin", where: int | None = None) -> str:
        device = f"device(type='cuda', index={number if where is None else where})"
        segment: Any = Named(f"%0 {what} {device}")
        return segment_compiler.segments_key([segment], torch.device("cuda", number))

    assert key(0) == key(1)
    assert len({key(0), key(2), key(3), key(0, "cos"), key(0, where=1)}) == 5
    with segment_compiler.inductor_config.patch(max_autotune=True):
        changed = key(0)
    assert changed != key(0)


def test_the_number_of_the_gpu_counts() -> None:
    first, second = (segment_compiler.fingerprint(torch.device("cuda", number)) for number in (0, 1))
    assert dict(first)["the device"] == "cuda:0"
    assert [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]] == [
        (("the device", "cuda:0"), ("the device", "cuda:1"))
    ]


def test_the_compiler_of_kernels_for_a_cpu_counts() -> None:
    assert dict(segment_compiler.fingerprint(torch.device("cpu")))["the C++ compiler"]


def test_the_assembler_is_chosen_before_a_kernel_of_ours_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's keys hold its version, so another process finds kernels only if both choose it as early."""
    chosen: list[str] = []
    monkeypatch.setattr(segment_compiler.compile_tasks, "_set_triton_ptxas_path", lambda: chosen.append("once"))
    segment_compiler.SegmentCompiler(torch.device("cpu"))
    assert chosen == []
    segment_compiler.SegmentCompiler(torch.device("cuda", 0))
    assert chosen == ["once"]
