// SPDX-License-Identifier: Apache-2.0
// Rows that take more memory than they may: read through an index, with the same result.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/data/packed.h"
#include "espalier/data/reader.h"
#include "espalier/data/writer.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/trajectory_helpers.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using testing::differences;
using testing::message_of;
using testing::seeds;
using testing::values_of;
using testing::write_bytes;

/// Rows whose columns take more than a block.
std::string long_rows() {
  std::string text;
  for (int row = 0; row < 400; ++row) {
    text += "{\"input_ids\":[1";
    for (int token = 0; token < 1000; ++token) text += ",7";
    text += "]}\n";
  }
  return text;
}

class RowIndexTest : public ::testing::Test {
 protected:
  RowIndexTest() {
    options_.note = [this](const std::string& text) { notes_.push_back(text); };
  }

  /// The rows of the files in memory; their report is in_memory_.
  Trajectories plain(std::vector<fs::path> paths) {
    ReadOptions options = options_;
    options.store = {};
    return read_trajectories(paths, options, &in_memory_);
  }
  /// The same with an index from the first bytes on; the report is report_.
  Trajectories indexed(std::vector<fs::path> paths) {
    options_.store.memory = 1;
    return read_trajectories(paths, options_, &report_);
  }
  void expect_same_reports() const {
    EXPECT_EQ(report_.rows_read, in_memory_.rows_read);
    EXPECT_EQ(report_.rows_skipped, in_memory_.rows_skipped);
    EXPECT_EQ(report_.first_errors, in_memory_.first_errors);
    const FieldTally &a = report_.fields, &b = in_memory_.fields;
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_EQ(a.loss_tokens, b.loss_tokens);
    EXPECT_EQ(a.rows_without_mask, b.rows_without_mask);
    EXPECT_EQ(a.rows, b.rows);
    EXPECT_EQ(a.number_rows, b.number_rows);
    EXPECT_EQ(a.more_ignored, b.more_ignored);
    ASSERT_EQ(a.ignored.size(), b.ignored.size());
    for (size_t i = 0; i < a.ignored.size(); ++i) {
      EXPECT_EQ(a.ignored[i].name, b.ignored[i].name);
      EXPECT_EQ(a.ignored[i].rows, b.ignored[i].rows);
      EXPECT_EQ(a.ignored[i].per_token_rows, b.ignored[i].per_token_rows);
    }
  }
  /// The files of the folder but `given`.
  std::vector<std::string> others(const std::set<std::string>& given) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      if (!given.contains(entry.path().filename())) names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  testing::ScratchFolder folder_;
  const fs::path rows_ = folder_ / "rows.jsonl", index_ = folder_ / ".rows.jsonl.espalier-index.safetensors";
  ReadOptions options_;
  ReadReport report_, in_memory_;
  std::vector<std::string> notes_;
};

TEST_F(RowIndexTest, GivesTheSameRowsNamesReportsAndHashes) {
  const std::vector<std::string> endings = {"a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.safetensors"};
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(testing::test_seed(seed));
    const testing::ScratchFolder folder;
    const testing::RandomShape shape(rng);
    std::vector<fs::path> paths;
    for (int64_t file = rng.between(1, 3); file > 0; --file) {
      TrajectoriesBuilder builder;
      for (int64_t rows = rng.between(1, 20); rows > 0; --rows) builder.append(random_row(rng, shape));
      paths.push_back(folder / fmt::format("{}{}", file, endings[rng.below(4)]));
      write_trajectories(paths.back(), builder.finish());
    }
    const Trajectories expected = plain(paths);
    for (const char* round : {"written", "mapped"}) {
      SCOPED_TRACE(round);
      const Trajectories rows = indexed(paths);
      ASSERT_EQ(differences(rows, expected), "");
      EXPECT_EQ(content_hashes(rows), content_hashes(expected));
      for (int64_t r = 0; r < rows.num_rows(); ++r) EXPECT_EQ(rows.name(r), expected.name(r));
      expect_same_reports();
    }
  }
}

