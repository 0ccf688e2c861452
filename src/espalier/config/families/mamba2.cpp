// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "espalier/config/families/family.h"
#include "espalier/config/families/ssm_keys.h"

namespace espalier {
namespace {

constexpr SsmKeys kMamba2Sizes{.num_heads = {"num_heads", 128},
                               .head_dim = {"head_dim", 64},
                               .state_size = {"state_size", 128},
                               .n_groups = {"n_groups", 8},
                               .conv_kernel = {"conv_kernel", 4},
                               .expand = {"expand", 2},
                               .use_bias = "use_bias",
                               .use_conv_bias = "use_conv_bias"};

void read_mamba2(const ConfigReader& config, const CommonParts&, DecoderConfig* result) {
  const SsmSpec ssm = read_ssm_keys(config, kMamba2Sizes, result->hidden_size);
  result->layers.assign(result->layers.size(), {.mixer = ssm, .mlp = NoMlp(), .input_norm_name = "norm"});
  result->rms_norm_eps = config.positive_number("layer_norm_epsilon", 1e-5);
  result->residual_in_fp32 = config.boolean("residual_in_fp32", true);
  const int64_t inner = ssm.inner_size();
  if (config.positive_integer("intermediate_size", kMostIntermediate, inner) != inner) {
    config.refuse("intermediate_size", fmt::format("{}, expand times hidden_size", inner));
  }
  if (!config.boolean("rms_norm", true)) config.refuse("rms_norm", "true");
  read_ssm_init(config, /*rescale_prenorm_residual=*/false, &result->ssm_init.emplace());
  result->parameter_prefix = "backbone.";
  result->embedding_name = "embeddings";
  result->final_norm_name = "norm_f";
}

}  // namespace

constexpr ModelFamily kMamba2Family{
    .model_type = "mamba2",
    .max_position_embeddings = 0,
    .initializer_range = 0.1,
    .attention = false,
    .padding_row = false,
    // Transformers ignores norm_before_gate (the gate always comes before the norm, although released files
    // say true), time_step_rank, time_step_scale and time_step_init_scheme. chunk_size does not affect
    // results.
    .keys =
        "chunk_size conv_kernel expand head_dim intermediate_size layer_norm_epsilon n_groups "
        "norm_before_gate num_heads rescale_prenorm_residual residual_in_fp32 rms_norm state_size "
        "time_step_floor time_step_init_scheme time_step_limit time_step_max time_step_min time_step_rank "
        "time_step_scale use_bias use_conv_bias",
    .bias_keys = "mixer.conv1d.=use_conv_bias mixer.=use_bias",
    .read = read_mamba2,
};

}  // namespace espalier
