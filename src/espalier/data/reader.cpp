// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/reader.h"

#include <glob.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <new>
#include <system_error>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/hub_name.h"
#include "espalier/data/packed.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

/// File sizes in bytes, for progress; 1 if unknown (a pipe).
std::vector<double> sizes_of(std::span<const fs::path> paths) {
  std::vector<double> sizes;
  for (const fs::path& path : paths) {
    std::error_code unknown;
    const uintmax_t size = fs::file_size(path, unknown);
    sizes.push_back(unknown ? 1.0 : static_cast<double>(size) + 1.0);
  }
  return sizes;
}

void add(const ReadReport& part, ReadReport* report) {
  constexpr size_t kMostErrors = 10;
  report->rows_read += part.rows_read;
  report->rows_skipped += part.rows_skipped;
  for (const std::string& error : part.first_errors) {
    if (report->first_errors.size() < kMostErrors) report->first_errors.push_back(error);
  }
  report->fields.add(part.fields);
}

std::vector<fs::path> matches(const std::string& pattern) {
  glob_t found{};
  // NOLINTNEXTLINE(concurrency-mt-unsafe): files are named before any thread starts
  const int status = ::glob(pattern.c_str(), GLOB_ERR | GLOB_NOSORT, nullptr, &found);
  const int error = errno;
  std::vector<fs::path> paths;
  if (status == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (status == GLOB_NOSPACE) throw std::bad_alloc();
  ESPALIER_CHECK(status != GLOB_ABORTED, "cannot list the files that match {}: {}", pattern,
                 std::generic_category().message(error));
  ESPALIER_CHECK(!paths.empty(), "expected files that match {}, received none", pattern);
  std::sort(paths.begin(), paths.end(),
            [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  return paths;
}

bool is_packed(const fs::path& path) {
  return path.extension() == ".safetensors";
}

}  // namespace

Trajectories read_files(std::span<const fs::path> paths, const ReadOptions& options, ReadReport* report) {
  if (paths.size() == 1)
    return is_packed(paths[0]) ? read_packed(paths[0], options, report)
                               : read_jsonl(paths[0], options, report);
  ReadReport total;
  const std::vector<double> sizes = sizes_of(paths);
  double all_bytes = 0, bytes_before = 0;
  for (const double size : sizes) all_bytes += size;
  TrajectoriesBuilder rows(options.store);
  for (size_t i = 0; i < paths.size(); ++i) {
    ReadOptions part_options = options;
    if (options.max_rows > 0) part_options.max_rows = options.max_rows - total.rows_read;
    if (options.progress) {
      part_options.progress = [&, size = sizes[i]](double fraction) {
        options.progress((bytes_before + fraction * size) / all_bytes);
      };
    }
    ReadReport part;
    if (is_packed(paths[i])) {
      rows.append(read_packed(paths[i], part_options, &part), paths[i].string());
    } else {
      rows.begin_source(paths[i].string());
      append_jsonl(paths[i], part_options, &part, &rows);
    }
    add(part, &total);
    bytes_before += sizes[i];
    if (options.max_rows > 0 && total.rows_read >= options.max_rows) break;
  }
  if (report != nullptr) *report = std::move(total);
  return rows.finish();
}

Trajectories read_trajectories(const fs::path& path, const ReadOptions& options, ReadReport* report) {
  return read_trajectories(std::span(&path, 1), options, report);
}

std::vector<fs::path> expand_file_patterns(std::span<const std::string> patterns) {
  std::vector<fs::path> paths;
  for (const std::string& given : patterns) {
    const std::string& pattern = given == "-" ? "/dev/stdin" : given;
    ESPALIER_CHECK(!pattern.empty(), "expected the name of a file of trajectories, received an empty one");
    std::error_code error;
    const bool exists = fs::exists(fs::status(pattern, error));
    if (!exists && pattern.find_first_of("*?[") != std::string::npos) {
      std::vector<fs::path> found = matches(pattern);
      std::move(found.begin(), found.end(), std::back_inserter(paths));
      continue;
    }
    ESPALIER_CHECK(exists, "cannot open {}: {}{}", pattern,
                   error ? error.message() : std::generic_category().message(ENOENT),
                   hub_advice(pattern, HubKind::kDataset));
    paths.emplace_back(pattern);
  }
  return paths;
}

std::optional<std::vector<std::string>> next_files(const fs::path& folder, const std::set<std::string>& taken,
                                                   int64_t count) {
  constexpr auto kEndings = std::to_array({".jsonl", ".jsonl.gz", ".jsonl.zst", ".safetensors"});
  std::error_code error;
  const bool stops = fs::exists(folder / "stop", error);  // first, so that no file before it is missed
  std::vector<std::string> names;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const auto ends = [&](const char* ending) { return name.ends_with(ending); };
    if (!name.starts_with('.') && std::ranges::any_of(kEndings, ends) && !taken.contains(name))
      names.push_back(name);
  }
  if (std::ssize(names) < count && (!stops || error)) return std::vector<std::string>();
  if (names.empty()) return std::nullopt;
  std::ranges::sort(names);
  names.resize(std::min(names.size(), static_cast<size_t>(count)));
  return names;
}

int64_t FieldTally::rows_with(Field field) const {
  int64_t total = 0;
  for (size_t i = 0; i < kNumFieldNames; ++i) {
    if (kFieldNames[i].field == field) total += rows[i];
  }
  return total;
}

void FieldTally::ignore(std::string_view name, int64_t rows_with_it, int64_t per_token_rows) {
  if (next_ >= ignored.size() || ignored[next_].name != name) {
    next_ = 0;
    while (next_ < ignored.size() && ignored[next_].name != name) ++next_;
  }
  if (next_ == ignored.size()) {
    if (ignored.size() >= kMostIgnored) {
      more_ignored = true;
      return;
    }
    ignored.push_back({std::string(name)});
  }
  ignored[next_].rows += rows_with_it;
  ignored[next_].per_token_rows += per_token_rows;
  ++next_;
}

void FieldTally::add(const FieldTally& other) {
  tokens += other.tokens;
  loss_tokens += other.loss_tokens;
  rows_without_mask += other.rows_without_mask;
  for (size_t i = 0; i < kNumFieldNames; ++i) {
    rows[i] += other.rows[i];
    number_rows[i] += other.number_rows[i];
  }
  for (const IgnoredField& field : other.ignored) ignore(field.name, field.rows, field.per_token_rows);
  more_ignored |= other.more_ignored;
}

}  // namespace espalier
