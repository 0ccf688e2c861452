// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "espalier/base/check.h"
#include "espalier/engine/logprob_pass.h"
#include "espalier/engine/step_sums.h"
#include "espalier/engine/order.h"
#include "espalier/engine/unit_loss.h"
#include "espalier/model/gradient_accumulation.h"
#include "espalier/plan/load.h"
#include "espalier/runtime/device.h"
#include "espalier/runtime/tensor_memory.h"

namespace espalier {

namespace {

/// Null for a model without routers.
c10::intrusive_ptr<RouterStatistics> router_statistics(const Model& model, const Step& step,
                                                       const Loss& loss) {
  const RouterShape routers = model.routers();
  if (routers.count() == 0) return {};
  const ObjectiveOptions& options = loss.router_options();
  return c10::make_intrusive<RouterStatistics>(
      routers, RouterLossOptions{options.router_aux_loss_coef, options.router_z_loss_coef},
      step.flat_tokens(), model.device());
}

/// Lets the statistics count while it lives.
class Counting {
 public:
  Counting(const c10::intrusive_ptr<RouterStatistics>& statistics, bool counts) : statistics_(statistics) {
    if (statistics_) statistics_->set_counting(counts);
  }
  ~Counting() {
    if (statistics_) statistics_->set_counting(false);
  }
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;

 private:
  const c10::intrusive_ptr<RouterStatistics>& statistics_;
};

/// A micro-batch between its forward and its backward pass.
struct InFlightMicroBatch {
  Batch batch;
  // What its backward pass begins at, in the graph; undefined without terms and while activations are not
  // kept: the loss of token scope and of entropies, and the log-probabilities [E] whose gradients a loss of
  // wider scope gives.
  at::Tensor loss, logprobs;
  at::Tensor hidden;                    // ForwardResult::hidden, likewise
  std::vector<LayerContext> context;    // in the graph; likewise
  std::unique_ptr<ContextFrame> frame;  // null without readers
  MicroBatchMeasure measure;
  Stopwatch stopwatch;

  explicit InFlightMicroBatch(at::Device device) : stopwatch(device) {}

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
  StepRun(const Model& model, const Step& step, const Loss& loss)
      : model_(model),
        device_(model.device()),
        step_(step),
        loss_(loss),
        router_statistics_(router_statistics(model, step, loss)),
        runs_(has_router_losses() ? std::vector<bool>(step.plan.micro_batches.size(), true)
                                  : micro_batches_with_loss(step)),
        with_readers_(micro_batches_with_readers(step, runs_)),
        upcast_(upcast_weights(runs_)),
        in_flight_(step.plan.micro_batches.size()),
        window_pairs_(window_pairs(ContextIndex(step.plan.micro_batches), model.sliding_windows())) {
    if (loss.is_wide()) unit_loss_.emplace(step, loss, device_);
    sums_.emplace(step, loss, device_, unit_loss_ ? &*unit_loss_ : nullptr, &pending_);
  }

  bool needs_logprob_pass() const {
    return (unit_loss_ && unit_loss_->needs_logprob_pass()) ||
           (router_statistics_ && needs_routing_pass(step_, loss_));
  }

  /// Calls entered(m) after each micro-batch.
  template <class Entered>
  void run_logprob_pass(const Entered& entered) {
    RECORD_USER_SCOPE("log-prob pass");
    const auto visit = [&](int64_t m, const Batch& batch, const ForwardResult& forwarded) {
      if (unit_loss_ && unit_loss_->needs_logprob_pass()) {
        unit_loss_->add(batch, values_of_terms(batch, forwarded.logprobs));
      }
      pending_.result.recomputed += work_of(m, batch, batch.num_logit_rows());
    };
    reset_peak_tensor_memory(device_);
    pending_.logprob_pass.emplace(device_).start();
    {
      const Counting counting(router_statistics_, true);
      for_each_logprobs({model_, step_, loss_, runs_, router_statistics_}, visit, entered);
    }
    has_counted_ = true;
    pending_.logprob_pass->stop();
    pending_.result.logprob_pass = {.micro_batch = -1, .peak_bytes = peak_tensor_memory(device_)};
  }

  void enter(int64_t m) {
    RECORD_USER_SCOPE(fmt::format("micro-batch {} forward", m));
    in_flight_[m] = std::make_unique<InFlightMicroBatch>(device_);
    in_flight_[m]->measure.micro_batch = m;
    const Counting counting(router_statistics_, !has_counted_);
    in_flight_[m]->measured(device_, [&] { run_forward(m); });
  }

