// The look at everything that a trace depends on, at every call: thousands of objects in some tens of microseconds.
//
// Three types. `Look` holds the state of a step: tensors (type, dtype, device, layout, shape, strides, requires_grad,
// gradient, hooks) and containers (dicts, lists, closure cells), and the modes of torch. `Arguments` holds the shape
// of a call and gives its leaves. `Inputs` fills in what a call supplies and runs it. The first two may say "look again" too often, never "nothing changed" wrongly: the caller
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
#include "arguments.h"
#include "inputs.h"
#include "state.h"

#ifdef Py_GIL_DISABLED
#error "this build of Python has no interpreter lock, on which the look relies"
#endif

using namespace wholestep;

namespace {

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

PyObject* new_inputs(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *tensors, *numbers, *user, *grads, *free;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!", &PyList_Type, &tensors, &PyTuple_Type, &numbers, &PyTuple_Type, &user, &PyTuple_Type,
                        &grads, &PyList_Type, &free))
    return nullptr;
  return create<Inputs>(type, args, [&] { return new Inputs(tensors, numbers, user, grads, free); });
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

PyObject* inputs_run(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "run(function, leaves: list)");
    return nullptr;
  }
  return guarded<Inputs>(self, [args](Inputs& inputs) { return inputs.run(args[0], args[1]); });
}

PyMethodDef look_methods[] = {
    {"moved", look_moved, METH_NOARGS, "Numbers of what may have changed since the last renew(); empty if nothing."},
    {"renew", look_renew, METH_NOARGS, "Takes for granted what the last moved() met."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef arguments_methods[] = {
    {"match", arguments_match, METH_O, "The leaves of a call (args, kwargs), or None if it may differ."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef inputs_methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(inputs_run)), METH_FASTCALL,
     "function(inputs) with gradients off. Then nothing of the call lives on."},
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
  PyObject* inputs = make_type<Inputs>("look.Inputs", new_inputs, inputs_methods);
  if (look == nullptr || arguments == nullptr || inputs == nullptr || PyModule_AddObject(module, "Look", look) < 0 ||
      PyModule_AddObject(module, "Arguments", arguments) < 0 || PyModule_AddObject(module, "Inputs", inputs) < 0 || PyModule_AddIntConstant(module, "TENSORS", TENSORS) < 0 ||
      PyModule_AddIntConstant(module, "MODES", MODES) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}