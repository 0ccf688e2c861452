// SPDX-License-Identifier: Apache-2.0
// The processes that train one model together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
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

/// How the values of the ranks become one. kNorm: the root of the sum of squares.
enum class RankReduction { kSum, kMin, kMax, kNorm };

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

  /// [N, ...]: what every rank gives, by rank. The ranks have the same shapes.
  virtual at::Tensor gather(const at::Tensor& own) const = 0;

  /// Starts to send row r of `rows` [N, ...] to rank r, for every r. The result waits, and gives the rows
  /// that the ranks have sent to this one, by rank.
  virtual std::function<at::Tensor()> exchange(const at::Tensor& rows) const = 0;

  /// The bytes of every rank, by rank.
  std::vector<std::string> gather(const std::string& bytes) const;

  /// The elements of a contiguous tensor that this rank looks after: every rank has such a part, as large as
  /// those of others up to 64 elements, and together they are the tensor. Shares its storage. One process has
  /// the tensor itself.
  at::Tensor part(const at::Tensor& tensor) const;

  /// The tensor of this shape whose parts the ranks have; of one process `own` itself.
  at::Tensor whole(const at::Tensor& own, at::IntArrayRef shape) const;

  /// Copies the part of each rank to all ranks. Skips undefined tensors, which are undefined on all ranks.
  void gather_parts(const std::vector<at::Tensor>& tensors) const;

  /// Sets the elements outside of this rank's part to 0. Skips undefined tensors. Not a collective.
  void zero_others(const std::vector<at::Tensor>& tensors) const;

  /// Adds up each tensor over the ranks, in their order, in place and in its dtype. The ranks have the same
  /// shapes.
  void add_up(const std::vector<at::Tensor>& tensors) const;

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

/// Cuts tensors into buckets of equal bytes: of each tensor columns, as rows [N, chunk] of which each rank
/// has one (Group::part); the last may be shorter.
class Buckets {
 public:
  struct Columns {
    at::Tensor flat;
    int64_t chunk, begin, width;
  };
  using Full = std::function<void(const std::vector<Columns>&)>;

  /// `full` is called with each bucket, by add() or end().
  Buckets(int64_t ranks, Full full) : ranks_(ranks), full_(std::move(full)) {}
  void add(const at::Tensor& tensor);
  void end();

 private:
  int64_t ranks_;
  Full full_;
  std::vector<Columns> next_;
  int64_t width_ = 0;
};

/// Adds up tensors over the ranks while more are computed, in their dtype and in the order of the ranks. They
/// are added in the same order on all ranks.
class PartSums {
 public:
  explicit PartSums(const Group& group);
  PartSums(const PartSums&) = delete;
  PartSums& operator=(const PartSums&) = delete;

  /// From now to finish() the tensor, which is contiguous, is used by nobody else.
  void add(const at::Tensor& tensor);

  /// Waits until Group::part of each tensor is its sum; other elements have no meaning. Throws RankError if
  /// elements were lost on the way, as far as the sum of all elements tells.
  void finish();

 private:
  struct Sent {
    std::vector<Buckets::Columns> columns;
    std::function<at::Tensor()> received;
  };
  void send(const std::vector<Buckets::Columns>& columns);
  void receive();

  const Group& group_;
  Buckets buckets_;
  std::deque<Sent> sent_;
  at::Tensor totals_;    // in float64: elements sent, their absolute values, elements received
  double rounding_ = 0;  // of all additions of one element, relative
};

/// One process, whose collectives do nothing.
const Group& alone();

}  // namespace espalier
