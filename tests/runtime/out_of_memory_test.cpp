// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/out_of_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <new>

#include "espalier/runtime/progress.h"

namespace espalier::testing {
namespace {

template <typename Action>
std::string message_after(Action&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return text_of(error);
  }
  return "nothing was thrown";
}

TEST(OutOfMemory, NamesTheWorkAndWhatToDo) {
  EXPECT_EQ(message_after([] {
              Progress progress("reading rows.jsonl");
              throw std::bad_alloc();
            }),
            "out of memory while reading rows.jsonl: use fewer trajectories (--limit), or packed "
            ".safetensors, which "
            "stay on disk");
  EXPECT_EQ(message_after([] {
              Progress progress("train");
              throw std::bad_alloc();
            }),
            "out of memory in train: give a smaller --memory-budget, --token-budget or --batch-size, or "
            "--checkpoint-activations layer");
  {
    Progress over("reading rows.jsonl");
  }
  EXPECT_TRUE(message_after([] { throw std::bad_alloc(); }).starts_with("out of memory: give"))
      << "ended work is named";
}

TEST(OutOfMemory, KnowsWhatLibTorchSaysOfMemory) {
  const auto too_large = [] { at::empty({int64_t{1} << 40, int64_t{1} << 18}, at::kByte); };  // 2^58 bytes
  EXPECT_TRUE(message_after(too_large).starts_with("out of memory"));
  EXPECT_TRUE(message_after([] {
                C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory.");
              }).starts_with("out of memory"));
}

TEST(OutOfMemory, LeavesOtherErrorsAlone) {
  EXPECT_EQ(message_after([] { throw std::runtime_error("memory"); }), "memory");
  EXPECT_TRUE(message_after([] { at::empty({2}).view({3}); }).starts_with("shape '[3]' is invalid"));
}

}  // namespace
}  // namespace espalier::testing
