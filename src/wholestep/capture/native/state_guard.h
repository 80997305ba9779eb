// The state of a step: tensors, containers and the modes of torch, compared in every call. Python's `StateGuard`.
#pragma once

#include "dict_versions.h"
#include "tensor_desc.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

namespace wholestep {

constexpr long TENSORS = -1, MODES = -2;  // numbers that changed() gives besides those of containers
constexpr size_t AHEAD = 4;               // how many records ahead the processor prefetches
constexpr size_t FAR_AHEAD = 16;          // the same where little is compared of each

// Inlined by force: GCC takes a function that only fetches for one without effect, and drops calls of it.
[[gnu::always_inline]] inline void fetch(const void* address, ptrdiff_t offset) {
  __builtin_prefetch(static_cast<const char*>(address) + offset);
}

// Switches of torch.backends that choose kernels.
struct Switches {
  bool flash = at::globalContext().userEnabledFlashSDP(), efficient = at::globalContext().userEnabledMemEfficientSDP();
  bool cudnn_attention = at::globalContext().userEnabledCuDNNSDP(), math = at::globalContext().userEnabledMathSDP();
  bool cudnn = at::globalContext().userEnabledCuDNN(), cudnn_benchmark = at::globalContext().benchmarkCuDNN();
  bool cudnn_deterministic = at::globalContext().deterministicCuDNN();
  bool cudnn_tf32 = at::globalContext().allowTF32CuDNN(), tf32 = at::globalContext().allowTF32CuBLAS();
  bool mkldnn = at::globalContext().userEnabledMkldnn();

  bool operator==(const Switches&) const = default;
};

// Whether torch keeps parametrized weights from call to call, a global of Python (`parametrize.cached()`).
inline bool keeps_parametrized_weights() {
  static PyObject* const globals = [] {
    PyObject* module = PyImport_ImportModule("torch.nn.utils.parametrize");  // never given back
    if (module == nullptr) {
      PyErr_Clear();
      throw std::runtime_error("torch.nn.utils.parametrize cannot be imported");
    }
    return PyModule_GetDict(module);
  }();
  static PyObject* const name = PyUnicode_InternFromString("_cache_enabled");
  PyObject* value = PyDict_GetItemWithError(globals, name);
  return value != nullptr && PyObject_IsTrue(value) == 1;
}

struct Modes {
  bool grad = c10::GradMode::is_enabled(), inference = c10::InferenceMode::is_enabled();
  bool autocast_cpu = at::autocast::is_autocast_enabled(at::kCPU);
  bool autocast_cuda = at::autocast::is_autocast_enabled(at::kCUDA);
  at::ScalarType autocast_cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU);
  at::ScalarType autocast_cuda_dtype = at::autocast::get_autocast_dtype(at::kCUDA);
  bool autocast_cache = at::autocast::is_autocast_cache_enabled();
  bool looks_for_nan = torch::autograd::AnomalyMode::is_enabled() && torch::autograd::AnomalyMode::should_check_nan();
  bool keeps_parametrized = keeps_parametrized_weights();
  bool deterministic = at::globalContext().deterministicAlgorithms();
  at::ScalarType default_dtype = c10::get_default_dtype_as_scalartype();
  // A default device, by call or by context, is a mode on the stack of function modes.
  int64_t function_modes = at::impl::PythonTorchFunctionTLS::stack_len();
  at::Float32MatmulPrecision matmul = at::globalContext().float32MatmulPrecision();
  Switches switches;

  bool operator==(const Modes&) const = default;
};

enum Want : uint8_t { STATE, PARAMETER, WITHOUT_GRADIENT, WITH_GRADIENT };  // what is compared besides the layout

// What tensors have in common. Few of them, so that they stay near while the tensors pass by.
struct Kind {
  PyTypeObject* type;
  Want want;
  bool requires_grad, hooked;
  TensorDesc layout;
};

// A tensor object, the number of its kind in the 16 bits that no address uses, and its TensorImpl.
class TensorRecord {
 public:
  TensorRecord(PyObject* object, uint16_t kind, c10::TensorImpl* impl)
      : word_(reinterpret_cast<uintptr_t>(object) | uint64_t{kind} << ADDRESS_BITS), impl_(impl) {
    if (this->object() != object) throw std::invalid_argument("an address of more than 48 bits");
  }
  PyObject* object() const { return reinterpret_cast<PyObject*>(word_ & ((uint64_t{1} << ADDRESS_BITS) - 1)); }
  size_t kind() const { return word_ >> ADDRESS_BITS; }
  c10::TensorImpl& impl() const { return *impl_; }

 private:
  static constexpr int ADDRESS_BITS = 48;
  uint64_t word_;
  c10::TensorImpl* impl_;
};

