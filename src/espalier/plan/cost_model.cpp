// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/cost_model.h"

namespace espalier {

Work& Work::operator+=(const Work& other) {
  tokens += other.tokens;
  pairs += other.pairs;
  logit_rows += other.logit_rows;
  return *this;
}

int64_t linear_parameters_per_layer(const ModelShape& shape) {
  const int64_t query = shape.hidden_size * shape.num_attention_heads * shape.head_dim;
  const int64_t key_and_value = 2 * shape.hidden_size * shape.num_key_value_heads * shape.head_dim;
  return query + key_and_value + linear_parameters_after_attention(shape);
}

int64_t linear_parameters_after_attention(const ModelShape& shape) {
  const int64_t output = shape.hidden_size * shape.num_attention_heads * shape.head_dim;
  const int64_t gated_mlp = 3 * shape.hidden_size * shape.intermediate_size;
  return output + gated_mlp;
}

double layer_tokens(const ModelShape& shape, const Work& work) {
  const auto layer = static_cast<double>(linear_parameters_per_layer(shape));
  const double left_out = static_cast<double>(linear_parameters_after_attention(shape)) / layer;
  return static_cast<double>(shape.num_hidden_layers) * static_cast<double>(work.tokens) -
         left_out * static_cast<double>(work.tokens - work.logit_rows);
}

namespace {

struct FlopFactors {
  double linear;     // per weight and token
  double attention;  // per element of a head and visible pair
  double head;       // per weight and row
};

FlopCount flops_of(const ModelShape& shape, const Work& work, const FlopFactors& factors) {
  const auto layers = static_cast<double>(shape.num_hidden_layers);
  const auto heads = layers * static_cast<double>(shape.num_attention_heads);
  FlopCount flops;
  flops.linear =
      factors.linear * static_cast<double>(linear_parameters_per_layer(shape)) * layer_tokens(shape, work);
  flops.attention =
      factors.attention * heads * static_cast<double>(shape.head_dim) * static_cast<double>(work.pairs);
  flops.head = factors.head * static_cast<double>(shape.hidden_size) * static_cast<double>(shape.vocab_size) *
               static_cast<double>(work.logit_rows);
  return flops;
}

constexpr FlopFactors kForward{.linear = 2, .attention = 4, .head = 2};
constexpr FlopFactors kBackward{.linear = 4, .attention = 10, .head = 6};

}  // namespace

FlopCount forward_flops(const ModelShape& shape, const Work& work) {
  return flops_of(shape, work, kForward);
}

FlopCount backward_flops(const ModelShape& shape, const Work& work) {
  return flops_of(shape, work, kBackward);
}

FlopCount step_flops(const ModelShape& shape, const Work& work) {
  return flops_of(shape, work,
                  {.linear = kForward.linear + kBackward.linear,
                   .attention = kForward.attention + kBackward.attention,
                   .head = kForward.head + kBackward.head});
}

}  // namespace espalier
