// SPDX-License-Identifier: Apache-2.0
// What an Engine is made of.
#pragma once

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>

#include "espalier/base/check.h"
#include "espalier/config/stop_ids.h"
#include "espalier/measure/model_use.h"
#include "espalier/model/weights/weights.h"
#include "espalier/ops/attention/library.h"
#include "espalier/plan/planner.h"
#include "espalier/python_engine/options.h"
#include "espalier/python_engine/trained.h"
#include "espalier/runtime/out_of_memory.h"
#include "espalier/sample/sampling.h"
#include "espalier/train/run/load_model.h"
#include "espalier/train/run/run_state.h"

namespace espalier::python_engine {

/// Disables the caller's no_grad, inference mode and autocast during its lifetime.
struct PlainMode {
  c10::InferenceMode no_inference{false};
  at::AutoGradMode with_grad{true};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/// Calls `body`. Removes backtraces from LibTorch's errors, and adds advice when memory runs out.
template <class Body>
auto plainly(const Body& body) {
  try {
    const PlainMode mode;
    return body();
  } catch (const c10::Error& error) {
    throw std::runtime_error(text_of(error));
  }
}

struct OpenSampling {
  OpenSampling(std::shared_ptr<Trained> given, const SampleOptions& sizes, const SamplingMemory& memory)
      : base(std::move(given)), tree(memory.tree), sampling(base->decoder(), sizes, memory) {}

  /// Throws InputError where weights have changed since prompts were added. Forgets those of prompts that are
  /// done. `now`: the prefixes of the engine.
  void check_weights(const std::shared_ptr<PrefixTree>& now) {
    std::erase_if(trained, [&](const auto& each) { return !sampling.uses(each.first); });
    for (const auto& [number, each] : trained) each->check_whole();
    ESPALIER_CHECK(
        tree == now &&
            std::ranges::all_of(trained, [](const auto& each) { return each.second->weights == each.first; }),
        "sampling: expected the weights that it began with, but they were trained or loaded since");
  }

  const std::shared_ptr<Trained> base;
  const std::shared_ptr<PrefixTree> tree;
  std::map<int64_t, std::shared_ptr<Trained>>
      trained{};  // what prompts are sampled with, by Trained::weights
  Sampling sampling;
};

/// Throws InputError where they are not rows of the data.
std::vector<int64_t> rows_of(const Trajectories& rows, const Indices& indices);

struct Engine::State {
  /// In the scope of the machine's kernels.
  State(const std::filesystem::path& model, const EngineOptions& given, const Machine& machine,
        std::unique_ptr<Group> process_group, bool only_adapters)
      : ranks(std::move(process_group)),
        group(ranks ? *ranks : alone()),
        options(given),
        device(machine.device),
        kernels(machine.kernels),
        dtype(given.train.dtype),
        source(model),
        stop_ids(std::async(std::launch::deferred, [&] { return read_stop_ids(model); })),
        base(loaded(model, given.train.trains_adapter() || only_adapters)),
        now(base),
        config(base->decoder().config()),
        routers(router_shape(config)),
        prefixes(std::make_shared<PrefixTree>(config, given.prefix_cache)),
        times(given.planning.costs({.config = config, .dtype = dtype, .device = device}).time) {
    if (given.train.trains_adapter()) now = new_adapter(given);
    if (now != base) now->check_trains();
    stop_ids.wait();
  }

  /// Without an adapter.
  std::shared_ptr<Trained> loaded(const std::filesystem::path& model, bool frozen) {
    options.train.model = model;
    options.train.device = device;
    TrainOptions train = options.train;
    train.lora.reset();
    train.adapter.clear();
    Decoder decoder = load_model(train);
    if (frozen) decoder.freeze();
    return trained(std::move(decoder), frozen ? std::optional(LoraOptions{}) : std::nullopt);
  }

  std::shared_ptr<Trained> new_adapter(const EngineOptions& given) const {
    TrainOptions train = options.train;
    train.lora = given.train.lora;
    train.adapter = given.train.adapter;
    train.seed = given.train.seed;
    return trained(with_adapter(base->decoder(), train), given.lora.trained(config));
  }

