// SPDX-License-Identifier: Apache-2.0
// Names and formulas: docs/math.md, "Gated delta rule on trees". The backward pass is hand-written: autograd
// would save all temporaries of a chunk, several times its inputs, and the states of all chunks.
#include <ATen/ATen.h>

#include <cmath>

#include "espalier/ops/chunk_scan/chunk_scan.h"
#include "espalier/ops/gated_delta/arguments.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using at::bmm;
using detail::row_dots;
using detail::TensorVector;
using detail::transposed;

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

/// Arguments prepared for a call: chunks, rows in the accumulator dtype.
struct Problem {
  GatedDeltaRule given;
  detail::ChunkScan scan;
  int64_t heads, key_dim, value_dim, group;
  double scale;
  detail::UnitRows q, k;  // [T, K, Dk]
  at::Tensor v;           // [T, H, Dv]
  at::Tensor first;       // [1 + N, H, Dk, Dv]: the initial states of level 0

  explicit Problem(const GatedDeltaRule& arguments)
      : given(arguments),
        scan("gated_delta_rule", given.q, detail::scan_paths(given)),
        heads(given.v.size(1)),
        key_dim(given.q.size(2)),
        value_dim(given.v.size(2)),
        group(heads / given.q.size(1)),
        scale(std::pow(static_cast<double>(key_dim), -0.5)),
        q(detail::unit_rows(given.q.to(given.g.scalar_type()))),
        k(detail::unit_rows(given.k.to(given.g.scalar_type()))),
        v(given.v.to(given.g.scalar_type())),
        first(detail::first_states(given.states, {heads, key_dim, value_dim}, given.g.options())) {}
};

/// Intra-chunk quantities of one bucket, independent of states. B = chunks x heads, L = length.
struct Inside {
  const Problem& problem;
  const detail::BucketRows& rows;
  at::Tensor is_token;  // [B, L] 0 for padding
  at::Tensor q, k, v;   // [B, L, D]; q scaled
  at::Tensor beta;      // [B, L]
  detail::ChunkDecays decays;
  at::Tensor keys, inverse;         // [B, L, L]: k k^T with decays, (I + A)^-1
  at::Tensor u, w;                  // [B, L, Dv], [B, L, Dk]
  at::Tensor scores;                // [B, L, L]
  at::Tensor q_decayed, k_decayed;  // [B, L, Dk]

  Inside(const Problem& of, const detail::BucketRows& in)
      : problem(of),
        rows(in),
        is_token(in.is_token(of.heads, of.v.scalar_type())),
        q(in.by_head(of.q.unit, of.group).mul_(of.scale)),
        k(in.by_head(of.k.unit, of.group)),
        v(in.by_head(of.v)),
        beta(in.numbers_by_head(of.given.beta) * is_token),
        decays(in.numbers_by_head(of.given.g) * is_token) {
    const at::Tensor beta_decay = (beta * decays.before).unsqueeze(-1);
    keys = bmm(k, transposed(k)).mul_(decays.between);
    inverse = unit_lower_inverse((keys * beta.unsqueeze(-1)).tril_(-1));
    u = bmm(inverse, v * beta.unsqueeze(-1));
    w = bmm(inverse, k * beta_decay);
    scores = bmm(q, transposed(k)).mul_(decays.between);
    q_decayed = q * decays.before.unsqueeze(-1);
    k_decayed = k * decays.after.unsqueeze(-1);
  }

  at::Tensor whole(int64_t level) const { return rows.at_level(decays.whole, level).view({-1, 1, 1}); }
};

/// Results of the pass over the levels, by bucket.
struct Trace {
  TensorVector state, news;  // [B, Dk, Dv] initial states of chunks, [B, L, Dv] values written
  at::Tensor ends;
};

