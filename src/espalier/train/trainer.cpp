#include "espalier/train/trainer.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"
#include "espalier/model/weights.h"
#include "espalier/train/checkpoint.h"
#include "espalier/train/metrics.h"

namespace espalier {

Shuffle parse_shuffle(const std::string& name) {
  if (name == "none") return Shuffle::kNone;
  if (name == "groups") return Shuffle::kGroups;
  if (name == "rows") return Shuffle::kRows;
  throw InputError(fmt::format("shuffle: expected none, groups or rows, received `{}`", name));
}

namespace {

// Rows in units that stay together, in order of first appearance.
std::vector<std::vector<int64_t>> shuffle_units(const Trajectories& trajectories, Shuffle shuffle) {
  std::vector<std::vector<int64_t>> units;
  std::map<std::string, size_t> unit_of_group;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const bool grouped =
        shuffle == Shuffle::kGroups && !trajectories.group_id.empty() && !trajectories.group_id[row].empty();
    if (!grouped) {
      units.push_back({row});
      continue;
    }
    const auto [entry, is_new] = unit_of_group.try_emplace(trajectories.group_id[row], units.size());
    if (is_new) units.emplace_back();
    units[entry->second].push_back(row);
  }
  return units;
}

}  // namespace

std::vector<std::vector<int64_t>> epoch_batches(const Trajectories& trajectories, const TrainOptions& options,
                                                int64_t epoch) {
  std::vector<std::vector<int64_t>> units = shuffle_units(trajectories, options.shuffle);
  if (options.shuffle != Shuffle::kNone) {
    Rng rng(options.seed, static_cast<uint64_t>(epoch));
    for (size_t i = units.size(); i > 1; --i)
      std::swap(units[i - 1], units[rng.below(static_cast<int64_t>(i))]);
  }
  const size_t batch_size = options.batch_size > 0 ? options.batch_size : trajectories.num_rows();
  std::vector<std::vector<int64_t>> batches;
  for (const std::vector<int64_t>& unit : units) {
    for (const int64_t row : unit) {
      if (batches.empty() || batches.back().size() == batch_size) batches.emplace_back();
      batches.back().push_back(row);
    }
  }
  return batches;
}

int64_t total_steps(const Trajectories& trajectories, const TrainOptions& options) {
  if (options.steps > 0) return options.steps;
  const int64_t batch_size = options.batch_size > 0 ? options.batch_size : trajectories.num_rows();
  return options.epochs * ((trajectories.num_rows() + batch_size - 1) / batch_size);
}

namespace {

int64_t peak_memory_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{1024} * usage.ru_maxrss;
}

nlohmann::ordered_json step_metrics(const TrainOptions& options, const ModelShape& shape,
                                    const StepResult& result, double seconds) {
  nlohmann::ordered_json metrics;
  metrics["loss"] = result.loss;
  metrics["flat_tokens"] = result.flat_tokens;
  metrics["tree_tokens"] = result.tree_tokens;
  metrics["encoded_tokens"] = result.work.tokens;
  metrics["loss_terms"] = result.terms;
  metrics["seconds"] = seconds;
  metrics["tree_tokens_per_second"] = static_cast<double>(result.work.tokens) / seconds;
  metrics["flat_tokens_per_second"] = static_cast<double>(result.flat_tokens) / seconds;
  metrics["tflops_per_second"] = step_flops(shape, result.work).total() / seconds / 1e12;
  metrics["peak_memory_bytes"] = peak_memory_bytes();
  metrics["peak_tensor_bytes"] = result.measured_peak_bytes();
  metrics["micro_batches"] = result.measured.size();
  metrics["micro_batch_seconds"] = result.measured_seconds();
  if (result.recomputed.tokens > 0) metrics["recomputed_tokens"] = result.recomputed.tokens;
  if (options.objective.kind == ObjectiveKind::kGrpo) {
    const double terms = static_cast<double>(std::max<int64_t>(1, result.terms));
    metrics["clip_fraction"] = static_cast<double>(result.clipped_terms) / terms;
    metrics["ratio_mean"] = result.ratio_sum / terms;
    metrics["mismatch_kl"] = result.mismatch_kl_sum / terms;
  }
  return metrics;
}

