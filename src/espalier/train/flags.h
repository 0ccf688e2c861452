// SPDX-License-Identifier: Apache-2.0
// Options of training that need no LibTorch, shared by commands and Python: low-rank adapters (LoRA) and the
// kind of optimiser.
#pragma once

#include <optional>
#include <string>

#include "espalier/base/options.h"
#include "espalier/config/config.h"
#include "espalier/config/lora.h"

namespace espalier {

/// Adds --adapter.
void add_adapter(OptionList* list, std::string* adapter, const std::string& help, OptionTraits traits = {});

struct LoraFlags {
  LoraOptions lora{.targets = {kAllLinear}};  // rank 0: no new adapter; alpha 0: the rank
  std::string adapter;                        // a folder; "": none

  /// Adds --lora-rank with its related flags, and --adapter.
  void add(OptionList* list);

  /// Options of a new adapter; nullopt if there is none. Throws InputError if a flag is given without one
  /// that it requires or with one that excludes it, or has an invalid value.
  std::optional<LoraOptions> options() const;

  /// Options of the trained adapter, a new one or the one of the folder; nullopt if there is none.
  std::optional<LoraOptions> trained(const DecoderConfig& config) const;
};

enum class OptimizerKind { kAdamW, kSgd };

/// Adds the option --optimizer.
void add_optimizer(OptimizerKind* optimizer, OptionList* list, const std::string& help);
std::string to_string(OptimizerKind optimizer);

}  // namespace espalier
