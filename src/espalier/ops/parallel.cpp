// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/parallel.h"

#include <ATen/Parallel.h>

namespace espalier {

void parallel_ranges(int64_t count, int64_t grain,
                     const std::function<void(int64_t begin, int64_t end)>& work) {
  at::parallel_for(0, count, grain, work);
}

}  // namespace espalier
