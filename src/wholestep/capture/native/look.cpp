// The look at everything that a trace depends on, at every call: thousands of objects in some tens of microseconds.
//
// Two types. `Look` holds the state of a step: tensors (type, dtype, device, layout, shape, strides, requires_grad,
// gradient, hooks) and containers (dicts, lists, closure cells), and the modes of torch. `Arguments` holds the shape
// of a call and gives its leaves. Both may say "look again" too often, never "nothing changed" wrongly: the caller
// compares in full and has the sentence for the user.
//
// What costs time is memory: the step that ran before has filled the caches, so every line that is looked at comes
// from far away. Records are small and lie in one array each, loops have no branch that depends on a single object, so
// that the processor runs ahead over many of them, and what can be told from fewer lines is told from fewer.
//
// Nothing dangles: `Look` owns the Python objects. What a tensor object wraps may be exchanged (torch.utils.
// swap_tensors) and freed, so a record's TensorImpl is touched only after the object was seen to still wrap it, and
// its AutogradMeta only as the TensorImpl names it now. Everything runs under the interpreter lock.

#define PY_SSIZE_T_CLEAN
#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <unordered_set>
#include <vector>

#ifdef Py_GIL_DISABLED
#error "this build of Python has no interpreter lock, on which the look relies"
#endif

namespace {

using torch::autograd::AutogradMeta;

constexpr long TENSORS = -1, MODES = -2;  // numbers that moved() gives besides those of containers
// ---- versions of dicts ------------------------------------------------------------------------------------------

// A number that changes whenever something else is written into the dict. Python dropped it in 3.14: then every
// dict may have changed at every look.
uint64_t version_of(const PyDictObject* dict) {
#if PY_VERSION_HEX < 0x030E0000
  return dict->ma_version_tag;
#else
  static uint64_t never_the_same = 0;
  return ++never_the_same;
#endif
}

// ---- what of a tensor a trace depends on ------------------------------------------------------------------------

class Layout {
 public:
  explicit Layout(const c10::TensorImpl& impl)
      : keys_(impl.key_set()), dtype_(impl.dtype()), device_(impl.device()), sizes_(impl.sizes().vec()),
        strides_(impl.strides().vec()), told_by_sizes_(strides_told_by_sizes(impl)) {
    for (size_t i = 0; i < std::min(FEW, sizes_.size()); ++i) few_[i] = sizes_[i];
  }

  bool fits(const c10::TensorImpl& impl) const {
    const auto sizes = impl.sizes();
    bool fits = (impl.key_set() == keys_) & (impl.dtype() == dtype_) & (impl.device() == device_);
    fits &= sizes.size() == sizes_.size();
    if (!fits) return false;
    if (sizes.size() <= FEW)
      for (size_t i = 0; i < FEW; ++i) fits &= (i < sizes.size() ? sizes[i] : 0) == few_[i];
    else
      fits &= sizes == c10::IntArrayRef(sizes_);
    return fits & (told_by_sizes_ ? impl.is_contiguous() : impl.strides() == c10::IntArrayRef(strides_));
  }

 private:
  static constexpr size_t FEW = 2;

