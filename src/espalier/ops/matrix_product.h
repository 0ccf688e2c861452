// Products of matrices, in the arithmetic that suits their dtype and the machine.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier::detail {

// bfloat16 on CUDA: cuBLAS sums products in float32, and these sums are results of wide_product and are added
// by add_product as they are, in place; affine rounds them once. (Only where a result is bfloat16 may cuBLAS
// join the parts of a sum in bfloat16: at::Context::setAllowBF16ReductionCuBLAS.)

/// The dtype in which matrices like this one are multiplied: float32 for bfloat16 on a CPU without AMX, whose
/// instructions for bfloat16, where it has any, do half of the float32 rate (docs/architecture.md); otherwise
/// their own.
at::ScalarType product_dtype(const at::Tensor& matrix);

/// The same by dtype, for matrices on the CPU.
at::ScalarType cpu_product_dtype(at::ScalarType dtype);

/// a b [M, N] of a [M, K] and b [K, N], each float64, float32 or bfloat16 or in its product_dtype already; in
/// the dtype of sums (accumulator_dtype).
at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b);

/// x weight^T + bias [M, N] of x [M, K], weight [N, K] and, where it is defined, bias [N]; in the dtype of x,
/// which is theirs or their product_dtype.
at::Tensor affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// sum += a b for a sum [M, N] in the dtype of sums. a and b may each be in their product_dtype already.
void add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

}  // namespace espalier::detail
