// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/hub_name.h"

#include <gtest/gtest.h>

#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

TEST(HubName, NamesAreToldWithTheCommandThatDownloadsThem) {
  EXPECT_EQ(
      hub_advice("Some-Org/model-1.5B", HubKind::kModel),
      "; it looks like a model of the Hugging Face Hub, which `hf download Some-Org/model-1.5B --local-dir "
      "model-1.5B` downloads");
  EXPECT_EQ(
      hub_advice("Some-Org/chats", HubKind::kDataset),
      "; it looks like a dataset of the Hugging Face Hub, which `hf download Some-Org/chats --repo-type "
      "dataset --local-dir chats` downloads");
}

TEST(HubName, PathsAreNoNames) {
  const testing::ScratchFolder folder;
  for (const char* path :
       {"model", "/data/model", "./org/model", "../org/model", "a/b/c", "org/", "org/a b", ""})
    EXPECT_EQ(hub_advice(path, HubKind::kModel), "") << path;
  EXPECT_EQ(hub_advice(folder / "model", HubKind::kModel), "");
}

}  // namespace
}  // namespace espalier
