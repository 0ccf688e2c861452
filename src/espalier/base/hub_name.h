// SPDX-License-Identifier: Apache-2.0
// Names of repositories of the Hugging Face Hub, given where a local file or folder is expected.
#pragma once

#include <filesystem>
#include <string>

namespace espalier {

enum class HubKind { kModel, kDataset };

/// For a path that does not exist: "; it reads like a model of the Hugging Face Hub, which `hf download
/// ORG/NAME --local-dir NAME` downloads" where it has the form ORG/NAME and there is no folder ORG; ""
/// otherwise.
std::string hub_advice(const std::filesystem::path& missing, HubKind kind);

}  // namespace espalier
