// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/lora_flags.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "espalier/base/check.h"
#include "espalier/cli/validators.h"
#include "espalier/model/adapter_folder.h"

namespace espalier::cli {
namespace {

constexpr const char* kLoraGroup = "LoRA";

/// The names in a list with commas between them, in its order, each once.
std::vector<std::string> names_in(const std::string& list) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    std::string name = list.substr(begin, end - begin);
    ESPALIER_CHECK(!name.empty() && name.find(' ') == std::string::npos,
                   "--lora-targets: expected names with commas and nothing else between them, received `{}`",
                   list);
    if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
    begin = end + 1;
  }
  return names;
}

}  // namespace

CLI::Option* add_adapter(CLI::App* command, std::string* adapter, const std::string& help,
                         const std::string& group_name) {
  const HelpGroup group(command, group_name);
  return command->add_option("--adapter", *adapter, help)->type_name("DIR");
}

void LoraFlags::add(CLI::App* command) {
  const HelpGroup group(command, kLoraGroup);
  command
      ->add_option("--lora-rank", rank,
                   "Train low-rank adapters of this rank in place of the weights, which stay as they are and "
                   "have neither gradients nor optimiser state. Checkpoints are then folders of PEFT")
      ->check(whole_from(1));
  command
      ->add_option("--lora-alpha", alpha,
                   "What adapters add is multiplied by this over the rank (default: the rank)")
      ->check(real_from(std::numeric_limits<double>::denorm_min()));
  command
      ->add_option(
          "--lora-targets", targets,
          "Which linear maps have adapters: names with commas between them, such as q_proj,v_proj, or "
          "all-linear. A name stands for all maps whose names end with it. Routers and experts have none")
      ->type_name("NAMES")
      ->capture_default_str();
  command->add_flag("--lora-rslora", rslora, "Divide by the square root of the rank instead (rsLoRA)");
  add_adapter(command, &adapter,
              "Go on training this adapter, a folder of PEFT or a checkpoint, in place of a new one",
              kLoraGroup);
}

std::optional<LoraOptions> LoraFlags::options() const {
  ESPALIER_CHECK(rank == 0 || adapter.empty(),
                 "--adapter {}: expected no --lora-rank beside it, since the adapter has one, received {}",
                 adapter, rank);
  const char* alone = alpha != 0              ? "--lora-alpha"
                      : rslora                ? "--lora-rslora"
                      : targets != kAllLinear ? "--lora-targets"
                                              : nullptr;
  ESPALIER_CHECK(rank > 0 || alone == nullptr, "{}: expected --lora-rank beside it", alone);
  if (rank == 0) return std::nullopt;
  LoraOptions options{.rank = rank,
                      .alpha = alpha == 0 ? static_cast<double>(rank) : alpha,
                      .rslora = rslora,
                      .targets = names_in(targets)};
  check_lora_options(options);
  return options;
}

std::optional<LoraOptions> LoraFlags::trained(const DecoderConfig& config) const {
  std::optional<LoraOptions> given = options();
  if (!adapter.empty()) return load_adapter(adapter, config, at::kFloat).options;
  if (given) adapted_maps(config, given->targets);  // throws where there are none
  return given;
}

}  // namespace espalier::cli
