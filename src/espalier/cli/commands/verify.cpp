// SPDX-License-Identifier: Apache-2.0
// espalier verify: proof that training on trees equals per-trajectory training.
#include "espalier/verify/verify.h"
#include "espalier/base/units.h"

#include <memory>

#include "espalier/base/check.h"
#include "espalier/base/output.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/data_flags.h"
#include "espalier/cli/flags/mix_flags.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/model_use.h"
#include "espalier/measure/planning.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/runtime/progress.h"
#include "espalier/train/flags.h"

namespace espalier::cli {
namespace {

struct VerifyArguments {
  DataFlags data;
  MixFlags mix;
  Planning planning;
  DeviceOptions device;
  VerifyOptions options;
  std::string model, adapter;
  bool json = false;
};

int run_verify(const VerifyArguments& flags, const OptionList& list) {
  flags.mix.check(list, flags.data);
  VerifyOptions options = flags.options;
  check_objective_options(options.objective);
  const auto [device, kernels] = flags.device.open(*flags.options.group);
  const KernelScope scope(kernels);
  options.device = device;
  options.model = flags.model;
  options.adapter = flags.adapter;
  MixedData data;
  if (flags.mix.file.empty()) {
    data.trajectories = flags.data.read(data_use_of(flags.model, options.objective));
  } else {
    data = flags.mix.read(flags.model, flags.data);
  }
  const Trajectories& trajectories = data.trajectories;
  options.mix = data.sources;
  note_carried_tensors(flags.model);
  options.plan = flags.planning.options(trajectories);
  VerifyReport report;
  {
    Progress progress("verify");
    report = verify(trajectories, options, [&](const char* phase, double fraction) {
      progress.relabel(fmt::format("verify: {}", phase));
      progress.update(fraction);
    });
  }
  nlohmann::ordered_json json = to_json(report);
  if (!flags.json) {
    json = {{"report", std::move(json)},
            {"max_error", options.max_error},
            {"max_error_ratio", options.max_error_ratio}};
  }
  print_output("{}", flags.json ? json.dump(2) + "\n" : by_python("verify", "verify", json.dump()));
  return report.passed ? 0 : 1;
}

}  // namespace

Command verify_command(const Group* group) {
  const auto flags = std::make_shared<VerifyArguments>();
  if (group != nullptr) flags->options.group = group;
  Command command{
      .name = "verify",
      .summary = kSummaryOfVerify,
      .closing =
          "Runs all trajectories as one optimiser step twice: on trees by the plan, and one by one with "
          "ordinary causal attention. In float64 the relative error of every parameter's gradient may be at "
          "most 1e-12. In lower precision both sides are compared with float64, and the error of the tree "
          "side may be at most twice that of the other. When the tokens of other branches change, the "
          "log-probabilities of a branch must stay bitwise identical. The exit status is 1 if anything "
          "fails. Memory grows with --limit, and a few trajectories prove as much as many.",
      .run = [flags](const OptionList& list) { return run_verify(*flags, list); }};
  VerifyOptions& options = flags->options;
  OptionList& list = command.options;
  add_model(&list, &flags->model);
  add_adapter(&list, &flags->adapter, "Verify the gradients of this adapter of the model, a PEFT folder");
  flags->data.add(&list, /*required=*/false);
  flags->mix.add(&list);
  add_dtype(&list, "dtype", &options.dtype, "Precision to verify");
  add_freeze_pad_embedding(&list, &options.freeze_pad_embedding);
  flags->device.add(&list, /*trains=*/true);
  add_objective_options(&options.objective, &list);
  flags->planning.add(&list);
  add_threads(&list);
  list.group("Proof");
  list.add("seed", &options.seed, "Random seed that selects the branches whose isolation is tested");
  list.add("json", &flags->json, "Print JSON");
  return command;
}

}  // namespace espalier::cli
