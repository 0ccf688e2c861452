// SPDX-License-Identifier: Apache-2.0
// Flags of low-rank adapters (LoRA), the same in every command that has them and in Python.
#pragma once

#include <optional>
#include <string>

#include "espalier/base/options.h"
#include "espalier/config/config.h"
#include "espalier/config/lora.h"

namespace espalier {

/// --adapter.
void add_adapter(OptionList* list, std::string* adapter, const std::string& help, OptionTraits traits = {});

struct LoraFlags {
  LoraOptions lora{.targets = {kAllLinear}};  // rank 0: no new adapter; alpha 0: the rank
  std::string adapter;                        // a folder; "": none

  /// --lora-rank and what goes with it, and --adapter.
  void add(OptionList* list);

  /// Of a new adapter; nothing without one. Throws InputError where a flag is given without the one that it
  /// needs, or beside one that it contradicts, or has no such value.
  std::optional<LoraOptions> options() const;

  /// The maps that are trained, of a new adapter or that of the folder; nothing without adapters.
  std::optional<LoraOptions> trained(const DecoderConfig& config) const;
};

}  // namespace espalier
