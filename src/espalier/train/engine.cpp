#include "espalier/train/engine.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <memory>

#include "espalier/base/check.h"
#include "espalier/model/parameter_ops.h"
#include "espalier/ops/device.h"
#include "espalier/train/memory.h"

namespace espalier {

namespace {

/// Visits the micro-batches that run, those with loss in them or below: enter in the order of the plan, leave
/// after all descendants have been left.
template <class Enter, class Leave>
void walk(const Step& step, const std::vector<bool>& with_loss, const Enter& enter, const Leave& leave) {
  const auto& micro_batches = step.plan.micro_batches;
  std::vector<int64_t> open;
  const auto close_until = [&](int64_t parent) {
    while (!open.empty() && open.back() != parent) {
      leave(open.back());
      open.pop_back();
    }
  };
  for (int64_t m = 0; m < static_cast<int64_t>(micro_batches.size()); ++m) {
    if (!with_loss[m]) continue;
    close_until(micro_batches[m].parent);
    enter(m);
    open.push_back(m);
  }
  close_until(-1);
}

/// Of each micro-batch: does another one that runs inherit from it?
std::vector<bool> micro_batches_with_readers(const Step& step, const std::vector<bool>& with_loss) {
  std::vector<bool> result(with_loss.size());
  for (size_t m = 0; m < with_loss.size(); ++m) {
    const int64_t parent = step.plan.micro_batches[m].parent;
    if (with_loss[m] && parent >= 0) result[parent] = true;
  }
  return result;
}

/// Keeps weights widened where several micro-batches run.
std::unique_ptr<summing::WidenedWeights> widened_weights(const std::vector<bool>& with_loss) {
  if (std::ranges::count(with_loss, true) < 2) return nullptr;
  return std::make_unique<summing::WidenedWeights>();
}

// Places in PendingStep::sums.
enum Sum : int64_t { kLoss, kClippedTerms, kRatioSum, kMismatchKlSum, kNumSums };

/// A micro-batch between its forward and its backward pass.
struct Open {
  Batch batch;
  at::Tensor loss;  // in the graph; undefined without terms and while activations are not kept
  std::vector<LayerContext> context;    // in the graph; likewise
  std::unique_ptr<ContextFrame> frame;  // null without readers
  MicroBatchMeasure measure;
  Stopwatch stopwatch;

  explicit Open(at::Device device) : stopwatch(device) {}

  /// Adds the time and the peak memory of what `body` does to the measure.
  template <class Body>
  void measured(at::Device device, const Body& body) {
    reset_peak_tensor_memory(device);
    stopwatch.start();
    body();
    stopwatch.stop();
    measure.peak_bytes = std::max(measure.peak_bytes, peak_tensor_memory(device));
  }
};

class StepRun {
 public:
  StepRun(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
          const ObjectiveOptions& objective, const Advantages* advantages)
      : decoder_(decoder),
        device_(decoder.device()),
        trajectories_(trajectories),
        step_(step),
        objective_(objective),
        advantages_(advantages),
        with_loss_(micro_batches_with_loss(step)),
        with_readers_(micro_batches_with_readers(step, with_loss_)),
        widened_(widened_weights(with_loss_)),
        open_(step.plan.micro_batches.size()) {
    pending_.sums = at::zeros({kNumSums}, at::TensorOptions(device_).dtype(at::kDouble));
    pending_.result.flat_tokens = step.flat_tokens();
    pending_.result.tree_tokens = step.forest.tree_tokens();
  }

  void enter(int64_t m) {
    RECORD_USER_SCOPE(fmt::format("micro-batch {} forward", m));
    open_[m] = std::make_unique<Open>(device_);
    open_[m]->measure.micro_batch = m;
    open_[m]->measured(device_, [&] { run_forward(m); });
  }

  void leave(int64_t m) {
    RECORD_USER_SCOPE(fmt::format("micro-batch {} backward", m));
    Open& open = *open_[m];
    open.measured(device_, [&] {
      if (!open.loss.defined() && open.context.empty()) forward_with_grad(m);
      backward(m);
    });
    pending_.result.measured.push_back(open.measure);
    pending_.stopwatches.push_back(std::move(open.stopwatch));
    open_[m].reset();
  }

