// SPDX-License-Identifier: Apache-2.0
// Operator families that are checked call by call on a device.
#pragma once

#include "espalier/qualify/operator_family.h"

namespace espalier::qualify {

/// edge_logprobs: in one block and in several of rows and of the vocabulary, repeated edges, a row with all
/// edges, and logits whose exponentials overflow.
OperatorFamily head_family();

/// edge_distribution: temperatures, softcap, scale and bias, individually and combined.
OperatorFamily distribution_family();

/// Matrix products (ops/gemm/matrix_product.h) of a device type, with few and many terms. TF32, and bfloat16
/// products with reduced-precision accumulation, exceed the error floors.
OperatorFamily product_family(c10::DeviceType kind);

}  // namespace espalier::qualify