// Flags that a continuation may change. Other steps or epochs change what a falling schedule does from there
// on.
constexpr const char* kFreeOnResume[] = {"resume",        "save-every",   "steps",          "epochs",
                                         "dry-run",       "out",          "no-calibration", "config",
                                         "skip-bad-rows", "threads",      "model",          "data",
                                         "profile",       "profile-step", "device",         "deterministic"};

void check_resumable(const nlohmann::json& saved, const TrainOptions& options,
                     const std::filesystem::path& folder) {
  for (const auto& [key, value] : options.config.items()) {
    if (std::find(std::begin(kFreeOnResume), std::end(kFreeOnResume), key) != std::end(kFreeOnResume))
      continue;
    const nlohmann::json before = saved.contains(key) ? saved[key] : nlohmann::json();
    ESPALIER_CHECK(before == nlohmann::json(value),
                   "--resume: {} was {} in the run that wrote {}, received {}; resume with the same flags, "
                   "or start a new run in "
                   "another --out",
                   key, before.dump(), folder.string(), value.dump());
  }
}

/// The steps of a run, by index, also one ahead: while the device works on another one.
class Steps {
 public:
  Steps(const Trajectories& trajectories, const TrainOptions& options)
      : trajectories_(trajectories), options_(options) {}

  Step take(int64_t index) {
    if (ahead_ && ahead_index_ == index) return std::move(*std::exchange(ahead_, std::nullopt));
    return make(index);
  }

  /// One that cannot be made says so when it is taken.
  void make_ahead(int64_t index) {
    try {
      ahead_ = make(index);
      ahead_index_ = index;
    } catch (const std::exception&) {
      ahead_.reset();
    }
  }

 private:
  Step make(int64_t index) {
    if (batches_.empty()) batches_ = epoch_batches(trajectories_, options_, epoch_);
    const auto per_epoch = static_cast<int64_t>(batches_.size());
    if (index / per_epoch != epoch_) {
      epoch_ = index / per_epoch;
      batches_ = epoch_batches(trajectories_, options_, epoch_);
    }
    return make_step(trajectories_, batches_[index % per_epoch], options_.plan, options_.objective,
                     options_.costs ? &*options_.costs : nullptr);
  }

  const Trajectories& trajectories_;
  const TrainOptions& options_;
  std::vector<std::vector<int64_t>> batches_;  // of the epoch
  int64_t epoch_ = 0;
  std::optional<Step> ahead_;
  int64_t ahead_index_ = 0;
};

int64_t resume(const TrainOptions& options, const Trajectories& trajectories, Decoder* decoder,
               Optimizer* optimizer, const TrainEvents& events) {
  const auto newest = newest_checkpoint(options.out);
  if (!options.resume) {
    ESPALIER_CHECK(
        !newest,
        "{} holds a run already (newest checkpoint {}): pass --resume to continue it or choose another --out",
        options.out.string(), newest->filename().string());
    return 0;
  }
  if (!newest) {
    if (events.note)
      events.note(fmt::format("no checkpoint in {}: starting from the model", options.out.string()));
    return 0;
  }
  const nlohmann::json state = read_trainer_state(*newest);
  check_resumable(state.value("config", nlohmann::json::object()), options, *newest);
  const int64_t rows = state.value("data_rows", int64_t{-1}),
                tokens = state.value("data_tokens", int64_t{-1});
  ESPALIER_CHECK(rows == trajectories.num_rows() && tokens == trajectories.num_tokens(),
                 "--resume: the run was on {} trajectories with {} tokens, the data has {} with {}", rows,
                 tokens, trajectories.num_rows(), trajectories.num_tokens());
  load_checkpoint(*newest, decoder, optimizer);
  return state["step"].get<int64_t>();
}

