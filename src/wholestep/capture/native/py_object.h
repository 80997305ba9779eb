// A Python type around a C++ class.
#pragma once

#include <torch/csrc/python_headers.h>

#include <structmember.h>

#include <stdexcept>

namespace wholestep {

template <class Inner>
struct Object {
  PyObject_HEAD
  vectorcallfunc call;  // of a type that is called, else null
  PyObject* kept;       // everything that Inner points at
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

template <class Inner>
Inner& inner_of(PyObject* self) {
  Inner* inner = reinterpret_cast<Object<Inner>*>(self)->inner;
  if (inner == nullptr) throw std::runtime_error("the guard was cleared by the garbage collector");
  return *inner;
}

// Runs `use`; what torch throws (a mode that it refuses to read) becomes a RuntimeError.
template <class Inner, class Use>
PyObject* guarded(PyObject* self, Use use) {
  try {
    return use(inner_of<Inner>(self));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// `getters` may be null. A type that is called sets `call` in its objects.
template <class Inner>
PyObject* make_type(const char* name, newfunc make, PyMethodDef* methods, PyGetSetDef* getters, bool is_called) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Object<Inner>, call), READONLY, nullptr}, {nullptr}};
  static PyGetSetDef none[] = {{nullptr}};
  static PyMemberDef no_members[] = {{nullptr}};
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<Inner>)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse<Inner>)},
      {Py_tp_clear, reinterpret_cast<void*>(clear<Inner>)},
      {Py_tp_methods, methods},
      {Py_tp_getset, getters != nullptr ? getters : none},
      {Py_tp_members, is_called ? members : no_members},
      {is_called ? Py_tp_call : 0, reinterpret_cast<void*>(PyVectorcall_Call)},
      {0, nullptr}};
  const unsigned long flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | (is_called ? Py_TPFLAGS_HAVE_VECTORCALL : 0);
  PyType_Spec spec{name, sizeof(Object<Inner>), 0, static_cast<unsigned int>(flags), slots};
  return PyType_FromSpec(&spec);
}

}  // namespace wholestep