Trace run_levels(const Problem& problem, const std::vector<Inside>& inside) {
  Trace trace;
  for (const Inside& in : inside) {
    trace.state.push_back(at::empty({in.q.size(0), problem.key_dim, problem.value_dim}, in.q.options()));
    trace.news.push_back(at::empty_like(in.v));
  }
  trace.ends = problem.scan.run(problem.first, [&](size_t b, int64_t level, const at::Tensor& states) {
    const Inside& in = inside[b];
    const auto here = [&](const at::Tensor& x) { return in.rows.at_level(x, level); };
    const at::Tensor state = states.flatten(0, 1);
    const at::Tensor news = at::baddbmm(here(in.u), here(in.w), state, 1, -1);
    here(trace.state[b]).copy_(state);
    here(trace.news[b]).copy_(news);
    return (state * in.whole(level)).baddbmm_(transposed(here(in.k_decayed)), news).view(states.sizes());
  });
  return trace;
}

/// Gradients passed from level to level, by bucket.
struct StateGradients {
  TensorVector after, news;  // [B, Dk, Dv] of final states of chunks, [B, L, Dv] of values written
  at::Tensor first;          // of Problem::first
};

StateGradients run_levels_back(const Problem& problem, const std::vector<Inside>& inside,
                               const TensorVector& grad_outs, const at::Tensor& grad_ends) {
  StateGradients result;
  for (size_t b = 0; b < inside.size(); ++b) {
    const Inside& in = inside[b];
    result.after.push_back(at::empty({in.q.size(0), problem.key_dim, problem.value_dim}, in.q.options()));
    result.news.push_back(bmm(transposed(in.scores), grad_outs[b]));
  }
  result.first =
      problem.scan.run_back(problem.first, grad_ends, [&](size_t b, int64_t level, const at::Tensor& grads) {
        const Inside& in = inside[b];
        const auto here = [&](const at::Tensor& x) { return in.rows.at_level(x, level); };
        const at::Tensor after = grads.flatten(0, 1), news = here(result.news[b]);
        here(result.after[b]).copy_(after);
        news.baddbmm_(here(in.k_decayed), after);
        return (after * in.whole(level))
            .baddbmm_(transposed(here(in.q_decayed)), here(grad_outs[b]))
            .baddbmm_(transposed(here(in.w)), news, 1, -1)
            .view(grads.sizes());
      });
  return result;
}

/// Row gradients of one bucket, [n * L, ...].
struct RowGradients {
  at::Tensor q, k, v, g, beta;
};

/// Inputs of a bucket's gradients, after the forward and backward pass over the levels.
struct BucketGradients {
  const at::Tensor& state;  // initial states of chunks
  const at::Tensor& news;
  const at::Tensor& grad_out;
  const at::Tensor& grad_after;  // of the state at the end
  const at::Tensor& grad_news;
};

RowGradients row_gradients(const Inside& in, const BucketGradients& given) {
  const at::Tensor inverse_t = transposed(in.inverse), state_t = transposed(given.state);
  const at::Tensor values = bmm(inverse_t, given.grad_news);                    // of beta v
  const at::Tensor old = bmm(inverse_t, bmm(given.grad_news, state_t)).neg_();  // of beta exp(sum g) k
  const at::Tensor system =
      bmm(values, transposed(in.u)).baddbmm_(old, transposed(in.w)).neg_().tril_(-1);  // of A
  const at::Tensor beta = in.beta.unsqueeze(-1), decay = in.decays.before.unsqueeze(-1);
  const at::Tensor grad_scores = bmm(given.grad_out, transposed(given.news));
  const at::Tensor q_decayed = bmm(given.grad_out, state_t);
  const at::Tensor k_decayed = bmm(given.news, transposed(given.grad_after));

  const at::Tensor grad_keys = system * in.keys, decayed_grad_scores = grad_scores * in.decays.between;
  const at::Tensor old_keys = row_dots(old, in.k) * in.decays.before;
  const at::Tensor grad_beta = row_dots(values, in.v) + old_keys + grad_keys.sum({-1});

  const at::Tensor products = (system * beta).mul_(in.decays.between);  // of k k^T
  at::Tensor grad_k = bmm(products + transposed(products), in.k);
  grad_k.baddbmm_(transposed(decayed_grad_scores), in.q);
  grad_k.addcmul_(old, beta * decay).addcmul_(k_decayed, in.decays.after.unsqueeze(-1));
  const at::Tensor grad_q = bmm(decayed_grad_scores, in.k).addcmul_(q_decayed, decay).mul_(in.problem.scale);

  const at::Tensor between = (grad_keys * beta).add_(grad_scores * in.scores);
  const at::Tensor before = row_dots(q_decayed, in.q_decayed) + old_keys * in.beta;
  const at::Tensor after = row_dots(k_decayed, in.k_decayed);
  const at::Tensor whole = (given.state * given.grad_after).sum({1, 2}) * in.decays.whole;
  const at::Tensor grad_g = detail::chunk_decays_backward({before, after, whole, between});

  const int64_t group = in.problem.group;
  return {in.rows.by_token(grad_q, group), in.rows.by_token(grad_k, group), in.rows.by_token(values * beta),
          in.rows.numbers_by_token(grad_g), in.rows.numbers_by_token(grad_beta)};
}

}  // namespace

