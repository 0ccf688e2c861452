// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/cispo.h"

#include <ATen/ATen.h>

namespace espalier {

PolicyGradient::Surrogate Cispo::surrogate(const PolicyTerms& terms) const {
  const at::Tensor ratio = terms.log_ratio.detach().exp();
  const at::Tensor weight = ratio.clamp(1 - options().clip_low, 1 + options().clip_high);
  return {.value = terms.coefficient * weight * terms.advantage * terms.logprobs,
          .ratio = ratio,
          .is_clipped = weight.ne(ratio)};
}

at::Tensor Cispo::plain_surrogate(const at::Tensor& logprobs, const at::Tensor& log_ratio,
                                  const TermTensors& terms) const {
  const at::Tensor ratio = at::exp(log_ratio.detach());
  const at::Tensor at_most = at::minimum(ratio, at::full_like(ratio, 1 + options().clip_high));
  const at::Tensor weight = at::maximum(at_most, at::full_like(ratio, 1 - options().clip_low));
  return weight * terms.columns[0] * logprobs;
}

}  // namespace espalier
