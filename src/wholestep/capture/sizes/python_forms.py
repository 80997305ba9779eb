"""Operators whose C++ asks for sizes as numbers are described by their Python form, which takes symbols.

torch answers such a question with the number of the traced call, and the dim is a constant from then on. Which
operators ask differs by version and device. So whoever asks is stopped, and described anew by torch's Python form of
it; one that has none gets its number (`SizeEnv.constant` says who it was).

[Note: two places that ask]
Operators that are recorded come to `describe`. Others are made of them in C++, above all modes (``matmul`` of
``linear``, ``interpolate``): torch's Python dispatcher hands those to `compose`. torch.compile has the dispatcher take
the Python form of every operator that has one. Here C++ comes first, and a form counts that computes with the same
operators: numbers are those of eager code, to the bit.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import DispatchKey
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import OpOverload, get_cached_ops, resolve_key
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.ir.sizes import hint, is_data, numbers_of

_COMPOSED = DispatchKey.CompositeImplicitAutograd
_SIZES = tuple(getattr(torch.ops.aten, name).default for name in ("size", "stride"))
"""What C++ calls where it asks for numbers."""
_TAKES_NUMBERS = "expected to contain only concrete integers"
"""What C++ says that is given symbols and takes numbers."""
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)


class _AsksForNumbers(BaseException):
    """Raised into C++ that asks, and caught where the operator was called: no error, so that nobody reports it."""


class PythonForms:
    """Describes the operators of one trace."""

    def __init__(self) -> None:
        self._begun: int | None = None
        """What `_acts` was when C++ began that is to be stopped where it asks. None where it may ask."""
        self._acts = 0
        """Recorded operators that write or draw: C++ that has called one cannot be begun anew."""
        self._inside = False
        """Whether an operator is being described, so that what it calls is not recorded."""
        self._composed: Any = None
        """The innermost operator that is made of others and is running."""

    def asking(self, func: Any) -> Any:
        """Who asks where `func` is called: the operator that is made of others where its C++ does, else `func`."""
        return self._composed if func in _SIZES and self._composed is not None else func

    def describe(self, run: Callable[[], Any], mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """What `run()` gives: the operator on fake tensors of `mode`, by its Python form where C++ asks for numbers."""
        if func in _SIZES:
            return run()
        own = None if func in decomposition_table or not _has_known_sizes(args, kwargs) else _like_its_input(func)
        form: Any = own or decomposition_table.get(func)
        recorded, self._inside = not self._inside, True
        try:
            if form is None or not _has_symbols(args, kwargs):
                return self._unstopped(run) if recorded else run()

            def formed() -> Any:
                with mode:
                    return form(*args, **kwargs)

            return self._stopped(run, formed) if own is None else formed()
        finally:
            self._inside = not recorded
            if recorded and (func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags):
                self._acts += 1

    def compose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives that is made of others, by its C++, or its Python form where that asks."""
        form: Any = _OWN.get(func) or _by_sizes(func) or func.py_kernels.get(_COMPOSED) or decomposition_table.get(func)
        around, self._composed = self._composed, func
        try:
            run = functools.partial(func._op_dk, _COMPOSED, *args, **kwargs)
            if form is None or not _has_symbols(args, kwargs):
                return run()
            return self._stopped(run, lambda: self._formed(func, form, args, kwargs))
        finally:
            self._composed = around

    def _formed(self, func: Any, form: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the Python form gives if it computes with the operators of the C++, else what C++ gives with numbers."""
        mode = get_proxy_mode()
        if mode is None:
            return form(*args, **kwargs)
        nodes = mode.tracer.graph.nodes
        last = next(iter(reversed(nodes)))
        if last.target in _SIZES:  # the question has just been recorded
            mode.tracer.graph.erase_node(last)
        before = len(nodes)
        found = form(*args, **kwargs)
        used = [node.target for node in list(nodes)[before:]]
        if func in _OWN:
            return found
        if _has_known_sizes(args, kwargs) and _computing(used) == _computing(
            _at_traced_sizes(func, args, kwargs, _COMPOSED)[1]
        ):
            return found
        return func._op_dk(_COMPOSED, *args, **kwargs)

    def _stopped(self, run: Callable[[], Any], form: Callable[[], Any]) -> Any:
        begun, self._begun = self._begun, self._acts
        try:
            return run()
        except _AsksForNumbers:
            self._begun = None
            return form()
        except RuntimeError as error:
            if _TAKES_NUMBERS not in str(error) or self._begun != self._acts:
                raise
            self._begun = None
            return form()
        finally:
            self._begun = begun

    def _unstopped(self, run: Callable[[], Any]) -> Any:
        begun, self._begun = self._begun, None
        try:
            return run()
        finally:
            self._begun = begun

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, C++ that asks for sizes inside of `describe` is stopped, and torch logs nothing of that."""
        handlers: dict[Any, Callable[[Any], Any]] = fake_tensor._DISPATCH_META_HANDLERS

        def asked(answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def numbers(args: Any) -> Any:
                if self._begun == self._acts and _is_symbolic(args[0]):
                    raise _AsksForNumbers
                return answer(args)

            return numbers

        def is_unexpected(record: object) -> bool:
            return self._begun is None

        fake_tensor.log.addFilter(is_unexpected)
        try:
            with patch.dict(handlers, {one: asked(handlers[one]) for one in _SIZES if one in handlers}):
                yield
        finally:
            fake_tensor.log.removeFilter(is_unexpected)

    @contextmanager
    def composing(self) -> Iterator[None]:
        """While open, operators that are made of others come to `compose` on this thread."""
        original, known = OpOverload._get_dispatch, dict[Any, Any]()

        def kernel(func: OpOverload, key: DispatchKey) -> Any:
            if (func, key) not in known:
                known[func, key] = self._kernel(func, _uncached(original, func, key), key)
            return known[func, key]

        def uncached(func: OpOverload, key: DispatchKey) -> Any:
            return _uncached(original, func, key)

        for func in get_cached_ops():
            func._dispatch_cache.clear()
        with patch.object(OpOverload, "_get_dispatch", on_this_thread(kernel, uncached)), enable_python_dispatcher():
            yield

    def _kernel(self, func: OpOverload, found: Any, key: DispatchKey) -> Any:
        """What runs an operator at a key where torch's Python dispatcher takes `found`: C++ where there is any."""
        if found is func.py_kernels.get(_COMPOSED) or found is func.py_kernels.get(DispatchKey.Autograd):
            with patch.dict(func.py_kernels, clear=True):
                found = resolve_key(func, key)
        return (lambda *args, **kwargs: self.compose(func, args, kwargs)) if found == _COMPOSED else found


def _masked_select_backward(grad: torch.Tensor, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    whole, _ = torch.broadcast_tensors(input, mask)
    return torch.zeros_like(whole, memory_format=torch.preserve_format).masked_scatter(mask, grad)


_OWN = {torch.ops.aten.masked_select_backward.default: _masked_select_backward}
"""Forms of ours that compute as C++ does, of sizes that are data too: there it cannot be asked what it computes."""


@functools.cache
def _like_its_input(func: OpOverload) -> Callable[..., Any] | None:
    """The Python form of an operator whose result has sizes that are told or simple, and which is described by numbers
    alone: a backward that is told the size of the input, a Fourier transform."""
    names = [one.name for one in func._schema.arguments]
    if func not in _TRANSFORMS and ("input_size" not in names or len(func._schema.returns) != 1):
        return None
    place = -1 if func in _TRANSFORMS else names.index("input_size")

    def sized(*args: Any, **kwargs: Any) -> Any:
        if func in _TRANSFORMS:
            _keep_order(args[0])
            sizes = _TRANSFORMS[func](*args, **kwargs)
        else:
            sizes = args[place] if len(args) > place else kwargs["input_size"]
        known, _ = _at_traced_sizes(func, args, kwargs)
        order = sorted(range(len(sizes)), key=lambda dim: -known.stride(dim))
        made = torch.empty([sizes[dim] for dim in order], dtype=known.dtype, device=known.device)
        return made.permute([order.index(dim) for dim in range(len(sizes))])

    return sized


def _keep_order(x: torch.Tensor) -> None:
    """Has the trace hold for tensors alone whose dims follow each other in memory as those of this one do."""
    order = sorted(range(x.dim()), key=lambda dim: hint(x.stride(dim)))
    for inner, outer in pairwise(order):
        bool(x.stride(inner) <= x.stride(outer))


def _with_last(x: torch.Tensor, dims: Sequence[int], size: Any) -> list[Any]:
    last = dims[-1] % x.dim()
    return [size if dim == last else one for dim, one in enumerate(x.shape)]


_TRANSFORMS: dict[Any, Callable[..., Sequence[Any]]] = {
    torch.ops.aten._fft_c2c.default: lambda x, dim, normalization, forward: x.shape,
    torch.ops.aten._fft_r2c.default: lambda x, dim, normalization, onesided: (
        _with_last(x, dim, x.shape[dim[-1]] // 2 + 1) if onesided else x.shape
    ),
    torch.ops.aten._fft_c2r.default: lambda x, dim, normalization, last_dim_size: _with_last(x, dim, last_dim_size),
}
"""The sizes of what they give. torch's description of them resizes a tensor, which it cannot with symbols."""


@functools.cache
def _by_sizes(func: OpOverload) -> Callable[..., Any] | None:
    """The Python form of an operator that takes sizes or factors (overload ``vec``), if there is one for sizes."""
    packet = func.overloadpacket
    if func._overloadname != "vec" or "default" not in packet.overloads():
        return None

    def resized(input: torch.Tensor, output_size: Any, *more: Any) -> Any:
        *flags, factors = more
        if output_size is None:
            output_size = [_times(size, by) for size, by in zip(input.shape[2:], factors, strict=True)]
        return packet.default(input, output_size, *flags, *(factors or ()))

    return resized


def _times(size: Any, factor: float) -> Any:
    """As C++ computes it in float64; a whole factor gives a simple expression."""
    return size * int(factor) if factor.is_integer() else torch.sym_int(size * factor)


class _Listing(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func)
        return func(*args, **(kwargs or {}))


def _at_traced_sizes(func: Any, args: Any, kwargs: Any, key: DispatchKey | None = None) -> tuple[Any, list[Any]]:
    """What the C++ of `func` (at a dispatch key) gives at the sizes of the traced call, and the operators it runs."""

    def number(one: Any) -> Any:
        return one.node.hint if isinstance(one, torch.SymInt) else one

    def constant(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return number(one)
        sizes, strides = map(number, one.shape), map(number, one.stride())
        made = torch.empty_strided([*sizes], [*strides], dtype=one.dtype, device=one.device)
        return made.requires_grad_(one.requires_grad)

    with _disable_current_modes(), no_python_dispatcher(), FakeTensorMode(), _Listing() as listing:
        args, kwargs = pytree.tree_map(constant, (args, kwargs))
        listing.found.clear()
        given = func(*args, **kwargs) if key is None else func._op_dk(key, *args, **kwargs)
    return given, listing.found


def _computing(operators: list[Any]) -> Counter[Any]:
    """Those that compute: all but views, copies and questions."""
    computing = Counter[Any]()
    for one in operators:
        if isinstance(one, OpOverload) and not one.is_view and one not in _COPIES:
            computing[one] += any("Tensor" in str(made.type) for made in one._schema.returns)
    return +computing


def _uncached(original: Callable[..., Any], func: OpOverload, key: DispatchKey) -> Any:
    found = original(func, key)
    func._uncache_dispatch(key)
    return found


def _has_symbols(args: Any, kwargs: Any) -> bool:
    return any(map(_is_symbolic, pytree.tree_leaves((args, kwargs))))


def _has_known_sizes(args: Any, kwargs: Any) -> bool:
    """Whether no size is data: C++ can be run at the sizes of the traced call."""
    return not any(is_data(size) for one in pytree.tree_leaves((args, kwargs)) for size in numbers_of(one))


def _is_symbolic(one: Any) -> bool:
    if isinstance(one, torch.SymInt):
        return True
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
        return False
    return not all(isinstance(size, int) for size in (*one.shape, *one.stride()))
