// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/sharing.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "espalier/base/interrupt.h"
#include "espalier/base/rng.h"
#include "espalier/data/builder.h"
#include "tests/inspect/sharing_rows.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

const std::string kSystem = "<|im_start|>~system~\n~You~ are~ a~ clerk~.~<|im_end|>~\n";
const std::string kUser = "<|im_start|>~user~\n~Where~ is~ it~?~<|im_end|>~\n";
const std::string kAssistant = "<|im_start|>~assistant~\n";
const std::string kTool = "<|im_start|>~tool~\n";
const std::string kNext = "<|im_end|>~\n~" + kUser + "~" + kAssistant;

/// All divergences are for this cause; their lost tokens.
void expect_only(const SharingReport& report, Cause cause, int64_t divergences, int64_t tokens) {
  EXPECT_EQ(report.divergences, divergences);
  EXPECT_EQ(report.not_examined, 0);
  for (int i = 0; i < kNumCauses; ++i) {
    const auto other = static_cast<Cause>(i);
    EXPECT_EQ(report[other].divergences, other == cause ? divergences : 0) << text_of(other).word;
    EXPECT_EQ(report[other].tokens, other == cause ? tokens : 0) << text_of(other).word;
  }
}

// A sampled answer, and the history of the next turn, where the same text has other ids.
std::vector<Row> retokenised(const std::string& history, bool history_trained = false) {
  return {{{{kUser + "~" + kAssistant}, {"un~believ~able~ day~ in~ the~ park~<|im_end|>", true}}},
          {{{kUser + "~" + kAssistant},
            {history + "~ day~ in~ the~ park~" + kNext, history_trained},
            {"Bye~<|im_end|>", true}}}};
}

TEST(Sharing, CanBeStopped) {
  struct Stopped {};
  const ReadableRows rows(retokenised("unbe~liev~able"));
  const InterruptScope scope([] { throw Stopped(); });
  EXPECT_THROW(rows.analyse(), Stopped);
}

TEST(Sharing, RetokenisedHistory) {
  const ReadableRows rows(retokenised("unbe~liev~able"));
  const SharingReport report = rows.analyse();
  expect_only(report, Cause::kRetokenised, 1, 6);  // able day in the park <|im_end|>
  const SharingExample& example = report[Cause::kRetokenised].examples.at(0);
  EXPECT_EQ(example.position, 12);
  EXPECT_EQ(example.role, Role::kAssistant);
  EXPECT_EQ(rows.text(example.before), "<|im_start|>user\nWhere is it?<|im_end|>\n<|im_start|>assistant\n");
  // The longer trajectory's side is not the first: both have one trajectory, and the first child comes first.
  EXPECT_EQ(example.left_row, 0);
  EXPECT_EQ(example.left,
            (std::vector<int32_t>{rows.trajectories().row(0)[12], rows.trajectories().row(0)[13]}));
  EXPECT_EQ(rows.text(example.right), "unbeliev");
  EXPECT_EQ(rows.text(example.left_after), "able day in the park<|im_end|>");
}

TEST(Sharing, ControlsOfRetokenisedHistory) {
  expect_only(ReadableRows(retokenised("unbe~lief~able")).analyse(), Cause::kSampling, 1, 0);  // other text
  expect_only(ReadableRows(retokenised("unbe~liev~able", true)).analyse(), Cause::kSampling, 1,
              0);  // two samples
  // The same text for three letters, then other text.
  expect_only(
      ReadableRows({{{{kAssistant}, {"f~oo~l~ish~ me~!", true}}}, {{{kAssistant}, {"fo~o~d~ is~ here~."}}}})
          .analyse(),
      Cause::kSampling, 1, 0);
  EXPECT_EQ(ReadableRows(retokenised("unbe~liev~able")).analyse(false)[Cause::kRetokenised].divergences,
            0);                                                                     // no text
  EXPECT_EQ(ReadableRows(retokenised("un~believ~able")).analyse().divergences, 0);  // equal ids
}

std::vector<Row> thoughts(const std::string& sampled, const std::string& history,
                          const std::string& prompt = "") {
  const std::string answer = "It~ is~ in~ the~ park~";
  return {{{{kUser + "~" + kAssistant + prompt}, {sampled + answer + "<|im_end|>", true}}},
          {{{kUser + "~" + kAssistant + prompt}, {history + answer + kNext}, {"Bye", true}}}};
}

