// SPDX-License-Identifier: Apache-2.0
// What `espalier --version` prints.
#pragma once

#include <string>

namespace espalier::cli {

/// The commit that the program was built from: 12 hexadecimal digits, followed by "-dirty" where tracked
/// files differed from it; "unknown" outside of git. Defined in a source that every build keeps up to date
/// (cmake/WriteCommit.cmake).
extern const char* const kCommit;

/// Version, commit, compiler, build type, LibTorch, CUDA and the instruction set in use, one per line without
/// a line end after the last. Throws InputError where ESPALIER_CPU names no instruction set of this machine.
std::string version_text();

}  // namespace espalier::cli
