// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/reinforce.h"

#include <ATen/ATen.h>

namespace espalier {

PolicyGradient::Surrogate Reinforce::surrogate(const PolicyTerms& terms) const {
  return {.value = terms.coefficient * terms.advantage * terms.logprobs,
          .ratio = terms.log_ratio.detach().exp(),
          .is_clipped = {}};
}

at::Tensor Reinforce::plain_surrogate(const at::Tensor& logprobs, const at::Tensor&,
                                      const TermTensors& terms) const {
  return logprobs * terms.columns[0];
}

}  // namespace espalier
