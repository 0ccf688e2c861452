#include "espalier/train/engine.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "espalier/base/check.h"
#include "espalier/ops/edge_logprobs.h"
#include "espalier/ops/tree_attention.h"

namespace espalier {

at::Tensor forward_edges(const Decoder& decoder, const Batch& batch) {
  const auto attention = [&batch](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  double softmax_scale) {
    return tree_attention(q, k, v, batch.subtree_end, softmax_scale);
  };
  const at::Tensor hidden = decoder.forward(batch.input_ids, batch.position_ids, attention);
  return edge_logprobs(hidden.index_select(0, batch.head_rows), decoder.lm_head_weight(), batch.edge_row,
                       batch.edge_target);
}

Gradients::Gradients(const Decoder& decoder) : decoder_(&decoder), sums_(decoder.parameters().size()) {
  zero();
}

void Gradients::zero() {
  for (const Parameter& parameter : decoder_->parameters())
    at::Tensor(parameter.value).mutable_grad().reset();
  for (at::Tensor& sum : sums_) sum.reset();
}

void Gradients::collect() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < sums_.size(); ++i) {
    at::Tensor& gradient = at::Tensor(decoder_->parameters()[i].value).mutable_grad();
    if (!gradient.defined()) continue;
    if (!sums_[i].defined()) {
      sums_[i] = gradient.scalar_type() == at::kBFloat16 ? gradient.to(at::kFloat) : gradient;
    } else {
      sums_[i].add_(gradient);
    }
    gradient.reset();
  }
}

StepResult forward_backward(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                            const ObjectiveOptions& objective, const Advantages* advantages,
                            Gradients* gradients, const MicroBatchProgress& progress) {
  StepResult result;
  result.flat_tokens = step.flat_tokens();
  result.tree_tokens = step.forest.tree_tokens();
  const int64_t total = static_cast<int64_t>(step.plan.micro_batches.size());
  for (int64_t index = 0; index < total; ++index) {
    const MicroBatch& micro_batch = step.plan.micro_batches[index];
    const Batch batch = make_batch(trajectories, step, micro_batch, objective, advantages);
    if (batch.num_terms() > 0) {
      const at::Tensor logprobs =
          forward_edges(decoder, batch).to(at::kDouble).index_select(0, batch.term_edge);
      const ObjectiveValue value = objective_value(objective, logprobs, batch.terms);
      result.loss += value.loss.item<double>();
      torch::autograd::backward({value.loss}, {});
      gradients->collect();
      result.work += {batch.num_tokens(), micro_batch.num_pairs, batch.num_head_rows()};
      result.terms += batch.num_terms();
      result.clipped_terms += value.clipped_terms;
      result.ratio_sum += value.ratio_sum;
      result.mismatch_kl_sum += value.mismatch_kl_sum;
    }
    if (progress) progress(index + 1, total);
  }
  return result;
}

void compute_logprobs(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                      std::vector<double>* logprobs, const MicroBatchProgress& progress) {
  const at::NoGradGuard no_grad;
  const ObjectiveOptions objective;  // sft: nothing but the tokens is read
  const int64_t total = static_cast<int64_t>(step.plan.micro_batches.size());
  for (int64_t index = 0; index < total; ++index) {
    const Batch batch = make_batch(trajectories, step, step.plan.micro_batches[index], objective, nullptr);
    if (batch.num_terms() > 0) {
      const at::Tensor values =
          forward_edges(decoder, batch).to(at::kDouble).index_select(0, batch.term_edge).contiguous();
      const double* value = values.const_data_ptr<double>();
      for (int64_t m = 0; m < batch.num_terms(); ++m) (*logprobs)[batch.term_token[m]] = value[m];
    }
    if (progress) progress(index + 1, total);
  }
}

}  // namespace espalier
