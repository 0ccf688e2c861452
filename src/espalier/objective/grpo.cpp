// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/grpo.h"

#include <ATen/ATen.h>

namespace espalier {

PolicyGradient::Surrogate Grpo::surrogate(const PolicyTerms& terms) const {
  const at::Tensor ratio = terms.log_ratio.exp();
  const at::Tensor plain = ratio * terms.advantage;
  const at::Tensor clipped = ratio.clamp(1 - options().clip_low, 1 + options().clip_high) * terms.advantage;
  Surrogate surrogate{.value = at::minimum(plain, clipped),
                      .ratio = ratio.detach(),
                      .is_clipped = clipped.detach().lt(plain.detach())};
  if (options().dual_clip == 0) return surrogate;
  const at::Tensor bound = options().dual_clip * terms.advantage;
  const at::Tensor is_beyond = terms.advantage.lt(0).logical_and(surrogate.value.detach().lt(bound));
  surrogate.value = at::where(is_beyond, bound, surrogate.value);
  surrogate.is_clipped = surrogate.is_clipped.logical_or(is_beyond);
  return surrogate;
}

at::Tensor Grpo::plain_surrogate(const at::Tensor&, const at::Tensor& log_ratio,
                                 const TermTensors& terms) const {
  const at::Tensor advantage = terms.columns[0], ratio = at::exp(log_ratio);
  const at::Tensor bounded = at::clamp(ratio, 1 - options().clip_low, 1 + options().clip_high);
  at::Tensor lower = at::minimum(ratio * advantage, bounded * advantage);
  if (options().dual_clip > 0) {
    lower = at::where(advantage < 0, at::maximum(lower, options().dual_clip * advantage), lower);
  }
  return lower;
}

}  // namespace espalier
