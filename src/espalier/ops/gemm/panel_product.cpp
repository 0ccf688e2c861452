// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/gemm/panel_product.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <atomic>

#include "espalier/ops/element_types.h"
#include "espalier/ops/kernel_choice.h"
#include "espalier/ops/kernels/cpu/products/blocked_product.h"

namespace espalier::detail {
namespace {

// Fewer multiplications are done before other threads have begun.
constexpr int64_t kParallelWork = int64_t{1} << 20;
// The same of elements of a packed factor that are read.
constexpr int64_t kParallelElements = int64_t{1} << 17;
// Rows of b that are packed at a time where the result can be added to: so a product over many tokens needs
// no copy of all of them.
constexpr int64_t kMaxDepth = 2048;

// With adjacent elements along one of its dimensions, as they are packed.
at::Tensor for_panels(const at::Tensor& matrix) {
  return matrix.stride(0) == 1 || matrix.stride(1) == 1 ? matrix : matrix.contiguous();
}

template <class Element>
Vectors<Element> rows_of(const at::Tensor& a) {
  return {data_of<Element>(a), a.stride(0), a.stride(1), a.size(0), a.size(1)};
}

// Calls work(task, thread) for all tasks; thread < num_threads.
template <class Work>
void share(int64_t num_tasks, int64_t num_threads, const Work& work) {
  std::atomic<int64_t> next_task{0};
  at::parallel_for(0, std::min(num_tasks, num_threads), 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t task = next_task++; task < num_tasks; task = next_task++) work(task, thread);
    }
  });
}

// Where a thread finds its own memory.
template <class Word>
struct ThreadScratch {
  at::Tensor words;

  ThreadScratch(int64_t threads, int64_t count)
      : words(at::empty({threads, count}, at::TensorOptions().dtype(at::kInt))) {}
  Word* of(int64_t thread) const {
    return static_cast<Word*>(words.mutable_data_ptr()) + thread * words.stride(0);
  }
};

template <class Element>
void multiply_packed(const BlockedProduct<Element>& product, const void* packed, int64_t threads,
                     const at::Tensor& bias, const at::Tensor& out, bool add) {
  using Word = WordOf<Element>;
  const auto* panels = static_cast<const Word*>(packed);
  const ThreadScratch<Word> scratch(threads, product.scratch_words(out.scalar_type() != at::kFloat));
  share(product.num_tasks(), threads, [&](int64_t task, int64_t thread) {
    if (out.scalar_type() == at::kFloat) {
      const ProductResult<float> to{out.mutable_data_ptr<float>(), out.stride(0)};
      product.multiply(task, panels, scratch.of(thread), to, add, data_of<Element>(bias));
    } else {
      const ProductResult<BFloat16> to{mutable_data_of<BFloat16>(out), out.stride(0)};
      product.multiply(task, panels, scratch.of(thread), to, data_of<Element>(bias));
    }
  });
}

template <class Element>
at::Tensor pack(const BlockedProduct<Element>& product, int64_t threads) {
  const at::Tensor packed = at::empty({product.packed_words()}, at::TensorOptions().dtype(at::kInt));
  auto* words = static_cast<WordOf<Element>*>(packed.mutable_data_ptr());
  share(product.num_pack_tasks(), threads, [&](int64_t task, int64_t) { product.pack(task, words); });
  return packed;
}

template <class Element>
void multiply(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, const at::Tensor& out,
              bool add) {
  const bool parallel = a.size(0) * a.size(1) * b.size(1) > kParallelWork && !at::in_parallel_region();
  const int64_t threads = parallel ? at::get_num_threads() : 1;
  const BlockedProduct<Element> product(rows_of<Element>(a), rows_of<Element>(b.t()),
                                        chosen_instruction_set(), threads);
  const at::Tensor packed = pack(product, threads);
  multiply_packed(product, packed.const_data_ptr(), threads, bias, out, add);
}

template <class Element>
void multiply(const at::Tensor& a, const PackedFactor& b, const at::Tensor& bias, const at::Tensor& out) {
  const bool large = b.rows * b.columns > kParallelElements;
  const int64_t threads = large && !at::in_parallel_region() ? at::get_num_threads() : 1;
  const Vectors<Element> columns{nullptr, b.rows, 1, b.columns, b.rows};  // packed: not read
  const BlockedProduct<Element> product(rows_of<Element>(a), columns, chosen_instruction_set(), threads);
  multiply_packed(product, b.words.const_data_ptr(), threads, bias, out, /*add=*/false);
}

