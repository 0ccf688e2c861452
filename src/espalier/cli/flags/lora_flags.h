// SPDX-License-Identifier: Apache-2.0
// Flags of low-rank adapters (LoRA), the same in every command that has them.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include "espalier/cli/print/help.h"
#include "espalier/config/config.h"
#include "espalier/config/lora.h"

namespace espalier::cli {

/// --adapter.
CLI::Option* add_adapter(CLI::App* command, std::string* adapter, const std::string& help,
                         const std::string& group = kDataGroup);

struct LoraFlags {
  int64_t rank = 0;  // 0: no new adapter
  double alpha = 0;  // 0: the rank
  bool rslora = false;
  std::string targets = kAllLinear;  // names with commas between them
  std::string adapter;               // a folder; "": none

  /// --lora-rank and what goes with it, and --adapter.
  void add(CLI::App* command);

  /// Of a new adapter; nothing without one. Throws InputError where a flag is given without the one that it
  /// needs, or beside one that it contradicts, or has no such value.
  std::optional<LoraOptions> options() const;

  /// The maps that are trained, of a new adapter or that of the folder; nothing without adapters.
  std::optional<LoraOptions> trained(const DecoderConfig& config) const;
};

}  // namespace espalier::cli