  c10::DispatchKeySet keys_;  // besides the backend: sparse, quantized, conjugated, a subclass with its own dispatch
  caffe2::TypeMeta dtype_;
  c10::Device device_;
  std::vector<int64_t> sizes_, strides_;
  int64_t few_[FEW] = {};
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
bool is_plain(const c10::TensorImpl& impl) {
  const auto keys = impl.key_set();
  return impl.layout() == c10::kStrided && !keys.has(c10::DispatchKey::Python) && !impl.has_symbolic_sizes_strides() &&
      !keys.has(c10::DispatchKey::NestedTensor) && !keys.has(c10::DispatchKey::FuncTorchBatched) &&
      !keys.has(c10::DispatchKey::FuncTorchGradWrapper);
}

c10::TensorImpl* impl_of(PyObject* tensor) { return THPVariable_Unpack(tensor).unsafeGetTensorImpl(); }

AutogradMeta* meta_of(const c10::TensorImpl& impl) { return static_cast<AutogradMeta*>(impl.autograd_meta()); }

bool requires_grad(const AutogradMeta& meta) { return meta.requires_grad_ || meta.grad_fn_; }

// The Python type of a tensor that may have no Python object yet.
PyTypeObject* type_of(const c10::TensorImpl& impl) {
  PyObject* object = impl.pyobj_slot()->load_pyobj();
  return object != nullptr ? Py_TYPE(object) : reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

// ---- modes ------------------------------------------------------------------------------------------------------

struct Modes {
  bool grad = c10::GradMode::is_enabled(), inference = c10::InferenceMode::is_enabled();
  bool autocast_cpu = at::autocast::is_autocast_enabled(at::kCPU);
  bool autocast_cuda = at::autocast::is_autocast_enabled(at::kCUDA);
  at::ScalarType autocast_cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU);
  at::ScalarType autocast_cuda_dtype = at::autocast::get_autocast_dtype(at::kCUDA);
  bool deterministic = at::globalContext().deterministicAlgorithms();
  at::ScalarType default_dtype = c10::get_default_dtype_as_scalartype();
  // A default device, by call or by context, is a mode on the stack of function modes.
  int64_t function_modes = at::impl::PythonTorchFunctionTLS::stack_len();
  at::Float32MatmulPrecision matmul = at::globalContext().float32MatmulPrecision();

  bool operator==(const Modes&) const = default;
};

// ---- Look -------------------------------------------------------------------------------------------------------

enum Want : uint8_t { STATE, PARAMETER, WITHOUT_GRADIENT, WITH_GRADIENT };  // what is looked at besides the layout

struct TensorRecord {
  PyObject* object;
  c10::TensorImpl* impl;
  uint32_t layout;
  uint16_t type;  // place in `types`
  Want want;
  bool requires_grad;
};

struct ParameterRecord : TensorRecord {
  uint32_t hooks, gradient;  // places in `hooks` and `gradients`, or NONE
};
constexpr uint32_t NONE = std::numeric_limits<uint32_t>::max();

struct Hooks {
  PyObject *backward, *after;  // dicts or null
  uint64_t backward_version, after_version;
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

struct CellRecord {
  PyObject *cell, *held;
  long number;
};

uint64_t version_of_hooks(PyObject* hooks) {
  return hooks != nullptr && PyDict_Check(hooks) ? version_of(reinterpret_cast<PyDictObject*>(hooks)) : 0;
}

bool may_have_changed(PyObject* hooks, uint64_t version) {
  return hooks != nullptr && (!PyDict_Check(hooks) || version_of(reinterpret_cast<PyDictObject*>(hooks)) != version);
}

class State {
 public:
  State(PyObject* tensors, const char* wants, PyObject* containers, PyObject* held)
      : tensors_(tensors), wants_(wants, wants + PyTuple_GET_SIZE(tensors)) {
    take_tensors();
    take_containers(containers, held);
  }

  // Numbers of the containers that may have changed; TENSORS and MODES likewise. Empty in the usual case.
  const std::vector<long>& moved() {
    moved_.clear();
    tensors_moved_ = false;
    if (!modes_hold()) moved_.push_back(MODES);
    if (!others_hold() || !parameters_hold()) {
      tensors_moved_ = true;
      moved_.push_back(TENSORS);
    }
    look_at_dicts();
    look_at_lists();
    return moved_;
  }

  // Takes for granted what the last moved() met: the caller has compared all of it and found nothing.
  void renew() {
    known_version_ = newest_version_;
    if (tensors_moved_) take_tensors();
    tensors_moved_ = false;
  }

 private:
  PyObject* tensors_;
  std::vector<char> wants_;
  Layouts layouts_;
  std::vector<PyTypeObject*> types_;
  std::vector<THPObjectPtr> owned_;
  std::vector<ParameterRecord> parameters_;
  std::vector<TensorRecord> others_;
  std::vector<Hooks> hooks_;
  std::vector<Gradient> gradients_;
  std::vector<std::pair<c10::TensorImpl*, uint32_t>> entry_;  // gradients met in this look, and what they should be
  std::vector<PyDictObject*> dicts_;
  std::vector<long> dict_numbers_;
  std::vector<ListRecord> lists_;
  std::vector<CellRecord> cells_;
  Modes modes_;
  std::vector<long> moved_;
  // Versions come from one counter: what was written later has a greater one than every dict had before.
  uint64_t known_version_ = 0, newest_version_ = 0;
  bool tensors_moved_ = false;

