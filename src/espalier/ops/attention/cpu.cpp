// SPDX-License-Identifier: Apache-2.0
// tree_attention on the CPU: tensors to and from the kernels of kernels/cpu/attention/tree_attention.h.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "espalier/ops/attention/arguments.h"
#include "espalier/ops/attention/library.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/element_types.h"
#include "espalier/ops/gemm/blas.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/ops/kernels/cpu/attention/tree_attention.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::ElementType;
using detail::for_element_of;

template <class Element>
TokenHeads<Element> token_heads(const at::Tensor& tensor) {
  using Bare = std::remove_const_t<Element>;
  void* data =
      std::is_const_v<Element> ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr();
  return {static_cast<Bare*>(data), tensor.stride(0), tensor.stride(1)};
}

template <class Element>
std::vector<TokenHeads<Element>> token_heads(const std::vector<at::Tensor>& tensors) {
  std::vector<TokenHeads<Element>> result;
  for (const at::Tensor& tensor : tensors) result.push_back(token_heads<Element>(tensor));
  return result;
}

// Contiguous in the last dimension, as the kernels require.
at::Tensor for_kernel(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

std::vector<at::Tensor> with_context(const at::Tensor& own, at::TensorList context) {
  std::vector<at::Tensor> all{for_kernel(own)};
  for (const at::Tensor& segment : context) all.push_back(for_kernel(segment));
  return all;
}

/// Validated arguments of forward or backward, and the tensors that the kernels point into.
struct Call {
  AttentionShape shape;
  double softmax_scale, softcap;
  at::Tensor q, subtree_end;
  std::vector<at::Tensor> k, v;
  Schedule schedule;

  explicit Call(const detail::TreeAttentionArguments& arguments)
      : shape{arguments.q.size(0), arguments.q.size(1), arguments.k.size(1), arguments.q.size(2),
              arguments.v.size(2)},
        softmax_scale(arguments.options.softmax_scale),
        softcap(arguments.options.softcap),
        q(for_kernel(arguments.q)),
        subtree_end(arguments.tokens.subtree_end.contiguous()),
        k(with_context(arguments.k, arguments.context.k)),
        v(with_context(arguments.v, arguments.context.v)) {
    const std::vector<ContextRectangle> rectangles =
        detail::context_rectangles(arguments.context, shape.num_tokens);
    const std::span forest{subtree_end.const_data_ptr<int32_t>(), static_cast<size_t>(shape.num_tokens)};
    schedule = make_schedule(forest, rectangles, attention_blocks(shape, forest), window_of(arguments));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  SlidingWindow window_of(const detail::TreeAttentionArguments& arguments) {
    const int64_t size = arguments.options.sliding_window;
    if (size == 0) return {};
    position_ = arguments.tokens.position.contiguous();
    context_positions_ = detail::context_key_positions(arguments.context);
    const int32_t* next = context_positions_.data();
    for (const at::Tensor& segment : arguments.context.k) {
      segment_positions_.push_back(next);
      next += segment.size(0);
    }
    return {static_cast<int32_t>(size), position_.const_data_ptr<int32_t>(), segment_positions_};
  }

  // Storage for the schedule's window.
  at::Tensor position_;
  std::vector<int32_t> context_positions_;
  std::vector<const int32_t*> segment_positions_;
};

// Below this number of multiplications, starting threads does not pay off.
constexpr int64_t kParallelWork = int64_t{1} << 21;

/// Runs a kernel until all tasks are done, in all threads if worthwhile, each with its own scratch.
template <class Scalar, class Work>
void run_tasks(const Call& call, int64_t scratch_size, const Work& work) {
  const int64_t multiplications = call.schedule.num_pairs * call.shape.num_heads * call.shape.head_dim;
  const bool parallel = multiplications > kParallelWork && !at::in_parallel_region();
  const int threads = parallel ? at::get_num_threads() : 1;
  const auto dtype = c10::CppTypeToScalarType<Scalar>::value;
  const at::Tensor scratch = at::empty({threads, scratch_size}, call.q.options().dtype(dtype));
  Scalar* parts = scratch.mutable_data_ptr<Scalar>();
  std::atomic<int64_t> next_task = 0;
  std::atomic<int> next_part = 0;
#pragma omp parallel num_threads(threads)
  {
    const detail::SerialBlas serial;
    work(parts + scratch_size * next_part++, next_task);
  }
}

TileProducts tile_products(at::ScalarType dtype) {
  if (dtype == at::kDouble) return TileProducts::kBlas;
  const ProductChoice choice = product_choice();
  if (dtype == at::kBFloat16 && choice.bfloat16 == Bfloat16Products::kNative)
    return TileProducts::kPairPanels;
  return choice.float32 == Float32Products::kPanels ? TileProducts::kPanels : TileProducts::kBlas;
}

/// The pointers of a call, for kernels of one element type.
template <class Element>
struct Pointers {
  std::vector<TokenHeads<const Element>> k, v;
  AttentionInputs<Element> inputs;

  explicit Pointers(const Call& call)
      : k(token_heads<const Element>(call.k)), v(token_heads<const Element>(call.v)) {
    inputs = {call.shape,
              call.softmax_scale,
              call.subtree_end.const_data_ptr<int32_t>(),
              &call.schedule,
              token_heads<const Element>(call.q),
              k,
              v,
              tile_products(call.q.scalar_type()),
              &detail::multiply,
              chosen_instruction_set(),
              call.softcap};
  }
};

detail::TreeAttentionResults forward_cpu(const detail::TreeAttentionArguments& given) {
  detail::check_tree_attention(given);
  if (library::is_chosen(at::kCPU)) {
    if (auto results = library::tree_attention(given)) return *results;
  }
  const Call call(given);
  const at::Tensor &q = given.q, &sinks = given.options.sinks;
  const auto accumulator = detail::accumulator_dtype(q.scalar_type());
  const at::Tensor upcast_sinks = sinks.defined() ? sinks.to(accumulator).contiguous() : at::Tensor();
  const at::Tensor out = at::empty({q.size(0), q.size(1), given.v.size(2)}, q.options());
  const at::Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(accumulator));
  for_element_of(q.scalar_type(), [&]<class Element>(ElementType<Element>) {
    using Scalar = AccumulatorOf<Element>;
    Pointers<Element> pointers(call);
    if (sinks.defined()) pointers.inputs.sinks = upcast_sinks.const_data_ptr<Scalar>();
    const AttentionResults<Element> results{token_heads<Element>(out), lse.mutable_data_ptr<Scalar>()};
    run_tasks<Scalar>(call, forward_scratch(call.shape, call.schedule.sizes, pointers.inputs.products),
                      [&](Scalar* scratch, std::atomic<int64_t>& next_task) {
                        attend(pointers.inputs, results, scratch, next_task);
                      });
  });
  return {out, lse.t()};
}

std::vector<at::Tensor> zeros_like_all(const std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(at::zeros(tensor.sizes(), tensor.options().dtype(dtype)));
  }
  return result;
}