TEST_F(RowIndexTest, IsWrittenOnceAndNoted) {
  write_bytes(rows_, "{\"input_ids\":[1,2],\"x\":[0,0]}\n{\"input_ids\":[3],\"y\":1}\n");
  const Trajectories rows = indexed({rows_});
  EXPECT_EQ(values_of(rows.input_ids), (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(others({"rows.jsonl"}), std::vector<std::string>{index_.filename()});
  ASSERT_EQ(notes_.size(), 1u);
  EXPECT_NE(notes_[0].find("--row-cache off"), std::string::npos);
  EXPECT_NE(notes_[0].find(index_.string()), std::string::npos);
  struct stat first{}, second{};
  ASSERT_EQ(::stat(index_.c_str(), &first), 0);
  EXPECT_EQ(values_of(indexed({rows_}).input_ids), (std::vector<int32_t>{1, 2, 3}));
  ASSERT_EQ(::stat(index_.c_str(), &second), 0);
  EXPECT_EQ(first.st_ino, second.st_ino);
  EXPECT_EQ(notes_.size(), 1u);
  plain({rows_});
  expect_same_reports();
}

TEST_F(RowIndexTest, RowsThatFitStayInMemory) {
  write_bytes(rows_, "{\"input_ids\":[1,2]}\n");
  options_.store.memory = 1000;
  EXPECT_EQ(read_trajectories(rows_, options_).num_rows(), 1);
  EXPECT_EQ(others({"rows.jsonl"}), std::vector<std::string>());
  EXPECT_TRUE(notes_.empty());
}

TEST_F(RowIndexTest, IsNotUsedForAFileThatChanged) {
  const auto read = [&] { return values_of(indexed({rows_}).input_ids); };
  write_bytes(rows_, "{\"input_ids\":[1]}\n");
  EXPECT_EQ(read(), std::vector<int32_t>{1});
  write_bytes(rows_, "{\"input_ids\":[1]}\n{\"input_ids\":[2]}\n");  // another size
  EXPECT_EQ(read(), (std::vector<int32_t>{1, 2}));
  // The same size and time of modification, other content.
  struct stat status{};
  ASSERT_EQ(::stat(rows_.c_str(), &status), 0);
  write_bytes(rows_, "{\"input_ids\":[1]}\n{\"input_ids\":[3]}\n");
  const timespec times[2] = {status.st_atim, status.st_mtim};
  ASSERT_EQ(::utimensat(AT_FDCWD, rows_.c_str(), times, 0), 0);
  EXPECT_EQ(read(), (std::vector<int32_t>{1, 3}));
  // A copy in its place, as a backup restores it: all as before but the file itself.
  write_bytes(folder_ / "b.jsonl", "{\"input_ids\":[1]}\n{\"input_ids\":[4]}\n");
  ASSERT_EQ(::utimensat(AT_FDCWD, (folder_ / "b.jsonl").c_str(), times, 0), 0);
  fs::rename(folder_ / "b.jsonl", rows_);
  EXPECT_EQ(read(), (std::vector<int32_t>{1, 4}));
  EXPECT_EQ(notes_.size(), 4u);
  // Another time of modification alone.
  const timespec later[2] = {{.tv_sec = status.st_mtim.tv_sec + 10, .tv_nsec = 0},
                             {.tv_sec = status.st_mtim.tv_sec + 10, .tv_nsec = 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, rows_.c_str(), later, 0), 0);
  read();
  EXPECT_EQ(notes_.size(), 5u);
}

TEST_F(RowIndexTest, IsNotUsedForOtherOptions) {
  write_bytes(rows_, "{\"input_ids\":[1]}\n{\"input_ids\":[9]}\n{\"input_ids\":[2]}\n");
  EXPECT_EQ(indexed({rows_}).num_rows(), 3);
  options_.max_rows = 1;
  EXPECT_EQ(indexed({rows_}).num_rows(), 1);
  options_.max_rows = 0;
  options_.vocab_size = 5;
  EXPECT_EQ(message_of<InputError>([&] { indexed({rows_}); }).find(rows_.string() + ":2: field `input_ids`"),
            0u);
  options_.skip_bad_rows = true;
  EXPECT_EQ(values_of(indexed({rows_}).input_ids), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(values_of(indexed({rows_}).input_ids), (std::vector<int32_t>{1, 2}));
  plain({rows_});
  expect_same_reports();
  EXPECT_EQ(report_.rows_skipped, 1);
  write_bytes(folder_ / "b.jsonl", "{\"input_ids\":[4]}\n");
  EXPECT_EQ(values_of(indexed({rows_, folder_ / "b.jsonl"}).input_ids), (std::vector<int32_t>{1, 2, 4}));
}

TEST_F(RowIndexTest, LeavesOutBadRowsOfSeveralFiles) {
  TrajectoriesBuilder builder;
  for (int id = 0; id < 9; ++id) builder.append({.input_ids = {id, 1}});
  write_packed(folder_ / "a.safetensors", builder.finish());
  write_bytes(rows_, "{\"input_ids\":[1]}\nbad\n{\"input_ids\":[9]}\n{\"input_ids\":[2]}\n");
  options_.vocab_size = 5;
  options_.skip_bad_rows = true;
  const std::vector<fs::path> paths = {folder_ / "a.safetensors", rows_, folder_ / "a.safetensors"};
  const Trajectories expected = plain(paths);
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(differences(indexed(paths), expected), "");
    expect_same_reports();
  }
  EXPECT_EQ(report_.rows_skipped, 10);
  EXPECT_EQ(notes_.size(), 1u);
  indexed({folder_ / "a.safetensors"});
  EXPECT_EQ(notes_.size(), 2u);
}

TEST_F(RowIndexTest, IsWrittenAgainIfItIsDamaged) {
  write_bytes(rows_, "{\"input_ids\":[1,2,3,4,5,6,7]}\n");
  indexed({rows_});
  const std::string whole = read_text(index_);
  for (const size_t size : {size_t{0}, size_t{7}, whole.size() / 2, whole.size() - 1}) {
    write_bytes(index_, whole.substr(0, size));
    EXPECT_EQ(indexed({rows_}).num_tokens(), 7) << size;
    EXPECT_EQ(read_text(index_).size(), whole.size());
  }
  std::string other = whole;
  other[other.find("espalier.index.key") + 40] ^= 1;
  write_bytes(index_, other);
  EXPECT_EQ(indexed({rows_}).num_tokens(), 7);
}

TEST_F(RowIndexTest, BadRowsAndFaultsLeaveNothing) {
  write_bytes(rows_, "{\"input_ids\":[1]}\n\n{\"input_ids\":[-1]}\n");
  EXPECT_EQ(message_of<InputError>([&] { indexed({rows_}); }),
            message_of<InputError>([&] { plain({rows_}); }));
  EXPECT_EQ(others({"rows.jsonl"}), std::vector<std::string>());
  // Interrupted while the rows are read, after some of them were written.
  const std::string many = long_rows();
  write_bytes(rows_, many);
  struct Interrupted {};
  options_.progress = [](double fraction) {
    if (fraction > 0.5) throw Interrupted();
  };
  EXPECT_THROW(indexed({rows_}), Interrupted);
  EXPECT_EQ(others({"rows.jsonl"}), std::vector<std::string>());
  options_.progress = {};
  EXPECT_EQ(differences(indexed({rows_}), plain({rows_})), "");
}

TEST_F(RowIndexTest, AFileThatCannotBeWrittenIsNoBadRow) {
  write_bytes(rows_, long_rows());
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 16, 1 << 16};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string message = message_of<InputError>([&] { indexed({rows_}); });
    ::_exit(message.starts_with("cannot write " + index_.string()) ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(others({"rows.jsonl"}), std::vector<std::string>());
}

TEST_F(RowIndexTest, GoesToAnotherFolder) {
  write_bytes(rows_, "{\"input_ids\":[1]}\n");
  fs::create_directory(folder_ / "b");
  write_bytes(folder_ / "b/rows.jsonl", "{\"input_ids\":[2]}\n");
  options_.row_cache = folder_ / "new/cache";
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(indexed({rows_}).input_ids[0], 1);
    EXPECT_EQ(indexed({folder_ / "b/rows.jsonl"}).input_ids[0], 2);
  }
  EXPECT_EQ(notes_.size(), 2u);
  EXPECT_EQ(others({"rows.jsonl", "b"}), std::vector<std::string>{"new"});
  // Nothing can be made in a file.
  options_.row_cache = rows_;
  notes_.clear();
  EXPECT_EQ(indexed({rows_}).input_ids[0], 1);
  ASSERT_EQ(notes_.size(), 1u);
  EXPECT_NE(notes_[0].find("stay in memory"), std::string::npos);
}

TEST_F(RowIndexTest, APipeStaysInMemory) {
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    write_bytes(pipe, "{\"input_ids\":[1,2]}\n");
    ::_exit(0);
  }
  EXPECT_EQ(indexed({pipe}).num_tokens(), 2);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(others({"pipe"}), std::vector<std::string>());
  EXPECT_TRUE(notes_.empty());
}

