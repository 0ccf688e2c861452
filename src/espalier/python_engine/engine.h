// SPDX-License-Identifier: Apache-2.0
// The trainer as a library: accumulates gradients of rows until an optimiser step. Implementation of Python's
// class Engine, without Python and LibTorch headers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "espalier/base/options.h"
#include "espalier/data/trajectories.h"
#include "espalier/objective/custom_function.h"
#include "espalier/sample/completion.h"

namespace espalier::python_engine {

using Metrics = std::vector<std::pair<std::string, std::variant<int64_t, double>>>;
using Progress = std::function<void(int64_t done, int64_t total)>;  // after each micro-batch

/// Rows of the data; nullopt: all.
using Indices = std::optional<std::vector<int64_t>>;

/// The terms of a step; those of its k-th row are [offsets[k], offsets[k + 1]).
struct TermsOfRows {
  std::vector<int64_t> offsets;    // [R + 1]
  std::vector<int64_t> positions;  // [M], positions of tokens in their rows
};
/// A CustomFunction that also receives the tokens of the log-probabilities.
using TermFunction = std::function<CustomValue(const TermsOfRows& terms, std::span<const double> logprobs)>;

struct TokenLogprobs {
  std::vector<double> logprobs;      // [N]
  std::vector<int32_t> top_ids;      // [N, top_k], -1 for first tokens
  std::vector<double> top_logprobs;  // [N, top_k]
  std::vector<double> entropies;     // [N] in nats, or empty
  int64_t encoded_tokens = 0;
};

/// A TokenWatch (sample/sampler.h) of [B, 3]: the prompt's row, the number of the sample, its new token.
using Watch = std::function<std::vector<bool>(std::vector<int64_t>)>;

/// A tensor on the host, float64 or else float32.
struct HostArray {
  std::string name;
  std::vector<int64_t> shape;
  bool is_double = false;
  std::shared_ptr<void> owner;
  void* values = nullptr;  // valid while the owner lives
};

/// The options of engines, objectives and sampling as JSON (OptionList::description).
std::string engine_options_json();
std::string objective_options_json();
std::string sampling_options_json();

/// An adapter of an Engine: matrices, gradients, optimiser state. Of the Engine that made it; null: none.
struct Trained;
struct EngineAdapter {
  std::shared_ptr<Trained> trained;
};

/// Prompts that an Engine samples side by side. Of the Engine that made it.
struct OpenSampling;
struct EngineSampling {
  std::shared_ptr<OpenSampling> open;
};

/// Not reentrant: a call during another, from a thread or a callback, throws InputError. If forward_backward
/// fails after it has started, also by an exception of a callback, all gradients are cleared. Only optim_step
/// and load change weights; if one of them fails half-way, only load is allowed afterwards.
class Engine {
 public:
  /// Opens the device and loads the model, with an adapter to train if the options ask for one.
  /// `process_group`: the name of one of torch.distributed, whose ranks train together (StepTrainer); "":
  /// none. They make the same calls with the same rows. `only_adapters`: weights are never trained.
  Engine(const std::filesystem::path& model, const NamedTexts& options, const std::string& process_group,
         bool only_adapters);
  ~Engine();

  /// A new adapter, of the options --lora-rank or --adapter with related ones, and --seed.
  EngineAdapter new_adapter(const NamedTexts& lora);
  /// A copy with the same matrices, which is never trained.
  EngineAdapter copy(const EngineAdapter& adapter);
  /// All other methods use this adapter from now on, or the weights alone.
  void use(const EngineAdapter& adapter);
  EngineAdapter adapter() const;

  /// Accumulates the gradients of an objective on the rows, with options by flag name, or of a loss computed
  /// by a function, with those of shared targets and routers alone. Returns the metrics of step_metrics, and
  /// grad_norm over all gradients since the last optim_step. Throws NonFiniteError if loss or gradients are
  /// not finite. `adapters`: by row of the data, that for which its gradients are, all in one pass; empty:
  /// the one in use.
  Metrics forward_backward(const Trajectories& rows, const Indices& indices, const NamedTexts& options,
                           const TermFunction& function, const Progress& progress,
                           const std::vector<EngineAdapter>& adapters);

