// SPDX-License-Identifier: Apache-2.0
// Hugging Face Hub repository names given where a local file or folder is expected.
#pragma once

#include <filesystem>
#include <string>

namespace espalier {

enum class HubKind { kModel, kDataset };

/// For a missing path of the form ORG/NAME, where there is no folder ORG: "; it looks like a model of the
/// Hugging Face Hub, which `hf download ORG/NAME --local-dir NAME` downloads". Otherwise "".
std::string hub_advice(const std::filesystem::path& missing, HubKind kind);

}  // namespace espalier
