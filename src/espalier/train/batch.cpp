#include "espalier/train/batch.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/ops/device.h"

namespace espalier {

Forest forest_of(const Trajectories& trajectories, std::span<const int64_t> rows) {
  const std::vector<uint64_t> merge_keys = route_keys(trajectories);
  Sequences sequences;
  sequences.offsets = trajectories.offsets.span();
  sequences.tokens = trajectories.input_ids.span();
  sequences.merge_keys = merge_keys;
  sequences.release = trajectories.release;
  return build_forest(sequences, rows);
}

Step make_step(const Trajectories& trajectories, std::vector<int64_t> rows, const PlanOptions& plan_options,
               const ObjectiveOptions& objective, const PlanCosts* costs) {
  RECORD_USER_SCOPE("plan");
  Step step;
  step.rows = std::move(rows);
  step.forest = forest_of(trajectories, step.rows);
  set_plan(&step, costs == nullptr ? make_plan(step.forest, plan_options)
                                   : make_plan(step.forest, plan_options, *costs));
  step.terms = step_terms(trajectories, step.rows, step.forest, objective);
  return step;
}

void set_plan(Step* step, Plan plan) {
  step->plan = std::move(plan);
  step->context = {};
  const ContextIndex index(step->plan.micro_batches);
  for (size_t m = 0; m < step->plan.micro_batches.size(); ++m) {
    step->context.push_row(context_pieces(index, static_cast<int64_t>(m)));
  }
}

namespace {

template <typename T>
at::Tensor to_tensor(const std::vector<T>& values, at::ScalarType dtype) {
  return at::from_blob(const_cast<T*>(values.data()), {static_cast<int64_t>(values.size())},
                       at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value))
      .to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

// Per-term columns on the host, before they become tensors. Of a trajectory's terms, those whose edge starts
// in the micro-batch.
struct TermColumns {
  std::vector<int64_t> row;     // token of the batch where the term's edge starts
  std::vector<int64_t> target;  // token id that it predicts
  std::vector<int64_t> token;   // the token of the batch with that id, -1: in a child
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
    const int64_t first = layout.position_ids[path.front()], size = static_cast<int64_t>(path.size());
    for (const Term& term : terms_from(terms, first + 1)) {
      const int64_t source = term.position - 1 - first;
      if (source >= size) break;
      const int64_t flat = trajectories.offsets[row] + term.position;
      columns.row.push_back(path[source]);
      columns.target.push_back(trajectories.input_ids[flat]);
      columns.token.push_back(source + 1 < size ? path[source + 1] : -1);
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

// Terms by row, and by target among those of a row. Rows are tokens of the batch, and most have few terms.
std::vector<int64_t> terms_in_order(const TermColumns& terms, int64_t num_tokens) {
  std::vector<int64_t> order(terms.row.size());
  // Of a row's terms in `order`; until all are placed, of those that are.
  std::vector<int64_t> end(num_tokens);
  for (const int64_t row : terms.row) ++end[row];
  std::exclusive_scan(end.begin(), end.end(), end.begin(), int64_t{0});
  for (size_t m = 0; m < order.size(); ++m) order[end[terms.row[m]]++] = static_cast<int64_t>(m);
  int64_t begin = 0;
  for (const int64_t row_end : end) {
    std::sort(order.begin() + begin, order.begin() + row_end, [&](int64_t a, int64_t b) {
      return std::pair(terms.target[a], a) < std::pair(terms.target[b], b);
    });
    begin = row_end;
  }
  return order;
}

// Edges are pairs of a row and a token id: equal pairs have equal log-probabilities.
void set_edges(const TermColumns& terms, int64_t num_tokens, Batch* batch) {
  const std::vector<int64_t> order = terms_in_order(terms, num_tokens);
  const auto key = [&](int64_t m) { return std::pair(terms.row[m], terms.target[m]); };
  std::vector<int64_t> head_rows, edge_row, edge_target, term_edge(order.size());
  for (size_t k = 0; k < order.size(); ++k) {
    const int64_t m = order[k];
    if (k == 0 || key(order[k - 1]) != key(m)) {
      if (head_rows.empty() || head_rows.back() != terms.row[m]) head_rows.push_back(terms.row[m]);
      edge_row.push_back(static_cast<int64_t>(head_rows.size()) - 1);
      edge_target.push_back(terms.target[m]);
      batch->edge_token.push_back(terms.token[m]);
    }
    term_edge[m] = static_cast<int64_t>(edge_row.size()) - 1;
  }
  batch->head_rows = to_tensor(head_rows, at::kLong);
  batch->edge_row = to_tensor(edge_row, at::kLong);
  batch->edge_target = to_tensor(edge_target, at::kLong);
  batch->term_edge = to_tensor(term_edge, at::kLong);
}

void set_context(std::span<const ContextPiece> pieces, Batch* batch) {
  std::vector<int64_t> numbers;
  for (const ContextPiece& piece : pieces) {
    if (batch->ancestors.empty() || batch->ancestors.back() != piece.ancestor) {
      batch->ancestors.push_back(piece.ancestor);
    }
    numbers.insert(numbers.end(), {static_cast<int64_t>(batch->ancestors.size()) - 1, piece.column_begin,
                                   piece.column_end, piece.row_begin, piece.row_end});
  }
  batch->context_pieces = to_tensor(numbers, at::kLong).view({-1, 5});
}

}  // namespace

Batch make_batch(const Trajectories& trajectories, const Step& step, int64_t index,
                 const ObjectiveOptions& objective, const Advantages* advantages) {
  RECORD_USER_SCOPE("batch");
  Batch batch;
  const MicroBatch& micro_batch = step.plan.micro_batches.at(index);
  const Layout layout = make_micro_batch_layout(step.forest, micro_batch);
  const TermColumns terms =
      gather_terms(trajectories, step, micro_batch, layout, objective, advantages, &batch.term_token);
  batch.input_ids = to_tensor(layout.input_ids, at::kLong);
  batch.position_ids = to_tensor(layout.position_ids, at::kLong);
  batch.subtree_end = to_tensor(layout.subtree_end, at::kInt);
  set_edges(terms, batch.num_tokens(), &batch);
  if (micro_batch.parent >= 0) set_context(step.context.row(index), &batch);
  batch.terms.coefficient = to_tensor(terms.coefficient, at::kDouble);
  if (objective.kind == ObjectiveKind::kGrpo) {
    batch.terms.advantage = to_tensor(terms.advantage, at::kDouble);
    batch.terms.old_logprob = to_tensor(terms.old_logprob, at::kDouble);
    batch.terms.has_old = to_tensor(terms.has_old, at::kBool);
  }
  return batch;
}

Batch to_device(Batch batch, at::Device device) {
  TermTensors& terms = batch.terms;
  at::Tensor* const members[] = {&batch.input_ids,   &batch.position_ids, &batch.subtree_end,
                                 &batch.head_rows,   &batch.edge_row,     &batch.edge_target,
                                 &batch.term_edge,   &terms.coefficient,  &terms.advantage,
                                 &terms.old_logprob, &terms.has_old};
  std::vector<at::Tensor> host;
  for (const at::Tensor* member : members) host.push_back(*member);
  const std::vector<at::Tensor> there = upload(host, device);
  for (size_t i = 0; i < there.size(); ++i) *members[i] = there[i];
  return batch;
}

std::vector<bool> micro_batches_with_loss(const Step& step) {
  const auto& micro_batches = step.plan.micro_batches;
  std::vector<bool> result(micro_batches.size());
  for (int64_t m = static_cast<int64_t>(micro_batches.size()) - 1; m >= 0; --m) {
    const std::vector<Run>& runs = micro_batches[m].runs;
    std::vector<int64_t> first_position(runs.size());  // of the path's tokens in the micro-batch
    for (size_t k = 0; k < runs.size(); ++k) {
      first_position[k] =
          runs[k].parent < 0 ? token_position(step.forest, runs[k].begin) : first_position[runs[k].parent];
    }
    for (const Placement& placement : micro_batches[m].trajectories) {
      const auto terms = step.terms.row(placement.trajectory);
      // A later term's edge starts here or below.
      if (!terms.empty() && terms.back().position > first_position[placement.run]) result[m] = true;
    }
  }
  return result;
}

}  // namespace espalier
