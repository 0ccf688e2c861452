// SPDX-License-Identifier: Apache-2.0
#include "espalier/python_engine/engine.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "espalier/base/check.h"
#include "espalier/base/json_file.h"
#include "espalier/base/mapped_file_guard.h"
#include "espalier/config/stop_ids.h"
#include "espalier/distributed/process_group.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/cost.h"
#include "espalier/engine/share.h"
#include "espalier/measure/kernel_check.h"
#include "espalier/measure/model_use.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/model/weights/weights.h"
#include "espalier/objective/custom.h"
#include "espalier/ops/attention/cuda.h"
#include "espalier/ops/attention/library.h"
#include "espalier/ops/checks.h"
#include "espalier/plan/adapter_cost.h"
#include "espalier/python_engine/options.h"
#include "espalier/runtime/out_of_memory.h"
#include "espalier/sample/sampler.h"
#include "espalier/train/optimizer/diagnosis.h"
#include "espalier/train/optimizer/step_trainer.h"
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

const char* trained_things(bool is_adapter) {
  return is_adapter ? "an adapter" : "all weights";
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

struct Engine::State {
  /// The stop ids of the model's folder, or the error in reading them.
  struct StopIds {
    explicit StopIds(const fs::path& model) {
      try {
        ids = read_stop_ids(model);
      } catch (const InputError& error) {
        fault = error.what();
      }
    }

    std::vector<int32_t> ids;
    std::string fault;
  };

  /// In the scope of the machine's kernels.
  State(const fs::path& model, const EngineOptions& given, const Machine& machine,
        std::unique_ptr<Group> process_group)
      : ranks(std::move(process_group)),
        group(ranks ? *ranks : alone()),
        options(given),
        device(machine.device),
        kernels(machine.kernels),
        dtype(given.train.dtype),
        source(model),
        stop_ids(model),
        trainer(loaded(model), given.train.optimizer, group),
        config(trainer.decoder().config()),
        lora(given.lora.trained(config)),
        cost(lora ? with_adapters(model_cost(config), config, *lora) : model_cost(config)),
        routers(router_shape(config)),
        times(given.planning.costs({.config = config, .dtype = dtype, .device = device}).time) {}

  Decoder loaded(const fs::path& model) const {
    TrainOptions train = options.train;
    train.model = model;
    train.device = device;
    return load_model(train);
  }

  /// What is trained is in this dtype.
  at::ScalarType trained_dtype() const { return lora ? detail::accumulator_dtype(dtype) : dtype; }

  std::unique_ptr<Group> ranks;
  const Group& group;
  EngineOptions options;
  at::Device device;
  KernelChoice kernels;
  at::ScalarType dtype;
  SourceModel source;
  StopIds stop_ids;
  StepTrainer trainer;
  const DecoderConfig& config;
  std::optional<LoraOptions> lora;  // of the adapter that is trained
  ModelCost cost;
  RouterShape routers;
  TimeModel times;        // for comparing plans, without adapters
  int64_t step = 0;       // optimiser steps done
  double grad_norm = 0;   // of the accumulated gradients
  int64_t num_added = 0;  // calls of forward_backward since the last step
  bool is_half_loaded = false;
  std::atomic<bool> is_busy{false};

  /// Marks the engine as busy, and has its kernels run.
  class Call {
   public:
    explicit Call(State* engine) : is_busy_(&engine->is_busy), scope_(engine->kernels) {
      ESPALIER_CHECK(!is_busy_->exchange(true),
                     "Engine: expected one call at a time, received one during another");
    }
    ~Call() { is_busy_->store(false); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    std::atomic<bool>* is_busy_;
    KernelScope scope_;
  };

  void clear() {
    trainer.zero_gradients();
    num_added = 0;
    grad_norm = 0;
  }

  PlanCosts costs(const Objective& objective, int64_t ref_topk = 0) const {
    PlanCosts costs{times, memory_model(config, dtype, objective, device, ref_topk)};
    costs.memory.optimizer_bytes_per_parameter = optimizer_bytes(options.train.optimizer.kind, dtype);
    return lora ? with_adapters(std::move(costs), config, *lora) : costs;
  }

  /// Few intervals of keys for each token, where the library takes attention by intervals.
  ChildOrder child_order() const {
    return library::is_chosen(device) ? ChildOrder::kMostLeavesFirst : ChildOrder::kFirstReached;
  }

  void check_rows(const Trajectories& rows, const std::vector<int64_t>& indices) const;
  void check_whole() const;
  Metrics forward_backward(const Trajectories& rows, const Indices& indices, const NamedTexts& named,
                           const TermFunction& function, const Progress& progress);
  void check_adapter_of(const fs::path& checkpoint) const;
  void check_checkpoint(const fs::path& folder, const RunState& saved, std::vector<std::string>* notes) const;
};

namespace {

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

}  // namespace

void Engine::State::check_whole() const {
  ESPALIER_CHECK(!is_half_loaded,
                 "Engine: expected whole weights, but the last load failed half-way: load again");
  ESPALIER_CHECK(
      !trainer.is_half_updated(),
      "Engine: expected whole weights, but the last optim_step failed half-way: load a checkpoint");
}

void Engine::State::check_rows(const Trajectories& rows, const std::vector<int64_t>& indices) const {
  ESPALIER_CHECK(rows.num_rows() > 0, "rows: expected at least one, received none");
  for (const int64_t row : indices) {
    const auto ids = rows.row(row);
    const auto largest = std::ranges::max_element(ids);
    ESPALIER_CHECK(
        largest == ids.end() || *largest < config.vocab_size,
        "row {}: field `input_ids`: expected token ids below {}, the model's vocab_size, received {}",
        rows.name(row), config.vocab_size, *largest);
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

Metrics Engine::State::forward_backward(const Trajectories& rows, const Indices& indices,
                                        const NamedTexts& named, const TermFunction& function,
                                        const Progress& progress) {
  const auto begin = std::chrono::steady_clock::now();
  const auto terms = std::make_shared<TermsOfRows>();
  ObjectiveOptions objective;
  const std::unique_ptr<Loss> made = group.together([&] {
    check_whole();
    objective = parse_objective_options(named);
    ESPALIER_CHECK(routers.count() > 0 || !objective.has_router_losses(),
                   "router_aux_loss_coef, router_z_loss_coef: expected a model with experts, received {}",
                   config.model_type);
    ESPALIER_CHECK(!function || group.size() == 1,
                   "objective: expected a name with a process group of several ranks, received a function");
    check_rows(rows, rows_of(rows, indices));
    return std::make_unique<Loss>(rows, objective_of(objective, function, terms));
  });
  const Loss& loss = *made;
  const PlanCosts plan_costs = costs(loss.objective(), rows.ref_topk);
  const Step step = group.together([&] {
    return make_share(loss, rows_of(rows, indices),
                      {.plan = options.planning.options(rows),
                       .objective = objective,
                       .costs = &plan_costs,
                       .child_order = child_order()},
                      group);
  });
  *terms = terms_of_rows(step);
  try {
    const StepResult result = trainer.add_gradients(step, loss, progress);
    check_mapped_files();
    grad_norm = trainer.gradient_norm();
    check_finite(trainer.decoder(), step, loss, "forward_backward", result.loss, grad_norm, group);
    ++num_added;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    nlohmann::ordered_json metrics = step_metrics(cost, objective, result, seconds);
    if (result.measured_peak_bytes() == 0) metrics.erase("peak_tensor_bytes");  // nothing counted
    metrics["grad_norm"] = grad_norm;
    return to_metrics(metrics);
  } catch (...) {
    clear();
    throw;
  }
}

void Engine::State::check_adapter_of(const fs::path& folder) const {
  const Adapter& own = trainer.decoder().adapter();
  const Adapter saved = load_adapter(folder, config, dtype).adapter;
  ESPALIER_CHECK(
      saved.scale == own.scale,
      "{}: expected an adapter with scale {:g} (alpha over rank), that of the engine, received {:g}",
      folder.string(), own.scale, saved.scale);
  const auto shapes_of = [](const Adapter& adapter) {
    std::vector<std::string> shapes;
    for (const Parameter& parameter : adapter.parameters) {
      shapes.push_back(fmt::format("{} [{}]", parameter.name, fmt::join(parameter.value.sizes(), ", ")));
    }
    return shapes;
  };
  const std::vector<std::string> expected = shapes_of(own), received = shapes_of(saved);
  const auto [mine, theirs] = std::ranges::mismatch(expected, received);
  const auto shown = [](const auto& at, const auto& all) { return at == all.end() ? "no more" : *at; };
  ESPALIER_CHECK(mine == expected.end() && theirs == received.end(),
                 "{}: expected an adapter with {}, as the engine's, received one with {}", folder.string(),
                 shown(mine, expected), shown(theirs, received));
}

void Engine::State::check_checkpoint(const fs::path& folder, const RunState& saved,
                                     std::vector<std::string>* notes) const {
  const std::string fault = manifest_fault(folder, checkpoint_name(saved.step),
                                           [&](const std::string& note) { notes->push_back(note); });
  ESPALIER_CHECK(fault.empty(), "{}: the checkpoint is damaged: {}", folder.string(), fault);
  const bool is_adapter = fs::exists(folder / kAdapterConfigFile);
  ESPALIER_CHECK(is_adapter == lora.has_value(),
                 "{}: expected a checkpoint of {}, as the engine trains, received one of {}", folder.string(),
                 trained_things(lora.has_value()), trained_things(is_adapter));
  const auto saved_config =
      is_adapter ? saved.model_config : read_json_file<nlohmann::ordered_json>(folder / "config.json");
  const auto difference = config_difference(saved_config, source.config());
  if (difference) {
    throw InputError(
        fmt::format("{}: expected a checkpoint of the same model, received one of another: {} is {} in its "
                    "config.json, {} here",
                    folder.string(), difference->key, difference->before, difference->now));
  }
  if (is_adapter) check_adapter_of(folder);
  if (!saved.settings) return;
  for (const auto& [name, own] : {std::pair("dtype", dtype_name(dtype)),
                                  std::pair("optimizer", to_string(options.train.optimizer.kind))}) {
    const auto was = saved.settings->fixed.value(name, nlohmann::ordered_json(own));
    ESPALIER_CHECK(was == own, "{}: expected a checkpoint with {} {}, that of the engine, received {}",
                   folder.string(), name, own, was.dump());
  }
}

Engine::Engine(const fs::path& model, const NamedTexts& options, const std::string& process_group)
    : state_(plainly([&] {
        const EngineOptions parsed = parse_engine_options(options);
        std::unique_ptr<Group> ranks =
            process_group.empty() ? nullptr : espalier::process_group(process_group);
        const Machine machine = parsed.device.open(ranks ? *ranks : alone());
        const KernelScope scope(machine.kernels);
        return std::make_unique<State>(model, parsed, machine, std::move(ranks));
      })) {}

Engine::~Engine() = default;

Metrics Engine::forward_backward(const Trajectories& rows, const Indices& indices,
                                 const NamedTexts& objective, const Progress& progress) {
  return forward_backward(rows, indices, objective, TermFunction(), progress);
}

Metrics Engine::forward_backward(const Trajectories& rows, const Indices& indices, const NamedTexts& options,
                                 const TermFunction& function, const Progress& progress) {
  const State::Call call(state_.get());
  return plainly([&] { return state_->forward_backward(rows, indices, options, function, progress); });
}

Metrics Engine::optim_step(std::optional<double> learning_rate) {
  const State::Call call(state_.get());
  const auto update = [&] {
    state_->check_whole();
    ESPALIER_CHECK(state_->num_added > 0,
                   "optim_step: expected gradients, but there was no forward_backward since the last one");
    TrainOptions options = state_->options.train;
    options.learning_rate = learning_rate.value_or(options.learning_rate);
    check_train_options(options);
    const double norm = state_->grad_norm;
    state_->trainer.update(options.learning_rate, norm);
    state_->clear();
    ++state_->step;
    return Metrics{{"step", state_->step}, {"grad_norm", norm}, {"learning_rate", options.learning_rate}};
  };
  return plainly([&] { return state_->group.together(update); });
}

void Engine::fail(const std::string& message) {
  const State::Call call(state_.get());
  try {
    state_->group.together([&]() -> bool { throw InputError(message); });
  } catch (const InputError&) {  // the caller throws its own
  }
}

std::vector<double> Engine::logprobs(const Trajectories& rows, const Progress& progress) {
  const State::Call call(state_.get());
  return plainly([&] {
    const PlanCosts costs = state_->costs(*make_objective(ObjectiveOptions{}));
    const Step step = state_->group.together([&] {
      state_->check_whole();
      state_->check_rows(rows, rows_of(rows, std::nullopt));
      return make_step(rows, {.plan = state_->options.planning.options(rows),
                              .costs = &costs,
                              .terms = TermChoice::kAll,
                              .child_order = state_->child_order()});
    });
    std::vector<double> values(rows.num_tokens());
    compute_logprobs(state_->trainer.decoder(), rows, step, &values, progress, state_->group);
    check_mapped_files();
    check_finite(rows, values);
    return values;
  });
}

Trajectories Engine::sample(const Trajectories& rows, const NamedTexts& options, const Progress& progress) {
  const State::Call call(state_.get());
  return plainly([&] {
    SampleOptions resolved;
    const Trajectories prompts = state_->group.together([&] {
      state_->check_whole();
      const SamplingFlags sampling = parse_sampling_options(options);
      state_->check_rows(rows, rows_of(rows, std::nullopt));
      const State::StopIds& stop_ids = state_->stop_ids;
      const bool asks_model = !sampling.ignore_stop_ids && sampling.options.stop_ids.empty();
      if (asks_model && !stop_ids.fault.empty()) throw InputError(stop_ids.fault);
      resolved = sampling.resolved(stop_ids.ids, state_->config.vocab_size);
      return prompts_of(rows, sampling.whole_rows);
    });
    const SampleResult result = espalier::sample(
        state_->trainer.decoder(), prompts, resolved,
        [&](const SampleProgress& done) { progress(done.finished, done.completions); }, state_->group);
    check_mapped_files();
    return espalier::rows_of(result.completions, rows, prompts);
  });
}

std::vector<HostArray> Engine::gradients() {
  const State::Call call(state_.get());
  state_->check_whole();
  return plainly([&] {
    std::vector<HostArray> arrays;
    const Decoder& decoder = state_->trainer.decoder();
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
  const State::Call call(state_.get());
  state_->clear();
}

void Engine::save(const fs::path& folder, const std::string& dtype) {
  const State::Call call(state_.get());
  const auto write = [&] {
    state_->check_whole();
    if (!state_->group.is_first()) return true;
    const fs::path path = plain_path(folder);
    ESPALIER_CHECK(!fs::exists(path), "{}: expected no such folder, it exists already", path.string());
    const at::ScalarType saved = dtype.empty() ? state_->trained_dtype() : parse_dtype(dtype);
    RunState state{.step = state_->step, .data_hashes = {}, .settings = RunSettings{}};
    state.settings->fixed = {{"dtype", dtype_name(state_->dtype)},
                             {"save-dtype", dtype_name(saved)},
                             {"optimizer", to_string(state_->options.train.optimizer.kind)}};
    if (state_->lora) state.model_config = state_->source.config();
    write_checkpoint(path, {.run_folder = {}, .source = state_->source, .save_dtype = saved},
                     state_->trainer.decoder(), state_->trainer.optimizer(), state);
    return true;
  };
  plainly([&] { state_->group.together(write); });
}

std::vector<std::string> Engine::load(const fs::path& folder) {
  const State::Call call(state_.get());
  return plainly([&] {
    const fs::path path = plain_path(folder);
    const RunState saved = read_state_of_any_folder(path);
    std::vector<std::string> notes;
    state_->check_checkpoint(path, saved, &notes);
    state_->is_half_loaded = true;
    state_->clear();
    load_checkpoint(path, &state_->trainer.decoder(), &state_->trainer.optimizer());
    std::string fault = nonfinite_parameters(state_->trainer.decoder());
    if (fault.empty()) fault = state_->trainer.optimizer().nonfinite_state();
    ESPALIER_CHECK(fault.empty(), "{}: {}", path.string(), fault);
    state_->trainer.forget_half_update();
    state_->is_half_loaded = false;
    state_->step = saved.step;
    return notes;
  });
}

int64_t Engine::step() const {
  return state_->step;
}

int64_t Engine::vocab_size() const {
  return state_->config.vocab_size;
}

std::string Engine::dtype() const {
  return dtype_name(state_->dtype);
}

double Engine::learning_rate() const {
  return state_->options.train.learning_rate;
}

}  // namespace espalier::python_engine
