// The signature of a call, and its leaves. Python's `SignatureGuard`.
#pragma once

#include "tensor_desc.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <unordered_set>

namespace wholestep {

struct ArgumentDesc {
  PyTypeObject* type;
  at::ScalarType dtype;
  c10::Device device;
  std::vector<int64_t> sizes, strides;  // a size below 0 may be any, and then strides are compared in Python
  bool moves;
  bool requires_grad, conjugate, negative;
  size_t alias;  // the first argument that is the same tensor
};

class SignatureGuard {
 public:
  // `structure`, that of (args, kwargs), is (None,), (tuple or list, structures) or (dict, structures, keys); `leaves` has
  // per leaf a tuple (type, dtype, shape, strides, device, requires_grad, conjugate, negative, alias) of
  // data, with -1 for a size that may be any, (number or text, its type) of what may be any of that type, or (thing,).
  SignatureGuard(PyObject* structure, PyObject* leaves, PyObject* state) : structure_(structure), leaves_(leaves) {
    if (PyTuple_GET_SIZE(structure) != 2 || !PyTuple_Check(PyTuple_GET_ITEM(structure, 1)) ||
        PyTuple_GET_SIZE(PyTuple_GET_ITEM(structure, 1)) != 2)
      throw std::invalid_argument("a call is a pair of positional and keyword arguments");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(state); ++i) state_.insert(PyTuple_GET_ITEM(state, i));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(leaves); ++i) {
      PyObject* leaf = PyTuple_GET_ITEM(leaves, i);
      data_.push_back(PyTuple_GET_SIZE(leaf) <= 2 ? std::nullopt : std::optional(read(leaf)));
    }
  }

  // A new list of the leaves, or null without an error set if the call may differ from the one recorded.
  PyObject* match(PyObject* args, PyObject* kwargs) const {
    PyObject* found = PyList_New(0);
    if (found == nullptr) return nullptr;
    PyObject* parts = PyTuple_GET_ITEM(structure_, 1);
    if (collect(PyTuple_GET_ITEM(parts, 0), args, found) && collect(PyTuple_GET_ITEM(parts, 1), kwargs, found) &&
        PyList_GET_SIZE(found) == PyTuple_GET_SIZE(leaves_) && fit(found))
      return found;
    Py_DECREF(found);
    return nullptr;
  }

 private:
  PyObject *structure_, *leaves_;
  std::vector<std::optional<ArgumentDesc>> data_;
  std::unordered_set<PyObject*> state_;

  static ArgumentDesc read(PyObject* leaf) {
    PyObject* item[9];
    if (PyTuple_GET_SIZE(leaf) != 9) throw std::invalid_argument("a description has nine parts");
    for (int i = 0; i < 9; ++i) item[i] = PyTuple_GET_ITEM(leaf, i);
    if (!THPDtype_Check(item[1]) || !THPDevice_Check(item[4])) throw std::invalid_argument("no dtype or no device");
    std::vector<int64_t> sizes = numbers(item[2]);
    const bool moves = std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; });
    return {
        reinterpret_cast<PyTypeObject*>(item[0]), reinterpret_cast<THPDtype*>(item[1])->scalar_type,
        reinterpret_cast<THPDevice*>(item[4])->device, std::move(sizes), numbers(item[3]), moves, item[5] == Py_True,
        item[6] == Py_True, item[7] == Py_True, PyLong_AsSize_t(item[8])};
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
        PyObject* then = PyTuple_GET_ITEM(leaves_, i);
        const bool fits = PyTuple_GET_SIZE(then) == 2
            ? reinterpret_cast<PyObject*>(Py_TYPE(leaf)) == PyTuple_GET_ITEM(then, 1)
            : same(PyTuple_GET_ITEM(then, 0), leaf);
        if (!fits) return false;
        continue;
      }
      const ArgumentDesc& then = *data_[i];
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

  static bool lies(const c10::TensorImpl& impl, const ArgumentDesc& then) {
    const auto now = impl.sizes();
    if (!then.moves) return now == c10::IntArrayRef(then.sizes) && impl.strides() == c10::IntArrayRef(then.strides);
    return std::equal(now.begin(), now.end(), then.sizes.begin(), then.sizes.end(), [](int64_t size, int64_t wanted) {
      return wanted < 0 || size == wanted;
    });
  }

  static bool fits(const c10::TensorImpl& impl, const ArgumentDesc& then) {
    return is_plain(impl) && impl.dtype() == c10::scalarTypeToTypeMeta(then.dtype) && impl.device() == then.device &&
        lies(impl, then) && impl.requires_grad() == then.requires_grad && impl.is_conj() == then.conjugate && impl.is_neg() == then.negative;
  }

  static bool same(PyObject* then, PyObject* now) {
    if (then == now) return true;
    if (Py_TYPE(then) != Py_TYPE(now)) return false;
    const bool scalar = PyFloat_CheckExact(now) || PyLong_CheckExact(now) || PyUnicode_CheckExact(now);
    return scalar && PyObject_RichCompareBool(then, now, Py_EQ) == 1;
  }
};

}  // namespace wholestep