struct ParameterRecord : TensorRecord {
  const AutogradMeta* meta;  // to fetch it ahead, no more
};

struct Hooks {
  const THPVariable* tensor;
  PyObject *backward, *after;  // dicts or null
};

struct Gradient {
  PyTypeObject* type;
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::Device device;
};

struct ListRecord {
  PyListObject* list;
  PyObject* held;  // tuple
  long number;
};

// What an object keeps in a slot of its class: a DTensor its part and how it is cut.
struct SlotRecord {
  PyObject* object;
  Py_ssize_t offset;
  PyObject* held;
  PyObject* now() const { return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset); }
};

struct CellRecord {
  PyObject *cell, *held;
  long number;
};

inline PyObject* as_tuple(const std::vector<long>& numbers) {
  PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t i = 0; found != nullptr && i < numbers.size(); ++i) PyTuple_SET_ITEM(found, i, PyLong_FromLong(numbers[i]));
  return found;
}

class StateGuard {
 public:
  // `slots`: descriptors of the slots in which tensors of their class hold what they stand for, a tensor among it.
  StateGuard(PyObject* tensors, const char* wants, PyObject* containers, PyObject* held, PyObject* slots)
      : tensors_(tensors), slots_(slots), wants_(wants, wants + PyTuple_GET_SIZE(tensors)) {
    take_tensors();
    take_containers(containers, held);
  }

  // Numbers of the containers that may have changed; TENSORS and MODES likewise. Empty in the usual case.
  const std::vector<long>& changed() {
    changed_.clear();
    modes_changed_ = !modes_hold();
    tensors_changed_ = !taken_ || !slots_hold() || !others_hold() || !parameters_hold();
    if (modes_changed_) changed_.push_back(MODES);
    if (tensors_changed_) changed_.push_back(TENSORS);
    dicts_.collect_written(changed_);
    compare_lists();
    return changed_;
  }

  // Takes for granted what the last changed() met: the caller has compared all of it and found nothing.
  void accept() {
    dicts_.accept();
    try {
      if (modes_changed_) modes_ = Modes();
      if (tensors_changed_) take_tensors();
    } catch (const std::exception&) {
      // What cannot be taken is named again by every changed().
    }
    modes_changed_ = tensors_changed_ = false;
  }

 private:
  PyObject *tensors_, *slots_;
  std::vector<char> wants_;
  std::vector<Kind> kinds_;
  std::vector<THPObjectPtr> owned_;
  std::vector<ParameterRecord> parameters_;
  std::vector<TensorRecord> others_;
  std::vector<SlotRecord> in_slots_;
  std::vector<Hooks> hooks_;
  DictVersions hook_dicts_;  // those in `hooks_`, which only the tensors own
  std::vector<Gradient> gradients_;
  std::vector<const c10::TensorImpl*> entry_;  // gradients met in this changed(), in the order of `gradients_`
  DictVersions dicts_;
  std::vector<ListRecord> lists_;
  std::vector<CellRecord> cells_;
  std::vector<FunctionRecord> functions_;
  std::vector<ObjectRecord> objects_;
  Modes modes_;
  std::vector<long> changed_;
  bool modes_changed_ = false, tensors_changed_ = false, taken_ = false;

