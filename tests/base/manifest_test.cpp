// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/manifest.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "espalier/base/file.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

using testing::ScratchFolder;

// A folder of three files, one of them empty, with its manifest.
void fill(const ScratchFolder& folder) {
  write_text(folder / "a.json", "{\"value\": 1}");
  write_text(folder / "b.safetensors", std::string(10'000, 'b'));
  write_text(folder / "empty", "");
  write_manifest(folder.path(), "step_7");
}

std::string only_fault(const ScratchFolder& folder, const std::string& title = "step_7") {
  const ManifestReport report = check_manifest(folder.path(), title);
  EXPECT_TRUE(report.present);
  EXPECT_EQ(report.faults.size(), 1u);
  return report.faults.empty() ? "" : report.faults[0];
}

TEST(Manifest, AWholeFolderHasNoFaults) {
  const ScratchFolder folder;
  EXPECT_FALSE(check_manifest(folder.path(), "step_7").present);
  fill(folder);
  for (int i = 0; i < 2; ++i) {  // writing it again changes nothing
    const ManifestReport report = check_manifest(folder.path(), "step_7");
    EXPECT_TRUE(report.present);
    EXPECT_TRUE(report.faults.empty());
    EXPECT_TRUE(report.extra.empty());
    write_manifest(folder.path(), "step_7");
  }
}

TEST(Manifest, AFlippedBitAnywhereIsNoticed) {
  const ScratchFolder folder;
  fill(folder);
  for (const char* name : {"a.json", "b.safetensors", kManifestFile}) {
    const std::string text = read_text(folder / name);
    const size_t stride = text.size() > 2000 ? 997 : 1;
    for (size_t bit = 0; bit < text.size() * 8; bit += stride) {
      std::string flipped = text;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      write_text(folder / name, flipped);
      EXPECT_FALSE(check_manifest(folder.path(), "step_7").faults.empty()) << name << ", bit " << bit;
    }
    write_text(folder / name, text);
  }
  EXPECT_TRUE(check_manifest(folder.path(), "step_7").faults.empty());
}

TEST(Manifest, SaysWhatIsWrong) {
  const ScratchFolder folder;
  fill(folder);
  EXPECT_NE(only_fault(folder, "step_8").find("belongs to \"step_7\""), std::string::npos);
  std::string zeroed(10'000, 'b');
  std::fill(zeroed.begin() + 4096, zeroed.begin() + 8192, '\0');
  write_text(folder / "b.safetensors", zeroed);
  EXPECT_NE(only_fault(folder).find("b.safetensors was changed after it was written"), std::string::npos);
  write_text(folder / "b.safetensors", "bb");
  EXPECT_NE(only_fault(folder).find("b.safetensors has 2 bytes, but 10000 were written"), std::string::npos);
  std::filesystem::remove(folder / "b.safetensors");
  EXPECT_NE(only_fault(folder).find("b.safetensors is missing"), std::string::npos);
  std::filesystem::create_directory(folder / "b.safetensors");
  EXPECT_NE(only_fault(folder).find("b.safetensors is missing"), std::string::npos);
}

TEST(Manifest, FilesThatItDoesNotListAreNamed) {
  const ScratchFolder folder;
  fill(folder);
  write_text(folder / "resume.safetensors", "x");
  std::filesystem::create_directory(folder / "notes");
  const ManifestReport report = check_manifest(folder.path(), "step_7");
  EXPECT_TRUE(report.faults.empty());
  EXPECT_EQ(report.extra, std::vector<std::string>{"resume.safetensors"});
}

TEST(Manifest, IsRefusedWhereItIsNone) {
  const ScratchFolder folder;
  fill(folder);
  for (const char* text :
       {"", "{", "[]", "{}", R"({"version": 1, "title": "step_7"})",
        R"({"version": 2, "title": "step_7", "files": {}})", R"({"version": 1, "title": 7, "files": {}})",
        R"({"version": 1, "title": "step_7", "files": {"a.json": 3}})",
        R"({"version": 1, "title": "step_7", "files": {"a.json": {"bytes": -1, "xxh3_128": ""}}})"}) {
    write_text(folder / kManifestFile, text);
    EXPECT_NE(only_fault(folder).find(kManifestFile), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace espalier
