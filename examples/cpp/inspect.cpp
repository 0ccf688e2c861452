// SPDX-License-Identifier: Apache-2.0
// inspect ROWS: how much the rows of a file share, and what keeps them from sharing more.
#include <cstdio>
#include <exception>

#include "espalier/base/check.h"
#include "espalier/data/reader.h"
#include "espalier/engine/step.h"
#include "espalier/inspect/report.h"

namespace {

void inspect(const char* file) {
  const espalier::Trajectories rows = espalier::read_trajectories(file);
  const espalier::Forest forest = espalier::forest_of(rows, {});  // {}: all rows
  espalier::InspectReport report;
  report.statistics = espalier::forest_statistics(forest);
  report.by_depth = espalier::sharing_by_depth(forest);
  report.gains = espalier::Gains::in_tokens(report.statistics, report.statistics.tree_tokens);
  report.sharing = espalier::analyse_sharing(rows, forest, {});
  std::printf("%s\n", to_json(report, rows, /*vocabulary=*/nullptr).dump(2).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s ROWS\n", argv[0]);
    return 2;
  }
  try {
    inspect(argv[1]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "inspect: %s\n", error.what());
    return 1;
  }
}
