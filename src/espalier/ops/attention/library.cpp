// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/library.h"

#include "espalier/ops/operator.h"

namespace espalier::library {
namespace {

using detail::TensorVector;

bool has_kernel(const char* op, c10::DispatchKey key) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").hasKernelForDispatchKey(key);
}

}  // namespace

std::string name() {
  constexpr const char* kName = "espalier::tree_attention_library_name";
  if (!has_kernel(kName, c10::DispatchKey::CompositeExplicitAutograd)) return "";
  return c10::Dispatcher::singleton().findSchemaOrThrow(kName, "").typed<std::string()>().call();
}

bool is_registered(c10::DeviceType kind) {
  return has_kernel("espalier::tree_attention_library",
                    kind == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
}

std::optional<detail::TreeAttentionResults> tree_attention(const detail::TreeAttentionArguments& arguments) {
  const auto results = detail::call<"tree_attention_library", TensorVector>(arguments);
  if (results.empty()) return std::nullopt;
  TORCH_CHECK(results.size() == 2, "tree_attention_library: expected out and lse, or nothing, received ",
              results.size(), " tensors");
  return detail::TreeAttentionResults(results[0], results[1]);
}

std::optional<detail::TreeAttentionGradients> tree_attention_backward(
    const detail::TreeAttentionBackward& backward) {
  const auto gradients = detail::call<"tree_attention_library_backward", TensorVector>(backward);
  if (gradients.empty()) return std::nullopt;
  const size_t segments = backward.given.context.k.size();
  TORCH_CHECK(gradients.size() == 3 + 2 * segments, "tree_attention_library_backward: expected ",
              3 + 2 * segments, " gradients, or nothing, received ", gradients.size());
  const auto context = gradients.begin() + 3, values = context + static_cast<std::ptrdiff_t>(segments);
  return detail::TreeAttentionGradients(gradients[0], gradients[1], gradients[2],
                                        TensorVector(context, values), TensorVector(values, gradients.end()));
}

}  // namespace espalier::library
