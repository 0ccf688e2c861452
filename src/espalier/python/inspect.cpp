// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "espalier/base/mapped_file_guard.h"
#include "espalier/data/vocabulary.h"
#include "espalier/inspect/page_data.h"
#include "espalier/inspect/report.h"
#include "espalier/python/arrays.h"
#include "espalier/python/bindings.h"
#include "espalier/tree/forest.h"

namespace espalier::python {
namespace {

/// A report with its data. Rows are shared with Python's Trajectories, not copied.
struct RowsReport {
  Trajectories trajectories;
  Forest forest;
  std::optional<Vocabulary> vocabulary;
  InspectReport report{};

  const Vocabulary* known() const { return vocabulary ? &*vocabulary : nullptr; }
};

Forest build(const Trajectories& trajectories, const std::optional<Given<int64_t>>& tree_keys,
             bool most_leaves_first) {
  TokenSequences sequences{.offsets = trajectories.offsets.span(), .tokens = trajectories.input_ids.span()};
  if (tree_keys) sequences.tree_keys = span_of(*tree_keys);
  sequences.release = [&] {
    if (trajectories.release) trajectories.release();
    check_signals();
  };
  const nb::gil_scoped_release release;
  const std::vector<uint64_t> merge_keys = route_keys(trajectories);
  sequences.merge_keys = merge_keys;
  Forest forest = build_forest(sequences, {},
                               most_leaves_first ? ChildOrder::kMostLeavesFirst : ChildOrder::kFirstReached);
  check_mapped_files();
  return forest;
}

/// `offsets`, `texts`: of a Vocabulary, if there is one.
RowsReport inspect(const Trajectories& trajectories, const std::optional<Given<int64_t>>& offsets,
                   const nb::bytes& texts) {
  RowsReport result{trajectories, build(trajectories, std::nullopt, false), std::nullopt};
  if (offsets) {
    const auto given = span_of(*offsets);
    result.vocabulary.emplace(std::vector(given.begin(), given.end()),
                              std::string(texts.c_str(), texts.size()));
  }
  const Interruptible guard;
  result.report = inspect_rows(trajectories, result.forest, result.known());
  check_mapped_files();
  return result;
}

}  // namespace

void bind_inspect(nb::module_& module) {
  module.def("build_from_trajectories", &build, nb::arg("trajectories"),
             nb::arg("tree_keys").noconvert() = nb::none(), nb::arg("most_leaves_first") = false,
             "espalier.build of Trajectories: tree_keys int64 [R].");
  nb::class_<RowsReport>(module, "RowsReport", "The result of espalier.inspect.")
      .def_ro("forest", &RowsReport::forest, "The prefix trees of the rows.")
      .def(
          "json",
          [](const RowsReport& self) { return to_json(self.report, self.trajectories, self.known()).dump(); },
          nb::call_guard<nb::gil_scoped_release>(), "The output of `espalier inspect --json`.")
      .def(
          "page_data",
          [](const RowsReport& self, const std::string& title) {
            return page_data({title, self.report, self.trajectories, self.forest, self.known()});
          },
          nb::arg("title"), nb::call_guard<nb::gil_scoped_release>(),
          "What espalier.page makes the page of `espalier inspect --html` of.");
  module.def("inspect", &inspect, nb::arg("trajectories"), nb::arg("offsets").noconvert() = nb::none(),
             nb::arg("texts") = nb::bytes("", 0), "Implements espalier.inspect: offsets int64 [V + 1].");
}

}  // namespace espalier::python
