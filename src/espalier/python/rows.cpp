// SPDX-License-Identifier: Apache-2.0
// Rows of Python one by one: dicts of lists that are checked, and written to files.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/data/builder.h"
#include "espalier/data/row_parser.h"
#include "espalier/data/row_writer.h"
#include "espalier/data/writer.h"
#include "espalier/python/arrays.h"
#include "espalier/python/bindings.h"

namespace espalier::python {
namespace {

/// Objects of Python for RowParser: None, booleans, numbers, texts, lists, tuples and arrays. It does not own
/// them.
class PyElement {
 public:
  PyElement() = default;
  explicit PyElement(nb::handle value) : value_(value) {}

  class List {
   public:
    class Iterator {
     public:
      Iterator(nb::handle list, Py_ssize_t index) : list_(list), index_(index) {}
      PyElement operator*() const {
        return PyElement(PyList_Check(list_.ptr()) ? PyList_GetItem(list_.ptr(), index_)
                                                   : PyTuple_GetItem(list_.ptr(), index_));
      }
      Iterator& operator++() {
        ++index_;
        return *this;
      }
      bool operator!=(const Iterator& other) const { return index_ != other.index_; }

     private:
      nb::handle list_;
      Py_ssize_t index_;
    };

    explicit List(nb::handle list) : list_(list), size_(PyObject_Size(list.ptr())) {}
    Iterator begin() const { return {list_, 0}; }
    Iterator end() const { return {list_, size_}; }
    size_t size() const { return static_cast<size_t>(size_); }

   private:
    nb::handle list_;
    Py_ssize_t size_;
  };

  bool is_null() const { return value_.is_none(); }
  bool is_text() const { return PyUnicode_Check(value_.ptr()); }
  bool is_integer() const { return PyLong_Check(value_.ptr()) && !PyBool_Check(value_.ptr()); }

  bool get(bool& value) const {
    value = value_.ptr() == Py_True;
    return PyBool_Check(value_.ptr());
  }
  bool get(int64_t& value) const {
    if (!is_integer()) return false;
    int overflow = 0;
    value = PyLong_AsLongLongAndOverflow(value_.ptr(), &overflow);
    return overflow == 0;
  }
  bool get(double& value) const {
    if (PyFloat_Check(value_.ptr())) {
      value = PyFloat_AsDouble(value_.ptr());
      return true;
    }
    if (!is_integer()) return false;
    value = PyLong_AsDouble(value_.ptr());
    return !failed();
  }
  bool get(std::string& text) const {
    if (!is_text() && !is_integer()) return false;
    const nb::object string = nb::steal(PyObject_Str(value_.ptr()));
    if (failed()) return false;  // Python writes no integers of many thousand digits
    Py_ssize_t size = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(string.ptr(), &size);
    if (failed()) return false;
    text.assign(bytes, static_cast<size_t>(size));
    return true;
  }

  std::optional<List> list() const {
    if (!PyList_Check(value_.ptr()) && !PyTuple_Check(value_.ptr())) return std::nullopt;
    return List(value_);
  }

  template <typename T>
  bool copy(std::vector<T>& values) const {
    Given<T> array;
    if (PyList_Check(value_.ptr()) || !nb::try_cast(value_, array, /*convert=*/false)) return false;
    values.assign(array.data(), array.data() + array.size());
    return true;
  }

  /// Like values of JSON where they have the same in JSON.
  std::string described() const {
    if (const auto values = list()) return fmt::format("a list of {}", values->size());
    if (PyDict_Check(value_.ptr())) return "an object";
    const nb::object shown = nb::module_::import_("espalier.rows.json_lines").attr("shown")(value_);
    const nb::object bytes = shown.attr("encode")("utf-8", "replace");
    return is_text() && !is_utf8() ? "an unpaired surrogate"
                                   : std::string(nb::cast<nb::bytes>(bytes).c_str());
  }

 private:
  /// Whether the last call into Python failed; forgets its exception.
  static bool failed() {
    if (PyErr_Occurred() == nullptr) return false;
    PyErr_Clear();
    return true;
  }
  bool is_utf8() const {
    Py_ssize_t size = 0;
    PyUnicode_AsUTF8AndSize(value_.ptr(), &size);
    return !failed();
  }

  nb::handle value_;
};

/// Parses dicts as rows that programs recorded.
class DictParser {
 public:
  const TrajectoryRow& parse(const nb::dict& row) {
    parser_.begin();
    for (const auto [key, value] : row) {
      std::string_view name;
      if (nb::try_cast(key, name, /*convert=*/false)) parser_.add(name, PyElement(value));
    }
    return parser_.finish();
  }

 private:
  RowParser<PyElement> parser_{0, /*recorded=*/true};
};

template <typename T, typename Convert>
nb::list list_of(std::span<const T> values, Convert convert) {
  nb::list list;
  for (const T value : values) list.append(convert(value));
  return list;
}
template <typename T>
nb::list list_of(std::span<const T> values) {
  return list_of(values, [](T value) { return nb::cast(value); });
}

/// The fields of a row as lists.
struct RowLists {
  nb::dict dict;
  size_t tokens;

