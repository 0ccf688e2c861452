// SPDX-License-Identifier: Apache-2.0
// Columns that grow: in memory, or in temporary files once they are larger than memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "espalier/base/file.h"
#include "espalier/data/trajectories.h"

namespace espalier {

/// Where the columns of one set go that take more memory than they may.
struct RowStore {
  int64_t memory = 0;  // bytes that the columns may take; 0: any
  /// Called once they take more: a file beside which temporary files are written, or empty: all stays in
  /// memory.
  std::function<std::filesystem::path()> begin{};

  // Of the columns of a builder:
  int64_t bytes = 0;
  std::filesystem::path file{};  // not empty once they are written
  std::vector<std::shared_ptr<const MappedFile>> mappings{};

  void add(size_t more) {
    bytes += static_cast<int64_t>(more);
    if (memory == 0 || bytes <= memory || !file.empty()) return;
    file = begin();
    if (file.empty()) memory = 0;
  }
};

/// Values of one type that are appended. Holds at most some MiB in memory once columns are written.
template <typename T>
class Growing {
 public:
  static constexpr size_t kBlock = size_t{1} << 18;

  explicit Growing(RowStore* store) : store_(store) {}
  size_t size() const { return written_ + held_.size(); }

  template <typename U>
  void append(std::span<const U> values) {
    for (; !values.empty(); values = values.subspan(std::min(kBlock, values.size()))) {
      const auto block = values.first(std::min(kBlock, values.size()));
      held_.insert(held_.end(), block.begin(), block.end());
      added(block.size());
    }
  }
  void fill_to(size_t size, T value) {
    while (this->size() < size) {
      const size_t count = std::min(kBlock, size - this->size());
      held_.resize(held_.size() + count, value);
      added(count);
    }
  }

  /// The values, owned or mapped; nothing may be appended afterwards.
  Column<T> finish() {
    if (!file_) return Column<T>(std::move(held_));
    write();
    auto mapping = std::make_shared<const MappedFile>(file_->temporary());
    store_->mappings.push_back(mapping);
    return {std::span(reinterpret_cast<const T*>(mapping->bytes().data()), written_), mapping};
  }

 private:
  void added(size_t count) {
    store_->add(count * sizeof(T));
    if (!store_->file.empty() && held_.size() >= kBlock) write();
  }
  void write() {
    if (!file_) file_ = std::make_unique<AtomicFile>(store_->file);
    file_->write(std::as_bytes(std::span(held_)));
    written_ += held_.size();
    held_ = {};
  }

  RowStore* store_;
  std::vector<T> held_;
  size_t written_ = 0;
  std::unique_ptr<AtomicFile> file_;  // never committed
};

/// Reals of the type of the first part, or doubles once a part has another type.
class GrowingReals {
 public:
  explicit GrowingReals(RowStore* store) : store_(store), values_(Growing<uint8_t>(store)) {}

  void append(const RealColumn& part) {
    std::visit(
        [this]<typename T>(const Column<T>& column) {
          if (column.empty()) return;
          if (!std::exchange(started_, true)) become<T>();
          if (!std::holds_alternative<Growing<T>>(values_)) become<double>();
          std::visit([&](auto& values) { values.append(column.span()); }, values_);
        },
        part.values());
  }
  void fill_to(size_t size) {
    std::visit([size](auto& values) { values.fill_to(size, 0); }, values_);
  }
  size_t size() const {
    return std::visit([](const auto& values) { return values.size(); }, values_);
  }
  RealColumn finish() {
    return std::visit([](auto& values) { return RealColumn(values.finish()); }, values_);
  }

 private:
  template <typename T>
  void become() {
    if (std::holds_alternative<Growing<T>>(values_)) return;
    Growing<T> next(store_);
    const size_t mappings = store_->mappings.size();
    std::visit([&](auto& values) { next.append(values.finish().span()); }, values_);
    store_->mappings.resize(mappings);
    values_ = std::move(next);
  }

  RowStore* store_;
  bool started_ = false;
  std::variant<Growing<uint8_t>, Growing<float>, Growing<double>> values_;
};

/// A column that rows may lack. It takes no memory before the first row that has it.
class GrowingOptional {
 public:
  explicit GrowingOptional(RowStore* store) : values_(store), present_(store) {}

  /// `rows` rows, whose values are [begin, end) of all.
  template <typename Values>
  void append(const Optional<Values>& part, int64_t rows, size_t begin, size_t end) {
    any_ = any_ || part.any();
    if (any_) values_.fill_to(part.any() ? begin : end);
    values_.append(part.values);
    for (int64_t row = 0; row < rows; ++row) {
      everywhere_ = everywhere_ && part.has(row);
      present_.fill_to(present_.size() + 1, static_cast<uint8_t>(part.has(row)));
    }
  }

  Optional<RealColumn> finish() {
    if (!any_) return {};
    return {values_.finish(), everywhere_ ? Column<uint8_t>() : present_.finish()};
  }

 private:
  bool any_ = false, everywhere_ = true;
  GrowingReals values_;
  Growing<uint8_t> present_;
};

}  // namespace espalier
