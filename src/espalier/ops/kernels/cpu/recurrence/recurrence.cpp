// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/recurrence/recurrence.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace espalier {
namespace {

// Heads of one key head computed together, which share the products of q and k. Fewer give more tasks.
constexpr int64_t kHeadsOfTask = 4;
// Trees are grouped up to this number of tokens.
constexpr int64_t kTokensOfTask = 512;

// Union-find: the representative of the group of `chunk`.
int64_t root_of(std::vector<int64_t>& first, int64_t chunk) {
  while (first[chunk] != chunk) chunk = first[chunk] = first[first[chunk]];
  return chunk;
}

void group_chunks(RecurrenceForest* forest) {
  const auto count = static_cast<int64_t>(forest->chunks.size());
  std::vector<int64_t> first(count), first_of_context(forest->num_contexts, -1);
  std::iota(first.begin(), first.end(), 0);
  for (int64_t c = 0; c < count; ++c) {
    const RecurrenceChunk& chunk = forest->chunks[c];
    int64_t other = chunk.parent;
    if (other < 0 && chunk.context >= 0) {
      other = first_of_context[chunk.context];
      first_of_context[chunk.context] = c;
    }
    if (other >= 0) first[root_of(first, c)] = root_of(first, other);
  }
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t c = 0; c < count; ++c) first[c] = root_of(first, c);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return first[a] < first[b]; });
  int64_t tokens = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0 && first[order[i]] != first[order[i - 1]] && tokens >= kTokensOfTask) {
      forest->groups.end_row();
      tokens = 0;
    }
    forest->groups.values.push_back(order[i]);
    tokens += forest->chunks[order[i]].size;
  }
  if (count > 0) forest->groups.end_row();
}

}  // namespace

RecurrenceForest::RecurrenceForest(std::vector<RecurrenceChunk> forest_chunks,
                                   std::span<const int64_t> end_chunks, int64_t contexts, int64_t most)
    : num_contexts(contexts),
      chunk_size(most),
      chunks(std::move(forest_chunks)),
      num_children(chunks.size(), 0) {
  for (const RecurrenceChunk& chunk : chunks) {
    num_tokens += chunk.size;
    if (chunk.parent >= 0) ++num_children[chunk.parent];
  }
  std::vector<std::vector<int64_t>> wanted(chunks.size());
  for (size_t e = 0; e < end_chunks.size(); ++e) wanted[end_chunks[e]].push_back(static_cast<int64_t>(e));
  for (const std::vector<int64_t>& row : wanted) {
    ends.values.insert(ends.values.end(), row.begin(), row.end());
    ends.end_row();
  }
  group_chunks(this);
}

int64_t recurrence_blocks(int64_t heads_of_a_key) {
  return (heads_of_a_key + kHeadsOfTask - 1) / kHeadsOfTask;
}

namespace {

/// States of the heads of a task, by chunk. Reuses buffers of states that are no longer needed.
template <class Scalar>
class StateStore {
 public:
  StateStore(size_t num_chunks, int64_t size) : size_(size), state_of_chunk_(num_chunks, nullptr) {}

  Scalar* at(int64_t chunk) const { return state_of_chunk_[chunk]; }
  void set(int64_t chunk, Scalar* state) { state_of_chunk_[chunk] = state; }

  /// A buffer of padded states, whose padding is zeros.
  Scalar* take() {
    if (free_.empty()) {
      buffers_.emplace_back(size_, Scalar(0));
      free_.push_back(buffers_.back().data());
    }
    Scalar* state = free_.back();
    free_.pop_back();
    return state;
  }

  void give_back(Scalar* state) {
    if (state != nullptr) free_.push_back(state);
  }

  Scalar* release(int64_t chunk) { return std::exchange(state_of_chunk_[chunk], nullptr); }

 private:
  int64_t size_;
  std::vector<std::vector<Scalar>> buffers_;
  std::vector<Scalar*> free_, state_of_chunk_;
};

/// One task: some heads of one key head, and one group of chunks.
template <class Scalar>
class Task {
 public:
  Task(const RecurrenceForest& forest, const RecurrenceProblem<Scalar>& problem, int64_t number)
      : forest_(forest), problem_(problem), math_(recurrence_math<Scalar>(problem.instruction_set)) {
    const int64_t heads_of_key = problem.heads / problem.key_heads, blocks = recurrence_blocks(heads_of_key);
    block_ = number % blocks;
    key_head_ = number / blocks % problem.key_heads;
    chunks_ = forest.groups.row(number / blocks / problem.key_heads);
    const int64_t first = heads_of_key * block_ / blocks, last = heads_of_key * (block_ + 1) / blocks;
    head_ = key_head_ * heads_of_key + first;
    shape_ = {.delta = problem.delta,
              .scale = static_cast<Scalar>(problem.scale),
              .num_heads = last - first,
              .key_dim = problem.key_dim,
              .value_dim = problem.value_dim,
              .chunk_size = forest.chunk_size,
              .key_stride = problem.key_heads * problem.key_dim,
              .value_stride = problem.heads * problem.value_dim,
              .number_stride = problem.heads,
              .state_stride = state_stride_of(problem.value_dim)};
    scratch_.resize(math_.scratch(shape_));
  }

