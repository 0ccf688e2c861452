// SPDX-License-Identifier: Apache-2.0
// mma.sync attention behind tree_attention.h: schedules, scratch and launches.
#include "espalier/ops/kernels/cuda/ampere.h"

#include "espalier/ops/kernels/cuda/device.h"

namespace espalier::cuda {
namespace ampere {
namespace {

/// Memory that is handed out from the front; without memory, its size.
class Scratch {
 public:
  explicit Scratch(void* memory) : memory_(static_cast<std::byte*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    std::byte* start = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return reinterpret_cast<T*>(start);
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  int64_t bytes_ = 0;
};

ScheduleInputs schedule_inputs(const AttentionProblem& problem, BlockSizes sizes) {
  ScheduleInputs inputs{
      problem.subtree_end, problem.num_tokens, problem.rectangles, problem.num_rectangles, 0, sizes};
  for (int32_t r = 0; r < problem.num_rectangles; ++r) {
    inputs.num_context_blocks += num_context_blocks(problem.host_rectangles[r], sizes.keys);
  }
  return inputs;
}

int64_t schedule_bytes(const ScheduleInputs& inputs) {
  TileSchedule schedule;
  return place_schedule(inputs, nullptr, &schedule);
}

template <class Work>
void for_element(ElementKind element, const Work& work) {
  element == ElementKind::kBFloat16 ? work(BFloat16{}) : work(Float16{});
}

ScheduleInputs forward_inputs(const AttentionProblem& problem) {
  const RowPacking packing = RowPacking::of(problem.group());
  return schedule_inputs(problem, for_head_dim(problem.head_dim, [&]<int kDim>() {
                           return block_sizes<ForwardTiles<BFloat16, kDim>>(packing);
                         }));
}

int64_t forward_scratch_bytes(const AttentionProblem& problem) {
  return schedule_bytes(forward_inputs(problem));
}

void attend(const AttentionProblem& problem, const AttentionOutputs& outputs, void* scratch, void* stream) {
  if (problem.num_tokens == 0) return;
  const ForwardParams params{build_schedule(forward_inputs(problem), scratch, stream),
                             problem.sources,
                             problem.q,
                             outputs.out,
                             outputs.lse,
                             RowPacking::of(problem.group()),
                             problem.group(),
                             problem.softmax_scale};
  for_element(problem.element, [&]<class Element>(Element) {
    launch_forward<Element>(params, problem.head_dim, problem.num_key_heads, stream);
  });
}

/// attend_keys goes over all rows of its packed heads once per key block: of no more heads at a time than
/// leave Q, dO and the sums of dQ in half of the second-level cache, because long sequences have few partial
/// tiles and would read rows from memory for every key block instead.
RowPacking backward_packing(const AttentionProblem& problem) {
  const int64_t element_bytes = 2,
                row_bytes = problem.head_dim * (2 * element_bytes + int64_t{sizeof(float)});
  const int64_t head_bytes = std::max<int64_t>(1, problem.num_tokens * row_bytes);
  return RowPacking::of(problem.group(), device_properties().cache_bytes / 2 / head_bytes);
}

/// Where backward's arrays lie in its scratch.
struct BackwardScratch {
  ScheduleInputs keys;
  ScheduleInputs queries;  // of the kernel for dQ alone
  std::byte* key_schedule;
  float* delta;
  std::byte* query_schedule = nullptr;
  float* sums = nullptr;
  int64_t bytes;

  BackwardScratch(const AttentionProblem& problem, void* memory) {
    const RowPacking packing = backward_packing(problem);
    Scratch scratch(memory);
    for_head_dim(problem.head_dim, [&]<int kDim>() {
      using Tiles = BackwardTiles<BFloat16, kDim, 2>;
      keys = schedule_inputs(problem, block_sizes<Tiles>(packing));
      queries = schedule_inputs(problem, block_sizes<QueryGradientTiles<BFloat16, kDim>>(packing));
      key_schedule = scratch.take<std::byte>(schedule_bytes(keys));
      delta = scratch.take<float>(int64_t{problem.num_tokens} * problem.num_heads);
      if (problem.deterministic) {
        query_schedule = scratch.take<std::byte>(schedule_bytes(queries));
      } else {
        TileSchedule schedule;
        schedule.inputs = keys;
        sums = scratch.take<float>(num_sums<Tiles>(schedule, packing, problem.num_heads));
      }
    });
    bytes = scratch.bytes();
  }
};

int64_t backward_scratch_bytes(const AttentionProblem& problem) {
  return BackwardScratch(problem, nullptr).bytes;
}

/// Stages of attend_keys that fit; 0 where none do.
int backward_stages(int32_t head_dim, int64_t shared_bytes) {
  return for_head_dim(head_dim, [&]<int kDim>() {
    if (shared_bytes >= BackwardTiles<BFloat16, kDim, 2>::kSharedBytes) return 2;
    return kDim == 256 && shared_bytes >= BackwardTiles<BFloat16, 256, 1>::kSharedBytes ? 1 : 0;
  });
}

void attend_backward(const AttentionProblem& problem, const AttentionGradients& gradients, void* memory,
                     void* stream) {
  if (problem.num_tokens == 0) return;
  const BackwardScratch scratch(problem, memory);
  BackwardParams params{build_schedule(scratch.keys, scratch.key_schedule, stream),
                        problem.sources,
                        gradients.grad_sources,
                        problem.q,
                        gradients.grad_out,
                        gradients.out,
                        gradients.grad_q,
                        gradients.lse,
                        scratch.delta,
                        scratch.sums,
                        backward_packing(problem),
                        problem.group(),
                        problem.num_heads,
                        problem.softmax_scale};
  const int stages = backward_stages(problem.head_dim, device_properties().shared_bytes);
  for_element(problem.element, [&]<class Element>(Element) {
    launch_backward<Element>(params, problem.head_dim, stages, stream);
    if (!problem.deterministic) return;
    params.schedule = build_schedule(scratch.queries, scratch.query_schedule, stream);
    launch_queries<Element>(params, problem.head_dim, stream);
  });
}

AttentionSupport support(ElementKind, int32_t head_dim, int compute_capability, int64_t shared_bytes) {
  if (compute_capability < 80 || (head_dim != 64 && head_dim != 128 && head_dim != 256)) return {};
  return for_head_dim(head_dim, [&]<int kDim>() {
    const bool queries = shared_bytes >= QueryGradientTiles<BFloat16, kDim>::kSharedBytes;
    return AttentionSupport{shared_bytes >= ForwardTiles<BFloat16, kDim>::kSharedBytes,
                            queries && backward_stages(kDim, shared_bytes) > 0};
  });
}

}  // namespace
}  // namespace ampere

const AttentionImplementation& ampere_attention() {
  static const AttentionImplementation implementation{&ampere::support,
                                                      nullptr,
                                                      &ampere::forward_scratch_bytes,
                                                      &ampere::backward_scratch_bytes,
                                                      &ampere::attend,
                                                      &ampere::attend_backward};
  return implementation;
}

}  // namespace espalier::cuda
