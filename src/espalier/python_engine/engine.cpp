// SPDX-License-Identifier: Apache-2.0
#include "espalier/python_engine/engine.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <numeric>
#include <stdexcept>

#include "espalier/base/check.h"
#include "espalier/base/json_file.h"
#include "espalier/base/mapped_file_guard.h"
#include "espalier/config/stop_ids.h"
#include "espalier/distributed/process_group.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/share.h"
#include "espalier/measure/kernel_check.h"
#include "espalier/measure/model_use.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/model/weights/weights.h"
#include "espalier/objective/custom.h"
#include "espalier/ops/attention/cuda.h"
#include "espalier/ops/attention/library.h"
#include "espalier/plan/adapter_cost.h"
#include "espalier/python_engine/options.h"
#include "espalier/python_engine/trained.h"
#include "espalier/runtime/out_of_memory.h"
#include "espalier/sample/distributions.h"
#include "espalier/sample/sampler.h"
#include "espalier/train/optimizer/diagnosis.h"
#include "espalier/train/run/checkpoint.h"
#include "espalier/train/run/load_model.h"
#include "espalier/train/run/metrics.h"
#include "espalier/train/run/resume.h"

namespace espalier::python_engine {
namespace {

namespace fs = std::filesystem;

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

Metrics to_metrics(const nlohmann::ordered_json& json) {
  Metrics metrics;
  for (const auto& [name, value] : json.items()) {
    if (value.is_number_integer()) {
      metrics.emplace_back(name, value.get<int64_t>());
    } else {
      metrics.emplace_back(name, value.get<double>());
    }
  }
  return metrics;
}

/// The function as an objective. The step is created after the objective.
std::shared_ptr<const Objective> objective_of(const ObjectiveOptions& options, const TermFunction& function,
                                              const std::shared_ptr<TermsOfRows>& terms) {
  if (!function) return make_objective(options);
  return std::make_shared<Custom>(
      options, [function, terms](std::span<const double> logprobs) { return function(*terms, logprobs); });
}

TermsOfRows terms_of_rows(const Step& step) {
  TermsOfRows terms{.offsets = step.terms.offsets, .positions = {}};
  for (const Term& term : step.terms.values) terms.positions.push_back(term.position);
  return terms;
}

fs::path plain_path(const fs::path& folder) {
  const fs::path path = fs::absolute(folder).lexically_normal();
  return path.has_filename() ? path : path.parent_path();  // of "folder/"
}

}  // namespace

void check_kernels_by(const std::vector<std::string>& command) {
  espalier::check_kernels_by(
      [command](const std::string& family, const std::string& device, const fs::path& finding) {
        std::vector<std::string> words = command;
        words.insert(words.end(), {family, device, finding.string()});
        return words;
      });
}

void check_kernels(const std::string& family, const std::string& device, const fs::path& finding) {
  plainly([&] { return run_check(family, device, finding); });
}

bool prove_kernels(int index) {
  return plainly([&] {
    constexpr int64_t kHeadDim = 128;
    set_default_cuda_kernels(espalier::prove_kernels(index));
    return attention_kind({.dtype = at::kBFloat16, .head_dim = kHeadDim, .device = index}) !=
           AttentionKind::kMasked;
  });
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

struct Engine::State {
  /// In the scope of the machine's kernels.
  State(const fs::path& model, const EngineOptions& given, const Machine& machine,
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
    stop_ids.wait();
  }

  /// Without an adapter.
  std::shared_ptr<Trained> loaded(const fs::path& model, bool frozen) {
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

  PlanCosts costs(const Objective& objective, int64_t ref_topk = 0) const {
    PlanCosts costs{times, memory_model(config, dtype, objective, device, ref_topk)};
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
  void check_checkpoint(const fs::path& folder, const RunState& saved, bool with_optimizer,
                        std::vector<std::string>* notes) const;
  void save_merged(const fs::path& folder) const;
};

namespace {

TokenWatch told(const Watch& watch) {
  if (!watch) return {};
  return [&watch](std::span<const Completion* const> completions) {
    std::vector<int64_t> tokens;
    for (const Completion* each : completions) {
      tokens.insert(tokens.end(), {each->row, each->sample, each->tokens.back()});
    }
    return watch(std::move(tokens));
  };
}

std::vector<int64_t> rows_of(const Trajectories& rows, const Indices& indices) {
  if (indices) {
    ESPALIER_CHECK(!indices->empty(), "indices: expected at least one row, received none");
    for (const int64_t row : *indices) {
      ESPALIER_CHECK(row >= 0 && row < rows.num_rows(), "indices: expected rows from 0 to {}, received {}",
                     rows.num_rows() - 1, row);
    }
    return *indices;
  }
  std::vector<int64_t> all(rows.num_rows());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void check_targets(const Trajectories& rows, int64_t row, int64_t vocab_size) {
  if (rows.target_ids.empty()) return;
  for (const int32_t id : rows.target_ids.span().subspan(rows.offsets[row], rows.row_size(row))) {
    ESPALIER_CHECK(id >= 0 && id < vocab_size,
                   "row {}: field `target_ids`: expected token ids from 0 and below {}, the model's "
                   "vocab_size, received {}",
                   rows.name(row), vocab_size, id);
  }
}

}  // namespace

void Engine::State::check_rows(const Trajectories& rows, const std::vector<int64_t>& indices) const {
  ESPALIER_CHECK(rows.num_rows() > 0, "rows: expected at least one, received none");
  for (const int64_t row : indices) {
    const auto ids = rows.row(row);
    const auto largest = std::ranges::max_element(ids);
    ESPALIER_CHECK(
        largest == ids.end() || *largest < config.vocab_size,
        "row {}: field `input_ids`: expected token ids below {}, the model's vocab_size, received {}",
        rows.name(row), config.vocab_size, *largest);
    check_targets(rows, row, config.vocab_size);
    const int64_t begin = rows.offsets[row] * rows.ref_topk, end = rows.offsets[row + 1] * rows.ref_topk;
    const auto topk = rows.ref_topk_ids.span().subspan(begin, end - begin);
    const auto largest_topk = std::ranges::max_element(topk);
    ESPALIER_CHECK(
        largest_topk == topk.end() || *largest_topk < config.vocab_size,
        "row {}: field `ref_topk_ids`: expected token ids below {}, the model's vocab_size, received {}",
        rows.name(row), config.vocab_size, *largest_topk);
  }
  check_recorded_routes("rows", rows, routers, config.num_hidden_layers());
}

void Engine::State::check_checkpoint(const fs::path& folder, const RunState& saved, bool with_optimizer,
                                     std::vector<std::string>* notes) const {
  const std::string fault = manifest_fault(folder, checkpoint_name(saved.step),
                                           [&](const std::string& note) { notes->push_back(note); });
  ESPALIER_CHECK(fault.empty(), "{}: the checkpoint is damaged: {}", folder.string(), fault);
  const bool is_adapter = fs::exists(folder / kAdapterConfigFile);
  const bool has_adapter = now->decoder().has_adapter();
  const auto trained = [](bool adapter) { return adapter ? "an adapter" : "all weights"; };
  ESPALIER_CHECK(is_adapter == has_adapter,
                 "{}: expected a checkpoint of {}, as the engine trains, received one of {}", folder.string(),
                 trained(has_adapter), trained(is_adapter));
  const auto saved_config =
      is_adapter ? saved.model_config : read_json_file<nlohmann::ordered_json>(folder / "config.json");
  const auto difference = config_difference(saved_config, source.config());
  if (difference) {
    throw InputError(
        fmt::format("{}: expected a checkpoint of the same model, received one of another: {} is {} in its "
                    "config.json, {} here",
                    folder.string(), difference->key, difference->before, difference->now));
  }
  if (is_adapter) now->check_adapter_of(folder);
  if (!saved.settings) return;
  for (const auto& [name, own] : {std::pair("dtype", dtype_name(dtype)),
                                  std::pair("optimizer", to_string(options.train.optimizer.kind))}) {
    if (!with_optimizer && name == std::string_view("optimizer")) continue;
    const auto was = saved.settings->fixed.value(name, nlohmann::ordered_json(own));
    ESPALIER_CHECK(was == own, "{}: expected a checkpoint with {} {}, that of the engine, received {}",
                   folder.string(), name, own, was.dump());
  }
}

Engine::Engine(const fs::path& model, const NamedTexts& options, const std::string& process_group,
               bool only_adapters)
    : state_(plainly([&] {
        const EngineOptions parsed = parse_engine_options(options);
        std::unique_ptr<Group> ranks =
            process_group.empty() ? nullptr : espalier::process_group(process_group);
        const Machine machine = parsed.device.open(ranks ? *ranks : alone());
        const KernelScope scope(machine.kernels);
        return std::make_unique<State>(model, parsed, machine, std::move(ranks), only_adapters);
      })) {}

Engine::~Engine() = default;

EngineAdapter Engine::new_adapter(const NamedTexts& lora) {
  return state_->call([&] { return EngineAdapter{state_->new_adapter(parse_engine_options(lora))}; });
}

EngineAdapter Engine::copy(const EngineAdapter& adapter) {
  return state_->call([&] {
    adapter.trained->check_whole();
    Decoder copy = copy_of(adapter.trained->decoder());
    copy.freeze();
    EngineAdapter copied{state_->trained(std::move(copy), adapter.trained->lora)};
    copied.trained->step = adapter.trained->step;
    return copied;
  });
}

void Engine::use(const EngineAdapter& adapter) {
  state_->call([&] { state_->now = adapter.trained ? adapter.trained : state_->base; });
}

EngineAdapter Engine::adapter() const {
  return {state_->now == state_->base ? nullptr : state_->now};
}

Metrics Engine::forward_backward(const Trajectories& rows, const Indices& indices, const NamedTexts& named,
                                 const TermFunction& function, const Progress& progress,
                                 const std::vector<EngineAdapter>& adapters) {
  State& state = *state_;
  return state.call([&] {
    const auto begin = std::chrono::steady_clock::now();
    const auto terms = std::make_shared<TermsOfRows>();
    const TrainedRows of_rows(adapters, state.now);
    ObjectiveOptions objective;
    const std::unique_ptr<Loss> made = state.group.together([&] {
      state.check_whole();
      of_rows.check(rows, state.group);
      objective = parse_objective_options(named);
      ESPALIER_CHECK(state.routers.count() > 0 || !objective.has_router_losses(),
                     "router_aux_loss_coef, router_z_loss_coef: expected a model with experts, received {}",
                     state.config.model_type);
      ESPALIER_CHECK(!function || state.group.size() == 1,
                     "objective: expected a name with a process group of several ranks, received a function");
      state.check_rows(rows, rows_of(rows, indices));
      return std::make_unique<Loss>(rows, objective_of(objective, function, terms));
    });
    const Loss& loss = *made;
    const PlanCosts plan_costs = state.costs(loss.objective(), rows.ref_topk);
    const Step step = state.group.together([&] {
      return make_share(loss, rows_of(rows, indices),
                        {.plan = state.options.planning.options(rows),
                         .objective = objective,
                         .costs = &plan_costs,
                         .child_order = state.child_order(),
                         .adapters = of_rows.maps},
                        state.group);
    });
    *terms = terms_of_rows(step);
    // Adapters freeze the weights that they share.
    for (const Parameter& weight : state.base->decoder().weights())
      weight.value.set_requires_grad(!of_rows.all.front()->lora);
    const Decoder& decoder = (adapters.empty() ? state.now : state.base)->decoder();
    try {
      const StepResult result = adapters.empty() ? state.now->trainer.add_gradients(step, loss, progress)
                                                 : espalier::forward_backward(decoder, step, loss, progress);
      check_mapped_files();
      const double norm = of_rows.count_gradients();
      check_finite(decoder, step, loss, "forward_backward", result.loss, norm, state.group);
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      nlohmann::ordered_json metrics = step_metrics(state.now->cost, objective, result, seconds);
      if (result.measured_peak_bytes() == 0) metrics.erase("peak_tensor_bytes");  // nothing counted
      metrics["grad_norm"] = norm;
      return to_metrics(metrics);
    } catch (...) {
      for (const auto& trained : of_rows.all) trained->clear();
      throw;
    }
  });
}

Metrics Engine::optim_step(const NamedTexts& settings) {
  const auto checked_options = [&] {
    state_->check_whole();
    ESPALIER_CHECK(state_->now->num_added > 0,
                   "optim_step: expected gradients, but there was no forward_backward since the last one");
    TrainOptions options = state_->options.train;
    OptionList list;
    add_optimizer_options(&options, &list, /*schedules=*/false);
    list.set(settings);
    check_train_options(options);
    return options;
  };
  return state_->call([&] {
    const TrainOptions options = state_->group.together(checked_options);
    Trained& now = *state_->now;
    const double norm = now.grad_norm;
    now.trainer.optimizer().options() = options.optimizer;
    state_->forget_weights();
    now.trainer.update(options.learning_rate, norm);
    now.clear();
    ++now.step;
    return Metrics{{"step", now.step}, {"grad_norm", norm}, {"learning_rate", options.learning_rate}};
  });
}

void Engine::fail(const std::string& message) {
  state_->call([&] {
    try {
      state_->group.together([&]() -> bool { throw InputError(message); });
    } catch (const InputError&) {  // the caller throws its own
    }
  });
}

TokenLogprobs Engine::logprobs(const Trajectories& rows, int64_t top_k, const Progress& progress) {
  return state_->call([&] {
    const PlanCosts costs = state_->costs(*make_objective(ObjectiveOptions{}));
    const Step step = state_->group.together([&] {
      state_->check_whole();
      state_->check_rows(rows, rows_of(rows, std::nullopt));
      return make_step(rows, {.plan = state_->options.planning.options(rows),
                              .costs = &costs,
                              .terms = TermChoice::kAll,
                              .child_order = state_->child_order()});
    });
    TokenDistributions found =
        compute_distributions(state_->now->decoder(), rows, step, {.top_k = top_k}, progress, state_->group);
    check_mapped_files();
    check_finite(rows, found.logprobs);
    if (top_k == 0) return TokenLogprobs{std::move(found.logprobs), {}, {}};
    TopTokens top = top_tokens(found);
    return TokenLogprobs{std::move(found.logprobs), std::move(top.ids), std::move(top.logprobs)};
  });
}

Trajectories Engine::sample(const Trajectories& rows, const NamedTexts& options,
                            const std::vector<NamedTexts>& of_rows, const Progress& progress,
                            const Watch& watch) {
  State& state = *state_;
  return state.call([&] {
    SampleOptions sampling;
    const Trajectories prompts = state.group.together([&] {
      state.check_whole();
      const SamplingFlags flags = parse_sampling_options(options);
      state.check_rows(rows, rows_of(rows, std::nullopt));
      sampling = of_rows.empty() ? state.sample_options(flags) : flags.options;
      for (const NamedTexts& own : of_rows) {
        sampling.rows.push_back(state.sample_options(parse_sampling_options(own)));
      }
      return prompts_of(rows, flags.whole_rows);
    });
    const SampleResult result = espalier::sample(
        state.base->decoder(), prompts, sampling,
        {.progress = [&](const SampleProgress& done) { progress(done.finished, done.completions); },
         .watch = told(watch)},
        state.memory(), state.group, state.sampled_weights());
    check_mapped_files();
    return espalier::rows_of(result.completions, rows, prompts);
  });
}

EngineSampling Engine::sampling(const NamedTexts& options) {
  State& state = *state_;
  return state.call([&] {
    state.check_whole();
    state.open.push_back(
        std::make_shared<OpenSampling>(state.base, parse_sampling_options(options).options, state.memory()));
    return EngineSampling{state.open.back()};
  });
}

void Engine::add(const EngineSampling& sampling, int64_t first, const Trajectories& rows,
                 const std::vector<NamedTexts>& of_rows) {
  State& state = *state_;
  OpenSampling& open = *sampling.open;
  return state.call([&] {
    state.check_whole();
    open.check_weights(state.prefixes);
    state.check_rows(rows, rows_of(rows, std::nullopt));
    std::vector<SampleOptions> options;
    for (int64_t row = 0; row < rows.num_rows(); ++row) {
      options.push_back(state.sample_options(parse_sampling_options(of_rows[row])));
      Sampling::check(open.base->decoder(), row, rows.row_size(row), options.back());
    }
    open.trained.emplace(state.now->weights, state.now);
    open.sampling.use(state.sampled_weights());
    for (int64_t row = 0; row < rows.num_rows(); ++row) {
      open.sampling.add(first + row, rows.row(row), options[row], /*place=*/0);
    }
    check_mapped_files();
  });
}

std::vector<Completion> Engine::sample_on(const EngineSampling& sampling, const Watch& watch) {
  State& state = *state_;
  OpenSampling& open = *sampling.open;
  return state.call([&] {
    open.check_weights(state.prefixes);
    return open.sampling.step(told(watch));
  });
}

Metrics Engine::sampling_counts() {
  return state_->call([&] {
    const SamplingCounts& counts = *state_->counts;
    return Metrics{{"prompt_tokens", counts.flat_prompt_tokens},
                   {"kept_prompt_tokens", counts.kept_prompt_tokens},
                   {"encoded_prompt_tokens", counts.encoded_prompt_tokens},
                   {"sampled_tokens", counts.sampled_tokens},
                   {"prefix_cache_bytes", state_->prefixes->bytes()}};
  });
}

std::vector<HostArray> Engine::gradients() {
  return state_->call([&] {
    state_->check_whole();
    std::vector<HostArray> arrays;
    const Decoder& decoder = state_->now->decoder();
    state_->now->trainer.gather_gradients();
    const std::vector<at::Tensor> gradients = decoder.gradients();
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      const auto held = std::make_shared<at::Tensor>(
          gradients[i].detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true).contiguous());
      arrays.push_back({.name = decoder.parameters()[i].name,
                        .shape = held->sizes().vec(),
                        .is_double = held->scalar_type() == at::kDouble,
                        .owner = held,
                        .values = held->mutable_data_ptr()});
    }
    return arrays;
  });
}

void Engine::zero_gradients() {
  state_->call([&] { state_->now->clear(); });
}

void Engine::State::save_merged(const fs::path& folder) const {
  const Decoder& decoder = now->decoder();
  check_new_folder(folder);
  ESPALIER_CHECK(decoder.has_adapter() && group.size() == 1,
                 "merged: expected an adapter in use, and no process group of several ranks");
  ESPALIER_CHECK(
      !config.tie_word_embeddings || !decoder.adapter().parameters.back().name.starts_with(kHeadModule),
      "merged: expected no adapter of lm_head, received one: the head of this model is its "
      "embedding, which has no adapter");
  const Decoder merged(config, merged_weights(decoder.weights(), decoder.adapter()), decoder.buffers());
  PartialFolder partial(folder);
  source.save(merged, partial.path(), dtype);
  partial.commit();
}

void Engine::save(const fs::path& folder, const std::string& dtype, bool merged) {
  const Group& group = state_->group;
  state_->call([&] {
    const fs::path path = plain_path(folder);
    if (merged) return state_->save_merged(path);
    const at::ScalarType saved = group.together([&] {
      state_->check_whole();
      ESPALIER_CHECK(!group.is_first() || !fs::exists(path), "{}: expected no such folder, it exists already",
                     path.string());
      return dtype.empty() ? state_->trained_dtype() : parse_dtype(dtype);
    });
    const Decoder& decoder = state_->now->decoder();
    const OptimizerKind kind = state_->options.train.optimizer.kind;
    RunState state{.step = state_->now->step, .data_hashes = {}, .settings = RunSettings{}};
    state.settings->fixed = {{"dtype", dtype_name(state_->dtype)},
                             {"save-dtype", dtype_name(saved)},
                             {"optimizer", decoder.is_frozen() ? "none" : to_string(kind)}};
    if (decoder.has_adapter()) state.model_config = state_->source.config();
    CheckpointWriter writer(path, {.source = state_->source, .save_dtype = saved, .group = &group});
    writer.start(decoder, state_->now->trainer.optimizer(), state);
    writer.finish();
  });
}

std::vector<std::string> Engine::load(const fs::path& folder, bool with_optimizer) {
  return state_->call([&] {
    const fs::path path = plain_path(folder);
    const RunState saved = read_state_of_any_folder(path);
    std::vector<std::string> notes;
    Trained& now = *state_->now;
    now.check_trains();
    state_->check_checkpoint(path, saved, with_optimizer, &notes);
    now.is_half_loaded = true;
    state_->forget_weights();
    now.clear();
    Optimizer& optimizer = now.trainer.optimizer();
    load_checkpoint(path, &now.trainer.decoder(), with_optimizer ? &optimizer : nullptr);
    if (!with_optimizer) optimizer = Optimizer(now.decoder(), state_->options.train.optimizer, state_->group);
    const std::string fault = nonfinite_parameters(now.decoder());
    ESPALIER_CHECK(fault.empty(), "{}: {}", path.string(), fault);
    now.trainer.forget_half_update();
    now.is_half_loaded = false;
    now.step = with_optimizer ? saved.step : 0;
    return notes;
  });
}

int64_t Engine::step() const {
  return state_->now->step;
}

int64_t Engine::vocab_size() const {
  return state_->config.vocab_size;
}

}  // namespace espalier::python_engine
