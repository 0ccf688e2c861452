// SPDX-License-Identifier: Apache-2.0
// espalier init: a random model.
#include "espalier/model/init.h"
#include "espalier/base/units.h"

#include <memory>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/output.h"
#include "espalier/base/printable.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/config/families/family.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/runtime/progress.h"

namespace espalier::cli {
namespace {

// 256 bytes and three special tokens.
constexpr int64_t kLeastTokens = 259;

void run_init(InitOptions options, bool byte_tokenizer) {
  if (byte_tokenizer) {
    const int64_t vocab_size = read_config_file(options.config).vocab_size;
    ESPALIER_CHECK(vocab_size >= kLeastTokens,
                   "vocab_size: the byte-level tokenizer expected at least {} (256 bytes and 3 special "
                   "tokens), received {}",
                   kLeastTokens, vocab_size);
    nlohmann::json::parse(by_python("init", "tokenizer", "{}")).get_to(options.files);
  }
  init_model(options);
  int64_t parameters = 0;
  for (const ParameterShape& parameter : parameter_shapes(read_config(options.out))) {
    int64_t size = 1;
    for (const int64_t extent : parameter.shape) size *= extent;
    parameters += size;
  }
  print_output("{}: {} in {}\n", printable(options.out.string()),
               count_of(parameters, "parameter", "parameters"), dtype_name(options.dtype));
}

constexpr auto kTokenizers = std::to_array<Word<bool>>({{"none", false}, {"bytes", true}});

}  // namespace

Command init_command() {
  const auto flags = std::make_shared<InitOptions>();
  const auto byte_tokenizer = std::make_shared<bool>(false);
  // --config is the model's config.json here, not a TOML file of flags.
  Command command{.name = "init",
                  .summary = kSummaryOfInit,
                  .run =
                      [=](const OptionList&) {
                        run_init(*flags, *byte_tokenizer);
                        return 0;
                      },
                  .has_config = false};
  OptionList& list = command.options;
  list.group("Model to make");
  list.add("config", &flags->config, "config.json of a " + family_names("or", "") + " model",
           {.path = PathKind::kFile, .required = true});
  list.add("out", &flags->out, "Folder to create; must be empty or new",
           {.path = PathKind::kFolder, .required = true});
  list.add("seed", &flags->seed, "Random seed; equal seeds give equal weights");
  add_dtype(&list, "dtype", &flags->dtype, "Precision of the weights");
  list.add("tokenizer", byte_tokenizer.get(), kTokenizers,
           "bytes: also write a byte-level tokenizer (ids 0 to 255 are the bytes) with the ChatML "
           "template; none: no tokenizer");
  return command;
}

}  // namespace espalier::cli
