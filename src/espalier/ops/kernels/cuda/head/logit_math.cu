// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/head/logit_math.cuh"

#include "espalier/ops/kernels/cuda/launch.cuh"

namespace espalier::cuda {
namespace {

__global__ void __launch_bounds__(kLogitThreads) add_exps_entry(AddExpsWork work) {
  add_exps_kernel(work);
}

__global__ void __launch_bounds__(kLogitThreads) differentiate_entry(DifferentiateWork work) {
  differentiate_kernel<BFloat16>(work);
}

Launch over_rows(const LogitBlockRows& block, void* stream) {
  return {static_cast<unsigned>(block.num_rows), kLogitThreads, kLogitSharedBytes, stream};
}

}  // namespace

void add_exps(const LogitBlockRows& block, const RowSums& rows, bool is_first, bool is_last, void* stream) {
  launch("add_exps", &add_exps_entry, over_rows(block, stream), AddExpsWork{block, rows, is_first, is_last});
}

void differentiate_to_bfloat16(const LogitBlockRows& block, const LogitGradients& given, void* stream) {
  launch("differentiate", &differentiate_entry, over_rows(block, stream), DifferentiateWork{block, given});
}

}  // namespace espalier::cuda
