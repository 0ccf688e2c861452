// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/packed.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>

#include "espalier/base/check.h"
#include "espalier/base/safetensors.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/packed_file.h"
#include "tests/data/trajectory_helpers.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::differences;
using testing::message_of;
using testing::PackedFile;
using testing::ScratchFolder;
using testing::test_seed;
using testing::values_of;
using testing::write_bytes;

/// Two rows, of 2 and 3 tokens, with every column.
PackedFile full_file() {
  PackedFile file;
  file.set<int64_t>("offsets", "I64", {0, 2, 5});
  file.set<int32_t>("input_ids", "I32", {1, 2, 3, 4, 5});
  file.set<uint8_t>("loss_mask", "U8", {0, 1, 0, 1, 1});
  file.set<float>("logprobs", "F32", {0, -1, 0, 0, 0});
  file.set<uint8_t>("logprobs.present", "U8", {1, 0});
  file.set<double>("ref_logprobs", "F64", {0, -1, 0, -2, -3});
  file.set<double>("advantages", "F64", {0, 0, 1, 2, 3});
  file.set<uint8_t>("advantages.present", "BOOL", {0, 1});
  file.set<float>("reward", "F32", {0.5, 0});
  file.set<uint8_t>("chosen", "U8", {1, 0});
  file.set<uint8_t>("group_id", "U8", {'a', 'b', 'c'});
  file.set<int64_t>("group_id.offsets", "I64", {0, 3, 3});
  file.set<int32_t>("routed_experts", "I32", {1, 2, 3, 4, -1, -1, -1, -1, -1, -1}, {5, 2});
  file.set<int32_t>("ref_topk_ids", "I32", {-1, -1, 7, 8, -1, -1, -1, -1, 9, 7}, {5, 2});
  file.set<float>("ref_topk_logprobs", "F32", {0, 0, -1, -2, 0, 0, 0, 0, -0.5, -3}, {5, 2});
  file.set<float>("unknown", "F32", {1});
  return file;
}