  void add(const char* name, std::string_view text) { dict[name] = text; }
  void add(const char* name, bool value) { dict[name] = value; }
  void add(const char* name, double value) { dict[name] = value; }
  template <typename T>
  void add(const char* name, const std::vector<T>& values) {
    dict[name] = list_of(std::span<const T>(values));
  }
  /// None for NaN and for the first.
  void add_logprobs(const char* name, const std::vector<double>& values) {
    nb::list list = list_of(std::span<const double>(values),
                            [](double value) { return std::isnan(value) ? nb::none() : nb::cast(value); });
    list[0] = nb::none();
    dict[name] = list;
  }
  template <typename T, typename Has>
  void add_table(const char* name, const std::vector<T>& values, Has has) {
    nb::list table;
    const size_t width = values.size() / tokens;
    for (size_t first = 0; first < values.size(); first += width)
      table.append(list_of(std::span<const T>(values).subspan(first, has(first) ? width : 0)));
    dict[name] = table;
  }
};

nb::dict checked_row(const nb::dict& row) {
  DictParser parser;
  const TrajectoryRow& parsed = parser.parse(row);
  check_row(parsed);
  RowLists lists{{}, parsed.input_ids.size()};
  visit_fields(parsed, lists);
  return lists.dict;
}

/// A file that is written in a `with` block of Python: without an exception it is committed at the end.
template <typename File>
struct WithBlock {
  std::unique_ptr<File> file;

  File& open() {
    ESPALIER_ASSERT(file);
    return *file;
  }
  void close(nb::handle exception) {
    const std::unique_ptr<File> last = std::move(file);
    if (last && exception.is_none()) on_files([&] { last->commit(); });
  }
};

template <typename File>
nb::class_<WithBlock<File>> bind_with_block(nb::module_& module, const char* name, const char* doc) {
  using Class = WithBlock<File>;
  nb::class_<Class> bound(module, name, doc);
  bound
      .def(
          "__enter__", [](nb::handle_t<Class> self) { return nb::borrow(self); },
          nb::sig(fmt::format("def __enter__(self) -> {}", name).c_str()))
      .def(
          "__exit__", [](Class& self, nb::handle kind, nb::handle, nb::handle) { self.close(kind); },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("traceback").none(),
          nb::sig("def __exit__(self, kind: object, error: object, traceback: object) -> None"));
  return bound;
}

struct DictWriter {
  explicit DictWriter(const std::filesystem::path& path, int64_t memory) : rows(path, memory) {}
  void commit() { rows.commit(); }

  RowWriter rows;
  DictParser parser;
};

}  // namespace

void bind_rows(nb::module_& module) {
  module.def("checked_row", &checked_row, nb::arg("row"),
             "The row that a dict is: ids are integers, masks 0 and 1, other numbers floats, and unknown log-"
             "probabilities\nof tokens without loss None. Raises InputError that names the field.");
  bind_with_block<DictWriter>(
      module, "RowWriter",
      "Writes rows to a file, in the form that its name asks for. The file appears when a `with` block\n"
      "ends without an exception. `memory`: bytes of columns that are kept in memory.")
      .def(
          "__init__",
          [](WithBlock<DictWriter>* self, const std::filesystem::path& path, int64_t memory) {
            new (self)
                WithBlock<DictWriter>{on_files([&] { return std::make_unique<DictWriter>(path, memory); })};
          },
          nb::arg("path"), nb::arg("memory") = int64_t{1} << 24)
      .def(
          "add",
          [](WithBlock<DictWriter>& self, const nb::dict& row) {
            DictWriter& writer = self.open();
            const TrajectoryRow& parsed = writer.parser.parse(row);
            on_files([&] { writer.rows.add(parsed); });
          },
          nb::arg("row"), "Writes a dict as checked_row takes it. Raises InputError that names the field.");
  bind_with_block<TextSink>(
      module, "TextFile",
      "A file of text in UTF-8, compressed if its name ends in .gz or .zst. It appears when a `with` "
      "block ends\nwithout an exception.")
      .def(
          "__init__",
          [](WithBlock<TextSink>* self, const std::filesystem::path& path) {
            new (self) WithBlock<TextSink>{on_files([&] { return open_sink(path); })};
          },
          nb::arg("path"))
      .def(
          "write",
          [](WithBlock<TextSink>& self, std::string_view text) {
            TextSink& sink = self.open();
            on_files([&] { sink.write(text); });
          },
          nb::arg("text"));
  bind_with_block<AtomicFile>(
      module, "AtomicFile",
      "A file that others write under the name `temporary`. It gets its own name when a `with` block "
      "ends\nwithout an exception, else it is removed.")
      .def(
          "__init__",
          [](WithBlock<AtomicFile>* self, const std::filesystem::path& path) {
            new (self) WithBlock<AtomicFile>{on_files([&] { return std::make_unique<AtomicFile>(path); })};
          },
          nb::arg("path"))
      .def_prop_ro("temporary", [](WithBlock<AtomicFile>& self) { return self.open().temporary(); });
}

}  // namespace espalier::python
