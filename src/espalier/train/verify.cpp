#include "espalier/train/verify.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"
#include "espalier/model/weights.h"

namespace espalier {
namespace {

// One way of computing the step: its loss, gradients and log-probabilities of the loss terms (flat index).
struct Outcome {
  double loss = 0;
  double loss_size = 0;  // of the reference: ReferenceLoss::size
  std::vector<at::Tensor> gradients;
  std::vector<double> logprobs;
};

std::vector<at::Tensor> in_float64(const Gradients& gradients, const Decoder& decoder) {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < gradients.sums().size(); ++i) {
    const at::Tensor& sum = gradients.sums()[i];
    result.push_back(sum.defined() ? sum.to(at::kDouble)
                                   : at::zeros_like(decoder.parameters()[i].value, at::kDouble));
  }
  return result;
}

double length(const at::Tensor& tensor) {
  return tensor.norm().item<double>();
}

double length(const std::vector<at::Tensor>& tensors) {
  double squares = 0;
  for (const at::Tensor& tensor : tensors) squares += length(tensor) * length(tensor);
  return std::sqrt(squares);
}

// ||g - reference|| / max(||reference||, 1e-6 ||all references||) of every parameter.
std::vector<double> relative_errors(const std::vector<at::Tensor>& gradients,
                                    const std::vector<at::Tensor>& reference) {
  const double floor = 1e-6 * length(reference);
  std::vector<double> errors;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const double scale = std::max(length(reference[i]), floor);
    const double distance = length(gradients[i] - reference[i]);
    errors.push_back(distance == 0 ? 0 : distance / scale);
  }
  return errors;
}

size_t worst(const std::vector<double>& values) {
  // A NaN is worse than any number.
  return std::max_element(values.begin(), values.end(),
                          [](double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; }) -
         values.begin();
}

Outcome tree_run(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                 const ObjectiveOptions& objective, const Advantages* advantages,
                 const VerifyProgress& progress) {
  Gradients gradients(decoder);
  Outcome run;
  const auto report = [&](int64_t done, int64_t total) {
    if (progress) progress("tree run", static_cast<double>(done) / static_cast<double>(total));
  };
  run.loss = forward_backward(decoder, trajectories, step, objective, advantages, &gradients, report).loss;
  run.gradients = in_float64(gradients, decoder);
  gradients.zero();
  run.logprobs.resize(trajectories.num_tokens());
  compute_logprobs(decoder, trajectories, step, &run.logprobs);
  return run;
}

Outcome reference_run(const Decoder& decoder, const Trajectories& trajectories,
                      const ObjectiveOptions& objective, const char* phase, const VerifyProgress& progress) {
  Gradients gradients(decoder);
  Outcome run;
  run.logprobs.resize(trajectories.num_tokens());
  const auto report = [&](int64_t done, int64_t total) {
    if (progress) progress(phase, static_cast<double>(done) / static_cast<double>(total));
  };
  const ReferenceLoss loss =
      per_trajectory_forward_backward(decoder, trajectories, objective, &gradients, &run.logprobs, report);
  run.loss = loss.value;
  run.loss_size = loss.size;
  run.gradients = in_float64(gradients, decoder);
  gradients.zero();
  return run;
}

Decoder to_float64(const Decoder& decoder) {
  std::vector<Parameter> parameters;
  for (const Parameter& parameter : decoder.parameters()) {
    parameters.push_back({parameter.name, parameter.value.detach().to(at::kDouble).requires_grad_()});
  }
  return Decoder(decoder.config(), std::move(parameters));
}

double unit_roundoff(at::ScalarType dtype) {
  return dtype == at::kFloat ? 0x1p-24 : 0x1p-9;
}