std::vector<at::Tensor> cast_all(const std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.to(dtype));
  return result;
}

detail::TreeAttentionGradients backward_cpu(const detail::TreeAttentionBackward& given) {
  detail::check_tree_attention(given.given);
  if (library::is_chosen(at::kCPU)) {
    if (auto gradients = library::tree_attention_backward(given)) return *gradients;
  }
  const Call call(given.given);
  const at::Tensor& q = given.given.q;
  const auto accumulator = detail::accumulator_dtype(q.scalar_type());
  const at::Tensor grad_out = for_kernel(given.grad_out), out = for_kernel(given.out);
  const at::Tensor lse = given.lse.t().contiguous();
  const at::Tensor grad_q = at::empty(q.sizes(), q.options());
  const std::vector<at::Tensor> grad_k = zeros_like_all(call.k, accumulator);
  const std::vector<at::Tensor> grad_v = zeros_like_all(call.v, accumulator);
  std::vector<std::atomic<int32_t>> turns(call.shape.num_key_heads * call.schedule.key_blocks.size());
  for_element_of(q.scalar_type(), [&]<class Element>(ElementType<Element>) {
    using Scalar = AccumulatorOf<Element>;
    const Pointers<Element> pointers(call);
    const auto sums_k = token_heads<Scalar>(grad_k), sums_v = token_heads<Scalar>(grad_v);
    const AttentionGradients<Element> gradients{token_heads<const Element>(grad_out),
                                                token_heads<const Element>(out),
                                                lse.const_data_ptr<Scalar>(),
                                                token_heads<Element>(grad_q),
                                                sums_k,
                                                sums_v,
                                                turns.data()};
    run_tasks<Scalar>(call, backward_scratch(call.shape, call.schedule.sizes, pointers.inputs.products),
                      [&](Scalar* scratch, std::atomic<int64_t>& next_task) {
                        attend_backward(pointers.inputs, gradients, scratch, next_task);
                      });
  });
  std::vector<at::Tensor> all_k = cast_all(grad_k, q.scalar_type());
  std::vector<at::Tensor> all_v = cast_all(grad_v, q.scalar_type());
  return {grad_q, all_k[0], all_v[0], {all_k.begin() + 1, all_k.end()}, {all_v.begin() + 1, all_v.end()}};
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  detail::implement<&forward_cpu, &backward_cpu>(m, "tree_attention");
}

}  // namespace espalier
