// SPDX-License-Identifier: Apache-2.0
// espalier init: a random model.
#include "espalier/model/init.h"
#include "espalier/base/units.h"

#include "espalier/base/check.h"
#include "espalier/base/output.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/model_flags.h"
#include "espalier/cli/print/help.h"
#include "espalier/config/families/family.h"
#include "espalier/model/weights.h"
#include "espalier/runtime/progress.h"

namespace espalier::cli {
namespace {

struct InitArguments {
  std::string config, out, dtype = "float32", tokenizer = "none";
  uint64_t seed = 0;
};

void run_init(const InitArguments& flags) {
  InitOptions options;
  options.config = flags.config;
  options.out = flags.out;
  options.seed = flags.seed;
  options.dtype = parse_dtype(flags.dtype);
  options.byte_tokenizer = flags.tokenizer == "bytes";
  init_model(options);
  int64_t parameters = 0;
  for (const ParameterShape& parameter : parameter_shapes(read_config(flags.out))) {
    int64_t size = 1;
    for (const int64_t extent : parameter.shape) size *= extent;
    parameters += size;
  }
  print_output("{}: {} in {}\n", printable(flags.out), count_of(parameters, "parameter", "parameters"),
               flags.dtype);
}

}  // namespace

void add_init(CLI::App& app, int*) {
  CLI::App* command = app.add_subcommand("init", "Make a model with random weights from a config.json");
  auto flags = std::make_shared<InitArguments>();
  const HelpGroup group(command, "Model to make");
  // Here --config is the model's config.json, so there is no TOML file of flags.
  command->add_option("--config", flags->config, "config.json of a " + family_names("or", "") + " model")
      ->type_name("FILE")
      ->required();
  command->add_option("--out", flags->out, "Folder to create, which must be empty or new")
      ->type_name("DIR")
      ->required();
  command->add_option("--seed", flags->seed, "Equal seeds give equal weights")->capture_default_str();
  add_dtype(command, &flags->dtype, "Precision of the weights");
  command
      ->add_option("--tokenizer", flags->tokenizer,
                   "bytes: also write a byte-level tokenizer (ids 0 to 255 are the bytes) with the ChatML "
                   "template; none: do not")
      ->check(CLI::IsMember({"none", "bytes"}))
      ->capture_default_str();
  command->callback([flags] { run_init(*flags); });
}

}  // namespace espalier::cli
