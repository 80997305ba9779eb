"""Segments through Inductor: which nodes it may have, what it has made of them. `lower/inductor/compile_fx.py` calls
it.

Note: what may refuse its values
    On the CPU, look-ups stay with ATen, which raises; see `_is_known`. On a GPU a look-up out of range ends in an
    assertion of the device, compiled or not.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import logging
import pickle
import platform
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import compile_tasks

from wholestep.cost.calibration import calibrate
from wholestep.ir import node_meta, op_info
from wholestep.ir.ops.packed_scalars import element
from wholestep.ir.segment import Compiled, Segment
from wholestep.ir.sizes import is_of_arguments
from wholestep.lower.codecache import segment_cache, triton_cache
from wholestep.lower.codecache.relocate_device import without_device_index
from wholestep.lower.decompositions.optimizers import is_written_out
from wholestep.lower.decompositions.tensor_scalars import takes_numbers
from wholestep.lower.gemm import matmul_autotune
from wholestep.lower.inductor import cpu_isa
from wholestep.passes.rewrites import matmul_out_dtype
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from wholestep.lower.inductor import compile_fx
    from wholestep.lower.inductor.compile_fx import PendingSegment
    from wholestep.lower.inductor.segment_sizes import Asked
else:
    compile_fx = lazy_import("wholestep.lower.inductor.compile_fx")

log = logging.getLogger("wholestep")

_LEAST_CAPABILITY = 7
"""Of the GPUs that Inductor's kernels run on, the oldest generation: Volta."""

_aten = torch.ops.aten
MOST_PARTS = 16
"""That are put together by a kernel of Inductor for GPUs. Its text grows with each of them, and Triton's time with the
square: 12 take it 0.6 s, 48 four and the 99 small gradients of W1 19."""

_ATEN_ONLY = (
    _aten._local_scalar_dense.default,
    _aten.item.default,
    _aten._grouped_mm.default,  # described for bfloat16 alone
)
_BY_STRIDES = re.compile(r"convolution(_backward)?|_scaled_dot_product_\w+attention\w*")
"""Operators of which Inductor asks strides as numbers: where sizes move, torch calls their library."""
_LIBRARIES = re.compile(r"(add|b|badd)?mm|convolution(_backward)?|_scaled_dot_product_\w+attention\w*")
"""Operators that run as they are: nothing is fused into them."""


_BY_NUMBER = frozenset({"_to_copy", "clone", "full", "full_like", "zeros_like", "ones_like", "arange", "scalar_tensor"})
"""Operators that compute number by number, besides those that torch says so of."""


def compiles(node: fx.Node) -> bool:
    """Whether Inductor may have a node: an operator on dense tensors of one device. Numbers it reads packed, sizes as
    arguments."""
    numbers = [arg for arg in node.all_input_nodes if not _gives_tensors(arg) and not _is_size(arg)]
    return _is_known(node) and all(arg.target is element for arg in numbers)


def reads_packed(node: fx.Node) -> bool:
    """Whether Inductor may have a node once its numbers are packed."""
    numbers = [arg for arg in node.all_input_nodes if not _gives_tensors(arg) and not _is_size(arg)]
    return bool(numbers) and _is_known(node) and takes_numbers(node)


def may_compile(node: fx.Node) -> bool:
    """Whether Inductor will have a node, of a program whose numbers are not packed yet."""
    return compiles(node) or reads_packed(node)


def only_on(device_type: str, says: Callable[[fx.Node], bool], node: fx.Node) -> bool:
    """What something says of a node, where all that the node gives lies on devices of a type.

    Beside a GPU, what is computed on the host is small, and its first kernel takes the C++ compiler a minute.
    """
    return says(node) and all(one.device.type == device_type for one in node_meta.tensors(node))