TEST(Sharing, StrippedThinking) {
  const std::string thought = "<think>~\n~Hm~, hm~\n~</think>~\n\n~";
  expect_only(ReadableRows(thoughts(thought, "")).analyse(), Cause::kThinking, 1, 6);
  // The template leaves an empty thought, or opens it in the prompt.
  expect_only(ReadableRows(thoughts(thought, "<think>~\n\n~</think>~\n\n~")).analyse(), Cause::kThinking, 1,
              6);
  expect_only(ReadableRows(thoughts("Hm~\n~</think>~\n\n~", "</think>~\n\n~", "~<think>~\n")).analyse(),
              Cause::kThinking, 1, 6);
  // The tags may be spelled in several tokens.
  expect_only(ReadableRows(thoughts("<~think~>~Hm~</~think~>~\n~", "")).analyse(), Cause::kThinking, 1, 6);
}

// Two samples of one prompt, each with the row of its next turn, whose histories begin with the same words.
TEST(Sharing, HistoriesOfSeveralSamples) {
  const auto rows = [](const std::string& first, const std::string& second) {
    const std::string prompt = kUser + "~" + kAssistant, think = "<think>~Hm";
    return std::vector<Row>{{{{prompt}, {think + "~1~</think>~\n~" + first + "~<|im_end|>", true}}},
                            {{{prompt}, {think + "~2~</think>~\n~" + second + "~<|im_end|>", true}}},
                            {{{prompt}, {"It~ is~ near~" + kNext}, {"Bye", true}}},
                            {{{prompt}, {"It~ is~ very~ far~" + kNext + "~!"}, {"Bye", true}}}};
  };
  // Each history finds its own sample: 4 tokens and 5, of which 2 are shared by the histories. The longest
  // trajectories of both sides do not belong together.
  const SharingReport report = ReadableRows(rows("It~ is~ near", "It~ is~ very~ far")).analyse();
  EXPECT_EQ(report[Cause::kThinking].divergences, 1);
  EXPECT_EQ(report[Cause::kThinking].tokens, 4 + 5 - 2);
  // Controls: only one of them stands in a history; none does.
  EXPECT_EQ(ReadableRows(rows("It~ is~ near", "It~ is~ gone~ away")).analyse()[Cause::kThinking].tokens, 4);
  EXPECT_EQ(ReadableRows(rows("X", "Y~ Z")).analyse()[Cause::kThinking].divergences, 0);
}

TEST(Sharing, ControlsOfStrippedThinking) {
  // Both sides think, but other things.
  EXPECT_EQ(ReadableRows(thoughts("<think>~Hm~</think>~\n~", "<think>~Oh~ my~</think>~\n~"))
                .analyse()[Cause::kThinking]
                .divergences,
            0);
  // Words that begin alike after the thought, a thought that does not end, and other words after it.
  const std::string alike = "I~ am~ very~ very~ sorry~";
  expect_only(ReadableRows({{{{kAssistant}, {"<think>~Hm~</think>~" + alike + " to~ hear~ it", true}}},
                            {{{kAssistant}, {alike + " about~ that~ thing"}}}})
                  .analyse(),
              Cause::kSampling, 1, 0);
  expect_only(ReadableRows(thoughts("<think>~Hm~", "")).analyse(), Cause::kSampling, 1, 0);
  expect_only(ReadableRows({{{{kAssistant}, {"<think>~Hm~</think>~Yes~, I~ do~ so", true}}},
                            {{{kAssistant}, {"No~, I~ am~ not~ so"}}}})
                  .analyse(),
              Cause::kSampling, 1, 0);
}

std::vector<Row> two_texts(const std::string& marker, const std::string& left, const std::string& right,
                           const std::string& after) {
  return {{{{marker + "~Now~" + left + "~" + after + "~<|im_end|>~\n~" + kAssistant}, {"Yes", true}}},
          {{{marker + "~Now~" + right + "~" + after + "~<|im_end|>~\n~" + kAssistant}, {"No", true}}}};
}

