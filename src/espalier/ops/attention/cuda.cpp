// SPDX-License-Identifier: Apache-2.0
// tree_attention on CUDA: which implementation runs. To register for CUDA takes no CUDA.
#include "espalier/ops/attention/cuda.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "espalier/ops/attention/fused.h"
#include "espalier/ops/attention/library.h"
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

bool serves(AttentionKind kind, const AttentionInputKind& inputs) {
  const auto [dtype, head_dim, window, sinks, device, softcap] = inputs;
  if (kind == AttentionKind::kLibrary) {
    return !softcap && (dtype == at::kBFloat16 || dtype == at::kHalf) && !library::name(device).empty();
  }
  return kind == AttentionKind::kMasked || (!window && !sinks && !softcap && fused::serves(dtype, head_dim));
}

}  // namespace

AttentionKind attention_kind(const AttentionInputKind& inputs, std::optional<AttentionKind> without) {
  const CudaKernels kernels = cuda_kernels();
  if (const auto named = kernels.named_attention) {
    TORCH_CHECK(named != without && serves(*named, inputs), kAttentionVariable, ": ", to_string(*named),
                " attention does not serve ", inputs.dtype, " with a head dimension of ", inputs.head_dim,
                inputs.sliding_window ? ", a sliding window" : "", inputs.sinks ? ", sinks" : "",
                inputs.softcap ? ", a softcap" : "", without ? ", and this forest" : "",
                " in this build; unset the variable to choose one");
    return *named;
  }
  const auto first = std::ranges::find_if(
      kernels.attention, [&](AttentionKind kind) { return kind != without && serves(kind, inputs); });
  return first == kernels.attention.end() ? AttentionKind::kMasked : *first;
}

namespace {

using detail::TreeAttentionGradients;
using detail::TreeAttentionResults;

AttentionInputKind kind_of(const detail::TreeAttentionArguments& arguments) {
  const auto& [q, k, v, tokens, options, context] = arguments;
  return {q.scalar_type(),
          std::max(k.size(2), v.size(2)),
          options.sliding_window > 0,
          options.sinks.defined(),
          q.device().index(),
          options.softcap > 0};
}

TreeAttentionResults forward_cuda(const detail::TreeAttentionArguments& arguments) {
  detail::check_tree_attention(arguments);
  const c10::DeviceGuard guard(arguments.q.device());
  const AttentionInputKind inputs = kind_of(arguments);
  AttentionKind kind = attention_kind(inputs);
  if (kind == AttentionKind::kLibrary) {
    if (auto results = library::tree_attention(arguments)) return *results;
    kind = attention_kind(inputs, AttentionKind::kLibrary);
  }
  return kind == AttentionKind::kAmpere ? fused::tree_attention(fused::cuda_kernels(), arguments)
                                        : masked_chunks::tree_attention(arguments);
}

TreeAttentionGradients backward_cuda(const detail::TreeAttentionBackward& given) {
  const auto& [grad_out, out, lse, arguments] = given;
  detail::check_tree_attention(arguments);
  const c10::DeviceGuard guard(arguments.q.device());
  const AttentionInputKind inputs = kind_of(arguments);
  AttentionKind kind = attention_kind(inputs);
  if (kind == AttentionKind::kLibrary) {
    if (auto gradients = library::tree_attention_backward(given)) return *gradients;
    kind = attention_kind(inputs, AttentionKind::kLibrary);
  }
  return kind == AttentionKind::kAmpere
             ? fused::tree_attention_backward(fused::cuda_kernels(), arguments, grad_out, out, lse)
             : masked_chunks::tree_attention_backward(arguments, grad_out, lse);
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CUDA, m) {
  detail::implement<&forward_cuda, &backward_cuda>(m, "tree_attention");
}

}  // namespace espalier
