// SPDX-License-Identifier: Apache-2.0
// Fields by the names that other programs give them, and what is said of the fields of a file.
#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/data/reader.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/packed_file.h"
#include "tests/data/trajectory_helpers.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::PackedFile;
using testing::ScratchFolder;
using testing::values_of;
using testing::write_bytes;

struct Read {
  Trajectories rows;
  ReadReport report;
};

class FieldNames : public ::testing::Test {
 protected:
  Read read(const std::string& text) {
    write_bytes(folder_ / "rows.jsonl", text);
    Read result;
    result.rows = read_trajectories(folder_ / "rows.jsonl", {}, &result.report);
    return result;
  }

  /// The row's members after "input_ids":[5,6,7,8].
  Read row(const std::string& members) { return read(R"({"input_ids":[5,6,7,8],)" + members + "}\n"); }

  /// The fault of such a row without the place.
  std::string fault(const std::string& members) {
    const std::string prefix = (folder_ / "rows.jsonl").string() + ":1: ";
    const std::string message = message_of<InputError>([&] { row(members); });
    EXPECT_TRUE(message.empty() || message.starts_with(prefix)) << message;
    return message.empty() ? "" : message.substr(prefix.size());
  }

  Read read(const PackedFile& file) {
    file.write(folder_ / "rows.safetensors");
    Read result;
    result.rows = read_trajectories(folder_ / "rows.safetensors", {}, &result.report);
    return result;
  }

  ScratchFolder folder_;
};

int64_t rows_with(const ReadReport& report, std::string_view name) {
  return report.fields.rows[find_field_name(name).value()];
}

TEST_F(FieldNames, MasksByEveryName) {
  const std::vector<double> expected = {0, 0, 1, 1};
  for (const std::string name : {"loss_mask", "response_mask", "completion_mask", "assistant_masks"}) {
    for (const std::string values : {"[0,0,1,1]", "[false,false,true,true]"}) {
      const Read result = row("\"" + name + "\":" + values);
      EXPECT_EQ(values_of(result.rows.loss_weights), expected) << name;
      EXPECT_EQ(rows_with(result.report, name), 1);
      EXPECT_EQ(result.report.fields.loss_tokens, 2);
      EXPECT_EQ(result.report.fields.rows_without_mask, 0);
    }
  }
  // Labels before and after input_ids: they are compared with input_ids in both orders.
  for (const std::string text : {R"({"input_ids":[5,6,7,8],"labels":[-100,-100,7,8]})",
                                 R"({"labels":[-100,-100,7,8],"input_ids":[5,6,7,8]})"}) {
    EXPECT_EQ(values_of(read(text).rows.loss_weights), expected);
  }
}

TEST_F(FieldNames, LogProbabilitiesByEveryName) {
  const std::vector<double> expected = {0, -1, -2, -0.5};
  for (const std::string name : {"logprobs", "old_log_probs", "rollout_log_probs"}) {
    const Read result = row("\"" + name + "\":[null,-1,-2,-0.5]");
    ASSERT_TRUE(result.rows.logprobs.has(0)) << name;
    EXPECT_EQ(values_of(result.rows.logprobs.values), expected);
    EXPECT_EQ(result.report.fields.rows_with(Field::kLogprobs), 1);
  }
  for (const std::string name : {"ref_logprobs", "ref_log_prob", "ref_log_probs"}) {
    const Read result = row("\"" + name + "\":[0,-1,-2,-0.5]");
    ASSERT_TRUE(result.rows.ref_logprobs.has(0)) << name;
    EXPECT_EQ(values_of(result.rows.ref_logprobs.values), expected);
    EXPECT_FALSE(result.rows.logprobs.any());
  }
}

TEST_F(FieldNames, LabelsAreTheTokensThemselves) {
  EXPECT_EQ(
      fault(R"("labels":[-100,-100,9,8])"),
      "field `labels`: expected -100 or the token of input_ids at the same place, received 9 at index 2, "
      "where input_ids has 7");
  EXPECT_EQ(
      fault(R"("labels":[-100,7,8,-100])"),
      "field `labels`: expected -100 or the token of input_ids at the same place, received 7 at index 1, "
      "where input_ids has 6 (the next token: give unshifted labels)");
  EXPECT_EQ(fault(R"("labels":[-100,null,7,8])"),
            "field `labels`: expected integers, received null at index 1");
  EXPECT_EQ(fault(R"("labels":[-100,6.0,7,8])"),
            "field `labels`: expected integers, received 6.0 at index 1");
  EXPECT_EQ(fault(R"("labels":7)"), "field `labels`: expected a list of token ids and -100, received 7");
  EXPECT_EQ(fault(R"("labels":[-1,6,7,8])").substr(0, 60),
            "field `labels`: expected -100 or the token of input_ids at t");
}

