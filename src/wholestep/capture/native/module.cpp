// Guards of everything that a trace depends on, at every call: thousands of objects in some tens of microseconds.
//
// Four types. `StateGuard` holds the state of a step: tensors (type, dtype, device, layout, shape, strides,
// requires_grad, gradient, hooks), containers (dicts, lists, closure cells) and the modes of torch. `SignatureGuard`
// holds the shape of a call and gives its leaves. These two may say "perhaps changed" too often, never "unchanged"
// wrongly: the caller compares in full and has the sentence for the user. `InputFiller` fills in what a call supplies
// and runs it. `FastCall` is the usual call, all of these one after another.
//
// What costs time is memory: the step that ran before has filled the caches, so every line that is read comes from far
// away. Records are small and lie in one array each, loops have no branch that depends on a single object, so that the
// processor runs ahead over many of them, and where fewer lines suffice fewer are read.
//
// Dicts are not even read where Python tells of writes (`dict_versions.h`).
//
// Nothing dangles: a `StateGuard` owns the Python objects. What a tensor object wraps may be exchanged (torch.utils.
// swap_tensors) and freed, so a record's TensorImpl is touched only after the object was seen to still wrap it, and
// its AutogradMeta only as the TensorImpl names it now. Everything runs under the interpreter lock.

#define PY_SSIZE_T_CLEAN
#include "call_watch.h"
#include "fast_call.h"

#include <algorithm>
#include <utility>
#include <vector>

#ifdef Py_GIL_DISABLED
#error "this build of Python has no interpreter lock, on which the guards rely"
#endif

using namespace wholestep;

namespace {

PyObject *state_guard_type, *signature_guard_type, *input_filler_type;  // made once, never freed

PyObject* new_state_guard(PyTypeObject* type, PyObject* args, PyObject*) {
  static PyObject* no_slots = PyTuple_New(0);
  PyObject *tensors, *containers, *held, *slots = no_slots;
  const char* wants;
  Py_ssize_t num_wants;
  if (!PyArg_ParseTuple(args, "O!y#O!O!|O!", &PyTuple_Type, &tensors, &wants, &num_wants, &PyTuple_Type, &containers, &PyTuple_Type, &held,
                        &PyTuple_Type, &slots))
    return nullptr;
  if (num_wants != PyTuple_GET_SIZE(tensors) || PyTuple_GET_SIZE(containers) != PyTuple_GET_SIZE(held)) {
    PyErr_SetString(PyExc_ValueError, "one want per tensor, and one held thing per container");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); ++i) {
    if (!PyObject_TypeCheck(PyTuple_GET_ITEM(slots, i), &PyMemberDescr_Type)) {
      PyErr_SetString(PyExc_TypeError, "a slot is the member descriptor of a class");
      return nullptr;
    }
  }
  return create<StateGuard>(type, args, [&] { return new StateGuard(tensors, wants, containers, held, slots); });
}

PyObject* new_signature_guard(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *structure, *leaves, *state;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &structure, &PyTuple_Type, &leaves, &PyTuple_Type, &state))
    return nullptr;
  return create<SignatureGuard>(type, args, [&] { return new SignatureGuard(structure, leaves, state); });
}

PyObject* new_input_filler(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *tensors, *numbers, *user, *grads, *free;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!", &PyList_Type, &tensors, &PyTuple_Type, &numbers, &PyTuple_Type, &user, &PyTuple_Type,
                        &grads, &PyList_Type, &free))
    return nullptr;
  return create<InputFiller>(type, args, [&] { return new InputFiller(tensors, numbers, user, grads, free); });
}

PyObject* fast_call_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* keywords);

PyObject* new_fast_call(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *signature, *state, *why_not, *inputs, *function, *finish, *capturing;
  int always;
  if (!PyArg_ParseTuple(args, "O!O!OpO!OOO!", signature_guard_type, &signature, state_guard_type, &state, &why_not, &always,
                        input_filler_type, &inputs, &function, &finish, &PyList_Type, &capturing))
    return nullptr;
  PyObject* made = create<FastCall>(type, args, [&] {
    return new FastCall(signature, state, why_not, always, inputs, function, finish, capturing);
  });
  if (made != nullptr) reinterpret_cast<Object<FastCall>*>(made)->call = fast_call_call;
  return made;
}

PyObject* state_guard_changed(PyObject* self, PyObject*) {
  return guarded<StateGuard>(self, [](StateGuard& state) { return as_tuple(state.changed()); });
}

PyObject* state_guard_accept(PyObject* self, PyObject*) {
  return guarded<StateGuard>(self, [](StateGuard& state) -> PyObject* {
    state.accept();
    Py_RETURN_NONE;
  });
}

PyObject* signature_guard_match(PyObject* self, PyObject* call) {
  return guarded<SignatureGuard>(self, [call](SignatureGuard& one) -> PyObject* {
    if (!PyTuple_CheckExact(call) || PyTuple_GET_SIZE(call) != 2) Py_RETURN_NONE;
    PyObject* found = one.match(PyTuple_GET_ITEM(call, 0), PyTuple_GET_ITEM(call, 1));
    if (found != nullptr) return found;
    PyErr_Clear();
    Py_RETURN_NONE;
  });
}

PyObject* input_filler_run(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "run(function, leaves: list)");
    return nullptr;
  }
  return guarded<InputFiller>(self, [args](InputFiller& inputs) { return inputs.run(args[0], args[1]); });
}

