// SPDX-License-Identifier: Apache-2.0
// Any bytes as a model's config.json: refused with InputError, or read to the same model again after a change
// of dtype. Likewise its stop ids, whatever else it says.
#include "espalier/base/check.h"
#include "espalier/base/json_file.h"
#include "espalier/config/config.h"
#include "espalier/config/stop_ids.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;
  const fuzz::InputFile input(data, size);
  try {
    const DecoderConfig config = read_config_file(input.path());
    const std::string changed = config_with_dtype(input.path(), "float32");
    const fuzz::InputFile rewritten(changed.data(), changed.size());
    DecoderConfig again;
    try {
      again = read_config_file(rewritten.path());
    } catch (const InputError&) {
      fuzz::require(false);
    }
    fuzz::require(again.dtype == "float32");
    fuzz::require(again.model_type == config.model_type && again.hidden_size == config.hidden_size &&
                  again.rope.rope_theta == config.rope.rope_theta);
  } catch (const InputError&) {
  }
  try {
    const auto json = read_json_file<nlohmann::json>(input.path());
    const std::vector<int32_t> ids = parse_stop_ids(json, "config.json");
    for (size_t i = 0; i < ids.size(); ++i) fuzz::require(ids[i] >= (i == 0 ? 0 : ids[i - 1] + 1));
  } catch (const InputError&) {
  }
  return 0;
}
