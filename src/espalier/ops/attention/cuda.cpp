// SPDX-License-Identifier: Apache-2.0
// tree_attention on CUDA: which implementation runs. To register for CUDA takes no CUDA.
#include "espalier/ops/attention/cuda.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "espalier/ops/attention/fused.h"
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/attention/proven.h"
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

struct NamedKind {
  std::string_view name;
  AttentionKind kind;
  bool unproven = true;  // taken where nothing has been proven
};

// The fastest first. A mistake in the barriers of Hopper's kernels would hang a GPU, so they are not taken
// before they have proven themselves on it, unless they are named.
constexpr NamedKind kKinds[] = {{"hopper", AttentionKind::kHopper, false},
                                {"ampere", AttentionKind::kAmpere},
                                {"varlen", AttentionKind::kVarlen},
                                {"masked", AttentionKind::kMasked}};

std::optional<std::vector<AttentionKind>>& proven_kinds() {
  static std::optional<std::vector<AttentionKind>> kinds;
  return kinds;
}

bool may_be_chosen(const NamedKind& named) {
  const auto& proven = proven_kinds();
  if (!proven) return named.unproven;
  return named.kind == AttentionKind::kMasked || std::ranges::find(*proven, named.kind) != proven->end();
}

}  // namespace

std::optional<std::vector<AttentionKind>> set_proven_attention(
    std::optional<std::vector<AttentionKind>> kinds) {
  return std::exchange(proven_kinds(), std::move(kinds));
}

std::optional<AttentionKind> attention_kind_named(std::string_view name) {
  const auto named = std::ranges::find(kKinds, name, &NamedKind::name);
  return named == std::end(kKinds) ? std::nullopt : std::optional(named->kind);
}

AttentionKind attention_kind(const AttentionInputKind& inputs) {
  const char* given = std::getenv("ESPALIER_ATTENTION");
  const bool any = given == nullptr || *given == '\0';
  for (const NamedKind& named : kKinds) {
    if (any ? !may_be_chosen(named) : named.name != given) continue;
    const bool suits = serves(named.kind, inputs);
    TORCH_CHECK(any || suits, "ESPALIER_ATTENTION: ", given, " attention does not serve ", inputs.dtype,
                " with a head dimension of ", inputs.head_dim,
                inputs.sliding_window ? ", a sliding window" : "", inputs.sinks ? ", sinks" : "",
                " in this build; unset the variable to choose one");
    if (suits) return named.kind;
  }
  TORCH_CHECK(false, "ESPALIER_ATTENTION: expected ampere, hopper, varlen or masked, received ", given);
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
