// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/batch.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/engine/part.h"
#include "espalier/ops/paths.h"
#include "espalier/runtime/device.h"
#include "espalier/tree/layout.h"

namespace espalier {
namespace {

template <typename T>
at::Tensor to_tensor(const std::vector<T>& values, at::ScalarType dtype) {
  return at::from_blob(const_cast<T*>(values.data()), {static_cast<int64_t>(values.size())},
                       at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value))
      .to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

// Of the tokens of a micro-batch [T, ...] those of the part that the batch has.
at::Tensor own_rows(const Batch& batch, const at::Tensor& values) {
  if (!batch.part) return values;
  return values.index_select(0, to_tensor(batch.part->tokens(), at::kLong));
}

// The terms of a micro-batch on the host, before they become tensors.
struct HostTerms {
  std::vector<int64_t> row;         // source token of the term's edge
  std::vector<int64_t> target;      // predicted token id
  std::vector<int64_t> token;       // predicted token of the batch; -1: in a child
  std::vector<double> temperature;  // Loss::logit_temperature
  std::vector<double> coefficient;
  std::vector<std::vector<double>> columns;  // in the order of Objective::columns()
  // K per term, in the order of the terms: the edges to the reference's most likely tokens.
  std::vector<int64_t> topk_row, topk_target;
  std::vector<std::vector<int64_t>> part_terms;  // by part of a mix
  std::vector<double> topk_ref_logprobs;
  bool any = false;  // whether any rank has terms

  int64_t num_terms() const { return static_cast<int64_t>(coefficient.size()); }
};

// Appends the data of the token with this flat index. In a mix, terms of objectives that do not read them
// repeat their own edge K times.
void append_topk(const Trajectories& trajectories, int64_t flat, bool is_read, HostTerms* host) {
  const int64_t width = trajectories.ref_topk;
  for (int64_t i = flat * width; i < (flat + 1) * width; ++i) {
    host->topk_row.push_back(host->row.back());
    host->topk_target.push_back(is_read ? trajectories.ref_topk_ids[i] : trajectories.input_ids[flat]);
    host->topk_ref_logprobs.push_back(is_read ? trajectories.ref_topk_logprobs[i] : 0);
  }
}

// Gathers the terms whose edge starts in the micro-batch, or in the part of it that the batch has.
HostTerms gather_terms(const Step& step, const MicroBatch& micro_batch, const Layout& layout,
                       const Loss& loss, Batch* batch) {
  const Trajectories& trajectories = loss.trajectories();
  const std::vector<TermColumn> read = loss.columns();
  const bool reads_topk = loss.reads_topk();
  HostTerms host;
  if (loss.is_mix()) host.part_terms.resize(loss.num_parts());
  host.columns.resize(read.size());
  const auto place = [&](int64_t token) { return batch->part ? batch->part->place(token) : token; };
  for (const Placement& placement : micro_batch.trajectories) {
    const TermRange range = terms_of(step, micro_batch, placement);
    if (range.begin == range.end) continue;
    host.any = true;
    const int64_t row = step.rows[placement.trajectory];
    const int64_t part = loss.part_of(row);
    const double temperature = loss.logit_temperature(row);
    const std::vector<int64_t> path = path_tokens(layout, placement.run);
    const int64_t first = layout.position_ids[path.front()], size = static_cast<int64_t>(path.size());
    for (int64_t index = range.begin; index < range.end; ++index) {
      const Term& term = step.terms.values[index];
      const int64_t source = term.position - 1 - first;
      const int64_t flat = trajectories.offsets[row] + term.position;
      if (place(path[source]) < 0) continue;
      host.row.push_back(place(path[source]));
      const int32_t target = trajectories.target(flat);
      const bool is_on_path = source + 1 < size && target == trajectories.input_ids[flat];
      host.target.push_back(target);
      host.token.push_back(is_on_path ? place(path[source + 1]) : -1);
      host.temperature.push_back(temperature);
      host.coefficient.push_back(term.coefficient);
      for (size_t i = 0; i < read.size(); ++i) {
        host.columns[i].push_back(term_column(step, loss, read[i], placement.trajectory, index));
      }
      if (reads_topk) append_topk(trajectories, flat, loss.part(part).reads_topk(), &host);
      if (loss.is_mix()) host.part_terms[part].push_back(host.num_terms() - 1);
      batch->term_token.push_back(flat);
      batch->term_index.push_back(index);
    }
  }
  return host;
}

// Queries to the LM head: log-probabilities of targets at rows.
struct HeadQueries {
  std::vector<int64_t> row, target, token;  // of HostTerms
  std::vector<double> temperature;

