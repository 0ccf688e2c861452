// SPDX-License-Identifier: Apache-2.0
// Packed files with given tensors.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/safetensors.h"

namespace espalier::testing {

/// Tensors by name, written without checks, so that a test can make faulty columns.
class PackedFile {
 public:
  template <typename T>
  void set(const std::string& name, const std::string& dtype, const std::vector<T>& values,
           std::vector<int64_t> shape = {}) {
    if (shape.empty()) shape = {static_cast<int64_t>(values.size())};
    std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    columns_[name] = {dtype, std::move(shape), std::move(bytes)};
  }
  void erase(const std::string& name) { columns_.erase(name); }

  void write(const std::filesystem::path& path) const {
    std::vector<TensorView> tensors;
    for (const auto& [name, column] : columns_)
      tensors.push_back({name, column.dtype, column.shape, std::as_bytes(std::span(column.bytes))});
    write_safetensors(path, tensors);
  }

 private:
  struct Stored {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;
  };
  std::map<std::string, Stored> columns_;
};

}  // namespace espalier::testing
