#include "espalier/plan/cost_model.h"

namespace espalier {

Work& Work::operator+=(const Work& other) {
  tokens += other.tokens;
  pairs += other.pairs;
  head_rows += other.head_rows;
  return *this;
}

int64_t linear_parameters_per_layer(const ModelShape& shape) {
  const int64_t query_and_output = 2 * shape.hidden_size * shape.num_attention_heads * shape.head_dim;
  const int64_t key_and_value = 2 * shape.hidden_size * shape.num_key_value_heads * shape.head_dim;
  const int64_t gated_mlp = 3 * shape.hidden_size * shape.intermediate_size;
  return query_and_output + key_and_value + gated_mlp;
}

FlopCount step_flops(const ModelShape& shape, const Work& work) {
  constexpr double kLinearForward = 2, kLinearBackward = 4;
  constexpr double kAttentionForward = 4, kAttentionBackward = 10;
  constexpr double kHead = 8;
  const auto layers = static_cast<double>(shape.num_hidden_layers);
  const auto weights = layers * static_cast<double>(linear_parameters_per_layer(shape));
  const auto heads = layers * static_cast<double>(shape.num_attention_heads);
  FlopCount flops;
  flops.linear = (kLinearForward + kLinearBackward) * weights * static_cast<double>(work.tokens);
  flops.attention = (kAttentionForward + kAttentionBackward) * heads * static_cast<double>(shape.head_dim) *
                    static_cast<double>(work.pairs);
  flops.head = kHead * static_cast<double>(shape.hidden_size) * static_cast<double>(shape.vocab_size) *
               static_cast<double>(work.head_rows);
  return flops;
}

}  // namespace espalier
