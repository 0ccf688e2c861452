// SPDX-License-Identifier: Apache-2.0
#include "espalier/python_engine/engine.h"

#include <ATen/ATen.h>

#include <chrono>

#include "espalier/base/mapped_file_guard.h"
#include "espalier/distributed/process_group.h"
#include "espalier/engine/share.h"
#include "espalier/objective/custom.h"
#include "espalier/python_engine/state.h"
#include "espalier/sample/distributions.h"
#include "espalier/train/optimizer/diagnosis.h"
#include "espalier/train/run/checkpoint.h"
#include "espalier/train/run/metrics.h"
#include "espalier/train/run/resume.h"

namespace espalier::python_engine {
namespace {

namespace fs = std::filesystem;

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
    const TrainedRows trained_rows(adapters, state.now);
    ObjectiveOptions objective;
    const std::unique_ptr<Loss> made = state.group.together([&] {
      state.check_whole();
      trained_rows.check(rows, state.group);
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
    const PlanCosts plan_costs = state.costs(loss.objective(), head_demand(rows));
    const Step step = state.group.together([&] {
      return make_share(loss, rows_of(rows, indices),
                        {.plan = state.options.planning.options(rows),
                         .objective = objective,
                         .costs = &plan_costs,
                         .child_order = state.child_order(),
                         .adapters = trained_rows.maps},
                        state.group);
    });
    *terms = terms_of_rows(step);
    // Adapters freeze the weights that they share.
    for (const Parameter& weight : state.base->decoder().weights())
      weight.value.set_requires_grad(!trained_rows.all.front()->lora);
    const Decoder& decoder = (adapters.empty() ? state.now : state.base)->decoder();
    try {
      const StepResult result = adapters.empty() ? state.now->trainer.add_gradients(step, loss, progress)
                                                 : espalier::forward_backward(decoder, step, loss, progress);
      check_mapped_files();
      const double norm = trained_rows.count_gradients();
      check_finite(decoder, step, loss, "forward_backward", result.loss, norm, state.group);
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      nlohmann::ordered_json metrics = step_metrics(state.now->cost, objective, result, seconds);
      if (result.measured_peak_bytes() == 0) metrics.erase("peak_tensor_bytes");  // nothing counted
      metrics["grad_norm"] = norm;
      return to_metrics(metrics);
    } catch (...) {
      for (const auto& trained : trained_rows.all) trained->clear();
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

TokenLogprobs Engine::logprobs(const Trajectories& rows, int64_t top_k, double temperature, bool entropies,
                               const Progress& progress) {
  return state_->call([&] {
    const PlanCosts costs = state_->costs(*make_objective(ObjectiveOptions{}), head_demand(rows));
    const Step step = state_->group.together([&] {
      state_->check_whole();
      state_->check_rows(rows, rows_of(rows, std::nullopt));
      return make_step(rows, {.plan = state_->options.planning.options(rows),
                              .costs = &costs,
                              .terms = TermChoice::kAll,
                              .child_order = state_->child_order()});
    });
    TokenDistributions found = compute_distributions(state_->now->decoder(), rows, step,
                                                     {.temperature = temperature > 0 ? temperature : 1,
                                                      .at_row_temperatures = temperature == 0,
                                                      .entropies = entropies,
                                                      .top_k = top_k},
                                                     progress, state_->group);
    check_mapped_files();
    check_finite(rows, found.logprobs);
    if (entropies) check_finite(rows, found.entropies, "entropy");
    TopTokens top = top_tokens(found);
    return TokenLogprobs{std::move(found.logprobs), std::move(top.ids), std::move(top.logprobs),
                         std::move(found.entropies), step.plan.num_tokens()};
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