const std::string kLong = "a~b~c~d~e~f~g~h~i~j~k~l~m~n~o~p~q~r~s~t";  // 20 tokens
constexpr int64_t kEnd = 5;  // <|im_end|> \n <|im_start|> assistant \n

TEST(Sharing, ChangedSystemPrompt) {
  const std::string marker = "<|im_start|>~system~\n";
  expect_only(ReadableRows(two_texts(marker, " be~ kind", " be~ strict", kLong)).analyse(),
              Cause::kSystemPrompt, 1, 20 + kEnd);
  // Nothing of it is left: what follows the message counts.
  expect_only(ReadableRows(two_texts(marker, " A~ B~ C", " X", "")).analyse(), Cause::kSystemPrompt, 1,
              1 + kEnd);
  // Control: what a user says.
  expect_only(ReadableRows(two_texts("<|im_start|>~user~\n", " A~ B~ C", " X", "!")).analyse(),
              Cause::kOtherInput, 1, 0);
}

TEST(Sharing, Timestamps) {
  for (const char* role : {"system", "user", "tool"}) {
    const std::string marker = std::string("<|im_start|>~") + role + "~\n";
    expect_only(ReadableRows(two_texts(marker, " 2~0~2~4-05~-~31", " 2~0~2~5-01~-~02", kLong)).analyse(),
                Cause::kTimestamp, 1, 20 + kEnd);
    expect_only(ReadableRows(two_texts(marker, " Monday~, 3rd~ May", " Tue~, 4th~ June", "!")).analyse(),
                Cause::kTimestamp, 1, 1 + kEnd);
    // Control: a word.
    EXPECT_EQ(
        ReadableRows(two_texts(marker, " 2024", " never", kLong)).analyse()[Cause::kTimestamp].divergences,
        0);
  }
}

TEST(Sharing, OtherTextAndOtherInput) {
  expect_only(ReadableRows(two_texts(kTool, " call_x", " call_y", kLong)).analyse(), Cause::kOtherText, 1,
              20 + kEnd);
  // Controls: the message ends at once, or the texts are never equal again.
  expect_only(ReadableRows(two_texts(kTool, " call_x", " call_y", "!")).analyse(), Cause::kOtherInput, 1, 0);
  expect_only(ReadableRows({{{{kTool + "~a~b~c"}}}, {{{kTool + "~x~y~z"}}}, {{{"q"}}}}).analyse(),
              Cause::kOtherInput, 2, 0);
  // A user's own words must go on longer.
  expect_only(ReadableRows(two_texts("<|im_start|>~user~\n", " I'd", " I~ would", kLong)).analyse(),
              Cause::kOtherInput, 1, 0);
  expect_only(
      ReadableRows(two_texts("<|im_start|>~user~\n", " I'd", " I~ would", kLong + "~" + kLong)).analyse(),
      Cause::kOtherText, 1, 40 + kEnd);
}

TEST(Sharing, WithoutATokenizerIdsAndLossMasksSpeak) {
  const auto rows = [](bool left, bool right) {
    return ReadableRows({{{{"s"}, {"x", left}, {kLong}}}, {{{"s"}, {"y", right}, {kLong}}}}).analyse(false);
  };
  EXPECT_EQ(rows(true, true)[Cause::kSampling].divergences, 1);
  EXPECT_EQ(rows(true, false)[Cause::kOtherText].tokens, 20);
  EXPECT_EQ(rows(false, false)[Cause::kOtherText].tokens, 20);
}

// A number in a prompt that is otherwise equal loses sharing between groups as it does within one.
TEST(Sharing, GroupsDoNotExcuseANumber) {
  const std::string marker = "<|im_start|>~system~\n";
  const auto grouped = [&](const std::vector<std::string>& groups) {
    std::vector<Row> rows = two_texts(marker, " 1", " 2", kLong);
    rows.push_back(rows[1]);
    for (size_t r = 0; r < rows.size(); ++r) rows[r].group = groups[r];
    rows[1].parts.push_back({"?"});
    rows[2].parts.push_back({"!"});
    const CauseReport found = ReadableRows(rows).analyse()[Cause::kTimestamp];
    return std::pair(found.tokens, found.tokens_between_groups);
  };
  EXPECT_EQ(grouped({"a", "a", "a"}), std::pair(20 + kEnd, int64_t{0}));
  EXPECT_EQ(grouped({"a", "b", "b"}), std::pair(20 + kEnd, 20 + kEnd));
  // One group is on both sides; none is.
  EXPECT_EQ(grouped({"a", "b", "a"}), std::pair(20 + kEnd, int64_t{0}));
  EXPECT_EQ(grouped({"a", "b", "c"}), std::pair(20 + kEnd, 20 + kEnd));
}

