// SPDX-License-Identifier: Apache-2.0
#include "espalier/python/caller.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "espalier/base/mapped_file_guard.h"
#include "espalier/base/messages.h"
#include "espalier/base/temporaries.h"

namespace espalier::python {
namespace {

namespace nb = nanobind;
using commands::Caller;
using commands::FileTable;

nb::str decoded(std::string_view text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

std::vector<FileTable> tables_of(const nb::object& json) {
  std::vector<FileTable> tables;
  for (const auto& table : nlohmann::ordered_json::parse(nb::cast<std::string>(json))) {
    tables.push_back({table.at("where"), table.at("values")});
  }
  return tables;
}

Vocabulary vocabulary_of(const nb::object& made) {
  const auto texts = nb::cast<nb::bytes>(made[1]);
  return {nb::cast<std::vector<int64_t>>(made[0]), std::string(texts.c_str(), texts.size())};
}

/// Calls a function of Python, which has no one to raise to.
template <typename... Args>
void notify(const nb::object& function, const Args&... args) {
  const nb::gil_scoped_acquire acquire;
  try {
    function(args...);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable(function);
  }
}

void listen_from_python(const nb::object& line, const nb::object& progress, const nb::object& end) {
  if (line.is_none()) return listen({});
  // Messages may come from any thread until the process ends, so these are never freed.
  const auto* functions = new std::array<nb::object, 3>{line, progress, end};
  listen({.line = [functions](const std::string& text) { notify((*functions)[0], text); },
          .progress = [functions](
                          const std::string& work, double fraction,
                          const std::string& detail) { notify((*functions)[1], work, fraction, detail); },
          .end = [functions] { notify((*functions)[2]); }});
}

}  // namespace

Caller caller_of(nb::handle object) {
  Caller caller;
  caller.text_of = [object](const std::string& kind, std::string_view json) {
    const nb::gil_scoped_acquire acquire;
    return nb::cast<std::string>(object.attr("text_of")(kind, decoded(json)));
  };
  caller.read_tables = [object](const std::string& option, const std::string& file, const std::string& name) {
    const nb::gil_scoped_acquire acquire;
    return tables_of(object.attr("read_tables")(option, nb::bytes(file.data(), file.size()), name));
  };
  caller.read_vocabulary = [object](const std::filesystem::path& tokenizer_json) {
    const nb::gil_scoped_acquire acquire;
    const std::string file = tokenizer_json.string();
    return vocabulary_of(object.attr("read_vocabulary")(nb::bytes(file.data(), file.size())));
  };
  caller.version = nb::cast<std::string>(object.attr("version"));
  return caller;
}

NamedTexts texts_of(const NamedBytes& options) {
  NamedTexts texts;
  for (const auto& [name, text] : options) texts.emplace_back(name, std::string(text.c_str(), text.size()));
  return texts;
}

std::string text_of(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void bind_process(nb::module_& module) {
  module.def("listen", &listen_from_python, nb::arg("line").none(), nb::arg("progress").none(),
             nb::arg("end").none(),
             "From now on calls line(text), progress(work, fraction, detail) and end() with what the library "
             "says of long work, from any thread. None: no longer.");
  module.def("remove_temporaries", &remove_registered_temporaries,
             "Removes files that are half written. To be called before a signal ends the process.");
  module.def("guard_files", &guard_mapped_files,
             "From now on a mapped file that becomes shorter is an error of the work that reads it, and no "
             "longer the end of the process.");
}

}  // namespace espalier::python
