// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/init.h"

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <numbers>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/rng.h"
#include "espalier/base/safetensors.h"
#include "espalier/config/config.h"
#include "espalier/model/decoder.h"
#include "espalier/model/weights/fused_experts.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/parallel.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

/// FNV-1a, 64 bits (Fowler, Noll, Vo).
uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

/// Values 2 i and 2 i + 1 of the sequence (seed, stream), uniform in [0, 1): the halves of one Philox block,
/// so that each index can be computed independently.
std::pair<double, double> uniform_pair(uint64_t seed, uint64_t stream, uint64_t i) {
  const auto block = philox4x32({static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32),
                                 static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const auto uniform = [&](int first) {
    const uint64_t bits = block[first] | static_cast<uint64_t>(block[first + 1]) << 32;
    return static_cast<double>(bits >> 11) * 0x1.0p-53;
  };
  return {uniform(0), uniform(2)};
}

/// A distribution, sampled from pairs of uniform_pair.
struct Distribution {
  bool uniform;  // in [-scale, scale); otherwise normal, of deviation `scale`, by Box-Muller
  double scale;

  std::pair<double, double> operator()(std::pair<double, double> drawn) const {
    const auto [a, b] = drawn;
    if (uniform) return {scale * (2 * a - 1), scale * (2 * b - 1)};
    const double radius = std::sqrt(-2 * std::log(1 - a)), angle = 2 * std::numbers::pi * b;
    return {scale * (radius * std::cos(angle)), scale * (radius * std::sin(angle))};
  }
};

template <typename T>
void fill(T* values, int64_t count, const Distribution& distribution, uint64_t seed, uint64_t stream) {
  constexpr int64_t kPairsPerTask = 1 << 15;
  parallel_ranges((count + 1) / 2, kPairsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [first, second] = distribution(uniform_pair(seed, stream, static_cast<uint64_t>(i)));
      values[2 * i] = static_cast<T>(first);
      if (2 * i + 1 < count) values[2 * i + 1] = static_cast<T>(second);
    }
  });
}

/// A_log of a gated delta rule: the logarithm of a decay rate uniform in [0.01, 16).
at::Tensor init_decay_rates(const ParameterShape& parameter, uint64_t seed) {
  Rng rng(seed, hash_name(parameter.name));
  std::vector<double> values;
  for (int64_t head = 0; head < parameter.shape[0]; ++head) {
    values.push_back(std::log(0.01 + 15.99 * rng.uniform()));
  }
  return at::tensor(values, at::kDouble);
}

/// A_log of a state space: the logarithms of 1, 2, ... by head.
at::Tensor init_state_decays(const ParameterShape& parameter) {
  return at::arange(1, parameter.shape[0] + 1, at::kDouble).log();
}

/// dt_bias of a state space: inverse softplus of steps that are log-uniform
/// (Mamba2Mixer.init_mamba2_weights).
at::Tensor init_steps(const SsmInit& init, const ParameterShape& parameter, uint64_t seed) {
  Rng rng(seed, hash_name(parameter.name));
  std::vector<double> values;
  for (int64_t head = 0; head < parameter.shape[0]; ++head) {
    const double step = init.time_step_min * std::pow(init.time_step_max / init.time_step_min, rng.uniform());
    const double kept = std::max(step, init.time_step_floor);
    values.push_back(kept + std::log(-std::expm1(-kept)));
  }
  return at::tensor(values, at::kDouble);
}

/// Convolutions and output projections of mamba2 are initialised as torch.nn.Linear, in nemotron_h only the
/// latter if they are rescaled; everything else as in other families.
Distribution distribution_of(const DecoderConfig& config, const ParameterShape& parameter) {
  const std::optional<SsmInit>& ssm = config.ssm_init;
  const bool is_output = parameter.name.ends_with("mixer.out_proj.weight");
  const bool is_rescaled = is_output && ssm && ssm->rescale_prenorm_residual;
  const bool is_linear = ssm && !ssm->plain && (is_output || parameter.name.ends_with("mixer.conv1d.weight"));
  if (!is_rescaled && !is_linear) return {.uniform = false, .scale = config.initializer_range};
  double scale = 1 / std::sqrt(static_cast<double>(parameter.shape.back()));
  if (is_rescaled) scale /= std::sqrt(static_cast<double>(config.num_hidden_layers()));
  return {.uniform = true, .scale = scale};
}

/// Whether the weight of a norm is added to 1.
bool is_zero_centered(const DecoderConfig& config, const std::string& name) {
  return config.zero_centered_norm() && name.ends_with("norm.weight") &&
         !name.ends_with("linear_attn.norm.weight");
}

