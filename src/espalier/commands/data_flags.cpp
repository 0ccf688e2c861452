// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/data_flags.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/base/printable.h"
#include "espalier/base/units.h"
#include "espalier/commands/data_summary.h"
#include "espalier/config/config.h"
#include "espalier/config/layer_spec.h"
#include "espalier/engine/recorded_routes.h"
#include "espalier/runtime/host_memory.h"
#include "espalier/runtime/progress.h"

namespace espalier::commands {

DataUse data_use_of(const std::string& model) {
  DataUse use;
  if (model.empty()) return use;
  const DecoderConfig config = read_config(model);
  use.vocab_size = config.vocab_size;
  use.max_position_embeddings = config.max_position_embeddings;
  use.num_layers = config.num_hidden_layers();
  use.routers = router_shape(config);
  return use;
}

void DataFlags::add(OptionList* list, bool required) {
  list->group(kDataGroup);
  list->add(
      "data", &data,
      "Trajectories: JSONL (plain, .gz or .zst) or packed .safetensors, see docs/data-format.md. Several "
      "files, or patterns such as 'rows-*.jsonl', are read one after another. -: JSONL on standard input",
      {.path = PathKind::kFile, .required = required});
  list->add("skip-bad-rows", &skip_bad_rows, "Count and report bad rows instead of stopping at the first");
  list->add("limit", &limit, "Use only the first N trajectories (0: all)", {.least = 0});
  list->add("max-row-bytes", &max_row_bytes,
            "JSONL: maximum size of a row, such as 1GiB. Longer rows are refused before they fill the memory",
            {.least = 1, .most = kMostLineBytes, .bytes = true});
  list->add(
      "row-cache", &row_cache,
      "Folder for an index of rows that take more than an eighth of the available memory: a packed file "
      "that is mapped (default: the folder of the data). off: rows stay in memory",
      {.shown = "DIR|off", .path = PathKind::kFolder, .shows_default = false});
}

RowStore DataFlags::store() const {
  if (row_cache == "off") return {};
  const auto folder = row_cache.empty() ? files().front().parent_path() : std::filesystem::path(row_cache);
  return {.memory = std::max<int64_t>(1, available_host_memory() / 8), .begin = [file = folder / "rows"] {
            const auto absolute = std::filesystem::absolute(file);
            return ::access(absolute.parent_path().c_str(), W_OK) == 0 ? absolute : std::filesystem::path();
          }};
}

std::vector<std::filesystem::path> DataFlags::files() const {
  return expand_file_patterns(data);
}

nlohmann::ordered_json DataFlags::resolved() const {
  const std::vector<std::filesystem::path> paths = files();
  if (paths.size() == 1) return paths.front().string();
  auto list = nlohmann::ordered_json::array();
  for (const std::filesystem::path& path : paths) list.push_back(path.string());
  return list;
}

std::vector<std::filesystem::path> DataFlags::named_files() const {
  return converted_from.empty() ? files() : expand_file_patterns(converted_from);
}

std::string DataFlags::title() const {
  const std::vector<std::filesystem::path> paths = named_files();
  constexpr size_t kMost = 3;
  std::string text;
  for (size_t i = 0; i < std::min(kMost, paths.size()); ++i)
    text += (i > 0 ? ", " : "") + paths[i].filename().string();
  if (paths.size() > kMost) text += fmt::format(" and {} more", paths.size() - kMost);
  return text;
}

std::string DataFlags::name() const {
  const std::vector<std::filesystem::path> paths = named_files();
  return paths.size() == 1 ? paths.front().string() : title();
}

Trajectories DataFlags::read_rows(const ReadOptions& options, ReadReport* report) const {
  const std::vector<std::filesystem::path> paths = files();
  try {
    return read_trajectories(paths, options, report);
  } catch (const InputError& error) {
    const std::string message = error.what(), converted = paths.front().string();
    if (converted_from.empty() || !message.starts_with(converted)) throw;
    throw InputError(name() + message.substr(converted.size()));
  }
}

Trajectories DataFlags::read(const DataUse& use) const {
  const std::string name = this->name();
  Progress progress("reading " + name);
  ReadReport report;
  ReadOptions options;
  options.vocab_size = use.vocab_size;
  options.skip_bad_rows = skip_bad_rows;
  options.max_rows = limit;
  options.max_line_bytes = max_row_bytes;
  options.progress = [&progress](double fraction) { progress.update(fraction); };
  options.store = store();
  if (row_cache != "off") options.row_cache = row_cache;
  options.note = [&progress](const std::string& text) { progress.line(printable(text)); };
  Trajectories trajectories = read_rows(options, &report);
  check_recorded_routes(printable(name), trajectories, use.routers, use.num_layers);
  if (report.rows_skipped > 0) {
    progress.line(fmt::format("{}: skipped {} of {}", printable(name),
                              count_of(report.rows_skipped, "bad row", "bad rows"),
                              with_commas(report.rows_read + report.rows_skipped)));
    for (const std::string& error : report.first_errors) progress.line("  " + printable(error));
  }
  for (const std::string& line : data_summary(name, report, trajectories, use)) progress.line(line);
  return trajectories;
}

void add_model(OptionList* list, std::string* model, const std::string& help) {
  list->add("model", model, help.empty() ? "Hugging Face model folder" : help,
            {.path = PathKind::kFolder, .group = kDataGroup, .required = help.empty()});
}

void add_profile(OptionList* list, std::string* trace, const std::string& which) {
  list->add("profile", trace,
            "Profile " + which +
                ": write a trace to this file, for chrome://tracing or ui.perfetto.dev, and print the "
                "time of each kind of work and the rate of a plain matrix product",
            {.path = PathKind::kFile, .group = kOutputGroup});
}

}  // namespace espalier::commands
