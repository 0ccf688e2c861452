// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/line_reader.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/rng.h"
#include "espalier/data/writer.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/trajectory_helpers.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::ScratchFolder;
using testing::test_seed;
using testing::write_bytes;

using Lines = std::vector<std::string>;

/// All lines; one above the limit stands as "TOO LONG".
Lines lines_of(const std::filesystem::path& path, int64_t max_line_bytes = 1 << 30) {
  LineReader reader(path, max_line_bytes);
  Lines lines;
  std::string_view line;
  double fraction = 0;
  for (auto status = reader.next(line); status != LineReader::Status::kEnd; status = reader.next(line)) {
    lines.emplace_back(status == LineReader::Status::kLine ? line : "TOO LONG");
    EXPECT_EQ(reader.line_number(), static_cast<int64_t>(lines.size()));
    EXPECT_GE(reader.fraction(), fraction);
    fraction = reader.fraction();
    EXPECT_LE(fraction, 1.0);
  }
  return lines;
}

std::string compressed(const ScratchFolder& folder, const std::string& text, const std::string& name) {
  const std::unique_ptr<TextSink> sink = open_sink(folder / name);
  sink->write(text);
  sink->commit();
  return read_text(folder / name);
}

// A line that never ends must not be read for ever, nor kept in memory.
TEST(LineReader, GivesUpOnALineWithoutAnEnd) {
  std::string_view line;
  LineReader at_once("/dev/zero", 1000, 0);
  EXPECT_EQ(message_of<InputError>([&] { at_once.next(line); }),
            "/dev/zero:1: expected a line of at most 1000 bytes, received a longer one");
  LineReader later("/dev/zero", 1000, 10'000'000);
  const std::string message = message_of<InputError>([&] { later.next(line); });
  EXPECT_TRUE(
      message.starts_with("/dev/zero:1: expected a line of at most 1000 bytes, received a longer one: "))
      << message;
  EXPECT_TRUE(message.ends_with(" bytes without a line ending")) << message;
  EXPECT_LT(later.bytes_read(), 11'000'000);
}

