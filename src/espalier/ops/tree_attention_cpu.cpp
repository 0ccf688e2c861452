// tree_attention on the CPU: each dense piece of the mask through ATen's flash attention.
//   Forward: a query row has one triangle and a rectangle per ancestor stretch, with partial results
// (O_s, lse_s); lse = logsumexp_s lse_s and O = sum_s exp(lse_s - lse) O_s (docs/math.md).
//   Backward: a piece given the global O and lse yields its exact share of dQ, dK and dV.
// bfloat16 is computed in float32 and rounded once: ATen's float32 kernels are the faster ones on CPUs
// without AMX, in backward on all, and partial results are then not rounded.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>
#include <span>

#include "espalier/ops/checks.h"
#include "espalier/ops/pieces.h"

namespace espalier {
namespace {

// Pieces with more (query, key) pairs than this are worth all threads; smaller ones get one thread each.
constexpr int64_t kLargePiece = 128 * 128;

std::vector<std::vector<Piece>> pieces_of(const at::Tensor& subtree_end) {
  const at::Tensor ends = subtree_end.contiguous();
  return pieces_by_level({ends.const_data_ptr<int32_t>(), static_cast<size_t>(ends.numel())});
}

// Pieces of a level touch disjoint rows and columns, so their order and the number of threads change nothing.
template <class Work>
void for_each_piece(const std::vector<Piece>& level, const Work& work) {
  std::vector<const Piece*> small;
  for (const Piece& piece : level) {
    if (piece.num_rows() * piece.num_columns() > kLargePiece) {
      work(piece);
    } else {
      small.push_back(&piece);
    }
  }
  at::parallel_for(0, static_cast<int64_t>(small.size()), 4, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView guard;  // thread-local, and other threads do not inherit it
    for (int64_t i = begin; i < end; ++i) work(*small[i]);
  });
}

// [T, H, D] -> the piece's tokens as [1, H, tokens, D], a view.
at::Tensor tokens_of(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return tensor.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
}

// In the dtype of the sums, with unit stride in the last dimension as the kernels require.
at::Tensor for_kernel(const at::Tensor& tensor) {
  const at::Tensor cast = tensor.to(detail::accumulator_dtype(tensor.scalar_type()));
  return cast.stride(-1) == 1 ? cast : cast.contiguous();
}

// out [rows, H, D] and lse [rows, H], both contiguous: the result so far, to which a piece's is added.
template <class Scalar>
void merge_rows(Scalar* out, Scalar* lse, const Scalar* piece_out, const Scalar* piece_lse, int64_t num_rows,
                int64_t head_dim) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const Scalar high = std::max(lse[row], piece_lse[row]);
    const Scalar old_weight = std::exp(lse[row] - high);
    const Scalar new_weight = std::exp(piece_lse[row] - high);
    const Scalar sum = old_weight + new_weight;
    const Scalar keep = old_weight / sum;
    const Scalar add = new_weight / sum;
    lse[row] = high + std::log(sum);
    Scalar* o = out + row * head_dim;
    const Scalar* p = piece_out + row * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) o[d] = keep * o[d] + add * p[d];
  }
}

struct Attended {
  at::Tensor out;  // [rows, H, D]
  at::Tensor lse;  // [rows, H]
};

Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Piece& piece,
                double scale) {
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      tokens_of(q, piece.row_begin, piece.row_end), tokens_of(k, piece.column_begin, piece.column_end),
      tokens_of(v, piece.column_begin, piece.column_end), 0.0, piece.causal, {}, scale);
  // The kernel works in [1, rows, H, D] and [1, rows, H], so these are views.
  return {out[0].transpose(0, 1).contiguous(), lse[0].t().contiguous()};
}

