// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernel_choice.h"

#include <utility>

#include "espalier/base/environment.h"

namespace espalier {
namespace {

constexpr auto kAttentionWords = std::to_array<Word<AttentionKind>>({{"library", AttentionKind::kLibrary},
                                                                     {"ampere", AttentionKind::kAmpere},
                                                                     {"masked", AttentionKind::kMasked}});
constexpr auto kOwnWords = std::to_array<Word<bool>>({{"kernels", true}, {"composed", false}});

CudaKernels& default_cuda_kernels() {
  static CudaKernels kernels;
  return kernels;
}

}  // namespace

std::optional<AttentionKind> attention_kind_named(std::string_view name) {
  return has_word(kAttentionWords, name) ? std::optional(parse_word(kAttentionWords, "", name))
                                         : std::nullopt;
}

const char* to_string(AttentionKind kind) {
  return word_of(kAttentionWords, kind);
}

CudaKernels with_environment(CudaKernels kernels) {
  if (const auto kind = named_by_environment(kAttentionVariable, kAttentionWords)) {
    kernels.named_attention = kind;
  }
  kernels.head = named_by_environment(kHeadVariable, kOwnWords).value_or(kernels.head);
  return kernels;
}

InstructionSet chosen_instruction_set() {
  const KernelChoice* choice = KernelScope::find();
  return choice == nullptr ? instruction_set() : choice->instruction_set;
}

ProductChoice product_choice() {
  if (const KernelChoice* choice = KernelScope::find()) return choice->products;
  return with_environment(choose_by_features(product_features()).value_or(ProductChoice()));
}

CudaKernels cuda_kernels() {
  if (const KernelChoice* choice = KernelScope::find()) return choice->cuda;
  return with_environment(default_cuda_kernels());
}

KernelChoice kernel_choice() {
  return {chosen_instruction_set(), product_choice(), cuda_kernels()};
}

KernelChoice with_products(const ProductChoice& products) {
  return {chosen_instruction_set(), products, cuda_kernels()};
}

void set_default_cuda_kernels(CudaKernels kernels) {
  default_cuda_kernels() = std::move(kernels);
}

}  // namespace espalier
