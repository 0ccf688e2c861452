// SPDX-License-Identifier: Apache-2.0
// Where the numbers of a run go: metrics.jsonl and a TensorBoard event file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/base/log_file.h"

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

/// Where a run that goes on writes its numbers.
struct MetricsStart {
  int64_t resumed_step = 0;
  bool evaluates_it = false;  // the evaluation after that step is still to come
};

/// metrics.jsonl and the event file of a run folder. Lines of steps after `resumed_step` (from an interrupted
/// run) are dropped on opening, and so are evaluations that are done again; with resumed_step 0 the file
/// starts anew. A file that
/// cannot be written is no error: `note` is told once, missing lines are tried again with every step, and
/// finish() says what is still missing. A file that somebody removes begins again with the next step, and
/// `note` is told.
class MetricsWriter {
 public:
  MetricsWriter(const std::filesystem::path& run_folder, const MetricsStart& start,
                std::function<void(const std::string&)> note = {});
  void write(int64_t step, const nlohmann::ordered_json& values);

  /// The record of an evaluation after a step, {"step": ..., "eval_loss": ...}. The names of all values but
  /// `step` begin with "eval_".
  void write_evaluation(int64_t step, const nlohmann::ordered_json& values);
  void finish();

 private:
  void note(const std::string& text) const;
  void append(int64_t step, const nlohmann::ordered_json& values,
              const std::map<std::string, double>& scalars);

  std::function<void(const std::string&)> note_;
  LogFile file_;
  EventWriter events_;
  bool warned_ = false;
};

}  // namespace espalier