// The object itself stands for "the call may differ": no step can return it.
PyObject* fast_call_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* keywords) {
  if (PyVectorcall_NARGS(flags) != 2 || keywords != nullptr) {
    PyErr_SetString(PyExc_TypeError, "fast_call(args: tuple, kwargs: dict)");
    return nullptr;
  }
  return guarded<FastCall>(self, [=](FastCall& fast) {
    PyObject* found = fast.call(args[0], args[1]);
    return found != nullptr || PyErr_Occurred() ? found : Py_NewRef(self);
  });
}

PyObject* fast_call_hits(PyObject* self, void*) {
  return guarded<FastCall>(self, [](FastCall& fast) { return PyLong_FromSsize_t(fast.hits); });
}

PyMethodDef state_guard_methods[] = {
    {"changed", state_guard_changed, METH_NOARGS, "Numbers of what may have changed since the last accept(); empty if nothing."},
    {"accept", state_guard_accept, METH_NOARGS, "Takes for granted what the last changed() met."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef signature_guard_methods[] = {
    {"match", signature_guard_match, METH_O, "The leaves of a call (args, kwargs), or None if it may differ."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef input_filler_methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(input_filler_run)), METH_FASTCALL,
     "function(inputs) with gradients off. Then nothing of the call lives on."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};

PyGetSetDef fast_call_getters[] = {
    {"hits", fast_call_hits, nullptr, "Calls that went this way.", nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyObject* watch_calls(PyObject*, PyObject* hooks) {
  PyObject *look, *ask, *enter;
  if (!PyArg_ParseTuple(hooks, "OOO", &look, &ask, &enter)) return nullptr;
  forget_codes();
  take_profiler();
  PyEval_SetProfile(profile_calls, hooks);
  Py_RETURN_NONE;
}

PyObject* unwatch_calls(PyObject*, PyObject*) {
  put_profiler_back();
  Py_RETURN_NONE;
}

PyObject* have_gradients(PyObject*, PyObject* tensors) {
  if (!PyTuple_CheckExact(tensors)) {
    PyErr_SetString(PyExc_TypeError, "have_gradients(tensors: tuple)");
    return nullptr;
  }
  const Py_ssize_t size = PyTuple_GET_SIZE(tensors);
  PyObject* found = PyList_New(size);
  for (Py_ssize_t i = 0; found != nullptr && i < size; ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors, i);
    const AutogradMeta* meta = THPVariable_Check(tensor) ? meta_of(*impl_of(tensor)) : nullptr;
    PyList_SET_ITEM(found, i, PyBool_FromLong(meta != nullptr && meta->grad_.defined()));
  }
  return found;
}

// Whether arrays, another process or a storage object of the user's may look at memory on which `num_known` tensors lie.
// What was once shown to NumPy is not resizable any more; then whoever holds it and is none of those may be an array.
// (Otherwise it may be a graph that has saved a view, which looks at nothing.) Memory that torch has not allocated is an
// array's, or another process's; or it has come from a file, if that `is_loaded`.
bool is_held_elsewhere(c10::StorageImpl* storage, size_t num_known, bool is_loaded) {
  size_t holders = c10::raw::intrusive_ptr::use_count(storage);
  if (PyObject* object = storage->pyobj_slot()->load_pyobj()) {  // it holds the storage, which holds it
    if (Py_REFCNT(object) > 1) return true;
    --holders;
  }
  if (storage->resizable()) return false;
  if (holders > num_known || is_loaded) return holders > num_known;
  const c10::Allocator* allocator = storage->allocator();
  return allocator == nullptr || storage->data_ptr().get_deleter() != allocator->raw_deleter();
}

PyObject* held_elsewhere(PyObject*, PyObject* args) {
  PyObject* tensors;
  int is_loaded;
  if (!PyArg_ParseTuple(args, "O!p", &PyTuple_Type, &tensors, &is_loaded)) return nullptr;
  std::vector<std::pair<c10::StorageImpl*, c10::TensorImpl*>> known;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors, i);
    c10::TensorImpl* impl = THPVariable_Check(tensor) ? impl_of(tensor) : nullptr;
    if (impl != nullptr && impl->has_storage()) known.emplace_back(impl->unsafe_storage().unsafeGetStorageImpl(), impl);
  }
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  for (size_t begin = 0, end = 0; begin < known.size(); begin = end) {
    while (end < known.size() && known[end].first == known[begin].first) ++end;
    if (is_held_elsewhere(known[begin].first, end - begin, is_loaded)) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

PyMethodDef functions[] = {
    {"held_elsewhere", held_elsewhere, METH_VARARGS, "held_elsewhere(tensors, is_loaded): whether arrays, another process or storage objects hold memory of tensors."},
    {"have_gradients", have_gradients, METH_O, "Of each tensor of a tuple whether it has a gradient."},
    {"watch_calls", watch_calls, METH_VARARGS,
     "watch_calls(look, ask, enter): asks about calls of C functions and tells of code that is entered, until "
     "unwatch_calls(). A profiler that runs goes on."},
    {"unwatch_calls", unwatch_calls, METH_NOARGS, "unwatch_calls(): nothing is asked any more."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition{PyModuleDef_HEAD_INIT, "fast_guards", "Guards of a step's state and arguments.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_fast_guards() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  state_guard_type = make_type<StateGuard>("fast_guards.StateGuard", new_state_guard, state_guard_methods, nullptr, false);
  signature_guard_type = make_type<SignatureGuard>("fast_guards.SignatureGuard", new_signature_guard, signature_guard_methods, nullptr, false);
  input_filler_type = make_type<InputFiller>("fast_guards.InputFiller", new_input_filler, input_filler_methods, nullptr, false);
  PyObject* fast_call_type = make_type<FastCall>("fast_guards.FastCall", new_fast_call, no_methods, fast_call_getters, true);
  for (PyObject* type : {state_guard_type, signature_guard_type, input_filler_type, fast_call_type}) {
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