TEST(Packed, ReadsEveryColumn) {
  const ScratchFolder folder;
  full_file().write(folder / "a.safetensors");
  const Trajectories t = read_trajectories(folder / "a.safetensors");
  EXPECT_EQ(values_of(t.offsets), (std::vector<int64_t>{0, 2, 5}));
  EXPECT_EQ(values_of(t.input_ids), (std::vector<int32_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(values_of(t.loss_weights), (std::vector<double>{0, 1, 0, 1, 1}));
  EXPECT_TRUE(t.logprobs.has(0));
  EXPECT_FALSE(t.logprobs.has(1));
  EXPECT_FALSE(t.advantages.has(0));
  EXPECT_EQ(t.advantages.values[4], 3);
  EXPECT_EQ(t.reward.values[0], 0.5);
  EXPECT_EQ(t.chosen.values[0], 1);
  EXPECT_EQ(t.group_id, (std::vector<std::string>{"abc", ""}));
  EXPECT_EQ(t.routes_per_token, 2);
  EXPECT_EQ(t.ref_topk, 2);
  EXPECT_EQ(t.ref_topk_ids[9], 7);
  EXPECT_EQ(t.ref_topk_logprobs[8], -0.5);
}

TEST(Packed, ReadsRewardsOfTurns) {
  const ScratchFolder folder;
  PackedFile file = full_file();
  file.erase("reward");
  file.set<float>("turn_rewards", "F32", {0.5, 2});
  file.set<int64_t>("turn_rewards.offsets", "I64", {0, 1, 2});
  file.write(folder / "a.safetensors");
  ReadReport report;
  const Trajectories t = read_trajectories(folder / "a.safetensors", {}, &report);
  EXPECT_TRUE(t.has_turn_rewards(0) && t.has_turn_rewards(1));
  EXPECT_EQ(t.turn_rewards[1], 2);
  EXPECT_EQ(report.fields.rows_with(Field::kTurnRewards), 2);
}

TEST(Packed, WithoutWeightsEveryWeightIsOne) {
  const ScratchFolder folder;
  PackedFile file = full_file();
  file.erase("loss_mask");
  file.write(folder / "a.safetensors");
  EXPECT_EQ(values_of(read_trajectories(folder / "a.safetensors").loss_weights), std::vector<double>(5, 1.0));
}

TEST(Packed, ColumnsAreViewsThatOutliveTheFile) {
  const ScratchFolder folder;
  Rng rng(test_seed(2));
  const Trajectories written = testing::random_trajectories(rng);
  write_packed(folder / "a.safetensors", written);
  const Trajectories first = read_trajectories(folder / "a.safetensors");
  const Trajectories copy = first;
  EXPECT_EQ(copy.input_ids.span().data(), first.input_ids.span().data());
  std::filesystem::remove(folder / "a.safetensors");
  EXPECT_EQ(differences(written, copy), "");
}

TEST(Packed, CopiesDataThatIsNotAligned) {
  const ScratchFolder folder;
  full_file().write(folder / "a.safetensors");
  std::string bytes;
  {
    const MappedFile file(folder / "a.safetensors");
    bytes.assign(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  }
  const Trajectories expected = read_trajectories(folder / "a.safetensors");
  // A header of odd length moves all data off its alignment.
  for (int blanks = 1; blanks < 8; ++blanks) {
    uint64_t header_bytes;
    std::memcpy(&header_bytes, bytes.data(), 8);
    std::string moved = bytes;
    moved.insert(8 + header_bytes, static_cast<size_t>(blanks), ' ');
    header_bytes += static_cast<uint64_t>(blanks);
    std::memcpy(moved.data(), &header_bytes, 8);
    write_bytes(folder / "b.safetensors", moved);
    const Trajectories t = read_trajectories(folder / "b.safetensors");
    EXPECT_EQ(differences(expected, t), "") << blanks;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(t.offsets.span().data()) % alignof(int64_t), 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(t.input_ids.span().data()) % alignof(int32_t), 0u);
  }
}

struct FileFault {
  std::string message;
  std::function<void(PackedFile&)> spoil;
};

std::vector<FileFault> structural_faults() {
  using File = PackedFile;
  return {
      {"field `input_ids`: expected a tensor of this name", [](File& f) { f.erase("input_ids"); }},
      {"field `offsets`: expected a tensor of this name", [](File& f) { f.erase("offsets"); }},
      {"field `input_ids`: expected dtype I32, received I64",
       [](File& f) { f.set<int64_t>("input_ids", "I64", {1, 2, 3, 4, 5}); }},
      {"field `input_ids`: expected one dimension",
       [](File& f) { f.set<int32_t>("input_ids", "I32", {1, 2, 3, 4, 5}, {5, 1}); }},
      {"field `offsets`: expected dtype I64", [](File& f) { f.set<int32_t>("offsets", "I32", {0, 2, 5}); }},
      {"field `offsets`: expected shape [rows + 1]",
       [](File& f) { f.set<int64_t>("offsets", "I64", {0, 2, 5}, {3, 1}); }},
      {"field `offsets`: expected shape [rows + 1]",
       [](File& f) { f.set<int64_t>("offsets", "I64", {}, {0}); }},
      {"field `offsets`: expected 0 at index 0",
       [](File& f) { f.set<int64_t>("offsets", "I64", {1, 2, 5}); }},
      {"field `offsets`: expected ascending values, received -4 after 0 at index 1",
       [](File& f) { f.set<int64_t>("offsets", "I64", {0, -4, 5}); }},
      {"field `offsets`: expected ascending values",
       [](File& f) { f.set<int64_t>("offsets", "I64", {0, 6, 5}); }},
      {"field `offsets`: expected 5 (the length of input_ids) at the end",
       [](File& f) { f.set<int64_t>("offsets", "I64", {0, 2, 6}); }},
      {"field `offsets`: expected 5 (the length of input_ids) at the end",
       [](File& f) { f.set<int64_t>("offsets", "I64", {0, 2, 4}); }},
      {"field `loss_mask`: expected either",
       [](File& f) { f.set<float>("loss_weights", "F32", {1, 1, 1, 1, 1}); }},
      {"field `loss_mask`: expected shape [5], received [4]",
       [](File& f) { f.set<uint8_t>("loss_mask", "U8", {1, 1, 1, 1}); }},
      {"field `loss_mask`: expected dtype U8",
       [](File& f) { f.set<int32_t>("loss_mask", "I32", {1, 1, 1, 1, 1}); }},
      {"field `logprobs`: expected dtype F32 or F64",
       [](File& f) { f.set<int32_t>("logprobs", "I32", {0, 0, 0, 0, 0}); }},
      {"field `logprobs`: expected shape [5]", [](File& f) { f.set<float>("logprobs", "F32", {0, 0}); }},
      {"field `logprobs.present`: expected shape [2]",
       [](File& f) { f.set<uint8_t>("logprobs.present", "U8", {1, 1, 1}); }},
      {"field `logprobs.present`: expected 0 or 1, received 2 at index 1",
       [](File& f) { f.set<uint8_t>("logprobs.present", "U8", {1, 2}); }},
      {"field `reward`: expected shape [2]", [](File& f) { f.set<float>("reward", "F32", {0, 0, 0, 0, 0}); }},
      {"field `chosen`: expected shape [2]", [](File& f) { f.set<uint8_t>("chosen", "U8", {0}); }},
      {"field `group_id.offsets`: expected a tensor", [](File& f) { f.erase("group_id.offsets"); }},
      {"field `group_id.offsets`: expected shape [3]",
       [](File& f) { f.set<int64_t>("group_id.offsets", "I64", {0, 3}); }},
      {"field `group_id.offsets`: expected ascending",
       [](File& f) { f.set<int64_t>("group_id.offsets", "I64", {0, 4, 3}); }},
      {"field `group_id.offsets`: expected 3 (the bytes of group_id)",
       [](File& f) { f.set<int64_t>("group_id.offsets", "I64", {0, 3, 4}); }},
      {"field `routed_experts`: expected shape [5, routes per token]",
       [](File& f) { f.set<int32_t>("routed_experts", "I32", {1, 2, 3, 4, 5}); }},
      {"field `turn_rewards.offsets`: expected a tensor",
       [](File& f) { f.set<float>("turn_rewards", "F32", {1}); }},
      {"field `turn_rewards.offsets`: expected 1 (the length of turn_rewards) at the end, received 2",
       [](File& f) {
         f.set<float>("turn_rewards", "F32", {1});
         f.set<int64_t>("turn_rewards.offsets", "I64", {0, 1, 2});
       }},
      {"field `ref_topk_ids`: expected shape [5, ids per token]",
       [](File& f) { f.set<int32_t>("ref_topk_ids", "I32", {1, 2, 3, 4, 5}); }},
      {"field `ref_topk_ids`: expected a tensor", [](File& f) { f.erase("ref_topk_ids"); }},
      {"field `ref_topk_logprobs`: expected a tensor", [](File& f) { f.erase("ref_topk_logprobs"); }},
      {"field `ref_topk_logprobs`: expected shape [5, 2]",
       [](File& f) { f.set<float>("ref_topk_logprobs", "F32", {0, -1, 0, 0, -1}, {5, 1}); }},
      {"field `routed_experts`: expected shape [5, routes per token]",
       [](File& f) { f.set<int32_t>("routed_experts", "I32", {}, {5, 0}); }},
  };
}

TEST(Packed, RefusesColumnsThatDoNotFitEvenWhenSkipping) {
  const ScratchFolder folder;
  ReadOptions skipping;
  skipping.skip_bad_rows = true;
  for (const FileFault& fault : structural_faults()) {
    PackedFile file = full_file();
    fault.spoil(file);
    file.write(folder / "a.safetensors");
    const std::string message =
        message_of<InputError>([&] { read_trajectories(folder / "a.safetensors", skipping); });
    EXPECT_NE(message.find("a.safetensors: " + fault.message), std::string::npos)
        << message << "\nexpected " << fault.message;
  }
}

std::vector<FileFault> row_faults() {
  using File = PackedFile;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  return {
      {"field `input_ids`: expected ids in [0, 100) (vocab_size is 100), received 100 at index 1",
       [](File& f) { f.set<int32_t>("input_ids", "I32", {1, 2, 3, 100, 5}); }},
      {"field `input_ids`: expected ids",
       [](File& f) { f.set<int32_t>("input_ids", "I32", {1, 2, 3, 4, -5}); }},
      {"field `loss_mask`: expected 0 or 1, received 2 at index 2",
       [](File& f) { f.set<uint8_t>("loss_mask", "U8", {1, 1, 1, 1, 2}); }},
      {"field `loss_weights`: expected finite numbers >= 0",
       [](File& f) {
         f.erase("loss_mask");
         f.set<float>("loss_weights", "F32", {1, 1, 1, -1, 1});
       }},
      {"field `logprobs`: expected 0 where the row lacks the field, received -1 at index 0",
       [](File& f) { f.set<float>("logprobs", "F32", {0, -1, -1, 0, 0}); }},
      {"field `ref_logprobs`: expected null or 0",
       [](File& f) { f.set<double>("ref_logprobs", "F64", {0, -1, -1, 0, 0}); }},
      {"field `ref_logprobs`: expected finite",
       [=](File& f) { f.set<double>("ref_logprobs", "F64", {0, -1, 0, -infinity, 0}); }},
      {"field `ref_logprobs`: expected finite log-probabilities <= 0, received 0.5 at index 2",
       [](File& f) { f.set<double>("ref_logprobs", "F64", {0, -1, 0, 0, 0.5}); }},
      {"field `advantages`: expected finite",
       [=](File& f) { f.set<double>("advantages", "F64", {0, 0, infinity, 0, 0}); }},
      {"field `reward`: expected a finite number", [=](File& f) { f.set<float>("reward", "F32", {0, nan}); }},
      {"field `turn_rewards`: expected either turn_rewards or reward, received both",
       [](File& f) {
         f.set<float>("turn_rewards", "F32", {1});
         f.set<int64_t>("turn_rewards.offsets", "I64", {0, 0, 1});
       }},
      {"field `turn_rewards`: expected 1 entries (one per turn, a range of tokens with loss), "
       "received "
       "2",
       [](File& f) {
         f.erase("reward");
         f.set<float>("turn_rewards", "F32", {1, 2});
         f.set<int64_t>("turn_rewards.offsets", "I64", {0, 0, 2});
       }},
      {"field `ref_topk_ids`: expected 2 ids in [0, 100) (vocab_size is 100), received 100 for token 2",
       [](File& f) {
         f.set<int32_t>("ref_topk_ids", "I32", {-1, -1, 7, 8, -1, -1, -1, -1, 9, 100}, {5, 2});
       }},
      {"field `ref_topk_logprobs`: expected 0 where the token has no ref_topk_ids, received -4 at index 2",
       [](File& f) {
         f.set<float>("ref_topk_logprobs", "F32", {0, 0, -1, -2, 0, 0, -4, 0, -0.5, -3}, {5, 2});
       }},
      {"field `chosen`: expected 0 or 1", [](File& f) { f.set<uint8_t>("chosen", "U8", {0, 3}); }},
      {"field `group_id`: expected UTF-8 text",
       [](File& f) {
         f.set<uint8_t>("group_id", "U8", {'a', 'b', 0xFF});
         f.set<int64_t>("group_id.offsets", "I64", {0, 2, 3});
       }},
      {"field `routed_experts`: expected expert ids >= 0, received -1 at index 1",
       [](File& f) { f.set<int32_t>("routed_experts", "I32", {1, 2, 3, 4, 5, -1, 5, 5, 5, 5}, {5, 2}); }},
      {"field `input_ids`: expected at least one token, received none",
       [](File& f) { f.set<int64_t>("offsets", "I64", {0, 5, 5}); }},
  };
}

TEST(Packed, NamesFileRowAndFieldOfABadRowOrSkipsIt) {
  const ScratchFolder folder;
  const std::filesystem::path path = folder / "a.safetensors";
  ReadOptions options;
  options.vocab_size = 100;
  for (const FileFault& fault : row_faults()) {
    SCOPED_TRACE(fault.message);
    PackedFile file = full_file();
    // With offsets (0, 5, 5) row 0 has every token, so the columns that row 1 lacks or has must allow for it.
    fault.spoil(file);
    if (fault.message.find("at least one token") != std::string::npos) {
      for (const char* name : {"logprobs", "logprobs.present", "ref_logprobs", "advantages",
                               "advantages.present", "routed_experts"})
        file.erase(name);
    }
    file.write(path);
    options.skip_bad_rows = false;
    const std::string message = message_of<InputError>([&] { read_trajectories(path, options); });
    EXPECT_NE(message.find("a.safetensors: row 1: " + fault.message), std::string::npos) << message;
    options.skip_bad_rows = true;
    ReadReport report;
    const Trajectories kept = read_trajectories(path, options, &report);
    EXPECT_EQ(report.rows_read, 1);
    EXPECT_EQ(report.rows_skipped, 1);
    EXPECT_EQ(kept.num_rows(), 1);
    EXPECT_EQ(kept.input_ids[0], 1);
  }
}

TEST(Packed, RefusesFilesWithoutRows) {
  const ScratchFolder folder;
  PackedFile file;
  file.set<int64_t>("offsets", "I64", {0});
  file.set<int32_t>("input_ids", "I32", {}, {0});
  file.write(folder / "a.safetensors");
  const std::string message = message_of<InputError>([&] { read_trajectories(folder / "a.safetensors"); });
  EXPECT_NE(message.find("expected at least one row"), std::string::npos) << message;
  write_bytes(folder / "a.safetensors", "");
  EXPECT_THROW(read_trajectories(folder / "a.safetensors"), InputError);
}

TEST(Packed, ChoosesFloatsOnlyWhereTheyHoldEveryValue) {
  const ScratchFolder folder;
  const auto dtype_of_reward = [&](double reward) {
    TrajectoryRow row;
    row.input_ids = {1};
    row.reward = reward;
    TrajectoriesBuilder builder;
    builder.append(row);
    write_packed(folder / "a.safetensors", builder.finish());
    EXPECT_EQ(read_trajectories(folder / "a.safetensors").reward.values[0], reward);
    return SafetensorsFile(folder / "a.safetensors").at("reward").dtype;
  };
  EXPECT_EQ(dtype_of_reward(0.5), "F32");
  EXPECT_EQ(dtype_of_reward(0.1), "F64");
  EXPECT_EQ(dtype_of_reward(1e300), "F64");
  EXPECT_EQ(dtype_of_reward(1e-320), "F64");
}

TEST(Packed, NoFlipOfAByteCrashesIt) {
  const ScratchFolder folder;
  full_file().write(folder / "a.safetensors");
  std::string bytes;
  {
    const MappedFile file(folder / "a.safetensors");
    bytes.assign(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  }
  const uint64_t seed = 31;
  SCOPED_TRACE(fmt::format("seed {}", seed));
  Rng rng(test_seed(seed));
  int refused = 0;
  const int trials = 1000;
  for (int trial = 0; trial < trials; ++trial) {
    std::string bad = bytes;
    for (int64_t flips = rng.between(1, 3); flips > 0; --flips)
      bad[rng.below(static_cast<int64_t>(bad.size()))] = static_cast<char>(rng.below(256));
    write_bytes(folder / "b.safetensors", bad);
    try {
      ReadOptions options;
      options.skip_bad_rows = rng.below(2) == 0;
      const Trajectories t = read_trajectories(folder / "b.safetensors", options);
      for (int64_t r = 0; r < t.num_rows(); ++r) check_row(copy_row(t, r));
    } catch (const InputError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, trials / 10);
  EXPECT_LT(refused, trials);
}

}  // namespace
}  // namespace espalier
