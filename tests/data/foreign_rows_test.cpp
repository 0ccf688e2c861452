// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/foreign_rows.h"

#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/data/reader.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/trajectory_helpers.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::ScratchFolder;
using testing::write_bytes;

class ForeignRows : public ::testing::Test {
 protected:
  std::string fault(const std::string& name, const std::string& text) {
    write_bytes(folder_ / name, text);
    const std::string message = message_of<InputError>([&] { read_trajectories(folder_ / name); });
    const std::string prefix = (folder_ / name).string();
    return message.starts_with(prefix) ? message.substr(prefix.size()) : message;
  }
  std::string file(const std::string& name) { return (folder_ / name).string(); }

  ScratchFolder folder_;
};

TEST_F(ForeignRows, ChatsAreNamedWithTheCommandThatPreparesThem) {
  const std::string before = ":1: field `input_ids`: expected a list of token ids, received ";
  const std::string after =
      ": run `espalier prepare --model DIR " + file("a.jsonl") + " -o rows.jsonl` first";
  const std::pair<std::string, std::string> rows[] = {
      {R"({"messages":[],"id":1})", "chats (`messages`)"},
      {R"({"id":1,"conversations":[]})", "ShareGPT chats (`conversations`)"},
      {R"({"prompt":"a","completion":"b"})", "prompts and completions (`prompt`, `completion`)"},
      {R"({"prompt":"a","response":"b"})", "prompts and completions (`prompt`, `response`)"},
      {R"({"instruction":"a","input":"","output":"b"})", "prompts and completions (`instruction`, `output`)"},
  };
  for (const auto& [row, what] : rows) EXPECT_EQ(fault("a.jsonl", row + "\n"), before + what + after);
}

TEST_F(ForeignRows, TokensUnderOtherNamesAreNamed) {
  EXPECT_EQ(fault("a b.jsonl", R"({"prompt_ids":[1],"output_ids":[2,3]})"),
            ":1: field `input_ids`: expected a list of token ids, received token ids as `prompt_ids` and "
            "`output_ids`: join them, with a loss_mask (docs/data-format.md has the command)");
  EXPECT_EQ(describe_foreign_row(std::vector<std::string_view>{"reward", "tokens"}, "r.jsonl.gz"),
            "token ids as `tokens`: rename the field to input_ids");
}

TEST_F(ForeignRows, RolloutsOfOtherTrainersAreNamedWithTheCommandThatImportsThem) {
  const std::string before = ":1: field `input_ids`: expected a list of token ids, received ";
  const std::string after = ": run `espalier import " + file("a.jsonl") + " -o rows.jsonl` first";
  const std::pair<std::string, std::string> rows[] = {
      {R"({"id":"e","task":{},"traces":[]})", "traces of verifiers or prime-rl (`traces`, `task`)"},
      {R"({"token_ids":[1],"mask":[true]})", "samples of prime-rl (`token_ids`, `mask`)"},
      {R"({"prompts":[1],"responses":[2],"attention_mask":[1,1]})",
       "batches of verl (`responses`, `attention_mask`)"},
      {R"({"prompt_token_ids":[1],"response_ids":[2]})",
       "rollouts of SkyRL (`prompt_token_ids`, `response_ids`)"},
      {R"({"tokens":[1,2],"response_length":1})", "samples of slime (`tokens`, `response_length`)"},
      {R"({"model_input":{},"loss_fn_inputs":{}})", "datums of Tinker (`model_input`, `loss_fn_inputs`)"},
      {R"({"prompt_ids":[1],"completion_ids":[2]})",
       "tokenised data of TRL (`prompt_ids`, `completion_ids`)"},
      {R"({"schema_version":"ATIF-v1.7","steps":[]})", "an ATIF trajectory (`schema_version`, `steps`)"},
  };
  for (const auto& [row, what] : rows) EXPECT_EQ(fault("a.jsonl", row + "\n"), before + what + after);
}

TEST_F(ForeignRows, TextPairsAndOtherFieldsAreNamed) {
  EXPECT_NE(fault("a.jsonl", R"({"text":"abc"})")
                .find("received text (`text`), which has no turns: encode it with a tokenizer"),
            std::string::npos);
  EXPECT_NE(
      fault("a.jsonl", R"({"prompt":"a","chosen":"b","rejected":"c"})").find("a preference pair in text"),
      std::string::npos);
  EXPECT_EQ(fault("a.jsonl", R"({"question":1,"\u001b[2J":2})"),
            ":1: field `input_ids`: expected a list of token ids, received a row without it (its fields: "
            "`question`, `\\x1B[2J`)");
}

TEST_F(ForeignRows, ListsAndObjectsOfSeveralLinesAreNamed) {
  const std::string list =
      ":1: expected a JSON object, received the start of a JSON list: convert it to rows with `espalier "
      "import " +
      file("a.json") + " -o rows.jsonl`";
  EXPECT_EQ(fault("a.json", "[\n{\"input_ids\":[1]}\n]\n"), list);
  EXPECT_EQ(fault("a.json", R"([{"input_ids":[1]},{"input_ids":[2]}])"), list);
  EXPECT_EQ(
      fault("a.json", "{\n  \"input_ids\": [1]\n}\n"),
      ":1: expected a JSON object, received the start of an object of several lines: convert it to rows with "
      "`espalier import " +
          file("a.json") + " -o rows.jsonl`");
  EXPECT_EQ(
      fault("a.json", "[1, 2, 3]\n"),
      ":1: expected a JSON object, received a bare list of token ids: write it as {\"input_ids\": [...]}");
}

TEST_F(ForeignRows, FilesOfOtherFormatsAreToldByTheirFirstBytes) {
  const std::string expected = ": expected JSON lines or packed .safetensors, received ";
  EXPECT_EQ(fault("a.parquet", "PAR1\x15\x04"),
            expected + "a Parquet file; try `espalier import " + file("a.parquet") + " -o rows.jsonl`");
  EXPECT_EQ(
      fault("a.zip", std::string("PK\x03\x04\x14\x00", 6)),
      expected + "a zip archive; write its rows as JSON, one per line (docs/data-format.md has commands)");
  EXPECT_EQ(
      fault("a.pkl", "\x80\x04\x95"),
      expected +
          "a Python pickle; it is never read, because it could run code: pass the data to a converter of "
          "espalier.io, such as from_verl, in the program that created it");
  EXPECT_NE(fault("a.pt", std::string("PK\x03\x04\x14\x00", 6)).find("a converter of espalier.io"),
            std::string::npos);
  EXPECT_EQ(message_of<InputError>([&] { read_trajectories(folder_.path()); }),
            folder_.path().string() +
                ": expected a file of trajectories, received a folder; name its files, such "
                "as '" +
                folder_.path().string() + "/*.jsonl'");
}

TEST_F(ForeignRows, RowsOfOursAreNotTakenForOthers) {
  write_bytes(folder_ / "a.jsonl",
              R"({"input_ids":[1,2],"messages":[],"prompt":"a","completion":"b","text":"c"})");
  EXPECT_EQ(read_trajectories(folder_ / "a.jsonl").num_rows(), 1);
}

}  // namespace
}  // namespace espalier
