// SPDX-License-Identifier: Apache-2.0
#include "espalier/verify/verify.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/base/median.h"
#include "espalier/base/rng.h"
#include "espalier/engine/cost.h"
#include "espalier/engine/share.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/model/weights/weights.h"
#include "espalier/ops/tensor_errors.h"
#include "espalier/train/optimizer/step_trainer.h"
#include "espalier/verify/reference_routers.h"

namespace espalier {
namespace {

// Results of one way of computing the step: loss, gradients and log-probabilities of terms (flat index).
struct Outcome {
  double loss = 0;
  double loss_size = 0;  // reference only: ReferenceLoss::size
  std::vector<at::Tensor> gradients;
  std::vector<double> logprobs;
};

std::vector<at::Tensor> gradients_in_float64(const Decoder& decoder) {
  std::vector<at::Tensor> result;
  const std::vector<at::Tensor> sums = decoder.gradients();
  for (size_t i = 0; i < sums.size(); ++i) {
    const at::Tensor& sum = sums[i];
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

// ||g - reference|| / max(||reference||, 1e-6 ||all references||) of every parameter; 0 where both g and its
// reference are a few float64 roundings of the norm of all gradients. A gradient that is mathematically 0,
// such as that of a query that sees one key, consists of rounding on both sides: up to 1.4 roundings were
// seen.
std::vector<double> relative_errors(const std::vector<at::Tensor>& gradients,
                                    const std::vector<at::Tensor>& reference) {
  const double all = length(reference), floor = 1e-6 * all, rounding = 0x1p-48 * all;
  std::vector<double> errors;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const double size = length(reference[i]), distance = length(gradients[i] - reference[i]);
    const bool both_zero = size <= rounding && length(gradients[i]) <= rounding;
    errors.push_back(both_zero ? 0 : distance / std::max(size, floor));
  }
  return errors;
}

size_t worst(const std::vector<double>& values) {
  // NaN compares as the largest value.
  return std::max_element(values.begin(), values.end(),
                          [](double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; }) -
         values.begin();
}

MicroBatchProgress telling(const char* phase, const VerifyProgress& progress) {
  return [phase, &progress](int64_t done, int64_t total) {
    if (progress) progress(phase, static_cast<double>(done) / static_cast<double>(total));
  };
}

Outcome tree_run(StepTrainer* trainer, const Step& step, const Loss& loss, const VerifyProgress& progress) {
  const Decoder& decoder = trainer->decoder();
  decoder.zero_gradients();
  Outcome outcome;
  outcome.loss = trainer->add_gradients(step, loss, telling("tree run", progress)).loss;
  trainer->gather_gradients();
  outcome.gradients = gradients_in_float64(decoder);
  decoder.zero_gradients();
  outcome.logprobs.resize(loss.trajectories().num_tokens());
  compute_logprobs(decoder, loss, step, &outcome.logprobs);
  return outcome;
}

Outcome reference_run(const Decoder& decoder, const Loss& loss, const char* phase,
                      const VerifyProgress& progress) {
  decoder.zero_gradients();
  Outcome outcome;
  outcome.logprobs.resize(loss.trajectories().num_tokens());
  const ReferenceLoss reference =
      per_trajectory_forward_backward(decoder, loss, &outcome.logprobs, telling(phase, progress));
  outcome.loss = reference.value;
  outcome.loss_size = reference.size;
  outcome.gradients = gradients_in_float64(decoder);
  decoder.zero_gradients();
  return outcome;
}

Decoder to_float64(const Decoder& decoder) {
  const auto trained_in_float64 = [](const std::vector<Parameter>& parameters) {
    std::vector<Parameter> result;
    for (const Parameter& parameter : parameters)
      result.push_back({parameter.name, parameter.value.detach().to(at::kDouble).requires_grad_()});
    return result;
  };
  std::vector<Parameter> buffers;
  for (const Parameter& buffer : decoder.buffers()) {
    buffers.push_back({buffer.name, buffer.value.to(at::kDouble)});
  }
  const Adapter& adapter = decoder.adapter();
  return Decoder(decoder.config(), trained_in_float64(decoder.weights()), std::move(buffers),
                 {.scale = adapter.scale, .parameters = trained_in_float64(adapter.parameters)});
}

void compare_with_float64(const Decoder& decoder, at::ScalarType dtype, const Outcome& exact,
                          const Outcome& tree, const Outcome& reference, VerifyReport* report) {
  const std::vector<double> tree_errors = relative_errors(tree.gradients, exact.gradients);
  const std::vector<double> reference_errors = relative_errors(reference.gradients, exact.gradients);
  // Gradients of bfloat16 parameters are sums in float32, where half of its rounding is seen.
  const double roundoff = unit_roundoff(dtype) / (dtype == at::kBFloat16 ? 2 : 1);
  std::vector<double> ratios;
  for (size_t i = 0; i < tree_errors.size(); ++i) {
    const double ours = tree_errors[i], plain = reference_errors[i];
    ratios.push_back(error_ratio({.ours = ours * ours, .plain = plain * plain, .exact = 1}, {roundoff}));
  }
  const size_t index = worst(ratios);
  report->error_ratio_max = ratios[index];
  report->error_ratio_worst_parameter = decoder.parameters()[index].name;
  report->error_ratio_median = median(std::move(ratios));
}

struct Ending {
  int64_t micro_batch;
  Placement placement;
};

// Ends of trajectories that share the micro-batch or its ancestors with tokens of other trajectories.
std::vector<Ending> endings_with_neighbours(const Step& step) {
  const auto& micro_batches = step.plan.micro_batches;
  std::vector<Ending> endings;
  std::vector<int64_t> chain_tokens(micro_batches.size());
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    const int64_t parent = micro_batches[m].parent;
    chain_tokens[m] = micro_batches[m].num_tokens + (parent < 0 ? 0 : chain_tokens[parent]);
    for (const Placement& placement : micro_batches[m].trajectories) {
      const int64_t size = step.forest.trajectory_size(placement.trajectory);
      const Run& last = micro_batches[m].runs[placement.run];
      const bool ends = token_position(step.forest, last.end - 1) + 1 == size;
      if (ends && size > 1 && size < chain_tokens[m]) endings.push_back({static_cast<int64_t>(m), placement});
    }
  }
  return endings;
}

PathBatches batches_of(const Trajectories& trajectories, const Step& step, const Ending& ending) {
  PathBatches path;
  std::vector<int64_t> chain = ancestors(step.plan.micro_batches, ending.micro_batch);
  chain.push_back(ending.micro_batch);
  for (const int64_t m : chain) {
    const MicroBatch& micro_batch = step.plan.micro_batches[m];
    const auto placement = std::lower_bound(
        micro_batch.trajectories.begin(), micro_batch.trajectories.end(), ending.placement.trajectory,
        [](const Placement& p, int64_t trajectory) { return p.trajectory < trajectory; });
    path.batches.push_back(make_batch(step, m, Loss(trajectories, ObjectiveOptions{})));
    path.paths.push_back(path_tokens(make_micro_batch_layout(step.forest, micro_batch), placement->run));
  }
  return path;
}

// Tests random trajectories among those that have neighbours, on all their tokens.
void check_isolation(const Decoder& decoder, const Trajectories& trajectories, Step step,
                     const VerifyOptions& options, const VerifyProgress& progress, VerifyReport* report) {
  step.terms = all_terms(trajectories, step.rows);
  report->isolation_bitwise = true;
  Rng rng(options.seed, 0x150);
  std::vector<Ending> endings = endings_with_neighbours(step);
  const int64_t trials = std::min<int64_t>(options.isolation_trials, static_cast<int64_t>(endings.size()));
  for (int64_t trial = 0; trial < trials; ++trial) {
    std::swap(endings[trial], endings[rng.between(trial, static_cast<int64_t>(endings.size()) - 1)]);
  }
  endings.resize(trials);
  // Trials in one micro-batch share its unchanged forward pass.
  std::sort(endings.begin(), endings.end(),
            [](const Ending& a, const Ending& b) { return a.micro_batch < b.micro_batch; });
  PathLogprobs before;
  for (int64_t trial = 0; trial < trials; ++trial) {
    const PathBatches path = batches_of(trajectories, step, endings[trial]);
    if (trial == 0 || endings[trial].micro_batch != endings[trial - 1].micro_batch) {
      before = path_logprobs(decoder, path.batches);
    }
    report->isolation_bitwise &= isolated(decoder, path, before, rng.next());
    ++report->isolation_trials;
    if (progress) progress("isolation", static_cast<double>(trial + 1) / static_cast<double>(trials));
  }
}

// The batch with every token outside the path changed to another id.
Batch with_changed_neighbours(const Batch& batch, const std::vector<bool>& on_path, int64_t vocab_size,
                              Rng* rng) {
  Batch changed = batch;
  changed.input_ids = batch.input_ids.clone();
  int64_t* ids = changed.input_ids.mutable_data_ptr<int64_t>();
  for (int64_t token = 0; token < batch.num_tokens(); ++token) {
    if (!on_path[token] && vocab_size > 1)
      ids[token] = (ids[token] + rng->between(1, vocab_size - 1)) % vocab_size;
  }
  return changed;
}

// Edges of the batch that lie on the path. `next`: the token id after the path's last token in this batch;
// -1: none.
std::vector<int64_t> edges_on_path(const Batch& batch, const std::vector<int64_t>& path,
                                   const std::vector<bool>& on_path, int64_t next) {
  const at::Tensor source = batch.logit_rows.index_select(0, batch.edge_row);
  std::vector<int64_t> edges;
  for (size_t e = 0; e < batch.edge_token.size(); ++e) {
    const int64_t target = batch.edge_token[e];
    const bool inside = target >= 0 && on_path[target];
    const bool leaving = target < 0 && source.const_data_ptr<int64_t>()[e] == path.back() &&
                         batch.edge_target.const_data_ptr<int64_t>()[e] == next;
    if (inside || leaving) edges.push_back(static_cast<int64_t>(e));
  }
  return edges;
}

// The routers' choices as Batch::routes. The last layer computes logit rows only: its other tokens get -1.
at::Tensor routes_of(const RouterRecord& record, const Batch& batch, const RouterShape& routers) {
  if (record.experts.empty()) return {};
  std::vector<at::Tensor> columns;
  for (const at::Tensor& experts : record.experts) {
    if (experts.size(0) == batch.num_tokens()) {
      columns.push_back(experts);
    } else {
      const at::Tensor none = at::full({batch.num_tokens(), routers.top_k}, -1, experts.options());
      columns.push_back(none.index_copy(0, batch.logit_rows, experts));
    }
  }
  // Without terms the last layer computes no token.
  for (int64_t i = static_cast<int64_t>(columns.size()); i < routers.count(); ++i) {
    columns.push_back(at::full_like(columns.front(), -1));
  }
  return at::cat(columns, 1).cpu();
}

}  // namespace

PathLogprobs path_logprobs(const Decoder& decoder, const std::vector<Batch>& batches) {
  const at::NoGradGuard no_grad;
  std::vector<std::unique_ptr<ContextFrame>> frames;
  PathLogprobs result;
  for (size_t i = 0; i < batches.size(); ++i) {
    std::vector<ContextFrame*> above;
    for (const auto& frame : frames) above.push_back(frame.get());
    const bool last = i + 1 == batches.size();
    const Batch batch = to_device(batches[i], decoder.device());
    RouterRecord record;
    const ForwardResult forwarded =
        forward(decoder, batch, above,
                {.keep_context = !last, .head = batch.num_terms() > 0, .router_record = &record});
    result.routes.push_back(routes_of(record, batch, decoder.routers()));
    frames.push_back(std::make_unique<ContextFrame>(forwarded.context, false));
    result.logprobs.push_back(forwarded.logprobs);
  }
  return result;
}

bool isolated(const Decoder& decoder, const PathBatches& path, const PathLogprobs& before, uint64_t seed) {
  Rng rng(seed);
  std::vector<Batch> changed;
  std::vector<std::vector<bool>> on_path;
  for (size_t i = 0; i < path.batches.size(); ++i) {
    on_path.emplace_back(path.batches[i].num_tokens());
    for (const int64_t token : path.paths[i]) on_path[i][token] = true;
    changed.push_back(
        with_changed_neighbours(path.batches[i], on_path[i], decoder.config().vocab_size, &rng));
    changed.back().routes = before.routes[i];
  }
  const PathLogprobs after = path_logprobs(decoder, changed);
  for (size_t i = 0; i < path.batches.size(); ++i) {
    if (!before.logprobs[i].defined()) continue;
    const bool last = i + 1 == path.batches.size();
    const int64_t next = last ? -1 : path.batches[i + 1].input_ids[path.paths[i + 1].front()].item<int64_t>();
    const at::Tensor index =
        at::tensor(edges_on_path(path.batches[i], path.paths[i], on_path[i], next), at::kLong)
            .to(decoder.device());
    if (!at::equal(before.logprobs[i].index_select(0, index), after.logprobs[i].index_select(0, index)))
      return false;
  }
  return true;
}

VerifyReport verify(const Trajectories& given, const VerifyOptions& options, const VerifyProgress& progress) {
  const Group& group = *options.group;
  StepTrainer trainer(load_adapted(options.model, options.adapter, options.dtype, options.device),
                      {.kind = OptimizerKind::kSgd}, group);
  if (options.freeze_pad_embedding) trainer.decoder().freeze_pad_embedding();
  const Decoder& decoder = trainer.decoder();
  // Where scores are nearly equal, rounding decides which expert is chosen. In lower precision all sides use
  // the routes of float64, so that only arithmetic errors are compared.
  const Trajectories trajectories =
      options.dtype == at::kDouble ? given : with_routes(given, to_float64(decoder));
  const Loss loss = make_loss(trajectories, options.objective, options.mix);
  const PlanCosts costs{assumed_times(decoder.config(), options.device),
                        memory_model(decoder.config(), options.dtype, loss, options.device)};
  std::vector<int64_t> rows(trajectories.num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  const Step step = make_share(
      loss, std::move(rows),
      {.plan = options.plan, .objective = options.objective, .costs = &costs, .mix = options.mix}, group);
  VerifyReport report;
  report.dtype = dtype_name(options.dtype);
  report.device = options.device.str();
  if (!decoder.has_adapter()) report.pad_token_id = decoder.config().pad_token_id;
  report.freeze_pad_embedding = options.freeze_pad_embedding;
  report.flat_tokens = step.whole.flat_tokens;
  report.tree_tokens = step.whole.tree_tokens;
  report.encoded_tokens = step.plan.num_tokens();

  const Outcome tree = tree_run(&trainer, step, loss, progress);
  const Outcome reference = reference_run(decoder, loss, "per-trajectory run", progress);
  report.reference_loss = reference.loss;
  report.loss_rel_error =
      tree.loss == reference.loss ? 0 : std::abs(tree.loss - reference.loss) / reference.loss_size;
  const std::vector<double> errors = relative_errors(tree.gradients, reference.gradients);
  const size_t index = worst(errors);
  report.grad_rel_error_max = errors[index];
  report.grad_rel_error_worst_parameter = decoder.parameters()[index].name;
  for (size_t k = 0; k < step.rows.size(); ++k) {
    for (const Term& term : step.terms.row(static_cast<int64_t>(k))) {
      const int64_t flat = trajectories.offsets[step.rows[k]] + term.position;
      const double error = std::abs(tree.logprobs[flat] - reference.logprobs[flat]);
      if (!(error <= report.logprob_abs_error_max)) report.logprob_abs_error_max = error;
    }
  }
  check_isolation(decoder, trajectories, step, options, progress, &report);
  bool exact_enough =
      report.grad_rel_error_max <= options.max_error && report.loss_rel_error <= options.max_error;
  if (options.dtype != at::kDouble) {
    const Outcome exact = reference_run(to_float64(decoder), loss, "per-trajectory run in float64", progress);
    compare_with_float64(decoder, options.dtype, exact, tree, reference, &report);
    exact_enough = report.error_ratio_max <= options.max_error_ratio && std::isfinite(report.loss_rel_error);
  }
  report.passed = exact_enough && report.isolation_bitwise && std::isfinite(report.logprob_abs_error_max);
  using enum RankReduction;  // of the shares of all ranks
  const std::vector<double> all =
      group.reduce({double(report.passed), double(report.isolation_bitwise), report.logprob_abs_error_max,
                    double(report.encoded_tokens), double(report.isolation_trials)},
                   {kMin, kMin, kMax, kSum, kSum});
  report.passed = all[0] != 0;
  report.isolation_bitwise = all[1] != 0;
  report.logprob_abs_error_max = all[2];
  report.encoded_tokens = static_cast<int64_t>(all[3]);
  report.isolation_trials = static_cast<int64_t>(all[4]);
  return report;
}

nlohmann::ordered_json to_json(const VerifyReport& report) {
  nlohmann::ordered_json json = {
      {"dtype", report.dtype},
      {"device", report.device},
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
  json["pad_token_id"] =
      report.pad_token_id < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(report.pad_token_id);
  json["freeze_pad_embedding"] = report.freeze_pad_embedding;
  json["passed"] = report.passed;
  return json;
}

}  // namespace espalier
