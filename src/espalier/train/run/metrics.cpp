// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/engine/cost.h"

namespace espalier {
namespace {

std::array<uint32_t, 256> crc32c_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
    table[byte] = crc;
  }
  return table;
}

// Protocol buffer wire format: a key is (field number << 3) | wire type.
enum WireType : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void append_key(std::string& out, int field, WireType type) {
  append_varint(out, (static_cast<uint64_t>(field) << 3) | type);
}

template <typename T>
void append_raw(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void append_bytes(std::string& out, int field, const std::string& bytes) {
  append_key(out, field, kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
std::string event_header(int64_t step) {
  std::string event;
  append_key(event, 1, kFixed64);
  append_raw(event, wall_time());
  append_key(event, 2, kVarint);
  append_varint(event, static_cast<uint64_t>(step));
  return event;
}

uint32_t masked_crc(const std::string& bytes) {
  const uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

std::filesystem::path event_path(const std::filesystem::path& folder) {
  std::array<char, 256> host{"localhost"};
  gethostname(host.data(), host.size() - 1);
  const std::string name =
      fmt::format("events.out.tfevents.{}.{}.{}", static_cast<int64_t>(wall_time()), host.data(), getpid());
  std::filesystem::path path = folder / name;
  std::error_code error;
  for (int copy = 1; std::filesystem::exists(path, error); ++copy)
    path = folder / fmt::format("{}.{}", name, copy);
  return path;
}

constexpr std::string_view kEvaluationPrefix = "eval_";

// The lines of metrics.jsonl to keep on resume: those that will not be written again. An incomplete last line
// is dropped.
std::string kept_lines(const std::string& text, const MetricsStart& start) {
  if (start.resumed_step == 0) return "";
  const auto keeps = [&](const nlohmann::json& line) {
    const auto step = line.value("step", int64_t{0});
    return step < start.resumed_step ||
           (step == start.resumed_step && !(start.evaluates_it && line.contains("eval_loss")));
  };
  std::string kept;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin + 1);
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && keeps(json)) kept += line;
  }
  return kept;
}

// Truncates metrics.jsonl to the lines to keep. Throws InputError on failure.
void trim(const std::filesystem::path& path, const MetricsStart& start) {
  const std::string text = std::filesystem::exists(path) ? read_text(path) : "";
  const std::string kept = kept_lines(text, start);
  if (kept == text && !text.empty()) return;
  if (!text.empty() && text.starts_with(kept)) {  // the usual case, which needs no disk space
    std::error_code error;
    std::filesystem::resize_file(path, kept.size(), error);
    ESPALIER_CHECK(!error, "cannot shorten {}: {}", path.string(), error.message());
    return;
  }
  write_text(path, kept);
}

int64_t peak_memory_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{1024} * usage.ru_maxrss;
}

}  // namespace

uint32_t crc32c(const std::string& bytes) {
  static const std::array<uint32_t, 256> table = crc32c_table();
  uint32_t crc = 0xFFFFFFFFu;
  for (const char byte : bytes) crc = table[(crc ^ static_cast<uint8_t>(byte)) & 0xFF] ^ (crc >> 8);
  return crc ^ 0xFFFFFFFFu;
}

EventWriter::EventWriter(const std::filesystem::path& folder) : file_(event_path(folder)) {
  begin();
}

void EventWriter::begin() {
  std::string event = event_header(0);
  append_bytes(event, 3, "brain.Event:2");
  record(event);
}

void EventWriter::scalars(int64_t step, const std::map<std::string, double>& values) {
  if (file_.close_if_removed()) begin();
  std::string summary;
  for (const auto& [tag, value] : values) {
    // Summary.Value { string tag = 1; float simple_value = 2; }, repeated field 1 of Summary.
    std::string entry;
    append_bytes(entry, 1, tag);
    append_key(entry, 2, kFixed32);
    append_raw(entry, static_cast<float>(value));
    append_bytes(summary, 1, entry);
  }
  std::string event = event_header(step);
  append_bytes(event, 5, summary);
  record(event);
}

void EventWriter::record(const std::string& event) {
  std::string length, framed;
  append_raw(length, static_cast<uint64_t>(event.size()));
  framed = length;
  append_raw(framed, masked_crc(length));
  framed += event;
  append_raw(framed, masked_crc(event));
  file_.append(std::move(framed));
}

MetricsWriter::MetricsWriter(const std::filesystem::path& run_folder, const MetricsStart& start,
                             std::function<void(const std::string&)> note)
    : note_(std::move(note)), file_(run_folder / "metrics.jsonl"), events_(run_folder) {
  try {
    trim(file_.path(), start);
  } catch (const std::exception& error) {
    this->note(fmt::format("warning: {}; it keeps lines of steps that are repeated", error.what()));
  }
}

void MetricsWriter::write(int64_t step, const nlohmann::ordered_json& values) {
  std::map<std::string, double> scalars;
  for (const auto& [key, value] : values.items()) {
    if (value.is_number() && key != "step") scalars["train/" + key] = value.get<double>();
  }
  append(step, values, scalars);
}

void MetricsWriter::write_evaluation(int64_t step, const nlohmann::ordered_json& values) {
  std::map<std::string, double> scalars;
  for (const auto& [key, value] : values.items()) {
    if (value.is_number() && key != "step") {
      scalars["eval/" + key.substr(kEvaluationPrefix.size())] = value.get<double>();
    }
  }
  append(step, values, scalars);
}

void MetricsWriter::append(int64_t step, const nlohmann::ordered_json& values,
                           const std::map<std::string, double>& scalars) {
  if (file_.close_if_removed()) {
    note(fmt::format("warning: {} was removed during the run: it starts again at step {}",
                     file_.path().string(), step));
  }
  file_.append(values.dump() + "\n");
  events_.scalars(step, scalars);
  for (const LogFile* file : {static_cast<const LogFile*>(&file_), &events_.file()}) {
    if (warned_ || file->failure().empty()) continue;
    warned_ = true;
    note(fmt::format("warning: {} cannot be written: {}; the run continues and retries after every step",
                     file->path().string(), file->failure()));
  }
}

void MetricsWriter::finish() {
  for (const LogFile* file : {static_cast<const LogFile*>(&file_), &events_.file()}) {
    if (file->num_missing() == 0) continue;
    note(fmt::format("warning: {} is incomplete: {} records could not be written{}{}", file->path().string(),
                     file->num_missing(), file->failure().empty() ? "" : ": ", file->failure()));
  }
}

nlohmann::ordered_json step_metrics(const ModelCost& model, const ObjectiveOptions& objective,
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
  metrics["tflops_per_second"] = step_flops(model, result.work).total() / seconds / 1e12;
  metrics["peak_memory_bytes"] = peak_memory_bytes();
  metrics["peak_tensor_bytes"] = result.measured_peak_bytes();
  metrics["micro_batches"] = result.measured.size();
  metrics["micro_batch_seconds"] = result.measured_seconds();
  if (result.recomputed.tokens > 0) metrics["recomputed_tokens"] = result.recomputed.tokens;
  for (const StepMetric& metric : result.metrics) metrics[metric.name] = metric.value;
  if (result.routers) {
    if (objective.router_aux_loss_coef != 0) metrics["router_aux_loss"] = result.routers->aux_loss;
    if (objective.router_z_loss_coef != 0) metrics["router_z_loss"] = result.routers->z_loss;
    metrics["expert_load_max"] = result.routers->load_max;
    metrics["expert_load_min"] = result.routers->load_min;
  }
  return metrics;
}

}  // namespace espalier
