// SPDX-License-Identifier: Apache-2.0
// ssm_scan composed of ATen operators, for any device. Formulas: docs/math.md, "Mamba-2 on trees".
// The heads of a group share B and C, so their rows, and the columns of their states, are concatenated and
// multiplied with B and C at once. The backward pass is hand-written for the same reasons as that of
// gated_delta.
#include <ATen/ATen.h>

#include "espalier/ops/chunk_scan/chunk_scan.h"
#include "espalier/ops/operator.h"
#include "espalier/ops/ssm_scan/arguments.h"

namespace espalier {
namespace {

using at::bmm;
using detail::row_dots;
using detail::TensorVector;
using detail::transposed;

/// Arguments prepared for a call. H = G R heads.
struct Problem {
  SsmScan given;
  detail::ChunkScan scan;
  int64_t tokens, groups, repeat, state_dim, head_dim;  // T, G, R, N, P
  at::Tensor x, b, c;                                   // in the accumulator dtype
  at::Tensor first;                                     // [1 + M, G, N, R P]: initial states of level 0

  explicit Problem(const SsmScan& arguments)
      : given(arguments),
        scan("ssm_scan", given.x, detail::scan_paths(given)),
        tokens(given.x.size(0)),
        groups(given.b.size(1)),
        repeat(given.x.size(1) / groups),
        state_dim(given.b.size(2)),
        head_dim(given.x.size(2)),
        x(in_sums(given.x)),
        b(in_sums(given.b)),
        c(in_sums(given.c)),
        first(side_by_side(detail::first_states(given.states, {groups * repeat, state_dim, head_dim},
                                                given.dt.options()))) {}

  at::Tensor in_sums(const at::Tensor& rows) const { return rows.to(given.dt.scalar_type()); }

  /// States [n, H, N, P] as [n, G, N, R P], and back.
  at::Tensor side_by_side(const at::Tensor& states) const {
    return states.reshape({-1, groups, repeat, state_dim, head_dim})
        .transpose(2, 3)
        .reshape({-1, groups, state_dim, repeat * head_dim});
  }
  at::Tensor apart(const at::Tensor& states) const {
    return states.view({-1, groups, state_dim, repeat, head_dim})
        .transpose(2, 3)
        .reshape({-1, groups * repeat, state_dim, head_dim});
  }

  /// Rows [T, H, P] as [T, G, R P].
  at::Tensor by_group(const at::Tensor& rows) const {
    return rows.reshape({tokens, groups, repeat * head_dim});
  }
};

/// Intra-chunk quantities of one bucket, independent of states. L = length, B = chunks x groups, and B R =
/// chunks x heads.
struct Inside {
  const Problem& problem;
  const detail::BucketRows& rows;
  detail::ChunkDecays decays;  // for B R
  at::Tensor b, c;             // [B, L, N]
  at::Tensor v;                // [B, L, R P]: dt x, 0 for padding
  at::Tensor weights;          // [B R, L, L]: c b^T with decays
  at::Tensor v_decayed;        // [B, L, R P]: decayed to the end of the chunk

  Inside(const Problem& of, const detail::BucketRows& in)
      : problem(of),
        rows(in),
        decays(in.numbers_by_head(of.given.dt * of.given.a) *
               in.is_token(of.groups * of.repeat, of.x.scalar_type())),
        b(in.by_head(of.b)),
        c(in.by_head(of.c)),
        v(tokens_only(in.by_head(of.by_group(of.x * of.given.dt.unsqueeze(-1))))),
        weights(by_heads(bmm(c, transposed(b)), decays.between)),
        v_decayed(scaled(v, decays.after)) {}

  /// Zeros the padding of rows [B, L, ...].
  at::Tensor tokens_only(const at::Tensor& x) const {
    return x * rows.is_token(problem.groups, x.scalar_type()).unsqueeze(-1);
  }

  /// Multiplies matrices of groups [B, L, L] elementwise by those of heads [B R, L, L].
  at::Tensor by_heads(const at::Tensor& groups, const at::Tensor& factor) const {
    const int64_t length = factor.size(1);
    return (factor.view({-1, problem.repeat, length, length}) * groups.unsqueeze(1)).flatten(0, 1);
  }

