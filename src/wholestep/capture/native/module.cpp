// The look at everything that a trace depends on, at every call: thousands of objects in some tens of microseconds.
//
// Four types. `Look` holds the state of a step: tensors (type, dtype, device, layout, shape, strides, requires_grad,
// gradient, hooks) and containers (dicts, lists, closure cells), and the modes of torch. `Arguments` holds the shape
// of a call and gives its leaves. These two may say "look again" too often, never "nothing changed" wrongly: the caller
// compares in full and has the sentence for the user. `Inputs` fills in what a call supplies and runs it. `Shortcut` is
// the usual call, all of these one after another.
//
// What costs time is memory: the step that ran before has filled the caches, so every line that is looked at comes
// from far away. Records are small and lie in one array each, loops have no branch that depends on a single object, so
// that the processor runs ahead over many of them, and what can be told from fewer lines is told from fewer.
//
// Dicts are not even read where Python tells of writes (`dict_versions.h`).
//
// Nothing dangles: `Look` owns the Python objects. What a tensor object wraps may be exchanged (torch.utils.
// swap_tensors) and freed, so a record's TensorImpl is touched only after the object was seen to still wrap it, and
// its AutogradMeta only as the TensorImpl names it now. Everything runs under the interpreter lock.

#define PY_SSIZE_T_CLEAN
#include "fast_call.h"

#ifdef Py_GIL_DISABLED
#error "this build of Python has no interpreter lock, on which the look relies"
#endif

using namespace wholestep;

namespace {

PyObject *look_type, *arguments_type, *inputs_type;  // made once, never freed

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

PyObject* shortcut_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* keywords);

PyObject* new_shortcut(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *arguments, *look, *why_not, *inputs, *function, *finish, *capturing;
  int always;
  if (!PyArg_ParseTuple(args, "O!O!OpO!OOO!", arguments_type, &arguments, look_type, &look, &why_not, &always, inputs_type,
                        &inputs, &function, &finish, &PyList_Type, &capturing))
    return nullptr;
  PyObject* made = create<Shortcut>(type, args, [&] {
    return new Shortcut(arguments, look, why_not, always, inputs, function, finish, capturing);
  });
  if (made != nullptr) reinterpret_cast<Object<Shortcut>*>(made)->call = shortcut_call;
  return made;
}

PyObject* look_moved(PyObject* self, PyObject*) {
  return guarded<State>(self, [](State& state) { return as_tuple(state.moved()); });
}

PyObject* look_renew(PyObject* self, PyObject*) {
  return guarded<State>(self, [](State& state) -> PyObject* {
    state.renew();
    Py_RETURN_NONE;
  });
}

PyObject* arguments_match(PyObject* self, PyObject* call) {
  return guarded<Call>(self, [call](Call& one) -> PyObject* {
    if (!PyTuple_CheckExact(call) || PyTuple_GET_SIZE(call) != 2) Py_RETURN_NONE;
    PyObject* found = one.match(PyTuple_GET_ITEM(call, 0), PyTuple_GET_ITEM(call, 1));
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

// The object itself stands for "the call may differ": no step can return it.
PyObject* shortcut_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* keywords) {
  if (PyVectorcall_NARGS(flags) != 2 || keywords != nullptr) {
    PyErr_SetString(PyExc_TypeError, "shortcut(args: tuple, kwargs: dict)");
    return nullptr;
  }
  return guarded<Shortcut>(self, [=](Shortcut& shortcut) {
    PyObject* found = shortcut.call(args[0], args[1]);
    return found != nullptr || PyErr_Occurred() ? found : Py_NewRef(self);
  });
}

PyObject* shortcut_hits(PyObject* self, void*) {
  return guarded<Shortcut>(self, [](Shortcut& shortcut) { return PyLong_FromSsize_t(shortcut.hits); });
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

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};

PyGetSetDef shortcut_getters[] = {
    {"hits", shortcut_hits, nullptr, "Calls that went this way.", nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyModuleDef definition{PyModuleDef_HEAD_INIT, "look", "The quick look at a step's state and arguments.", -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_look() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  look_type = make_type<State>("look.Look", new_look, look_methods, nullptr, false);
  arguments_type = make_type<Call>("look.Arguments", new_arguments, arguments_methods, nullptr, false);
  inputs_type = make_type<Inputs>("look.Inputs", new_inputs, inputs_methods, nullptr, false);
  PyObject* shortcut_type = make_type<Shortcut>("look.Shortcut", new_shortcut, no_methods, shortcut_getters, true);
  for (PyObject* type : {look_type, arguments_type, inputs_type, shortcut_type}) {
    if (type == nullptr || PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) < 0) {
      Py_DECREF(module);
      return nullptr;
    }
  }
  if (PyModule_AddIntConstant(module, "TENSORS", TENSORS) < 0 || PyModule_AddIntConstant(module, "MODES", MODES) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
