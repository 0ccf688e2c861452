// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/train_arguments.h"

#include "espalier/model/weights/tensor_bytes.h"

namespace espalier::commands {
namespace {

constexpr int64_t kMostProcesses = 1024;

void add_run_flags(OptionList* list, TrainArguments* flags) {
  add_run_options(&flags->train, list);
  add_dtype(list, "save-dtype", &flags->save_dtype,
            "Precision of saved weights (default: --dtype) or adapters (default: the precision in which they "
            "are trained, float32 for a bfloat16 model)",
            {.group = "Run"});
  list->add(
      "context-parallel", &flags->context_parallel,
      "Processes that compute every micro-batch together, each a part of its tokens, for trees that are "
      "too large or too slow for one: a divisor of their number. Models of attention layers alone",
      {.least = 1, .most = kMostProcesses});
  list->add("repeats", &flags->repeats, "Folder of the run that `espalier rerun` repeats", {.hidden = true});
  list->add("dry-run", &flags->dry_run,
            "Print the resolved config, the plan, the predicted memory and speed-up, and write nothing");
}

void add_reference_model(OptionList* list, TrainArguments* flags) {
  list->add(
      "reference-model", &flags->reference_model,
      "Model folder of a reference or teacher with the same vocabulary: compute ref_logprobs of all rows "
      "with it before training, in --dtype on --device. The rows must have none. They are stored in "
      "--out and reused by --resume. Not with --mix",
      {.path = PathKind::kFolder});
}

void add_evaluation_flags(OptionList* list, TrainArguments* flags) {
  list->add("eval-data", &flags->eval_data,
            "Held-out rows, files as for --data. Their loss by --objective, computed over all of them like "
            "one step, is written to metrics.jsonl as separate records. Not with --mix",
            {.path = PathKind::kFile, .group = "Evaluation"});
  add_evaluation_options(&flags->evaluation, list);
}

}  // namespace

void TrainArguments::add(OptionList* list) {
  add_model(list, &model);
  data.add(list, /*required=*/false);
  mix.add(list);
  add_run_flags(list, this);
  add_objective_options(&train.objective, list);
  add_reference_model(list, this);
  add_step_options(&train, list);
  add_evaluation_flags(list, this);
  add_optimizer_options(&train, list, /*schedules=*/true);
  lora.add(list);
  planning.add(list);
  device.add(list, /*trains=*/true);
  add_dtype(list, "dtype", &train.dtype,
            "Precision of training (bfloat16: with float32 master weights and gradient accumulation)");
  add_freeze_pad_embedding(list, &train.freeze_pad_embedding);
  add_threads(list);
  add_profile(list, &profile, "one step");
  add_profile_step(&train, list);
}

}  // namespace espalier::commands