TEST(Sharing, RecordedRoutes) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3, 4}, .routed_experts = {0, 0, 0, 0}});
  builder.append({.input_ids = {1, 2, 3, 5}, .routed_experts = {0, 1, 0, 0}});
  const Trajectories trajectories = builder.finish();
  const std::vector<uint64_t> keys = route_keys(trajectories);
  TokenSequences sequences{trajectories.offsets.span(), trajectories.input_ids.span(), keys};
  expect_only(analyse_sharing(trajectories, build_forest(sequences), {}), Cause::kRoutes, 1, 2);
  sequences.merge_keys = {};
  EXPECT_EQ(analyse_sharing(trajectories, build_forest(sequences), {})[Cause::kRoutes].divergences, 0);
}

TEST(Sharing, AgreeingTextsShareAtLeastWhatWasCounted) {
  const std::string marker = "<|im_start|>~system~\n";
  const ReadableRows lost(two_texts(marker, " 1~2", " 3~4", kLong)),
      agreed(two_texts(marker, " 1~2", " 1~2", kLong));
  const int64_t counted = lost.analyse().lost_tokens();
  EXPECT_EQ(lost.forest().tree_tokens() - agreed.forest().tree_tokens(), counted + 2);
}

// The positions that a lost span names hold the same ids on the other branch, from the place on.
TEST(Sharing, LostSpansAreWhereTheTokensAre) {
  const ReadableRows rows(two_texts("<|im_start|>~system~\n", " 1~2", " 3~4", kLong));
  const SharingReport report = rows.analyse();
  ASSERT_EQ(report.lost.size(), 1u);
  const LostSpan& lost = report.lost[0];
  EXPECT_EQ(lost.cause, Cause::kTimestamp);
  EXPECT_EQ(lost.end - lost.begin, report.lost_tokens());
  const auto left = rows.trajectories().row(0), right = rows.trajectories().row(1);
  EXPECT_EQ(lost.row, 1);
  EXPECT_TRUE(std::equal(right.begin() + lost.begin, right.begin() + lost.end, left.begin() + lost.begin));
  EXPECT_NE(right[lost.begin - 1], left[lost.begin - 1]);
  EXPECT_NE(lost.node, lost.other);
  EXPECT_EQ(rows.forest().parent[lost.node], rows.forest().parent[lost.other]);
  // Histories of several samples have a span each.
  const ReadableRows turns(thoughts("<think>~\n~Hm~</think>~\n~", ""));
  const SharingReport stripped = turns.analyse();
  ASSERT_EQ(stripped.lost.size(), 1u);
  EXPECT_EQ(stripped.lost[0].end - stripped.lost[0].begin, stripped.lost_tokens());
  EXPECT_EQ(turns.trajectories().row(1)[stripped.lost[0].begin],
            turns.trajectories().row(0)[stripped.lost[0].begin + 5])
      << "the thought has five tokens";
  // Control: where nothing is lost there is no span.
  EXPECT_TRUE(ReadableRows(retokenised("unbe~lief~able")).analyse().lost.empty());
}

