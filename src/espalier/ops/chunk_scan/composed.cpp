// SPDX-License-Identifier: Apache-2.0
// Recurrences composed of ATen operators. The heads of a group share q and k, so that their rows, and the
// columns of their states, stand side by side where they are multiplied with q or k. The backward pass is
// hand-written: autograd would save all temporaries of a chunk, several times its inputs, and the states of
// all chunks.
#include <ATen/ATen.h>

#include "espalier/ops/chunk_scan/recurrence.h"

namespace espalier::detail {
namespace {

using at::bmm;
using Tensors = std::vector<at::Tensor>;

/// (I + A)^-1 of strictly lower triangular A [B, L, L], L a power of two. The inverse of a block matrix has
/// the inverses of its diagonal blocks and -X22 A21 X11 below, so inverses of 1, 2, 4, ... rows are computed
/// recursively by batched products.
at::Tensor unit_lower_inverse(const at::Tensor& a) {
  const int64_t batch = a.size(0), length = a.size(1);
  const at::Tensor inverse = at::eye(length, a.options()).expand({batch, length, length}).contiguous();
  for (int64_t size = 1; size < length; size *= 2) {
    const int64_t blocks = length / (2 * size);
    const auto diagonal_blocks = [&](const at::Tensor& x) {
      return x.view({batch, blocks, 2 * size, blocks, 2 * size}).diagonal(0, 1, 3).permute({0, 3, 1, 2});
    };
    const auto corner = [&](const at::Tensor& x, int64_t row, int64_t column) {
      return x.narrow(2, row, size).narrow(3, column, size);
    };
    const at::Tensor here = diagonal_blocks(inverse);
    const at::Tensor below =
        corner(here, size, size).matmul(corner(diagonal_blocks(a), size, 0)).matmul(corner(here, 0, 0));
    corner(here, size, 0).copy_(below.neg_());
  }
  return inverse;
}

/// Intra-chunk quantities of one bucket, independent of states. L = length, G = chunks x key heads, and B = G
/// R = chunks x heads.
struct Inside {
  const RecurrenceInputs& given;
  const BucketRows& rows;
  int64_t repeat;       // R
  at::Tensor is_token;  // [B, L] 0 for padding
  at::Tensor q, k;      // [G, L, Dk]; q scaled
  at::Tensor v;         // [B, L, Dv]
  at::Tensor beta;      // [B, L] 0 for padding; without the delta rule 1 for tokens
  ChunkDecays decays;   // for B
  at::Tensor scores;    // [B, L, L]: q k^T with decays
  at::Tensor u;         // [B, L, Dv]: values written, as far as they do not depend on states
  // With the delta rule only.
  at::Tensor keys, inverse;  // [B, L, L]: k k^T with decays, (I + A)^-1
  at::Tensor w, k_decayed;   // [B, L, Dk]

  Inside(const RecurrenceInputs& inputs, const BucketRows& in)
      : given(inputs),
        rows(in),
        repeat(inputs.v.size(1) / inputs.q.size(1)),
        is_token(in.is_token(inputs.v.size(1), inputs.v.scalar_type())),
        q(in.by_head(inputs.q).mul_(inputs.scale)),
        k(in.by_head(inputs.k)),
        v(in.by_head(inputs.v)),
        beta(inputs.delta ? in.numbers_by_head(inputs.beta) * is_token : is_token),
        decays(in.numbers_by_head(inputs.g) * is_token),
        scores(with_decays(bmm(q, transposed(k)))),
        u(v * beta.unsqueeze(-1)) {
    if (!inputs.delta) return;
    keys = with_decays(bmm(k, transposed(k)));
    inverse = unit_lower_inverse((keys * beta.unsqueeze(-1)).tril_(-1));
    w = bmm(inverse, keys_times(beta * decays.before));
    u = bmm(inverse, u);
    k_decayed = keys_times(decays.after);
  }

  /// [B, M, N] as [G, R, M, N].
  at::Tensor in_groups(const at::Tensor& x) const { return x.view({-1, repeat, x.size(1), x.size(2)}); }
  /// [B, M, N] as [G, M, R N].
  at::Tensor side_by_side(const at::Tensor& x) const { return in_groups(x).transpose(1, 2).flatten(2, 3); }

  /// The products of matrices of groups [G, M, N] and of their heads [B, N, P], [B, M, P].
  at::Tensor times(const at::Tensor& groups, const at::Tensor& heads) const {
    return bmm(groups, side_by_side(heads))
        .view({-1, groups.size(1), repeat, heads.size(2)})
        .transpose(1, 2)
        .flatten(0, 1);
  }
  /// The sums of a b^T over the heads of a group, a [B, L, P] and b [B, N, P].
  at::Tensor sum_of_products(const at::Tensor& a, const at::Tensor& b) const {
    return bmm(side_by_side(a), transposed(side_by_side(b)));
  }
  /// Matrices of groups [G, L, L] for each head, with decays.
  at::Tensor with_decays(const at::Tensor& x) const {
    return (in_groups(decays.between) * x.unsqueeze(1)).flatten(0, 1);
  }
  /// Keys for each head times a factor [B, L].
  at::Tensor keys_times(const at::Tensor& factor) const {
    return (k.unsqueeze(1) * in_groups(factor.unsqueeze(-1))).flatten(0, 1);
  }

