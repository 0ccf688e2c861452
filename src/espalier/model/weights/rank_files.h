// SPDX-License-Identifier: Apache-2.0
// Files that several ranks write in place of one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "espalier/base/safetensors.h"

namespace espalier {

/// The part of a folder that one of `ranks` writes.
struct Share {
  int64_t rank = 0, ranks = 1;
};

/// "STEM-00002-of-00003.safetensors" for rank 1 of 3, as Hugging Face names shards; of one rank `file`
/// itself.
std::filesystem::path rank_file(const std::filesystem::path& file, const Share& share);

/// Opens `file`, or where there is none the files that ranks have written in its place, in their order. None
/// if there are none of either.
std::vector<SafetensorsFile> open_rank_files(const std::filesystem::path& file);

/// Copies elements of the tensor `name` of this shape, from number `begin` on, to `part` (contiguous, on the
/// CPU). A single file has the whole tensor; of several each has a piece [N], one after the other
/// (Group::part), and only what is copied is read. Throws InputError if it is missing or has another dtype or
/// shape.
void read_part(const std::vector<SafetensorsFile>& files, const std::string& name, at::IntArrayRef shape,
               int64_t begin, const at::Tensor& part);

}  // namespace espalier