  void take_tensors() {
    parameters_.clear(), others_.clear(), hooks_.clear(), gradients_.clear(), types_.clear(), owned_.clear();
    layouts_ = Layouts();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors_); ++i) {
      PyObject* object = PyTuple_GET_ITEM(tensors_, i);
      if (!THPVariable_Check(object)) throw std::invalid_argument("not a tensor");
      c10::TensorImpl* impl = impl_of(object);
      if (!is_plain(*impl)) throw std::invalid_argument("a tensor whose shape or device is answered elsewhere");
      const TensorRecord record{
          object, impl, layouts_.number_of(*impl), type_number(Py_TYPE(object)), static_cast<Want>(wants_[i]),
          impl->requires_grad()};
      if (record.want == STATE)
        others_.push_back(record);
      else
        parameters_.push_back({record, take_hooks(object), take_gradient(*impl, record.want)});
    }
  }

  // A type that were freed could leave its address to another one.
  PyTypeObject* keep(PyTypeObject* type) {
    owned_.emplace_back(Py_NewRef(reinterpret_cast<PyObject*>(type)));
    return type;
  }

  uint16_t type_number(PyTypeObject* type) {
    const size_t number = std::find(types_.begin(), types_.end(), type) - types_.begin();
    if (number == types_.size()) types_.push_back(keep(type));
    if (number > std::numeric_limits<uint16_t>::max()) throw std::invalid_argument("too many types of tensors");
    return static_cast<uint16_t>(number);
  }

  uint32_t take_hooks(PyObject* object) {
    const auto* tensor = reinterpret_cast<THPVariable*>(object);
    PyObject *backward = tensor->backward_hooks, *after = tensor->post_accumulate_grad_hooks;
    if (backward == nullptr && after == nullptr) return NONE;
    hooks_.push_back({backward, after, version_of_hooks(backward), version_of_hooks(after)});
    return static_cast<uint32_t>(hooks_.size() - 1);
  }

  uint32_t take_gradient(const c10::TensorImpl& impl, Want want) {
    if (want != WITH_GRADIENT) return NONE;
    const AutogradMeta* meta = meta_of(impl);
    if (meta == nullptr || !meta->grad_.defined()) throw std::invalid_argument("a gradient that is not there");
    const auto& grad = *meta->grad_.unsafeGetTensorImpl();
    gradients_.push_back({keep(type_of(grad)), grad.key_set(), grad.dtype(), grad.device()});
    return static_cast<uint32_t>(gradients_.size() - 1);
  }

  void take_containers(PyObject* containers, PyObject* held) {
    std::vector<std::pair<PyDictObject*, long>> dicts;
    for (long number = 0; number < PyTuple_GET_SIZE(containers); ++number) {
      PyObject *container = PyTuple_GET_ITEM(containers, number), *one = PyTuple_GET_ITEM(held, number);
      if (PyDict_Check(container)) {
        dicts.emplace_back(reinterpret_cast<PyDictObject*>(container), number);
      } else if (PyList_Check(container) && PyTuple_Check(one)) {
        lists_.push_back({reinterpret_cast<PyListObject*>(container), one, number});
      } else if (PyCell_Check(container)) {
        cells_.push_back({container, one, number});
      } else {
        throw std::invalid_argument("neither dict nor list nor cell");
      }
    }
    std::sort(dicts.begin(), dicts.end());  // neighbours in memory one after another
    for (const auto& [dict, number] : dicts) {
      dicts_.push_back(dict);
      dict_numbers_.push_back(number);
      known_version_ = std::max(known_version_, version_of(dict));
    }
  }

  bool modes_hold() const {
    try {
      return modes_.function_modes == 0 && Modes() == modes_;
    } catch (const std::exception&) {
      return false;  // torch refuses to say: the caller will hear it from torch
    }
  }

  void look_at_dicts() {
    newest_version_ = known_version_;
    for (const auto* dict : dicts_) newest_version_ = std::max(newest_version_, version_of(dict));
    if (newest_version_ == known_version_) return;
    for (size_t i = 0; i < dicts_.size(); ++i)
      if (version_of(dicts_[i]) > known_version_) moved_.push_back(dict_numbers_[i]);
  }

  void look_at_lists() {
    for (const auto& [list, held, number] : lists_) {
      const Py_ssize_t size = PyTuple_GET_SIZE(held);
      const auto* tuple = reinterpret_cast<PyTupleObject*>(held);
      if (Py_SIZE(list) != size || (size != 0 && std::memcmp(list->ob_item, tuple->ob_item, size * sizeof(PyObject*))))
        moved_.push_back(number);
    }
    for (const auto& [cell, held, number] : cells_)
      if (PyCell_GET(cell) != held) moved_.push_back(number);
  }

