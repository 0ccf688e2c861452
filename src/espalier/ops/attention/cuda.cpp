// SPDX-License-Identifier: Apache-2.0
// tree_attention on CUDA: which implementation runs. To register for CUDA takes no CUDA.
#include "espalier/ops/attention/cuda.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "espalier/ops/attention/fused.h"
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/attention/varlen.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

constexpr int64_t kFlashHeadDim = 256;

bool serves(AttentionKind kind, const AttentionInputKind& inputs) {
  const auto [dtype, head_dim, window, sinks] = inputs;
  if ((window && kind != AttentionKind::kMasked) ||
      (sinks && (kind == AttentionKind::kAmpere || kind == AttentionKind::kHopper))) {
    return false;
  }
  switch (kind) {
    case AttentionKind::kAmpere:
      return fused::serves(cuda::AttentionKernels::kAmpere, dtype, head_dim);
    case AttentionKind::kHopper:
      return fused::serves(cuda::AttentionKernels::kHopper, dtype, head_dim);
    case AttentionKind::kVarlen:
      return (dtype == at::kBFloat16 || dtype == at::kHalf) && head_dim <= kFlashHeadDim;
    case AttentionKind::kMasked:
      return true;
  }
  return false;
}

}  // namespace

AttentionKind attention_kind(const AttentionInputKind& inputs) {
  const CudaKernels kernels = cuda_kernels();
  if (const auto named = kernels.named_attention) {
    TORCH_CHECK(serves(*named, inputs), kAttentionVariable, ": ", to_string(*named),
                " attention does not serve ", inputs.dtype, " with a head dimension of ", inputs.head_dim,
                inputs.sliding_window ? ", a sliding window" : "", inputs.sinks ? ", sinks" : "",
                " in this build; unset the variable to choose one");
    return *named;
  }
  const auto first =
      std::ranges::find_if(kernels.attention, [&](AttentionKind kind) { return serves(kind, inputs); });
  return first == kernels.attention.end() ? AttentionKind::kMasked : *first;
}

namespace {

using detail::TreeAttentionGradients;
using detail::TreeAttentionResults;

TreeAttentionResults forward_cuda(const detail::TreeAttentionArguments& arguments) {
  detail::check_tree_attention(arguments);
  const at::Tensor& q = arguments.q;
  const c10::DeviceGuard guard(q.device());
  switch (attention_kind({q.scalar_type(), q.size(2), arguments.options.sliding_window > 0,
                          arguments.options.sinks.defined()})) {
    case AttentionKind::kAmpere:
      return fused::tree_attention(fused::cuda_kernels(cuda::AttentionKernels::kAmpere), arguments);
    case AttentionKind::kHopper:
      return fused::tree_attention(fused::cuda_kernels(cuda::AttentionKernels::kHopper), arguments);
    case AttentionKind::kVarlen:
      return varlen::tree_attention(varlen::flash_cuda(), arguments);
    case AttentionKind::kMasked:
      return masked_chunks::tree_attention(arguments);
  }
  TORCH_INTERNAL_ASSERT(false, "no such attention");
}

TreeAttentionGradients backward_cuda(const detail::TreeAttentionBackward& given) {
  const auto& [grad_out, out, lse, arguments] = given;
  detail::check_tree_attention(arguments);
  const at::Tensor& q = arguments.q;
  const c10::DeviceGuard guard(q.device());
  switch (attention_kind({q.scalar_type(), q.size(2), arguments.options.sliding_window > 0})) {
    case AttentionKind::kAmpere:
      return fused::tree_attention_backward(fused::cuda_kernels(cuda::AttentionKernels::kAmpere), arguments,
                                            grad_out, out, lse);
    case AttentionKind::kHopper:
      return fused::tree_attention_backward(fused::cuda_kernels(cuda::AttentionKernels::kHopper), arguments,
                                            grad_out, out, lse);
    case AttentionKind::kVarlen:
      return varlen::tree_attention_backward(varlen::flash_cuda(), arguments, grad_out, out, lse);
    case AttentionKind::kMasked:
      return masked_chunks::tree_attention_backward(arguments, grad_out, lse);
  }
  TORCH_INTERNAL_ASSERT(false, "no such attention");
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CUDA, m) {
  m.impl("tree_attention", detail::kKernel<&forward_cuda>);
  m.impl("tree_attention_backward", detail::kKernel<&backward_cuda>);
}

}  // namespace espalier
