// SPDX-License-Identifier: Apache-2.0
// The processes that train one model together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/runtime/out_of_memory.h"

namespace espalier {

/// A rank has failed or is lost, or the ranks are not of one mind. Every rank that takes part throws it.
class RankError : public InputError {
 public:
  using InputError::InputError;
};

/// How the values of the ranks become one.
enum class RankReduction { kSum, kMin, kMax };

/// Processes with the ranks 0 to size() - 1. All functions but rank(), size() and is_first() are collectives:
/// every rank calls the same ones in the same order. Results are the same bits on all ranks, and depend on
/// the values and the number of ranks alone. Collectives throw RankError where a rank has failed
/// (process_group.h).
class Group {
 public:
  virtual ~Group() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  bool is_first() const { return rank() == 0; }

  /// The bytes of every rank, by rank.
  virtual std::vector<std::string> gather(const std::string& bytes) const = 0;

  /// Adds up each tensor over the ranks, in place and in its dtype. The ranks have the same shapes.
  virtual void add_up(const std::vector<at::Tensor>& tensors) const = 0;

  /// The values of rank 0.
  std::vector<double> from_first(const std::vector<double>& values) const;

  /// Reduces each value over the ranks, in their order. `ways`: one for each value.
  std::vector<double> reduce(const std::vector<double>& values, const std::vector<RankReduction>& ways) const;

  /// Sums of values over the ranks.
  std::vector<double> add_up(const std::vector<double>& values) const;

  /// Whether it holds on any rank.
  bool any(bool condition) const;

  /// Calls `body`. What it throws on one rank is thrown on all, by the others as a RankError that names the
  /// rank. A body with collectives calls `together` before each of them, so that it learns there of a rank
  /// that does not come.
  template <class Body>
  auto together(const Body& body) const {
    using Result = decltype(body());
    std::optional<Result> result;
    std::exception_ptr thrown;
    std::string failure;
    try {
      result.emplace(body());
    } catch (const RankError&) {  // other ranks throw it, too
      throw;
    } catch (const std::exception& error) {
      thrown = std::current_exception();
      failure = fmt::format("rank {}: {}", rank(), text_of(error));
    }
    const std::vector<std::string> failures = gather(failure);
    if (thrown) std::rethrow_exception(thrown);
    for (const std::string& other : failures) {
      if (!other.empty()) throw RankError(other);
    }
    return std::move(*result);
  }

  /// Throws RankError, naming who has what, unless all ranks have the same text.
  void check_equal(const std::string& what, const std::string& text) const;
};

/// One process, whose collectives do nothing.
const Group& alone();

}  // namespace espalier
