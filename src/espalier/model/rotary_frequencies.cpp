// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/rotary_frequencies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace espalier {
namespace {

at::Tensor scaled(const at::Tensor& powers, const LinearRope& rope) {
  return powers.reciprocal() / rope.factor;
}

at::Tensor scaled(const at::Tensor& powers, const Llama3Rope& rope) {
  const at::Tensor plain = powers.reciprocal();
  const auto old_length = static_cast<double>(rope.original_max_position_embeddings);
  const at::Tensor wavelength = plain.reciprocal() * (2 * std::numbers::pi);
  const at::Tensor is_long = wavelength > old_length / rope.low_freq_factor;
  const at::Tensor is_short = wavelength < old_length / rope.high_freq_factor;
  const at::Tensor smooth = (wavelength.reciprocal() * old_length - rope.low_freq_factor) /
                            (rope.high_freq_factor - rope.low_freq_factor);
  const at::Tensor between = (1 - smooth) * plain / rope.factor + smooth * plain;
  return at::where(is_long, plain / rope.factor, at::where(is_short, plain, between));
}

// The interpolation ramp of YaRN, section 3.2: 0 below the pair with beta_fast rotations in the original
// context, 1 above the pair with beta_slow, linear in between.
at::Tensor interpolation_ramp(const YarnRope& rope, double rope_theta, int64_t rotary_dim) {
  const auto dim = static_cast<double>(rotary_dim);
  const auto pair_of_turns = [&](double turns) {
    const auto old_length = static_cast<double>(rope.original_max_position_embeddings);
    return dim * std::log(old_length / (turns * 2 * std::numbers::pi)) / (2 * std::log(rope_theta));
  };
  double low = pair_of_turns(rope.beta_fast), high = pair_of_turns(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  const at::Tensor pair = at::arange(rotary_dim / 2, at::TensorOptions().dtype(at::kFloat));
  return ((pair - low) / (high - low)).clamp(0, 1);
}

}  // namespace

RotaryFrequencies::RotaryFrequencies(const Rope& rope, int64_t rotary_dim) {
  const at::Tensor exponents =
      at::arange(0, rotary_dim, 2, at::TensorOptions().dtype(at::kFloat)) / rotary_dim;
  const at::Tensor powers = at::pow(at::Scalar(rope.rope_theta), exponents);
  if (const auto* linear = std::get_if<LinearRope>(&rope.scaling)) {
    inverse = scaled(powers, *linear);
  } else if (const auto* llama3 = std::get_if<Llama3Rope>(&rope.scaling)) {
    inverse = scaled(powers, *llama3);
  } else if (const auto* yarn = std::get_if<YarnRope>(&rope.scaling)) {
    const at::Tensor kept = 1 - interpolation_ramp(*yarn, rope.rope_theta, rotary_dim);
    inverse = (powers * yarn->factor).reciprocal() * (1 - kept) + powers.reciprocal() * kept;
    attention_factor = yarn->attention_factor;
  } else {
    inverse = powers.reciprocal();
  }
}

}  // namespace espalier