template <class Element>
void multiply_by_depth(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
                       const at::Tensor& out, bool add) {
  const int64_t depth = a.size(1), parts = (depth + kMaxDepth - 1) / kMaxDepth;
  if (out.scalar_type() != at::kFloat || parts < 2) return multiply<Element>(a, b, bias, out, add);
  const int64_t part = ((depth + parts - 1) / parts + 1) / 2 * 2;  // even, for pairs
  for (int64_t begin = 0; begin < depth; begin += part) {
    const int64_t end = std::min(begin + part, depth);
    multiply<Element>(a.slice(1, begin, end), b.slice(0, begin, end), begin == 0 ? bias : at::Tensor(), out,
                      add || begin > 0);
  }
}

}  // namespace

void panel_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, const at::Tensor& out,
                   bool add) {
  const at::ScalarType dtype = a.scalar_type();
  TORCH_CHECK((dtype == at::kFloat || dtype == at::kBFloat16) && b.scalar_type() == dtype &&
                  (!bias.defined() || bias.scalar_type() == dtype),
              "panel_product: expected factors of float32 or bfloat16, received ", dtype, " and ",
              b.scalar_type());
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && out.dim() == 2 &&
                  out.size(0) == a.size(0) && out.size(1) == b.size(1),
              "panel_product: expected [M, K], [K, N] and [M, N], received ", a.sizes(), ", ", b.sizes(),
              " and ", out.sizes());
  TORCH_CHECK(out.scalar_type() == at::kFloat || (out.scalar_type() == dtype && !add),
              "panel_product: expected a float32 result to add to, received ", out.scalar_type());
  if (out.numel() == 0) return;
  if (out.stride(1) != 1 && out.size(1) != 1) {
    const at::Tensor adjacent = out.contiguous();
    panel_product(a, b, bias, adjacent, add);
    at::Tensor(out).copy_(adjacent);
    return;
  }
  const at::Tensor left = for_panels(a), right = for_panels(b);
  const at::Tensor summand = bias.defined() ? bias.contiguous() : bias;
  if (dtype == at::kFloat) {
    multiply_by_depth<float>(left, right, summand, out, add);
  } else {
    multiply_by_depth<BFloat16>(left, right, summand, out, add);
  }
}

PackedFactor pack_factor(const at::Tensor& b) {
  TORCH_CHECK((b.scalar_type() == at::kFloat || b.scalar_type() == at::kBFloat16) && b.dim() == 2,
              "pack_factor: expected [K, N] float32 or bfloat16, received ", b.sizes(), " ", b.scalar_type());
  const at::Tensor right = for_panels(b);
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const auto packed_as = [&]<class Element>(Element) {
    const Vectors<Element> no_rows{nullptr, b.size(0), 1, 0, b.size(0)};
    const BlockedProduct<Element> product(no_rows, rows_of<Element>(right.t()), chosen_instruction_set(),
                                          threads);
    return pack(product, threads);
  };
  return {b.scalar_type() == at::kFloat ? packed_as(float()) : packed_as(BFloat16()), b.scalar_type(),
          b.size(0), b.size(1)};
}

void panel_product(const at::Tensor& a, const PackedFactor& b, const at::Tensor& bias,
                   const at::Tensor& out) {
  TORCH_CHECK(a.dim() == 2 && a.scalar_type() == b.dtype && a.size(1) == b.rows &&
                  (!bias.defined() || bias.scalar_type() == b.dtype),
              "panel_product: expected a left factor [M, ", b.rows, "] ", b.dtype, ", received ", a.sizes(),
              " ", a.scalar_type());
  TORCH_CHECK(out.dim() == 2 && out.size(0) == a.size(0) && out.size(1) == b.columns && out.is_contiguous() &&
                  (out.scalar_type() == at::kFloat || out.scalar_type() == b.dtype),
              "panel_product: expected a result [", a.size(0), ", ", b.columns, "], received ", out.sizes(),
              " ", out.scalar_type());
  if (out.numel() == 0) return;
  const at::Tensor left = for_panels(a);
  const at::Tensor summand = bias.defined() ? bias.contiguous() : bias;
  if (b.dtype == at::kFloat) {
    multiply<float>(left, b, summand, out);
  } else {
    multiply<BFloat16>(left, b, summand, out);
  }
}

}  // namespace espalier::detail
