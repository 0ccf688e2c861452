// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/device_flags.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <memory>
#include <string_view>
#include <thread>

#include "espalier/base/check.h"
#include "espalier/base/option_names.h"
#include "espalier/measure/planning.h"

namespace espalier {
namespace {

bool is_index(std::string_view text) {
  int8_t index = -1;  // as LibTorch counts devices
  const auto [last, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  return error == std::errc() && last == text.data() + text.size() && index >= 0;
}

void known_device(const std::string& name) {
  constexpr std::string_view kCuda = "cuda:";
  const bool known = name == kAutomaticDevice || name == "cpu" || name == "cuda" ||
                     (name.starts_with(kCuda) && is_index(std::string_view(name).substr(kCuda.size())));
  ESPALIER_CHECK(known, "{}: expected auto, cpu, cuda or cuda:N, received `{}`", named("device"), name);
}

// Enough to try what more threads than cores do; a number that is a slip would start a million of them.
int most_threads() {
  return std::max(64, 4 * static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

void DeviceFlags::add(OptionList* list, bool trains) {
  list->group(kMachineGroup);
  list->add("device", &device,
            "Where the model runs: cpu, cuda (the first visible GPU), cuda:N, or auto (the first GPU "
            "that can be used, else the CPU; `espalier device` says why). CUDA needs a LibTorch and a "
            "build with CUDA",
            {.shown = "cpu|cuda|cuda:N|auto", .check = known_device});
  if (!trains) return;
  list->add("deterministic", &deterministic,
            "CUDA: make every run on the same GPU bitwise identical, by slower ways of accumulating "
            "gradients (sorted instead of atomic). Without it, gradients may differ in their last "
            "bits from run to run. The CPU is always deterministic");
}

void add_threads(OptionList* list, const std::function<void(int)>& set) {
  const auto threads = std::make_shared<int>(0);
  list->add("threads", threads.get(), "CPU threads (0: all cores)",
            {.least = 0,
             .most = static_cast<double>(most_threads()),
             .group = kMachineGroup,
             .then = [threads, set] {
               if (*threads > 0) set(*threads);
             }});
}

void Planning::add(OptionList* list, bool predicts) {
  add_plan_options(&plan, list);
  if (predicts) {
    list->add("no-calibration", &no_calibration,
              "Predict times by built-in rates, without measuring this machine or GPU");
  }
  list->add(
      "cost-model", &cost_model,
      "Compare plans by the rates in this file instead of built-in ones. `plan --save-cost-model` writes "
      "such a file, and a run saves one as cost_model.json, which --resume uses. Plans never depend on "
      "measurements of the run, so runs with equal flags and data are bitwise identical",
      {.path = PathKind::kFile});
}

PlanOptions Planning::options(const Trajectories& trajectories) const {
  PlanOptions options = plan;
  if (plan.token_budget == 0 && plan.memory_budget == 0) {
    options.token_budget = kDefaultTokenBudget;
    for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
      options.token_budget = std::max(options.token_budget, trajectories.row_size(row));
    }
  }
  return options;
}

}  // namespace espalier
