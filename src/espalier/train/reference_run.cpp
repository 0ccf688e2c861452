// Plain per-trajectory training, written without forest, plan, layout, tree ops or step_terms on purpose: it
// is what the tree run is proven against.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "espalier/model/parameter_ops.h"
#include "espalier/train/verify.h"

namespace espalier {
namespace {

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double softmax_scale) {
  const auto heads_first = [](const at::Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  return at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), {}, 0.0,
                                          /*is_causal=*/true, softmax_scale, /*enable_gqa=*/true)
      .squeeze(0)
      .transpose(0, 1);
}

// Length of the common prefix of two rows; tokens with different recorded routes are different.
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

struct Normalisers {
  std::vector<double> of_row;
};

Normalisers normalisers(const Trajectories& trajectories, const std::vector<double>& weights,
                        const ObjectiveOptions& objective) {
  std::vector<double> row_sums(trajectories.num_rows());
  double all = 0, rows_with_loss = 0;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    for (int64_t i = trajectories.offsets[row]; i < trajectories.offsets[row + 1]; ++i)
      row_sums[row] += weights[i];
    all += row_sums[row];
    rows_with_loss += row_sums[row] > 0 ? 1 : 0;
  }
  Normalisers result;
  for (const double row_sum : row_sums) {
    result.of_row.push_back(objective.normalize == Normalize::kToken      ? all
                            : objective.normalize == Normalize::kSequence ? row_sum * rows_with_loss
                                                                          : objective.normalize_constant);
  }
  return result;
}

at::Tensor doubles(const std::vector<double>& values, at::Device device) {
  return at::tensor(values, at::kDouble).to(device);
}

at::Tensor integers(const std::vector<int64_t>& values, at::Device device) {
  return at::tensor(values, at::kLong).to(device);
}

// -min(r A, clip(r) A) of one trajectory's terms, Schulman et al., PPO, 2017, equation 7.
at::Tensor clipped_surrogate(const Trajectories& trajectories, int64_t row,
                             const std::vector<int64_t>& positions, const at::Tensor& logprobs,
                             const ObjectiveOptions& objective, const Advantages& advantages) {
  std::vector<double> advantage, old;
  for (const int64_t t : positions) {
    advantage.push_back(advantages.at(row, t));
    if (trajectories.logprobs.has(row))
      old.push_back(trajectories.logprobs.values[trajectories.offsets[row] + t]);
  }
  const at::Tensor behaviour = old.empty() ? logprobs.detach() : doubles(old, logprobs.device());
  const at::Tensor ratio = at::exp(logprobs - behaviour);
  const at::Tensor a = doubles(advantage, logprobs.device());
  return -at::minimum(ratio * a, at::clamp(ratio, 1 - objective.clip_low, 1 + objective.clip_high) * a);
}

}  // namespace

ReferenceLoss per_trajectory_forward_backward(const Decoder& decoder, const Trajectories& trajectories,
                                              const ObjectiveOptions& objective,
                                              std::vector<double>* logprobs,
                                              const MicroBatchProgress& progress) {
  const std::vector<double> weights = effective_weights(trajectories, objective.shared_targets);
  const Normalisers divide_by = normalisers(trajectories, weights, objective);
  Advantages advantages;
  if (objective.kind == ObjectiveKind::kGrpo) advantages = Advantages(trajectories, objective.scale_rewards);
  const at::Device device = decoder.device();
  ReferenceLoss loss;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (progress) progress(row, trajectories.num_rows());
    const int64_t size = trajectories.row_size(row), begin = trajectories.offsets[row];
    std::vector<int64_t> positions, before, targets;
    std::vector<double> coefficients;
    for (int64_t t = 1; t < size; ++t) {
      if (weights[begin + t] == 0) continue;
      positions.push_back(t);
      before.push_back(t - 1);
      targets.push_back(trajectories.input_ids[begin + t]);
      coefficients.push_back(weights[begin + t] / divide_by.of_row[row]);
    }
    if (positions.empty()) continue;
    const auto ids = trajectories.row(row);
    const at::Tensor input_ids = integers({ids.begin(), ids.end()}, device);
    const at::Tensor position_ids = at::arange(size, at::TensorOptions(device).dtype(at::kLong));
    const at::Tensor hidden = decoder.forward(input_ids, position_ids, causal_attention);
    const at::Tensor logits =
        summing::linear(hidden.index_select(0, integers(before, device)), {decoder.lm_head_weight()});
    const at::ScalarType wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor row_logprobs = at::log_softmax(logits.to(wide), -1)
                                        .gather(1, integers(targets, device).unsqueeze(1))
                                        .squeeze(1)
                                        .to(at::kDouble);
    const at::Tensor terms =
        objective.kind == ObjectiveKind::kSft
            ? -row_logprobs
            : clipped_surrogate(trajectories, row, positions, row_logprobs, objective, advantages);
    const at::Tensor weighted = doubles(coefficients, device) * terms;
    const at::Tensor row_loss = weighted.sum();
    loss.value += row_loss.item<double>();
    loss.size += weighted.detach().abs().sum().item<double>();
    torch::autograd::backward({row_loss}, {});
    const at::Tensor values = row_logprobs.detach().cpu().contiguous();
    for (size_t i = 0; i < positions.size(); ++i) {
      (*logprobs)[begin + positions[i]] = values.const_data_ptr<double>()[i];
    }
  }
  if (progress) progress(trajectories.num_rows(), trajectories.num_rows());
  return loss;
}

}  // namespace espalier
