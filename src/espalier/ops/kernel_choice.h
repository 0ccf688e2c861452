// SPDX-License-Identifier: Apache-2.0
// Which kernels operators run. An engine owns a choice, which is read from the environment once, when the
// engine is made, and holds for what it computes. Operators that nobody has made a choice for, as those
// called from Python, follow the environment at the time of the call.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "espalier/ops/kernels/cpu/instruction_set.h"
#include "espalier/ops/kernels/cpu/products/product_choice.h"
#include "espalier/ops/scoped_value.h"

namespace espalier {

/// Implementations of tree_attention on CUDA, in order of preference.
enum class AttentionKind {
  kLibrary,  // a library that Python has registered (attention/library.h)
  kAmpere,   // our own kernels (attention/fused.h)
  kMasked,   // chunks of queries with a mask (attention/masked.h)
};

/// "library", "ampere" or "masked"; nothing of another name.
std::optional<AttentionKind> attention_kind_named(std::string_view name);
const char* to_string(AttentionKind kind);

struct CudaKernels {
  /// tree_attention takes the first of these that serves its inputs, or masked.
  std::vector<AttentionKind> attention{AttentionKind::kLibrary, AttentionKind::kAmpere};
  /// It takes this one alone, and throws where that does not serve. The library also on a CPU.
  std::optional<AttentionKind> named_attention{};
  bool head = true;  // ours for edge_logprobs in bfloat16; else ATen's operators
};

inline constexpr const char *kAttentionVariable = "ESPALIER_ATTENTION", *kHeadVariable = "ESPALIER_HEAD";

/// The kernels with what the environment names instead: ESPALIER_ATTENTION (a word of attention_kind_named)
/// and ESPALIER_HEAD (`kernels` or `composed`). Throws InputError on another word.
CudaKernels with_environment(CudaKernels kernels);

struct KernelChoice {
  InstructionSet instruction_set{};  // of our kernels on the CPU
  ProductChoice products;            // on the CPU
  CudaKernels cuda;

  static constexpr detail::Scope kScope = detail::Scope::kKernels;
};

/// While one lives, operators of this thread, and of its backward passes in other threads, run these kernels.
using KernelScope = detail::ScopedValue<KernelChoice>;

/// The parts of the present choice: of the innermost KernelScope. Outside of any, the environment is read:
/// instruction_set(); what choose_by_features says (LibTorch's products, bfloat16 upcast, where it says
/// nothing) and the kernels of set_default_cuda_kernels, with_environment. Throws InputError where a variable
/// is wrong.
InstructionSet chosen_instruction_set();
ProductChoice product_choice();
CudaKernels cuda_kernels();
KernelChoice kernel_choice();

/// The present choice with other products.
KernelChoice with_products(const ProductChoice& products);

/// Of operators outside of any KernelScope, from now on. No other thread may compute meanwhile.
void set_default_cuda_kernels(CudaKernels kernels);

}  // namespace espalier