detail::DeltaResults composed::gated_delta_rule(const GatedDeltaRule& given) {
  detail::check_gated_delta_rule(given);
  const Problem problem(given);
  const std::vector<Inside> inside = detail::over_buckets<Inside>(problem);
  const Trace trace = run_levels(problem, inside);
  TensorVector rows;
  for (size_t b = 0; b < inside.size(); ++b) {
    const Inside& in = inside[b];
    rows.push_back(in.rows.by_token(bmm(in.q_decayed, trace.state[b]).baddbmm_(in.scores, trace.news[b])));
  }
  return {problem.scan.in_token_order(rows).to(given.q.scalar_type()), trace.ends};
}

detail::DeltaGradients composed::gated_delta_rule_backward(const TensorOrNone& grad_out,
                                                           const TensorOrNone& grad_ends,
                                                           const GatedDeltaRule& given) {
  detail::check_gated_delta_rule(given);
  const Problem problem(given);
  const std::vector<Inside> inside = detail::over_buckets<Inside>(problem);
  TensorVector grad_outs;
  for (const Inside& in : inside) {
    grad_outs.push_back(
        grad_out.defined()
            ? in.rows.by_head(grad_out.to(given.g.scalar_type())).mul_(in.is_token.unsqueeze(-1))
            : at::zeros_like(in.v));
  }
  const Trace trace = run_levels(problem, inside);
  const StateGradients above = run_levels_back(problem, inside, grad_outs, grad_ends);
  TensorVector grad_q, grad_k, grad_v, grad_g, grad_beta;
  for (size_t b = 0; b < inside.size(); ++b) {
    const RowGradients rows = row_gradients(
        inside[b], {trace.state[b], trace.news[b], grad_outs[b], above.after[b], above.news[b]});
    grad_q.push_back(rows.q);
    grad_k.push_back(rows.k);
    grad_v.push_back(rows.v);
    grad_g.push_back(rows.g);
    grad_beta.push_back(rows.beta);
  }
  const auto dtype = given.q.scalar_type();
  return {detail::unit_rows_backward(problem.scan.in_token_order(grad_q), problem.q).to(dtype),
          detail::unit_rows_backward(problem.scan.in_token_order(grad_k), problem.k).to(dtype),
          problem.scan.in_token_order(grad_v).to(dtype),
          problem.scan.in_token_order(grad_g),
          problem.scan.in_token_order(grad_beta),
          given.states.defined() ? above.first.narrow(0, 1, given.states.size(0)).clone() : at::Tensor()};
}

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  m.impl("gated_delta_rule", detail::kKernel<&composed::gated_delta_rule>);
  m.impl("gated_delta_rule_backward", detail::kKernel<&composed::gated_delta_rule_backward>);
}

}  // namespace espalier
