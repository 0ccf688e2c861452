// Where the numbers of a run go: metrics.jsonl and a TensorBoard event file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include <nlohmann/json.hpp>

namespace espalier {

/// Appends scalars to one TensorBoard event file (events.out.tfevents.*): TFRecord framing with masked
/// CRC32C, Event protocol buffers of tensorflow/core/util/event.proto.
class EventWriter {
 public:
  explicit EventWriter(const std::filesystem::path& folder);
  void scalars(int64_t step, const std::map<std::string, double>& values);

 private:
  void record(const std::string& event);
  std::ofstream file_;
  std::filesystem::path path_;
};

/// CRC-32C (Castagnoli) of the bytes, as TFRecord uses it.
uint32_t crc32c(const std::string& bytes);

/// metrics.jsonl and the event file of a run folder. Lines of steps after `resumed_step` (from an interrupted
/// run) are dropped on opening; with resumed_step 0 the file starts anew.
class MetricsWriter {
 public:
  MetricsWriter(const std::filesystem::path& run_folder, int64_t resumed_step);
  void write(int64_t step, const nlohmann::ordered_json& values);

 private:
  std::filesystem::path path_;
  std::ofstream file_;
  EventWriter events_;
};

}  // namespace espalier
