// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/engine/logprob_pass.h"
#include "espalier/engine/order.h"
#include "espalier/engine/part.h"
#include "espalier/engine/step_sums.h"
#include "espalier/engine/unit_loss.h"
#include "espalier/model/gradient_accumulation.h"
#include "espalier/plan/loss_work.h"
#include "espalier/runtime/device.h"

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
      step.whole.flat_tokens, model.device());
}

/// The tensors that the backward pass of a micro-batch starts from.
struct BackwardRoots {
  // Undefined without terms. `loss`: of token scope and entropies. `logprobs` [E]: their gradients come from
  // a loss of wider scope.
  at::Tensor loss, logprobs;
  at::Tensor last;                    // ForwardResult::last
  std::vector<LayerContext> context;  // empty without readers
};

/// A micro-batch between its forward and backward pass.
struct InFlightMicroBatch {
  Batch batch;
  std::optional<BackwardRoots> roots;   // set if activations are kept
  std::unique_ptr<ContextFrame> frame;  // null without readers
};

/// A step while its micro-batches run. Counts, sums and measurements are of the passes so far; at the end it
/// is converted into a PendingStep.
class StepExecution {
 public:
  StepExecution(const Model& model, const Step& step, const Loss& loss, const PassEvents& events)
      : model_(model),
        events_(events),
        device_(model.device()),
        step_(step),
        loss_(loss),
        router_statistics_(router_statistics(model, step, loss)),
        active_(has_router_losses() ? std::vector<bool>(step.plan.micro_batches.size(), true)
                                    : micro_batches_with_loss(step)),
        with_readers_(micro_batches_with_readers(step, active_)),
        upcast_(upcast_weights(active_)),
        in_flight_(step.plan.micro_batches.size()),
        window_pairs_(window_pairs(ContextIndex(step.plan.micro_batches), model.sliding_windows())),
        unit_loss_(make_unit_loss(step, loss, device_)),
        sums_(loss, device_, unit_loss_),
        counts_(step) {
    for (Work* work : {&counts_.work, &counts_.recomputed}) {
      work->window_pairs.resize(model.sliding_windows().size());
    }
    walk(step, active_, [](int64_t) {}, [this](int64_t m) { last_ = m; });
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
      counts_.recomputed += work_of(m, batch, batch.num_logit_rows());
    };
    set_counting(true);
    logprob_pass_.emplace(device_).measure(
        [&] { for_each_logprobs({model_, step_, loss_, active_, router_statistics_}, visit, entered); });
    set_counting(false);
    has_all_routers_ = needs_routing_pass(step_, loss_) && events_.routed;
    if (has_all_routers_) events_.routed(router_statistics_->sums());
  }

  void enter(int64_t m) {
    RECORD_USER_SCOPE(fmt::format("micro-batch {} forward", m));
    set_counting(!logprob_pass_);
    meters_.try_emplace(m, device_).first->second.measure([&] { in_flight_[m] = run_forward(m); });
    set_counting(false);
  }

  void leave(int64_t m) {
    RECORD_USER_SCOPE(fmt::format("micro-batch {} backward", m));
    InFlightMicroBatch& in_flight = *in_flight_[m];
    meters_.at(m).measure([&] {
      if (!in_flight.roots) in_flight.roots = forward_with_grad(m, in_flight.batch);
      backward(m);
    });
    in_flight_[m].reset();
  }

  /// By micro-batch, whether it runs.
  const std::vector<bool>& active() const { return active_; }

  PendingStep into_pending() && {
    std::optional<PendingStep::Routers> routers;
    if (router_statistics_)
      routers = PendingStep::Routers{model_.routers(), router_statistics_, has_all_routers_};
    return {counts_, std::move(sums_), std::move(meters_), std::move(logprob_pass_), std::move(routers)};
  }

 private:
  bool has_router_losses() const { return router_statistics_ && router_statistics_->options().any(); }

  /// Enables counting by routers, so that every token of the step is counted once.
  void set_counting(bool counting) {
    if (router_statistics_) router_statistics_->set_counting(counting);
  }

  std::vector<ContextFrame*> ancestors(const Batch& batch) const {
    std::vector<ContextFrame*> frames;
    for (const int64_t ancestor : batch.ancestors) frames.push_back(in_flight_[ancestor]->frame.get());
    return frames;
  }

  Work work_of(int64_t m, const Batch& batch, int64_t logit_rows) const {
    Work work{batch.num_tokens(), step_.plan.micro_batches[m].num_pairs, logit_rows, window_pairs_[m]};
    if (!batch.part) return work;
    // Ranks add up what each has. The first one counts the pairs.
    if (batch.part->is_stand_in()) work.tokens = 0;
    if (batch.num_terms() == 0) work.logit_rows = 0;
    if (step_.context_group->is_first()) return work;
    work.pairs = 0;
    std::ranges::fill(work.window_pairs, 0);
    return work;
  }

  InFlightMicroBatch run_forward(int64_t m) {
    InFlightMicroBatch in_flight{batch_for(model_, step_, m, loss_), {}, {}};
    const PlanOptions& options = step_.plan.options;
    if (options.checkpoint_activations == CheckpointActivations::kPiece && with_readers_[m]) {
      const at::NoGradGuard no_grad;
      const ForwardResult forwarded =
          forward(model_, in_flight.batch, ancestors(in_flight.batch),
                  {.keep_context = true, .head = false, .router_statistics = router_statistics_});
      in_flight.frame = std::make_unique<ContextFrame>(forwarded.context, options.offload_context);
      for (ContextFrame* frame : ancestors(in_flight.batch)) frame->collect();
      counts_.recomputed += work_of(m, in_flight.batch, 0);
      return in_flight;
    }
    in_flight.roots = forward_with_grad(m, in_flight.batch);
    if (with_readers_[m]) in_flight.frame = std::make_unique<ContextFrame>(in_flight.roots->context, false);
    return in_flight;
  }

  BackwardRoots forward_with_grad(int64_t m, const Batch& batch) {
    const bool checkpoint_layers = step_.plan.options.checkpoint_activations == CheckpointActivations::kLayer;
    const bool head = batch.num_logit_rows() > 0;
    ForwardResult forwarded = forward(model_, batch, ancestors(batch),
                                      {.keep_context = with_readers_[m],
                                       .checkpoint_layers = checkpoint_layers,
                                       .head = head,
                                       .entropies = sums_.entropies(),
                                       .router_statistics = router_statistics_,
                                       .left = m == last_ ? events_.left : nullptr});
    const Work work = work_of(m, batch, batch.num_logit_rows());
    counts_.work += work;
    if (checkpoint_layers) counts_.recomputed += work;
    BackwardRoots roots{{}, {}, std::move(forwarded.last), std::move(forwarded.context)};
    if (!head) return roots;
    RECORD_USER_SCOPE("objective");
    counts_.terms += batch.num_terms();
    const at::Tensor logprobs = values_of_terms(batch, forwarded.logprobs);
    roots.loss = sums_.add(batch, logprobs, forwarded);
    if (!unit_loss_) return roots;
    roots.logprobs = forwarded.logprobs;
    if (!unit_loss_->needs_logprob_pass()) unit_loss_->add(batch, logprobs);
    return roots;
  }

  /// Gradients [E] of a loss of wider scope with respect to the log-probabilities of the micro-batch's edges.
  at::Tensor logprob_gradients(int64_t m, const Batch& batch, const at::Tensor& logprobs) {
    sums_.add(unit_loss_->evaluate(m));
    const at::Tensor gradients = unit_loss_->gradients(batch);
    return at::zeros(logprobs.sizes(), gradients.options())
        .index_add_(0, batch.term_edge, gradients)
        .to(logprobs.scalar_type());
  }

  void backward(int64_t m) {
    InFlightMicroBatch& in_flight = *in_flight_[m];
    const BackwardRoots& roots = *in_flight.roots;
    std::vector<at::Tensor> tensors, gradients;
    if (in_flight.frame) in_flight.frame->append_seeds(roots.context, &tensors, &gradients);
    if (roots.loss.defined()) {
      tensors.push_back(roots.loss);
      gradients.push_back(at::ones_like(roots.loss));
    }
    if (roots.logprobs.defined()) {
      tensors.push_back(roots.logprobs);
      gradients.push_back(logprob_gradients(m, in_flight.batch, roots.logprobs));
    }
    // Gradients of router losses are added in each layer, and those of keys on other ranks come back there,
    // so backward must pass through all that have trained weights.
    if (roots.last.defined() && roots.last.requires_grad()) {
      tensors.push_back(roots.last);
      gradients.push_back(at::zeros_like(roots.last));
    }
    // Drop references, so that backward frees tensors as it proceeds.
    in_flight.frame.reset();
    in_flight.roots.reset();
    if (!tensors.empty()) torch::autograd::backward(tensors, gradients);
    tensors.clear();
    gradients.clear();
    for (ContextFrame* frame : ancestors(in_flight.batch)) frame->collect();
  }

  const Model& model_;
  const PassEvents& events_;
  at::Device device_;
  const Step& step_;
  const Loss& loss_;
  c10::intrusive_ptr<RouterStatistics> router_statistics_;
  std::vector<bool> active_, with_readers_;
  std::unique_ptr<accumulating::UpcastWeights> upcast_;
  std::vector<std::optional<InFlightMicroBatch>> in_flight_;  // by micro-batch
  std::vector<std::vector<int64_t>> window_pairs_;            // by micro-batch and window of the model
  std::optional<UnitLoss> unit_loss_;
  StepSums sums_;
  StepCounts counts_;
  std::map<int64_t, PassMeter> meters_;  // by micro-batch
  std::optional<PassMeter> logprob_pass_;
  bool has_all_routers_ = false;
  int64_t last_ = -1;  // the micro-batch with the last backward pass
};

