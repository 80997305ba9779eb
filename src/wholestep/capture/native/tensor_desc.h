// What of a tensor a trace depends on.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace wholestep {

using torch::autograd::AutogradMeta;

// Hands out a private member: an explicit instantiation may name it.
template <auto Member>
struct Opened {
  friend constexpr auto autograd_meta_member() { return Member; }
};
constexpr auto autograd_meta_member();
template struct Opened<&c10::TensorImpl::autograd_meta_>;

// The fields of a TensorImpl without their accessors, which branch and call. Never made.
struct Fields : c10::TensorImpl {
  static const auto& autograd_meta(const c10::TensorImpl& impl) { return impl.*autograd_meta_member(); }
  static const auto& sizes_and_strides(const c10::TensorImpl& impl) { return impl.*&Fields::sizes_and_strides_; }
  // What lies from `dtype` to `dispatch keys`; in between are device and flags.
  static const char* dtype(const c10::TensorImpl& impl) { return reinterpret_cast<const char*>(&(impl.*&Fields::data_type_)); }
  static constexpr size_t dtype_to_keys() {
    return offsetof(Fields, key_set_) + sizeof(c10::DispatchKeySet) - offsetof(Fields, data_type_);
  }
  // Whether they may lie in two lines of memory. malloc gives multiples of 16.
  static constexpr bool traits_may_be_parted() { return offsetof(Fields, data_type_) % 16 != 0; }
};

// dtype, device, flags (contiguous, symbolic, answered by a subclass, ...) and dispatch keys, as they lie in memory: two
// words tell what took a branch and a call each. A bit that means nothing may differ, and then it is compared in full.
struct Traits {
  uint64_t words[2];

  static Traits of(const c10::TensorImpl& impl) {
    static_assert(Fields::dtype_to_keys() == sizeof words, "a TensorImpl that is not known here");
    Traits found;
    std::memcpy(found.words, Fields::dtype(impl), sizeof found.words);
    return found;
  }
  bool operator==(const Traits& other) const {
    return ((words[0] ^ other.words[0]) | (words[1] ^ other.words[1])) == 0;
  }
};

class TensorDesc {
 public:
  // Of a tensor that is_plain().
  explicit TensorDesc(const c10::TensorImpl& impl)
      : traits_(Traits::of(impl)), dim_(impl.sizes().size()), first_sizes_{impl.sizes().data()[0], impl.sizes().data()[1]},
        sizes_(impl.sizes().vec()), strides_(impl.strides().vec()), sizes_suffice_(sizes_imply_strides(impl)),
        first_sizes_suffice_(sizes_suffice_ && dim_ <= NUM_FIRST) {}

  // Reads no more lines of memory than it needs, and has no branch that differs between ordinary tensors. Tensors of
  // other kinds, which might refuse to give sizes, have other traits; what is read of them here is memory, no answer.
  [[gnu::always_inline]] bool fits(const c10::TensorImpl& impl) const {
    const auto& now = Fields::sizes_and_strides(impl);
    // There is room for five sizes in any case, so the first two are there to be read whatever the rank.
    const int64_t* few = now.sizes_data();
    const bool fits = (Traits::of(impl) == traits_) & (now.size() == dim_) & (((few[0] ^ first_sizes_[0]) | (few[1] ^ first_sizes_[1])) == 0);
    return first_sizes_suffice_ ? fits : fits && fits_whole(now);
  }

 private:
  static constexpr size_t NUM_FIRST = 2;

  Traits traits_;
  size_t dim_;
  int64_t first_sizes_[NUM_FIRST];
  std::vector<int64_t> sizes_, strides_;
  bool sizes_suffice_, first_sizes_suffice_;

  bool fits_whole(const c10::impl::SizesAndStrides& now) const {
    return now.sizes_arrayref() == c10::IntArrayRef(sizes_) &&
        (sizes_suffice_ || now.strides_arrayref() == c10::IntArrayRef(strides_));
  }

  // A contiguous tensor has one possible stride per dimension, but for dimensions of size one and empty tensors.
  static bool sizes_imply_strides(const c10::TensorImpl& impl) {
    const auto sizes = impl.sizes();
    return impl.is_contiguous() && std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; });
  }
};

// Whether sizes, strides and dtype are those of the TensorImpl itself, not answered by Python or a subclass of it.
inline bool is_plain(const c10::TensorImpl& impl) {
  const auto keys = impl.key_set();
  return impl.layout() == c10::kStrided && !keys.has(c10::DispatchKey::Python) && !impl.has_symbolic_sizes_strides() &&
      !keys.has(c10::DispatchKey::NestedTensor) && !keys.has(c10::DispatchKey::FuncTorchBatched) &&
      !keys.has(c10::DispatchKey::FuncTorchGradWrapper);
}

inline c10::TensorImpl* impl_of(PyObject* tensor) { return THPVariable_Unpack(tensor).unsafeGetTensorImpl(); }

inline AutogradMeta* meta_of(const c10::TensorImpl& impl) { return static_cast<AutogradMeta*>(Fields::autograd_meta(impl).get()); }

inline bool requires_grad(const AutogradMeta& meta) { return meta.requires_grad_ || meta.grad_fn_; }

// The Python type of a tensor that may have no Python object yet.
inline PyTypeObject* type_of(const c10::TensorImpl& impl) {
  PyObject* object = impl.pyobj_slot()->load_pyobj();
  return object != nullptr ? Py_TYPE(object) : reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

}  // namespace wholestep
