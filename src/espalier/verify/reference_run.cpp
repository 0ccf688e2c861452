// SPDX-License-Identifier: Apache-2.0
// Plain per-trajectory training, the reference of the proof. Independent of forest, plan, layout, tree ops
// and step_terms on purpose.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "espalier/model/gradient_accumulation.h"
#include "espalier/verify/reference_routers.h"
#include "espalier/verify/verify.h"

namespace espalier {
namespace {

// Length of the common prefix of two rows; tokens with different recorded routes differ.
int64_t common_prefix(const Trajectories& trajectories, const std::vector<uint64_t>& keys, int64_t a,
                      int64_t b) {
  const int64_t limit = std::min(trajectories.row_size(a), trajectories.row_size(b));
  const int64_t begin_a = trajectories.offsets[a], begin_b = trajectories.offsets[b];
  int64_t length = 0;
  while (length < limit &&
         trajectories.input_ids[begin_a + length] == trajectories.input_ids[begin_b + length] &&
         (keys.empty() || keys[begin_a + length] == keys[begin_b + length])) {
    ++length;
  }
  return length;
}

// Effective weights of every token, by the definition: with shared targets `once`, a term does not count when
// an earlier trajectory has the same tokens up to and including the target and carries loss there.
std::vector<double> effective_weights(const Trajectories& trajectories, SharedTargets shared_targets) {
  std::vector<double> weights(trajectories.num_tokens());
  const std::vector<uint64_t> keys = route_keys(trajectories);
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const int64_t begin = trajectories.offsets[row];
    for (int64_t t = 1; t < trajectories.row_size(row); ++t)
      weights[begin + t] = trajectories.loss_weights[begin + t];
    if (shared_targets == SharedTargets::kSum) continue;
    for (int64_t earlier = 0; earlier < row; ++earlier) {
      const int64_t common = common_prefix(trajectories, keys, earlier, row);
      for (int64_t t = 1; t < common; ++t) {
        if (trajectories.loss_weights[trajectories.offsets[earlier] + t] != 0) weights[begin + t] = 0;
      }
    }
  }
  return weights;
}

// The normaliser of each row, by the definition.
std::vector<double> normalisers(const Trajectories& trajectories, const std::vector<double>& weights,
                                const ObjectiveOptions& objective) {
  const int64_t num_rows = trajectories.num_rows();
  std::vector<double> row_sums(num_rows);
  double all = 0, rows_with_loss = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = trajectories.offsets[row]; i < trajectories.offsets[row + 1]; ++i)
      row_sums[row] += weights[i];
    all += row_sums[row];
    rows_with_loss += row_sums[row] > 0 ? 1 : 0;
  }
  const auto group_name = [&](int64_t row) {
    const bool named = !trajectories.group_id.empty() && !trajectories.group_id[row].empty();
    return named ? "named " + trajectories.group_id[row] : fmt::format("row {}", row);
  };
  std::set<std::string> groups_with_loss;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (row_sums[row] > 0) groups_with_loss.insert(group_name(row));
  }
  const auto group_sum = [&](int64_t row) {
    double sum = 0;
    for (int64_t other = 0; other < num_rows; ++other) {
      if (group_name(other) == group_name(row)) sum += row_sums[other];
    }
    return sum;
  };
  std::vector<double> result;
  for (int64_t row = 0; row < num_rows; ++row) {
    switch (objective.normalize) {
      case Normalize::kToken:
        result.push_back(all);
        break;
      case Normalize::kSequence:
        result.push_back(row_sums[row] * rows_with_loss);
        break;
      case Normalize::kSequenceSum:
        result.push_back(rows_with_loss);
        break;
      case Normalize::kGroup:
        result.push_back(group_sum(row) * static_cast<double>(groups_with_loss.size()));
        break;
      case Normalize::kConstant:
        result.push_back(objective.normalize_constant);
        break;
    }
  }
  return result;
}

at::Tensor doubles(const std::vector<double>& values, at::Device device) {
  return at::tensor(values, at::kDouble).to(device);
}

at::Tensor integers(const std::vector<int64_t>& values, at::Device device) {
  return at::tensor(values, at::kLong).to(device);
}