/// The negative log-likelihood by loss weights, and the sum of these, of log-probabilities by their places in
/// Step::terms.values. Added up in the order of the terms, which does not depend on how the trees are cut.
std::pair<double, double> nll_and_weights(const Step& step, const Trajectories& trajectories,
                                          const std::vector<TermValues>& computed) {
  std::vector<double> logprobs(step.terms.values.size());
  for (const TermValues& values : computed) values.write(&logprobs);
  double sum = 0, weights = 0;
  for (size_t k = 0; k < step.rows.size(); ++k) {
    const int64_t first = trajectories.offsets[step.rows[k]];
    for (int64_t i = step.terms.offsets[k]; i < step.terms.offsets[k + 1]; ++i) {
      const double weight = trajectories.loss_weights[first + step.terms.values[i].position];
      sum -= weight * logprobs[i];
      weights += weight;
    }
  }
  return {sum, weights};
}

/// Counts of all ranks. The tokens of the step are those already.
StepCounts add_up(StepCounts counts, const Group& group) {
  std::vector<int64_t*> fields{&counts.terms};
  for (Work* work : {&counts.work, &counts.recomputed}) {
    fields.insert(fields.end(), {&work->tokens, &work->pairs, &work->logit_rows});
    for (int64_t& pairs : work->window_pairs) fields.push_back(&pairs);
  }
  std::vector<double> values;
  for (const int64_t* field : fields) values.push_back(static_cast<double>(*field));
  values = group.add_up(values);
  for (size_t i = 0; i < fields.size(); ++i) *fields[i] = static_cast<int64_t>(values[i]);
  return counts;
}

}  // namespace