  /// Rows x [B, L, R P] times factor [B R, L] per head.
  at::Tensor scaled(const at::Tensor& x, const at::Tensor& factor) const {
    const at::Tensor row_factor = transposed(factor.view({-1, problem.repeat, factor.size(1)})).unsqueeze(-1);
    return (by_head(x) * row_factor).view(x.sizes());
  }

  /// Sums of a b over each head's columns, [B R, L].
  at::Tensor head_dots(const at::Tensor& a, const at::Tensor& b) const {
    return transposed(row_dots(by_head(a), by_head(b))).flatten(0, 1);
  }

  /// Rows [B, L, R P] as [B R, L, P], and back.
  at::Tensor apart(const at::Tensor& x) const { return transposed(by_head(x)).flatten(0, 1); }
  at::Tensor side_by_side(const at::Tensor& x) const {
    return transposed(x.view({-1, problem.repeat, x.size(1), problem.head_dim})).flatten(2, 3);
  }

  /// States [..., N, R P] of chunks of one level times the decay of each chunk.
  at::Tensor decayed(const at::Tensor& states, int64_t level) const {
    const at::Tensor whole = rows.at_level(decays.whole, level).view({-1, 1, problem.repeat, 1});
    return (by_head(states.flatten(0, 1)) * whole).view(states.sizes());
  }

  at::Tensor by_head(const at::Tensor& x) const {
    return x.view({x.size(0), x.size(1), problem.repeat, problem.head_dim});
  }
};

/// An uninitialised state for every chunk of a bucket, [B, N, R P].
at::Tensor empty_states(const Inside& in) {
  return at::empty({in.b.size(0), in.b.size(2), in.v.size(2)}, in.v.options());
}

struct States {
  TensorVector begin;  // by bucket, [B, N, R P]: initial states of chunks
  at::Tensor ends;     // [E, G, N, R P]
};

States run_levels(const Problem& problem, const std::vector<Inside>& inside) {
  States result;
  TensorVector written;
  for (const Inside& in : inside) {
    result.begin.push_back(empty_states(in));
    written.push_back(bmm(transposed(in.b), in.v_decayed));
  }
  result.ends = problem.scan.run(problem.first, [&](size_t b, int64_t level, const at::Tensor& states) {
    const Inside& in = inside[b];
    in.rows.at_level(result.begin[b], level).copy_(states.flatten(0, 1));
    return in.decayed(states, level).add_(in.rows.at_level(written[b], level).view(states.sizes()));
  });
  return result;
}

struct StateGradients {
  TensorVector end;  // by bucket, [B, N, R P]: of final states of chunks
  at::Tensor first;  // of Problem::first
};

/// `grad_read` [B, L, R P] by bucket: gradients of the values read from states.
StateGradients run_levels_back(const Problem& problem, const std::vector<Inside>& inside,
                               const TensorVector& grad_read, const at::Tensor& grad_ends) {
  StateGradients result;
  TensorVector sent;
  for (size_t b = 0; b < inside.size(); ++b) {
    result.end.push_back(empty_states(inside[b]));
    sent.push_back(bmm(transposed(inside[b].c), grad_read[b]));
  }
  result.first =
      problem.scan.run_back(problem.first, grad_ends, [&](size_t b, int64_t level, const at::Tensor& grads) {
        const Inside& in = inside[b];
        in.rows.at_level(result.end[b], level).copy_(grads.flatten(0, 1));
        return in.decayed(grads, level).add_(in.rows.at_level(sent[b], level).view(grads.sizes()));
      });
  return result;
}

/// Row gradients of one bucket, [n * L, ...].
struct RowGradients {
  at::Tensor v, g, b, c;  // g: of dt a
};

/// Inputs of a bucket's gradients, after the forward and backward pass over the levels.
struct BucketGradients {
  const at::Tensor& state;  // initial states of chunks
  const at::Tensor& grad_out;
  const at::Tensor& grad_read;
  const at::Tensor& grad_end;  // of the final state
};

RowGradients row_gradients(const Inside& in, const BucketGradients& given) {
  const at::Tensor grad_out = in.apart(given.grad_out);
  const at::Tensor grad_weights = bmm(grad_out, transposed(in.apart(in.v)));
  const at::Tensor read = in.scaled(bmm(in.c, given.state), in.decays.before);
  const at::Tensor grad_written = in.scaled(bmm(in.b, given.grad_end), in.decays.after);
  const at::Tensor grad_v = in.side_by_side(bmm(transposed(in.weights), grad_out)).add_(grad_written);

  const int64_t length = in.b.size(1);
  const at::Tensor scores =
      (grad_weights * in.decays.between).view({-1, in.problem.repeat, length, length}).sum({1});
  const at::Tensor grad_c = bmm(scores, in.b).baddbmm_(given.grad_read, transposed(given.state));
  const at::Tensor grad_b = bmm(transposed(scores), in.c).baddbmm_(in.v_decayed, transposed(given.grad_end));

  const at::Tensor between = grad_weights * in.weights;
  const at::Tensor before = in.head_dots(read, given.grad_out), after = in.head_dots(grad_written, in.v);
  const at::Tensor whole = in.by_head(given.state * given.grad_end).sum({1, 3}).flatten() * in.decays.whole;
  const at::Tensor grad_g = detail::chunk_decays_backward({before, after, whole, between});
  return {in.rows.by_token(grad_v), in.rows.numbers_by_token(grad_g), in.rows.by_token(grad_b),
          in.rows.by_token(grad_c)};
}

}  // namespace

detail::SsmResults composed::ssm_scan(const SsmScan& given) {
  detail::check_ssm_scan(given);
  const Problem problem(given);
  const std::vector<Inside> inside = detail::over_buckets<Inside>(problem);
  const States states = run_levels(problem, inside);
  TensorVector rows;
  for (size_t i = 0; i < inside.size(); ++i) {
    const Inside& in = inside[i];
    const at::Tensor read = in.scaled(bmm(in.c, states.begin[i]), in.decays.before);
    rows.push_back(in.rows.by_token(in.side_by_side(bmm(in.weights, in.apart(in.v))).add_(read)));
  }
  at::Tensor out = problem.scan.in_token_order(rows).view(given.x.sizes());
  if (given.d.defined()) out.addcmul_(problem.x, given.d.unsqueeze(-1));
  return {out.to(given.x.scalar_type()), problem.apart(states.ends)};
}

detail::SsmGradients composed::ssm_scan_backward(const TensorOrNone& grad_out, const TensorOrNone& grad_ends,
                                                 const SsmScan& given) {
  detail::check_ssm_scan(given);
  const Problem problem(given);
  const std::vector<Inside> inside = detail::over_buckets<Inside>(problem);
  const at::Tensor grad = grad_out.defined() ? problem.in_sums(grad_out) : at::zeros_like(problem.x);
  TensorVector grad_outs, grad_reads;
  for (const Inside& in : inside) {
    grad_outs.push_back(in.tokens_only(in.rows.by_head(problem.by_group(grad))));
    grad_reads.push_back(in.scaled(grad_outs.back(), in.decays.before));
  }
  const States states = run_levels(problem, inside);
  const StateGradients above = run_levels_back(
      problem, inside, grad_reads, grad_ends.defined() ? problem.side_by_side(grad_ends) : at::Tensor());
  TensorVector rows_v, rows_g, rows_b, rows_c;
  for (size_t i = 0; i < inside.size(); ++i) {
    const RowGradients rows =
        row_gradients(inside[i], {states.begin[i], grad_outs[i], grad_reads[i], above.end[i]});
    rows_v.push_back(rows.v);
    rows_g.push_back(rows.g);
    rows_b.push_back(rows.b);
    rows_c.push_back(rows.c);
  }
  return detail::ssm_gradients(
      given, grad,
      {problem.scan.in_token_order(rows_v).view(given.x.sizes()), problem.scan.in_token_order(rows_g),
       problem.scan.in_token_order(rows_b), problem.scan.in_token_order(rows_c),
       given.states.defined() ? problem.apart(above.first.narrow(0, 1, given.states.size(0)))
                              : at::Tensor()});
}

TORCH_LIBRARY_IMPL(espalier, CompositeExplicitAutograd, m) {
  m.impl("ssm_scan", detail::kKernel<&composed::ssm_scan>);
  m.impl("ssm_scan_backward", detail::kKernel<&composed::ssm_scan_backward>);
}

}  // namespace espalier