TEST(Sharing, RandomRowsAddUp) {
  static const std::vector<std::string> kVarlen = {
      "<|im_start|>", "<|im_end|>", "assistant", "user", "system", "\n", "<think>",
      "</think>",     "a",          "b",         "ab",   " ",      "1",  "2024"};
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 2);
    std::vector<Row> rows(2 + rng.below(8));
    const std::string group = "g";
    for (size_t r = 0; r < rows.size(); ++r) {
      std::string text = kVarlen[0];
      for (uint64_t k = rng.below(30); k > 0; --k)
        text.append("~").append(kVarlen[rng.below(kVarlen.size())]);
      // Many rows go on from an earlier one.
      if (r > 0 && rng.below(3) > 0) rows[r].parts.push_back(rows[rng.below(r)].parts[0]);
      rows[r].parts.push_back({text, rng.below(2) == 0});
      if (rng.below(2) == 0) rows[r].group = group;
    }
    const ReadableRows built(rows);
    const SharingReport report = built.analyse();
    int64_t divergences = report.not_examined;
    for (int i = 0; i < kNumCauses; ++i) {
      const CauseReport& cause = report.causes[i];
      divergences += cause.divergences;
      EXPECT_LE(cause.places, std::min(cause.divergences, report.places));
      EXPECT_TRUE(is_lost(static_cast<Cause>(i)) || cause.tokens == 0);
    }
    EXPECT_EQ(divergences, report.divergences);
    EXPECT_GE(report.lost_tokens(), 0);
    EXPECT_EQ(report.lost.empty(), report.lost_tokens() == 0);
    for (const LostSpan& lost : report.lost) {
      EXPECT_LT(lost.begin, lost.end);
      EXPECT_LE(built.forest().position[lost.node], lost.begin);
      EXPECT_LE(lost.end, built.trajectories().row_size(lost.row));
    }
  }
}

TEST(Sharing, ExamplesAreTheLargest) {
  std::vector<Row> rows;
  for (int k = 1; k <= 6; ++k) {
    const std::string name = "g" + std::to_string(k);
    std::string after = kLong;
    for (int i = 0; i < k; ++i) after += "~w" + std::to_string(i);
    for (Row row : two_texts("<|im_start|>~tool~\n~" + name, " x", " y", after)) {
      row.group = name;
      rows.push_back(row);
    }
  }
  const SharingReport report = ReadableRows(rows).analyse();
  const CauseReport& found = report[Cause::kOtherText];
  EXPECT_EQ(found.places, 6);
  ASSERT_EQ(found.examples.size(), 3u);
  for (int k = 0; k < 3; ++k) EXPECT_EQ(found.examples[k].common, 20 + 6 - k + kEnd);
  EXPECT_EQ(report[Cause::kOtherGroup].divergences, 5);
}

TEST(Sharing, WorkIsBounded) {
  std::vector<Row> rows;
  for (int k = 0; k < 400; ++k) rows.push_back({{{kTool + "~n" + std::to_string(k) + "~x"}}});
  const ReadableRows star(rows);
  SharingOptions options;
  options.work = 2000;
  const SharingReport report = analyse_sharing(star.trajectories(), star.forest(), options);
  EXPECT_GT(report.not_examined, 300);
  EXPECT_EQ(report.not_examined + report[Cause::kOtherInput].divergences, 399);
  EXPECT_EQ(star.analyse(false).not_examined, 0);
}

TEST(Sharing, DeepTrees) {
  // Row k is the first k tokens of a long one and then its own token: a place after every 40th token.
  constexpr int64_t kDepth = 4000, kStep = 40;
  TrajectoriesBuilder builder;
  std::vector<int32_t> spine(kDepth);
  for (int64_t i = 0; i < kDepth; ++i) spine[i] = static_cast<int32_t>(i % 97);
  builder.append({.input_ids = spine});
  for (int64_t k = kStep; k < kDepth; k += kStep) {
    std::vector<int32_t> row(spine.begin(), spine.begin() + k);
    row.push_back(100);
    builder.append({.input_ids = row});
  }
  const Trajectories trajectories = builder.finish();
  const SharingReport report = analyse_sharing(
      trajectories, build_forest({trajectories.offsets.span(), trajectories.input_ids.span()}), {});
  EXPECT_EQ(report.places, kDepth / kStep - 1);
  EXPECT_EQ(report.divergences, kDepth / kStep - 1);
  EXPECT_EQ(report.lost_tokens(), 0);
}

// For each position: the number of distinct prefixes that reach it, and of rows that do.
std::pair<std::vector<int64_t>, std::vector<int64_t>> naive_depth(
    const std::vector<std::vector<int32_t>>& rows) {
  size_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, row.size());
  std::vector<int64_t> tree(longest), flat(longest);
  for (size_t p = 0; p < longest; ++p) {
    std::set<std::vector<int32_t>> prefixes;
    for (const auto& row : rows) {
      if (row.size() <= p) continue;
      ++flat[p];
      prefixes.insert({row.begin(), row.begin() + static_cast<int64_t>(p) + 1});
    }
    tree[p] = static_cast<int64_t>(prefixes.size());
  }
  return {tree, flat};
}

