// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/visible_intervals.h"

#include <algorithm>
#include <limits>

#include "espalier/base/check.h"

namespace espalier {
namespace {

/// Keys [begin, end), which follow each other on one path.
struct Interval {
  int64_t begin, end;
  int64_t position;  // of the first key
};

/// The path of one token after another, root first. Its keys in the context change only where a block begins
/// or ends; its tokens are a stack.
class Path {
 public:
  explicit Path(const AttentionMask& mask) : mask_(mask) {
    for (const ContextBlock& block : mask.context) {
      first_key_.push_back(context_keys_);
      context_keys_ += block.column_end - block.column_begin;
      changes_.insert(changes_.end(), {block.row_begin, block.row_end});
    }
    std::ranges::sort(changes_);
  }

  int64_t context_keys() const { return context_keys_; }

  /// Token i is the end of the path. Call for 0, 1, ...
  void advance(int64_t token) {
    if (next_change_ < changes_.size() && changes_[next_change_] <= token) read_context(token);
    while (!tokens_.empty() && !pop_ended(token)) tokens_.pop_back();
    const int64_t key = context_keys_ + token;
    if (!tokens_.empty() && tokens_.back().end == key) {
      ++tokens_.back().end;
    } else {
      tokens_.push_back({key, key + 1, mask_.position.empty() ? 0 : mask_.position[token]});
    }
  }

  /// The intervals that the last token of the path sees, ascending. Valid until the next call.
  const std::vector<Interval>& visible(int64_t token) {
    const int64_t window = mask_.sliding_window;
    visible_.clear();
    for (const auto* intervals : {&tokens_, &context_}) {
      for (auto each = intervals->rbegin(); each != intervals->rend(); ++each) {
        const Interval& interval = *each;
        int64_t begin = interval.begin;
        if (window > 0) {
          begin = std::max(begin, begin + mask_.position[token] - window + 1 - interval.position);
          if (begin >= interval.end) continue;
        }
        if (!visible_.empty() && visible_.back().begin == interval.end) {
          visible_.back().begin = begin;
        } else {
          visible_.push_back({begin, interval.end, 0});
        }
      }
    }
    std::ranges::reverse(visible_);
    return visible_;
  }

 private:
  /// Removes the tokens of the last interval that `token` does not see; false if that is all of them.
  bool pop_ended(int64_t token) {
    Interval& last = tokens_.back();
    while (last.end > last.begin && mask_.subtree_end[last.end - 1 - context_keys_] <= token) --last.end;
    return last.end > last.begin;
  }

  void read_context(int64_t token) {
    while (next_change_ < changes_.size() && changes_[next_change_] <= token) ++next_change_;
    context_.clear();
    for (size_t block = 0; block < mask_.context.size(); ++block) {
      const ContextBlock& each = mask_.context[block];
      if (token < each.row_begin || token >= each.row_end) continue;
      const int64_t begin = first_key_[block], end = begin + each.column_end - each.column_begin;
      Interval* last = context_.empty() ? nullptr : &context_.back();
      if (last != nullptr && last->end == begin && last->position + begin - last->begin == each.position) {
        last->end = end;
      } else {
        context_.push_back({begin, end, each.position});
      }
    }
  }

  const AttentionMask& mask_;
  std::vector<int64_t> first_key_;  // of each context block
  int64_t context_keys_ = 0;
  std::vector<int64_t> changes_;  // tokens at which blocks begin or end, ascending
  size_t next_change_ = 0;
  std::vector<Interval> context_, tokens_, visible_;
};

void check(const AttentionMask& mask) {
  const int64_t num_tokens = std::ssize(mask.subtree_end);
  ESPALIER_CHECK(mask.sliding_window >= 0, "sliding_window: expected 0 or more, received {}",
                 mask.sliding_window);
  ESPALIER_CHECK(mask.sliding_window == 0 || std::ssize(mask.position) == num_tokens,
                 "position: expected {} numbers (one per token), received {}", num_tokens,
                 mask.position.size());
  for (const ContextBlock& block : mask.context) {
    ESPALIER_CHECK(0 <= block.column_begin && block.column_begin < block.column_end && 0 <= block.row_begin &&
                       block.row_begin < block.row_end && block.row_end <= num_tokens,
                   "context: expected blocks of keys that some of {} tokens see, received keys [{}, {}) for "
                   "tokens [{}, {})",
                   num_tokens, block.column_begin, block.column_end, block.row_begin, block.row_end);
  }
}

}  // namespace

VisibleIntervals visible_intervals(const AttentionMask& mask) {
  check(mask);
  const int64_t num_tokens = std::ssize(mask.subtree_end);
  Path path(mask);
  ESPALIER_CHECK(path.context_keys() + num_tokens <= std::numeric_limits<int32_t>::max(),
                 "expected fewer than 2^31 keys, received {}", path.context_keys() + num_tokens);
  std::vector<int32_t> bounds;  // of one token after another
  std::vector<int64_t> first{0};
  VisibleIntervals result;
  for (int64_t token = 0; token < num_tokens; ++token) {
    path.advance(token);
    for (const Interval& interval : path.visible(token)) {
      const bool is_first = std::ssize(bounds) == first.back();
      if (!is_first || interval.begin > 0) {
        if (is_first) bounds.push_back(0);
        bounds.push_back(static_cast<int32_t>(interval.begin));
      }
      bounds.push_back(static_cast<int32_t>(interval.end));
    }
    result.num_bounds = std::max(result.num_bounds, std::ssize(bounds) - first.back());
    first.push_back(std::ssize(bounds));
  }
  result.bounds.resize(result.num_bounds * num_tokens);
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t row = 0; row < result.num_bounds; ++row) {
      result.bounds[row * num_tokens + token] = bounds[std::min(first[token] + row, first[token + 1] - 1)];
    }
  }
  return result;
}

}  // namespace espalier