  const std::vector<bool>& with_loss() const { return with_loss_; }
  PendingStep take_pending() { return std::move(pending_); }

 private:
  std::vector<ContextFrame*> ancestors(const Batch& batch) const {
    std::vector<ContextFrame*> frames;
    for (const int64_t ancestor : batch.ancestors) frames.push_back(open_[ancestor]->frame.get());
    return frames;
  }

  Work work_of(int64_t m, int64_t head_rows) const {
    return {open_[m]->batch.num_tokens(), step_.plan.micro_batches[m].num_pairs, head_rows};
  }

  void run_forward(int64_t m) {
    Open& open = *open_[m];
    open.batch = to_device(make_batch(trajectories_, step_, m, objective_, advantages_), device_);
    const PlanOptions& options = step_.plan.options;
    if (options.checkpoint_activations == CheckpointActivations::kPiece && with_readers_[m]) {
      const at::NoGradGuard no_grad;
      const Forwarded forwarded =
          forward(decoder_, open.batch, ancestors(open.batch), {.keep_context = true, .head = false});
      open.frame = std::make_unique<ContextFrame>(forwarded.context, options.offload_context);
      for (ContextFrame* frame : ancestors(open.batch)) frame->collect();
      pending_.result.recomputed += work_of(m, 0);
      return;
    }
    forward_with_grad(m);
    if (with_readers_[m]) open.frame = std::make_unique<ContextFrame>(open.context, false);
  }

  void forward_with_grad(int64_t m) {
    Open& open = *open_[m];
    const bool checkpoint_layers = step_.plan.options.checkpoint_activations == CheckpointActivations::kLayer;
    const bool head = open.batch.num_terms() > 0;
    Forwarded forwarded =
        forward(decoder_, open.batch, ancestors(open.batch),
                {.keep_context = with_readers_[m], .checkpoint_layers = checkpoint_layers, .head = head});
    open.context = std::move(forwarded.context);
    StepResult& result = pending_.result;
    const Work work = work_of(m, open.batch.num_head_rows());
    result.work += work;
    if (checkpoint_layers) result.recomputed += work;
    if (!head) return;
    RECORD_USER_SCOPE("objective");
    const at::Tensor logprobs = forwarded.logprobs.to(at::kDouble).index_select(0, open.batch.term_edge);
    const ObjectiveValue value = objective_value(objective_, logprobs, open.batch.terms);
    open.loss = value.loss;
    result.terms += open.batch.num_terms();
    add_to_sum(kLoss, value.loss);
    add_to_sum(kClippedTerms, value.clipped_terms);
    add_to_sum(kRatioSum, value.ratio_sum);
    add_to_sum(kMismatchKlSum, value.mismatch_kl_sum);
  }

  void add_to_sum(Sum sum, const at::Tensor& value) {
    if (value.defined()) pending_.sums.select(0, sum).add_(value.detach());
  }

  void backward(int64_t m) {
    Open& open = *open_[m];
    std::vector<at::Tensor> tensors, gradients;
    if (open.frame) open.frame->append_seeds(open.context, &tensors, &gradients);
    if (open.loss.defined()) {
      tensors.push_back(open.loss);
      gradients.push_back(at::ones_like(open.loss));
    }
    // Held by the graph alone from here on, so that backward frees them as it goes.
    open.frame.reset();
    open.context.clear();
    open.loss.reset();
    if (!tensors.empty()) torch::autograd::backward(tensors, gradients);
    tensors.clear();
    gradients.clear();
    for (ContextFrame* frame : ancestors(open.batch)) frame->collect();
  }

