// SPDX-License-Identifier: Apache-2.0
// The safetensors container (8-byte little-endian header length, JSON header, contiguous buffer),
// memory-mapped for reading. Format: https://github.com/huggingface/safetensors. Reading checks header size,
// duplicate names, dtypes, shapes (overflow-checked products), offsets (ascending, contiguous, no holes, no
// overlap) and total length; a fault names file and tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/file.h"

namespace espalier {

/// One tensor of a file. `dtype` as the format names it: BOOL U8 I8 I16 U16 I32 U32 I64 U64 F16 BF16 F32 F64
/// (and F8_E4M3, F8_E5M2, so that such tensors can be copied).
struct TensorView {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // row-major

  int64_t num_elements() const;
};

/// Bytes of one element; throws InputError on an unknown dtype.
int64_t dtype_bytes(const std::string& dtype);

/// A mapped safetensors file. Views stay valid while the object (or a copy of it) lives.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_->path(); }
  const std::vector<TensorView>& tensors() const { return tensors_; }  // in file order
  const TensorView* find(const std::string& name) const;               // nullptr when absent
  const TensorView& at(const std::string& name) const;                 // throws InputError when absent
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::shared_ptr<const MappedFile> mapping() const { return file_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::vector<TensorView> tensors_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

/// Writes `tensors` in the given order, atomically (AtomicFile). Names must be distinct and bytes must match
/// dtype and shape. `release` (may be empty) is called after every 64 MiB of a tensor and after each tensor,
/// for bytes that are mapped.
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorView>& tensors,
                       const std::map<std::string, std::string>& metadata = {},
                       const std::function<void()>& release = {});

}  // namespace espalier