def _is_known(node: fx.Node) -> bool:
    if not op_info.is_op(node):
        return False
    if node.target.namespace not in ("aten", "prims") and not is_written_out(node):  # type: ignore[union-attr]
        return False
    if op_info.mutated_args(node.target) or op_info.draws(node):
        return False
    if node.target in _ATEN_ONLY:
        return False
    taken = [one for arg in node.all_input_nodes for one in node_meta.tensors(arg)]
    given = list(node_meta.tensors(node))
    if node.target is matmul_out_dtype.WIDE or matmul_out_dtype.is_mostly_wide(node):
        return False  # it writes to a slice of a bucket
    if _BY_STRIDES.fullmatch(_name(node)) and not all(
        isinstance(size, int) for one in taken + given for size in one.shape
    ):
        return False
    if node.target is _aten.cat.default and len(taken) > MOST_PARTS and given[0].is_cuda:
        return False  # one kernel of ATen
    # A kernel on the CPU that finds an index out of range throws in one of its threads, which ends the process.
    if op_info.may_fail(node.target) and not all(one.is_cuda for one in given):
        return False
    return bool(given) and all(map(_is_plain, taken + given)) and _one_device(taken + given)


def pays_alone(node: fx.Node) -> bool:
    """Whether one call is worth a segment: the kernel of ATen sorts the indices first."""
    return node.target is _aten.embedding_dense_backward.default and node_meta.tensor(node).is_cuda


def is_library_call(node: fx.Node) -> bool:
    """Whether Inductor leaves a node that it may have to a library: a product, a convolution, attention."""
    return op_info.is_op(node) and _LIBRARIES.fullmatch(_name(node)) is not None


def _name(node: fx.Node) -> str:
    """Of an operator, without its namespace and overload."""
    name: str = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    return name


def is_pointwise(node: fx.Node) -> bool:
    """Whether a kernel that reads what the call gives can compute it on its way."""
    if not _is_known(node) or op_info.may_fail(node.target):
        return False
    return torch.Tag.pointwise in node.target.tags or _name(node) in _BY_NUMBER  # type: ignore[union-attr]


def may_follow(node: fx.Node) -> bool:
    """Whether a node that Inductor does not have may follow the segment that it reads."""
    return node.target is matmul_out_dtype.WIDE


def widens(node: fx.Node) -> bool:
    """Whether the device of a product can write it in float32: with CUDA, and not on GPUs of others."""
    return node_meta.tensor(node).is_cuda and torch.version.cuda is not None


def _gives_tensors(node: fx.Node) -> bool:
    value = node_meta.value(node)
    return isinstance(value, (torch.Tensor, list, tuple))


def _is_size(node: fx.Node) -> bool:
    """Whether the node gives a size that moves: the host computes it, and segments take it as it is."""
    value = node_meta.value(node)
    return isinstance(value, torch.SymInt) and is_of_arguments(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    # A kernel reads what lies in memory, which a negative view of a complex tensor does not stand for.
    if tensor.layout is not torch.strided or tensor.dtype.is_complex or tensor.is_neg():
        return False
    return all(map(is_of_arguments, (*tensor.shape, *tensor.stride())))


def _one_device(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.device for tensor in tensors}) == 1