  void leave(int64_t m) {
    RECORD_USER_SCOPE(fmt::format("micro-batch {} backward", m));
    InFlightMicroBatch& in_flight = *in_flight_[m];
    in_flight.measured(device_, [&] {
      const bool kept = in_flight.loss.defined() || in_flight.logprobs.defined() ||
                        in_flight.hidden.defined() || !in_flight.context.empty();
      if (!kept) forward_with_grad(m);
      backward(m);
    });
    pending_.result.measured.push_back(in_flight.measure);
    pending_.stopwatches.push_back(std::move(in_flight.stopwatch));
    in_flight_[m].reset();
  }

  /// The micro-batches that run.
  const std::vector<bool>& runs() const { return runs_; }

  PendingStep take_pending() {
    if (router_statistics_) {
      pending_.routers = model_.routers();
      pending_.router_values = router_statistics_->values();
    }
    return std::move(pending_);
  }

 private:
  bool has_router_losses() const { return router_statistics_ && router_statistics_->options().any(); }

  std::vector<ContextFrame*> ancestors(const Batch& batch) const {
    std::vector<ContextFrame*> frames;
    for (const int64_t ancestor : batch.ancestors) frames.push_back(in_flight_[ancestor]->frame.get());
    return frames;
  }

  Work work_of(int64_t m, const Batch& batch, int64_t logit_rows) const {
    return {batch.num_tokens(), step_.plan.micro_batches[m].num_pairs, logit_rows, window_pairs_[m]};
  }

  void run_forward(int64_t m) {
    InFlightMicroBatch& in_flight = *in_flight_[m];
    in_flight.batch = batch_for(model_, step_, m, loss_);
    const PlanOptions& options = step_.plan.options;
    if (options.checkpoint_activations == CheckpointActivations::kPiece && with_readers_[m]) {
      const at::NoGradGuard no_grad;
      const ForwardResult forwarded =
          forward(model_, in_flight.batch, ancestors(in_flight.batch),
                  {.keep_context = true, .head = false, .router_statistics = router_statistics_});
      in_flight.frame = std::make_unique<ContextFrame>(forwarded.context, options.offload_context);
      for (ContextFrame* frame : ancestors(in_flight.batch)) frame->collect();
      pending_.result.recomputed += work_of(m, in_flight.batch, 0);
      return;
    }
    forward_with_grad(m);
    if (with_readers_[m]) in_flight.frame = std::make_unique<ContextFrame>(in_flight.context, false);
  }

  void forward_with_grad(int64_t m) {
    InFlightMicroBatch& in_flight = *in_flight_[m];
    const bool checkpoint_layers = step_.plan.options.checkpoint_activations == CheckpointActivations::kLayer;
    const bool head = in_flight.batch.num_terms() > 0;
    ForwardResult forwarded = forward(model_, in_flight.batch, ancestors(in_flight.batch),
                                      {.keep_context = with_readers_[m],
                                       .checkpoint_layers = checkpoint_layers,
                                       .head = head,
                                       .entropies = sums_->entropies(),
                                       .router_statistics = router_statistics_});
    in_flight.context = std::move(forwarded.context);
    in_flight.hidden = std::move(forwarded.hidden);
    StepResult& result = pending_.result;
    const Work work = work_of(m, in_flight.batch, in_flight.batch.num_logit_rows());
    result.work += work;
    if (checkpoint_layers) result.recomputed += work;
    if (!head) return;
    RECORD_USER_SCOPE("objective");
    result.terms += in_flight.batch.num_terms();
    const at::Tensor of_terms = values_of_terms(in_flight.batch, forwarded.logprobs);
    in_flight.loss = sums_->add(in_flight.batch, of_terms, forwarded);
    if (!unit_loss_) return;
    in_flight.logprobs = forwarded.logprobs;
    if (!unit_loss_->needs_logprob_pass()) unit_loss_->add(in_flight.batch, of_terms);
  }

  /// Gradients [E] of the micro-batch's log-probabilities under a loss of wider scope.
  at::Tensor logprob_gradients(int64_t m) {
    const InFlightMicroBatch& in_flight = *in_flight_[m];
    const at::Tensor of_terms = unit_loss_->gradients(m, in_flight.batch);
    sums_->add(unit_loss_->take_values());
    return at::zeros(in_flight.logprobs.sizes(), of_terms.options())
        .index_add_(0, in_flight.batch.term_edge, of_terms)
        .to(in_flight.logprobs.scalar_type());
  }

