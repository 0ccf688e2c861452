// SPDX-License-Identifier: Apache-2.0
// Random problems for recurrences with states.
#pragma once

#include <array>
#include <tuple>
#include <utility>

#include "espalier/ops/gated_delta/gated_delta.h"
#include "espalier/ops/operator.h"
#include "espalier/ops/ssm_scan/ssm_scan.h"
#include "tests/ops/comparison.h"
#include "tests/ops/gated_delta/reference.h"
#include "tests/ops/random_paths.h"
#include "tests/ops/ssm_scan/reference.h"

namespace espalier::testing {

using Tensors = std::vector<at::Tensor>;

/// `groups` of `repeat` heads each, whose states are [rows, columns].
struct ScanSizes {
  int64_t groups, repeat, rows, columns;
  int64_t heads() const { return groups * repeat; }
};

/// What a recurrence is computed on, apart from its inputs.
struct ScanPlan {
  at::Tensor prev, states, ends;
  int64_t chunk_size;
};
using ScanResult = std::pair<at::Tensor, at::Tensor>;  // out, states at the ends

/// out and states in one row of numbers.
inline at::Tensor in_one_row(const at::Tensor& out, const at::Tensor& states) {
  return at::cat({out.to(states.scalar_type()).flatten(), states.flatten()});
}

/// A tuple of so many tensors.
template <size_t kCount>
using NTensors = decltype(std::tuple_cat(std::array<at::Tensor, kCount>()));

/// An operator as GPUs run it, which is composed of ATen's operators, on the CPU's tensors.
template <class Result, class... Parts>
Result run_as_on_gpus(const char* name, const Parts&... parts) {
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow(name, "")
                      .template typed<detail::SignatureOf<Result, Parts...>>();
  const at::AutoDispatchBelowADInplaceOrView guard;
  return std::apply(
      [&](const auto&... given) {
        return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CUDA), detail::dispatched(given)...);
      },
      std::tuple_cat(detail::members(parts)...));
}

inline at::Tensor normal(at::IntArrayRef shape) {
  return at::randn(shape, at::kDouble);
}

/// Inputs: q, k, v, g, beta.
struct GatedDelta {
  static constexpr bool is_rows[] = {true, true, true, false, false};  // the others are in the dtype of sums
  static constexpr size_t kDecays = 3;                                 // the input that decides them

  static Tensors inputs(int64_t tokens, const ScanSizes& sizes) {
    return {normal({tokens, sizes.groups, sizes.rows}), normal({tokens, sizes.groups, sizes.rows}),
            normal({tokens, sizes.heads(), sizes.columns}), normal({tokens, sizes.heads()}).abs().neg(),
            normal({tokens, sizes.heads()}).sigmoid()};
  }

  /// Keys that repeat, decays that forget all and none.
  static void exaggerate(Rng& rng, Tensors& in) {
    if (rng.below(3) == 0) in[1].copy_(in[1].narrow(0, 0, 1).expand_as(in[1]));
    if (rng.below(3) == 0) in[3].mul_(at::randint(0, 2, in[3].sizes()).mul_(40));
  }

  static GatedDeltaRule arguments(const Tensors& in, const ScanPlan& plan) {
    return {.q = in[0],
            .k = in[1],
            .v = in[2],
            .g = in[3],
            .beta = in[4],
            .prev = plan.prev,
            .states = plan.states,
            .ends = plan.ends,
            .chunk_size = plan.chunk_size};
  }

  static ScanResult run(bool plain, const Tensors& in, const ScanPlan& plan) {
    const GatedDeltaRule given = arguments(in, plan);
    const GatedDeltaOutput output = plain ? reference::gated_delta_rule(given) : gated_delta_rule(given);
    return {output.out, output.states};
  }

  static Results run_composed(const Tensors& in, const ScanPlan& plan, const ScanResult& grads) {
    const GatedDeltaRule given = arguments(in, plan);
    const auto [out, end_states] = run_as_on_gpus<NTensors<2>>("espalier::gated_delta_rule", given);
    const auto [q, k, v, g, beta, contexts] = run_as_on_gpus<NTensors<6>>(
        "espalier::gated_delta_rule_backward", TensorOrNone(grads.first), TensorOrNone(grads.second), given);
    return {in_one_row(out, end_states), q, k, v, g, beta, contexts};
  }
};

/// Inputs: x, B, C, dt, A, D.
struct Ssm {
  static constexpr bool is_rows[] = {true, true, true, false, false, false};
  static constexpr size_t kDecays = 4;

  static Tensors inputs(int64_t tokens, const ScanSizes& sizes) {
    return {normal({tokens, sizes.heads(), sizes.columns}),
            normal({tokens, sizes.groups, sizes.rows}),
            normal({tokens, sizes.groups, sizes.rows}),
            at::rand({tokens, sizes.heads()}, at::kDouble),
            at::rand({sizes.heads()}, at::kDouble).add_(0.1).neg_(),
            normal({sizes.heads()})};
  }

