// Dicts, and which of them may have been written since they were last compared; functions, compared as they are.
//
// Python 3.12 and later tell who watches a dict, just before it is written: comparing dicts that were not written reads
// none of them. Before 3.12, or where others hold all that Python has for watchers, the version of every dict is read.
// Python 3.13.0 does not tell of all that is written to attributes, and its versions do not either (python/cpython#125608):
// there the library fails its test.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace wholestep {

// A number that changes whenever something else is written into the dict. Python dropped it in 3.14: there every
// dict that is not watched may have changed at every call.
inline uint64_t version_of(const PyDictObject* dict) {
#if PY_VERSION_HEX < 0x030E0000
  return dict->ma_version_tag;
#else
  static uint64_t never_the_same = 0;
  return ++never_the_same;
#endif
}

class DictVersions {
 public:
  DictVersions() = default;
  DictVersions(const DictVersions&) = delete;
  DictVersions& operator=(const DictVersions&) = delete;
  ~DictVersions() { clear(); }

  // Not counted as written so far. Where collect_written() is called the dict must be alive; elsewhere it may be gone.
  void add(PyObject* dict, long number) {
    watched_.push_back({dict, number, Written::NOT});
    written_.reserve(watched_.capacity());  // no memory is asked for in note()
    if (watch(dict, {this, watched_.size() - 1})) return;
    watched_.pop_back();
    read_.push_back({reinterpret_cast<PyDictObject*>(dict), number});
    known_version_ = std::max(known_version_, version_of(read_.back().dict));
  }

  // Adds to `numbers` those of the dicts that may have been written since what accept() takes for granted.
  void collect_written(std::vector<long>& numbers) {
    for (const size_t index : written_) {
      watched_[index].written = Written::SEEN;
      numbers.push_back(watched_[index].number);
    }
    if (read_.empty()) return;
    newest_version_ = known_version_;
    for (const auto& [dict, number] : read_) newest_version_ = std::max(newest_version_, version_of(dict));
    if (newest_version_ == known_version_) return;
    for (const auto& [dict, number] : read_)
      if (version_of(dict) > known_version_) numbers.push_back(number);
  }

  // Takes for granted what the last collect_written() met, and nothing that was written since.
  void accept() {
    known_version_ = newest_version_;
    std::erase_if(written_, [this](size_t index) {
      if (watched_[index].written != Written::SEEN) return false;
      watched_[index].written = Written::NOT;
      return true;
    });
  }

  void clear() {
    for (size_t index = 0; index < watched_.size(); ++index) unwatch(watched_[index].dict, {this, index});
    watched_.clear(), written_.clear(), read_.clear();
    known_version_ = newest_version_ = 0;
  }

 private:
  enum class Written : uint8_t { NOT, SINCE, SEEN };  // SEEN: by collect_written(), not written since
  struct Watched {
    PyObject* dict;
    long number;
    Written written;
  };
  struct Read {
    const PyDictObject* dict;
    long number;
  };
  // Who wants to hear of a dict.
  struct Listener {
    DictVersions* dicts;
    size_t index;

    bool operator==(const Listener&) const = default;
  };

  std::vector<Watched> watched_;
  std::vector<size_t> written_;  // those in `watched_` that are not NOT
  std::vector<Read> read_;
  // Versions come from one counter: what was written later has a greater one than every dict had before.
  uint64_t known_version_ = 0, newest_version_ = 0;

  void note(size_t index) noexcept {
    if (watched_[index].written == Written::NOT) written_.push_back(index);
    watched_[index].written = Written::SINCE;
  }

#if PY_VERSION_HEX >= 0x030C0000
  using Listeners = std::unordered_multimap<const PyObject*, Listener>;

  // Never freed: a dict may be written when everything else of the process is gone.
  static Listeners& listeners() {
    static auto* all = new Listeners;
    return *all;
  }

  // One of the few numbers for watchers that Python has; negative if others hold all of them. It stays ours.
  static int watcher() {
    static const int id = PyDict_AddWatcher(hear);
    return id;
  }

  // Python calls this before a write, whatever thread writes, and when a dict dies; an error may be on its way.
  static int hear(PyDict_WatchEvent event, PyObject* dict, PyObject*, PyObject*) noexcept {
    const auto [first, last] = listeners().equal_range(dict);
    for (auto one = first; one != last; ++one) one->second.dicts->note(one->second.index);
    if (event == PyDict_EVENT_DEALLOCATED) listeners().erase(first, last);  // another dict may have its address
    return 0;
  }

  static bool watch(PyObject* dict, const Listener& listener) {
    if (watcher() < 0 || PyDict_Watch(watcher(), dict) != 0) {
      PyErr_Clear();
      return false;
    }
    listeners().emplace(dict, listener);
    return true;
  }

  static void unwatch(PyObject* dict, const Listener& listener) noexcept {
    const auto [first, last] = listeners().equal_range(dict);
    const auto found = std::find_if(first, last, [&](const auto& one) { return one.second == listener; });
    if (found == last) return;  // the dict is gone
    listeners().erase(found);
    if (listeners().contains(dict)) return;
    PyObject* raised = PyErr_GetRaisedException();  // this may run while an error is on its way
    if (PyDict_Unwatch(watcher(), dict) != 0) PyErr_Clear();  // the interpreter ends
    PyErr_SetRaisedException(raised);
  }
#else
  static bool watch(PyObject*, const Listener&) { return false; }
  static void unwatch(PyObject*, const Listener&) {}
#endif
};

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

// An object, its class and the dict of its attributes or null: both can be exchanged for others.
struct ObjectRecord {
  PyObject *object, *type, *dict;
  long number;
  PyObject** place = _PyObject_GetDictPtr(object);  // of the dict: where it is as long as the class is the same
  bool holds() const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type) return false;
    return (place == nullptr ? nullptr : *place) == dict;
  }
};

}  // namespace wholestep
