// SPDX-License-Identifier: Apache-2.0
// espalier merge: adds an adapter to the weights of its model.
#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/output.h"
#include "espalier/base/units.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/model_flags.h"
#include "espalier/measure/device_options.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/train/flags.h"

#include <algorithm>
#include <memory>
#include <optional>

namespace espalier::cli {
namespace {

struct MergeArguments {
  std::string model, adapter, out;
  std::optional<at::ScalarType> dtype;
};

/// The dtype of the model's files, or float32 if it cannot be written.
at::ScalarType dtype_of(const DecoderConfig& config) {
  const std::vector<std::string> names = dtype_names();
  const bool known = std::ranges::find(names, config.dtype) != names.end();
  if (!known && !config.dtype.empty())
    log_line("note: the model is in {}; the merged one is written in float32", printable(config.dtype));
  return known ? parse_dtype(config.dtype) : at::kFloat;
}

void run_merge(const MergeArguments& flags) {
  check_new_folder(flags.out);
  const at::ScalarType dtype = flags.dtype ? *flags.dtype : dtype_of(read_config(flags.model));
  note_carried_tensors(flags.model);
  const SourceModel source(flags.model);
  const Decoder decoder = load_decoder(flags.model, dtype);
  const SavedAdapter saved = load_adapter(flags.adapter, decoder);
  ESPALIER_CHECK(!decoder.config().tie_word_embeddings || saved.options.targets.back() != kHeadModule,
                 "{}: expected no adapter of lm_head, received one: the head of this model is its embedding, "
                 "which has no adapter",
                 flags.adapter);
  const Decoder merged(decoder.config(), merged_weights(decoder.weights(), saved.adapter), decoder.buffers());
  PartialFolder folder(flags.out);
  source.save(merged, folder.path(), dtype);
  folder.commit();
  print_output("{}: {} of {} merged, in {}\n", printable(flags.out),
               count_of(static_cast<int64_t>(saved.options.targets.size()), "linear map", "linear maps"),
               printable(flags.adapter), dtype_name(dtype));
}

}  // namespace

Command merge_command() {
  const auto flags = std::make_shared<MergeArguments>();
  Command command{
      .name = "merge",
      .summary = kSummaryOfMerge,
      .closing =
          "The new folder has the tensor names, files and tokenizer of --model and works with the same "
          "software. Sums are computed in at least float32 and rounded once.\n\nExample:\n"
          "  espalier merge --model DIR --adapter RUN/checkpoints/step_100 -o merged",
      .run = [flags](const OptionList&) {
        run_merge(*flags);
        return 0;
      }};
  OptionList& list = command.options;
  add_model(&list, &flags->model);
  add_adapter(&list, &flags->adapter, "Adapter of the model, a PEFT folder", {.required = true});
  list.add("out", &flags->out, "Folder to create; must be empty or new",
           {.letter = 'o', .path = PathKind::kFolder, .group = kOutputGroup, .required = true});
  add_dtype(&list, "dtype", &flags->dtype,
            "Precision of the merged weights (default: that of config.json, or float32 if it has none of "
            "these)",
            kOutputGroup);
  add_threads(&list);
  return command;
}

}  // namespace espalier::cli
