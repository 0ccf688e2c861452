// SPDX-License-Identifier: Apache-2.0
// espalier verify: proof that training on trees changes nothing.
#include "espalier/verify/verify.h"
#include "espalier/base/units.h"

#include "espalier/base/check.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/help_format.h"
#include "espalier/cli/lora_flags.h"
#include "espalier/cli/mix_flags.h"
#include "espalier/cli/output.h"
#include "espalier/cli/progress.h"
#include "espalier/model/weights.h"

namespace espalier::cli {
namespace {

struct VerifyArguments {
  DataFlags data;
  MixFlags mix;
  PlanFlags plan;
  ObjectiveFlags objective;
  DeviceFlags device;
  std::string model, adapter, dtype = "float64";
  bool freeze_pad_embedding = false;
  uint64_t seed = 0;
  bool json = false;
};

void print(const VerifyReport& report, const VerifyOptions& options) {
  const auto row = [](const char* name, const std::string& value) {
    print_output("{:<37}  {}\n", name, value);
  };
  const bool exact = report.dtype == "float64";
  row("dtype, device", fmt::format("{}, {}", report.dtype, report.device));
  row("flat tokens / tree tokens / encoded",
      fmt::format("{} / {} / {}", with_commas(report.flat_tokens), with_commas(report.tree_tokens),
                  with_commas(report.encoded_tokens)));
  row("loss, per trajectory", fmt::format("{:.12g}", report.reference_loss));
  row("relative error of the loss", fmt::format("{:.3g}", report.loss_rel_error));
  row("relative error of gradients, worst",
      fmt::format("{:.3g} in {}{}", report.grad_rel_error_max, report.grad_rel_error_worst_parameter,
                  exact ? fmt::format(" (at most {:g})", options.max_error) : ""));
  row("absolute error of log-probs, worst", fmt::format("{:.3g}", report.logprob_abs_error_max));
  if (!exact) {
    row("error ratio, tree over per-trajectory",
        fmt::format("worst {:.3f} in {}, median {:.3f} (at most {:g})", report.error_ratio_max,
                    report.error_ratio_worst_parameter, report.error_ratio_median, options.max_error_ratio));
  }
  if (report.pad_token_id >= 0) {
    row("input embedding of the pad token",
        fmt::format("{}: {}", report.pad_token_id,
                    report.freeze_pad_embedding ? "not trained, as in Transformers"
                                                : "trained; Transformers does not (--freeze-pad-embedding)"));
  }
  row("isolation", fmt::format("{} in {}", report.isolation_bitwise ? "bitwise" : "BROKEN",
                               count_of(report.isolation_trials, "trial", "trials")));
  print_output("{}\n", report.passed ? "passed" : "FAILED");
}

void run_verify(const VerifyArguments& flags, const CLI::App& command, int* exit_code) {
  flags.mix.check(command, flags.data);
  VerifyOptions options;
  options.device = flags.device.open();
  options.model = flags.model;
  options.adapter = flags.adapter;
  options.dtype = parse_dtype(flags.dtype);
  options.freeze_pad_embedding = flags.freeze_pad_embedding;
  options.objective = flags.objective.options();
  options.seed = flags.seed;
  MixedData data;
  if (flags.mix.file.empty()) {
    data.trajectories = flags.data.read(data_use_of(flags.model, options.objective));
  } else {
    data = flags.mix.read(flags.model, flags.data);
  }
  const Trajectories& trajectories = data.trajectories;
  options.mix = data.sources;
  note_carried_tensors(flags.model);
  options.plan = flags.plan.options(trajectories);
  VerifyReport report;
  {
    Progress progress("verify");
    report = verify(trajectories, options, [&](const char* phase, double fraction) {
      progress.relabel(fmt::format("verify: {}", phase));
      progress.update(fraction);
    });
  }
  if (flags.json) {
    print_output("{}\n", to_json(report).dump(2));
  } else {
    print(report, options);
  }
  *exit_code = report.passed ? 0 : 1;
}

}  // namespace

void add_verify(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "verify", "Prove on your model and data that loss and every gradient equal per-trajectory training");
  command->footer(
      "Runs all trajectories as one optimiser step twice: on trees by the plan, and one by one with ordinary "
      "causal attention. In float64 the relative error of every parameter's gradient may be at most 1e-12. "
      "In lower precision both sides are compared with float64, and the error of the tree side may be at "
      "most twice that of the other. When the tokens of other branches change, the log-probabilities of a "
      "branch must stay bitwise identical. The exit status is 1 if anything fails. Memory grows with "
      "--limit, and a few trajectories prove as much as many.");
  auto flags = std::make_shared<VerifyArguments>();
  add_model(command, &flags->model)->required();
  add_adapter(command, &flags->adapter,
              "Prove the gradients of this adapter, a folder of PEFT, on the model");
  flags->data.add(command, /*required=*/false);
  flags->mix.add(command);
  add_dtype(command, &flags->dtype, "Precision to prove");
  add_freeze_pad_embedding(command, &flags->freeze_pad_embedding);
  flags->device.add(command, /*trains=*/true);
  flags->objective.add(command);
  flags->plan.add(command);
  add_threads(command);
  add_config(command);
  const HelpGroup group(command, "Proof");
  command->add_option("--seed", flags->seed, "Chooses the branches whose isolation is tested")
      ->capture_default_str();
  command->add_flag("--json", flags->json, "Print JSON");
  command->callback([flags, command, exit_code] { run_verify(*flags, *command, exit_code); });
}

}  // namespace espalier::cli
