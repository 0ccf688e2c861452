// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/byte_tokenizer.h"

#include <array>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/utf8.h"

namespace espalier {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kNumBytes = 256;
constexpr auto kSpecialTokens = std::to_array<const char*>({"<|endoftext|>", "<|im_start|>", "<|im_end|>"});
constexpr const char* kPadToken = kSpecialTokens[0];
constexpr const char* kEndToken = kSpecialTokens[2];

constexpr std::string_view kChatTemplate =
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

Json added_token(const char* content) {
  return {{"content", content}, {"single_word", false}, {"lstrip", false},
          {"rstrip", false},    {"normalized", false},  {"special", true}};
}

Json tokenizer_json() {
  Json vocabulary = Json::object();
  const auto characters = byte_characters();
  for (int byte = 0; byte < kNumBytes; ++byte) vocabulary[characters[byte]] = byte;
  Json added = Json::array();
  for (size_t i = 0; i < kSpecialTokens.size(); ++i) {
    Json token = {{"id", kNumBytes + static_cast<int64_t>(i)}};
    token.update(added_token(kSpecialTokens[i]));
    added.push_back(std::move(token));
  }
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", std::move(added)},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", std::move(vocabulary)},
            {"merges", Json::array()}}}};
}

Json tokenizer_config() {
  Json decoder = Json::object();
  for (size_t i = 0; i < kSpecialTokens.size(); ++i) {
    decoder[std::to_string(kNumBytes + static_cast<int64_t>(i))] = added_token(kSpecialTokens[i]);
  }
  return {{"tokenizer_class", "PreTrainedTokenizerFast"},
          {"added_tokens_decoder", std::move(decoder)},
          {"bos_token", nullptr},
          {"eos_token", kEndToken},
          {"pad_token", kPadToken},
          {"unk_token", nullptr},
          {"clean_up_tokenization_spaces", false},
          // Transformers before 4.43 does not read chat_template.jinja.
          {"chat_template", kChatTemplate}};
}

}  // namespace

void write_byte_tokenizer(const std::filesystem::path& folder, int64_t vocab_size) {
  constexpr int64_t kNumTokens = kNumBytes + static_cast<int64_t>(kSpecialTokens.size());
  ESPALIER_CHECK(
      vocab_size >= kNumTokens,
      "vocab_size: the byte-level tokenizer expected at least {} (256 bytes and {} special tokens), "
      "received {}",
      kNumTokens, kSpecialTokens.size(), vocab_size);
  write_text(folder / "tokenizer.json", tokenizer_json().dump(1) + "\n");
  write_text(folder / "tokenizer_config.json", tokenizer_config().dump(2) + "\n");
  write_text(folder / "chat_template.jinja", kChatTemplate);
}

}  // namespace espalier
