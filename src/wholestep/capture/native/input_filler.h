// The flat inputs of calls, and the run of a step's function on them. Python's `InputFiller`.
#pragma once

#include <torch/csrc/python_headers.h>

#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/object_ptr.h>

#include <stdexcept>
#include <utility>
#include <vector>

namespace wholestep {

// In Python these are some dozens of lines, objects and tables, all of which lie far away after a step.
class InputFiller {
 public:
  // `tensors` is the list of inputs with None at the places of the others: `numbers` has (index, group, key, position
  // or None), `user` (index, leaf), `grads` (index, parameter). `free` is a list of filled lists of earlier calls.
  InputFiller(PyObject* tensors, PyObject* numbers, PyObject* user, PyObject* grads, PyObject* free)
      : tensors_(tensors), free_(free), grad_(PyUnicode_InternFromString("grad")) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) {
      PyObject* one = checked_tuple(numbers, i, 4);
      PyObject* position = PyTuple_GET_ITEM(one, 3);
      numbers_.push_back({index(one), PyTuple_GET_ITEM(one, 1), PyTuple_GET_ITEM(one, 2),
                          position == Py_None ? -1 : PyLong_AsSsize_t(position)});
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(user); ++i) {
      PyObject* one = checked_tuple(user, i, 2);
      user_.emplace_back(index(one), PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 1)));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(grads); ++i) {
      PyObject* one = checked_tuple(grads, i, 2);
      grads_.emplace_back(index(one), PyTuple_GET_ITEM(one, 1));
    }
  }

  // function(inputs) with gradients and autocast off, or null with an error set. Then None stands where the call's own tensors
  // were, so that nothing of the call lives on, and the list is free again.
  PyObject* run(PyObject* function, PyObject* leaves) {
    THPObjectPtr flat(new_list());
    if (flat.get() == nullptr || !fill(flat.get(), leaves)) return nullptr;
    THPObjectPtr found;
    {
      const c10::AutoGradMode off(false);
      const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
      found = PyObject_CallOneArg(function, flat.get());
    }
    if (found.get() == nullptr || !clear_call(flat.get()) || PyList_Append(free_, flat.get()) != 0) return nullptr;
    return found.release();
  }

 private:
  struct Number {
    Py_ssize_t index;
    PyObject *group, *key;
    Py_ssize_t position;  // in a tuple such as `betas`, or -1
  };

  PyObject *tensors_, *free_;
  THPObjectPtr grad_;
  std::vector<Number> numbers_;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> user_;
  std::vector<std::pair<Py_ssize_t, PyObject*>> grads_;

  static PyObject* checked_tuple(PyObject* all, Py_ssize_t i, Py_ssize_t size) {
    PyObject* one = PyTuple_GET_ITEM(all, i);
    if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != size) throw std::invalid_argument("an input is a tuple of 2 or 4 things");
    return one;
  }
  static Py_ssize_t index(PyObject* one) { return PyLong_AsSsize_t(PyTuple_GET_ITEM(one, 0)); }

  PyObject* new_list() const {
    const Py_ssize_t last = PyList_GET_SIZE(free_) - 1;
    if (last < 0) return PyList_GetSlice(tensors_, 0, PyList_GET_SIZE(tensors_));
    PyObject* flat = Py_NewRef(PyList_GET_ITEM(free_, last));
    if (PyList_SetSlice(free_, last, last + 1, nullptr) != 0) Py_CLEAR(flat);
    return flat;
  }

  bool fill(PyObject* flat, PyObject* leaves) {
    for (const Number& number : numbers_)
      if (!put(flat, number.index, read(number))) return false;
    for (const auto& [index, leaf] : user_)
      if (!put(flat, index, Py_XNewRef(PyList_GetItem(leaves, leaf)))) return false;
    for (const auto& [index, parameter] : grads_)
      if (!put(flat, index, PyObject_GetAttr(parameter, grad_.get()))) return false;
    return true;
  }

  bool clear_call(PyObject* flat) const {
    for (const auto& [index, leaf] : user_)
      if (!put(flat, index, Py_NewRef(Py_None))) return false;
    for (const auto& [index, parameter] : grads_)
      if (!put(flat, index, Py_NewRef(Py_None))) return false;
    return true;
  }

  // Takes over the reference to `thing`, which is null where there is an error.
  static bool put(PyObject* flat, Py_ssize_t index, PyObject* thing) {
    return thing != nullptr && PyList_SetItem(flat, index, thing) == 0;
  }

  static PyObject* read(const Number& number) {
    THPObjectPtr held(PyObject_GetItem(number.group, number.key));
    if (held.get() != nullptr && number.position >= 0) held = PySequence_GetItem(held.get(), number.position);
    if (held.get() == nullptr || PyFloat_CheckExact(held.get())) return held.release();
    return PyNumber_Float(held.get());
  }
};

}  // namespace wholestep
