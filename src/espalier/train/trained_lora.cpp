// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/train/lora_flags.h"

namespace espalier {

std::optional<LoraOptions> LoraFlags::trained(const DecoderConfig& config) const {
  std::optional<LoraOptions> given = options();
  if (!adapter.empty()) return load_adapter(adapter, config, at::kFloat).options;
  if (given) adapted_maps(config, given->targets);  // throws if there are none
  return given;
}

}  // namespace espalier