  void take_tensors() {
    taken_ = false;
    parameters_.clear(), others_.clear(), hooks_.clear(), gradients_.clear(), kinds_.clear(), owned_.clear();
    hook_dicts_.clear(), in_slots_.clear();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors_); ++i) {
      PyObject* object = PyTuple_GET_ITEM(tensors_, i);
      if (!THPVariable_Check(object)) throw std::invalid_argument("not a tensor");
      c10::TensorImpl* impl = impl_of(object);
      if (!is_plain(*impl) && !take_slots(object))
        throw std::invalid_argument("a tensor whose shape or device is answered elsewhere");
      const auto want = static_cast<Want>(wants_[i]);
      const TensorRecord record(object, kind_number(object, *impl, want, want != STATE && take_hooks(object)), impl);
      if (want == STATE) {
        others_.push_back(record);
      } else {
        parameters_.push_back({record, meta_of(*impl)});
        if (want == WITH_GRADIENT) take_gradient(*impl);
      }
    }
    taken_ = true;
  }

  // What a tensor of the class of the slots stands for; false for one of another class.
  bool take_slots(PyObject* object) {
    bool taken = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots_); ++i) {
      const auto* slot = reinterpret_cast<PyMemberDescrObject*>(PyTuple_GET_ITEM(slots_, i));
      if (Py_TYPE(object) != slot->d_common.d_type) return false;
      const SlotRecord record{object, slot->d_member->offset, nullptr};
      PyObject* held = record.now();
      if (held == nullptr) throw std::invalid_argument("a tensor with an empty slot");
      owned_.emplace_back(Py_NewRef(held));
      in_slots_.push_back({object, record.offset, held});
      if (THPVariable_Check(held)) {
        c10::TensorImpl* impl = impl_of(held);
        if (!is_plain(*impl)) throw std::invalid_argument("a part whose shape or device is answered elsewhere");
        others_.push_back(TensorRecord(held, kind_number(held, *impl, STATE, false), impl));
      }
      taken = true;
    }
    return taken;
  }

  bool slots_hold() const {
    return std::all_of(in_slots_.begin(), in_slots_.end(), [](const SlotRecord& slot) { return slot.now() == slot.held; });
  }

  // A type that were freed could leave its address to another one.
  PyTypeObject* keep(PyTypeObject* type) {
    owned_.emplace_back(Py_NewRef(reinterpret_cast<PyObject*>(type)));
    return type;
  }

  uint16_t kind_number(PyObject* object, const c10::TensorImpl& impl, Want want, bool hooked) {
    PyTypeObject* type = Py_TYPE(object);
    for (size_t i = kinds_.size(); i-- > 0;) {  // from the back: neighbours are alike
      const Kind& kind = kinds_[i];
      if (kind.type == type && kind.want == want && kind.requires_grad == impl.requires_grad() && kind.hooked == hooked &&
          kind.layout.fits(impl))
        return static_cast<uint16_t>(i);
    }
    if (kinds_.size() > std::numeric_limits<uint16_t>::max()) throw std::invalid_argument("too many kinds of tensors");
    kinds_.push_back({keep(type), want, impl.requires_grad(), hooked, TensorDesc(impl)});
    return static_cast<uint16_t>(kinds_.size() - 1);
  }

  // Whether the tensor has hooks, which then are compared apart from it: few have.
  bool take_hooks(PyObject* object) {
    const auto* tensor = reinterpret_cast<THPVariable*>(object);
    PyObject *backward = tensor->backward_hooks, *after = tensor->post_accumulate_grad_hooks;
    if (backward == nullptr && after == nullptr) return false;
    hooks_.push_back({tensor, backward, after});
    for (PyObject* hooks : {backward, after}) {
      if (hooks == nullptr) continue;
      if (!PyDict_Check(hooks)) throw std::invalid_argument("hooks that are no dict");
      hook_dicts_.add(hooks, TENSORS);
    }
    return true;
  }

  void take_gradient(const c10::TensorImpl& impl) {
    const AutogradMeta* meta = meta_of(impl);
    if (meta == nullptr || !meta->grad_.defined()) throw std::invalid_argument("a gradient that is not there");
    const auto& grad = *meta->grad_.unsafeGetTensorImpl();
    gradients_.push_back({keep(type_of(grad)), grad.key_set(), grad.dtype(), grad.device()});
  }

  void take_containers(PyObject* containers, PyObject* held) {
    std::vector<std::pair<PyObject*, long>> dicts;
    for (long number = 0; number < PyTuple_GET_SIZE(containers); ++number) {
      PyObject *container = PyTuple_GET_ITEM(containers, number), *one = PyTuple_GET_ITEM(held, number);
      if (PyDict_Check(container)) {
        dicts.emplace_back(container, number);
      } else if (PyList_Check(container) && PyTuple_Check(one)) {
        lists_.push_back({reinterpret_cast<PyListObject*>(container), one, number});
      } else if (PyCell_Check(container)) {
        cells_.push_back({container, one, number});
      } else if (PyFunction_Check(container) && PyTuple_Check(one) && PyTuple_GET_SIZE(one) == 3) {
        FunctionRecord record{container, {}, number};
        for (int i = 0; i < 3; ++i)
          if (PyTuple_GET_ITEM(one, i) != Py_None) record.held[i] = PyTuple_GET_ITEM(one, i);
        functions_.push_back(record);
      } else if (PyTuple_Check(container) && PyTuple_GET_SIZE(container) == 1 && PyTuple_Check(one)) {
        PyObject* dict = PyTuple_GET_ITEM(one, 1);
        objects_.push_back(
            {PyTuple_GET_ITEM(container, 0), PyTuple_GET_ITEM(one, 0), dict == Py_None ? nullptr : dict, number});
      } else {
        throw std::invalid_argument("neither dict nor list nor cell nor function nor a tuple of one object");
      }
    }
    std::sort(dicts.begin(), dicts.end());  // neighbours in memory one after another
    std::sort(objects_.begin(), objects_.end(), [](const auto& a, const auto& b) { return a.object < b.object; });
    for (const auto& [dict, number] : dicts) dicts_.add(dict, number);
  }

  bool modes_hold() const {
    try {
      return modes_.function_modes == 0 && Modes() == modes_;
    } catch (const std::exception&) {
      return false;  // torch refuses to say: the caller will hear it from torch
    }
  }

  void compare_lists() {
    for (const auto& [list, held, number] : lists_) {
      const Py_ssize_t size = PyTuple_GET_SIZE(held);
      const auto* tuple = reinterpret_cast<PyTupleObject*>(held);
      if (Py_SIZE(list) != size || (size != 0 && std::memcmp(list->ob_item, tuple->ob_item, size * sizeof(PyObject*))))
        changed_.push_back(number);
    }
    for (const auto& [cell, held, number] : cells_)
      if (PyCell_GET(cell) != held) changed_.push_back(number);
    for (const auto& one : functions_)
      if (!one.holds()) changed_.push_back(one.number);
    const size_t count = objects_.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + FAR_AHEAD < count) {
        fetch(objects_[i + FAR_AHEAD].object, offsetof(PyObject, ob_type));
        fetch(objects_[i + FAR_AHEAD].place, 0);
      }
      if (!objects_[i].holds()) changed_.push_back(objects_[i].number);
    }
  }

  [[gnu::always_inline]] static bool holds(const TensorRecord& record, const Kind& kind) {
    if (impl_of(record.object()) != &record.impl()) return false;
    return (Py_TYPE(record.object()) == kind.type) & kind.layout.fits(record.impl());
  }

  // What `holds` reads. A line may end anywhere in between, so both ends of what lies together are fetched.
  [[gnu::always_inline]] static void fetch_tensor(const TensorRecord& record) {
    fetch(record.object(), offsetof(PyObject, ob_type));
    fetch(record.object(), offsetof(THPVariable, cdata));
    fetch(&Fields::autograd_meta(record.impl()), 0);
    fetch(&Fields::sizes_and_strides(record.impl()), 16);
    fetch(Fields::dtype(record.impl()), 0);
    if constexpr (Fields::traits_may_be_parted()) fetch(Fields::dtype(record.impl()), sizeof(Traits) - 1);
  }

  bool others_hold() const {
    bool hold = true;
    const size_t count = others_.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + AHEAD < count) fetch_tensor(others_[i + AHEAD]);
      const TensorRecord& record = others_[i];
      const Kind& kind = kinds_[record.kind()];
      if (!holds(record, kind)) return false;
      const AutogradMeta* meta = meta_of(record.impl());
      hold &= (meta != nullptr && requires_grad(*meta)) == kind.requires_grad;
    }
    return hold;
  }

  bool parameters_hold() {
    bool hold = true;
    entry_.clear();
    const size_t count = parameters_.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + AHEAD < count) {
        const ParameterRecord& next = parameters_[i + AHEAD];
        fetch_tensor(next);
        fetch(next.object(), offsetof(THPVariable, post_accumulate_grad_hooks));
        fetch(next.meta, offsetof(AutogradMeta, grad_));
        fetch(next.meta, offsetof(AutogradMeta, requires_grad_));
      }
      const ParameterRecord& record = parameters_[i];
      const Kind& kind = kinds_[record.kind()];
      if (!holds(record, kind)) return false;
      hold &= autograd_holds(record.impl(), kind) & (kind.hooked | has_no_hooks(record.object()));
    }
    return hold && hooks_hold() && gradients_hold();
  }

  bool autograd_holds(const c10::TensorImpl& impl, const Kind& kind) {
    const AutogradMeta* meta = meta_of(impl);
    if (meta == nullptr) return !kind.requires_grad && kind.want != WITH_GRADIENT;
    const bool present = meta->grad_.defined();
    if (present && kind.want == WITH_GRADIENT) entry_.push_back(meta->grad_.unsafeGetTensorImpl());
    const bool wanted = kind.want == PARAMETER || present == (kind.want == WITH_GRADIENT);
    return wanted & (requires_grad(*meta) == kind.requires_grad);
  }

  static bool has_no_hooks(PyObject* object) {
    const auto* tensor = reinterpret_cast<THPVariable*>(object);
    return (tensor->backward_hooks == nullptr) & (tensor->post_accumulate_grad_hooks == nullptr);
  }

  bool hooks_hold() {
    const bool same = std::all_of(hooks_.begin(), hooks_.end(), [](const Hooks& then) {
      return then.tensor->backward_hooks == then.backward && then.tensor->post_accumulate_grad_hooks == then.after;
    });
    if (!same) return false;  // a dict that is not the tensor's any more may be gone
    std::vector<long> written;
    hook_dicts_.collect_written(written);
    return written.empty();
  }

  bool gradients_hold() const {
    return std::equal(entry_.begin(), entry_.end(), gradients_.begin(), gradients_.end(), [](const auto* grad, const Gradient& then) {
      return grad->key_set() == then.keys && grad->dtype() == then.dtype && grad->device() == then.device &&
          type_of(*grad) == then.type;
    });
  }
};

}  // namespace wholestep