TEST_F(FieldNames, ArraysOfTheResponseAloneAreExplained) {
  EXPECT_EQ(fault(R"("response_mask":[1,1])"),
            "field `response_mask`: expected 4 entries (one for each of input_ids), received 2 (if it "
            "covers only the last 2, the response, put 0 before it for each of the other 2)");
  EXPECT_EQ(fault(R"("labels":[8])"),
            "field `labels`: expected 4 entries (one for each of input_ids), received 1 (if it covers only "
            "the last 1, the response, put -100 before it for each of the other 3)");
  EXPECT_NE(fault(R"("old_log_probs":[-1,-2,-3])").find("received 3 (if it covers only the last 3, "),
            std::string::npos);
  EXPECT_EQ(fault(R"("rollout_log_probs":[0,-1,-2,-3,-4])"),
            "field `rollout_log_probs`: expected 4 entries (one for each of input_ids), received 5");
  EXPECT_EQ(fault(R"("ref_log_prob":[])").substr(0, 80),
            "field `ref_log_prob`: expected 4 entries (one for each of input_ids), received 0");
}

TEST_F(FieldNames, FaultsAreNamedAsTheFileNamesThem) {
  EXPECT_EQ(fault(R"("assistant_masks":[0,0,2,1])"),
            "field `assistant_masks`: expected 0, 1, true or false, received 2 at index 2");
  EXPECT_EQ(fault(R"("old_log_probs":[0,-1,0.5,-1])"),
            "field `old_log_probs`: expected finite log-probabilities <= 0, received 0.5 at index 2");
  EXPECT_EQ(fault(R"("rollout_log_probs":[-1,-1,-1,-1])"),
            "field `rollout_log_probs`: expected null or 0 for the first token, received -1");
}

TEST_F(FieldNames, SeveralNamesMustAgree) {
  // Equal ones are fine. The first token never carries loss, so it does not matter there.
  EXPECT_EQ(fault(R"("loss_mask":[0,0,1,1],"labels":[5,-100,7,8],"response_mask":[false,false,true,true])"),
            "");
  EXPECT_EQ(fault(R"("old_log_probs":[0,-1,-2,-3],"rollout_log_probs":[null,-1,-2,-3])"), "");
  EXPECT_EQ(fault(R"("labels":[-100,6,7,-100],"loss_mask":[0,1,0,0])"),
            "field `labels`: expected loss on the same tokens as by `loss_mask` (keep one of them), received "
            "loss at "
            "index 2, where `loss_mask` has none");
  EXPECT_EQ(
      fault(R"("completion_mask":[0,1,0,1],"assistant_masks":[0,1,0,0])"),
      "field `assistant_masks`: expected loss on the same tokens as by `completion_mask` (keep one of them), "
      "received no loss at index 3, where `completion_mask` has it");
  EXPECT_EQ(fault(R"("rollout_log_probs":[0,-1,-2.5,-3],"old_log_probs":[0,-1,-2,-3])"),
            "field `rollout_log_probs`: expected the values of `old_log_probs`, which is the same field "
            "(keep one of "
            "them), received -2.5 at index 2, where `old_log_probs` has -2");
  EXPECT_EQ(fault(R"("ref_logprobs":[0,-1,-2,-3],"ref_log_prob":[0,-1,-2,-4])").substr(0, 59),
            "field `ref_log_prob`: expected the values of `ref_logprobs`");
}

TEST_F(FieldNames, MasksMayStandBesideWeightsThatAgree) {
  const Read agreeing = row(R"("loss_weights":[0,0,0.5,2],"response_mask":[0,0,1,1])");
  EXPECT_EQ(values_of(agreeing.rows.loss_weights), (std::vector<double>{0, 0, 0.5, 2}));
  EXPECT_EQ(fault(R"("loss_weights":[0,0,0.5,2],"response_mask":[0,1,1,1])"),
            "field `response_mask`: expected loss on the same tokens as by `loss_weights` (keep one of "
            "them), received "
            "loss at index 1, where `loss_weights` has none");
}

