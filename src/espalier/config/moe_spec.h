// SPDX-License-Identifier: Apache-2.0
// The mixture of experts of a decoder layer, as data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace espalier {

/// Names of an MLP's linear maps in a checkpoint. An MLP is down(activation(gate(x)) * up(x)), or without a
/// gate down(relu(up(x))^2).
struct MlpNames {
  std::string gate = "gate_proj";  // "": none
  std::string up = "up_proj";      // "": gate and up are one matrix, `gate`, whose first half of rows is gate
  std::string down = "down_proj";

  bool fused() const { return up.empty(); }
  bool gated() const { return !gate.empty(); }

  bool operator==(const MlpNames&) const = default;
};

/// How a router computes scores from its logits. It chooses and weights experts by the scores; with
/// kSoftmaxOverChosen it chooses by the logits, and the weights are the softmax over the chosen ones.
enum class RouterScores { kSoftmax, kSigmoid, kSoftmaxOverChosen };

/// The activation of gpt_oss's experts: (up + 1) gate sigmoid(swiglu_alpha gate), with gate at most
/// swiglu_limit and up from -swiglu_limit to swiglu_limit.
struct ClampedSwiglu {
  double swiglu_alpha = 1.702;
  double swiglu_limit = 7;

  bool operator==(const ClampedSwiglu&) const = default;
};

/// A mixture of experts, each an MLP with activation silu if it is gated. Each token passes the
/// num_experts_per_tok experts that its router scores choose; their outputs are summed, weighted by these
/// scores. Names as in config.json.
struct MoeSpec {
  int64_t num_experts = 0;
  int64_t num_experts_per_tok = 0;
  int64_t moe_intermediate_size = 0;
  RouterScores scores = RouterScores::kSoftmax;
  bool norm_topk_prob = false;  // the scores of the chosen experts are divided by their sum
  double routed_scaling_factor = 1;
  bool correction_bias =
      false;            // the router's e_score_correction_bias is added to scores where experts are chosen
  int64_t n_group = 1;  // of experts; the best topk_group of them are chosen from
  int64_t topk_group = 1;
  int64_t shared_intermediate_size = 0;  // of the shared MLP, which every token passes; 0: none
  // The output of the shared MLP is multiplied by sigmoid(mlp.shared_expert_gate(x)).
  bool shared_expert_gate = false;

  // gpt_oss: the activation of the experts. The experts of a layer are then the tensors gate_up_proj
  // [E, hidden_size, 2 I], with gate and up interleaved, down_proj [E, I, hidden_size], and biases; and the
  // router has a bias.
  std::optional<ClampedSwiglu> clamped_swiglu = {};

  // Of an expert and of the shared MLP. If they are fused, files have one tensor of all experts for each of
  // the two (granitemoehybrid).
  MlpNames names = {};

  // Names of modules in a checkpoint.
  std::string router_name = "mlp.gate", experts_name = "mlp.experts", shared_name = "mlp.shared_experts";

  bool operator==(const MoeSpec&) const = default;
};

}  // namespace espalier
