// SPDX-License-Identifier: Apache-2.0
// Times, counters and ids in prompts that are otherwise equal: named and counted, whether there are groups or
// not.
#include "espalier/inspect/sharing.h"

#include <gtest/gtest.h>

#include "espalier/base/rng.h"
#include "tests/inspect/sharing_rows.h"

namespace espalier::testing {
namespace {

/// One token per character, as byte-level tokenizers of tests have it, and as digits are in many others.
std::string letters(const std::string& text) {
  std::string pieces;
  for (const char c : text) pieces.append(pieces.empty() ? "" : "~").append(1, c);
  return pieces;
}

/// `size` words of a policy, each a token.
std::string policy(int size, const std::string& name = "w") {
  std::string words;
  for (int i = 0; i < size; ++i)
    words.append(i == 0 ? "" : "~").append(" ").append(name).append(std::to_string(i));
  return words;
}

constexpr int kPolicy = 100;

/// A system prompt that begins with `head`, then a policy, then a task, an answer.
Row row_of(const std::string& head, const std::string& task, const std::string& answer,
           const std::string& group) {
  return {{{"<|im_start|>~system~\n~" + head + "~" + policy(kPolicy) +
            "~<|im_end|>~\n~<|im_start|>~user~\n~" + task + "~<|im_end|>~\n~<|im_start|>~assistant~\n"},
           {answer, true}},
          group};
}

/// Three groups of three answers; heads differ by group, or by row.
std::vector<Row> groups_of(const std::function<std::string(int)>& head, bool by_row, bool with_groups) {
  std::vector<Row> rows;
  for (int g = 0; g < 3; ++g) {
    for (int k = 0; k < 3; ++k) {
      const std::string task = " task~ number~ " + std::string(1, static_cast<char>('x' + g)) + "~" +
                               policy(10, "t" + std::to_string(g));
      rows.push_back(row_of(head(by_row ? 3 * g + k : g), task, " answer~ a" + std::to_string(k),
                            with_groups ? "g" + std::to_string(g) : ""));
    }
  }
  return rows;
}

struct Head {
  const char* name;
  Cause cause;
  std::function<std::string(int)> text;
};

std::vector<Head> volatile_heads() {
  const auto hex = [](int k, int size) {
    Rng rng(17, static_cast<uint64_t>(k));
    std::string digits;
    for (int i = 0; i < size; ++i) digits += "0123456789abcdef"[rng.below(16)];
    return digits;
  };
  return {
      {"time", Cause::kTimestamp,
       [](int k) {
         return "Time:~ ~" + letters("2024-05-15 15:0" + std::to_string(k) + ":3" + std::to_string(9 - k));
       }},
      {"weekday", Cause::kTimestamp,
       [](int k) {
         static constexpr const char* kDays[] = {"Mon", "Tue", "Wed",    "Thu",   "Fri",
                                                 "Sat", "Sun", "Monday", "Friday"};
         return std::string("Today~ is~ ") + kDays[k] + "~.";
       }},
      {"counter", Cause::kTimestamp,
       [](int k) { return "Request~ ~" + letters(std::to_string(1000 + 7 * k)); }},
      {"request id", Cause::kIdentifier,
       [hex](int k) { return "Request~ req_~" + letters("0" + hex(k, 8)); }},
      {"uuid", Cause::kIdentifier,
       [hex](int k) {
         return "Session~:~ ~" + letters("1" + hex(k, 7) + "-" + hex(k + 50, 4) + "-4" + hex(k + 90, 3) +
                                         "-a" + hex(k + 70, 3) + "-" + hex(k + 60, 12));
       }},
      {"time and id", Cause::kTimestamp,
       [hex](int k) {
         return "Time~ ~" + letters("1" + std::to_string(k) + ":3" + std::to_string(k)) +
                "~ zone~ of~ the~ user~;~ id~ ~" + letters("7" + hex(k, 9));
       }},
  };
}

TEST(LostBetweenGroups, VolatileTextIsNamedWithGroupsAndWithout) {
  for (const Head& head : volatile_heads()) {
    for (const bool by_row : {false, true}) {
      SCOPED_TRACE(std::string(head.name) + (by_row ? " by row" : " by group"));
      const SharingReport grouped = ReadableRows(groups_of(head.text, by_row, true)).analyse();
      const SharingReport plain = ReadableRows(groups_of(head.text, by_row, false)).analyse();
      // Heads that are alike for a few digits make more than one place; whatever the cause is called there,
      // the policy is lost for every head but one.
      const int64_t heads = by_row ? 9 : 3;
      EXPECT_GE(grouped.lost_tokens(), (heads - 1) * kPolicy);
      EXPECT_LE(grouped.lost_tokens(), (heads - 1) * (kPolicy + 60));
      EXPECT_GE(grouped[head.cause].tokens, (heads - 1) * kPolicy * 3 / 4);
      EXPECT_EQ(grouped.lost_tokens(), plain.lost_tokens()) << "a group excuses nothing";
      EXPECT_EQ(plain.lost_tokens_between_groups(), 0);
      // Between groups one row of each is lost, and by row the others within their groups.
      EXPECT_GE(grouped.lost_tokens_between_groups(), 2 * kPolicy);
      EXPECT_LE(grouped.lost_tokens_between_groups(), 2 * (kPolicy + 60));
      EXPECT_EQ(grouped[Cause::kOtherGroup].divergences, 0);
      ASSERT_FALSE(grouped[head.cause].values.empty());
      ASSERT_FALSE(grouped[head.cause].examples.empty());
    }
    // Control: with equal heads nothing is lost. The tasks still differ.
    const SharingReport equal =
        ReadableRows(groups_of([&](int) { return head.text(0); }, false, true)).analyse();
    EXPECT_EQ(equal.lost_tokens(), 0) << head.name;
    EXPECT_EQ(equal[Cause::kOtherGroup].divergences, 2) << head.name;
  }
}

TEST(LostBetweenGroups, ValuesAreWholeWords) {
  const auto heads = volatile_heads();
  const SharingReport times = ReadableRows(groups_of(heads[0].text, false, true)).analyse();
  ASSERT_FALSE(times[Cause::kTimestamp].values.empty());
  EXPECT_EQ(times[Cause::kTimestamp].values.front(), "15:00:39");
  EXPECT_TRUE(times[Cause::kTimestamp].examples.front().between_groups);
  const SharingReport ids = ReadableRows(groups_of(heads[3].text, false, true)).analyse();
  for (const std::string& value : ids[Cause::kIdentifier].values) {
    EXPECT_TRUE(value.starts_with("req_0")) << value;
    EXPECT_EQ(value.size(), 13u) << value;
  }
}

TEST(LostBetweenGroups, SeveralDetailsInOneMessageAreOneLoss) {
  const auto rows = [](const std::string& between) {
    return ReadableRows({row_of("Time~ 10:31~ zone~ of~ the~ user~;~ " + between + "~ 17~ of~ the~ day~;",
                                " a~ b", " c", "g"),
                         row_of("Time~ 10:32~ zone~ of~ the~ user~;~ " + between + "~ 18~ of~ the~ day~;",
                                " a~ b", " d", "h")})
        .analyse();
  };
  // Six tokens, the number, four tokens, and the policy with what follows it.
  EXPECT_EQ(rows("id")[Cause::kTimestamp].tokens, 6 + 4 + kPolicy + 12);
  // Control: a word differs there, so the texts are different from there on.
  const SharingReport other =
      ReadableRows({row_of("Time~ 10:31~ zone~ of~ the~ user~;~ red~ to~ end", " a", " c", "g"),
                    row_of("Time~ 10:32~ zone~ of~ the~ user~;~ blue~ sky", " a", " d", "h")})
          .analyse();
  EXPECT_LT(other.lost_tokens(), 10);
}

TEST(LostBetweenGroups, OtherTasksAreNoLoss) {
  const std::string marker = "<|im_start|>~user~\n~What~ is~";
  const auto questions = [&](const std::string& left, const std::string& right, int after) {
    const auto row = [&](const std::string& question, const std::string& group) {
      return Row{
          {{marker + question + "~?~" + policy(after, "i") + "~<|im_end|>~\n~<|im_start|>~assistant~\n"},
           {" so", true}},
          group};
    };
    return ReadableRows({row(left, "g"), row(right, "h")}).analyse();
  };
  // Sums followed by a short instruction, in groups. The numbers are the tasks, not details of one text.
  const SharingReport sums = questions(" 37~ +~ 45", " 12~ +~ 81", 12);
  EXPECT_EQ(sums[Cause::kOtherGroup].divergences, 1);
  EXPECT_EQ(sums.lost_tokens(), 0);
  // Control: an instruction this long should come before the question, so it counts as lost.
  const SharingReport moved = questions(" 37~ +~ 45", " 12~ +~ 81", 60);
  EXPECT_EQ(moved[Cause::kTimestamp].tokens_between_groups, 1 + 60 + 5 + 1);
  EXPECT_EQ(moved[Cause::kOtherGroup].divergences, 0);
}

TEST(LostBetweenGroups, WithoutATokenizerEqualIdsSpeak) {
  const auto rows = [](int after) {
    return ReadableRows({row_of("Now~ 1", " a~ b", " c", "g"),
                         row_of("Now~ 2", " a~ b", " d", "h"),
                         {{{"q~ z~" + policy(after, "q")}}, "g"},
                         {{{"q~ y~" + policy(after, "q")}}, "h"}})
        .analyse(false);
  };
  EXPECT_EQ(rows(40)[Cause::kOtherText].tokens_between_groups, kPolicy + 12 + 40);
  EXPECT_EQ(rows(20)[Cause::kOtherText].tokens_between_groups, kPolicy + 12)
      << "too few to tell it from a task";
}

// Families of prompts that alternate, each prompt with its own number. A prompt is compared with those of its
// family.
TEST(LostBetweenGroups, PromptsFindTheirFamilyAmongMany) {
  std::vector<Row> rows;
  constexpr int kFamilies = 10, kEach = 20;
  for (int k = 0; k < kFamilies * kEach; ++k) {
    const std::string family = "f" + std::to_string(k % kFamilies) + "_";
    rows.push_back(
        {{{"<|im_start|>~system~\n~Call~ ~n" + std::to_string(k) + "~ " + policy(80, family)}, {" so", true}},
         "g" + std::to_string(k)});
  }
  const SharingReport report = ReadableRows(rows).analyse(false);
  EXPECT_EQ(report.lost_tokens_between_groups(), kFamilies * (kEach - 1) * 81);
  EXPECT_EQ(report[Cause::kOtherGroup].divergences, kFamilies - 1);
}

TEST(AlikeIndex, FindsTheFirstOfEachKind) {
  Rng rng(3, 1);
  const auto random = [&](int size) {
    std::vector<int32_t> tokens(size);
    for (int32_t& token : tokens) token = static_cast<int32_t>(rng.below(50'000));
    return tokens;
  };
  AlikeIndex index;
  std::vector<std::vector<int32_t>> kinds;
  for (int kind = 0; kind < 20; ++kind) {
    kinds.push_back(random(300));
    EXPECT_TRUE(index.find(kinds.back()).empty());
    index.add(kinds.back(), kind);
  }
  int found = 0;
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int32_t> tokens = kinds[trial % 20];
    const std::vector<int32_t> detail = random(12);
    std::copy(detail.begin(), detail.end(), tokens.begin() + trial % 40);
    const std::vector<int64_t> alike = index.find(tokens);
    EXPECT_LE(alike.size(), 1u);
    found += alike == std::vector<int64_t>{trial % 20};
  }
  EXPECT_EQ(found, 200);
  EXPECT_TRUE(index.find({}).empty());
  EXPECT_TRUE(index.find(std::vector<int32_t>{1, 2, 3}).empty());
}

}  // namespace
}  // namespace espalier::testing
