// SPDX-License-Identifier: Apache-2.0
// Small random decoders and random trajectories for the tests of training.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <numeric>
#include <span>
#include <vector>

#include "espalier/base/rng.h"
#include "espalier/data/builder.h"
#include "espalier/model/decoder.h"

namespace espalier::testing {

/// llama: tied embeddings, llama3 rope. qwen2: biases on q, k, v, untied, a sliding window in the second
/// layer. qwen3: norms of q and k, its own head_dim. mistral: a window in both layers, linear rope. olmo3:
/// norms after attention and MLP, a window in the first layer, yarn rope in the second. qwen3_5: three
/// layers, of which the first and the last are Gated DeltaNet; gates, norms around 1, heads that are rotated
/// in part. exaone4: norms after attention and MLP, norms of q and k, a window in the first layer, no
/// positions in the second. phi3: q, k and v in one matrix, gate and up in another, part of each head
/// rotated. gemma3_text: norms around 1 before and after attention and MLP, a window in the first layer, two
/// ropes, gelu, a factor of the embedding. ernie4_5: neighbours rotated together, biases everywhere.
/// qwen3_moe: experts in both layers. glm4_moe: a dense layer, then groups of experts with shared ones and
/// corrected scores; part of each head rotated. qwen3_next: the layers of qwen3_5, projections in two
/// matrices, experts and a gated shared one. mamba2: Mamba-2 layers alone, in two groups of heads, steps in a
/// range. granitemoehybrid: such layers around one of attention, experts with a shared MLP in all three,
/// factors of embedding, scores, branches and logits. gpt_oss: a window in the first of two layers, sinks,
/// yarn rope, biases, and clamped experts, whose limit many values reach.
enum class Family {
  kLlama,
  kQwen2,
  kQwen3,
  kMistral,
  kOlmo3,
  kQwen3_5,
  kMamba2,
  kExaone4,
  kPhi3,
  kGemma3,
  kErnie45,
  kQwen3Moe,
  kGlm4Moe,
  kQwen3Next,
  kGraniteMoeHybrid,
  kGptOss
};
inline constexpr Family kFamilies[] = {
    Family::kLlama,   Family::kQwen2,    Family::kQwen3,   Family::kMistral,   Family::kOlmo3,
    Family::kQwen3_5, Family::kMamba2,   Family::kExaone4, Family::kPhi3,      Family::kGemma3,
    Family::kErnie45, Family::kQwen3Moe, Family::kGlm4Moe, Family::kQwen3Next, Family::kGraniteMoeHybrid,
    Family::kGptOss};
/// Those whose tokens all pass the same weights.
inline constexpr std::span<const Family> kDenseFamilies(kFamilies, 11);
const char* to_string(Family family);
/// Gated DeltaNet layers among others; recurrent layers of any kind, with gated norms; mixtures of experts.
bool has_delta_layers(Family family);
bool has_recurrent_layers(Family family);
bool has_experts(Family family);

/// Two layers (three of qwen3_5, qwen3_next and granitemoehybrid), hidden size 16, grouped heads; context of
/// 64 positions. `wide`: hidden size and heads of 64 (recurrent heads 32 of 32), so that no parameter has
/// fewer values (tests/error_ratio.h).
nlohmann::json tiny_config_json(Family family, int64_t vocab_size, bool wide = false);
DecoderConfig tiny_config(Family family, int64_t vocab_size);

/// Weights drawn wide enough that attention is far from uniform; norms near 1, biases not 0.
Decoder tiny_decoder(const DecoderConfig& config, uint64_t seed, at::ScalarType dtype = at::kDouble);

/// An adapter of these maps whose B is not zero, so that it changes every logit.
Adapter random_adapter(const std::vector<LinearMap>& maps, const LoraOptions& options, uint64_t seed,
                       at::ScalarType dtype = at::kDouble);

/// Writes tiny_decoder(tiny_config(...)) as a model folder, which must not exist, saved in `dtype`.
void write_tiny_model(const std::filesystem::path& folder, Family family, int64_t vocab_size, uint64_t seed,
                      at::ScalarType dtype, bool wide = false);

/// The same weights in float64 or another dtype, without an adapter.
Decoder cast_decoder(const Decoder& decoder, at::ScalarType dtype);

enum class Shape { kChain, kStar, kSingleTokens, kDeep, kWide, kMixed };
inline constexpr int kNumShapes = 6;

struct RandomRows {
  int64_t vocab_size = 19;
  int64_t max_rows = 10;
  int64_t max_length = 40;
  bool for_grpo = false;  // advantages or rewards and those of a reference in every row, log-probs in some
  int64_t draws = 1;      // of so many rows at most each
};

/// Trajectories of a random shape, some ending inside the tree, some twice, some without loss, some with
/// fractional weights. The first has five tokens or more, not all equal, all with loss and (grpo) an
/// unclipped advantage: without it, forests would turn up whose attention has no gradient but rounding, of
/// which no relative error can be small.
Trajectories random_trajectories(Rng& rng, Shape shape, const RandomRows& options);

/// Trajectories of plain rows with loss on every token.
Trajectories from_rows(const std::vector<std::vector<int32_t>>& rows);

/// 0, 1, ..., n - 1.
inline std::vector<int64_t> all_rows(const Trajectories& trajectories) {
  std::vector<int64_t> rows(trajectories.num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

}  // namespace espalier::testing