def why_not(device: torch.device) -> str:
    """Why nothing can be compiled for this device here; empty if it can, as far as that is known without trying."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (CXX, else g++)"
    if device.type != "cuda":
        return ""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= _LEAST_CAPABILITY else f"triton does not know GPUs of compute capability {major}.{minor}"


class SegmentCompiler:
    """Compiles segments by Inductor, equal ones once."""

    def __init__(self, device: torch.device, *, early_launches: bool = False, tune_products: bool = False) -> None:
        """`device`: that of the segments. The rest as for `wholestep.Inductor`."""
        self._early_launches, self._tune_products = early_launches, tune_products
        self._compiled: dict[str, Compiled] = {}
        self._loaded: dict[str, Compiled] = {}
        """Of those, what came from another process, as it is called."""
        self._asked: dict[str, Asked] = {}
        """What they count on, of sizes that move."""
        self._why_none: dict[str, str] = {}
        """Why they are none that Inductor has written."""
        self._unfinished: dict[str, PendingSegment] = {}
        self._device, self._on_cpu = device, device.type == "cpu"
        if not self._on_cpu:
            _choose_assembler()
        self._asking: threading.Thread | None = None

    def prepare(self) -> None:
        """Begins what takes long and needs no segment: to find out what the CPU can do.

        There is other work to do meanwhile. For kernels of a GPU it does not matter.
        """
        if self._on_cpu and self._asking is None:
            self._asking = threading.Thread(target=cpu_isa.probe, daemon=True)
            self._asking.start()

    def dump_shared(self) -> bytes:
        """What all segments have in common, for another process: what was found out about the CPU, or kernels of ours
        that have run on a GPU and algorithms of products."""
        if self._on_cpu:
            return cpu_isa.dump_answers()
        return pickle.dumps((triton_cache.dumps(triton_cache.kept_kernels()), matmul_autotune.choices()))

    def load_shared(self, data: bytes) -> None:
        """Uses what `dump_shared` gave on such a device with such a compiler, which `fingerprint` names."""
        if self._on_cpu:
            cpu_isa.load_answers(data)
            return
        try:
            own, choices = pickle.loads(data)
            if choices is not None:
                matmul_autotune.load_choices(choices)
            triton_cache.loads(own)
        except Exception as error:  # whatever it is, kernels can be built
            log.warning("kernels that segments share are built anew: %s", _described(error))

    def begin(self, segment: Segment) -> None:
        """Has a segment compiled, if none like it is; others may be begun before somebody waits."""
        key = self._key(segment)
        if key not in self._compiled and key not in self._unfinished:
            self._ask()
            # A GPU's are measured for one size each, and every batch may have another one.
            own_products = self._tune_products and (self._on_cpu or not segment.symbols)
            begun = compile_fx.begin_compile(segment, early_launches=self._early_launches, own_products=own_products)
            self._unfinished[key] = begun
            if begun.asked is not None:
                self._asked[key] = begun.asked
            if begun.why_none:
                self._why_none[key] = begun.why_none
        if key in self._asked:
            self._asked[key].require(segment)

    def _key(self, segment: Segment) -> str:
        """What is compiled for a segment is kept under this text: more than one for those that are alike, where sizes
        that move have other answers to what is asked of them."""
        others = (f"{segment.likeness}\n{number}" for number in itertools.count(1))
        texts = itertools.chain([segment.likeness], others)
        return next(one for one in texts if one not in self._asked or self._asked[one].hold(segment))

    def finish(self) -> None:
        """Waits for what was begun. Raises what the compiler raises; what is not finished then is as if not begun."""
        try:
            for key, begun in self._unfinished.items():
                self._compiled[key] = begun.finish()
        finally:
            self._unfinished.clear()

    def compile(self, segment: Segment) -> Compiled:
        """A function that does what the segment does: takes a list, which it empties, and gives a list."""
        self.begin(segment)
        self.finish()
        key = self._key(segment)
        return self._loaded.get(key, self._compiled[key])

    def why_none(self, segment: Segment) -> str:
        """Why the calls of a segment run one by one; empty if it is compiled."""
        return self._why_none.get(self._key(segment), "")

    def _ask(self) -> None:
        """Waits until it is known what the CPU can do, if somebody has asked."""
        if self._asking is not None:
            self._asking.join()

    def texts(self) -> list[str]:
        """The modules that Inductor has written, those of segments that are not finished, too."""
        written = [*self._compiled.values(), *(begun.graph for begun in self._unfinished.values())]
        return [one.source_code for one in written if isinstance(one, CompiledFxGraph)]

    def dumps(self, segment: Segment) -> bytes | None:
        """What was compiled of the segment, for another process; None for what Inductor cannot write."""
        key = self._key(segment)
        compiled = self._compiled.get(key)
        if not isinstance(compiled, CompiledFxGraph):
            return None
        try:
            return pickle.dumps((segment_cache.dumps(compiled), self._asked.get(key)))
        except Exception as error:  # whatever a compiler's objects raise, the rest is worth keeping
            log.warning("%s is compiled in every process: %s", segment.name, _described(error))
            return None

    def loads(self, segment: Segment, data: bytes) -> None:
        """Uses what `dumps` gave in another process, for this device or one of the same kind. On a CPU, kernels that
        are not in Inductor's cache are built. What counts on other sizes than this process has is left alone."""
        key = self._key(segment)
        if key in self._compiled:
            return
        try:
            made, asked = pickle.loads(data)
            if asked is not None and not asked.hold(segment):
                log.info("%s is compiled here too: %s do not hold", segment.name, asked.conditions)
                return
            self._compiled[key], self._loaded[key] = segment_cache.loads(made, self._device)
            if asked is not None:
                self._asked[key] = asked
        except Exception as error:  # likewise
            log.warning(
                "%s is compiled anew: what another process made cannot be used: %s", segment.name, _described(error)
            )


