// SPDX-License-Identifier: Apache-2.0
// A layout with its trajectories: the Python class Layout.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "espalier/tree/layout.h"

namespace espalier::python {

struct TrajectoryLayout : Layout {
  TrajectoryLayout(Layout layout, std::vector<int64_t> trajectories, std::vector<int64_t> end_run)
      : Layout(std::move(layout)),
        trajectories(std::move(trajectories)),
        end_run(std::move(end_run)),
        multiplicity(token_multiplicity(*this, this->end_run)) {}

  std::vector<int64_t> trajectories;  // ascending
  std::vector<int64_t> end_run;       // for each of them, the run at whose end it leaves the layout
  std::vector<int64_t> multiplicity;  // [T] how many of them pass through each token
};

}  // namespace espalier::python
