// SPDX-License-Identifier: Apache-2.0
// Forward passes of a step without gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <memory>
#include <vector>

#include "espalier/distributed/group.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/engine.h"
#include "espalier/engine/forward.h"
#include "espalier/engine/order.h"
#include "espalier/model/gradient_accumulation.h"

namespace espalier {

/// Keeps weights upcast where several micro-batches run.
std::unique_ptr<accumulating::UpcastWeights> upcast_weights(const std::vector<bool>& runs);

/// The batch of a micro-batch on the model's device, with what its routers are told.
Batch batch_for(const Model& model, const Step& step, int64_t m, const Loss& loss);

/// What a pass without gradients runs, and what of routers it sums; null: nothing.
struct LogprobPass {
  const Model& model;
  const Step& step;
  const Loss& loss;
  std::vector<bool> runs;  // of the micro-batches; those above them run too
  c10::intrusive_ptr<RouterStatistics> router_statistics{};
  Entropies entropies = Entropies::kNone;  // as of ForwardOptions
};

/// Of the terms of a batch [M], float64, what a forward pass gives for its edges [E].
inline at::Tensor values_of_terms(const Batch& batch, const at::Tensor& edge_values) {
  return edge_values.to(at::kDouble).index_select(0, batch.term_edge);
}

/// Values that a forward pass gave of terms [M], in the order of the device (runtime/device.h: download), and
/// where they belong.
struct TermValues {
  std::vector<int64_t> place;
  at::Tensor values;

  /// Once the device has done it all. Each place has `offset` more than the value.
  template <class T>
  void write(std::vector<T>* to, T offset = 0) const {
    const T* value = values.const_data_ptr<T>();
    for (size_t k = 0; k < place.size(); ++k) (*to)[place[k]] = value[k] + offset;
  }
};

/// Of the micro-batches in `runs`, with those above them, the ones of this rank: every R-th root, and what is
/// below it. Throws RankError unless all ranks have the same step.
std::vector<bool> part_of_rank(const Step& step, std::vector<bool> runs, const Group& group);

/// Forward passes without gradients. Calls visit(m, batch, forwarded) for micro-batches with terms, and
/// entered(m) for all.
template <class Visit, class Entered>
void for_each_logprobs(const LogprobPass& pass, const Visit& visit, const Entered& entered) {
  const at::NoGradGuard no_grad;
  const std::vector<bool> with_readers = micro_batches_with_readers(pass.step, pass.runs);
  std::vector<std::unique_ptr<ContextFrame>> frames(pass.runs.size());
  const auto enter = [&](int64_t m) {
    const Batch batch = batch_for(pass.model, pass.step, m, pass.loss);
    std::vector<ContextFrame*> ancestors;
    for (const int64_t ancestor : batch.ancestors) ancestors.push_back(frames[ancestor].get());
    const bool head = batch.num_logit_rows() > 0;
    const ForwardResult forwarded = forward(pass.model, batch, ancestors,
                                            {.keep_context = with_readers[m],
                                             .head = head,
                                             .entropies = pass.entropies,
                                             .router_statistics = pass.router_statistics});
    if (with_readers[m]) frames[m] = std::make_unique<ContextFrame>(forwarded.context, false);
    if (head) visit(m, batch, forwarded);
    entered(m);
  };
  walk(pass.step, pass.runs, enter, [&](int64_t m) { frames[m].reset(); });
}

/// The same of the micro-batches with loss, the part of this rank, whose progress is told. Returns how many
/// tokens were encoded.
template <class Visit>
int64_t for_each_logprobs(const Model& model, const Step& step, const Loss& loss, Entropies entropies,
                          const MicroBatchProgress& progress, const Visit& visit,
                          const Group& group = alone()) {
  const std::vector<bool> runs = part_of_rank(step, micro_batches_with_loss(step), group);
  const auto upcast = upcast_weights(runs);
  const auto total = static_cast<int64_t>(runs.size());
  int64_t done = 0, tokens = 0;
  for_each_logprobs({model, step, loss, runs, {}, entropies}, visit, [&](int64_t m) {
    tokens += step.plan.micro_batches[m].num_tokens;
    if (progress) progress(++done, total);
  });
  if (progress && done < total) progress(total, total);
  return tokens;
}

}  // namespace espalier