  at::Tensor whole(int64_t level) const { return rows.at_level(decays.whole, level).view({-1, 1, 1}); }
  at::Tensor before() const { return decays.before.unsqueeze(-1); }
  at::Tensor after() const { return decays.after.unsqueeze(-1); }

  /// An uninitialised state for every chunk.
  at::Tensor empty_states() const { return at::empty({v.size(0), k.size(2), v.size(2)}, v.options()); }
};

std::vector<Inside> inside_chunks(const RecurrenceInputs& in, const ChunkScan& scan) {
  std::vector<Inside> inside;
  for (const BucketRows& rows : scan.buckets()) inside.emplace_back(in, rows);
  return inside;
}

/// Results of the pass over the levels, by bucket.
struct Trace {
  Tensors state, news;  // [B, Dk, Dv] initial states of chunks, [B, L, Dv] values written
  at::Tensor ends;
};

Trace run_levels(const ChunkScan& scan, const at::Tensor& first, const std::vector<Inside>& inside) {
  Trace trace;
  Tensors written;  // to states, without the delta rule
  for (const Inside& in : inside) {
    const bool delta = in.given.delta;
    trace.state.push_back(in.empty_states());
    trace.news.push_back(delta ? at::empty_like(in.u) : in.u);
    written.push_back(delta ? at::Tensor() : in.times(transposed(in.k), in.u * in.after()));
  }
  trace.ends = scan.run(first, [&](size_t b, int64_t level, const at::Tensor& states) {
    const Inside& in = inside[b];
    const auto here = [&](const at::Tensor& x) { return in.rows.at_level(x, level); };
    const at::Tensor state = states.flatten(0, 1), next = state * in.whole(level);
    here(trace.state[b]).copy_(state);
    if (!in.given.delta) return next.add_(here(written[b])).view(states.sizes());
    const at::Tensor news = at::baddbmm(here(in.u), here(in.w), state, 1, -1);
    here(trace.news[b]).copy_(news);
    return next.baddbmm_(transposed(here(in.k_decayed)), news).view(states.sizes());
  });
  return trace;
}

/// Gradients passed from level to level, by bucket.
struct StateGradients {
  Tensors after, news;  // [B, Dk, Dv] of final states of chunks, [B, L, Dv] of values written
  at::Tensor first;     // of the initial states of level 0
};

StateGradients run_levels_back(const ChunkScan& scan, const at::Tensor& first,
                               const std::vector<Inside>& inside, const Tensors& grad_outs,
                               const at::Tensor& grad_ends) {
  StateGradients result;
  Tensors read;  // gradients of initial states from what the chunk's own tokens read
  for (size_t b = 0; b < inside.size(); ++b) {
    const Inside& in = inside[b];
    result.after.push_back(in.empty_states());
    result.news.push_back(bmm(transposed(in.scores), grad_outs[b]));
    read.push_back(in.times(transposed(in.q), grad_outs[b] * in.before()));
  }
  result.first = scan.run_back(first, grad_ends, [&](size_t b, int64_t level, const at::Tensor& grads) {
    const Inside& in = inside[b];
    const auto here = [&](const at::Tensor& x) { return in.rows.at_level(x, level); };
    const at::Tensor after = grads.flatten(0, 1), grad = (after * in.whole(level)).add_(here(read[b]));
    here(result.after[b]).copy_(after);
    if (in.given.delta) {
      const at::Tensor news = here(result.news[b]).baddbmm_(here(in.k_decayed), after);
      grad.baddbmm_(transposed(here(in.w)), news, 1, -1);
    }
    return grad.view(grads.sizes());
  });
  return result;
}

/// Inputs of a bucket's gradients, after the forward and backward pass over the levels.
struct BucketGradients {
  const at::Tensor& state;  // initial states of chunks
  const at::Tensor& news;
  const at::Tensor& grad_out;
  const at::Tensor& grad_after;  // of the state at the end
  const at::Tensor& grad_news;   // without the delta rule only what the chunk's own tokens read
};

/// The gradients of one bucket, rows [n L, ...]; none of contexts.
RecurrenceInputs row_gradients(const Inside& in, const BucketGradients& given) {
  const at::Tensor beta = in.beta.unsqueeze(-1), grad_read = given.grad_out * in.before();
  const at::Tensor grad_written = in.times(in.k, given.grad_after).mul_(in.after());
  const at::Tensor grad_scores = bmm(given.grad_out, transposed(given.news));
  const at::Tensor product_grads = in.in_groups(grad_scores * in.decays.between).sum({1});  // of q k^T
  const at::Tensor grad_q =
      bmm(product_grads, in.k).add_(in.sum_of_products(grad_read, given.state)).mul_(in.given.scale);
  const at::Tensor grad_k = bmm(transposed(product_grads), in.q)
                                .add_(in.sum_of_products(given.news * in.after(), given.grad_after));

  // Of the logarithms of decays.
  const at::Tensor between = grad_scores * in.scores, after = row_dots(grad_written, given.news);
  const at::Tensor before = row_dots(grad_read, in.times(in.q, given.state));
  const at::Tensor whole = (given.state * given.grad_after).sum({1, 2}) * in.decays.whole;

  at::Tensor values, grad_beta;  // gradients of beta v and of beta
  if (in.given.delta) {
    const at::Tensor inverse_t = transposed(in.inverse);
    values = bmm(inverse_t, given.grad_news);
    const at::Tensor old =
        bmm(inverse_t, bmm(given.grad_news, transposed(given.state))).neg_();  // of beta exp(sum g) k
    const at::Tensor system =
        bmm(values, transposed(in.u)).baddbmm_(old, transposed(in.w)).neg_().tril_(-1);  // of A
    const at::Tensor grad_keys = system * in.keys;
    const at::Tensor products = in.in_groups((system * beta).mul_(in.decays.between)).sum({1});  // of k k^T
    const at::Tensor old_keys = row_dots(old, in.keys_times(in.decays.before));
    grad_k.baddbmm_(products + transposed(products), in.k);
    grad_k.add_(in.in_groups(old * (beta * in.before())).sum({1}));
    between.add_(grad_keys * beta);
    before.add_(old_keys * in.beta);
    grad_beta = in.rows.numbers_by_token(row_dots(values, in.v) + old_keys + grad_keys.sum({-1}));
  } else {
    values = given.grad_news + grad_written;
  }
  const at::Tensor grad_g = chunk_decays_backward({before, after, whole, between});
  return {in.given.delta,
          in.given.scale,
          in.rows.by_token(grad_q),
          in.rows.by_token(grad_k),
          in.rows.by_token(values * beta),
          in.rows.numbers_by_token(grad_g),
          grad_beta,
          at::Tensor()};
}

}  // namespace

ComposedRecurrence::ComposedRecurrence(const char* op, const RecurrenceInputs& inputs, const ScanPaths& paths)
    : in_(inputs),
      scan_(op, inputs.q, paths),
      first_(first_states(inputs.contexts, {inputs.v.size(1), inputs.q.size(2), inputs.v.size(2)},
                          inputs.v.options())) {}

std::pair<at::Tensor, at::Tensor> ComposedRecurrence::forward() const {
  const std::vector<Inside> inside = inside_chunks(in_, scan_);
  const Trace trace = run_levels(scan_, first_, inside);
  Tensors rows;
  for (size_t b = 0; b < inside.size(); ++b) {
    const Inside& in = inside[b];
    const at::Tensor read = in.times(in.q, trace.state[b]).mul_(in.before());
    rows.push_back(in.rows.by_token(read.baddbmm_(in.scores, trace.news[b])));
  }
  return {scan_.in_token_order(rows), trace.ends};
}

RecurrenceInputs ComposedRecurrence::backward(const at::Tensor& grad_out, const at::Tensor& grad_ends) const {
  const std::vector<Inside> inside = inside_chunks(in_, scan_);
  Tensors grad_outs;
  for (const Inside& in : inside) {
    grad_outs.push_back(grad_out.defined() ? in.rows.by_head(grad_out).mul_(in.is_token.unsqueeze(-1))
                                           : at::zeros_like(in.v));
  }
  const Trace trace = run_levels(scan_, first_, inside);
  const StateGradients above = run_levels_back(scan_, first_, inside, grad_outs, grad_ends);
  std::vector<RecurrenceInputs> rows;
  for (size_t b = 0; b < inside.size(); ++b) {
    rows.push_back(row_gradients(
        inside[b], {trace.state[b], trace.news[b], grad_outs[b], above.after[b], above.news[b]}));
  }
  const auto joined = [&](at::Tensor RecurrenceInputs::* input) {
    Tensors parts;
    for (const RecurrenceInputs& part : rows) parts.push_back(part.*input);
    return scan_.in_token_order(parts);
  };
  return {in_.delta,
          in_.scale,
          joined(&RecurrenceInputs::q),
          joined(&RecurrenceInputs::k),
          joined(&RecurrenceInputs::v),
          joined(&RecurrenceInputs::g),
          in_.delta ? joined(&RecurrenceInputs::beta) : at::Tensor(),
          in_.contexts.defined() ? above.first.narrow(0, 1, in_.contexts.size(0)).clone() : at::Tensor()};
}

}  // namespace espalier::detail
