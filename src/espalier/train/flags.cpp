// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/flags.h"

#include <array>

#include "espalier/base/check.h"
#include "espalier/base/option_names.h"

namespace espalier {

void add_adapter(OptionList* list, std::string* adapter, const std::string& help, OptionTraits traits) {
  traits.path = PathKind::kFolder;
  if (traits.group.empty()) traits.group = kDataGroup;
  list->add("adapter", adapter, help, std::move(traits));
}

void LoraFlags::add(OptionList* list) {
  add_lora_options(&lora, list);
  add_adapter(list, &adapter,
              "Continue training this adapter, a PEFT folder or a checkpoint, instead of a new one",
              {.group = "LoRA"});
}

std::optional<LoraOptions> LoraFlags::options() const {
  ESPALIER_CHECK(lora.rank == 0 || adapter.empty(),
                 "{} {}: cannot be combined with {}, because the adapter has a rank; received {}",
                 named("adapter"), adapter, named("lora-rank"), lora.rank);
  const bool names_targets = lora.targets != std::vector<std::string>{kAllLinear};
  const char* alone = lora.alpha != 0 ? "lora-alpha"
                      : lora.rslora   ? "lora-rslora"
                      : names_targets ? "lora-targets"
                                      : nullptr;
  ESPALIER_CHECK(lora.rank > 0 || alone == nullptr, "{}: requires {}", named(alone), named("lora-rank"));
  if (lora.rank == 0) return std::nullopt;
  LoraOptions options = lora;
  if (options.alpha == 0) options.alpha = static_cast<double>(options.rank);
  check_lora_options(options);
  return options;
}

namespace {

constexpr auto kOptimizers =
    std::to_array<Word<OptimizerKind>>({{"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}});

}  // namespace

void add_optimizer(OptimizerKind* optimizer, OptionList* list, const std::string& help) {
  list->add("optimizer", optimizer, kOptimizers, help);
}

std::string to_string(OptimizerKind optimizer) {
  return word_of(kOptimizers, optimizer);
}

}  // namespace espalier
