// tree_attention by dense pieces of the mask, each through ATen's flash attention on the CPU.
//   Forward: a query row has one triangle and a rectangle per ancestor stretch, with partial results
// (O_s, lse_s); lse = logsumexp_s lse_s and O = sum_s exp(lse_s - lse) O_s (docs/math.md).
//   Backward: a piece given the global O and lse yields its exact share of dQ, dK and dV.
// bfloat16 is computed in float32 and rounded once: ATen's float32 kernels are the faster ones on CPUs
// without AMX, in backward on all, and partial results are then not rounded.
#include "espalier/ops/tree_attention_pieces.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <iterator>
#include <span>

#include "espalier/ops/checks.h"
#include "espalier/ops/pieces.h"

namespace espalier::dense_pieces {
namespace {

// Pieces with more (query, key) pairs than this are worth all threads; smaller ones get one thread each.
constexpr int64_t kLargePiece = 128 * 128;

// Levels of the tokens' own pieces, then those of the context's.
std::vector<std::vector<Piece>> pieces_of(const at::Tensor& subtree_end, at::TensorList context_k,
                                          const at::Tensor& context_pieces) {
  const at::Tensor ends = subtree_end.contiguous();
  auto levels = pieces_by_level({ends.const_data_ptr<int32_t>(), static_cast<size_t>(ends.numel())});
  std::vector<int64_t> segment_sizes;
  for (const at::Tensor& segment : context_k) segment_sizes.push_back(segment.size(0));
  const at::Tensor numbers = context_pieces.contiguous();
  auto context_levels =
      context_pieces_by_level({numbers.const_data_ptr<int64_t>(), static_cast<size_t>(numbers.numel())},
                              segment_sizes, subtree_end.numel());
  std::move(context_levels.begin(), context_levels.end(), std::back_inserter(levels));
  return levels;
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

// Keys, or values, of the tokens themselves and of the context segments.
struct Columns {
  at::Tensor own;
  at::TensorList context;

  at::Tensor of(const Piece& piece) const {
    if (piece.segment < 0) return tokens_of(own, piece.column_begin, piece.column_end);
    const at::Tensor tokens = context[piece.segment].slice(0, piece.column_begin, piece.column_end);
    return for_kernel(tokens).transpose(0, 1).unsqueeze(0);
  }
};

struct Attended {
  at::Tensor out;  // [rows, H, D]
  at::Tensor lse;  // [rows, H]
};

Attended attend(const at::Tensor& q, const Columns& k, const Columns& v, const Piece& piece, double scale) {
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      tokens_of(q, piece.row_begin, piece.row_end), k.of(piece), v.of(piece), 0.0, piece.causal, {}, scale);
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

}  // namespace

std::tuple<at::Tensor, at::Tensor> tree_attention(const at::Tensor& q_in, const at::Tensor& k_in,
                                                  const at::Tensor& v_in, const at::Tensor& subtree_end,
                                                  double softmax_scale, at::TensorList context_k,
                                                  at::TensorList context_v,
                                                  const at::Tensor& context_pieces) {
  detail::check_tree_attention(q_in, k_in, v_in, subtree_end);
  detail::check_attention_context(k_in, context_k, context_v, context_pieces);
  const auto levels = pieces_of(subtree_end, context_k, context_pieces);
  const at::Tensor q = for_kernel(q_in);
  const Columns k{for_kernel(k_in), context_k};
  const Columns v{for_kernel(v_in), context_v};
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

namespace {

// Where the pieces' shares of a gradient add up.
struct ColumnGradients {
  at::Tensor own;
  std::vector<at::Tensor> context;

  ColumnGradients(const at::Tensor& like, at::TensorList segments)
      : own(at::empty(like.sizes(), like.options())) {
    for (const at::Tensor& segment : segments) context.push_back(at::zeros(segment.sizes(), like.options()));
  }

  void add(const Piece& piece, const at::Tensor& part) const {
    const at::Tensor& all = piece.segment < 0 ? own : context[piece.segment];
    const at::Tensor tokens = tokens_of(all, piece.column_begin, piece.column_end);
    // Level 0, the triangles, has every own column once.
    piece.causal ? tokens.copy_(part) : tokens.add_(part);
  }

  std::vector<at::Tensor> context_as(at::ScalarType dtype) const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& segment : context) result.push_back(segment.to(dtype));
    return result;
  }
};

}  // namespace

Gradients tree_attention_backward(const at::Tensor& grad_out_in, const at::Tensor& q_in,
                                  const at::Tensor& k_in, const at::Tensor& v_in,
                                  const at::Tensor& subtree_end, const at::Tensor& out_in,
                                  const at::Tensor& lse, double softmax_scale, at::TensorList context_k,
                                  at::TensorList context_v, const at::Tensor& context_pieces) {
  detail::check_tree_attention(q_in, k_in, v_in, subtree_end);
  detail::check_attention_context(k_in, context_k, context_v, context_pieces);
  const auto levels = pieces_of(subtree_end, context_k, context_pieces);
  const at::Tensor q = for_kernel(q_in);
  const Columns k{for_kernel(k_in), context_k};
  const Columns v{for_kernel(v_in), context_v};
  const at::Tensor out = for_kernel(out_in);
  const at::Tensor grad_out = for_kernel(grad_out_in);
  const auto differentiate = [&](const Piece& piece) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(
        tokens_of(grad_out, piece.row_begin, piece.row_end), tokens_of(q, piece.row_begin, piece.row_end),
        k.of(piece), v.of(piece), tokens_of(out, piece.row_begin, piece.row_end),
        lse.slice(1, piece.row_begin, piece.row_end).unsqueeze(0), 0.0, piece.causal, {}, softmax_scale);
  };
  const auto dtype = q_in.scalar_type();
  if (levels.size() == 1 && levels[0].size() == 1) {
    const auto [grad_q, grad_k, grad_v] = differentiate(levels[0][0]);
    const auto result = [&](const at::Tensor& grad) {
      return grad[0].transpose(0, 1).contiguous().to(dtype);
    };
    const ColumnGradients none_k(k.own, context_k), none_v(v.own, context_v);  // segments that nobody sees
    return {result(grad_q), result(grad_k), result(grad_v), none_k.context_as(dtype),
            none_v.context_as(dtype)};
  }
  const at::Tensor grad_q = at::empty(q.sizes(), q.options());
  const ColumnGradients grad_k(k.own, context_k), grad_v(v.own, context_v);
  for (const auto& level : levels) {
    for_each_piece(level, [&](const Piece& piece) {
      const auto [part_q, part_k, part_v] = differentiate(piece);
      const at::Tensor rows = tokens_of(grad_q, piece.row_begin, piece.row_end);
      piece.causal ? rows.copy_(part_q) : rows.add_(part_q);
      grad_k.add(piece, part_k);
      grad_v.add(piece, part_v);
    });
  }
  return {grad_q.to(dtype), grad_k.own.to(dtype), grad_v.own.to(dtype), grad_k.context_as(dtype),
          grad_v.context_as(dtype)};
}

}  // namespace espalier::dense_pieces