// Number of the step to profile; 0: none. The first step of a run is not like the others: memory is new.
int64_t profiled_step(const TrainOptions& options, int64_t first, int64_t last) {
  if (options.profiler == nullptr) return 0;
  if (options.profile_step == 0) return std::min(first + 2, last);
  ESPALIER_CHECK(first < options.profile_step && options.profile_step <= last,
                 "profile-step: expected one of the steps {} to {}, which this run takes, received {}",
                 first + 1, last, options.profile_step);
  return options.profile_step;
}

}  // namespace

bool train(const Trajectories& trajectories, const TrainOptions& options, const TrainEvents& events,
           const std::atomic<bool>* stop) {
  std::filesystem::create_directories(options.out);
  Decoder decoder = load_decoder(options.model, options.dtype, options.device);
  Optimizer optimizer(decoder, options.optimizer);
  const Advantages advantages = options.objective.kind == ObjectiveKind::kGrpo
                                    ? Advantages(trajectories, options.objective.scale_rewards)
                                    : Advantages();
  const int64_t first = resume(options, trajectories, &decoder, &optimizer, events);
  const int64_t last = total_steps(trajectories, options);
  if (events.started) events.started(last, first);
  if (first >= last) {
    if (events.note) events.note(fmt::format("nothing to do: step {} of {} is reached already", first, last));
    return true;
  }
  const int64_t profiled = profiled_step(options, first, last);
  const ModelShape shape = model_shape(decoder.config());
  const CheckpointOptions checkpoint{options.out, options.model, options.save_dtype};
  MetricsWriter writer(options.out, first);

  Steps steps(trajectories, options);
  for (int64_t index = first; index < last; ++index) {
    const int64_t number = index + 1;
    if (number == profiled) options.profiler->start();
    const auto begin = std::chrono::steady_clock::now();
    const Step step = steps.take(index);
    decoder.zero_gradients();
    PendingStep pending = start_forward_backward(decoder, trajectories, step, options.objective, &advantages,
                                                 [&](int64_t done, int64_t total) {
                                                   if (events.micro_batch)
                                                     events.micro_batch(number, done, total);
                                                 });
    if (number < last) steps.make_ahead(number);
    const StepResult result = finish(std::move(pending));
    const double rate =
        options.learning_rate * schedule_factor(options.scheduler, index, last, options.warmup_steps);
    const double norm = optimizer.step(rate);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (number == profiled) {
      const ProfileSummary profile = options.profiler->stop(decoder, result);
      if (events.note) events.note(profile.text());
    }

    nlohmann::ordered_json metrics = {{"step", number}};
    metrics.update(step_metrics(options, shape, result, seconds));
    if (options.costs) {
      const StepPrediction prediction = predict_step(*options.costs, step);
      metrics["predicted_seconds"] = prediction.total_seconds();
      metrics["predicted_peak_bytes"] = prediction.largest_peak_bytes();
      if (events.predicted && index == first) events.predicted(step, prediction, result);
    }
    metrics["grad_norm"] = norm;
    metrics["learning_rate"] = rate;
    writer.write(number, metrics);
    if (events.step) events.step(number, metrics);

    const bool stopping = stop != nullptr && stop->load();
    if (number == last || stopping || (options.save_every > 0 && number % options.save_every == 0)) {
      nlohmann::ordered_json state = {{"step", number},
                                      {"data_rows", trajectories.num_rows()},
                                      {"data_tokens", trajectories.num_tokens()},
                                      {"config", options.config}};
      const auto folder = save_checkpoint(checkpoint, number, decoder, optimizer, state);
      if (events.saved) events.saved(folder);
    }
    if (stopping && number < last) return false;
  }
  return true;
}

}  // namespace espalier
