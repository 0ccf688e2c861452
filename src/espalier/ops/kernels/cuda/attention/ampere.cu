// SPDX-License-Identifier: Apache-2.0
// mma.sync attention behind tree_attention.h: schedules, scratch and launches.
#include "espalier/ops/kernels/cuda/attention/ampere.h"

#include "espalier/ops/kernels/cuda/device.h"

namespace espalier::cuda {
namespace ampere {
namespace {

ScheduleInputs schedule_inputs(const AttentionProblem& problem, BlockSizes sizes) {
  ScheduleInputs inputs{
      problem.subtree_end, problem.num_tokens, problem.rectangles, problem.num_rectangles, 0, sizes};
  for (int32_t r = 0; r < problem.num_rectangles; ++r) {
    inputs.num_context_blocks += num_context_blocks(problem.host_rectangles[r], sizes.keys);
  }
  return inputs;
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

/// attend_keys reads all rows of its packed heads once per key block. The number of heads processed at a time
/// is limited so that Q, dO and the dQ accumulators fit half of the L2 cache; otherwise long sequences would
/// read rows from global memory for every key block. The same number of key heads is interleaved.
int64_t heads_in_cache(const AttentionProblem& problem) {
  const int64_t element_bytes = 2,
                row_bytes = problem.head_dim * (2 * element_bytes + int64_t{sizeof(float)});
  const int64_t head_bytes = std::max<int64_t>(1, problem.num_tokens * row_bytes);
  return device_properties().cache_bytes / 2 / head_bytes;
}
RowPacking backward_packing(const AttentionProblem& problem) {
  return RowPacking::of(problem.group(), heads_in_cache(problem));
}
PartInputs part_inputs(const AttentionProblem& problem, const RowPacking& packing) {
  const auto at_once =
      std::clamp<int64_t>(heads_in_cache(problem) / packing.packed, 1, problem.num_key_heads);
  return PartInputs::of(problem.num_key_heads, static_cast<int32_t>(at_once), packing.parts,
                        {device_properties().multiprocessors});
}

/// Offsets of the arrays of backward.
struct BackwardPlaces {
  TileSchedule keys;
  KeyParts parts;
  TileSchedule queries;  // for the deterministic kernel of dQ
  float* delta;
  float* sums = nullptr;
  AttentionMemory bytes;

  BackwardPlaces(const AttentionProblem& problem, void* schedule_memory, void* scratch_memory) {
    const RowPacking packing = backward_packing(problem);
    Arena schedules(schedule_memory), scratch(scratch_memory);
    for_head_dim(problem.head_dim, [&]<int kDim>() {
      using Tiles = BackwardTiles<BFloat16, kDim, 2>;
      place_schedule(schedule_inputs(problem, block_sizes<Tiles>(packing)), schedules, &keys);
      place_parts(part_inputs(problem, packing), keys.inputs, int64_t{Tiles::kKeys} * kDim, schedules,
                  &parts);
      scratch.place(parts.sums, parts.num_sums());
      scratch.place(delta, int64_t{problem.num_tokens} * problem.num_heads);
      if (problem.deterministic) {
        using QueryTiles = QueryGradientTiles<BFloat16, kDim>;
        place_schedule(schedule_inputs(problem, block_sizes<QueryTiles>(packing)), schedules, &queries);
      } else {
        scratch.place(sums, num_sums<Tiles>(keys, packing, problem.num_heads));
      }
    });
    bytes = {schedules.bytes(), scratch.bytes()};
  }
};

/// Number of stages of attend_keys that fit; 0 if none.
int backward_stages(int32_t head_dim, int64_t shared_bytes) {
  return for_head_dim(head_dim, [&]<int kDim>() {
    if (shared_bytes >= BackwardTiles<BFloat16, kDim, 2>::kSharedBytes) return 2;
    return kDim == 256 && shared_bytes >= BackwardTiles<BFloat16, 256, 1>::kSharedBytes ? 1 : 0;
  });
}

}  // namespace
}  // namespace ampere

using namespace ampere;

bool serves_head_dim(int32_t head_dim, int compute_capability, int64_t shared_bytes) {
  if (compute_capability < 80 || (head_dim != 64 && head_dim != 128 && head_dim != 256)) return false;
  return for_head_dim(head_dim, [&]<int kDim>() {
    return shared_bytes >= ForwardTiles<BFloat16, kDim>::kSharedBytes &&
           shared_bytes >= QueryGradientTiles<BFloat16, kDim>::kSharedBytes &&
           backward_stages(kDim, shared_bytes) > 0;
  });
}

AttentionMemory forward_memory(const AttentionProblem& problem) {
  TileSchedule schedule;
  Arena arena(nullptr);
  place_schedule(forward_inputs(problem), arena, &schedule);
  return {arena.bytes(), 0};
}

AttentionMemory backward_memory(const AttentionProblem& problem) {
  return BackwardPlaces(problem, nullptr, nullptr).bytes;
}

void attend(const AttentionProblem& problem, const AttentionOutputs& outputs, void*, void* stream) {
  if (problem.num_tokens == 0) return;
  TileSchedule schedule;
  Arena arena(problem.schedules);
  place_schedule(forward_inputs(problem), arena, &schedule);
  if (!problem.scheduled) build_schedule(schedule, stream);
  const ForwardParams params{schedule,        problem.sources,      problem.q,
                             outputs.out,     outputs.lse,          RowPacking::of(problem.group()),
                             problem.group(), problem.softmax_scale};
  for_element(problem.element, [&]<class Element>(Element) {
    launch_forward<Element>(params, problem.head_dim, problem.num_key_heads, stream);
  });
}

void attend_backward(const AttentionProblem& problem, const AttentionGradients& gradients, void* memory,
                     void* stream) {
  if (problem.num_tokens == 0) return;
  const BackwardPlaces places(problem, problem.schedules, memory);
  if (!problem.scheduled) {
    build_schedule(places.keys, stream);
    order_parts(places.keys, places.parts, stream);
    if (problem.deterministic) build_schedule(places.queries, stream);
  }
  BackwardParams params{places.keys,     places.parts,       problem.sources,      gradients.grad_sources,
                        problem.q,       gradients.grad_out, gradients.out,        gradients.grad_q,
                        gradients.lse,   places.delta,       places.sums,          backward_packing(problem),
                        problem.group(), problem.num_heads,  problem.softmax_scale};
  const int stages = backward_stages(problem.head_dim, device_properties().shared_bytes);
  for_element(problem.element, [&]<class Element>(Element) {
    launch_backward<Element>(params, problem.head_dim, stages, stream);
    if (!problem.deterministic) return;
    params.schedule = places.queries;
    launch_queries<Element>(params, problem.head_dim, stream);
  });
}

}  // namespace espalier::cuda
