// SPDX-License-Identifier: Apache-2.0
// Any bytes as a cost model: refused with InputError, or read to rates that read back the same.
#include "espalier/base/check.h"
#include "espalier/plan/planner.h"
#include "espalier/plan/time_model.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;
  static const ModelCost cost = common_costs().time.cost;
  const fuzz::InputFile input(data, size);
  try {
    const TimeModel model = read_cost_model(input.path(), cost);
    const TimeModel again = parse_cost_model(cost_model_json(model), cost, "again");
    fuzz::require(again.seconds == model.seconds && again.calibrated == model.calibrated);
  } catch (const InputError&) {
  }
  return 0;
}