// With shared targets `once`: the mean over all trajectories with the same tokens up to and including t that
// carry loss there.
double mean_advantage(const Loss& loss, int64_t row, int64_t t) {
  const Trajectories& trajectories = loss.trajectories();
  const std::vector<uint64_t> keys = route_keys(trajectories);
  double sum = 0, count = 0;
  for (int64_t other = 0; other < trajectories.num_rows(); ++other) {
    if (common_prefix(trajectories, keys, other, row) <= t) continue;
    if (trajectories.loss_weights[trajectories.offsets[other] + t] == 0) continue;
    sum += loss.column(TermColumn::kAdvantage, other, t);
    ++count;
  }
  return sum / count;
}

// The terms of one trajectory, by the definition.
struct RowTerms {
  std::vector<int64_t> positions, before, targets;
  std::vector<int64_t> topk_ids;  // K per term, if the objective reads them
  TermTensors tensors;
};

void append_topk(const Trajectories& trajectories, int64_t begin, at::Device device, RowTerms* terms) {
  const int64_t width = trajectories.ref_topk;
  std::vector<double> logprobs;
  for (const int64_t t : terms->positions) {
    for (int64_t k = 0; k < width; ++k) {
      terms->topk_ids.push_back(trajectories.ref_topk_ids[(begin + t) * width + k]);
      logprobs.push_back(trajectories.ref_topk_logprobs[(begin + t) * width + k]);
    }
  }
  terms->tensors.topk_ref_logprobs = doubles(logprobs, device).view({-1, width});
}

RowTerms terms_of_row(const Loss& loss, int64_t row, const std::vector<double>& weights, double normaliser,
                      at::Device device) {
  const Trajectories& trajectories = loss.trajectories();
  const int64_t begin = trajectories.offsets[row];
  RowTerms terms;
  std::vector<double> coefficients;
  for (int64_t t = 1; t < trajectories.row_size(row); ++t) {
    if (weights[begin + t] == 0) continue;
    terms.positions.push_back(t);
    terms.before.push_back(t - 1);
    terms.targets.push_back(trajectories.target(begin + t));
    coefficients.push_back(weights[begin + t] / normaliser);
  }
  if (loss.objective().reads_topk()) append_topk(trajectories, begin, device, &terms);
  terms.tensors.coefficient = doubles(coefficients, device);
  for (const TermColumn column : loss.objective().columns()) {
    std::vector<double> values;
    for (const int64_t t : terms.positions) {
      const bool is_mean = column == TermColumn::kAdvantage &&
                           loss.objective().options().shared_targets == SharedTargets::kOnce;
      values.push_back(is_mean ? mean_advantage(loss, row, t) : loss.column(column, row, t));
    }
    terms.tensors.columns.push_back(doubles(values, device));
  }
  return terms;
}

// Of the n terms of a row, in float64: log-probabilities, those of their topk_ids [n, K], and entropies.
struct RowDistribution {
  at::Tensor logprobs, topk, entropy;
};

RowDistribution row_distribution(const Decoder& decoder, const at::Tensor& hidden, const RowTerms& terms,
                                 double temperature) {
  const at::Device device = decoder.device();
  const at::Tensor logits = decoder.capped(
      accumulating::linear(hidden.index_select(0, integers(terms.before, device)), decoder.lm_head()));
  const at::ScalarType dtype = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor all = at::log_softmax(logits.to(dtype) / temperature, -1);
  at::Tensor topk;
  if (!terms.topk_ids.empty()) {
    topk = all.gather(1, integers(terms.topk_ids, device).view({all.size(0), -1})).to(at::kDouble);
  }
  return {all.gather(1, integers(terms.targets, device).unsqueeze(1)).squeeze(1).to(at::kDouble), topk,
          -(all.exp() * all).sum(-1).to(at::kDouble)};
}

// The rows of each unit of the loss: those of a trajectory, group or pair, or all.
std::vector<std::vector<int64_t>> rows_by_unit(const Loss& loss) {
  std::vector<int64_t> all(loss.trajectories().num_rows());
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::vector<int64_t>> rows;
  const std::vector<int64_t> units = loss.units_of(all);
  for (const int64_t row : all) {
    if (units[row] >= static_cast<int64_t>(rows.size())) rows.emplace_back();
    rows[units[row]].push_back(row);
  }
  return rows;
}