  bool holds(const TensorRecord& record) const {
    if (impl_of(record.object) != record.impl) return false;
    return (Py_TYPE(record.object) == types_[record.type]) & layouts_[record.layout].fits(*record.impl);
  }

  bool others_hold() const {
    bool hold = true;
    for (const auto& record : others_) {
      if (!holds(record)) return false;
      const AutogradMeta* meta = meta_of(*record.impl);
      hold &= (meta != nullptr && requires_grad(*meta)) == record.requires_grad;
    }
    return hold;
  }

  bool parameters_hold() {
    bool hold = true;
    entry_.clear();
    for (const auto& record : parameters_) {
      if (!holds(record)) return false;
      hold &= autograd_holds(record) & hooks_hold(record);
    }
    return hold && std::all_of(entry_.begin(), entry_.end(), [this](const auto& one) { return fits(*one.first, one.second); });
  }

  bool autograd_holds(const ParameterRecord& record) {
    const AutogradMeta* meta = meta_of(*record.impl);
    if (meta == nullptr) return !record.requires_grad && record.want != WITH_GRADIENT;
    const bool present = meta->grad_.defined();
    if (present && record.want == WITH_GRADIENT) entry_.emplace_back(meta->grad_.unsafeGetTensorImpl(), record.gradient);
    const bool wanted = record.want == PARAMETER || present == (record.want == WITH_GRADIENT);
    return wanted & (requires_grad(*meta) == record.requires_grad);
  }

  bool hooks_hold(const ParameterRecord& record) const {
    const auto* tensor = reinterpret_cast<THPVariable*>(record.object);
    if (record.hooks == NONE)
      return (tensor->backward_hooks == nullptr) & (tensor->post_accumulate_grad_hooks == nullptr);
    const Hooks& hooks = hooks_[record.hooks];
    return tensor->backward_hooks == hooks.backward && tensor->post_accumulate_grad_hooks == hooks.after &&
        !may_have_changed(hooks.backward, hooks.backward_version) && !may_have_changed(hooks.after, hooks.after_version);
  }

