// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/library.h"

#include <algorithm>

#include "espalier/ops/attention/one_width.h"
#include "espalier/ops/kernel_choice.h"
#include "espalier/ops/operator.h"

namespace espalier::library {

using detail::TensorVector;

std::string name(int64_t device) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("espalier::tree_attention_library_name", "");
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) return "";
  return op.typed<std::string(int64_t)>().call(device);
}

bool is_chosen(const c10::Device& device) {
  const CudaKernels kernels = cuda_kernels();
  const bool is_first =
      kernels.named_attention
          ? kernels.named_attention == AttentionKind::kLibrary
          : device.is_cuda() && std::ranges::count(kernels.attention, AttentionKind::kLibrary);
  return is_first && !name(device.is_cuda() ? device.index() : -1).empty();
}

std::optional<detail::TreeAttentionResults> tree_attention(const detail::TreeAttentionArguments& arguments) {
  const auto results = detail::call<"tree_attention_library", TensorVector>(detail::in_one_width(arguments));
  if (results.empty()) return std::nullopt;
  TORCH_CHECK(results.size() == 2, "tree_attention_library: expected out and lse, or nothing, received ",
              results.size(), " tensors");
  return detail::narrowed(arguments, {results[0], results[1]});
}

std::optional<detail::TreeAttentionGradients> tree_attention_backward(
    const detail::TreeAttentionBackward& backward) {
  const auto gradients =
      detail::call<"tree_attention_library_backward", TensorVector>(detail::in_one_width(backward));
  if (gradients.empty()) return std::nullopt;
  const size_t segments = backward.given.context.k.size();
  TORCH_CHECK(gradients.size() == 3 + 2 * segments, "tree_attention_library_backward: expected ",
              3 + 2 * segments, " gradients, or nothing, received ", gradients.size());
  const auto context = gradients.begin() + 3, values = context + static_cast<std::ptrdiff_t>(segments);
  return detail::narrowed(backward.given,
                          {gradients[0], gradients[1], gradients[2], TensorVector(context, values),
                           TensorVector(values, gradients.end())});
}

}  // namespace espalier::library
