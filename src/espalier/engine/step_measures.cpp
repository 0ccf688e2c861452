// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/step_measures.h"

#include <algorithm>

namespace espalier {

double StepMeasures::measured_seconds() const {
  double seconds = logprob_pass ? logprob_pass->seconds : 0;
  for (const MicroBatchMeasure& measure : measured) seconds += measure.seconds;
  return seconds;
}

int64_t StepMeasures::measured_peak_bytes() const {
  int64_t bytes = logprob_pass ? logprob_pass->peak_bytes : 0;
  for (const MicroBatchMeasure& measure : measured) bytes = std::max(bytes, measure.peak_bytes);
  return bytes;
}

}  // namespace espalier
