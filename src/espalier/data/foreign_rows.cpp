// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/foreign_rows.h"

#include <fmt/ranges.h>
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <optional>
#include <system_error>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/printable.h"
#include "espalier/data/fields.h"
#include "espalier/data/large_numbers.h"
#include "espalier/data/line_reader.h"

namespace espalier {
namespace {

namespace dom = simdjson::dom;
using Names = std::span<const std::string_view>;

constexpr std::string_view kPage = "(docs/data-format.md has the command)";

bool has(Names fields, std::string_view name) {
  return std::ranges::find(fields, name) != fields.end();
}

/// The first of `names` that is a field of the row.
std::optional<std::string_view> first_of(Names names, Names fields) {
  const auto found = std::ranges::find_if(names, [&](std::string_view name) { return has(fields, name); });
  return found == names.end() ? std::nullopt : std::optional(*found);
}

/// A file name as one word of a shell command.
std::string quoted(const std::filesystem::path& file) {
  std::string name = file.string();
  const auto is_plain = [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("._-/+@,=").find(static_cast<char>(c)) != std::string::npos;
  };
  if (!name.empty() && std::ranges::all_of(name, is_plain)) return name;
  std::string text = "'";
  for (const char c : name) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

std::string import_command(const std::filesystem::path& file) {
  return fmt::format("`espalier import {} -o rows.jsonl`", quoted(file));
}

/// Recognises rollouts of other trainers by two of their fields.
std::optional<std::string> describe_rollouts(Names fields) {
  struct Rollouts {
    std::string_view first, second, what;
  };
  static constexpr auto kRollouts = std::to_array<Rollouts>({
      {"traces", "task", "traces of verifiers or prime-rl"},
      {"nodes", "task", "a trace of verifiers"},
      {"token_ids", "mask", "samples of prime-rl"},
      {"token_ids", "loss_mask", "token exports of prime-rl"},
      {"responses", "attention_mask", "batches of verl"},
      {"prompt_token_ids", "response_ids", "rollouts of SkyRL"},
      {"tokens", "response_length", "samples of slime"},
      {"model_input", "loss_fn_inputs", "datums of Tinker"},
      {"prompt_ids", "completion_ids", "tokenised data of TRL"},
      {"prompt_ids", "chosen_ids", "tokenised pairs of TRL"},
      {"schema_version", "steps", "an ATIF trajectory"},
  });
  for (const auto& [first, second, what] : kRollouts) {
    if (has(fields, first) && has(fields, second)) return fmt::format("{} (`{}`, `{}`)", what, first, second);
  }
  return std::nullopt;
}

/// Recognises the chats that `espalier prepare` accepts.
std::optional<std::string> describe_chats(Names fields) {
  static constexpr auto kCompletions =
      std::to_array<std::string_view>({"completion", "response", "answer", "output"});
  if (has(fields, "messages")) return "chats (`messages`)";
  for (const std::string_view name : {"conversations", "conversation"}) {
    if (has(fields, name)) return fmt::format("ShareGPT chats (`{}`)", name);
  }
  for (const std::string_view prompt : {"prompt", "instruction"}) {
    const auto completion = first_of(kCompletions, fields);
    if (has(fields, prompt) && completion)
      return fmt::format("prompts and completions (`{}`, `{}`)", prompt, *completion);
  }
  return std::nullopt;
}

/// Recognises token ids under names of other programs.
std::optional<std::string> describe_tokens(Names fields) {
  static constexpr auto kPrompts =
      std::to_array<std::string_view>({"prompt_ids", "prompt_token_ids", "prompts", "prompt_tokens"});
  static constexpr auto kCompletions = std::to_array<std::string_view>(
      {"completion_ids", "completion_token_ids", "completion_tokens", "response_ids", "response_token_ids",
       "response_tokens", "responses", "output_ids", "output_token_ids"});
  static constexpr auto kWhole =
      std::to_array<std::string_view>({"token_ids", "tokens", "ids", "all_token_ids"});
  const auto prompt = first_of(kPrompts, fields), completion = first_of(kCompletions, fields);
  if (prompt && completion) {
    return fmt::format("token ids as `{}` and `{}`: join them, with a loss_mask {}", *prompt, *completion,
                       kPage);
  }
  const auto whole = first_of(kWhole, fields);
  if (!whole) return std::nullopt;
  return fmt::format("token ids as `{}`: rename the field to input_ids", *whole);
}

std::string list_of_fields(Names fields) {
  constexpr size_t kMost = 8;
  std::vector<std::string> names;
  for (const std::string_view field : fields.first(std::min(kMost, fields.size())))
    names.push_back(fmt::format("`{}`", shortened(field, 30)));
  if (names.empty()) return "an object without fields";
  return fmt::format("a row without it (its fields: {}{})", fmt::join(names, ", "),
                     fields.size() > kMost ? ", ..." : "");
}

/// What a line begins that is not a JSON object itself.
enum class Start { kOther, kTokenIds, kList, kObject };

Start start_of(std::string_view line) {
  const auto begin = line.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return Start::kOther;
  const std::string_view text = line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin);
  if (text == "{") return Start::kObject;
  if (text.front() != '[') return Start::kOther;
  const auto next = text.find_first_not_of(" \t", 1);
  const char first = next == std::string_view::npos ? '{' : text[next];
  if (std::isdigit(static_cast<unsigned char>(first)) != 0) return Start::kTokenIds;
  return first == '{' ? Start::kList : Start::kOther;
}

/// The object of a line, which LineReader::kPadding readable bytes follow; nullopt if it is none.
std::optional<dom::object> object_of(std::string_view line, dom::parser* parser) {
  dom::element root;
  auto error = parser->parse(line.data(), line.size(), false).get(root);
  if (error != simdjson::SUCCESS) {
    try {
      if (const auto readable = without_large_numbers(line)) error = parser->parse(*readable).get(root);
    } catch (const InputError&) {  // NOLINT(bugprone-empty-catch): it is a row, which the reader refuses
    }
  }
  dom::object object;
  if (error != simdjson::SUCCESS || root.get(object) != simdjson::SUCCESS) return std::nullopt;
  return object;
}

/// Whether a record has token ids as a row has them. A batch has lists of them, and one of verl has padding.
bool is_row(dom::object record) {
  dom::element ids;
  if (record[name_of(Field::kInputIds)].get(ids) != simdjson::SUCCESS) return false;
  dom::array list;
  const bool is_batch = ids.get(list) == simdjson::SUCCESS && list.size() > 0 && list.at(0).is_array();
  const auto has = [&](std::string_view name) { return record[name].error() == simdjson::SUCCESS; };
  return !is_batch && !(has("responses") && (has("attention_mask") || has("response_mask")));
}

struct Format {
  std::string_view magic;  // the first bytes of a file
  std::string_view name;
};

constexpr std::string_view kPickle = "a Python pickle", kParquet = "a Parquet file";

constexpr auto kFormats = std::to_array<Format>({
    {"PAR1", kParquet},
    {"ARROW1", "an Arrow file"},
    {"\xFF\xFF\xFF\xFF", "an Arrow stream"},
    {"PK\x03\x04", "a zip archive"},
    {"BZh", "a bzip2 file"},
    {"\xFD\x37zXZ", "an xz file"},
    {"SQLite format 3", "an SQLite database"},
    {"\x89HDF", "an HDF5 file"},
    {"\x80", kPickle},
});

/// How to convert a file of another format.
std::string advice_for(const Format& format, const std::filesystem::path& path) {
  const std::string extension = path.extension().string();
  const bool is_torch_file = format.magic.starts_with("PK") && (extension == ".pt" || extension == ".pth");
  if (format.name == kPickle || is_torch_file) {
    return "; it is never read, because it could run code: pass the data to a converter of espalier.io, such "
           "as from_verl, in the program that created it";
  }
  if (format.name == kParquet) return "; try " + import_command(path);
  return "; write its rows as JSON, one per line (docs/data-format.md has commands)";
}

/// The format of the file's first bytes; nullptr if it is none of kFormats.
const Format* format_of(const std::filesystem::path& path) {
  std::array<char, 16> bytes{};
  std::ifstream file(path, std::ios::binary);
  file.read(bytes.data(), bytes.size());
  const std::string_view head(bytes.data(), static_cast<size_t>(file.gcount()));
  const auto* found =
      std::ranges::find_if(kFormats, [&](const Format& format) { return head.starts_with(format.magic); });
  return found == kFormats.end() ? nullptr : found;
}

}  // namespace

std::string describe_foreign_row(Names fields, const std::filesystem::path& file) {
  // Espalier's own rows have a `chosen` too, but with input_ids.
  if (has(fields, "chosen") && has(fields, "rejected"))
    return fmt::format(
        "a preference pair in text (`chosen`, `rejected`): run `espalier import --model DIR {} -o "
        "rows.jsonl` first",
        quoted(file));
  if (const auto rollouts = describe_rollouts(fields))
    return fmt::format("{}: run {} first", *rollouts, import_command(file));
  if (const auto chats = describe_chats(fields)) {
    return fmt::format("{}: run `espalier prepare --model DIR {} -o rows.jsonl` first", *chats, quoted(file));
  }
  if (const auto tokens = describe_tokens(fields)) return *tokens;
  if (has(fields, "text")) {
    return fmt::format("text (`text`), which has no turns: encode it with a tokenizer {}", kPage);
  }
  return list_of_fields(fields);
}

std::string describe_foreign_line(std::string_view line, const std::filesystem::path& file) {
  switch (start_of(line)) {
    case Start::kTokenIds:
      return "a bare list of token ids: write it as {\"input_ids\": [...]}";
    case Start::kList:
      return "the start of a JSON list: convert it to rows with " + import_command(file);
    case Start::kObject:
      return "the start of an object of several lines: convert it to rows with " + import_command(file);
    case Start::kOther:
      break;
  }
  return "";
}

void refuse_foreign_file(const std::filesystem::path& path) {
  std::error_code unknown;
  const std::filesystem::file_status status = std::filesystem::status(path, unknown);
  ESPALIER_CHECK(!std::filesystem::is_directory(status),
                 "{}: expected a file of trajectories, received a folder; name its files, such as {}",
                 path.string(), quoted(path / "*.jsonl"));
  // Peeking at a pipe would consume its first bytes.
  if (!std::filesystem::is_regular_file(status)) return;
  if (const Format* format = format_of(path)) {
    throw InputError(fmt::format("{}: expected JSON lines or packed .safetensors, received {}{}",
                                 path.string(), format->name, advice_for(*format, path)));
  }
}

bool needs_conversion(const std::filesystem::path& path, int64_t max_line_bytes, bool skip_bad_rows) {
  std::error_code unknown;
  if (path == "/dev/stdin" || path.extension() == ".safetensors") return false;
  if (!std::filesystem::is_regular_file(path, unknown)) return false;
  if (const Format* format = format_of(path)) return format->name == kParquet;
  LineReader lines(path, max_line_bytes);
  dom::parser parser;
  std::string_view line;
  for (auto status = lines.next(line); status != LineReader::Status::kEnd; status = lines.next(line)) {
    if (status == LineReader::Status::kLine) {
      if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      const Start start = start_of(line);
      if (start == Start::kList || start == Start::kObject) return true;
      if (const std::optional<dom::object> record = object_of(line, &parser)) return !is_row(*record);
    }
    if (!skip_bad_rows) return false;
  }
  return false;
}

}  // namespace espalier
