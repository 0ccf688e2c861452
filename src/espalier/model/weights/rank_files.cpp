// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/weights/rank_files.h"

#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <system_error>

#include "espalier/base/check.h"
#include "espalier/model/weights/tensor_bytes.h"

namespace espalier {

namespace fs = std::filesystem;

fs::path rank_file(const fs::path& file, const Share& share) {
  if (share.ranks == 1) return file;
  return file.parent_path() / fmt::format("{}-{:05}-of-{:05}{}", file.stem().string(), share.rank + 1,
                                          share.ranks, file.extension().string());
}

std::vector<SafetensorsFile> open_rank_files(const fs::path& file) {
  std::error_code error;
  const std::string first = file.stem().string() + "-00001-of-";
  Share share{.ranks = fs::exists(file, error) ? 1 : 0};
  if (share.ranks == 0) {
    for (fs::directory_iterator entry(file.parent_path(), error), end; !error && entry != end;
         entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      if (name.starts_with(first))
        std::from_chars(name.data() + first.size(), name.data() + name.size(), share.ranks);
    }
  }
  std::vector<SafetensorsFile> files;
  for (; share.rank < share.ranks; ++share.rank) files.emplace_back(rank_file(file, share));
  return files;
}

void read_part(const std::vector<SafetensorsFile>& files, const std::string& name, at::IntArrayRef shape,
               int64_t begin, const at::Tensor& part) {
  const TensorView wanted = view_tensor(name, part);
  const int64_t size = part.element_size(), end = begin + part.numel();
  std::vector<int64_t> expected = shape.vec();
  int64_t at = 0;  // elements of the files before
  for (const SafetensorsFile& file : files) {
    const TensorView& stored = file.at(name);
    const int64_t numel = stored.num_elements();
    if (files.size() > 1) expected = {numel};
    ESPALIER_CHECK(stored.dtype == wanted.dtype && stored.shape == expected,
                   "{}: tensor {}: expected {} [{}], received {} [{}]", file.path().string(), name,
                   wanted.dtype, fmt::join(expected, ", "), stored.dtype, fmt::join(stored.shape, ", "));
    const int64_t from = std::max(begin, at), to = std::min(end, at + numel);
    if (from < to) {
      std::memcpy(static_cast<std::byte*>(part.mutable_data_ptr()) + (from - begin) * size,
                  stored.bytes.data() + (from - at) * size, static_cast<size_t>((to - from) * size));
    }
    at += numel;
  }
  ESPALIER_CHECK(at == c10::multiply_integers(shape), "{}: tensor {}: expected {} elements, received {}",
                 files.front().path().string(), name, c10::multiply_integers(shape), at);
}

}  // namespace espalier
