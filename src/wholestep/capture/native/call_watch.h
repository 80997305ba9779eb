// A profile function that asks Python once about each C function that is called. Python's `watch_calls`.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>

#include <unordered_set>

namespace wholestep {

// The entries of method tables whose functions Python has allowed. Such an entry lives as long as its module does.
inline std::unordered_set<const PyMethodDef*>& allowed_calls() {
  static std::unordered_set<const PyMethodDef*> entries;
  return entries;
}

// `ask(frame, function)` is true where the function is allowed wherever it is called; it raises where it is refused.
inline int profile_calls(PyObject* ask, PyFrameObject* frame, int what, PyObject* function) {
  if (what != PyTrace_C_CALL) return 0;
  const PyMethodDef* entry = PyCFunction_Check(function) ? reinterpret_cast<PyCFunctionObject*>(function)->m_ml : nullptr;
  if (entry != nullptr && allowed_calls().count(entry) != 0) return 0;
  PyObject* both[] = {reinterpret_cast<PyObject*>(frame), function};
  PyObject* found = PyObject_Vectorcall(ask, both, 2, nullptr);
  if (found == nullptr) return -1;
  if (found == Py_True && entry != nullptr) allowed_calls().insert(entry);
  Py_DECREF(found);
  return 0;
}

}  // namespace wholestep
