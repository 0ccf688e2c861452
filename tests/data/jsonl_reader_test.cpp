// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/reader.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/trajectory_helpers.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::differences;
using testing::message_of;
using testing::ScratchFolder;
using testing::test_seed;
using testing::values_of;
using testing::write_bytes;

class JsonlReader : public ::testing::Test {
 protected:
  Trajectories read(const std::string& text, ReadOptions options = {}, ReadReport* report = nullptr) {
    write_bytes(folder_ / "rows.jsonl", text);
    return read_trajectories(folder_ / "rows.jsonl", options, report);
  }

  ScratchFolder folder_;
};

TEST_F(JsonlReader, ReadsEveryField) {
  const Trajectories t = read(
      R"({"input_ids":[1,2,3],"loss_mask":[0,true,false],"logprobs":[null,-0.5,-1],"ref_logprobs":[0,-2,1e-9],)"
      R"("advantage":-2,"reward":3,"group_id":12,"trajectory_id":"a\u00e9","pair_id":18446744073709551615,)"
      R"("chosen":true,"routed_experts":[[[1,2],[3,4]],[[5,6],[7,8]],[[9,10],[11,12]]],"meta":{"x":[null]}})"
      "\n"
      R"({"input_ids":[4],"loss_weights":[0.25],"advantages":[7],"reward":null,"chosen":null})"
      "\n");
  ASSERT_EQ(t.num_rows(), 2);
  EXPECT_EQ(values_of(t.offsets), (std::vector<int64_t>{0, 3, 4}));
  EXPECT_EQ(values_of(t.input_ids), (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(values_of(t.loss_weights), (std::vector<double>{0, 1, 0, 0.25}));
  EXPECT_EQ(values_of(t.logprobs.values), (std::vector<double>{0, -0.5, -1, 0}));
  EXPECT_FALSE(t.logprobs.has(1));
  EXPECT_EQ(values_of(t.ref_logprobs.values), (std::vector<double>{0, -2, 1e-9, 0}));
  EXPECT_EQ(values_of(t.advantages.values), (std::vector<double>{-2, -2, -2, 7}));
  EXPECT_EQ(t.reward.values[0], 3);
  EXPECT_FALSE(t.reward.has(1));
  EXPECT_EQ(t.group_id, (std::vector<std::string>{"12", ""}));
  EXPECT_EQ(t.trajectory_id[0], "aé");
  EXPECT_EQ(t.pair_id[0], "18446744073709551615");
  EXPECT_TRUE(t.chosen.has(0) && t.chosen.values[0] == 1);
  EXPECT_FALSE(t.chosen.has(1));
  EXPECT_EQ(t.routes_per_token, 4);
  EXPECT_EQ(t.routed_experts[11], 12);
  EXPECT_EQ(t.routed_experts[12], -1);
}

TEST_F(JsonlReader, ReadsRewardsOfTurnsAndTokensOfAReference) {
  const Trajectories t =
      read(R"({"input_ids":[1,2,3,4],"loss_mask":[1,1,0,1],"turn_rewards":[0.5,-2],)"
           R"("ref_topk_ids":[[],[5,6],null,[7,5]],"ref_topk_logprobs":[null,[-1,-2],[],[-0.5,-3]]})"
           "\n"
           R"({"input_ids":[4],"reward":1,"ref_topk_ids":[[]],"ref_topk_logprobs":[[]]})"
           "\n"
           R"({"input_ids":[4,5],"turn_rewards":[3]})");
  EXPECT_EQ(values_of(t.turn_rewards), (std::vector<double>{0.5, -2, 3}));
  EXPECT_EQ(values_of(t.turn_reward_offsets), (std::vector<int64_t>{0, 2, 2, 3}));
  EXPECT_TRUE(t.has_turn_rewards(0) && !t.has_turn_rewards(1) && t.has_turn_rewards(2));
  EXPECT_EQ(turn_starts(t, 0), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(t.ref_topk, 2);
  EXPECT_EQ(values_of(t.ref_topk_ids),
            (std::vector<int32_t>{-1, -1, 5, 6, -1, -1, 7, 5, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(values_of(t.ref_topk_logprobs),
            (std::vector<double>{0, 0, -1, -2, 0, 0, -0.5, -3, 0, 0, 0, 0, 0, 0}));
}

TEST_F(JsonlReader, LogprobsMayBeNullOnTokensWithoutLoss) {
  const Trajectories t = read(
      R"({"input_ids":[1,2,3],"loss_mask":[0,0,1],"logprobs":[null,null,-1],"ref_logprobs":[null,null,-2]})"
      "\n"
      R"({"input_ids":[1,2,3],"logprobs":[0,-0.5,null],"loss_weights":[0,0.5,0],"ref_logprobs":[0,-1,-1]})");
  EXPECT_EQ(values_of(t.logprobs.values), (std::vector<double>{0, 0, -1, 0, -0.5, 0}));
  EXPECT_EQ(values_of(t.ref_logprobs.values), (std::vector<double>{0, 0, -2, 0, -1, -1}));
}

TEST_F(JsonlReader, AcceptsLineEndsOfAllKinds) {
  const std::string row = R"({"input_ids":[5]})";
  for (const std::string& text : {row, row + "\n", row + "\r\n", "\xEF\xBB\xBF" + row,
                                  "\n\n  \t\n" + row + "\n\r\n", " " + row + " "}) {
    EXPECT_EQ(read(text).num_rows(), 1) << text;
  }
  EXPECT_EQ(read(row + "\r\n\r\n" + row).num_rows(), 2);
}

struct Fault {
  std::string line;
  std::string message;  // all of it after "FILE:LINE: ", or a part when it ends in "..."
};

std::vector<Fault> faults() {
  return {
      // Not JSON, or not an object.
      {R"({"input_ids":[1,2)", "expected a JSON object, received `{\"input_ids\":[1,2` (not JSON: ..."},
      {R"({"input_ids":[1,2],})", "expected a JSON object, ..."},
      {R"({"input_ids":[1]} {"input_ids":[1]})", "expected a JSON object, ..."},
      {R"({"input_ids":[1],"group_id":"abc)", "expected a JSON object, ..."},
      {"{\"input_ids\":[1],\"group_id\":\"\xff\xfe\"}", "expected a JSON object, ..."},
      {"{\"input_ids\":[1],\"other\":\"\xC3\"}", "expected a JSON object, ..."},
      {R"({"input_ids":[1],"x":)" + std::string(5000, '[') + std::string(5000, ']') + "}",
       "expected a JSON object, ..."},
      {std::string(100'000, '['), "expected a JSON object, ..."},
      {R"(["a",2])", "expected a JSON object, received a list of 2"},
      {"7", "expected a JSON object, received 7"},
      {"null", "expected a JSON object, received null"},
      {"\"text\"", "expected a JSON object, received \"text\""},
      {std::string("\0\0", 2), "expected a JSON object, ..."},
      // Bare numbers that Python writes.
      {R"({"input_ids":[1,2],"logprobs":[null,NaN]})",
       "field `logprobs`: expected finite numbers (JSON has no NaN and no Infinity), received NaN"},
      {R"({"input_ids":[1,2],"note":"NaN\"","meta":{"k":1},"advantage":-Infinity})",
       "field `advantage`: expected finite numbers (JSON has no NaN and no Infinity), received -Infinity"},
      {R"({"input_ids":[1],"reward":1e999})", "..."},
      // input_ids.
      {"{}", "field `input_ids`: expected a list of token ids, received an object without fields"},
      {R"({"logprobs":[0]})",
       "field `input_ids`: expected a list of token ids, received a row without it (its fields: `logprobs`)"},
      {R"({"input_ids":null})", "field `input_ids`: expected a list of token ids, received null"},
      {R"({"input_ids":[]})", "field `input_ids`: expected at least one token, received none"},
      {R"({"input_ids":5})", "field `input_ids`: expected a list of token ids, received 5"},
      {R"({"input_ids":"1,2"})", "field `input_ids`: expected a list of token ids, received \"1,2\""},
      {R"({"input_ids":[[1]]})", "field `input_ids`: expected integers, received a list of 1 at index 0"},
      {R"({"input_ids":[1,1.0]})", "field `input_ids`: expected integers, received 1.0 at index 1"},
      {R"({"input_ids":[1.5]})", "field `input_ids`: expected integers, received 1.5 at index 0"},
      {R"({"input_ids":[1,null]})", "field `input_ids`: expected integers, received null at index 1"},
      {R"({"input_ids":[true]})", "field `input_ids`: expected integers, received true at index 0"},
      {R"({"input_ids":[1,100]})",
       "field `input_ids`: expected ids in [0, 100) (vocab_size is 100), received 100 at index 1"},
      {R"({"input_ids":[-1]})",
       "field `input_ids`: expected ids in [0, 100) (vocab_size is 100), received -1 at index 0"},
      {R"({"input_ids":[2147483648]})",
       "field `input_ids`: expected ids in [0, 100) (vocab_size is 100), received 2147483648 at index 0"},
      {R"({"input_ids":[18446744073709551615]})",
       "field `input_ids`: expected ids in [0, 100) (vocab_size is 100), received 18446744073709551615 at "
       "index 0"},
      {R"({"input_ids":[1],"input_ids":[2]})",
       "field `input_ids`: expected one value, received the field twice"},
      {R"({"input_ids":[1],"reward":null,"reward":2})",
       "field `reward`: expected one value, received the field twice"},
      // Weights.
      {R"({"input_ids":[1,2],"loss_mask":[1]})",
       "field `loss_mask`: expected 2 entries (one for each of input_ids), received 1"},
      {R"({"input_ids":[1,2],"loss_mask":[]})",
       "field `loss_mask`: expected 2 entries (one for each of input_ids), received 0"},
      {R"({"input_ids":[1,2],"loss_mask":[0,2]})",
       "field `loss_mask`: expected 0, 1, true or false, received 2 at index 1"},
      {R"({"input_ids":[1,2],"loss_mask":[0,1.0]})",
       "field `loss_mask`: expected 0, 1, true or false, received 1.0 at index 1"},
      {R"({"input_ids":[1,2],"loss_mask":[0,null]})", "field `loss_mask`: ..."},
      {R"({"input_ids":[1,2],"loss_weights":[0,-1]})",
       "field `loss_weights`: expected finite numbers >= 0, received -1 at index 1"},
      {R"({"input_ids":[1,2],"loss_weights":[0,"1"]})",
       "field `loss_weights`: expected numbers, received \"1\" at index 1"},
      {R"({"input_ids":[1],"loss_mask":[1],"loss_weights":[1]})",
       "field `loss_mask`: expected either loss_mask or loss_weights, received both"},
      // Log-probabilities, advantages, reward.
      {R"({"input_ids":[1,2],"logprobs":[-1]})",
       "field `logprobs`: expected 2 entries (one for each of input_ids), received 1"},
      {R"({"input_ids":[1,2],"logprobs":[0,null]})",
       "field `logprobs`: expected numbers (null only for tokens without loss), received null at index 1"},
      {R"({"input_ids":[1,2,3],"loss_mask":[0,0,1],"logprobs":[null,null,null]})",
       "field `logprobs`: expected numbers (null only for tokens without loss), received null at index 2"},
      {R"({"input_ids":[1,2,3],"ref_logprobs":[null,null,-1],"loss_weights":[0,0.5,0]})",
       "field `ref_logprobs`: expected numbers (null only for tokens without loss), received null at index "
       "1"},
      {R"({"input_ids":[1,2],"logprobs":[-0.5,-1]})",
       "field `logprobs`: expected null or 0 for the first token, received -0.5"},
      {R"({"input_ids":[1,2],"ref_logprobs":[0,0.25]})",
       "field `ref_logprobs`: expected finite log-probabilities <= 0, received 0.25 at index 1"},
      {R"({"input_ids":[1,2],"advantages":[1]})",
       "field `advantages`: expected 2 entries (one for each of input_ids), received 1"},
      {R"({"input_ids":[1,2],"advantages":1})", "field `advantages`: expected a list of numbers, received 1"},
      {R"({"input_ids":[1,2],"advantage":[1,2]})",
       "field `advantage`: expected a number, received a list of 2"},
      {R"({"input_ids":[1,2],"advantage":1,"advantages":[1,2]})",
       "field `advantages`: expected either advantages or advantage, received both"},
      {R"({"input_ids":[1],"reward":"high"})", "field `reward`: expected a number, received \"high\""},
      {R"({"input_ids":[1],"temperature":-1})", "field `temperature`: expected a number >= 0, received -1"},
      {R"({"input_ids":[1],"top_k":0.5})",
       "field `top_k`: expected a whole number >= 0, or -1 (all), received 0.5"},
      {R"({"input_ids":[1],"top_p":0})",
       "field `top_p`: expected a number above 0 and at most 1, received 0"},
      {R"({"input_ids":[1],"reward":true})", "field `reward`: expected a number, received true"},
      {R"({"input_ids":[1,2,3],"loss_mask":[0,1,1],"turn_rewards":[1,2]})",
       "field `turn_rewards`: expected 1 entries (one per turn, a range of tokens with loss), "
       "received "
       "2"},
      {R"({"input_ids":[1,2],"turn_rewards":[null]})",
       "field `turn_rewards`: expected numbers, received null at index 0"},
      {R"({"input_ids":[1,2],"turn_rewards":2})",
       "field `turn_rewards`: expected a list of numbers, received 2"},
      {R"({"input_ids":[1,2],"turn_rewards":[2],"reward":2})",
       "field `turn_rewards`: expected either turn_rewards or reward, received both"},
      // Tokens of a reference.
      {R"({"input_ids":[1,2],"ref_topk_ids":[[],[3]]})",
       "field `ref_topk_ids`: expected ref_topk_ids and ref_topk_logprobs together, received no "
       "ref_topk_logprobs"},
      {R"({"input_ids":[1,2],"ref_topk_ids":[[3]],"ref_topk_logprobs":[[-1]]})",
       "field `ref_topk_ids`: expected 2 entries (one for each of input_ids), received 1"},
      {R"({"input_ids":[1,2],"ref_topk_ids":[[],[3,100]],"ref_topk_logprobs":[[],[-1,-2]]})",
       "field `ref_topk_ids`: expected 2 ids in [0, 100) (vocab_size is 100), received 100 for token 1"},
      {R"({"input_ids":[1,2],"ref_topk_ids":[[],[3,-1]],"ref_topk_logprobs":[[],[-1,-2]]})",
       "field `ref_topk_ids`: expected token ids, received -1 for token 1"},
      {R"({"input_ids":[1,2],"ref_topk_ids":[[4],[3]],"ref_topk_logprobs":[[-1],[-1]]})",
       "field `ref_topk_ids`: expected none for the first token, received 4"},
      {R"({"input_ids":[1,2,3],"ref_topk_ids":[[],[3],[3,4]],"ref_topk_logprobs":[[],[-1],[-1,-2]]})",
       "field `ref_topk_ids`: expected 1 for every token that has any, received 2 for token 2"},
      {R"({"input_ids":[1,2,3],"ref_topk_ids":[[],[3],[4]],"ref_topk_logprobs":[[],[-1],[]]})",
       "field `ref_topk_logprobs`: expected 1 for token 2, as many as ref_topk_ids, received 0"},
      {R"({"input_ids":[1,2],"ref_topk_ids":[[],[3,3]],"ref_topk_logprobs":[[],[-1,-2]]})",
       "field `ref_topk_ids`: expected different ids for each token, received 3 twice for token 1"},
      {R"({"input_ids":[1,2],"ref_topk_ids":[[],[3]],"ref_topk_logprobs":[[],[0.5]]})",
       "field `ref_topk_logprobs`: expected finite log-probabilities <= 0, received 0.5 at index 1"},
      {R"({"input_ids":[1,2],"ref_topk_ids":[[],3],"ref_topk_logprobs":[[],[-1]]})",
       "field `ref_topk_ids`: expected a list for every token, received 3"},
      // Names.
      {R"({"input_ids":[1],"group_id":1.5})",
       "field `group_id`: expected a string or an integer, received 1.5"},
      {R"({"input_ids":[1],"pair_id":{}})",
       "field `pair_id`: expected a string or an integer, received an object"},
      {R"({"input_ids":[1],"chosen":1})", "field `chosen`: expected true or false, received 1"},
      // Routes.
      {R"({"input_ids":[1,2],"routed_experts":[[1]]})",
       "field `routed_experts`: expected 2 entries (one for each of input_ids), received 1"},
      {R"({"input_ids":[1],"routed_experts":[]})", "field `routed_experts`: expected 1 entries ..."},
      {R"({"input_ids":[1,2],"routed_experts":[[1],[1,2]]})",
       "field `routed_experts`: expected 1 experts for every token, received 2 experts at token 1"},
      {R"({"input_ids":[1,2],"routed_experts":[[[1],[2]],[1,2]]})",
       "field `routed_experts`: expected 2 layers ..."},
      {R"({"input_ids":[1],"routed_experts":[[[1,2],[3]]]})", "field `routed_experts`: ..."},
      {R"({"input_ids":[1],"routed_experts":[[[1,2],[3],[4,5,6]]]})",
       "field `routed_experts`: expected the same number of experts in every layer, ..."},
      {R"({"input_ids":[1],"routed_experts":[[]]})",
       "field `routed_experts`: expected at least one expert for every token, received none at token 0"},
      {R"({"input_ids":[1],"routed_experts":[[[]]]})",
       "field `routed_experts`: expected at least one expert ..."},
      {R"({"input_ids":[1],"routed_experts":[[-1]]})",
       "field `routed_experts`: expected expert ids (integers >= 0), received -1"},
      {R"({"input_ids":[1],"routed_experts":[[[1,[2]]]]})",
       "field `routed_experts`: expected expert ids ..."},
      {R"({"input_ids":[1],"routed_experts":[[1,[2]]]})", "field `routed_experts`: expected expert ids ..."},
      {R"({"input_ids":[1],"routed_experts":[[[1],2]]})", "field `routed_experts`: ..."},
      {R"({"input_ids":[1],"routed_experts":[null]})", "field `routed_experts`: ..."},
  };
}

void expect_message(const std::string& message, const std::string& prefix, const std::string& expected) {
  const std::string whole = prefix + expected;
  if (whole.ends_with("...")) {
    EXPECT_TRUE(message.starts_with(whole.substr(0, whole.size() - 3))) << message << "\nexpected " << whole;
  } else {
    EXPECT_EQ(message, whole);
  }
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_LT(message.size(), 400u);
}

TEST_F(JsonlReader, NamesFileLineAndFieldOfEveryFault) {
  const std::string prefix = (folder_ / "rows.jsonl").string() + ":2: ";
  ReadOptions options;
  options.vocab_size = 100;
  for (const Fault& fault : faults()) {
    SCOPED_TRACE(fault.line.substr(0, 200));
    const std::string text = "{\"input_ids\":[1]}\n" + fault.line + "\n{\"input_ids\":[2]}\n";
    expect_message(message_of<InputError>([&] { read(text, options); }), prefix, fault.message);
    // The last line of a file, without a line ending.
    EXPECT_THROW(read("{\"input_ids\":[1]}\n" + fault.line, options), InputError);
  }
}

TEST_F(JsonlReader, SkippedRowsLeaveNothing) {
  ReadOptions options;
  options.vocab_size = 100;
  options.skip_bad_rows = true;
  std::string mixed, clean;
  int number = 0;
  for (const Fault& fault : faults()) {
    const std::string good = fmt::format(
        R"({{"input_ids":[{0},1],"loss_mask":[0,1],"logprobs":[0,-{0}],"advantage":{0},"reward":{0},)"
        R"("group_id":{0},"chosen":false,"routed_experts":[[[1],[2]],[[3],[{0}]]]}})"
        "\n",
        number++);
    mixed += good + fault.line + "\n";
    clean += good;
  }
  ReadReport report;
  const Trajectories kept = read(mixed, options, &report);
  EXPECT_EQ(report.rows_read, number);
  EXPECT_EQ(report.rows_skipped, number);
  ASSERT_EQ(report.first_errors.size(), 10u);
  EXPECT_TRUE(report.first_errors[1].find("rows.jsonl:4: ") != std::string::npos) << report.first_errors[1];
  EXPECT_EQ(differences(kept, read(clean)), "");
}

TEST_F(JsonlReader, RouteShapesAgreeAcrossRowsThatAreKept) {
  const std::string nested = R"({"input_ids":[1],"routed_experts":[[[1,2],[3,4]]]})"
                             "\n";
  const std::string flat = R"({"input_ids":[1],"routed_experts":[[1,2,3,4]]})"
                           "\n";
  const std::string message = message_of<InputError>([&] { read(nested + nested + flat); });
  EXPECT_NE(message.find(":3: field `routed_experts`: expected 2 layers of 2 experts, as in earlier rows, "
                         "received 4 experts"),
            std::string::npos)
      << message;
  // A row that is refused for another reason does not set the shape.
  ReadOptions options;
  options.skip_bad_rows = true;
  const std::string bad = R"({"input_ids":[1],"reward":"x","routed_experts":[[[1,2],[3,4]]]})"
                          "\n";
  EXPECT_EQ(read(bad + flat, options).num_rows(), 1);
  const std::string late_bad = R"({"routed_experts":[[[1,2],[3,4]]],"input_ids":[-1]})"
                               "\n";
  EXPECT_EQ(read(late_bad + flat, options).num_rows(), 1);
}

TEST_F(JsonlReader, RefusesFilesWithoutAGoodRow) {
  for (const std::string text : {"", "\n", "\xEF\xBB\xBF", "  \r\n\n"}) {
    const std::string message = message_of<InputError>([&] { read(text); });
    EXPECT_NE(message.find("rows.jsonl: expected at least one row, received none"), std::string::npos)
        << message;
  }
  ReadOptions options;
  options.skip_bad_rows = true;
  ReadReport report;
  const std::string message = message_of<InputError>([&] { read("{}\n[]\n", options, &report); });
  EXPECT_NE(message.find("expected at least one valid row, received 2 invalid ones, the first: "),
            std::string::npos)
      << message;
  EXPECT_EQ(report.rows_skipped, 2);
}

TEST_F(JsonlReader, LimitsLines) {
  ReadOptions options;
  options.max_line_bytes = 100;
  const std::string good = R"({"input_ids":[1]})"
                           "\n";
  const std::string giant = R"({"input_ids":[1],"x":")" + std::string(3'000'000, 'x') + "\"}\n";
  const std::string message = message_of<InputError>([&] { read(good + giant, options); });
  EXPECT_NE(message.find(":2: expected a line of at most 100 bytes, received a longer one"),
            std::string::npos);
  options.skip_bad_rows = true;
  ReadReport report;
  EXPECT_EQ(read(good + giant + good, options, &report).num_rows(), 2);
  EXPECT_EQ(report.rows_skipped, 1);
  EXPECT_EQ(read(good + giant + good).num_rows(), 3);
}

TEST_F(JsonlReader, ReportsProgress) {
  std::string text;
  while (text.size() < 4'000'000)
    text += R"({"input_ids":[1,2,3,4,5,6,7,8,9,10],"x":"some more text"})"
            "\n";
  std::vector<double> fractions;
  ReadOptions options;
  options.progress = [&](double fraction) { fractions.push_back(fraction); };
  read(text, options);
  ASSERT_GE(fractions.size(), 3u);
  EXPECT_TRUE(std::is_sorted(fractions.begin(), fractions.end()));
  EXPECT_LT(fractions.front(), 0.5);
  EXPECT_EQ(fractions.back(), 1.0);
}

TEST_F(JsonlReader, NoCutOrFlipOfALineCrashesIt) {
  const std::string good =
      R"({"input_ids":[1,2],"loss_mask":[0,1],"logprobs":[null,-0.5],"advantage":1e3,"group_id":"g\u00e9",)"
      R"("chosen":true,"routed_experts":[[[1],[2]],[[3],[4]]]})";
  for (size_t size = 1; size < good.size(); ++size) {
    EXPECT_THROW(read(good.substr(0, size)), InputError) << "cut to " << size;
  }
  const uint64_t seed = 77;
  SCOPED_TRACE(fmt::format("seed {}", seed));
  Rng rng(test_seed(seed));
  int refused = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    std::string bad = good;
    for (int64_t flips = rng.between(1, 3); flips > 0; --flips)
      bad[rng.below(static_cast<int64_t>(bad.size()))] = static_cast<char>(rng.below(256));
    try {
      const Trajectories t = read(bad);
      // What is accepted keeps the rules.
      for (int64_t r = 0; r < t.num_rows(); ++r) check_row(copy_row(t, r));
    } catch (const InputError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 300);
  EXPECT_LT(refused, 1000);
}

}  // namespace
}  // namespace espalier
