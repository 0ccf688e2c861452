// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/encoded_prompts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/config/layer_spec.h"
#include "espalier/engine/forward.h"
#include "espalier/plan/partition.h"
#include "espalier/runtime/device.h"
#include "espalier/tree/layout.h"

namespace espalier {
namespace {

/// The run of a micro-batch at whose end a prompt ends.
struct PromptEnd {
  int64_t micro_batch = -1, run = -1;
};

std::vector<PromptEnd> prompt_ends(const Step& step) {
  std::vector<PromptEnd> ends(step.rows.size());
  for (size_t m = 0; m < step.plan.micro_batches.size(); ++m) {
    const MicroBatch& micro_batch = step.plan.micro_batches[m];
    for (const Placement& placement : micro_batch.trajectories) {
      const int64_t end = step.forest.node_begin[step.forest.end_node[placement.trajectory] + 1];
      if (micro_batch.runs[placement.run].end == end) {
        ends[placement.trajectory] = {static_cast<int64_t>(m), placement.run};
      }
    }
  }
  for (const PromptEnd& end : ends) ESPALIER_ASSERT(end.micro_batch >= 0);
  return ends;
}

/// Step::cuts with the runs at whose ends prompts end added, so that states are kept there as well.
Csr<int64_t> with_prompt_ends(const Csr<int64_t>& cuts, std::span<const PromptEnd> ends) {
  std::vector<std::vector<int64_t>> rows;
  for (int64_t m = 0; m < cuts.num_rows(); ++m) rows.emplace_back(cuts.row(m).begin(), cuts.row(m).end());
  for (const PromptEnd& end : ends) rows[end.micro_batch].push_back(end.run);
  Csr<int64_t> all;
  for (std::vector<int64_t>& row : rows) {
    std::ranges::sort(row);
    row.erase(std::unique(row.begin(), row.end()), row.end());
    all.push_row(row);
  }
  return all;
}

/// The keys on the path to `end`, from its root.
std::vector<KeyRange> path_of(const Step& step, const ContextIndex& index, PromptEnd end) {
  std::vector<KeyRange> path;
  while (end.micro_batch >= 0) {
    const MicroBatch& micro_batch = step.plan.micro_batches[end.micro_batch];
    int64_t run = end.run, root = run;
    for (; run >= 0; root = run, run = micro_batch.runs[run].parent) {
      const auto begins = index.run_begin.row(end.micro_batch);
      path.push_back({end.micro_batch, begins[run], begins[run + 1],
                      token_position(step.forest, micro_batch.runs[run].begin)});
    }
    if (micro_batch.parent < 0) break;
    const auto roots = index.root_runs.row(end.micro_batch);
    const auto place = std::ranges::lower_bound(roots, root) - roots.begin();
    end = {micro_batch.parent, micro_batch.context_runs[place]};
  }
  std::ranges::reverse(path);
  return path;
}

at::Tensor to_device(const std::vector<int64_t>& numbers, at::Device device) {
  return upload({at::tensor(numbers, at::kLong)}, device).front();
}

/// The forward pass of one micro-batch without gradients.
struct Pass {
  const Decoder& decoder;
  const Batch& batch;
  std::span<ContextFrame* const> ancestors;
  at::Tensor rows;  // rows of the last layer's hidden states to compute

  struct Result {
    at::Tensor hidden;  // of `rows`; undefined if `rows` is empty
    std::vector<LayerContext> context;
  };

  Result run() const {
    const TreeSequence sequence(batch, ancestors);
    const PositionTables tables = decoder.position_tables(batch.position_ids);
    Result result;
    at::Tensor hidden = decoder.embed(batch.input_ids);
    for (int64_t i = 0; i < decoder.num_layers(); ++i) {
      const bool last = i + 1 == decoder.num_layers();
      LayerOutput output = decoder.layer(i, hidden, tables, sequence, last ? rows : at::Tensor());
      hidden = std::move(output.hidden);
      result.context.push_back(std::move(output.context));
    }
    if (rows.numel() > 0) result.hidden = hidden;
    return result;
  }
};

}  // namespace

std::vector<bool> recurrent_layers(const DecoderConfig& config) {
  std::vector<bool> recurrent;
  for (const LayerSpec& layer : config.layers) {
    recurrent.push_back(!std::holds_alternative<AttentionSpec>(layer.mixer));
  }
  return recurrent;
}

EncodedPrompts::EncodedPrompts(const Decoder& decoder, const Trajectories& prompts, std::vector<int64_t> rows,
                               int64_t token_budget, const MicroBatchProgress& progress) {
  const at::NoGradGuard no_grad;
  Step step = make_step(
      prompts, std::move(rows),
      {.plan = {.strategy = Strategy::kPartition, .token_budget = token_budget}, .terms = TermChoice::kAll});
  const std::vector<PromptEnd> ends = prompt_ends(step);
  step.cuts = with_prompt_ends(step.cuts, ends);
  tree_tokens_ = step.forest.tree_tokens();
  const ContextIndex index(step.plan.micro_batches);
  for (size_t p = 0; p < ends.size(); ++p) {
    sizes_.push_back(step.forest.trajectory_size(static_cast<int64_t>(p)));
    paths_.push_row(path_of(step, index, ends[p]));
  }

  const auto num_micro_batches = static_cast<int64_t>(step.plan.micro_batches.size());
  const Loss loss(prompts, ObjectiveOptions{});  // sft reads only the tokens
  std::vector<std::unique_ptr<ContextFrame>> frames;
  std::vector<at::Tensor> hidden;  // at the cuts of each micro-batch, in the order of step.cuts
  for (int64_t m = 0; m < num_micro_batches; ++m) {
    const Batch batch = espalier::to_device(make_batch(step, m, loss), decoder.device());
    std::vector<ContextFrame*> ancestors;
    for (const int64_t ancestor : batch.ancestors) ancestors.push_back(frames[ancestor].get());
    std::vector<int64_t> last_tokens;
    for (const int64_t node : batch.nodes->cuts) last_tokens.push_back(batch.nodes->begin[node + 1] - 1);
    Pass::Result result = Pass{decoder, batch, ancestors, to_device(last_tokens, decoder.device())}.run();
    if (result.hidden.defined()) hidden.push_back(std::move(result.hidden));
    frames.push_back(std::make_unique<ContextFrame>(result.context, /*offload=*/false));
    contexts_.push_back(std::move(result.context));
    if (progress) progress(m + 1, num_micro_batches);
  }

  // Select the ends of prompts among all cuts.
  std::vector<int64_t> cut_of_prompt;
  for (const PromptEnd& end : ends) {
    const auto cuts = step.cuts.row(end.micro_batch);
    cut_of_prompt.push_back(step.cuts.offsets[end.micro_batch] +
                            (std::ranges::lower_bound(cuts, end.run) - cuts.begin()));
  }
  const at::Tensor end_index = to_device(cut_of_prompt, decoder.device());
  last_hidden_ = at::cat(hidden).index_select(0, end_index);
  states_.resize(decoder.num_layers());
  const std::vector<bool> recurrent = recurrent_layers(decoder.config());
  for (int64_t layer = 0; layer < decoder.num_layers(); ++layer) {
    if (!recurrent[layer]) continue;
    for (size_t i = 0; i < contexts_.front()[layer].size(); ++i) {
      std::vector<at::Tensor> parts;
      for (const auto& context : contexts_) parts.push_back(context[layer][i]);
      states_[layer].push_back(at::cat(parts).index_select(0, end_index));
    }
    for (auto& context : contexts_) context[layer].clear();
  }
}

}  // namespace espalier
