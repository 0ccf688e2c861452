// SPDX-License-Identifier: Apache-2.0
// The options of the Engine, which are flags of the command line: same names, values, checks and defaults.
#pragma once

#include <string>

#include "espalier/cli/flags.h"
#include "espalier/cli/sample_flags.h"
#include "espalier/objective/options.h"
#include "espalier/python_engine/engine.h"

namespace espalier::python_engine {

struct EngineFlags {
  std::string dtype = "float32";
  bool freeze_pad_embedding = false;
  cli::OptimizerFlags optimizer;
  cli::PlanFlags plan;
  cli::DeviceFlags device;
};

/// All throw InputError naming an option that there is not, with all that there are, and for a value what
/// was expected and received. `threads` is set at once.
EngineFlags parse_engine_flags(const NamedValues& values);
ObjectiveOptions parse_objective_flags(const NamedValues& values);
cli::SampleFlags parse_sample_flags(const NamedValues& values);

}  // namespace espalier::python_engine
