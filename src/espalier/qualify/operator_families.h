// SPDX-License-Identifier: Apache-2.0
// The families of operators that are checked call by call, as they run on a device.
#pragma once

#include "espalier/qualify/operator_family.h"

namespace espalier::qualify {

/// rms_norm with and without an addend, rotary and swiglu, forward and backward: rows at the borders of
/// vectors and of what teams of threads hold, no rows, inputs that are not aligned and rows that lie apart.
OperatorFamily elementwise_family();

/// edge_logprobs: in one block and in several of rows and of the vocabulary, edges that repeat, a row with
/// all edges, and logits so large that their exponentials overflow.
OperatorFamily head_family();

/// edge_distribution: temperatures, softcap, scale and bias, one by one and together.
OperatorFamily distribution_family();

/// Matrix products (ops/gemm/matrix_product.h) of a kind of device, of few and of many terms. Float32
/// products by TF32, and sums of bfloat16 products in less than float32, err by more than their floors allow.
OperatorFamily product_family(c10::DeviceType kind);

}  // namespace espalier::qualify