  /// Clips gradients, updates weights, clears gradients. `settings`: options of the optimiser, by flag name,
  /// for this step alone. Returns the metrics step, grad_norm, learning_rate.
  Metrics optim_step(const NamedTexts& settings);

  /// In place of a call that this rank cannot make: the other ranks, which make it, throw RankError with the
  /// message.
  void fail(const std::string& message);

  /// Log-probabilities [N] of every token given all before it in its row; 0 for first tokens. `top_k`: also
  /// of the most likely ones in its place. `entropies`: also those of the distributions. `temperature`:
  /// divides the logits; 0: that of each row (Trajectories::logit_temperature), and 1 for the most likely
  /// tokens.
  TokenLogprobs logprobs(const Trajectories& rows, int64_t top_k, double temperature, bool entropies,
                         const Progress& progress);

  /// Samples completions of the rows' prompts with the current weights, as rows (sample/sampler.h: rows_of);
  /// options by the flag names of `espalier sample`: of the call, or of each row (SampleOptions::rows).
  /// `progress` is called after each token with finished and all completions. Gradients are kept.
  Trajectories sample(const Trajectories& rows, const NamedTexts& options,
                      const std::vector<NamedTexts>& row_options, const Progress& progress,
                      const Watch& watch);

  /// Samples prompts that come while others are sampled (sample/sampling.h); options: the sizes of
  /// `espalier sample`. Each rank has its own.
  EngineSampling sampling(const NamedTexts& options);
  /// Whole rows as prompts, each with its options, sampled with the weights that are in use now, also when
  /// others are; the caller numbers them, from `first` on, and their client, one of those that share the
  /// sampling.
  void add(const EngineSampling& sampling, int64_t first, const Trajectories& rows,
           const std::vector<NamedTexts>& row_options, int64_t client);
  /// Ends a prompt. Returns how many of its completions were not done.
  int64_t remove(const EngineSampling& sampling, int64_t number, int64_t client);
  /// A token more of every completion that goes on. Returns those that are done; rows are numbers of prompts.
  /// What could not be sampled has an error; after an exception nothing goes on. Throws InputError if weights
  /// of prompts have changed since they were added.
  std::vector<Completion> sample_on(const EngineSampling& sampling, const Watch& watch);

  /// prompt_tokens, of all completions; kept_prompt_tokens and encoded_prompt_tokens, of prompts;
  /// sampled_tokens; prefix_cache_bytes, which are kept now; decode_steps, prompt_seconds, decode_seconds.
  Metrics sampling_counts();

  /// Those of the model's folder that are in its vocabulary.
  std::vector<int32_t> stop_ids();

  /// Gradients accumulated since the last optim_step, by parameter; undefined ones are omitted.
  std::vector<HostArray> gradients();
  void zero_gradients();

  /// Saves a checkpoint (train/run/checkpoint.h) in a folder that must not exist: the model, or only the
  /// adapter if one is trained. `dtype`: of the saved weights; "": that of the engine. Of several ranks the
  /// first writes it, and the others wait. `merged`: the model alone, with the adapter in use in its weights.
  void save(const std::filesystem::path& folder, const std::string& dtype, bool merged);

  /// Loads weights and optimiser, or begins with a new optimiser, and clears the gradients. Returns notes
  /// about oddities of the folder. Throws InputError, before any change, if the checkpoint is damaged, or has
  /// another model, dtype, optimiser or adapter.
  std::vector<std::string> load(const std::filesystem::path& folder, bool with_optimizer);

  int64_t step() const;  // optimiser steps done
  int64_t vocab_size() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace espalier::python_engine