  const Decoder& decoder_;
  at::Device device_;
  const Trajectories& trajectories_;
  const Step& step_;
  const ObjectiveOptions& objective_;
  const Advantages* advantages_;
  std::vector<bool> with_loss_, with_readers_;
  std::unique_ptr<summing::WidenedWeights> widened_;
  std::vector<std::unique_ptr<Open>> open_;
  PendingStep pending_;
};

}  // namespace

double StepResult::measured_seconds() const {
  double seconds = 0;
  for (const MicroBatchMeasure& measure : measured) seconds += measure.seconds;
  return seconds;
}

int64_t StepResult::measured_peak_bytes() const {
  int64_t bytes = 0;
  for (const MicroBatchMeasure& measure : measured) bytes = std::max(bytes, measure.peak_bytes);
  return bytes;
}

PendingStep start_forward_backward(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                                   const ObjectiveOptions& objective, const Advantages* advantages,
                                   const MicroBatchProgress& progress) {
  StepRun run(decoder, trajectories, step, objective, advantages);
  int64_t done = 0;
  const auto total = static_cast<int64_t>(step.plan.micro_batches.size());
  walk(
      step, run.with_loss(), [&](int64_t m) { run.enter(m); },
      [&](int64_t m) {
        run.leave(m);
        if (progress) progress(++done, total);
      });
  if (progress && done < total) progress(total, total);  // those without loss
  return run.take_pending();
}

StepResult finish(PendingStep pending) {
  StepResult result = std::move(pending.result);
  // The copy waits for all that came before it in the stream, backward passes included.
  const at::Tensor sums = pending.sums.cpu();
  const double* sum = sums.const_data_ptr<double>();
  result.loss = sum[kLoss];
  result.clipped_terms = static_cast<int64_t>(sum[kClippedTerms]);
  result.ratio_sum = sum[kRatioSum];
  result.mismatch_kl_sum = sum[kMismatchKlSum];
  for (size_t i = 0; i < result.measured.size(); ++i) {
    result.measured[i].seconds = pending.stopwatches[i].seconds();
  }
  std::ranges::sort(result.measured, {}, &MicroBatchMeasure::micro_batch);
  return result;
}

StepResult forward_backward(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                            const ObjectiveOptions& objective, const Advantages* advantages,
                            const MicroBatchProgress& progress) {
  return finish(start_forward_backward(decoder, trajectories, step, objective, advantages, progress));
}

namespace {

// Log-probabilities of a micro-batch's terms, on their way to the host.
struct TermValues {
  std::vector<int64_t> token;
  at::Tensor values;
};

}  // namespace

void compute_logprobs(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                      std::vector<double>* logprobs, const MicroBatchProgress& progress) {
  const at::NoGradGuard no_grad;
  const ObjectiveOptions objective;  // sft: nothing but the tokens is read
  const std::vector<bool> with_loss = micro_batches_with_loss(step);
  const std::vector<bool> with_readers = micro_batches_with_readers(step, with_loss);
  const auto widened = widened_weights(with_loss);
  const auto total = static_cast<int64_t>(step.plan.micro_batches.size());
  std::vector<std::unique_ptr<ContextFrame>> frames(total);
  std::vector<TermValues> computed;
  int64_t done = 0;
  const auto enter = [&](int64_t m) {
    Batch batch = to_device(make_batch(trajectories, step, m, objective, nullptr), decoder.device());
    std::vector<ContextFrame*> ancestors;
    for (const int64_t ancestor : batch.ancestors) ancestors.push_back(frames[ancestor].get());
    const Forwarded forwarded =
        forward(decoder, batch, ancestors, {.keep_context = with_readers[m], .head = batch.num_terms() > 0});
    if (with_readers[m]) frames[m] = std::make_unique<ContextFrame>(forwarded.context, false);
    if (batch.num_terms() > 0) {
      const at::Tensor values = forwarded.logprobs.to(at::kDouble).index_select(0, batch.term_edge);
      computed.push_back({std::move(batch.term_token), download(values)});
    }
    if (progress) progress(++done, total);
  };
  walk(step, with_loss, enter, [&](int64_t m) { frames[m].reset(); });
  synchronize(decoder.device());
  for (const auto& [tokens, values] : computed) {
    const double* value = values.const_data_ptr<double>();
    for (size_t k = 0; k < tokens.size(); ++k) (*logprobs)[tokens[k]] = value[k];
  }
  if (progress && done < total) progress(total, total);
}

}  // namespace espalier