def _choose_assembler() -> None:
    """Has Triton use the assembler that comes with torch, if one does, before it compiles or looks for anything.

    Inductor does so with its first kernel. Triton asks for the version once and makes it a part of its keys, so kernels
    of ours would have other keys in a process that builds them before Inductor's than in one that does so after them.
    """
    if hasattr(compile_tasks, "_set_triton_ptxas_path"):
        compile_tasks._set_triton_ptxas_path()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def may_measure() -> bool:
    """Whether bits may depend on what was measured to be the fastest: not if Inductor is told to be deterministic."""
    return not inductor_config.deterministic


def fingerprint(device: torch.device) -> list[tuple[str, str]]:
    """What compiled code depends on besides the graph: the device, the compiler of kernels for a CPU, and the options
    of Inductor, as its own cache sees them."""
    options = inductor_config.save_config_portable()
    spelled = [(f"torch._inductor.config.{name}", _stable_text(options[name])) for name in sorted(options)]
    compiler = [] if device.type == "cuda" else [("the C++ compiler", _compiler())]
    return [("the device", str(device)), *compiler, *spelled]


def segments_key(segments: Iterable[Segment], device: torch.device) -> str:
    """The same text for ranks that can use each other's compiled segments: these segments, on devices of one kind."""
    kind = [torch.__version__, str(torch.version.git_version), *_device_kind(device)]
    options = [f"{name} {held}" for name, held in fingerprint(device) if name != "the device"]
    alike = [
        one.likeness if device.index is None else without_device_index(one.likeness, device.index) for one in segments
    ]
    return hashlib.sha256("\n".join([*kind, *options, *alike]).encode()).hexdigest()


def _device_kind(device: torch.device) -> list[str]:
    """What a compiler knows of a device, less its number, and which Triton makes kernels for it."""
    if device.type == "cpu":
        return [platform.machine(), torch.backends.cpu.get_cpu_capability(), calibrate.cpu_model()]
    found = torch.cuda.get_device_properties(device)
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "none"
    return [found.name, f"{found.major}.{found.minor}", str(found.multi_processor_count), triton]


def _compiler() -> str:
    try:
        return get_compiler_version_info(get_cpp_compiler())
    except InvalidCxxCompiler:
        return "none"


def _stable_text(option: Any) -> str:
    """The same text in every process: sets have an order of their own in each."""
    if isinstance(option, (set, frozenset)):
        return f"{type(option).__name__} {sorted(map(_stable_text, option))}"
    if isinstance(option, (list, tuple)):
        return f"{type(option).__name__} {[_stable_text(one) for one in option]}"
    if isinstance(option, dict):
        return str([(_stable_text(key), _stable_text(one)) for key, one in option.items()])
    return repr(option)