// Whatever the order in which the processes come, one writes and the others map what it has written.
TEST_F(RowIndexTest, SeveralProcessesWriteItOnce) {
  std::string many;
  for (int row = 0; row < 20'000; ++row) many += fmt::format("{{\"input_ids\":[1,2,{}]}}\n", row);
  write_bytes(rows_, many);
  std::vector<pid_t> children;
  for (int process = 0; process < 4; ++process) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    const Trajectories rows = indexed({rows_});
    const bool good = rows.num_rows() == 20'000 && rows.input_ids[3 * 19'999 + 2] == 19'999;
    ::_exit(good ? static_cast<int>(notes_.size()) : 100);
  }
  int notes = 0;
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    notes += WEXITSTATUS(status);
  }
  EXPECT_EQ(notes, 1);
  EXPECT_EQ(others({"rows.jsonl"}), std::vector<std::string>{index_.filename()});
}

TEST_F(RowIndexTest, AFileThatChangesWhileItIsReadIsNotIndexed) {
  std::string many;
  for (int row = 0; row < 3000; ++row) many += fmt::format("{{\"input_ids\":[1,2,{}]}}\n", row);
  write_bytes(rows_, many);
  bool changed = false;
  options_.progress = [&](double) {
    if (!std::exchange(changed, true)) std::ofstream(rows_, std::ios::app) << "\n";
  };
  EXPECT_EQ(indexed({rows_}).num_rows(), 3000);
  EXPECT_EQ(others({"rows.jsonl"}), std::vector<std::string>());
}

