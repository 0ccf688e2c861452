// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/data_summary.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "espalier/base/file.h"
#include "tests/base/scratch_folder.h"

namespace espalier::testing {
namespace {

using commands::DataUse;

class DataSummary : public ::testing::Test {
 protected:
  std::vector<std::string> lines(const std::string& text, const DataUse& use = {},
                                 const std::string& name = "rows.jsonl") {
    write_text(folder_ / "rows.jsonl", text);
    ReadReport report;
    const Trajectories trajectories = read_trajectories(folder_ / "rows.jsonl", {}, &report);
    return commands::data_summary(name, report, trajectories, use);
  }

  static DataUse use_of(ObjectiveKind objective) {
    ObjectiveOptions options;
    options.kind = objective;
    return commands::data_use_of("", options);
  }

  ScratchFolder folder_;
};

using Lines = std::vector<std::string>;

TEST_F(DataSummary, CountsAndNames) {
  const std::string text =
      R"({"input_ids":[1,2,3],"loss_mask":[0,1,1],"group_id":"a","time":1})"
      "\n"
      R"({"input_ids":[1,2,3],"loss_mask":[0,0,1],"logprobs":[null,-1,-2],"advantage":1,"group_id":"a","x":"y"})"
      "\n";
  EXPECT_EQ(lines(text),
            (Lines{"rows.jsonl: 2 trajectories, 6 tokens, 3 with loss (loss_mask, logprobs, advantage, "
                   "group_id); ignored: time, x"}));
  EXPECT_EQ(lines(text, use_of(ObjectiveKind::kSft)),
            (Lines{"rows.jsonl: 2 trajectories, 6 tokens, 3 with loss (loss_mask, group_id); not used by "
                   "sft: logprobs, "
                   "advantage; ignored: time, x"}));
}

TEST_F(DataSummary, SaysWhenAllTokensCarryLoss) {
  EXPECT_EQ(lines("{\"input_ids\":[1,2,3]}\n"),
            (Lines{"rows.jsonl: 1 trajectory, 3 tokens, all with loss (no loss_mask given)"}));
  EXPECT_EQ(lines("{\"input_ids\":[1,2,3]}\n{\"input_ids\":[4,5],\"labels\":[-100,5]}\n"),
            (Lines{"rows.jsonl: 2 trajectories, 5 tokens, 3 with loss (labels as loss_mask)",
                   "warning: 1 of 2 trajectories has no loss_mask: all its tokens carry loss"}));
  EXPECT_EQ(
      lines("{\"input_ids\":[1,2,3]}\n{\"input_ids\":[1]}\n{\"input_ids\":[4,5],\"loss_mask\":[0,1]}\n")[1],
      "warning: 2 of 3 trajectories have no loss_mask: all their tokens carry loss");
}

TEST_F(DataSummary, SaysThatTheRatioIsOneWithoutLogProbabilities) {
  const DataUse grpo = use_of(ObjectiveKind::kGrpo);
  EXPECT_EQ(lines("{\"input_ids\":[1,2],\"loss_mask\":[0,1],\"advantage\":1}\n", grpo),
            (Lines{"rows.jsonl: 1 trajectory, 2 tokens, 1 with loss (loss_mask, advantage); no logprobs: the "
                   "ratio is 1 (on-policy)"}));
  const std::string with = R"({"input_ids":[1,2],"loss_mask":[0,1],"advantage":1,"old_log_probs":[0,-1]})";
  EXPECT_EQ(lines(with + "\n", grpo), (Lines{"rows.jsonl: 1 trajectory, 2 tokens, 1 with loss (loss_mask, "
                                             "old_log_probs as logprobs, advantage)"}));
  EXPECT_EQ(lines(with + "\n{\"input_ids\":[1,2],\"loss_mask\":[0,1],\"advantage\":1}\n", grpo)[1],
            "warning: 1 of 2 trajectories has no logprobs: its ratio is 1 (on-policy)");
}

TEST_F(DataSummary, WarnsOfUnknownListsThatCoverEveryToken) {
  EXPECT_EQ(
      lines(R"({"input_ids":[1,2],"loss_mask":[0,1],"mask":[0,1],"tags":["a"],"attention_mask":[1,1]})"),
      (Lines{
          "rows.jsonl: 1 trajectory, 2 tokens, 1 with loss (loss_mask); ignored: mask, tags, attention_mask",
          "warning: unknown fields with an entry for each token are ignored: mask (docs/data-format.md lists "
          "the known fields)"}));
}

TEST_F(DataSummary, WarnsOfIdsThatAreNumbersInSomeRows) {
  const std::string number =
      R"({"input_ids":[1,2],"loss_mask":[0,1],"group_id":1,"pair_id":7,"trajectory_id":1})";
  const std::string text =
      R"({"input_ids":[1,2],"loss_mask":[0,1],"group_id":"1","pair_id":7,"trajectory_id":"2"})";
  EXPECT_EQ(
      lines(number + "\n" + text + "\n" + text + "\n{\"input_ids\":[1,2],\"loss_mask\":[0,1]}\n").back(),
      "warning: group_id is a number in 1 of 3 trajectories and text in the others: 1 and \"1\" are the "
      "same");
  EXPECT_EQ(lines(number + "\n" + number + "\n").size(), 1u);
  EXPECT_EQ(lines(text + "\n" + text + "\n").size(), 1u);
}

TEST_F(DataSummary, WarnsOfTrajectoriesBeyondTheModelsPositions) {
  DataUse use;
  use.max_position_embeddings = 2;
  const std::string text = "{\"input_ids\":[1,2]}\n{\"input_ids\":[1,2,3]}\n{\"input_ids\":[1,2,3,4,5]}\n";
  EXPECT_EQ(lines(text, use)[1],
            "warning: 2 of 3 trajectories are longer than max_position_embeddings of the model's "
            "config.json, 2: the "
            "longest has 5 tokens");
  use.max_position_embeddings = 5;
  EXPECT_EQ(lines(text, use).size(), 1u);
}

TEST_F(DataSummary, NamesAreFitForATerminal) {
  EXPECT_EQ(lines("{\"input_ids\":[1,2],\"\\u001b[2J\\u202e\\n\":1}\n", {}, "a\x1B[1m\n.jsonl"),
            (Lines{"a\\x1B[1m\\n.jsonl: 1 trajectory, 2 tokens, all with loss (no loss_mask given); ignored: "
                   "\\x1B[2J\\u202E\\n"}));
  std::string many = "{\"input_ids\":[1,2]";
  for (int i = 0; i < 2000; ++i) many += fmt::format(",\"key{}\":0", i);
  EXPECT_TRUE(lines(many + "}\n")[0].ends_with("key8, key9 and many more"));
}

}  // namespace
}  // namespace espalier::testing
