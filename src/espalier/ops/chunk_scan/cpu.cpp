// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/chunk_scan/recurrence.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "espalier/ops/element_types.h"
#include "espalier/ops/kernel_choice.h"
#include "espalier/ops/paths.h"

namespace espalier::detail {
namespace {

at::Tensor contiguous(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.contiguous() : tensor;
}

RecurrenceForest make_forest(const char* op, int64_t num_tokens, const ScanPaths& paths) {
  check_chunk_size(op, paths.chunk_size);
  const auto ends = checked_tokens(op, "ends", paths.ends, num_tokens);
  Chunks cut =
      cut_into_chunks(checked_prev(op, paths.prev, num_tokens, paths.num_contexts), ends, paths.chunk_size);
  std::vector<int64_t> end_chunks;
  for (const int64_t token : ends) end_chunks.push_back(cut.chunk_of_token[token]);
  return {std::move(cut.chunks), end_chunks, paths.num_contexts, paths.chunk_size};
}

template <class Scalar>
RecurrenceProblem<Scalar> problem_of(const RecurrenceInputs& in) {
  return {.instruction_set = chosen_instruction_set(),
          .delta = in.delta,
          .scale = in.scale,
          .key_heads = in.q.size(1),
          .heads = in.v.size(1),
          .key_dim = in.q.size(2),
          .value_dim = in.v.size(2),
          .q = data_of<Scalar>(in.q),
          .k = data_of<Scalar>(in.k),
          .v = data_of<Scalar>(in.v),
          .g = data_of<Scalar>(in.g),
          .beta = data_of<Scalar>(in.beta),
          .contexts = data_of<Scalar>(in.contexts)};
}

/// Calls function(Scalar()) for the dtype of the tensor.
template <class Function>
void for_scalar_of(const at::Tensor& tensor, const Function& function) {
  if (tensor.scalar_type() == at::kDouble) return function(0.0);
  function(0.0f);
}

}  // namespace

CpuRecurrence::CpuRecurrence(const char* op, const RecurrenceInputs& inputs, const ScanPaths& paths)
    : in_{inputs.delta,         inputs.scale,         contiguous(inputs.q),    contiguous(inputs.k),
          contiguous(inputs.v), contiguous(inputs.g), contiguous(inputs.beta), contiguous(inputs.contexts)},
      num_ends_(paths.ends.size(0)),
      forest_(make_forest(op, in_.q.size(0), paths)) {}

std::pair<at::Tensor, at::Tensor> CpuRecurrence::forward() const {
  const at::Tensor out = at::empty_like(in_.v);
  const at::Tensor ends =
      at::empty({num_ends_, in_.v.size(1), in_.q.size(2), in_.v.size(2)}, in_.v.options());
  for_scalar_of(in_.v, [&]<class Scalar>(Scalar) {
    const RecurrenceProblem<Scalar> problem = problem_of<Scalar>(in_);
    const RecurrenceResults<Scalar> results{mutable_data_of<Scalar>(out), mutable_data_of<Scalar>(ends)};
    at::parallel_for(0, recurrence_tasks(forest_, problem), 1, [&](int64_t begin, int64_t end) {
      recurrence_forward(forest_, problem, results, begin, end);
    });
  });
  return {out, ends};
}

RecurrenceInputs CpuRecurrence::backward(const at::Tensor& grad_out, const at::Tensor& grad_ends) const {
  const auto like = [](const at::Tensor& x) { return x.defined() ? at::empty_like(x) : x; };
  std::vector<int64_t> by_block = in_.q.sizes().vec();
  by_block.insert(by_block.begin(), recurrence_blocks(in_.v.size(1) / in_.q.size(1)));
  RecurrenceInputs grads{in_.delta,
                         in_.scale,
                         at::empty(by_block, in_.q.options()),
                         at::empty(by_block, in_.q.options()),
                         like(in_.v),
                         like(in_.g),
                         like(in_.beta),
                         in_.contexts.defined() ? at::zeros_like(in_.contexts) : at::Tensor()};
  const at::Tensor contiguous_grad_out = contiguous(grad_out), contiguous_grad_ends = contiguous(grad_ends);
  for_scalar_of(in_.v, [&]<class Scalar>(Scalar) {
    const RecurrenceProblem<Scalar> problem = problem_of<Scalar>(in_);
    const RecurrenceGradients<Scalar> gradients{.out = data_of<Scalar>(contiguous_grad_out),
                                                .ends = data_of<Scalar>(contiguous_grad_ends),
                                                .q = mutable_data_of<Scalar>(grads.q),
                                                .k = mutable_data_of<Scalar>(grads.k),
                                                .v = mutable_data_of<Scalar>(grads.v),
                                                .g = mutable_data_of<Scalar>(grads.g),
                                                .beta = mutable_data_of<Scalar>(grads.beta),
                                                .contexts = mutable_data_of<Scalar>(grads.contexts)};
    at::parallel_for(0, recurrence_tasks(forest_, problem), 1, [&](int64_t begin, int64_t end) {
      recurrence_backward(forest_, problem, gradients, begin, end);
    });
  });
  for (at::Tensor* grad : {&grads.q, &grads.k})
    *grad = grad->size(0) == 1 ? grad->squeeze(0) : grad->sum({0});
  return grads;
}

}  // namespace espalier::detail