TEST_F(FieldNames, CountsTokensWithLoss) {
  const Read result = read(
      "{\"input_ids\":[1,2,3],\"loss_mask\":[1,0,1]}\n{\"input_ids\":[1,2,3]}\n"
      "{\"input_ids\":[1,2,3],\"loss_weights\":[1,0.5,0]}\n{\"input_ids\":[9]}\n");
  EXPECT_EQ(result.report.fields.tokens, 10);
  EXPECT_EQ(result.report.fields.loss_tokens, 1 + 2 + 1 + 0);
  EXPECT_EQ(result.report.fields.rows_without_mask, 2);
}

TEST_F(FieldNames, UnknownFieldsAreCollected) {
  const Read result = read(
      R"({"time":1,"input_ids":[1,2,3],"weights":[1,2,3],"tags":["a","b"],"nothing":null,"attention_mask":[1,1,1]})"
      "\n"
      R"({"weights":[1,2],"input_ids":[1,2],"tags":["a","b"],"position_ids":[0,1],"attention_mask":[true,true]})"
      "\n"
      R"({"tags":["a","b"],"input_ids":[1,2,3],"new":{},"attention_mask":[0,1,1],"position_ids":[1,2,3]})"
      "\n");
  std::string text;
  for (const IgnoredField& each : result.report.fields.ignored)
    text += fmt::format("{} {}{} ", each.name, each.rows, each.is_per_token() ? "*" : "");
  // tags is as long as its row by chance, in one of three rows. attention_mask and position_ids carry
  // information in one row.
  EXPECT_EQ(text, "time 1 weights 2* tags 3 attention_mask 3 position_ids 2* new 1 ");
}

TEST_F(FieldNames, NamesOfUnknownFieldsAreBounded) {
  std::string text;
  for (int r = 0; r < 50; ++r) {
    text += "{\"input_ids\":[1]";
    for (int i = 0; i < 40; ++i) text += fmt::format(",\"key {}\":0", 40 * r + i);
    text += "}\n";
  }
  const Read result = read(text);
  EXPECT_EQ(result.report.fields.ignored.size(), FieldTally::kMostIgnored);
  EXPECT_TRUE(result.report.fields.more_ignored);
}

TEST_F(FieldNames, HugeNumbersOfOthersDoNotSpoilARow) {
  const Read result = row(R"("uuid":340282366920938463463374607431768211455,"score":1e999,)"
                          R"("meta":{"n":[123456789012345678901234567890]},"reward":0.5)");
  EXPECT_EQ(result.rows.reward.values[0], 0.5);
  EXPECT_EQ(result.report.fields.ignored.size(), 3u);
  const Read with_id = row(R"("group_id":340282366920938463463374607431768211455)");
  EXPECT_EQ(with_id.rows.group_id[0], "340282366920938463463374607431768211455");
  EXPECT_EQ(fault(R"("reward":1e999)"), "field `reward`: expected numbers within 64 bits, received 1e999");
  EXPECT_EQ(fault(R"("uuid":340282366920938463463374607431768211455,"x":[1,})").substr(0, 32),
            "expected a JSON object, received");
}

/// Two rows of 2 and 3 tokens.
PackedFile packed_rows() {
  PackedFile file;
  file.set<int64_t>("offsets", "I64", {0, 2, 5});
  file.set<int32_t>("input_ids", "I32", {1, 2, 3, 4, 5});
  return file;
}

TEST_F(FieldNames, PackedMasksByEveryName) {
  const std::vector<double> expected = {0, 1, 0, 0, 1};
  for (const std::string name : {"loss_mask", "response_mask", "completion_mask", "assistant_masks"}) {
    PackedFile file = packed_rows();
    file.set<uint8_t>(name, "BOOL", {0, 1, 0, 0, 1});
    EXPECT_EQ(values_of(read(file).rows.loss_weights), expected) << name;
    if (name == "loss_mask") continue;
    file.set<int64_t>(name, "I64", {0, 1, 0, 0, 1});
    EXPECT_EQ(values_of(read(file).rows.loss_weights), expected) << name;
    file.set<int64_t>(name, "I64", {0, 1, 0, 256, 1});
    EXPECT_NE(
        message_of<InputError>([&] { read(file); }).find("row 1: field `" + name + "`: expected 0 or 1"),
        std::string::npos);
  }
  PackedFile file = packed_rows();
  file.set<int32_t>("labels", "I32", {-100, 2, -100, -100, 5});
  const Read result = read(file);
  EXPECT_EQ(values_of(result.rows.loss_weights), expected);
  EXPECT_EQ(result.report.fields.loss_tokens, 2);
  EXPECT_EQ(result.report.fields.tokens, 5);
  EXPECT_EQ(rows_with(result.report, "labels"), 2);
  file.set<int64_t>("labels", "I64", {-100, 2, -100, 9, 5});
  EXPECT_NE(message_of<InputError>([&] { read(file); })
                .find("row 1: field `labels`: expected -100 or the token of input_ids at the same place, "
                      "received 9 at "
                      "index 1, where input_ids has 4"),
            std::string::npos);
}

