// SPDX-License-Identifier: Apache-2.0
// The trainer, called from outside: gradients of rows add up until an optimiser step uses them. What Python's
// class Engine is made of, without Python and without LibTorch's headers.
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

namespace espalier::python_engine {

using Metrics = std::vector<std::pair<std::string, std::variant<int64_t, double>>>;
using Progress = std::function<void(int64_t done, int64_t total)>;  // after each micro-batch

/// Rows of the data; nothing: all of them.
using Indices = std::optional<std::vector<int64_t>>;

/// The terms of a step: those of its k-th row are [offsets[k], offsets[k + 1]).
struct TermsOfRows {
  std::vector<int64_t> offsets;    // [R + 1]
  std::vector<int64_t> positions;  // [M], of the token in its row
};
/// A CustomFunction that is told of which tokens the log-probabilities are.
using TermFunction = std::function<CustomValue(const TermsOfRows& terms, std::span<const double> logprobs)>;

/// A tensor on the host, float64 or else float32.
struct HostArray {
  std::string name;
  std::vector<int64_t> shape;
  bool is_double = false;
  std::shared_ptr<void> owner;
  void* values = nullptr;  // as long as the owner lives
};

/// The options of engines, objectives and sampling as OptionList::description has them.
std::string engine_options_json();
std::string objective_options_json();
std::string sampling_options_json();

/// Engines on a GPU let its kernels prove themselves as commands do (measure/kernel_check.h), by processes of
/// `command` and three arguments more, with which they call check_kernels: family, device, file.
void check_kernels_by(const std::vector<std::string>& command);
void check_kernels(const std::string& family, const std::string& device,
                   const std::filesystem::path& finding);

/// Does that for the CUDA device of this index, once. Returns whether attention in bfloat16 is more than the
/// masked form of it there.
bool prove_kernels(int index);

/// One call at a time: a call during another, from a thread or a callback, is an InputError. Whatever ends a
/// forward_backward once it has begun, an exception of a callback included, clears all gradients. Weights are
/// changed by optim_step and load alone; where one of these fails half-way, only load is possible afterwards.
class Engine {
 public:
  /// Opens the device and loads the model, with an adapter that is trained in its place where options ask for
  /// one.
  Engine(const std::filesystem::path& model, const NamedTexts& options);
  ~Engine();

  /// Adds the gradients of an objective of the rows, with its options by the names of the flags. Metrics:
  /// those of step_metrics, and grad_norm, of all gradients since the last optim_step. Throws NonFiniteError
  /// where loss or gradients are not finite.
  Metrics forward_backward(const Trajectories& rows, const Indices& indices, const NamedTexts& objective,
                           const Progress& progress);
  /// The same with a loss that a function computes. Of the options, those of shared targets and routers
  /// count.
  Metrics forward_backward(const Trajectories& rows, const Indices& indices, const NamedTexts& options,
                           const TermFunction& function, const Progress& progress);

  /// Clips, updates the weights, clears the gradients. Metrics: step, grad_norm, learning_rate.
  Metrics optim_step(std::optional<double> learning_rate);

  /// Of every token of every row given all before it, [N]; 0 for the first tokens of rows.
  std::vector<double> logprobs(const Trajectories& rows, const Progress& progress);

  /// Completions of the rows' prompts by the weights as they are, as rows (sample/sampler.h: rows_of), with
  /// options by the names of the flags of `espalier sample`. `progress` is told of finished completions, and
  /// of all, after each token. Gradients stay.
  Trajectories sample(const Trajectories& rows, const NamedTexts& options, const Progress& progress);

  /// Sums since the last optim_step, by parameter; none where there were none.
  std::vector<HostArray> gradients();
  void zero_gradients();

  /// A checkpoint like those of a run (train/run/checkpoint.h) in a folder that does not exist yet: a model,
  /// or the adapter alone that is trained. `dtype`: of what is saved, "" for that in which it is trained.
  void save(const std::filesystem::path& folder, const std::string& dtype);

  /// Weights and optimiser as they were; clears the gradients. Returns what is odd about the folder. Throws
  /// InputError, before anything is changed, where the checkpoint is damaged, or of another model, dtype,
  /// optimiser or adapter.
  std::vector<std::string> load(const std::filesystem::path& folder);

  int64_t step() const;  // optimiser steps done
  int64_t vocab_size() const;
  std::string dtype() const;
  double learning_rate() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace espalier::python_engine
