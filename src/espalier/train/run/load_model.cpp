// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/load_model.h"

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/printable.h"
#include "espalier/model/init.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/model/weights/weights.h"
#include "espalier/ops/checks.h"

namespace espalier {
namespace {

Adapter make_new(const TrainOptions& options, const DecoderConfig& config) {
  const ModelSpec& spec = config;
  const std::vector<LinearMap> maps = adapted_maps(spec, options.lora->targets);
  Adapter adapter = init_adapter(maps, *options.lora, options.seed, detail::accumulator_dtype(options.dtype),
                                 options.device);
  const std::string base = std::filesystem::absolute(options.model).lexically_normal().string();
  ESPALIER_CHECK(is_utf8(base),
                 "model: expected a path in UTF-8, which adapter_config.json can keep, received {}", base);
  adapter.config = adapter_config(*options.lora, target_names(spec, maps), base);
  return adapter;
}

}  // namespace

Decoder load_model(const TrainOptions& options) {
  Decoder decoder = load_decoder(options.model, options.dtype, options.device);
  if (options.freeze_pad_embedding) decoder.freeze_pad_embedding();
  if (!options.trains_adapter()) return decoder;
  decoder = with_adapter(decoder, options);
  check_no_dropout(decoder.adapter(), options.adapter);
  return decoder;
}

Decoder with_adapter(const Decoder& decoder, const TrainOptions& options) {
  Adapter adapter =
      options.lora ? make_new(options, decoder.config()) : load_adapter(options.adapter, decoder).adapter;
  return Decoder(decoder.config(), decoder.weights(), decoder.buffers(), std::move(adapter));
}

}  // namespace espalier
