// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/mixers.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <vector>

#include "espalier/ops/elementwise/elementwise.h"

namespace espalier {
namespace {

constexpr double kNormEps = 1e-6;  // whatever rms_norm_eps is

}  // namespace

LatentAttentionLayer::LatentAttentionLayer(const LatentAttentionSpec& spec, const NamedParameters& parameters)
    : spec_(spec),
      kv_a_(parameters.projection("self_attn.kv_a_proj_with_mqa")),
      kv_b_(parameters.projection("self_attn.kv_b_proj")),
      o_(parameters.projection("self_attn.o_proj")),
      q_(parameters.projection(spec.q_lora_rank > 0 ? "self_attn.q_a_proj" : "self_attn.q_proj")),
      kv_norm_(parameters.at("self_attn.kv_a_layernorm.weight")) {
  if (spec.q_lora_rank == 0) return;
  q_b_ = parameters.projection("self_attn.q_b_proj");
  q_norm_ = parameters.at("self_attn.q_a_layernorm.weight");
}

at::Tensor LatentAttentionLayer::rotated(at::Tensor heads, const PositionTables& tables) const {
  // Scores are the same whatever the order of elements, if queries and keys have the same.
  if (spec_.rope_interleave) heads = heads.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2);
  return rotary(heads.contiguous(), tables.at(0), tables.at(1));
}

LayerOutput LatentAttentionLayer::forward(int64_t index, const at::Tensor& hidden,
                                          const PositionTables& tables, const SequenceOps& sequence,
                                          const at::Tensor& rows) const {
  RECORD_USER_SCOPE("attention");
  const bool context_only = rows.defined() && rows.numel() == 0;
  std::vector<accumulating::Projection> in{kv_a_};
  if (!context_only) in.push_back(q_);
  const std::vector<at::Tensor> projected = accumulating::linears(hidden, in);
  const auto heads = [&](const at::Tensor& x) { return x.unflatten(-1, {spec_.num_attention_heads, -1}); };
  const int64_t nope = spec_.qk_nope_head_dim;

  const std::vector<at::Tensor> latent =
      projected[0].split_with_sizes({spec_.kv_lora_rank, spec_.qk_rope_head_dim}, -1);
  const at::Tensor kv =
      heads(accumulating::linear(accumulating::rms_norm(latent[0].contiguous(), kv_norm_, kNormEps), kv_b_));
  const at::Tensor shared_key = rotated(latent[1].unsqueeze(1), tables);
  const at::Tensor k =
      at::cat({kv.narrow(-1, 0, nope), shared_key.expand({-1, spec_.num_attention_heads, -1})}, -1);
  const at::Tensor v = kv.slice(-1, nope).contiguous();
  if (context_only) return {{}, {k, v}};

  const at::Tensor queries =
      heads(q_b_ ? accumulating::linear(accumulating::rms_norm(projected[1], q_norm_, kNormEps), *q_b_)
                 : projected[1]);
  const at::Tensor q = at::cat({queries.narrow(-1, 0, nope), rotated(queries.slice(-1, nope), tables)}, -1);
  at::Tensor out = sequence.attention(index, q, k, v, {.softmax_scale = spec_.softmax_scale}).flatten(1);
  if (rows.defined()) out = out.index_select(0, rows);
  return {accumulating::linear(out, o_), {k, v}};
}

}  // namespace espalier