/// For a loss that is not a mix. Accumulates the gradients of `scale` times the loss and writes
/// log-probabilities to `logprobs` [tokens]; done() is called before each row.
ReferenceLoss run_all(const Decoder& decoder, const Loss& loss, double scale, std::span<double> logprobs,
                      const std::function<void()>& done) {
  const Trajectories& trajectories = loss.trajectories();
  const ObjectiveOptions& options = loss.objective().options();
  const std::vector<double> weights = effective_weights(trajectories, options.shared_targets);
  const std::vector<double> divisors = normalisers(trajectories, weights, options);
  const ReferenceRouters routers(decoder, trajectories, options);
  ReferenceLoss result;
  for (const std::vector<int64_t>& rows : rows_by_unit(loss)) {
    std::vector<ReferenceTrajectory> group;
    std::vector<at::Tensor> losses;
    for (const int64_t row : rows) {
      done();
      RowTerms terms = terms_of_row(loss, row, weights, divisors[row], decoder.device());
      if (trajectories.row_size(row) == 0 || (terms.positions.empty() && !routers.any())) continue;
      RouterRecord record;
      const at::Tensor hidden = hidden_of_row(decoder, trajectories, row, routers.any() ? &record : nullptr);
      if (routers.any()) losses.push_back(routers.share(record));
      if (terms.positions.empty()) continue;
      // Recorded log-probabilities are those of softmax(logits / temperature).
      const bool is_divided = trajectories.temperature.has(row) && loss.objective().is_at_row_temperature();
      const double given = is_divided ? trajectories.temperature.values[row] : 1;
      const double temperature = given == 0 ? 1 : given;
      const RowDistribution distribution = row_distribution(decoder, hidden, terms, temperature);
      if (options.entropy_coef != 0) {
        const at::Tensor bonus = -options.entropy_coef * terms.tensors.coefficient * distribution.entropy;
        losses.push_back(bonus.sum());
        result.value += losses.back().item<double>();
        result.size += bonus.detach().abs().sum().item<double>();
      }
      terms.tensors.topk_logprobs = distribution.topk;
      group.push_back({distribution.logprobs, std::move(terms.tensors)});
      const at::Tensor values = group.back().logprobs.detach().cpu().contiguous();
      for (size_t i = 0; i < terms.positions.size(); ++i) {
        logprobs[trajectories.offsets[row] + terms.positions[i]] = values.const_data_ptr<double>()[i];
      }
    }
    if (!group.empty()) {
      const at::Tensor addends = loss.objective().reference(group);
      losses.push_back(addends.sum());
      result.value += losses.back().item<double>();
      result.size += addends.detach().abs().sum().item<double>();
    }
    // Router losses do not require grad if all adapters come after the routers.
    std::erase_if(losses, [](const at::Tensor& term) { return !term.requires_grad(); });
    if (scale != 1) {
      for (at::Tensor& term : losses) term = scale * term;
    }
    if (!losses.empty()) torch::autograd::backward(losses, {});
  }
  return result;
}

}  // namespace

ReferenceLoss per_trajectory_forward_backward(const Decoder& decoder, const Loss& loss,
                                              std::vector<double>* logprobs,
                                              const MicroBatchProgress& progress) {
  const int64_t num_rows = loss.trajectories().num_rows();
  int64_t rows_done = 0;
  const auto done = [&] {
    if (progress) progress(rows_done++, num_rows);
  };
  ReferenceLoss result;
  for (int64_t part = 0; part < loss.num_parts(); ++part) {
    const int64_t first = loss.trajectories().offsets[loss.first_row(part)];
    const auto part_logprobs =
        std::span(*logprobs).subspan(first, loss.part(part).trajectories().num_tokens());
    const double weight = loss.part_weight(part);
    const ReferenceLoss own = run_all(decoder, loss.part(part), weight, part_logprobs, done);
    result.value += weight * own.value;
    result.size += weight * own.size;
  }
  if (progress) progress(num_rows, num_rows);
  return result;
}

}  // namespace espalier