  std::shared_ptr<Trained> trained(Decoder decoder, std::optional<LoraOptions> lora) const {
    auto made =
        std::make_shared<Trained>(std::move(decoder), std::move(lora), options.train.optimizer, group);
    made->weights = ++num_weights;
    return made;
  }

  /// Before the weights in use change: nothing that was made of them is used again. Those of the base are
  /// under all adapters.
  void forget_weights() {
    if (now == base) {
      prefixes = std::make_shared<PrefixTree>(config, options.prefix_cache);
      ready_weights.reset();
    }
    now->weights = ++num_weights;
  }

  SamplingMemory memory() {
    std::shared_ptr<ReadyWeights> ready = ready_weights.lock();
    if (!ready) ready_weights = ready = std::make_shared<ReadyWeights>();
    return {prefixes, ready, counts};
  }

  SampledWeights sampled_weights() const { return {now->weights, now->maps}; }

  SampleOptions sample_options(const SamplingFlags& given) const {
    return given.resolved([&] { return stop_ids.get(); }, config.vocab_size);
  }

  /// What is trained is in this dtype.
  at::ScalarType trained_dtype() const {
    return espalier::trained_dtype(dtype, now->decoder().has_adapter());
  }

  std::unique_ptr<Group> ranks;
  const Group& group;
  EngineOptions options;
  at::Device device;
  KernelChoice kernels;
  at::ScalarType dtype;
  SourceModel source;
  std::shared_future<std::vector<int32_t>> stop_ids;  // of the model's folder, or the error in reading them
  mutable int64_t num_weights = 0;                    // so far; before `base`, which is made with it
  const std::shared_ptr<Trained> base;                // all weights
  std::shared_ptr<Trained> now;                       // in use
  const DecoderConfig& config;
  RouterShape routers;
  std::shared_ptr<PrefixTree> prefixes;               // of all adapters, and of the base
  std::weak_ptr<ReadyWeights> ready_weights{};        // while something is sampled
  std::vector<std::shared_ptr<OpenSampling>> open{};  // ends in a call, whoever has let go of it
  const std::shared_ptr<SamplingCounts> counts = std::make_shared<SamplingCounts>();
  TimeModel times;  // for comparing plans, without adapters
  std::atomic<bool> is_busy{false};

  /// body() as the engine's one call, with its kernels.
  template <class Body>
  auto call(const Body& body) {
    ESPALIER_CHECK(!is_busy.exchange(true),
                   "Engine: expected one call at a time, received one during another");
    const std::unique_ptr<std::atomic<bool>, void (*)(std::atomic<bool>*)> busy(
        &is_busy, [](std::atomic<bool>* flag) { flag->store(false); });
    const KernelScope scope(kernels);
    std::erase_if(open, [](const auto& sampling) { return sampling.use_count() == 1; });
    return plainly(body);
  }

  PlanCosts costs(const Objective& objective, const HeadDemand& demand = {}) const {
    PlanCosts costs{times, memory_model(config, dtype, objective, device, demand)};
    costs.memory.optimizer_bytes_per_parameter =
        optimizer_bytes(options.train.optimizer.kind, trained_dtype(), group.size());
    return now->lora ? with_adapters(std::move(costs), config, *now->lora) : costs;
  }

  /// Few intervals of keys for each token, where the library takes attention by intervals.
  ChildOrder child_order() const {
    return library::is_chosen(device) ? ChildOrder::kMostLeavesFirst : ChildOrder::kFirstReached;
  }

  void check_rows(const Trajectories& rows, const std::vector<int64_t>& indices) const;
  void check_whole() const {
    for (const auto& used : {base, now}) used->check_whole();
  }
  void check_checkpoint(const std::filesystem::path& folder, const RunState& saved, bool with_optimizer,
                        std::vector<std::string>* notes) const;
  void save_merged(const std::filesystem::path& folder) const;
};

}  // namespace espalier::python_engine
