// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/data_summary.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "espalier/base/printable.h"
#include "espalier/base/units.h"
#include "espalier/runtime/progress.h"

namespace espalier::commands {
namespace {

std::string trajectories_text(int64_t count) {
  return count_of(count, "trajectory", "trajectories");
}

/// Whether only some objectives use a field.
bool is_for_objectives(Field field) {
  using enum Field;
  static constexpr std::array kOfObjectives{
      kLogprobs,        kRefLogprobs, kAdvantages, kAdvantage,   kReward, kTurnRewards, kRefTopkIds,
      kRefTopkLogprobs, kPairId,      kChosen,     kTemperature, kTopK,   kTopP};
  return std::ranges::find(kOfObjectives, field) != kOfObjectives.end();
}

bool is_used(Field field, const DataUse& use) {
  return !use.reads || !is_for_objectives(field) || use.reads(field);
}

bool reads_old_logprobs(const DataUse& use) {
  return use.reads && use.reads(Field::kLogprobs);
}

/// The known fields of the rows, by their names in the file.
std::vector<std::string> field_names(const FieldTally& fields, const DataUse& use, bool used) {
  std::vector<std::string> names;
  for (size_t i = 0; i < kNumFieldNames; ++i) {
    const auto& [name, field] = kFieldNames[i];
    if (fields.rows[i] == 0 || field == Field::kInputIds || is_used(field, use) != used) continue;
    names.push_back(name == name_of(field) ? std::string(name)
                                           : fmt::format("{} as {}", name, name_of(field)));
  }
  return names;
}

std::string ignored_names(const FieldTally& fields, bool per_token_only) {
  constexpr size_t kMost = 10;
  std::string text;
  size_t count = 0;
  for (const IgnoredField& field : fields.ignored) {
    if (per_token_only && !field.is_per_token()) continue;
    if (++count <= kMost) text += (count > 1 ? ", " : "") + shortened(field.name);
  }
  if (count > kMost || fields.more_ignored)
    text += fmt::format(" and {} more",
                        fields.more_ignored ? "many" : with_commas(static_cast<int64_t>(count - kMost)));
  return text;
}

std::string loss_text(const FieldTally& fields, int64_t rows) {
  if (fields.rows_without_mask == rows) return "all with loss";
  return fmt::format("{} with loss", with_commas(fields.loss_tokens));
}

std::string summary_line(const std::string& name, const ReadReport& report, const DataUse& use) {
  const FieldTally& fields = report.fields;
  std::vector<std::string> used = field_names(fields, use, true);
  if (fields.rows_without_mask == report.rows_read) used.insert(used.begin(), "no loss_mask given");
  std::string line =
      fmt::format("{}: {}, {}, {}", printable(name), trajectories_text(report.rows_read),
                  count_of(fields.tokens, "token", "tokens"), loss_text(fields, report.rows_read));
  if (!used.empty()) line += fmt::format(" ({})", fmt::join(used, ", "));
  if (reads_old_logprobs(use) && fields.rows_with(Field::kLogprobs) == 0)
    line += "; no logprobs: the ratio is 1 (on-policy)";
  const std::vector<std::string> unused = field_names(fields, use, false);
  if (!unused.empty()) line += fmt::format("; not used by {}: {}", use.objective, fmt::join(unused, ", "));
  if (!fields.ignored.empty()) line += "; ignored: " + ignored_names(fields, false);
  return line;
}

int64_t rows_without_logprobs(const Trajectories& trajectories) {
  int64_t count = 0;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) count += !trajectories.logprobs.has(row);
  return count;
}

std::vector<std::string> warnings(const ReadReport& report, const Trajectories& trajectories,
                                  const DataUse& use) {
  const FieldTally& fields = report.fields;
  std::vector<std::string> lines;
  if (const std::string names = ignored_names(fields, true); !names.empty()) {
    lines.push_back(
        fmt::format("unknown fields with an entry for each token are ignored: {} "
                    "(docs/data-format.md lists the known fields)",
                    names));
  }
  if (fields.rows_without_mask > 0 && fields.rows_without_mask < report.rows_read) {
    lines.push_back(fmt::format(
        "{} of {} {} tokens carry loss", with_commas(fields.rows_without_mask),
        trajectories_text(report.rows_read),
        fields.rows_without_mask == 1 ? "has no loss_mask: all its" : "have no loss_mask: all their"));
  }
  if (reads_old_logprobs(use) && trajectories.logprobs.any()) {
    if (const int64_t rows = rows_without_logprobs(trajectories); rows > 0)
      lines.push_back(fmt::format("{} of {} {} ratio is 1 (on-policy)", with_commas(rows),
                                  trajectories_text(report.rows_read),
                                  rows == 1 ? "has no logprobs: its" : "have no logprobs: their"));
  }
  for (size_t i = 0; i < kNumFieldNames; ++i) {
    const auto& [name, field] = kFieldNames[i];
    const bool compares_rows = field == Field::kGroupId || field == Field::kPairId;
    if (!compares_rows || fields.number_rows[i] == 0 || fields.number_rows[i] == fields.rows[i]) continue;
    lines.push_back(fmt::format("{} is a number in {} of {} and text in the others: 1 and \"1\" are the same",
                                name, with_commas(fields.number_rows[i]), trajectories_text(fields.rows[i])));
  }
  int64_t too_long = 0, longest = 0;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    too_long += use.max_position_embeddings > 0 && trajectories.row_size(row) > use.max_position_embeddings;
    longest = std::max(longest, trajectories.row_size(row));
  }
  if (use.warnings && trajectories.num_rows() > 0) {
    for (std::string& line : use.warnings(trajectories)) lines.push_back(std::move(line));
  }
  if (too_long > 0) {
    lines.push_back(fmt::format(
        "{} of {} {} longer than max_position_embeddings of the model's config.json, {}: the longest has {}",
        with_commas(too_long), trajectories_text(report.rows_read), too_long == 1 ? "is" : "are",
        with_commas(use.max_position_embeddings), count_of(longest, "token", "tokens")));
  }
  return lines;
}

}  // namespace

std::vector<std::string> data_summary(const std::string& name, const ReadReport& report,
                                      const Trajectories& trajectories, const DataUse& use) {
  std::vector<std::string> lines{summary_line(name, report, use)};
  for (const std::string& warning : warnings(report, trajectories, use))
    lines.push_back("warning: " + warning);
  return lines;
}

}  // namespace espalier::commands
