// SPDX-License-Identifier: Apache-2.0
// What the judge of kernels needs beside the operators (python/espalier/kernels), as
// torch.ops.espalier_judge. No user calls these.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/hash.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <fstream>
#include <memory>
#include <sstream>

#include "espalier/ops/checks.h"
#include "espalier/ops/edge_logprobs/blocks.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/ops/guarded_output.h"
#include "espalier/ops/judge.h"
#include "espalier/ops/kernel_choice.h"

namespace espalier {

std::string kernel_build() {
  static const std::string digest = [] {
    Dl_info info{};
    const bool is_known = dladdr(reinterpret_cast<void*>(&kernel_build), &info) != 0;
    std::ostringstream content;
    content << std::ifstream(is_known ? info.dli_fname : "", std::ios::binary).rdbuf();
    TORCH_CHECK(content.good(), "expected the library of the operators, which cannot be read: ",
                is_known ? info.dli_fname : "unknown");
    return c10::sha1(content.str()).str();
  }();
  return digest;
}

namespace {

using Tensors = std::vector<at::Tensor>;

/// Sets which kernels operators outside of engines take on CUDA: attention in order of preference, and those
/// of the head.
void take_kernels(const std::vector<std::string>& attention, bool head) {
  CudaKernels kernels{.attention = {}, .head = head};
  for (const std::string& name : attention) {
    const auto kind = attention_kind_named(name);
    TORCH_CHECK(kind.has_value(), "attention: expected library, ampere or masked, received ", name);
    kernels.attention.push_back(*kind);
  }
  set_default_cuda_kernels(std::move(kernels));
}

/// Begins to guard what kernels write in this thread, or ends it. Returns how many outputs were overrun.
int64_t guard_outputs(bool begins) {
  static thread_local std::unique_ptr<OutputGuards> guards;
  const int64_t broken = guards ? guards->broken() : 0;
  guards.reset();
  if (begins) guards = std::make_unique<OutputGuards>();
  return broken;
}

/// edge_logprobs in blocks of so many rows and columns of the logits: the log-probabilities, and the
/// gradients of hidden and weight.
Tensors head_by_blocks(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& grad_logprobs,
                       const at::Tensor& edge_row, const at::Tensor& edge_target, int64_t num_rows,
                       int64_t num_columns) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const LogitBlock block{num_rows, num_columns};
  const auto zero_sums = [](const at::Tensor& like) {
    return at::zeros(like.sizes(), like.options().dtype(detail::accumulator_dtype(like.scalar_type())));
  };
  const auto [logprobs, lse] = detail::edge_logprobs_by_blocks(hidden, weight, edge_row, edge_target, block);
  const at::Tensor grad_hidden = zero_sums(hidden), grad_weight = zero_sums(weight);
  detail::add_edge_logprobs_gradients({grad_logprobs, {hidden, weight, edge_row, edge_target}, lse},
                                      grad_hidden, grad_weight, block);
  return {logprobs, grad_hidden.to(hidden.scalar_type()), grad_weight.to(weight.scalar_type())};
}

/// a b, a b + bias, and sum + a b.
Tensors matrix_products(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
                        const at::Tensor& sum) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor added = sum.clone();
  detail::add_product(added, a, b);
  return {detail::unrounded_product(a, b), detail::affine(a, b.t(), bias), added};
}

}  // namespace

TORCH_LIBRARY(espalier_judge, m) {
  m.def("build() -> str", &kernel_build);
  m.def("take_kernels(str[] attention, bool head) -> ()",
        [](c10::List<std::string> names, bool head) { take_kernels(names.vec(), head); });
  m.def("guard_outputs(bool begins) -> int", &guard_outputs);
  m.def(
      "head_by_blocks(Tensor hidden, Tensor weight, Tensor grad_logprobs, Tensor edge_row,"
      " Tensor edge_target, int num_rows, int num_columns) -> Tensor[]",
      &head_by_blocks);
  m.def("matrix_products(Tensor a, Tensor b, Tensor bias, Tensor sum) -> Tensor[]", &matrix_products);
}

}  // namespace espalier
