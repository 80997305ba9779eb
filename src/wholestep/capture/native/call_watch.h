// A profile function that asks Python about C functions that are called, and tells it of code that is entered.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>

#include <unordered_map>
#include <unordered_set>

namespace wholestep {

// What Python says of a code: whether calls of C functions from it are asked about, and whether entering it is told.
enum CodeKind : long { ASKED = 1, TOLD = 2 };

// The entries of method tables whose functions Python has allowed. Such an entry lives as long as its module does.
inline std::unordered_set<const PyMethodDef*>& allowed_calls() {
  static std::unordered_set<const PyMethodDef*> entries;
  return entries;
}

// Kinds of the codes that have run, each of which is held while it is here.
inline std::unordered_map<PyCodeObject*, long>& code_kinds() {
  static std::unordered_map<PyCodeObject*, long> kinds;
  return kinds;
}

inline void forget_codes() {
  for (const auto& one : code_kinds()) Py_DECREF(one.first);
  code_kinds().clear();
}

// Python's `look(code)`, asked once; negative where it raises.
inline long kind_of_code(PyObject* look, PyCodeObject* code) {
  const auto found = code_kinds().find(code);
  if (found != code_kinds().end()) return found->second;
  PyObject* told = PyObject_CallOneArg(look, reinterpret_cast<PyObject*>(code));
  const long kind = told == nullptr ? -1 : PyLong_AsLong(told);
  Py_XDECREF(told);
  if (kind >= 0 && code_kinds().emplace(code, kind).second) Py_INCREF(code);
  return kind;
}

inline long kind_of_frame(PyObject* look, PyFrameObject* frame) {
  PyCodeObject* code = PyFrame_GetCode(frame);
  const long kind = kind_of_code(look, code);
  Py_DECREF(code);
  return kind;
}

// `enter(frame)` of a code that is to be told, where the code that calls it is asked about.
inline int entered(PyObject* look, PyObject* enter, PyFrameObject* frame) {
  const long kind = kind_of_frame(look, frame);
  if (kind < 0) return -1;
  if ((kind & TOLD) == 0) return 0;
  PyFrameObject* caller = PyFrame_GetBack(frame);
  const long around = caller == nullptr ? 0 : kind_of_frame(look, caller);
  Py_XDECREF(caller);
  if (around < 0) return -1;
  if ((around & ASKED) == 0) return 0;
  PyObject* done = PyObject_CallOneArg(enter, reinterpret_cast<PyObject*>(frame));
  Py_XDECREF(done);
  return done == nullptr ? -1 : 0;
}

// The profile function of somebody else, such as cProfile, which goes on to be told of everything.
struct Profiler {
  Py_tracefunc function;
  PyObject* object;  // owned
};

inline Profiler& profiler_around() {
  static Profiler around{nullptr, nullptr};
  return around;
}

inline void take_profiler() {
  const PyThreadState* thread = PyThreadState_Get();
  Py_XINCREF(thread->c_profileobj);
  profiler_around() = {thread->c_profilefunc, thread->c_profileobj};
}

inline void put_profiler_back() {
  const Profiler around = profiler_around();
  profiler_around() = {nullptr, nullptr};
  PyEval_SetProfile(around.function, around.object);
  Py_XDECREF(around.object);
}

// `hooks` is (look, ask, enter). `ask(frame, function)` is true where the function is allowed wherever it is called; it
// raises where it is refused.
inline int profile_calls(PyObject* hooks, PyFrameObject* frame, int what, PyObject* function) {
  const Profiler& around = profiler_around();
  if (around.function != nullptr && around.function(around.object, frame, what, function) < 0) return -1;
  if (what == PyTrace_CALL) return entered(PyTuple_GET_ITEM(hooks, 0), PyTuple_GET_ITEM(hooks, 2), frame);
  if (what != PyTrace_C_CALL) return 0;
  const PyMethodDef* entry = PyCFunction_Check(function) ? reinterpret_cast<PyCFunctionObject*>(function)->m_ml : nullptr;
  if (entry != nullptr && allowed_calls().count(entry) != 0) return 0;
  const long kind = kind_of_frame(PyTuple_GET_ITEM(hooks, 0), frame);
  if (kind < 0) return -1;
  if ((kind & ASKED) == 0) return 0;
  PyObject* both[] = {reinterpret_cast<PyObject*>(frame), function};
  PyObject* found = PyObject_Vectorcall(PyTuple_GET_ITEM(hooks, 1), both, 2, nullptr);
  if (found == nullptr) return -1;
  if (found == Py_True && entry != nullptr) allowed_calls().insert(entry);
  Py_DECREF(found);
  return 0;
}

}  // namespace wholestep