  // The edges of terms, then those to the reference's most likely tokens.
  // Without terms the first row to the first token, if other ranks have terms.
  explicit HeadQueries(const HostTerms& terms)
      : row(terms.row), target(terms.target), token(terms.token), temperature(terms.temperature) {
    if (row.empty() && terms.any) row = target = {0};
    row.insert(row.end(), terms.topk_row.begin(), terms.topk_row.end());
    target.insert(target.end(), terms.topk_target.begin(), terms.topk_target.end());
    token.resize(row.size(), -1);
    temperature.resize(row.size(), 1);
  }
};

// The order of queries by row, then by target and temperature. Rows are tokens of the batch; most have few
// queries.
std::vector<int64_t> queries_in_order(const HeadQueries& queries, int64_t num_tokens) {
  std::vector<int64_t> order(queries.row.size());
  // Counting sort by row: end[row] is the index of the row's next query, finally the end of its queries.
  std::vector<int64_t> end(num_tokens);
  for (const int64_t row : queries.row) ++end[row];
  std::exclusive_scan(end.begin(), end.end(), end.begin(), int64_t{0});
  for (size_t q = 0; q < order.size(); ++q) order[end[queries.row[q]]++] = static_cast<int64_t>(q);
  int64_t begin = 0;
  for (const int64_t row_end : end) {
    std::sort(order.begin() + begin, order.begin() + row_end, [&](int64_t a, int64_t b) {
      return std::tuple(queries.target[a], queries.temperature[a], a) <
             std::tuple(queries.target[b], queries.temperature[b], b);
    });
    begin = row_end;
  }
  return order;
}

// Merges queries with equal row, token id and temperature into edges.
void set_edges(const HostTerms& terms, int64_t num_tokens, Batch* batch) {
  const HeadQueries queries(terms);
  const std::vector<int64_t> order = queries_in_order(queries, num_tokens);
  const auto key = [&](int64_t q) {
    return std::tuple(queries.row[q], queries.target[q], queries.temperature[q]);
  };
  std::vector<int64_t> logit_rows, edge_row, edge_target, query_edge(order.size());
  std::vector<double> edge_temperature;
  for (size_t k = 0; k < order.size(); ++k) {
    const int64_t q = order[k];
    if (k == 0 || key(order[k - 1]) != key(q)) {
      if (logit_rows.empty() || logit_rows.back() != queries.row[q]) logit_rows.push_back(queries.row[q]);
      edge_row.push_back(static_cast<int64_t>(logit_rows.size()) - 1);
      edge_target.push_back(queries.target[q]);
      edge_temperature.push_back(queries.temperature[q]);
      batch->edge_token.push_back(queries.token[q]);
    }
    query_edge[q] = static_cast<int64_t>(edge_row.size()) - 1;
  }
  batch->logit_rows = to_tensor(logit_rows, at::kLong);
  batch->edge_row = to_tensor(edge_row, at::kLong);
  batch->edge_target = to_tensor(edge_target, at::kLong);
  if (std::ranges::any_of(edge_temperature, [](double value) { return value != 1; }))
    batch->edge_temperature = to_tensor(edge_temperature, at::kDouble);
  const at::Tensor edges = to_tensor(query_edge, at::kLong);
  batch->term_edge = edges.slice(0, 0, terms.num_terms());
  if (!terms.topk_row.empty()) {
    batch->topk_edge = edges.slice(0, terms.num_terms()).view({terms.num_terms(), -1});
    batch->terms.topk_ref_logprobs =
        to_tensor(terms.topk_ref_logprobs, at::kDouble).view({terms.num_terms(), -1});
  }
}

void set_context(std::span<const ContextBlock> blocks, Batch* batch) {
  std::vector<int64_t> numbers, positions;
  for (const ContextBlock& block : blocks) {
    if (batch->ancestors.empty() || batch->ancestors.back() != block.ancestor) {
      batch->ancestors.push_back(block.ancestor);
    }
    numbers.insert(numbers.end(), {static_cast<int64_t>(batch->ancestors.size()) - 1, block.column_begin,
                                   block.column_end, block.row_begin, block.row_end});
    positions.push_back(block.position);
  }
  batch->context_positions = to_tensor(positions, at::kLong);
  batch->context_blocks = to_tensor(numbers, at::kLong).view({-1, 5});
}

std::shared_ptr<const NodeStructure> nodes_of(const Step& step, int64_t index, const Layout& layout) {
  const MicroBatch& micro_batch = step.plan.micro_batches[index];
  NodeStructure nodes = make_node_structure(layout.run_begin, layout.run_parent);
  const auto cuts = step.cuts.row(index);
  nodes.cuts.assign(cuts.begin(), cuts.end());
  size_t root = 0;
  for (int64_t n = 0; micro_batch.parent >= 0 && n < nodes.num_nodes(); ++n) {
    if (nodes.parent[n] >= 0) continue;
    const auto above = step.cuts.row(micro_batch.parent);
    const auto cut = std::ranges::lower_bound(above, micro_batch.context_runs[root++]);
    nodes.prev[nodes.begin[n]] = detail::continues(cut - above.begin());
  }
  return std::make_shared<const NodeStructure>(std::move(nodes));
}

/// By run of a micro-batch: the number of trajectories placed there that pass it, and one of them.
struct RunTrajectories {
  std::vector<int64_t> count;
  std::vector<int64_t> any;
};

RunTrajectories trajectories_of_runs(const MicroBatch& micro_batch) {
  RunTrajectories result{std::vector<int64_t>(micro_batch.runs.size()),
                         std::vector<int64_t>(micro_batch.runs.size(), -1)};
  for (const Placement& placement : micro_batch.trajectories) {
    ++result.count[placement.run];
    result.any[placement.run] = placement.trajectory;
  }
  for (size_t k = micro_batch.runs.size(); k-- > 0;) {  // a run comes after its parent
    const int64_t parent = micro_batch.runs[k].parent;
    if (parent < 0) continue;
    result.count[parent] += result.count[k];
    if (result.any[parent] < 0) result.any[parent] = result.any[k];
  }
  return result;
}

/// Of the tokens of a micro-batch, and of those that reach the LM head.
std::shared_ptr<const accumulating::RowAdapters> adapters_of(const Step& step, const MicroBatch& micro_batch,
                                                             const Layout& layout,
                                                             const at::Tensor& logit_rows) {
  if (step.adapters.empty()) return nullptr;
  std::vector<accumulating::AdapterMapsPtr> run_maps;
  for (const int64_t trajectory : trajectories_of_runs(micro_batch).any)
    run_maps.push_back(step.adapters[trajectory]);
  const std::span rows(logit_rows.const_data_ptr<int64_t>(), logit_rows.numel());
  std::vector<int64_t> head_begins;
  for (const int64_t begin : layout.run_begin)
    head_begins.push_back(std::ranges::lower_bound(rows, begin) - rows.begin());
  return std::make_shared<const accumulating::RowAdapters>(
      run_maps, std::vector<std::vector<int64_t>>{layout.run_begin, head_begins});
}

}  // namespace

double term_column(const Step& step, const Loss& loss, TermColumn column, int64_t k, int64_t index) {
  const int64_t position = step.terms.values[index].position;
  const bool is_shared = column == TermColumn::kAdvantage && step.sharers.num_rows() > 0;
  if (!is_shared) return loss.column(column, step.rows[k], position);
  double sum = 0;
  const auto sharers = step.sharers.row(index);
  for (const int64_t sharer : sharers) sum += loss.column(column, step.rows[sharer], position);
  return sum / static_cast<double>(sharers.size());
}

Batch make_batch(const Step& step, int64_t index, const Loss& loss) {
  RECORD_USER_SCOPE("batch");
  Batch batch;
  const MicroBatch& micro_batch = step.plan.micro_batches.at(index);
  const Layout layout = make_micro_batch_layout(step.forest, micro_batch);
  if (step.context_group != nullptr) batch.part = std::make_shared<const BatchPart>(step, index, layout);
  const HostTerms terms = gather_terms(step, micro_batch, layout, loss, &batch);
  batch.input_ids = own_rows(batch, to_tensor(layout.input_ids, at::kLong));
  batch.position_ids = own_rows(batch, to_tensor(layout.position_ids, at::kLong));
  batch.subtree_end = to_tensor(batch.part ? batch.part->subtree_ends() : layout.subtree_end, at::kInt);
  if (!batch.part) batch.nodes = nodes_of(step, index, layout);
  set_edges(terms, batch.num_tokens(), &batch);
  batch.adapters = adapters_of(step, micro_batch, layout, batch.logit_rows);
  if (micro_batch.parent >= 0) set_context(step.context.row(index), &batch);
  for (const std::vector<int64_t>& part_terms : terms.part_terms) {
    batch.part_terms.push_back(to_tensor(part_terms, at::kLong));
  }
  batch.terms.coefficient = to_tensor(terms.coefficient, at::kDouble);
  for (const std::vector<double>& column : terms.columns) {
    batch.terms.columns.push_back(to_tensor(column, at::kDouble));
  }
  return batch;
}

Batch to_device(Batch batch, at::Device device) {
  std::vector<at::Tensor*> members = {&batch.input_ids,  &batch.position_ids,     &batch.subtree_end,
                                      &batch.logit_rows, &batch.edge_row,         &batch.edge_target,
                                      &batch.term_edge,  &batch.terms.coefficient};
  for (at::Tensor& column : batch.terms.columns) members.push_back(&column);
  for (at::Tensor& part : batch.part_terms) members.push_back(&part);
  for (at::Tensor* member : {&batch.routes, &batch.multiplicity, &batch.topk_edge, &batch.edge_temperature,
                             &batch.terms.topk_ref_logprobs}) {
    if (member->defined()) members.push_back(member);
  }
  std::vector<at::Tensor> host;
  for (const at::Tensor* member : members) host.push_back(*member);
  const std::vector<at::Tensor> uploaded = upload(host, device);
  for (size_t i = 0; i < uploaded.size(); ++i) *members[i] = uploaded[i];
  return batch;
}

void set_router_inputs(const Step& step, int64_t index, const Trajectories& trajectories,
                       const RouterShape& routers, Batch* batch) {
  const MicroBatch& micro_batch = step.plan.micro_batches.at(index);
  const RunTrajectories passing = trajectories_of_runs(micro_batch);
  const int64_t width = trajectories.routes_per_token;
  std::vector<double> multiplicity;
  std::vector<int64_t> routes;
  for (size_t k = 0; k < micro_batch.runs.size(); ++k) {
    const Run& run = micro_batch.runs[k];
    ESPALIER_ASSERT(passing.any[k] >= 0);
    multiplicity.insert(multiplicity.end(), run.end - run.begin, static_cast<double>(passing.count[k]));
    if (width == 0) continue;
    const int64_t row = step.rows[passing.any[k]];
    const int64_t first = trajectories.offsets[row] + token_position(step.forest, run.begin);
    const auto run_routes = recorded_routes(trajectories, first, run.end - run.begin, routers);
    routes.insert(routes.end(), run_routes.begin(), run_routes.end());
  }
  batch->multiplicity = own_rows(*batch, at::tensor(multiplicity, at::kDouble));
  if (batch->part && batch->part->is_stand_in()) batch->multiplicity.zero_();
  if (width > 0) batch->routes = own_rows(*batch, at::tensor(routes, at::kLong).view({-1, width}));
}

}  // namespace espalier