void compare_with_float64(const Decoder& decoder, const Trajectories& trajectories,
                          const VerifyOptions& options, const Outcome& tree, const Outcome& reference,
                          const VerifyProgress& progress, VerifyReport* report) {
  const Outcome exact = reference_run(to_float64(decoder), trajectories, options.objective,
                                      "per-trajectory run in float64", progress);
  const std::vector<double> tree_errors = relative_errors(tree.gradients, exact.gradients);
  const std::vector<double> reference_errors = relative_errors(reference.gradients, exact.gradients);
  const double floor = unit_roundoff(options.dtype) / 2;
  std::vector<double> ratios;
  for (size_t i = 0; i < tree_errors.size(); ++i) {
    ratios.push_back(std::max(tree_errors[i], floor) / std::max(reference_errors[i], floor));
    if (std::isnan(tree_errors[i])) ratios.back() = std::numeric_limits<double>::quiet_NaN();
  }
  const size_t index = worst(ratios);
  report->error_ratio_max = ratios[index];
  report->error_ratio_worst_parameter = decoder.parameters()[index].name;
  std::nth_element(ratios.begin(), ratios.begin() + static_cast<int64_t>(ratios.size() / 2), ratios.end());
  report->error_ratio_median = ratios[ratios.size() / 2];
}

// Tries trajectories drawn from all those that have neighbours in their micro-batch, on all their tokens.
void check_isolation(const Decoder& decoder, const Trajectories& trajectories, Step step,
                     const VerifyOptions& options, const VerifyProgress& progress, VerifyReport* report) {
  step.terms = all_terms(trajectories, step.rows);
  report->isolation_bitwise = true;
  Rng rng(options.seed, 0x150);
  std::vector<std::pair<size_t, size_t>> candidates;  // (micro-batch, placement)
  for (size_t b = 0; b < step.plan.micro_batches.size(); ++b) {
    const MicroBatch& micro_batch = step.plan.micro_batches[b];
    for (size_t p = 0; p < micro_batch.trajectories.size(); ++p) {
      const int64_t size = step.forest.trajectory_size(micro_batch.trajectories[p].trajectory);
      if (size > 1 && size < micro_batch.num_tokens) candidates.emplace_back(b, p);
    }
  }
  const int64_t trials = std::min<int64_t>(options.isolation_trials, static_cast<int64_t>(candidates.size()));
  for (int64_t trial = 0; trial < trials; ++trial) {
    std::swap(candidates[trial], candidates[rng.between(trial, static_cast<int64_t>(candidates.size()) - 1)]);
  }
  candidates.resize(trials);
  std::sort(candidates.begin(), candidates.end());  // trials in one micro-batch share its unchanged forward
  const at::NoGradGuard no_grad;
  Batch batch;
  Layout layout;
  at::Tensor before;
  for (int64_t trial = 0; trial < trials; ++trial) {
    const auto [index, placement] = candidates[trial];
    const MicroBatch& micro_batch = step.plan.micro_batches[index];
    if (trial == 0 || index != candidates[trial - 1].first) {
      batch = make_batch(trajectories, step, micro_batch, ObjectiveOptions{}, nullptr);
      layout = make_layout(step.forest, micro_batch.runs);
      before = forward_edges(decoder, batch);
    }
    const auto path = path_tokens(layout, micro_batch.trajectories[placement].run);
    report->isolation_bitwise &= isolated(decoder, batch, before, path, rng.next());
    ++report->isolation_trials;
    if (progress) progress("isolation", static_cast<double>(trial + 1) / static_cast<double>(trials));
  }
}

}  // namespace

bool isolated(const Decoder& decoder, const Batch& batch, const at::Tensor& before,
              const std::vector<int64_t>& path, uint64_t seed) {
  const at::NoGradGuard no_grad;
  std::vector<bool> on_path(batch.num_tokens());
  for (const int64_t token : path) on_path[token] = true;
  Batch changed = batch;
  changed.input_ids = batch.input_ids.clone();
  Rng rng(seed);
  int64_t* ids = changed.input_ids.mutable_data_ptr<int64_t>();
  const int64_t vocab_size = decoder.config().vocab_size;
  for (int64_t token = 0; token < batch.num_tokens(); ++token) {
    if (!on_path[token] && vocab_size > 1)
      ids[token] = (ids[token] + rng.between(1, vocab_size - 1)) % vocab_size;
  }
  const at::Tensor after = forward_edges(decoder, changed);
  std::vector<int64_t> edges;
  for (size_t e = 0; e < batch.edge_token.size(); ++e) {
    if (on_path[batch.edge_token[e]]) edges.push_back(static_cast<int64_t>(e));
  }
  const at::Tensor index = at::tensor(edges, at::kLong);
  return at::equal(before.index_select(0, index), after.index_select(0, index));
}

