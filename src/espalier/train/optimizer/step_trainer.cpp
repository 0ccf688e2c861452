// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/optimizer/step_trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/engine/order.h"
#include "espalier/runtime/out_of_memory.h"
#include "espalier/train/optimizer/diagnosis.h"

namespace espalier {
namespace {

/// Trained parameters with the numbers of their layers, in the order in which a backward pass leaves them.
/// -1: of no layer.
std::vector<std::pair<int64_t, at::Tensor>> parameters_by_layer(const Decoder& decoder) {
  constexpr std::string_view kLayers = "layers.";
  std::vector<std::pair<int64_t, at::Tensor>> result;
  for (const auto& [name, value] : decoder.parameters()) {
    const size_t at = name.find(kLayers);
    result.emplace_back(at == std::string::npos ? -1 : std::stoll(name.substr(at + kLayers.size())), value);
  }
  std::ranges::stable_sort(result, std::greater(), [](const auto& each) { return each.first; });
  return result;
}

}  // namespace

StepResult StepTrainer::add_gradients(const Step& step, const Loss& loss,
                                      const MicroBatchProgress& progress) {
  group_.check_equal("the step's rows, terms and shares", step.whole.digest);
  const bool divides = step.context_group != nullptr;
  if (divides)
    step.context_group->check_equal("the plan of the step and its division", step.divisions_digest);
  // Gradients of earlier steps are added up again with the new ones.
  group_.zero_others(decoder_.gradients());
  PartSums sums(group_);
  std::vector<std::pair<int64_t, at::Tensor>> by_layer = parameters_by_layer(decoder_);
  auto next = by_layer.begin();
  const auto add_from = [&](int64_t layer) {
    for (; next != by_layer.end() && next->first >= layer; ++next) {
      // An expert without tokens gets a zero gradient, so that its moments decay as those of fused experts
      // do.
      complete_gradient(next->second);
      sums.add(next->second.grad());
    }
  };
  const auto add_rest = [&] {
    add_from(-1);
    sums.end();
  };
  bool all_come = !needs_routing_pass(step, loss);  // to the sums, with those that fail in a pass
  const auto routed = [&](const std::vector<at::Tensor>& counts) {
    all_come = group_.together([] { return true; });
    group_.add_up(counts);
  };
  PendingStep pending = group_.together([&] {
    try {
      PendingStep started = start_forward_backward(
          decoder_, step, loss, {.progress = progress, .routed = routed, .left = add_from});
      add_rest();
      return started;
    } catch (const RankError&) {
      throw;
    } catch (const std::exception& error) {
      // Ranks that wait for keys of this one come to no sum: they learn of it when this process ends.
      const std::string failure = fmt::format("rank {}: {}", group_.rank(), text_of(error));
      if (divides) throw RankError(failure);
      if (all_come) add_rest();
      throw;
    }
  });
  StepResult result = finish(std::move(pending), group_);
  sums.finish();
  return result;
}

void StepTrainer::update(double learning_rate, double norm) {
  group_.check_equal("the learning rate", fmt::format("{:a}", learning_rate));
  is_half_updated_ = true;
  try {
    group_.together([&] {
      optimizer_.update(learning_rate, norm);
      return true;
    });
  } catch (const NonFiniteError&) {
    is_half_updated_ = false;  // thrown by all, before any change
    gather_gradients();
    throw;
  }
  std::vector<at::Tensor> weights;
  for (const Parameter& parameter : decoder_.parameters()) weights.push_back(parameter.value);
  group_.gather_parts(weights);
  is_half_updated_ = false;
}

void check_finite(const Decoder& decoder, const Step& step, const Loss& loss, const std::string& title,
                  double value, double norm, const Group& group) {
  if (std::isfinite(value) && std::isfinite(norm)) return;
  group.gather_parts(decoder.gradients());
  std::string why;
  try {
    why = explain_nonfinite(decoder, step, loss);
  } catch (const std::exception& error) {
    why = fmt::format("the reason could not be found: {}", text_of(error));
  }
  for (const std::string& found : group.gather(why)) {
    if (found.size() > why.size()) why = found;
  }
  throw NonFiniteError(fmt::format("{}: loss {}, gradient norm {}: expected finite numbers{}{}", title, value,
                                   norm, why.empty() ? "" : "; ", why));
}

}  // namespace espalier