  bool fits(const c10::TensorImpl& grad, uint32_t number) const {
    const Gradient& then = gradients_[number];
    return grad.key_set() == then.keys && grad.dtype() == then.dtype && grad.device() == then.device &&
        type_of(grad) == then.type;
  }
};

// ---- Arguments --------------------------------------------------------------------------------------------------

struct ArgumentLayout {
  PyTypeObject* type;
  at::ScalarType dtype;
  c10::Device device;
  std::vector<int64_t> sizes, strides;
  bool requires_grad;
  size_t alias;  // the first argument that is the same tensor
};

class Call {
 public:
  // `structure` is ("leaf", n), ("tuple" | "list", [structures]) or ("dict", keys, [structures]); `leaves` has per
  // leaf a tuple (type, dtype, shape, strides, device, requires_grad, alias) of data, or (thing,).
  Call(PyObject* structure, PyObject* leaves, PyObject* state) : structure_(structure), leaves_(leaves) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(state); ++i) state_.insert(PyTuple_GET_ITEM(state, i));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(leaves); ++i) {
      PyObject* leaf = PyTuple_GET_ITEM(leaves, i);
      data_.push_back(PyTuple_GET_SIZE(leaf) == 1 ? std::nullopt : std::optional(read(leaf)));
    }
  }

  // A new list of the leaves, or null without an error set if the call may differ from the one recorded.
  PyObject* match(PyObject* call) const {
    PyObject* found = PyList_New(0);
    if (found == nullptr) return nullptr;
    if (collect(structure_, call, found) && PyList_GET_SIZE(found) == PyTuple_GET_SIZE(leaves_) && fit(found)) return found;
    Py_DECREF(found);
    return nullptr;
  }

 private:
  PyObject *structure_, *leaves_;
  std::vector<std::optional<ArgumentLayout>> data_;
  std::unordered_set<PyObject*> state_;

  static ArgumentLayout read(PyObject* leaf) {
    PyObject* item[7];
    if (PyTuple_GET_SIZE(leaf) != 7) throw std::invalid_argument("a description has seven parts");
    for (int i = 0; i < 7; ++i) item[i] = PyTuple_GET_ITEM(leaf, i);
    if (!THPDtype_Check(item[1]) || !THPDevice_Check(item[4])) throw std::invalid_argument("no dtype or no device");
    return {
        reinterpret_cast<PyTypeObject*>(item[0]), reinterpret_cast<THPDtype*>(item[1])->scalar_type,
        reinterpret_cast<THPDevice*>(item[4])->device, numbers(item[2]), numbers(item[3]), item[5] == Py_True,
        PyLong_AsSize_t(item[6])};
  }

  static std::vector<int64_t> numbers(PyObject* tuple) {
    std::vector<int64_t> found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
      found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
    return found;
  }

  // Takes containers apart as the structure says; false if the thing is built otherwise.
  static bool collect(PyObject* structure, PyObject* thing, PyObject* found) {
    PyObject* kind = PyTuple_GET_ITEM(structure, 0);
    if (kind == Py_None) return PyList_Append(found, thing) == 0;
    if (reinterpret_cast<PyObject*>(Py_TYPE(thing)) != kind) return false;
    PyObject* parts = PyTuple_GET_ITEM(structure, 1);
    const Py_ssize_t size = PyTuple_GET_SIZE(parts);
    if (PyDict_CheckExact(thing)) return PyDict_GET_SIZE(thing) == size && collect_items(structure, thing, found);
    if (PySequence_Fast_GET_SIZE(thing) != size) return false;
    for (Py_ssize_t i = 0; i < size; ++i)
      if (!collect(PyTuple_GET_ITEM(parts, i), PySequence_Fast_GET_ITEM(thing, i), found)) return false;
    return true;
  }

  static bool collect_items(PyObject* structure, PyObject* dict, PyObject* found) {
    PyObject *parts = PyTuple_GET_ITEM(structure, 1), *keys = PyTuple_GET_ITEM(structure, 2), *key, *item;
    Py_ssize_t place = 0;
    for (Py_ssize_t i = 0; PyDict_Next(dict, &place, &key, &item); ++i) {
      PyObject* wanted = PyTuple_GET_ITEM(keys, i);
      if (key != wanted && (!PyUnicode_CheckExact(key) || PyUnicode_Compare(key, wanted) != 0)) return false;
      if (!collect(PyTuple_GET_ITEM(parts, i), item, found)) return false;
    }
    return true;
  }

  bool fit(PyObject* found) const {
    for (size_t i = 0; i < data_.size(); ++i) {
      PyObject* leaf = PyList_GET_ITEM(found, i);
      if (!data_[i].has_value()) {
        if (!same(PyTuple_GET_ITEM(PyTuple_GET_ITEM(leaves_, i), 0), leaf)) return false;
        continue;
      }
      const ArgumentLayout& then = *data_[i];
      if (Py_TYPE(leaf) != then.type || !THPVariable_CheckExact(leaf) || state_.count(leaf) != 0) return false;
      if (!fits(*impl_of(leaf), then)) return false;
      for (size_t j = 0; j <= i; ++j) {  // the first leaf that is this tensor must be the one that was
        if (data_[j].has_value() && PyList_GET_ITEM(found, j) == leaf) {
          if (j != then.alias) return false;
          break;
        }
      }
    }
    return true;
  }

  static bool fits(const c10::TensorImpl& impl, const ArgumentLayout& then) {
    return is_plain(impl) && impl.dtype() == c10::scalarTypeToTypeMeta(then.dtype) && impl.device() == then.device &&
        impl.sizes() == c10::IntArrayRef(then.sizes) && impl.strides() == c10::IntArrayRef(then.strides) &&
        impl.requires_grad() == then.requires_grad;
  }

  static bool same(PyObject* then, PyObject* now) {
    if (then == now) return true;
    if (Py_TYPE(then) != Py_TYPE(now)) return false;
    const bool scalar = PyFloat_CheckExact(now) || PyLong_CheckExact(now) || PyUnicode_CheckExact(now);
    return scalar && PyObject_RichCompareBool(then, now, Py_EQ) == 1;
  }
};

// ---- the two types, as Python sees them -------------------------------------------------------------------------

template <class Inner>
struct Object {
  PyObject_HEAD
  PyObject* kept;  // everything that Inner points at
  Inner* inner;
};

template <class Inner>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Object<Inner>*>(self)->kept);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

template <class Inner>
int clear(PyObject* self) {
  auto* object = reinterpret_cast<Object<Inner>*>(self);
  delete object->inner;
  object->inner = nullptr;
  Py_CLEAR(object->kept);
  return 0;
}