at::Tensor drawn(const std::vector<int64_t>& shape, at::ScalarType dtype, const Distribution& distribution,
                 uint64_t seed, uint64_t stream) {
  at::Tensor values = at::empty(shape, dtype == at::kDouble ? dtype : at::kFloat);
  if (dtype == at::kDouble) {
    fill(values.mutable_data_ptr<double>(), values.numel(), distribution, seed, stream);
  } else {
    fill(values.mutable_data_ptr<float>(), values.numel(), distribution, seed, stream);
  }
  return values.to(dtype);
}

at::Tensor init_parameter(const DecoderConfig& config, const ParameterShape& parameter, uint64_t seed,
                          at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  if (parameter.name.ends_with(".A_log")) {
    const bool is_state_space = config.ssm() != nullptr;
    return (is_state_space ? init_state_decays(parameter) : init_decay_rates(parameter, seed)).to(dtype);
  }
  if (config.ssm_init && parameter.name.ends_with(".dt_bias")) {
    return init_steps(*config.ssm_init, parameter, seed).to(dtype);
  }
  if (is_zero_centered(config, parameter.name)) return at::zeros(parameter.shape, options);
  const bool is_drawn = parameter.name.ends_with(".sinks") || parameter.name.ends_with(".router.bias");
  const bool is_bias = parameter.name.ends_with(".bias") || parameter.name.ends_with("_proj_bias");
  if (is_bias && !is_drawn) return at::zeros(parameter.shape, options);
  if (parameter.shape.size() == 1 && !is_drawn) return at::ones(parameter.shape, options);
  const uint64_t stream = hash_name(parameter.name);
  const Distribution distribution = distribution_of(config, parameter);
  return drawn(parameter.shape, dtype, distribution, seed, stream);
}

}  // namespace

int64_t init_model(const InitOptions& options) {
  const DecoderConfig config = read_config_file(options.config);
  ESPALIER_CHECK(config.vocab_size >= options.least_tokens,
                 "vocab_size: expected at least the {} tokens of the tokenizer, received {}",
                 options.least_tokens, config.vocab_size);
  const std::string config_text = config_with_dtype(options.config, dtype_name(options.dtype));
  check_new_folder(options.out);
  PartialFolder folder(options.out);
  fs::create_directory(folder.path());
  for (const auto& [name, text] : options.files) write_text(folder.path() / name, text);

  int64_t count = 0;
  std::map<std::string, at::Tensor> values;
  std::vector<std::string> names;  // of the tensors to write, in the order of the parameters
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    values.emplace(parameter.name, init_parameter(config, parameter, options.seed, options.dtype));
    count += values[parameter.name].numel();
    const std::optional<FusedPlace> place = fused_place(parameter.name);
    const bool is_fused = place && place->always;
    if (!is_fused || (place->expert == 0 && place->part == 0))
      names.push_back(is_fused ? place->name : parameter.name);
  }
  std::vector<TensorView> tensors;
  for (const std::string& name : names) {
    at::Tensor& value = values[name];
    if (!value.defined()) value = fuse_experts(name, values);
    tensors.push_back(view_tensor(name, value));
  }
  const std::vector<Parameter> buffers =
      zero_buffers(config, detail::accumulator_dtype(options.dtype), at::kCPU);
  for (const Parameter& buffer : buffers) tensors.push_back(view_tensor(buffer.name, buffer.value));
  write_safetensors(folder.path() / "model.safetensors", tensors, {{"format", "pt"}});
  write_text(folder.path() / "config.json", config_text);
  folder.commit();
  return count;
}

Decoder init_decoder(DecoderConfig config, uint64_t seed, at::ScalarType dtype, at::Device device) {
  std::vector<Parameter> parameters;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    const at::Tensor value = init_parameter(config, parameter, seed, at::kFloat);
    parameters.push_back({parameter.name, value.to(device).to(dtype).set_requires_grad(true)});
  }
  std::vector<Parameter> buffers = zero_buffers(config, detail::accumulator_dtype(dtype), device);
  return Decoder(std::move(config), std::move(parameters), std::move(buffers));
}

Adapter init_adapter(const std::vector<LinearMap>& maps, const LoraOptions& options, uint64_t seed,
                     at::ScalarType dtype, at::Device device) {
  check_lora_options(options);
  Adapter adapter{.scale = lora_scale(options), .parameters = {}};
  for (const LinearMap& map : maps) {
    const std::string name = map.name + kLoraA;
    const Distribution distribution{.uniform = true, .scale = 1 / std::sqrt(static_cast<double>(map.in))};
    const at::Tensor a = drawn({options.rank, map.in}, dtype, distribution, seed, hash_name(name));
    const at::Tensor b = at::zeros({map.out, options.rank}, dtype);
    adapter.parameters.push_back({name, a.to(device).set_requires_grad(true)});
    adapter.parameters.push_back({map.name + kLoraB, b.to(device).set_requires_grad(true)});
  }
  return adapter;
}

}  // namespace espalier
