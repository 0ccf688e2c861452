// SPDX-License-Identifier: Apache-2.0
// The gated delta rule as a composition of ATen's operators, on any device: what runs where there are no
// kernels of ours.
#pragma once

#include "espalier/ops/gated_delta/checks.h"

namespace espalier::composed {

detail::DeltaResults gated_delta_rule(const detail::DeltaArguments& given);
detail::DeltaGradients gated_delta_rule_backward(const std::optional<at::Tensor>& grad_out,
                                                 const std::optional<at::Tensor>& grad_ends,
                                                 const detail::DeltaArguments& given);

}  // namespace espalier::composed