template <class Inner>
void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear<Inner>(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Runs `make`, whose C++ errors become a TypeError; the object owns `args`.
template <class Inner, class Make>
PyObject* create(PyTypeObject* type, PyObject* args, Make make) {
  Inner* inner = nullptr;
  try {
    inner = make();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
    return nullptr;
  }
  if (PyErr_Occurred()) {
    delete inner;
    return nullptr;
  }
  auto* object = reinterpret_cast<Object<Inner>*>(type->tp_alloc(type, 0));
  if (object == nullptr) {
    delete inner;
    return nullptr;
  }
  object->inner = inner;
  object->kept = Py_NewRef(args);
  return reinterpret_cast<PyObject*>(object);
}

PyObject* new_look(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *tensors, *containers, *held;
  const char* wants;
  Py_ssize_t num_wants;
  if (!PyArg_ParseTuple(args, "O!y#O!O!", &PyTuple_Type, &tensors, &wants, &num_wants, &PyTuple_Type, &containers, &PyTuple_Type, &held))
    return nullptr;
  if (num_wants != PyTuple_GET_SIZE(tensors) || PyTuple_GET_SIZE(containers) != PyTuple_GET_SIZE(held)) {
    PyErr_SetString(PyExc_ValueError, "one want per tensor, and one held thing per container");
    return nullptr;
  }
  return create<State>(type, args, [&] { return new State(tensors, wants, containers, held); });
}

PyObject* new_arguments(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *structure, *leaves, *state;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &structure, &PyTuple_Type, &leaves, &PyTuple_Type, &state))
    return nullptr;
  return create<Call>(type, args, [&] { return new Call(structure, leaves, state); });
}

// Runs `use`; what torch throws (a mode that it refuses to read) becomes a RuntimeError.
template <class Inner, class Use>
PyObject* guarded(PyObject* self, Use use) {
  Inner* inner = reinterpret_cast<Object<Inner>*>(self)->inner;
  if (inner == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the look was cleared by the garbage collector");
    return nullptr;
  }
  try {
    return use(*inner);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* look_moved(PyObject* self, PyObject*) {
  return guarded<State>(self, [](State& state) -> PyObject* {
    const auto& numbers = state.moved();
    PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
    for (size_t i = 0; found != nullptr && i < numbers.size(); ++i)
      PyTuple_SET_ITEM(found, i, PyLong_FromLong(numbers[i]));
    return found;
  });
}

PyObject* look_renew(PyObject* self, PyObject*) {
  return guarded<State>(self, [](State& state) -> PyObject* {
    state.renew();
    Py_RETURN_NONE;
  });
}

PyObject* arguments_match(PyObject* self, PyObject* call) {
  return guarded<Call>(self, [call](Call& one) -> PyObject* {
    PyObject* found = one.match(call);
    if (found != nullptr) return found;
    PyErr_Clear();
    Py_RETURN_NONE;
  });
}

PyMethodDef look_methods[] = {
    {"moved", look_moved, METH_NOARGS, "Numbers of what may have changed since the last renew(); empty if nothing."},
    {"renew", look_renew, METH_NOARGS, "Takes for granted what the last moved() met."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef arguments_methods[] = {
    {"match", arguments_match, METH_O, "The leaves of a call (args, kwargs), or None if it may differ."},
    {nullptr, nullptr, 0, nullptr}};

template <class Inner>
PyObject* make_type(const char* name, newfunc make, PyMethodDef* methods) {
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<Inner>)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse<Inner>)},
      {Py_tp_clear, reinterpret_cast<void*>(clear<Inner>)},
      {Py_tp_methods, methods},
      {0, nullptr}};
  PyType_Spec spec{name, sizeof(Object<Inner>), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  return PyType_FromSpec(&spec);
}

PyModuleDef definition{PyModuleDef_HEAD_INIT, "look", "The quick look at a step's state and arguments.", -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_look() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  PyObject* look = make_type<State>("look.Look", new_look, look_methods);
  PyObject* arguments = make_type<Call>("look.Arguments", new_arguments, arguments_methods);
  if (look == nullptr || arguments == nullptr || PyModule_AddObject(module, "Look", look) < 0 ||
      PyModule_AddObject(module, "Arguments", arguments) < 0 || PyModule_AddIntConstant(module, "TENSORS", TENSORS) < 0 ||
      PyModule_AddIntConstant(module, "MODES", MODES) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