  /// Steps that forget all and none.
  static void exaggerate(Rng& rng, Tensors& in) {
    if (rng.below(3) == 0) in[3].mul_(at::randint(0, 2, in[3].sizes()).mul_(80));
  }

  static SsmScan arguments(const Tensors& in, const ScanPlan& plan) {
    return {.x = in[0],
            .dt = in[3],
            .a = in[4],
            .b = in[1],
            .c = in[2],
            .d = in[5],
            .prev = plan.prev,
            .states = plan.states,
            .ends = plan.ends,
            .chunk_size = plan.chunk_size};
  }

  static ScanResult run(bool plain, const Tensors& in, const ScanPlan& plan) {
    const SsmScan given = arguments(in, plan);
    const SsmScanOutput output = plain ? reference::ssm_scan(given) : ssm_scan(given);
    return {output.out, output.states};
  }

  static Results run_composed(const Tensors& in, const ScanPlan& plan, const ScanResult& grads) {
    const SsmScan given = arguments(in, plan);
    const auto [out, end_states] = run_as_on_gpus<NTensors<2>>("espalier::ssm_scan", given);
    const auto [x, dt, a, b, c, d, contexts] = run_as_on_gpus<NTensors<7>>(
        "espalier::ssm_scan_backward", TensorOrNone(grads.first), TensorOrNone(grads.second), given);
    return {in_one_row(out, end_states), x, b, c, dt, a, d, contexts};
  }
};

/// A random problem. Its result is out and the states at `ends`, in one row of numbers.
template <class Scan>
struct ScanProblem {
  RandomPaths paths;
  int64_t chunk_size;
  Tensors inputs;  // float64
  at::Tensor states, grad_out, grad_states;

  ScanProblem(Rng& rng, int64_t max_nodes, int64_t max_node_tokens, const ScanSizes& sizes)
      : ScanProblem(rng, random_paths(rng, max_nodes, max_node_tokens), sizes) {}

  ScanProblem(Rng& rng, RandomPaths on, const ScanSizes& sizes)
      : paths(std::move(on)),
        chunk_size(int64_t{1} << rng.below(4)),
        inputs(Scan::inputs(paths.num_tokens(), sizes)) {
    const auto num_ends = static_cast<int64_t>(paths.ends.size());
    if (paths.num_contexts > 0)
      states = normal({paths.num_contexts, sizes.heads(), sizes.rows, sizes.columns});
    grad_out = normal({paths.num_tokens(), sizes.heads(), sizes.columns});
    grad_states = normal({num_ends, sizes.heads(), sizes.rows, sizes.columns});
  }

  /// The inputs in `dtype` or in the dtype of sums; the last one is `states`, if there are any.
  Tensors inputs_in(at::ScalarType dtype) const {
    const auto sums = dtype == at::kDouble ? at::kDouble : at::kFloat;
    Tensors in;
    for (size_t i = 0; i < inputs.size(); ++i) in.push_back(inputs[i].to(Scan::is_rows[i] ? dtype : sums));
    if (states.defined()) in.push_back(states.to(sums));
    return in;
  }

  /// What low precision makes of the inputs and the gradients, exactly.
  void round_to(at::ScalarType dtype) {
    Tensors rounded = cast(inputs_in(dtype), at::kDouble);
    if (states.defined()) {
      states = rounded.back();
      rounded.pop_back();
    }
    inputs = rounded;
    grad_out = grad_out.to(dtype).to(at::kDouble);
  }

  Results ours(at::ScalarType dtype, const at::Tensor& prev) const { return run(false, dtype, prev); }
  Results ours(at::ScalarType dtype = at::kDouble) const { return ours(dtype, paths.prev_tensor()); }
  Results plain(at::ScalarType dtype = at::kDouble) const { return run(true, dtype, paths.prev_tensor()); }

  /// As ours, by the composition of ATen's operators.
  Results composed(at::ScalarType dtype = at::kDouble) const {
    const Tensors in = inputs_in(dtype);
    Results results =
        Scan::run_composed(in, plan_of(in, paths.prev_tensor()),
                           {grad_out.to(dtype), grad_states.to(dtype == at::kDouble ? dtype : at::kFloat)});
    if (!states.defined()) results.pop_back();
    return results;
  }

 private:
  ScanPlan plan_of(const Tensors& in, const at::Tensor& prev) const {
    return {prev, states.defined() ? in.back() : at::Tensor(), paths.ends_tensor(), chunk_size};
  }

  Results run(bool plain, at::ScalarType dtype, const at::Tensor& prev) const {
    const auto sums = dtype == at::kDouble ? at::kDouble : at::kFloat;
    const auto function = [&](const Tensors& in) {
      const auto [out, end_states] = Scan::run(plain, in, plan_of(in, prev));
      return in_one_row(out, end_states) + zero_of(in, sums);
    };
    return with_gradients(function, inputs_in(dtype), in_one_row(grad_out, grad_states).to(sums));
  }
};

}  // namespace espalier::testing
