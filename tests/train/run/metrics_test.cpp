// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/metrics.h"

#include <gtest/gtest.h>

#include <cstring>

#include "espalier/base/file.h"
#include "tests/base/scratch_folder.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

template <typename T>
T read_raw(const std::string& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.substr(at, sizeof(T)).data(), sizeof(T));
  return value;
}

// TFRecord: length, masked CRC of the length, payload, masked CRC of the payload.
std::vector<std::string> read_records(const fs::path& file) {
  const std::string bytes = read_text(file);
  const auto unmask = [](uint32_t masked) {
    const uint32_t rotated = masked - 0xa282ead8u;
    return (rotated >> 17) | (rotated << 15);
  };
  std::vector<std::string> records;
  for (size_t at = 0; at < bytes.size();) {
    const auto length = read_raw<uint64_t>(bytes, at);
    EXPECT_EQ(unmask(read_raw<uint32_t>(bytes, at + 8)), crc32c(bytes.substr(at, 8)));
    const std::string payload = bytes.substr(at + 12, length);
    EXPECT_EQ(payload.size(), length);
    if (payload.size() != length) break;
    EXPECT_EQ(unmask(read_raw<uint32_t>(bytes, at + 12 + length)), crc32c(payload));
    records.push_back(payload);
    at += 12 + length + 4;
  }
  return records;
}

struct Field {
  int number = 0;
  uint64_t varint = 0;
  std::string bytes;  // also the raw bytes of fixed32 and fixed64
};

uint64_t read_varint(const std::string& text, size_t* at) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<uint8_t>(text.at((*at)++));
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
}

// Fields of a protocol buffer message.
std::vector<Field> read_message(const std::string& text) {
  std::vector<Field> fields;
  for (size_t at = 0; at < text.size();) {
    const uint64_t key = read_varint(text, &at);
    Field field;
    field.number = static_cast<int>(key >> 3);
    const int type = key & 7;
    if (type == 0) {
      field.varint = read_varint(text, &at);
    } else {
      const size_t size = type == 1 ? 8 : type == 5 ? 4 : read_varint(text, &at);
      EXPECT_TRUE(type == 1 || type == 2 || type == 5);
      EXPECT_LE(at + size, text.size());
      field.bytes = text.substr(at, size);
      at += size;
    }
    fields.push_back(field);
  }
  return fields;
}

std::vector<fs::path> event_files(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) files.push_back(entry.path());
  }
  return files;
}

TEST(Metrics, Crc32cHasItsCheckValue) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);  // RFC 3720, B.4
}

TEST(Metrics, EventFileIsWellFormed) {
  const ScratchFolder folder;
  EventWriter(folder.path()).scalars(300, {{"train/loss", 1.5}, {"train/rate", -2}});
  ASSERT_EQ(event_files(folder.path()).size(), 1u);
  const std::vector<std::string> records = read_records(event_files(folder.path())[0]);
  ASSERT_EQ(records.size(), 2u);

  const std::vector<Field> header = read_message(records[0]);
  ASSERT_EQ(header.size(), 3u);
  EXPECT_EQ(header[2].number, 3);
  EXPECT_EQ(header[2].bytes, "brain.Event:2");

  const std::vector<Field> event = read_message(records[1]);
  ASSERT_EQ(event.size(), 3u);
  EXPECT_EQ(event[0].number, 1);
  EXPECT_GT(read_raw<double>(event[0].bytes, 0), 1.6e9);  // seconds since 1970
  EXPECT_EQ(event[1].number, 2);
  EXPECT_EQ(event[1].varint, 300u);
  EXPECT_EQ(event[2].number, 5);
  const std::vector<Field> values = read_message(event[2].bytes);
  ASSERT_EQ(values.size(), 2u);
  const std::vector<Field> loss = read_message(values[0].bytes), rate = read_message(values[1].bytes);
  EXPECT_EQ(loss[0].bytes, "train/loss");
  EXPECT_EQ(read_raw<float>(loss[1].bytes, 0), 1.5f);
  EXPECT_EQ(rate[0].bytes, "train/rate");
  EXPECT_EQ(read_raw<float>(rate[1].bytes, 0), -2.0f);
}

