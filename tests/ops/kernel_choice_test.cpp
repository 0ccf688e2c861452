// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernel_choice.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <barrier>
#include <thread>

#include "espalier/base/check.h"
#include "tests/environment_variable.h"

namespace espalier::testing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr ProductChoice kOwn{Float32Products::kPanels, Bfloat16Products::kNative};
constexpr ProductChoice kUpcast{Float32Products::kLibrary, Bfloat16Products::kUpcast};

TEST(KernelChoice, OutsideOfAnyScopeIsWhatTheEnvironmentSaysAtTheTime) {
  const ForcedVariable bfloat16("ESPALIER_BF16_PRODUCTS", "native"), cpu("ESPALIER_CPU", "default"),
      attention("ESPALIER_ATTENTION", "masked"), head("ESPALIER_HEAD", "composed");
  const KernelChoice choice = kernel_choice();
  EXPECT_EQ(choice.products.bfloat16, Bfloat16Products::kNative);
  EXPECT_EQ(choice.instruction_set, InstructionSet::kDefault);
  EXPECT_EQ(choice.cuda.named_attention, AttentionKind::kMasked);
  EXPECT_FALSE(choice.cuda.head);
  const ForcedVariable other("ESPALIER_BF16_PRODUCTS", "upcast");
  EXPECT_EQ(product_choice().bfloat16, Bfloat16Products::kUpcast);
  const ForcedVariable wrong("ESPALIER_HEAD", "ours");
  try {
    cuda_kernels();
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "ESPALIER_HEAD: expected kernels or composed, received `ours`");
  }
}

TEST(KernelChoice, OfAScopeHoldsWhateverTheEnvironmentSaysLater) {
  const ForcedVariable no_head("ESPALIER_HEAD", nullptr), no_cpu("ESPALIER_CPU", nullptr);
  const InstructionSet best = chosen_instruction_set();
  const KernelScope outer(with_products(kOwn));
  {
    const ForcedVariable bfloat16("ESPALIER_BF16_PRODUCTS", "library"), head("ESPALIER_HEAD", "composed"),
        cpu("ESPALIER_CPU", "default");
    EXPECT_EQ(product_choice(), kOwn);
    EXPECT_EQ(chosen_instruction_set(), best);
    EXPECT_TRUE(cuda_kernels().head);
    KernelChoice choice = kernel_choice();
    choice.cuda.head = false;
    const KernelScope inner(choice);
    EXPECT_FALSE(cuda_kernels().head);
    EXPECT_EQ(product_choice(), kOwn);
  }
  EXPECT_TRUE(cuda_kernels().head);
}

TEST(KernelChoice, DefaultKernelsAreThoseOutsideOfScopes) {
  const ForcedVariable unset("ESPALIER_HEAD", nullptr);
  const KernelChoice before = kernel_choice();
  set_default_cuda_kernels({.head = false});
  EXPECT_FALSE(cuda_kernels().head);
  {
    const KernelScope scope(before);
    EXPECT_TRUE(cuda_kernels().head);
  }
  set_default_cuda_kernels({});
  EXPECT_TRUE(cuda_kernels().head);
}

TEST(KernelChoice, OfThreadsDoNotDisturbEachOther) {
  std::barrier together(2);
  const auto seen_by = [&](const ProductChoice& choice) {
    const KernelScope scope(with_products(choice));
    bool same = true;
    for (int i = 0; i < 100; ++i) {
      together.arrive_and_wait();
      same &= product_choice() == choice;
    }
    return same;
  };
  bool other_same = false;
  std::thread other([&] { other_same = seen_by(kUpcast); });
  EXPECT_TRUE(seen_by(kOwn));
  other.join();
  EXPECT_TRUE(other_same);
}

/// Runs backward passes in each other, `depth` of them, and notes where the last one is run and by which
/// products.
struct Nested : torch::autograd::Function<Nested> {
  struct Innermost {
    std::thread::id thread;
    ProductChoice products;
  };
  static inline Innermost innermost;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, int64_t depth) {
    ctx->saved_data["depth"] = depth;
    return x.clone();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (const int64_t depth = ctx->saved_data["depth"].toInt(); depth > 1) {
      const at::AutoGradMode with_grad(true);
      const at::Tensor x = at::ones({1}).requires_grad_();
      torch::autograd::backward({Nested::apply(x, depth - 1)}, {at::ones({1})});
    } else {
      innermost = {std::this_thread::get_id(), product_choice()};
    }
    return {grads[0], {}};
  }
};

// As the threads of GPUs have it. On the CPU autograd takes another thread where backward passes are nested
// more than 60 deep.
TEST(KernelChoice, ReachesTheThreadsOfBackwardPasses) {
  for (const ProductChoice& choice : {kOwn, kUpcast}) {
    const KernelScope scope(with_products(choice));
    const at::Tensor x = at::ones({1}).requires_grad_();
    torch::autograd::backward({Nested::apply(x, 70)}, {at::ones({1})});
    EXPECT_NE(Nested::innermost.thread, std::this_thread::get_id());
    EXPECT_EQ(Nested::innermost.products, choice);
  }
}

}  // namespace
}  // namespace espalier::testing
