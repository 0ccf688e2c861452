// SPDX-License-Identifier: Apache-2.0
// Metrics of a training run: metrics.jsonl and a TensorBoard event file.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "espalier/base/file.h"
#include "espalier/engine/engine.h"
#include "espalier/objective/options.h"
#include "espalier/plan/cost_model.h"

namespace espalier {

/// Appends scalars to one TensorBoard event file (events.out.tfevents.*): TFRecord framing with masked
/// CRC32C, Event protocol buffers of tensorflow/core/util/event.proto.
class EventWriter {
 public:
  explicit EventWriter(const std::filesystem::path& folder);
  void scalars(int64_t step, const std::map<std::string, double>& values);

  const LogFile& file() const { return file_; }

 private:
  void begin();
  void record(const std::string& event);
  LogFile file_;
};

/// CRC-32C (Castagnoli) of the bytes, as TFRecord uses it.
uint32_t crc32c(const std::string& bytes);

/// Where a resumed run starts to write.
struct MetricsStart {
  int64_t resumed_step = 0;
  bool evaluates_it = false;  // whether the evaluation after that step is still due
};

/// metrics.jsonl and the event file of a run folder. On opening, lines of steps after `resumed_step` (from an
/// interrupted run) and of evaluations that will be repeated are dropped; with resumed_step 0 the file is
/// truncated. Failure to write is not an error: `note` is called once, missing lines are retried with every
/// step, and finish() reports what is still missing. If the file is removed, `note` is called and a new one
/// is started with the next step.
class MetricsWriter {
 public:
  MetricsWriter(const std::filesystem::path& run_folder, const MetricsStart& start,
                std::function<void(const std::string&)> note = {});
  void write(int64_t step, const nlohmann::ordered_json& values);

  /// Writes the record of an evaluation, {"step": ..., "eval_loss": ...}. All names but `step` start with
  /// "eval_".
  void write_evaluation(int64_t step, const nlohmann::ordered_json& values);
  void finish();

 private:
  void note(const std::string& text) const {
    if (note_) note_(text);
  }
  void append(int64_t step, const nlohmann::ordered_json& values,
              const std::map<std::string, double>& scalars);

  std::function<void(const std::string&)> note_;
  LogFile file_;
  EventWriter events_;
  bool warned_ = false;
};

/// Loss, tokens, rates, memory, micro-batches, and metrics of objective and routers, by the names of
/// metrics.jsonl. `seconds`: duration of the step.
nlohmann::ordered_json step_metrics(const ModelCost& model, const ObjectiveOptions& objective,
                                    const StepResult& result, double seconds);

}  // namespace espalier
