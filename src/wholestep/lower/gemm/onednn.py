"""Products of float32 matrices on a CPU by oneDNN, which is a part of torch: the only file that reaches it.

On x86 torch multiplies float32 matrices by MKL. On processors that MKL was not made for, oneDNN is up to twice as fast:
it generates its kernels for the instructions that it finds. torch itself goes there with half precision alone, and no
operator leads there with float32, but the function behind it takes that type, too. A few lines of C++ call it, which
turn what it throws into text; Inductor's compiler builds them, and keeps them in its cache. torch refuses processors
without AVX-512, as if for half precision: `why_not` says so, and torch multiplies there.

Source: Intel, oneDNN documentation, "Matrix Multiplication".
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wholestep.ir.ops.library import LIBRARY
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from torch._inductor import codecache
else:
    codecache = lazy_import("torch._inductor.codecache")

log = logging.getLogger("wholestep")

# The name of a function in a library holds the types of its arguments, so one that takes others is not found. A Tensor
# is one pointer, to what Python knows as `Tensor._cdata`.
_SOURCE = """
#include <exception>
#include <string>

namespace at {
class Tensor;
namespace native {
void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& out, float beta, float alpha);
}
}

extern "C" __attribute__((visibility("default")))
const char* wholestep_product(void* a, void* b, void* out, float beta) {
  static thread_local std::string said;
  auto tensor = [](void*& held) -> const at::Tensor& { return reinterpret_cast<const at::Tensor&>(held); };
  try {
    at::native::mkldnn_matmul(tensor(a), tensor(b), tensor(out), beta, 1.0f);
    return nullptr;
  } catch (const std::exception& error) {
    said = error.what();
  } catch (...) {
    said = "an error without a text";
  }
  return said.c_str();
}
"""

_Call = Callable[..., bytes | None]


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """``torch.matmul(a, b, out=out)`` of two matrices, or of two batches of as many; float32, on the CPU."""
    if (call := _opened()) is None:
        return torch.matmul(a, b, out=out)
    _run(call, a, b, out, beta=0.0)
    return out


def product_add(bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """``torch.addmm(bias, a, b, out=out)``, likewise."""
    if (call := _opened()) is None:
        return torch.addmm(bias, a, b, out=out)
    out.copy_(bias)
    _run(call, a, b, out, beta=1.0)
    return out


def replacements() -> dict[Any, Callable[..., Tensor]]:
    """Operators of torch, and those by oneDNN that may stand in their place; none where it cannot be called."""
    if why_not():
        return {}
    aten = torch.ops.aten
    product, product_add = PRODUCT.default, PRODUCT_ADD.default
    return {aten.mm.default: product, aten.bmm.default: product, aten.addmm.default: product_add}


@functools.cache
def why_not() -> str:
    """Why oneDNN cannot be called here; empty if it can. Builds what calls it where nobody has."""
    if not torch.backends.mkldnn.is_available():
        return "this torch comes without oneDNN"
    try:
        call = _built()
        a, b, out = torch.arange(6.0).view(2, 3), torch.ones(4, 3).t(), torch.full((2, 4), float("nan"))
        _run(call, a, b, out, beta=0.0)
    except Exception as error:  # whatever a compiler and a loader raise
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return "" if torch.equal(out, a @ b) else "it gives other numbers"


@functools.cache
def _opened() -> _Call | None:
    """What calls oneDNN; None where nothing does, which is told once."""
    if reason := why_not():
        log.warning("products that were compiled to run by oneDNN are torch's: %s", reason)
        return None
    return _built()


@functools.cache
def _built() -> _Call:
    library: Any = codecache.CppCodeCache.load(_SOURCE)
    call: Any = library.wholestep_product
    call.argtypes, call.restype = [*[ctypes.c_void_p] * 3, ctypes.c_float], ctypes.c_char_p
    return call  # type: ignore[no-any-return]


def _run(call: _Call, a: Tensor, b: Tensor, out: Tensor, *, beta: float) -> None:
    """Raises RuntimeError with what oneDNN says. As any call of ``ctypes``, it holds no lock of Python's."""
    if (said := call(a._cdata, b._cdata, out._cdata, beta)) is not None:
        shapes = f"{list(a.shape)} by {list(b.shape)} into {list(out.shape)}"
        raise RuntimeError(f"oneDNN refuses the product of {shapes}: {said.decode(errors='replace')}")


LIBRARY.define("product(Tensor a, Tensor b) -> Tensor")
LIBRARY.define("product.out(Tensor a, Tensor b, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.define("product_add(Tensor bias, Tensor a, Tensor b) -> Tensor")
LIBRARY.define("product_add.out(Tensor bias, Tensor a, Tensor b, *, Tensor(a!) out) -> Tensor(a!)")


def _output_like(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


LIBRARY.impl("product", lambda a, b: product(a, b, out=_output_like(a, b)), "CPU")
LIBRARY.impl("product.out", product, "CPU")
LIBRARY.impl("product_add", lambda bias, a, b: product_add(bias, a, b, out=_output_like(a, b)), "CPU")
LIBRARY.impl("product_add.out", product_add, "CPU")
torch.library.register_fake("wholestep::product", _output_like, lib=LIBRARY)
torch.library.register_fake("wholestep::product_add", lambda bias, a, b: _output_like(a, b), lib=LIBRARY)
PRODUCT = torch.ops.wholestep.product
PRODUCT_ADD = torch.ops.wholestep.product_add