VerifyReport verify(const Trajectories& trajectories, const VerifyOptions& options,
                    const VerifyProgress& progress) {
  const Decoder decoder = load_decoder(options.model, options.dtype);
  std::vector<int64_t> rows(trajectories.num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  const Step step = make_step(trajectories, rows, options.plan, options.objective);
  Advantages advantages;
  if (options.objective.kind == ObjectiveKind::kGrpo) {
    advantages = Advantages(trajectories, options.objective.scale_rewards);
  }
  VerifyReport report;
  report.dtype = dtype_name(options.dtype);
  report.flat_tokens = step.flat_tokens();
  report.tree_tokens = step.forest.tree_tokens();
  report.encoded_tokens = step.plan.num_tokens();

  const Outcome tree = tree_run(decoder, trajectories, step, options.objective, &advantages, progress);
  const Outcome reference =
      reference_run(decoder, trajectories, options.objective, "per-trajectory run", progress);
  report.reference_loss = reference.loss;
  report.loss_rel_error =
      tree.loss == reference.loss ? 0 : std::abs(tree.loss - reference.loss) / reference.loss_size;
  const std::vector<double> errors = relative_errors(tree.gradients, reference.gradients);
  const size_t index = worst(errors);
  report.grad_rel_error_max = errors[index];
  report.grad_rel_error_worst_parameter = decoder.parameters()[index].name;
  for (size_t k = 0; k < rows.size(); ++k) {
    for (const Term& term : step.terms.row(static_cast<int64_t>(k))) {
      const int64_t flat = trajectories.offsets[rows[k]] + term.position;
      const double error = std::abs(tree.logprobs[flat] - reference.logprobs[flat]);
      if (!(error <= report.logprob_abs_error_max)) report.logprob_abs_error_max = error;
    }
  }
  check_isolation(decoder, trajectories, step, options, progress, &report);
  bool exact_enough =
      report.grad_rel_error_max <= options.max_error && report.loss_rel_error <= options.max_error;
  if (options.dtype != at::kDouble) {
    compare_with_float64(decoder, trajectories, options, tree, reference, progress, &report);
    exact_enough = report.error_ratio_max <= options.max_error_ratio && std::isfinite(report.loss_rel_error);
  }
  report.passed = exact_enough && report.isolation_bitwise && std::isfinite(report.logprob_abs_error_max);
  return report;
}

nlohmann::ordered_json to_json(const VerifyReport& report) {
  nlohmann::ordered_json json = {
      {"dtype", report.dtype},
      {"loss_rel_error", report.loss_rel_error},
      {"grad_rel_error_max", report.grad_rel_error_max},
      {"grad_rel_error_worst_parameter", report.grad_rel_error_worst_parameter},
      {"logprob_abs_error_max", report.logprob_abs_error_max},
  };
  if (report.dtype != "float64") {
    json["error_ratio_max"] = report.error_ratio_max;
    json["error_ratio_median"] = report.error_ratio_median;
    json["error_ratio_worst_parameter"] = report.error_ratio_worst_parameter;
  }
  json["isolation_bitwise"] = report.isolation_bitwise;
  json["isolation_trials"] = report.isolation_trials;
  json["flat_tokens"] = report.flat_tokens;
  json["tree_tokens"] = report.tree_tokens;
  json["encoded_tokens"] = report.encoded_tokens;
  json["loss"] = report.reference_loss;
  json["passed"] = report.passed;
  return json;
}

}  // namespace espalier