  void forward(const RecurrenceResults<Scalar>& results);
  void backward(const RecurrenceGradients<Scalar>& gradients);

 private:
  int64_t states_size() const { return shape_.num_heads * shape_.key_dim * shape_.state_stride; }
  StateStore<Scalar> store() const { return {forest_.chunks.size(), states_size()}; }

  // Offset of the rows of a chunk for this task's heads.
  int64_t keys_at(const RecurrenceChunk& chunk) const {
    return chunk.begin * shape_.key_stride + key_head_ * shape_.key_dim;
  }
  int64_t values_at(const RecurrenceChunk& chunk) const {
    return chunk.begin * shape_.value_stride + head_ * shape_.value_dim;
  }
  int64_t numbers_at(const RecurrenceChunk& chunk) const {
    return chunk.begin * shape_.number_stride + head_;
  }

  RecurrenceRows<Scalar> rows(const RecurrenceChunk& chunk) const {
    return {.size = chunk.size,
            .q = problem_.q + keys_at(chunk),
            .k = problem_.k + keys_at(chunk),
            .v = problem_.v + values_at(chunk),
            .g = problem_.g + numbers_at(chunk),
            .beta = problem_.delta ? problem_.beta + numbers_at(chunk) : nullptr};
  }

  // Calls work(unpadded, padded) for the elements of state `number` of [count, H, Dk, Dv].
  template <class Tensor, class Work>
  void over_states(Tensor* states, int64_t number, Scalar* padded, const Work& work) const {
    Tensor* head_states = states + (number * problem_.heads + head_) * shape_.key_dim * shape_.value_dim;
    for (int64_t row = 0; row < shape_.num_heads * shape_.key_dim; ++row) {
      for (int64_t i = 0; i < shape_.value_dim; ++i)
        work(head_states[row * shape_.value_dim + i], padded[row * shape_.state_stride + i]);
    }
  }

  // Copies the states of a chunk's context into a new buffer.
  Scalar* load_context(const RecurrenceChunk& chunk, StateStore<Scalar>& states) const {
    Scalar* copy = states.take();
    over_states(problem_.contexts, chunk.context, copy, [](const Scalar& from, Scalar& to) { to = from; });
    return copy;
  }

  std::vector<Scalar*> keep_states(StateStore<Scalar>& states, std::vector<Scalar>& news);
  int64_t news_size(const RecurrenceChunk& chunk) const {
    return shape_.num_heads * chunk.size * shape_.state_stride;
  }

  const RecurrenceForest& forest_;
  const RecurrenceProblem<Scalar>& problem_;
  const RecurrenceMath<Scalar>& math_;
  RecurrenceShape<Scalar> shape_;
  int64_t block_, key_head_, head_;
  std::span<const int64_t> chunks_;
  std::vector<Scalar> scratch_;
};

template <class Scalar>
void Task<Scalar>::forward(const RecurrenceResults<Scalar>& results) {
  StateStore<Scalar> states = store();
  std::vector<int64_t> waiting = forest_.num_children;  // children that have not started
  for (const int64_t c : chunks_) {
    const RecurrenceChunk& chunk = forest_.chunks[c];
    const bool is_last = chunk.parent < 0 || --waiting[chunk.parent] == 0;  // last child to read `start`
    Scalar* start = chunk.parent >= 0 ? states.at(chunk.parent) : nullptr;
    if (chunk.parent < 0 && chunk.context >= 0) start = load_context(chunk, states);
    const auto ends = forest_.ends.row(c);
    const bool goes_on = forest_.num_children[c] > 0 || !ends.empty();
    Scalar* end = !goes_on ? nullptr : is_last && start != nullptr ? start : states.take();
    math_.forward(shape_, {rows(chunk), start, end, results.out + values_at(chunk), nullptr},
                  scratch_.data());
    for (const int64_t e : ends)
      over_states(results.ends, e, end, [](Scalar& to, const Scalar& from) { to = from; });
    if (is_last && start != end) states.give_back(start);
    if (forest_.num_children[c] > 0) {
      states.set(c, end);
    } else {
      states.give_back(end);
    }
  }
}

// Recomputes the states, and with the delta rule n. Returns the states before each chunk; null: zeros.
template <class Scalar>
std::vector<Scalar*> Task<Scalar>::keep_states(StateStore<Scalar>& states, std::vector<Scalar>& news) {
  std::vector<Scalar*> before(chunks_.size(), nullptr);
  int64_t place = 0;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const RecurrenceChunk& chunk = forest_.chunks[chunks_[i]];
    if (chunk.parent >= 0) {
      before[i] = states.at(chunk.parent);
    } else if (chunk.context >= 0) {
      before[i] = load_context(chunk, states);
    }
    Scalar* end = forest_.num_children[chunks_[i]] > 0 ? states.take() : nullptr;
    states.set(chunks_[i], end);
    Scalar* chunk_news = shape_.delta ? news.data() + place : nullptr;
    place += news_size(chunk);
    if (end != nullptr || shape_.delta)
      math_.forward(shape_, {rows(chunk), before[i], end, nullptr, chunk_news}, scratch_.data());
  }
  return before;
}

