// A function of Python that may be given other code.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace wholestep {

// A function and what it had: its code, and the defaults of its parameters or null.
struct FunctionRecord {
  PyObject* function;
  PyObject* held[3];
  long number;
  bool holds() const {
    const auto* now = reinterpret_cast<PyFunctionObject*>(function);
    return now->func_code == held[0] && now->func_defaults == held[1] && now->func_kwdefaults == held[2];
  }
};

}  // namespace wholestep