TEST_F(FieldNames, PackedLogProbabilitiesByEveryName) {
  for (const std::string name : {"old_log_probs", "rollout_log_probs", "ref_log_prob", "ref_log_probs"}) {
    PackedFile file = packed_rows();
    file.set<float>(name, "F32", {0, -1, 0, -2, -3});
    const Read result = read(file);
    const auto& column = name.starts_with("ref") ? result.rows.ref_logprobs : result.rows.logprobs;
    ASSERT_TRUE(column.has(1)) << name;
    EXPECT_EQ(column.values[4], -3);
    EXPECT_EQ(result.report.fields.rows_without_mask, 2);
    file.set<float>(name, "F32", {0, -1, 0, 2, -3});
    EXPECT_NE(
        message_of<InputError>([&] { read(file); }).find("row 1: field `" + name + "`: expected finite"),
        std::string::npos);
    file.set<float>(name, "F32", {0, -1, 0});
    EXPECT_NE(message_of<InputError>([&] { read(file); }).find("field `" + name + "`: expected shape [5]"),
              std::string::npos);
  }
}

TEST_F(FieldNames, PackedNamesMustAgree) {
  PackedFile file = packed_rows();
  file.set<uint8_t>("loss_mask", "U8", {0, 1, 1, 0, 1});
  file.set<int64_t>("labels", "I64", {1, 2, -100, -100, 5});
  file.set<float>("logprobs", "F32", {0, -1, 0, -2, -0.5});
  file.set<double>("old_log_probs", "F64", {0, -1, 0, -2, -0.5});
  read(file);
  const auto fault_with = [&](auto change) {
    PackedFile bad = file;
    change(bad);
    const std::string message = message_of<InputError>([&] { read(bad); });
    const size_t place = message.find("row ");
    return place == std::string::npos ? message : message.substr(place);
  };
  EXPECT_EQ(fault_with([](PackedFile& f) { f.set<int64_t>("labels", "I64", {1, 2, -100, 4, 5}); }),
            "row 1: field `labels`: expected loss on the same tokens as by `loss_mask` (keep one of them), "
            "received "
            "loss at index 1, where `loss_mask` has none");
  EXPECT_EQ(
      fault_with([](PackedFile& f) { f.set<double>("old_log_probs", "F64", {0, -1.5, 0, -2, -0.5}); }),
      "row 0: field `old_log_probs`: expected the values of `logprobs`, which is the same field (keep one of "
      "them), received -1.5 at index 1, where `logprobs` has -1");
  EXPECT_EQ(fault_with([](PackedFile& f) {
              f.set<double>("old_log_probs", "F64", {0, -1, 0, 0, 0});
              f.set<uint8_t>("old_log_probs.present", "U8", {1, 0});
            }),
            "row 1: field `old_log_probs`: expected the rows that have `logprobs`, which is the same field, "
            "received "
            "other rows");
}

TEST_F(FieldNames, PackedUnknownTensorsAreCollected) {
  PackedFile file = packed_rows();
  file.set<float>("entropy", "F32", {1, 2, 3, 4, 5});
  file.set<float>("hidden", "F32", std::vector<float>(10), {5, 2});
  file.set<float>("score", "F32", {1, 2});
  file.set<float>("reward", "F32", {1, 0});
  file.set<uint8_t>("reward.present", "U8", {1, 0});
  file.set<uint8_t>("group_id", "U8", {'a', 'b'});
  file.set<int64_t>("group_id.offsets", "I64", {0, 1, 2});
  const Read result = read(file);
  std::string text;
  for (const IgnoredField& each : result.report.fields.ignored)
    text += fmt::format("{}{} ", each.name, each.is_per_token() ? "*" : "");
  EXPECT_EQ(text, "entropy* hidden* score ");
}

}  // namespace
}  // namespace espalier
