// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/families.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/ops/attention/cuda.h"
#include "espalier/ops/attention/fused.h"
#include "espalier/ops/attention/library.h"
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/operator.h"
#include "espalier/qualify/attention_family.h"
#include "espalier/qualify/operator_families.h"

namespace espalier::qualify {
namespace {

using detail::TreeAttentionArguments;

AttentionFamily ampere_family() {
  return {.name = "ampere",
          .dtypes = {at::kBFloat16, at::kHalf},
          .head_dims = {64, 128, 256},
          .serves = fused::serves,
          .forward =
              [](const TreeAttentionArguments& arguments) {
                return fused::tree_attention(fused::cuda_kernels(), arguments);
              },
          .backward =
              [](const TreeAttentionArguments& arguments, const at::Tensor& grad_out, const at::Tensor& out,
                 const at::Tensor& lse) {
                return fused::tree_attention_backward(fused::cuda_kernels(), arguments, grad_out, out, lse);
              }};
}

detail::TreeAttentionGradients masked_backward(const TreeAttentionArguments& arguments,
                                               const at::Tensor& grad_out, const at::Tensor&,
                                               const at::Tensor& lse) {
  return masked_chunks::tree_attention_backward(arguments, grad_out, lse);
}

// What the library leaves to others, masked computes here too: a check sees what training would.
AttentionFamily library_family(int64_t device) {
  return {.name = "library",
          .dtypes = {at::kBFloat16, at::kHalf},
          .head_dims = {64, 96, 128, 256},
          .serves = [device](at::ScalarType, int64_t) { return !library::name(device).empty(); },
          .forward =
              [](const TreeAttentionArguments& arguments) {
                const auto results = library::tree_attention(arguments);
                return results ? *results : masked_chunks::tree_attention(arguments);
              },
          .backward =
              [](const TreeAttentionArguments& arguments, const at::Tensor& grad_out, const at::Tensor& out,
                 const at::Tensor& lse) {
                const auto gradients = library::tree_attention_backward({grad_out, out, lse, arguments});
                return gradients ? *gradients : masked_backward(arguments, grad_out, out, lse);
              }};
}

AttentionFamily masked_family() {
  return {.name = "masked",
          .dtypes = {at::kDouble, at::kFloat, at::kBFloat16},
          .head_dims = {40, 128},
          .serves = [](at::ScalarType, int64_t) { return true; },
          .forward = [](const TreeAttentionArguments& given) { return masked_chunks::tree_attention(given); },
          .backward = masked_backward};
}

AttentionFamily cpu_family() {
  return {.name = "cpu",
          .dtypes = {at::kDouble, at::kFloat, at::kBFloat16},
          .head_dims = {8, 64},
          .serves = [](at::ScalarType, int64_t) { return true; },
          .forward = detail::call<"tree_attention", detail::TreeAttentionResults, TreeAttentionArguments>,
          .backward =
              [](const TreeAttentionArguments& arguments, const at::Tensor& grad_out, const at::Tensor& out,
                 const at::Tensor& lse) {
                return detail::call<"tree_attention_backward", detail::TreeAttentionGradients>(
                    detail::TreeAttentionBackward{grad_out, out, lse, arguments});
              }};
}

std::vector<AttentionFamily> attention_families(c10::Device device) {
  if (!device.is_cuda()) return {cpu_family()};
  return {library_family(std::max<int64_t>(device.index(), 0)), ampere_family(), masked_family()};
}

std::vector<OperatorFamily> operator_families(c10::DeviceType kind) {
  return {head_family(), distribution_family(), product_family(kind)};
}

}  // namespace

std::vector<std::string> kernel_families(c10::DeviceType kind) {
  std::vector<std::string> names;
  for (const AttentionFamily& family : attention_families(c10::Device(kind))) names.push_back(family.name);
  for (const OperatorFamily& family : operator_families(kind)) names.push_back(family.name);
  return names;
}

Finding check_family(const std::string& name, c10::Device device) {
  for (const AttentionFamily& family : attention_families(device)) {
    if (family.name == name) return check_attention(family, device);
  }
  for (const OperatorFamily& family : operator_families(device.type())) {
    if (family.name == name) return check_operators(family, device);
  }
  throw InputError(fmt::format("expected a family of kernels of {}: {}; received {}", device.str(),
                               fmt::join(kernel_families(device.type()), ", "), name));
}

}  // namespace espalier::qualify
