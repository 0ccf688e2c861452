// SPDX-License-Identifier: Apache-2.0
// Commands that need LibTorch, in the program without it: each fails with one line that tells how to get it.
#include <fmt/format.h>

#include <cstdlib>

#include "espalier/base/check.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/commands/plan_of_model.h"
#include "espalier/cli/print/data_summary.h"

namespace espalier::cli {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  // Set if an espalier-torch is installed that does not fit (python/espalier/__main__.py).
  const char* fault = std::getenv("ESPALIER_WITHOUT_LIBTORCH");
  throw InputError(fmt::format(
      "{} needs {}", what, fault != nullptr ? fault : "LibTorch: run pip install 'espalier-train[torch]'"));
}

Command needs_libtorch(const std::string& name, const char* summary) {
  return {
      .name = name, .summary = summary, .pass_on = [name](const std::vector<std::string>&) { refuse(name); }};
}

}  // namespace

Command train_command(const std::function<std::string()>&, const Group*) {
  return needs_libtorch("train", kSummaryOfTrain);
}

Command verify_command(const Group*) {
  return needs_libtorch("verify", kSummaryOfVerify);
}

Command bench_command() {
  return needs_libtorch("bench", kSummaryOfBench);
}

Command device_command() {
  return needs_libtorch("device", kSummaryOfDevice);
}

ModelPlanner planner_of_model(const PlanArguments&) {
  refuse("plan --model");
}

void set_threads(int) {}  // planning uses one

// No command here has an objective.
bool objective_reads(const ObjectiveOptions&, Field) {
  ESPALIER_ASSERT(false);
  return false;
}

std::vector<std::string> signal_warnings(const Trajectories&, const ObjectiveOptions&) {
  ESPALIER_ASSERT(false);
  return {};
}

}  // namespace espalier::cli