PendingStep start_forward_backward(const Model& model, const Step& step, const Loss& loss,
                                   const PassEvents& events) {
  StepExecution execution(model, step, loss, events);
  const auto num_micro_batches = static_cast<int64_t>(step.plan.micro_batches.size());
  const int64_t total = num_micro_batches * (execution.needs_logprob_pass() ? 2 : 1);
  int64_t done = 0;
  const auto advance = [&](int64_t) {
    if (events.progress) events.progress(++done, total);
  };
  if (execution.needs_logprob_pass()) execution.run_logprob_pass(advance);
  walk(
      step, execution.active(), [&](int64_t m) { execution.enter(m); },
      [&](int64_t m) {
        execution.leave(m);
        advance(m);
      });
  if (events.progress && done < total) events.progress(total, total);  // micro-batches without loss
  return std::move(execution).into_pending();
}

StepResult finish(PendingStep pending, const Group& group) {
  // Synchronises with the backward passes, so that the meters can be read.
  auto [loss, metrics] = pending.sums.read(group);
  StepResult result{add_up(std::move(pending.counts), group), {}, loss, std::move(metrics)};
  if (pending.routers) {
    const auto& [shape, statistics, has_all] = *pending.routers;
    if (!has_all) group.add_up(statistics->sums());
    result.routers = RouterStatistics::report(statistics->values().cpu(), shape);
  }
  for (const auto& [m, meter] : pending.meters) result.measured.push_back(meter.read(m));
  if (pending.logprob_pass) result.logprob_pass = pending.logprob_pass->read(-1);
  return result;
}

StepResult forward_backward(const Model& model, const Step& step, const Loss& loss,
                            const MicroBatchProgress& progress) {
  return finish(start_forward_backward(model, step, loss, {.progress = progress}));
}

PendingEvaluation start_evaluation(const Model& model, const Step& step, const Loss& loss,
                                   const MicroBatchProgress& progress) {
  std::optional<UnitLoss> unit_loss = make_unit_loss(step, loss, model.device());
  StepSums sums(loss, model.device(), unit_loss);
  StepCounts counts(step);
  std::vector<TermValues> computed;
  const auto visit = [&](int64_t, const Batch& batch, const ForwardResult& forwarded) {
    const at::Tensor logprobs = values_of_terms(batch, forwarded.logprobs);
    counts.terms += batch.num_terms();
    sums.add(batch, logprobs, forwarded);
    if (unit_loss) unit_loss->add(batch, logprobs);
    computed.push_back({batch.term_index, download(logprobs)});
  };
  counts.work.tokens = for_each_logprobs(model, step, loss, sums.entropies(), progress, visit);
  if (unit_loss) sums.add(unit_loss->evaluate_all());
  synchronize(model.device());
  const auto [nll, weights] = nll_and_weights(step, loss.trajectories(), computed);
  return {counts, std::move(sums), nll, weights};
}

StepResult finish(PendingEvaluation pending, const Group& group) {
  auto [value, metrics] = pending.sums.read(group);
  const std::vector<double> nll = group.add_up(std::vector{pending.nll, pending.weights});
  metrics.push_back({"nll_per_token", nll[0] / nll[1]});
  return {add_up(std::move(pending.counts), group), {}, value, std::move(metrics)};
}

}  // namespace espalier
