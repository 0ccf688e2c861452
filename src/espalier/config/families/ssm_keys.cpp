// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/ssm_keys.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <optional>

namespace espalier {
namespace {

/// A number, which may be infinite as Transformers 5 writes it.
std::optional<double> limit_of(const nlohmann::json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == nlohmann::json{{"__float__", "Infinity"}}) return std::numeric_limits<double>::infinity();
  return std::nullopt;
}

void read_time_step_limit(const ConfigReader& config, SsmSpec* ssm) {
  const char* key = "time_step_limit";
  const nlohmann::json* limits = config.find(key);
  if (limits == nullptr) return;
  const bool are_two = limits->is_array() && limits->size() == 2;
  const std::optional<double> least = are_two ? limit_of((*limits)[0]) : std::nullopt;
  const std::optional<double> most = are_two ? limit_of((*limits)[1]) : std::nullopt;
  constexpr double kLargest = std::numeric_limits<float>::max();  // steps may be computed in float32
  const bool fit = least && most && 0 <= *least && *least <= *most && *least <= kLargest &&
                   (*most <= kLargest || std::isinf(*most));
  if (!fit) {
    config.refuse(key,
                  "two numbers from 0 on that float32 holds, the second infinite or not below the first");
  }
  ssm->least_time_step = *least;
  ssm->most_time_step = *most;
}

}  // namespace

SsmSpec read_ssm_keys(const ConfigReader& config, const SsmKeys& keys, int64_t hidden_size) {
  const auto read = [&](const SsmKeys::Size& size, int64_t largest) {
    return config.positive_integer(size.key, largest, size.otherwise);
  };
  SsmSpec ssm;
  const bool is_free = *keys.expand.key == '\0';
  const int64_t inner = is_free ? 0 : hidden_size * read(keys.expand, kMostIntermediate / hidden_size + 1);
  ssm.num_heads = read(keys.num_heads, kMostHeads);
  const nlohmann::json* head_dim = config.find(keys.head_dim.key);
  const bool follows = head_dim == nullptr ? keys.head_dim.otherwise == 0 : *head_dim == "auto";
  ssm.head_dim = follows ? inner / ssm.num_heads : read(keys.head_dim, kMostHeadDim);
  if (!is_free && ssm.inner_size() != inner) {
    config.refuse(keys.num_heads.key,
                  fmt::format("{} and {} of product {}, {} times hidden_size", keys.num_heads.key,
                              keys.head_dim.key, inner, keys.expand.key));
  }
  ssm.state_size = read(keys.state_size, kMostHeadDim);
  ssm.n_groups = read(keys.n_groups, kMostHeads);
  if (ssm.num_heads % ssm.n_groups != 0) {
    config.refuse(keys.n_groups.key, fmt::format("a divisor of {}, {}", keys.num_heads.key, ssm.num_heads));
  }
  ssm.conv_kernel = read(keys.conv_kernel, kMostConvolution);
  ssm.use_bias = config.boolean(keys.use_bias, false);
  ssm.use_conv_bias = config.boolean(keys.use_conv_bias, true);
  read_time_step_limit(config, &ssm);
  return ssm;
}

void read_ssm_init(const ConfigReader& config, bool rescale_prenorm_residual, SsmInit* init) {
  init->time_step_min = config.positive_number("time_step_min", init->time_step_min);
  init->time_step_max = config.positive_number("time_step_max", init->time_step_max);
  init->time_step_floor = config.positive_number("time_step_floor", init->time_step_floor);
  init->rescale_prenorm_residual = config.boolean("rescale_prenorm_residual", rescale_prenorm_residual);
}

}  // namespace espalier