TEST(Metrics, ScalarsOfAStepGoToBothFiles) {
  const ScratchFolder folder;
  MetricsWriter(folder.path(), {.resumed_step = 0}).write(1, {{"step", 1}, {"loss", 0.5}, {"note", "text"}});
  EXPECT_EQ(read_text(folder / "metrics.jsonl"), "{\"step\":1,\"loss\":0.5,\"note\":\"text\"}\n");
  const std::vector<std::string> records = read_records(event_files(folder.path())[0]);
  ASSERT_EQ(records.size(), 2u);
  const std::vector<Field> values = read_message(read_message(records[1])[2].bytes);
  ASSERT_EQ(values.size(), 1u);
  EXPECT_EQ(read_message(values[0].bytes)[0].bytes, "train/loss");
}

TEST(Metrics, AResumedRunDropsLaterAndUnfinishedLines) {
  const ScratchFolder folder;
  write_text(folder / "metrics.jsonl", "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4}\n{\"step\":");
  MetricsWriter(folder.path(), {.resumed_step = 2}).write(3, {{"step", 3}, {"loss", 7.0}});
  EXPECT_EQ(read_text(folder / "metrics.jsonl"), "{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"loss\":7.0}\n");
}

TEST(Metrics, AnUnfinishedLastLineOfAKeptStepIsDropped) {
  const ScratchFolder folder;
  write_text(folder / "metrics.jsonl", "{\"step\":1}\n{\"step\":2,\"lo");
  {
    MetricsWriter writer(folder.path(), {.resumed_step = 5});
  }
  EXPECT_EQ(read_text(folder / "metrics.jsonl"), "{\"step\":1}\n");
}

TEST(Metrics, ANewRunStartsAnew) {
  const ScratchFolder folder;
  write_text(folder / "metrics.jsonl", "{\"step\":1}\n");
  {
    MetricsWriter writer(folder.path(), {.resumed_step = 0});
  }
  EXPECT_EQ(read_text(folder / "metrics.jsonl"), "");
}

TEST(Metrics, FilesThatAreRemovedBeginAgainWithAWord) {
  const ScratchFolder folder;
  std::string notes;
  MetricsWriter writer(folder.path(), {.resumed_step = 0}, [&](const std::string& text) { notes += text; });
  writer.write(1, {{"step", 1}, {"loss", 1.0}});
  EXPECT_EQ(notes, "");
  fs::remove(folder / "metrics.jsonl");
  for (const fs::path& file : event_files(folder.path())) fs::remove(file);
  writer.write(2, {{"step", 2}, {"loss", 2.0}});
  EXPECT_EQ(read_text(folder / "metrics.jsonl"), "{\"step\":2,\"loss\":2.0}\n");
  const std::vector<std::string> records = read_records(event_files(folder.path()).at(0));
  ASSERT_EQ(records.size(), 2u);  // the first one says what the file is
  EXPECT_EQ(read_message(records[0])[2].bytes, "brain.Event:2");
  EXPECT_NE(notes.find("metrics.jsonl was removed during the run: it starts again at step 2"),
            std::string::npos)
      << notes;
}

TEST(Metrics, EveryRunHasAnEventFileOfItsOwn) {
  const ScratchFolder folder;
  MetricsWriter(folder.path(), {.resumed_step = 0}).write(1, {{"loss", 1.0}});
  MetricsWriter(folder.path(), {.resumed_step = 1}).write(2, {{"loss", 2.0}});
  size_t records = 0;
  for (const fs::path& file : event_files(folder.path())) records += read_records(file).size();
  EXPECT_EQ(records, 4u);
}

}  // namespace
}  // namespace espalier::testing