  void backward(int64_t m) {
    InFlightMicroBatch& in_flight = *in_flight_[m];
    std::vector<at::Tensor> tensors, gradients;
    if (in_flight.frame) in_flight.frame->append_seeds(in_flight.context, &tensors, &gradients);
    if (in_flight.loss.defined()) {
      tensors.push_back(in_flight.loss);
      gradients.push_back(at::ones_like(in_flight.loss));
    }
    if (in_flight.logprobs.defined()) {
      tensors.push_back(in_flight.logprobs);
      gradients.push_back(logprob_gradients(m));
    }
    // Losses of routers are added on the way, and need a pass through every layer.
    if (in_flight.hidden.defined()) {
      tensors.push_back(in_flight.hidden);
      gradients.push_back(at::zeros_like(in_flight.hidden));
    }
    // Held by the graph alone from here on, so that backward frees them as it goes.
    in_flight.frame.reset();
    in_flight.context.clear();
    in_flight.loss.reset();
    in_flight.logprobs.reset();
    in_flight.hidden.reset();
    if (!tensors.empty()) torch::autograd::backward(tensors, gradients);
    tensors.clear();
    gradients.clear();
    for (ContextFrame* frame : ancestors(in_flight.batch)) frame->collect();
  }

  const Model& model_;
  at::Device device_;
  const Step& step_;
  const Loss& loss_;
  c10::intrusive_ptr<RouterStatistics> router_statistics_;
  bool has_counted_ = false;  // before the first forward pass with gradients
  std::vector<bool> runs_, with_readers_;
  std::unique_ptr<accumulating::UpcastWeights> upcast_;
  std::vector<std::unique_ptr<InFlightMicroBatch>> in_flight_;
  std::vector<std::vector<int64_t>> window_pairs_;  // by micro-batch and window of the model
  std::optional<UnitLoss> unit_loss_;               // where some objective's scope is wider than a token
  PendingStep pending_;
  std::optional<StepSums> sums_;  // in pending_
};

}  // namespace

double StepResult::measured_seconds() const {
  double seconds = logprob_pass ? logprob_pass->seconds : 0;
  for (const MicroBatchMeasure& measure : measured) seconds += measure.seconds;
  return seconds;
}

int64_t StepResult::measured_peak_bytes() const {
  int64_t bytes = logprob_pass ? logprob_pass->peak_bytes : 0;
  for (const MicroBatchMeasure& measure : measured) bytes = std::max(bytes, measure.peak_bytes);
  return bytes;
}

PendingStep start_forward_backward(const Model& model, const Step& step, const Loss& loss,
                                   const MicroBatchProgress& progress) {
  StepRun run(model, step, loss);
  const auto num_micro_batches = static_cast<int64_t>(step.plan.micro_batches.size());
  const int64_t total = num_micro_batches * (run.needs_logprob_pass() ? 2 : 1);
  int64_t done = 0;
  const auto advance = [&](int64_t) {
    if (progress) progress(++done, total);
  };
  if (run.needs_logprob_pass()) run.run_logprob_pass(advance);
  walk(
      step, run.runs(), [&](int64_t m) { run.enter(m); },
      [&](int64_t m) {
        run.leave(m);
        advance(m);
      });
  if (progress && done < total) progress(total, total);  // those without loss
  return run.take_pending();
}

StepResult finish(PendingStep pending) {
  StepResult result = std::move(pending.result);
  // The copy waits for all that came before it in the stream, backward passes included.
  const at::Tensor sums = pending.sums.cpu();
  const double* sum = sums.const_data_ptr<double>();
  result.loss = sum[0];
  std::vector<StepMetric> metrics;
  for (size_t i = 0; i < result.metrics.size(); ++i) {
    const auto& [reduction, part, scale] = pending.reduced[i];
    const int64_t count = reduction == Reduction::kMean          ? pending.num_terms[part]
                          : reduction == Reduction::kMeanOfUnits ? pending.num_units[part]
                                                                 : 1;
    if (pending.num_terms[part] == 0) continue;
    const double value = scale * sum[1 + i] / static_cast<double>(std::max<int64_t>(1, count));
    metrics.push_back({std::move(result.metrics[i].name), value});
  }
  result.metrics = std::move(metrics);
  for (size_t i = 0; i < result.measured.size(); ++i) {
    result.measured[i].seconds = pending.stopwatches[i].seconds();
  }
  if (result.logprob_pass) result.logprob_pass->seconds = pending.logprob_pass->seconds();
  if (pending.router_values.defined()) {
    result.routers = RouterStatistics::report(pending.router_values.cpu(), pending.routers);
  }
  std::ranges::sort(result.measured, {}, &MicroBatchMeasure::micro_batch);
  return result;
}

StepResult forward_backward(const Model& model, const Step& step, const Loss& loss,
                            const MicroBatchProgress& progress) {
  return finish(start_forward_backward(model, step, loss, progress));
}

}  // namespace espalier
