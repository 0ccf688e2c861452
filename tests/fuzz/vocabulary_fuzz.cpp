// SPDX-License-Identifier: Apache-2.0
// Any bytes as a tokenizer.json: refused with InputError, or every id has a text of valid UTF-8.
#include "espalier/base/check.h"
#include "espalier/data/vocabulary.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;
  const fuzz::InputFile input(data, size);
  try {
    const Vocabulary vocabulary = Vocabulary::read(input.path());
    std::vector<int32_t> ids{-1, INT32_MAX};
    for (int64_t id = 0; id < std::min<int64_t>(vocabulary.size(), 1000); ++id) {
      ids.push_back(static_cast<int32_t>(id));
    }
    const std::string text = vocabulary.text(ids);
    fuzz::require(valid_utf8(text) == text);
  } catch (const InputError&) {
  }
  return 0;
}
