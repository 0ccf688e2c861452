// SPDX-License-Identifier: Apache-2.0
#include <cudaTypedefs.h>

#include "espalier/ops/kernels/cuda/attention/simt_hopper.h"
#include "espalier/ops/kernels/cuda/launch.cuh"

namespace espalier::simt {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

/// Looked up in the loaded driver, which is not linked, so that programs start without one.
Encode encode_function() {
  constexpr unsigned kSinceCuda = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  cuda::check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSinceCuda,
                                               cudaEnableDefault, &result),
              "cuTensorMapEncodeTiled");
  if (result != cudaDriverEntryPointSuccess || found == nullptr)
    throw std::runtime_error("cuTensorMapEncodeTiled: the driver has none");
  return reinterpret_cast<Encode>(found);
}

}  // namespace

TensorMap make_map(const MappedTensor& t) {
  static const Encode encode = encode_function();
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(t.columns), static_cast<cuuint64_t>(t.heads),
                               static_cast<cuuint64_t>(t.tokens)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(2 * t.head_stride),
                                 static_cast<cuuint64_t>(2 * t.token_stride)};
  const cuuint32_t box[3] = {kSlabColumns, static_cast<cuuint32_t>(t.box_heads),
                             static_cast<cuuint32_t>(t.box_tokens)};
  const cuuint32_t steps[3] = {1, 1, 1};
  TensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(t.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  return map;
}

}  // namespace espalier::simt