// Columns of more than a block, columns that begin late or change their type, and the temporary files.
TEST_F(RowIndexTest, LargeColumnsEqualThoseInMemory) {
  TrajectoriesBuilder in_memory, written({.memory = 1, .begin = [this] { return index_; }});
  Rng rng(testing::test_seed(7));
  for (int r = 0; r < 9; ++r) {
    TrajectoryRow row;
    for (int i = 0; i < 70'000; ++i) row.input_ids.push_back(static_cast<int32_t>(rng.below(1000)));
    if (r == 6) row.loss_weights.assign(70'000, 0.5);
    if (r > 3) row.logprobs.assign(70'000, 0);
    if (r == 7) row.logprobs[5] = -0.1;  // no float
    if (r > 4) row.advantage = 0.25;
    if (r == 8) row.routed_experts.assign(140'000, 3);
    in_memory.append(row);
    written.append(row);
    EXPECT_EQ(others({}).empty(), r < 3);  // the tokens of four rows are more than a block
  }
  const Trajectories expected = in_memory.finish(), rows = written.finish();
  EXPECT_EQ(differences(rows, expected), "");
  EXPECT_EQ(others({}), std::vector<std::string>());  // mapped, but without names
  ASSERT_TRUE(rows.release);
  rows.release();
  EXPECT_EQ(differences(rows, expected), "");
}

}  // namespace
}  // namespace espalier