template <class Scalar>
void Task<Scalar>::backward(const RecurrenceGradients<Scalar>& gradients) {
  StateStore<Scalar> states = store(), grads = store();
  int64_t news_end = 0;
  for (const int64_t c : chunks_) news_end += news_size(forest_.chunks[c]);
  std::vector<Scalar> news(shape_.delta ? news_end : 0);
  const std::vector<Scalar*> before = keep_states(states, news);
  const int64_t block = block_ * forest_.num_tokens * shape_.key_stride;
  for (int64_t i = static_cast<int64_t>(chunks_.size()) - 1; i >= 0; --i) {
    const int64_t c = chunks_[i];
    const RecurrenceChunk& chunk = forest_.chunks[c];
    news_end -= news_size(chunk);
    Scalar* end = grads.release(c);
    if (gradients.ends != nullptr && !forest_.ends.row(c).empty()) {
      if (end == nullptr) std::fill_n(end = grads.take(), states_size(), Scalar(0));
      for (const int64_t e : forest_.ends.row(c))
        over_states(gradients.ends, e, end, [](const Scalar& from, Scalar& to) { to += from; });
    }
    Scalar* start = nullptr;
    const bool add = chunk.parent >= 0 && grads.at(chunk.parent) != nullptr;
    if (add) {
      start = grads.at(chunk.parent);
    } else if (before[i] != nullptr) {
      start = end != nullptr ? end : grads.take();
    }
    math_.backward(shape_,
                   {.rows = rows(chunk),
                    .start = before[i],
                    .news = shape_.delta ? news.data() + news_end : nullptr,
                    .grad_out = gradients.out == nullptr ? nullptr : gradients.out + values_at(chunk),
                    .grad_end = end,
                    .grad_start = start,
                    .add_to_start = add,
                    .grad_q = gradients.q + block + keys_at(chunk),
                    .grad_k = gradients.k + block + keys_at(chunk),
                    .grad_v = gradients.v + values_at(chunk),
                    .grad_g = gradients.g + numbers_at(chunk),
                    .grad_beta = shape_.delta ? gradients.beta + numbers_at(chunk) : nullptr},
                   scratch_.data());
    if (end != start) grads.give_back(end);
    if (chunk.parent >= 0) {
      grads.set(chunk.parent, start);
    } else if (start != nullptr) {
      over_states(gradients.contexts, chunk.context, start,
                  [](Scalar& to, const Scalar& from) { to += from; });
      grads.give_back(start);
    }
  }
}

}  // namespace

template <class Scalar>
int64_t recurrence_tasks(const RecurrenceForest& forest, const RecurrenceProblem<Scalar>& problem) {
  return forest.groups.num_rows() * problem.key_heads * recurrence_blocks(problem.heads / problem.key_heads);
}

template <class Scalar>
void recurrence_forward(const RecurrenceForest& forest, const RecurrenceProblem<Scalar>& problem,
                        const RecurrenceResults<Scalar>& results, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) Task<Scalar>(forest, problem, task).forward(results);
}

template <class Scalar>
void recurrence_backward(const RecurrenceForest& forest, const RecurrenceProblem<Scalar>& problem,
                         const RecurrenceGradients<Scalar>& gradients, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) Task<Scalar>(forest, problem, task).backward(gradients);
}

#define ESPALIER_INSTANTIATE(Scalar)                                                            \
  template int64_t recurrence_tasks(const RecurrenceForest&, const RecurrenceProblem<Scalar>&); \
  template void recurrence_forward(const RecurrenceForest&, const RecurrenceProblem<Scalar>&,   \
                                   const RecurrenceResults<Scalar>&, int64_t, int64_t);         \
  template void recurrence_backward(const RecurrenceForest&, const RecurrenceProblem<Scalar>&,  \
                                    const RecurrenceGradients<Scalar>&, int64_t, int64_t);
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(float)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier
