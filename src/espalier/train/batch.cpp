#include "espalier/train/batch.h"

#include <ATen/ATen.h>

#include <numeric>

#include "espalier/base/check.h"

namespace espalier {

Forest forest_of(const Trajectories& trajectories, std::span<const int64_t> rows) {
  const std::vector<uint64_t> merge_keys = route_keys(trajectories);
  Sequences sequences;
  sequences.offsets = trajectories.offsets.span();
  sequences.tokens = trajectories.input_ids.span();
  sequences.merge_keys = merge_keys;
  return build_forest(sequences, rows);
}

Step make_step(const Trajectories& trajectories, std::vector<int64_t> rows, const PlanOptions& plan_options,
               const ObjectiveOptions& objective) {
  Step step;
  step.rows = std::move(rows);
  step.forest = forest_of(trajectories, step.rows);
  step.plan = make_plan(step.forest, plan_options);
  step.terms = step_terms(trajectories, step.rows, step.forest, objective);
  return step;
}

namespace {

template <typename T>
at::Tensor to_tensor(const std::vector<T>& values, at::ScalarType dtype) {
  return at::from_blob(const_cast<T*>(values.data()), {static_cast<int64_t>(values.size())},
                       at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value))
      .to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

// Per-term columns on the host, before they become tensors.
struct TermColumns {
  std::vector<int64_t> token;  // token of the batch that the term's edge predicts
  std::vector<double> coefficient, advantage, old_logprob;
  std::vector<uint8_t> has_old;
};

TermColumns gather_terms(const Trajectories& trajectories, const Step& step, const MicroBatch& micro_batch,
                         const Layout& layout, const ObjectiveOptions& objective,
                         const Advantages* advantages, std::vector<int64_t>* term_token) {
  TermColumns columns;
  for (const Placement& placement : micro_batch.trajectories) {
    const auto terms = step.terms.row(placement.trajectory);
    if (terms.empty()) continue;
    const int64_t row = step.rows[placement.trajectory];
    const std::vector<int64_t> path = path_tokens(layout, placement.run);
    for (const Term& term : terms) {
      const int64_t flat = trajectories.offsets[row] + term.position;
      columns.token.push_back(path[term.position]);
      columns.coefficient.push_back(term.coefficient);
      term_token->push_back(flat);
      if (objective.kind != ObjectiveKind::kGrpo) continue;
      const bool has_old = trajectories.logprobs.has(row);
      columns.advantage.push_back(advantages->at(row, term.position));
      columns.old_logprob.push_back(has_old ? trajectories.logprobs.values[flat] : 0.0);
      columns.has_old.push_back(has_old);
    }
  }
  return columns;
}

}  // namespace

Batch make_batch(const Trajectories& trajectories, const Step& step, const MicroBatch& micro_batch,
                 const ObjectiveOptions& objective, const Advantages* advantages) {
  Batch batch;
  const Layout layout = make_layout(step.forest, micro_batch.runs);
  const TermColumns terms =
      gather_terms(trajectories, step, micro_batch, layout, objective, advantages, &batch.term_token);

  // An edge is named by its target token; edges in token order are in ascending order of rows only when
  // sorted by prev, which is not monotonous at branches.
  const int64_t num_tokens = layout.num_tokens();
  std::vector<int64_t> edges_of_row(num_tokens + 1);
  std::vector<bool> carries_loss(num_tokens);
  for (const int64_t token : terms.token) carries_loss[token] = true;
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (!carries_loss[token]) continue;
    ESPALIER_ASSERT(layout.prev[token] >= 0);
    ++edges_of_row[layout.prev[token] + 1];
  }
  std::vector<int64_t> head_rows, row_index(num_tokens, -1);
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (edges_of_row[token + 1] > 0) {
      row_index[token] = static_cast<int64_t>(head_rows.size());
      head_rows.push_back(token);
    }
  }
  std::partial_sum(edges_of_row.begin(), edges_of_row.end(), edges_of_row.begin());
  const int64_t num_edges = edges_of_row.back();
  std::vector<int64_t> edge_row(num_edges), edge_target(num_edges), edge_of_token(num_tokens, -1);
  batch.edge_token.resize(num_edges);
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (!carries_loss[token]) continue;
    const int64_t edge = edges_of_row[layout.prev[token]]++;
    edge_row[edge] = row_index[layout.prev[token]];
    edge_target[edge] = layout.input_ids[token];
    edge_of_token[token] = edge;
    batch.edge_token[edge] = token;
  }
  std::vector<int64_t> term_edge;
  term_edge.reserve(terms.token.size());
  for (const int64_t token : terms.token) term_edge.push_back(edge_of_token[token]);

  batch.input_ids = to_tensor(layout.input_ids, at::kLong);
  batch.position_ids = to_tensor(layout.position_ids, at::kLong);
  batch.subtree_end = to_tensor(layout.subtree_end, at::kInt);
  batch.head_rows = to_tensor(head_rows, at::kLong);
  batch.edge_row = to_tensor(edge_row, at::kLong);
  batch.edge_target = to_tensor(edge_target, at::kLong);
  batch.term_edge = to_tensor(term_edge, at::kLong);
  batch.terms.coefficient = to_tensor(terms.coefficient, at::kDouble);
  if (objective.kind == ObjectiveKind::kGrpo) {
    batch.terms.advantage = to_tensor(terms.advantage, at::kDouble);
    batch.terms.old_logprob = to_tensor(terms.old_logprob, at::kDouble);
    batch.terms.has_old = to_tensor(terms.has_old, at::kBool);
  }
  return batch;
}

}  // namespace espalier
