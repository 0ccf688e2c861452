// SPDX-License-Identifier: Apache-2.0
// The processes that train one model together.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
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

/// Processes with the ranks 0 to size() - 1; this class is one process. All functions but rank(), size() and
/// is_first() are collectives: every rank calls the same ones in the same order. Results are the same bits on
/// all ranks, and depend on the values and the number of ranks alone. Collectives throw RankError where a
/// rank has failed (process_group.h).
class Group {
 public:
  virtual ~Group() = default;
  virtual int64_t rank() const { return 0; }
  virtual int64_t size() const { return 1; }
  bool is_first() const { return rank() == 0; }
  /// Tensors are sent in buckets of so many bytes.
  virtual int64_t bucket_bytes() const { return int64_t{32} << 20; }

  /// [N, ...]: what every rank gives, by rank. The ranks have the same shapes.
  virtual at::Tensor gather(const at::Tensor& own) const { return own.unsqueeze(0); }

  /// Starts to send send[r] rows of `rows` [N, ...] to rank r, for every r, in their order. The result waits,
  /// and gives the receive[r] rows that every rank r has sent to this one, by rank.
  virtual std::function<at::Tensor()> exchange(const at::Tensor& rows, const std::vector<int64_t>& send,
                                               const std::vector<int64_t>& receive) const;

  /// Likewise, one row for every rank.
  std::function<at::Tensor()> exchange(const at::Tensor& rows) const {
    const std::vector<int64_t> one(size(), 1);
    return exchange(rows, one, one);
  }

  /// The groups of `ranks` successive ranks, a divisor of size(): that of this rank.
  virtual std::unique_ptr<Group> split(int64_t /*ranks*/) const { return std::make_unique<Group>(); }

  /// The bytes of every rank, by rank.
  std::vector<std::string> gather(const std::string& bytes) const;

  /// The values of every rank, by rank. They travel as text, which `write` makes and `read` takes.
  template <class Value, class Write, class Read>
  std::vector<Value> gather(Value own, const Write& write, const Read& read) const {
    std::vector<Value> values;
    if (size() == 1) {
      values.push_back(std::move(own));
    } else {
      for (const std::string& text : gather(write(own))) values.push_back(read(text));
    }
    return values;
  }

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
  std::vector<double> from_first(const std::vector<double>& values) const {
    return add_up(is_first() ? values : std::vector<double>(values.size()));
  }

  /// Reduces each value over the ranks, in their order. `ways`: one for each value.
  std::vector<double> reduce(const std::vector<double>& values, const std::vector<RankReduction>& ways) const;

  /// Sums of values over the ranks.
  std::vector<double> add_up(const std::vector<double>& values) const {
    return reduce(values, std::vector<RankReduction>(values.size(), RankReduction::kSum));
  }

  /// Whether it holds on any rank.
  bool any(bool condition) const { return add_up(std::vector<double>{condition ? 1.0 : 0.0}).front() > 0; }

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

  /// Likewise for the text that `make` returns, which one process does not call.
  template <class Make>
    requires std::invocable<Make>
  void check_equal(const std::string& what, const Make& make) const {
    if (size() > 1) check_equal(what, std::string(make()));
  }
};

/// Of some tensors columns, as rows [N, chunk] of which each rank has one (Group::part); the last is shorter.
struct Bucket {
  struct Columns {
    at::Tensor flat;
    int64_t chunk, begin, width;
  };
  std::vector<Columns> columns{};
  int64_t width = 0;
  std::function<at::Tensor()> received{};
};

/// Adds up tensors over the ranks while more are computed, in their dtype and in the order of the ranks. They
/// are added in the same order on all ranks.
class PartSums {
 public:
  explicit PartSums(const Group& group) : group_(group) {}

  /// From now to finish() the tensor, which is contiguous, is used by nobody else.
  void add(const at::Tensor& tensor);

  /// Sends what makes no whole bucket. Call after the last add().
  void end();

  /// Waits until Group::part of each tensor is its sum; other elements have no meaning. Throws RankError if
  /// elements were lost on the way, as far as the sum of all elements tells.
  void finish();

 private:
  void send(Bucket bucket);
  void receive();

  const Group& group_;
  Bucket next_;
  std::deque<Bucket> sent_;
  at::Tensor totals_;    // in float64: elements sent, their absolute values, elements received
  double rounding_ = 0;  // of all additions of one element, relative
};

/// One process, whose collectives do nothing.
const Group& alone();

}  // namespace espalier
