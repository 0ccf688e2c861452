// SPDX-License-Identifier: Apache-2.0
// ssm_scan as a composition of ATen's operators, on any device: what runs where there are no kernels of ours.
#pragma once

#include "espalier/ops/ssm_scan/checks.h"

namespace espalier::composed {

detail::SsmResults ssm_scan(const detail::SsmArguments& given);
detail::SsmGradients ssm_scan_backward(const std::optional<at::Tensor>& grad_out,
                                       const std::optional<at::Tensor>& grad_ends,
                                       const detail::SsmArguments& given);

}  // namespace espalier::composed
