// What of a tensor a trace depends on.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace wholestep {

using torch::autograd::AutogradMeta;

class Layout {
 public:
  explicit Layout(const c10::TensorImpl& impl)
      : keys_(impl.key_set()), dtype_(impl.dtype()), device_(impl.device()), dim_(impl.sizes().size()),
        sizes_(impl.sizes().vec()), strides_(impl.strides().vec()), told_by_sizes_(strides_told_by_sizes(impl)) {
    const int64_t* sizes = impl.sizes().data();
    few_[0] = sizes[0], few_[1] = sizes[1];
  }

  // Reads no more lines of memory than it needs, and has no branch that differs between ordinary tensors.
  bool fits(const c10::TensorImpl& impl) const {
    if (impl.key_set() != keys_) return false;  // other kinds of tensor may refuse to give sizes or strides
    const auto sizes = impl.sizes();
    // A TensorImpl has room for five sizes in any case, so the first two are there to be read whatever the rank.
    const int64_t* few = sizes.data();
    bool fits = (impl.dtype() == dtype_) & (impl.device() == device_);
    fits &= (sizes.size() == dim_) & (few[0] == few_[0]) & (few[1] == few_[1]);
    if (dim_ > FEW) fits = fits && sizes == c10::IntArrayRef(sizes_);
    return fits & (told_by_sizes_ ? impl.is_contiguous() : impl.strides() == c10::IntArrayRef(strides_));
  }

 private:
  static constexpr size_t FEW = 2;

  c10::DispatchKeySet keys_;  // besides the backend: sparse, quantized, conjugated, a subclass with its own dispatch
  caffe2::TypeMeta dtype_;
  c10::Device device_;
  size_t dim_;
  int64_t few_[FEW];
  std::vector<int64_t> sizes_, strides_;
  bool told_by_sizes_;

  // A contiguous tensor has one possible stride per dimension, but for dimensions of size one and empty tensors.
  static bool strides_told_by_sizes(const c10::TensorImpl& impl) {
    const auto sizes = impl.sizes();
    return impl.is_contiguous() && std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; });
  }
};

// Layouts are few: tensors share them, so that they stay near while the tensors pass by.
class Layouts {
 public:
  uint32_t number_of(const c10::TensorImpl& impl) {
    const auto last = all_.rbegin();
    for (auto it = last; it != all_.rend(); ++it)
      if (it->fits(impl)) return static_cast<uint32_t>(all_.rend() - it - 1);
    all_.emplace_back(impl);
    return static_cast<uint32_t>(all_.size() - 1);
  }
  const Layout& operator[](uint32_t number) const { return all_[number]; }

 private:
  std::vector<Layout> all_;
};

// Whether sizes, strides and dtype are those of the TensorImpl itself, not answered by Python or a subclass of it.
inline bool is_plain(const c10::TensorImpl& impl) {
  const auto keys = impl.key_set();
  return impl.layout() == c10::kStrided && !keys.has(c10::DispatchKey::Python) && !impl.has_symbolic_sizes_strides() &&
      !keys.has(c10::DispatchKey::NestedTensor) && !keys.has(c10::DispatchKey::FuncTorchBatched) &&
      !keys.has(c10::DispatchKey::FuncTorchGradWrapper);
}

inline c10::TensorImpl* impl_of(PyObject* tensor) { return THPVariable_Unpack(tensor).unsafeGetTensorImpl(); }

inline AutogradMeta* meta_of(const c10::TensorImpl& impl) { return static_cast<AutogradMeta*>(impl.autograd_meta()); }

inline bool requires_grad(const AutogradMeta& meta) { return meta.requires_grad_ || meta.grad_fn_; }

// The Python type of a tensor that may have no Python object yet.
inline PyTypeObject* type_of(const c10::TensorImpl& impl) {
  PyObject* object = impl.pyobj_slot()->load_pyobj();
  return object != nullptr ? Py_TYPE(object) : reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

}  // namespace wholestep
