// A call that is as an earlier one was, from its signature to its result. Python's `FastCall`.
#pragma once

#include "signature_guard.h"
#include "input_filler.h"
#include "py_object.h"
#include "state_guard.h"

namespace wholestep {

// In Python the way between these parts is some hundred objects and tables, each of which lies far away after a step.
class FastCall {
 public:
  // `signature`, `state` and `inputs` are objects of these types. `why_not(leaves, changed)` compares in full what may have
  // changed, and at every call where `always`. `function` runs on the inputs; `finish` makes the result of what it
  // gives, or is None where that is its first part. Nothing is done while the list `capturing` holds anything.
  FastCall(PyObject* signature, PyObject* state, PyObject* why_not, bool always, PyObject* inputs, PyObject* function,
           PyObject* finish, PyObject* capturing)
      : signature_(signature), state_(state), why_not_(why_not), inputs_(inputs), function_(function), finish_(finish),
        capturing_(capturing), always_(always) {}

  // The result, null with an error set, or null without one: the call may differ, and nothing was done.
  PyObject* call(PyObject* args, PyObject* kwargs) {
    if (PyList_GET_SIZE(capturing_) != 0) return nullptr;
    THPObjectPtr leaves(inner_of<SignatureGuard>(signature_).match(args, kwargs));
    if (leaves.get() == nullptr) {
      PyErr_Clear();
      return nullptr;
    }
    if (!holds(leaves.get())) return nullptr;
    ++hits;
    THPObjectPtr outputs(inner_of<InputFiller>(inputs_).run(function_, leaves.get()));
    if (outputs.get() == nullptr) return nullptr;
    return finish_ == Py_None ? PySequence_GetItem(outputs.get(), 0) : PyObject_CallOneArg(finish_, outputs.get());
  }

  Py_ssize_t hits = 0;  // calls that went this way

 private:
  PyObject *signature_, *state_, *why_not_, *inputs_, *function_, *finish_, *capturing_;
  bool always_;

  // Whether the state is as it was; false with an error set, too.
  bool holds(PyObject* leaves) {
    const auto& changed = inner_of<StateGuard>(state_).changed();
    if (changed.empty() && !always_) return true;
    THPObjectPtr numbers(as_tuple(changed));
    if (numbers.get() == nullptr) return false;
    PyObject* both[] = {leaves, numbers.get()};
    const THPObjectPtr found(PyObject_Vectorcall(why_not_, both, 2, nullptr));
    return found.get() == Py_None;
  }
};

}  // namespace wholestep
