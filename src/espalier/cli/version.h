// SPDX-License-Identifier: Apache-2.0
// The text of `espalier --version`.
#pragma once

#include <string>

namespace espalier::cli {

/// The commit that the program was built from: 12 hexadecimal digits, followed by "-dirty" if tracked files
/// differed from it; "unknown" outside of git. Every build updates its source (cmake/WriteCommit.cmake).
extern const char* const kCommit;

/// Version, commit, compiler, build type, LibTorch, CUDA and the instruction set in use, one per line,
/// without a final newline. Throws InputError if ESPALIER_CPU names an instruction set that this machine
/// lacks.
std::string version_text();

}  // namespace espalier::cli
