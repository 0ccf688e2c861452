// SPDX-License-Identifier: Apache-2.0
// espalier verify: proof that training on trees equals per-trajectory training.
#include "espalier/verify/verify.h"
#include "espalier/base/units.h"

#include <memory>

#include "espalier/base/check.h"
#include "espalier/commands/command.h"
#include "espalier/commands/data_flags.h"
#include "espalier/commands/mix_flags.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/model_use.h"
#include "espalier/measure/planning.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/runtime/progress.h"
#include "espalier/train/flags.h"

namespace espalier::commands {
namespace {

struct VerifyArguments {
  DataFlags data;
  MixFlags mix;
  Planning planning;
  DeviceOptions device;
  VerifyOptions options;
  std::string model, adapter;
};

Result run_verify(const VerifyArguments& flags, const OptionList& list, const Caller& caller) {
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
    data = flags.mix.read(flags.model, flags.data, caller);
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
  return {.json = {{"report", to_json(report)},
                   {"max_error", options.max_error},
                   {"max_error_ratio", options.max_error_ratio}},
          .status = report.passed ? 0 : 1};
}

}  // namespace

Command verify_command(const Caller& caller) {
  const auto flags = std::make_shared<VerifyArguments>();
  if (caller.group != nullptr) flags->options.group = caller.group;
  Command command{
      .run = [flags, &caller](const OptionList& list) { return run_verify(*flags, list, caller); }};
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
  return command;
}

}  // namespace espalier::commands