bool same_by_depth(const std::vector<DepthBucket>& buckets, const std::vector<std::vector<int32_t>>& rows) {
  const auto [tree, flat] = naive_depth(rows);
  int64_t at = 0;
  for (const DepthBucket& bucket : buckets) {
    if (bucket.begin != at || bucket.end <= bucket.begin || bucket.end > std::ssize(tree)) return false;
    int64_t tree_sum = 0, flat_sum = 0;
    for (; at < bucket.end; ++at) {
      tree_sum += tree[at];
      flat_sum += flat[at];
    }
    if (bucket.tree_tokens != tree_sum || bucket.flat_tokens != flat_sum) return false;
  }
  return at == std::ssize(tree);
}

TEST(Sharing, ByDepthEqualsCountingPrefixes) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 1);
    std::vector<std::vector<int32_t>> rows(1 + rng.below(12));
    TrajectoriesBuilder builder;
    for (auto& row : rows) {
      row.resize(1 + rng.below(60));
      for (int32_t& token : row) token = static_cast<int32_t>(rng.below(10) == 0);
      builder.append({.input_ids = row});
    }
    const Trajectories trajectories = builder.finish();
    const Forest forest = build_forest({trajectories.offsets.span(), trajectories.input_ids.span()});
    for (const int64_t most : {1, 3, 20}) {
      const std::vector<DepthBucket> buckets = sharing_by_depth(forest, most);
      EXPECT_LE(std::ssize(buckets), most);
      EXPECT_TRUE(same_by_depth(buckets, rows));
    }
    // Control: one token more.
    rows[0].push_back(2);
    EXPECT_FALSE(same_by_depth(sharing_by_depth(forest, 20), rows));
  }
}

Role role_after(const std::vector<std::string>& pieces, bool* thinking = nullptr) {
  const Vocabulary known = vocabulary_of(pieces);
  ChatState state;
  for (int32_t id = 0; id < known.size(); ++id) advance(known, id, &state);
  if (thinking != nullptr) *thinking = state.thinking;
  return state.role;
}

TEST(ChatRoles, MarkersOfTemplates) {
  EXPECT_EQ(role_after({"<|im_start|>", "system", "\n", "x"}), Role::kSystem);
  EXPECT_EQ(role_after({"<", "|im", "_start|>", "ass", "istant", "\nHi"}), Role::kAssistant)
      << "in several tokens";
  EXPECT_EQ(role_after({"<|start_header_id|>", "ipython", "<|end_header_id|>", "\n\n"}), Role::kTool);
  EXPECT_EQ(role_after({"<start_of_turn>", "model", "\n"}), Role::kAssistant);
  EXPECT_EQ(role_after({"<s>", "[", "INST", "]", " Hi"}), Role::kUser);
  EXPECT_EQ(role_after({"[INST]", " Hi", " [/", "INST]"}), Role::kAssistant);
  EXPECT_EQ(role_after({"<|user|>", "\n", "Hi", "<|assistant|>", "\n"}), Role::kAssistant);
  EXPECT_EQ(role_after({"<|im_start|>", "user", "\n", "<tool_response>", "\n"}), Role::kTool);
  // Controls: no marker, a name that is no role, and a role that stands in a text.
  EXPECT_EQ(role_after({"Hi", " user", "\n", "x>"}), Role::kUnknown);
  EXPECT_EQ(role_after({"<|im_start|>", "captain", "\n"}), Role::kUnknown);
  EXPECT_EQ(role_after({"<|im_start|>", "user", "\n", "system", "\n"}), Role::kUser);
}

TEST(ChatRoles, Thoughts) {
  bool thinking = false;
  role_after({"<|im_start|>", "assistant", "\n", "<think>", "Hm"}, &thinking);
  EXPECT_TRUE(thinking);
  role_after({"<|im_start|>", "assistant", "\n", "<think>", "Hm", "</think>", "Hi"}, &thinking);
  EXPECT_FALSE(thinking);
  role_after({"<think>", "<|im_start|>", "user", "\n", "Hm"}, &thinking);
  EXPECT_FALSE(thinking) << "a message ends it";
}

}  // namespace
}  // namespace espalier::testing