TEST(LineReader, GivesUpOnCompressedDataWithoutAnEnd) {
  const ScratchFolder folder;
  const std::string zeros(50'000'000, '0');
  for (const std::string name : {"a.jsonl.gz", "a.jsonl.zst"}) {
    EXPECT_LT(compressed(folder, zeros, name).size(), 100'000u);
    std::string_view line;
    LineReader reader(folder / name, 1000, 1'000'000);
    EXPECT_THROW(reader.next(line), InputError);
    EXPECT_LT(reader.bytes_read(), 3'000'000);
    // Within the limit it is skipped.
    LineReader patient(folder / name, 1000, 100'000'000);
    EXPECT_EQ(patient.next(line), LineReader::Status::kTooLong);
    EXPECT_EQ(patient.next(line), LineReader::Status::kEnd);
  }
}

TEST(LineReader, TellsOfWhatIsReadInsideALine) {
  const ScratchFolder folder;
  write_bytes(folder / "a", fmt::format("{}\n", std::string(3'000'000, 'x')));
  LineReader reader(folder / "a", 10'000'000);
  std::vector<int64_t> read;
  reader.on_read = [&] { read.push_back(reader.bytes_read()); };
  std::string_view line;
  reader.next(line);
  EXPECT_GE(read.size(), 10u);
  EXPECT_EQ(read.back(), 3'000'001);
}

TEST(LineReader, SplitsLines) {
  const ScratchFolder folder;
  const std::vector<std::pair<std::string, Lines>> cases = {
      {"", {}},
      {"\n", {""}},
      {"a", {"a"}},
      {"a\nb\n", {"a", "b"}},
      {"a\r\nb\r\n\r\nc", {"a", "b", "", "c"}},
      {"\xEF\xBB\xBF"
       "a\n\xEF\xBB\xBF"
       "b",
       {"a",
        "\xEF\xBB\xBF"
        "b"}},
      {"a\n\n b", {"a", "", " b"}},
  };
  for (const auto& [text, lines] : cases) {
    write_bytes(folder / "a", text);
    EXPECT_EQ(lines_of(folder / "a"), lines) << text;
  }
}

TEST(LineReader, PassesOverLinesAboveTheLimit) {
  const ScratchFolder folder;
  write_bytes(folder / "a", "1234\n12345\n1234\r\n123456\n\n12345");
  EXPECT_EQ(lines_of(folder / "a", 4), (Lines{"1234", "TOO LONG", "1234", "TOO LONG", "", "TOO LONG"}));
  // The line is far longer than a block, and nothing of it is kept.
  write_bytes(folder / "a",
              fmt::format("{}\nshort\n{}", std::string(5'000'000, 'x'), std::string(3'000'000, 'y')));
  EXPECT_EQ(lines_of(folder / "a", 100), (Lines{"TOO LONG", "short", "TOO LONG"}));
  EXPECT_EQ(lines_of(folder / "a")[0].size(), 5'000'000u);
}

TEST(LineReader, ReadsEveryFormAcrossBlocks) {
  const ScratchFolder folder;
  const uint64_t seed = 12;
  SCOPED_TRACE(fmt::format("seed {}", seed));
  Rng rng(test_seed(seed));
  Lines lines;
  std::string text;
  while (text.size() < 5'000'000) {
    const int64_t size = rng.below(20) == 0 ? rng.below(1'500'000) : rng.below(3000);
    std::string line;
    while (static_cast<int64_t>(line.size()) < size) line += static_cast<char>('a' + rng.below(26));
    text += line + "\n";
    lines.push_back(std::move(line));
  }
  write_bytes(folder / "plain", text);
  EXPECT_TRUE(lines_of(folder / "plain") == lines);
  // The content counts, not the name; two members in a row are one text.
  const size_t half = text.size() / 2;
  for (const std::string name : {"x.gz", "x.zst"}) {
    write_bytes(folder / "one", compressed(folder, text, name));
    EXPECT_TRUE(lines_of(folder / "one") == lines) << name;
    write_bytes(folder / "two",
                compressed(folder, text.substr(0, half), name) + compressed(folder, text.substr(half), name));
    EXPECT_TRUE(lines_of(folder / "two") == lines) << name;
  }
}

TEST(LineReader, ReportsTruncatedAndCorruptCompression) {
  const ScratchFolder folder;
  std::string text;
  Rng rng(test_seed(4));
  for (int i = 0; i < 30; ++i) text += std::to_string(rng.next()) + "\n";
  const Lines good = [&] {
    write_bytes(folder / "plain", text);
    return lines_of(folder / "plain");
  }();
  for (const std::string name : {"x.gz", "x.zst"}) {
    const std::string bytes = compressed(folder, text, name);
    for (size_t size = 5; size < bytes.size(); ++size) {
      write_bytes(folder / "cut", bytes.substr(0, size));
      const std::string message = message_of<InputError>([&] { lines_of(folder / "cut"); });
      ASSERT_NE(message.find("cut: cannot decompress"), std::string::npos) << name << " cut to " << size;
      ASSERT_NE(message.find("truncated"), std::string::npos) << message;
    }
    write_bytes(folder / "tail", bytes + "garbage");
    EXPECT_THROW(lines_of(folder / "tail"), InputError) << name;
    int refused = 0;
    for (size_t at = 4; at < bytes.size(); ++at) {
      std::string bad = bytes;
      bad[at] = static_cast<char>(bad[at] ^ (1 << rng.below(8)));
      write_bytes(folder / "bad", bad);
      try {
        ASSERT_TRUE(lines_of(folder / "bad") == good) << name << ": a flip at " << at << " went unseen";
      } catch (const InputError&) {
        ++refused;
      }
    }
    EXPECT_GT(refused, static_cast<int>(bytes.size()) * 9 / 10) << name;
  }
}

// One raw block "ab\n" in a zstd frame that asks for a window of 2^log bytes (RFC 8878, section 3.1.1).
std::string frame_of_window(int log) {
  std::string frame = "\x28\xB5\x2F\xFD";
  frame += {'\0', static_cast<char>((log - 10) << 3), (3 << 3) | 1, '\0', '\0'};
  return frame + "ab\n";
}

TEST(LineReader, ReadsZstdWithLongWindows) {
  const ScratchFolder folder;
  for (const int log : {10, 27, 28, 30}) {
    write_bytes(folder / "a", frame_of_window(log));
    EXPECT_EQ(lines_of(folder / "a"), Lines{"ab"}) << log;
  }
  write_bytes(folder / "a", frame_of_window(31));
  const std::string path = folder / "a";
  EXPECT_EQ(
      message_of<InputError>([&] { lines_of(folder / "a"); }),
      fmt::format("{}: expected zstd data with a window of at most 1 GiB (--long=30), received a larger "
                  "one; try `zstd -d --long=31 {}`",
                  path, path));
}

TEST(LineReader, ReportsFilesThatCannotBeRead) {
  const ScratchFolder folder;
  EXPECT_NE(message_of<InputError>([&] { lines_of(folder / "missing"); }).find("missing"), std::string::npos);
  EXPECT_NE(message_of<InputError>([&] { lines_of(folder.path()); }).find("directory"), std::string::npos);
}

}  // namespace
}  // namespace espalier