template <class Scalar>
void merge_piece(Attended& all, const Attended& part, const Piece& piece) {
  const int64_t heads = all.lse.size(1);
  const int64_t head_dim = all.out.size(2);
  const int64_t first = piece.row_begin * heads;
  Scalar* out = all.out.mutable_data_ptr<Scalar>() + first * head_dim;
  Scalar* lse = all.lse.mutable_data_ptr<Scalar>() + first;
  const Scalar* part_out = part.out.const_data_ptr<Scalar>();
  const Scalar* part_lse = part.lse.const_data_ptr<Scalar>();
  const int64_t grain = std::max<int64_t>(1, at::internal::GRAIN_SIZE / head_dim);
  at::parallel_for(0, piece.num_rows() * heads, grain, [&](int64_t begin, int64_t end) {
    if (piece.causal) {
      std::copy(part_out + begin * head_dim, part_out + end * head_dim, out + begin * head_dim);
      std::copy(part_lse + begin, part_lse + end, lse + begin);
    } else {
      merge_rows(out + begin * head_dim, lse + begin, part_out + begin * head_dim, part_lse + begin,
                 end - begin, head_dim);
    }
  });
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& q_in, const at::Tensor& k_in,
                                               const at::Tensor& v_in, const at::Tensor& subtree_end,
                                               double softmax_scale) {
  detail::check_tree_attention(q_in, k_in, v_in, subtree_end);
  const auto levels = pieces_of(subtree_end);
  const at::Tensor q = for_kernel(q_in);
  const at::Tensor k = for_kernel(k_in);
  const at::Tensor v = for_kernel(v_in);
  Attended all;
  if (levels.size() == 1 && levels[0].size() == 1) {
    all = attend(q, k, v, levels[0][0], softmax_scale);
  } else {
    all = {at::empty(q.sizes(), q.options()), at::empty({q.size(0), q.size(1)}, q.options())};
    AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "tree_attention", [&] {
      for (const auto& level : levels) {
        for_each_piece(level, [&](const Piece& piece) {
          merge_piece<scalar_t>(all, attend(q, k, v, piece, softmax_scale), piece);
        });
      }
    });
  }
  return {all.out.to(q_in.scalar_type()), all.lse.t()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cpu(
    const at::Tensor& grad_out_in, const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
    const at::Tensor& subtree_end, const at::Tensor& out_in, const at::Tensor& lse, double softmax_scale) {
  detail::check_tree_attention(q_in, k_in, v_in, subtree_end);
  const auto levels = pieces_of(subtree_end);
  const at::Tensor q = for_kernel(q_in);
  const at::Tensor k = for_kernel(k_in);
  const at::Tensor v = for_kernel(v_in);
  const at::Tensor out = for_kernel(out_in);
  const at::Tensor grad_out = for_kernel(grad_out_in);
  const auto differentiate = [&](const Piece& piece) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(
        tokens_of(grad_out, piece.row_begin, piece.row_end), tokens_of(q, piece.row_begin, piece.row_end),
        tokens_of(k, piece.column_begin, piece.column_end),
        tokens_of(v, piece.column_begin, piece.column_end), tokens_of(out, piece.row_begin, piece.row_end),
        lse.slice(1, piece.row_begin, piece.row_end).unsqueeze(0), 0.0, piece.causal, {}, softmax_scale);
  };
  const auto dtype = q_in.scalar_type();
  if (levels.size() == 1 && levels[0].size() == 1) {
    const auto [grad_q, grad_k, grad_v] = differentiate(levels[0][0]);
    const auto result = [&](const at::Tensor& grad) {
      return grad[0].transpose(0, 1).contiguous().to(dtype);
    };
    return {result(grad_q), result(grad_k), result(grad_v)};
  }
  const at::Tensor grad_q = at::empty(q.sizes(), q.options());
  const at::Tensor grad_k = at::empty(k.sizes(), k.options());
  const at::Tensor grad_v = at::empty(v.sizes(), v.options());
  const auto add = [](const at::Tensor& grad, const at::Tensor& part, int64_t begin, int64_t end,
                      bool first) {
    const at::Tensor tokens = tokens_of(grad, begin, end);
    first ? tokens.copy_(part) : tokens.add_(part);
  };
  for (const auto& level : levels) {
    for_each_piece(level, [&](const Piece& piece) {
      const auto [part_q, part_k, part_v] = differentiate(piece);
      // Level 0, the triangles, has every row and every column once.
      add(grad_q, part_q, piece.row_begin, piece.row_end, piece.causal);
      add(grad_k, part_k, piece.column_begin, piece.column_end, piece.causal);
      add(grad_v, part_v, piece.column_begin, piece.column_end, piece.causal);
    });
  }
  return {grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype)};
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  m.impl("tree_attention", &forward_cpu);
  m.impl("tree_attention_backward", &backward_cpu);
}

}  // namespace espalier
