// SPDX-License-Identifier: Apache-2.0
// The host's side of attention on Hopper: scratch memory, schedules, maps, and what is launched with them. By
// `launcher` it reaches the GPU, or the emulator, which is why it is tested where there is no GPU:
//   TileSchedule schedule(inputs, memory)
//   void place_keys(params)                  a block of 32 threads for every key block of params.schedule
//   void write_maps(maps, to)                to the GPU's memory
//   void forward<Element, kHeadDim>(params), void backward<Element, kHeadDim>(params)
//   void queries<Element, kHeadDim>(params)  backward_queries
// Deterministic backward leaves dQ out of the kernel that goes by key blocks (no grad_q in its parameters),
// and backward_queries works it out.
#pragma once

#include "espalier/ops/kernels/cuda/hopper_attention_queries.h"

namespace espalier::cuda::hopper {

/// Rows of a tile of queries, and keys of a tile.
struct TileSize {
  int rows;
  int keys;
};

/// call.operator()<kHeadDim>() for a head dimension that there are kernels for.
template <class Call>
void dispatch_head_dim(int32_t head_dim, const Call& call) {
  if (head_dim == 64) return call.template operator()<64>();
  if (head_dim == 128) return call.template operator()<128>();
  call.template operator()<256>();
}

template <template <class, int> class Tiles>
TileSize tile_size(int32_t head_dim) {
  TileSize size{};
  dispatch_head_dim(head_dim, [&]<int kHeadDim>() {
    size = {Tiles<BFloat16, kHeadDim>::kRows, Tiles<BFloat16, kHeadDim>::kKeys};
  });
  return size;
}

inline ScheduleInputs schedule_inputs(const AttentionProblem& problem, const TileSize& size) {
  const HeadPacking packing = HeadPacking::of(problem.group());
  ScheduleInputs inputs{problem.subtree_end,
                        problem.num_tokens,
                        problem.rectangles,
                        problem.num_rectangles,
                        0,
                        {packing.tokens(size.rows), size.keys}};
  for (int32_t i = 0; i < problem.num_rectangles; ++i) {
    inputs.num_context_blocks += num_context_blocks(problem.host_rectangles[i], size.keys);
  }
  return inputs;
}

/// What a call keeps in its scratch memory.
struct Scratch {
  std::byte* schedule;
  simt::TensorMap* context_maps;
  KeyPlace* places;
  int32_t* ends;      // forward
  float* statistics;  // backward, as is grad_q
  float* grad_q;
};

/// Lays it out in `memory`, which may be null. Returns the bytes that it takes.
inline int64_t place_scratch(const AttentionProblem& problem, const ScheduleInputs& inputs,
                             const TileSize& size, bool backward, void* memory, Scratch* scratch) {
  int64_t bytes = 0;
  const auto place = [&]<class T>(T*& array, int64_t count) {
    array = memory == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<std::byte*>(memory) + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
  };
  TileSchedule none;
  place(scratch->schedule, place_schedule(inputs, nullptr, &none));
  place(scratch->context_maps, 2 * int64_t{problem.num_rectangles});
  place(scratch->places, inputs.num_key_blocks());
  place(scratch->ends, backward ? 0 : int64_t{inputs.num_key_blocks()} * size.keys);
  const int64_t rows = !backward ? 0
                                 : int64_t{inputs.num_query_blocks()} * problem.num_key_heads *
                                       HeadPacking::of(problem.group()).sets * size.rows;
  place(scratch->statistics, 2 * rows);
  place(scratch->grad_q, problem.deterministic ? 0 : rows * problem.head_dim);
  if (problem.deterministic) scratch->grad_q = nullptr;
  return bytes;
}

inline int64_t scratch_bytes(const AttentionProblem& problem, const TileSize& size, bool backward) {
  Scratch scratch;
  return place_scratch(problem, schedule_inputs(problem, size), size, backward, nullptr, &scratch);
}

struct PlaceParams {
  TileSchedule schedule;
  int keys;
  KeyPlace* places;
  int32_t* ends;
};

/// The schedule, where its keys are, and maps of them.
struct Preparation {
  Scratch scratch;
  TileSchedule schedule;
  KeyMaps maps;
  HeadPacking packing;
};

template <class Launcher>
Preparation prepare(const AttentionProblem& problem, const TileSize& size, bool backward, void* memory,
                    Launcher& launcher) {
  Preparation result;
  const ScheduleInputs inputs = schedule_inputs(problem, size);
  place_scratch(problem, inputs, size, backward, memory, &result.scratch);
  result.packing = HeadPacking::of(problem.group());
  result.schedule = launcher.schedule(inputs, result.scratch.schedule);
  launcher.place_keys(PlaceParams{result.schedule, size.keys, result.scratch.places,
                                  backward ? nullptr : result.scratch.ends});
  const KeySource& own = problem.host_sources[0];
  result.maps = {map_keys(problem, own.k, 0, problem.num_tokens, size.keys),
                 map_keys(problem, own.v, 0, problem.num_tokens, size.keys), result.scratch.context_maps};
  launcher.write_maps(map_context(problem, problem.host_sources, size.keys), result.scratch.context_maps);
  return result;
}

/// call.operator()<Element, kHeadDim>() for the problem's element and head dimension.
template <class Call>
void dispatch(const AttentionProblem& problem, const Call& call) {
  dispatch_head_dim(problem.head_dim, [&]<int kHeadDim>() {
    problem.element == ElementKind::kBFloat16 ? call.template operator()<BFloat16, kHeadDim>()
                                              : call.template operator()<Float16, kHeadDim>();
  });
}

inline int64_t forward_scratch_bytes(const AttentionProblem& problem) {
  return scratch_bytes(problem, tile_size<ForwardTiles>(problem.head_dim), /*backward=*/false);
}
/// Of the kernels that go by key blocks; of dQ's own what follows.
inline int64_t key_scratch_bytes(const AttentionProblem& problem) {
  return scratch_bytes(problem, tile_size<BackwardTiles>(problem.head_dim), /*backward=*/true);
}
inline int64_t backward_scratch_bytes(const AttentionProblem& problem) {
  const int64_t queries =
      problem.deterministic
          ? scratch_bytes(problem, tile_size<QueryGradientTiles>(problem.head_dim), /*backward=*/false)
          : 0;
  return key_scratch_bytes(problem) + queries;
}

template <class Launcher>
void attend(const AttentionProblem& problem, const AttentionOutputs& outputs, void* scratch,
            Launcher& launcher) {
  const TileSize size = tile_size<ForwardTiles>(problem.head_dim);
  const Preparation ready = prepare(problem, size, /*backward=*/false, scratch, launcher);
  const ForwardParams params{map_queries(problem, problem.q, ready.packing, size.rows),
                             ready.maps,
                             problem,
                             outputs,
                             ready.schedule,
                             ready.scratch.places,
                             ready.scratch.ends,
                             ready.packing};
  dispatch(problem,
           [&]<class Element, int kHeadDim>() { launcher.template forward<Element, kHeadDim>(params); });
}

/// dQ alone, after the kernels of `keys`.
template <class Launcher>
void attend_queries(const AttentionProblem& problem, const BackwardParams& keys, void* scratch,
                    Launcher& launcher) {
  const TileSize size = tile_size<QueryGradientTiles>(problem.head_dim);
  const Preparation ready = prepare(problem, size, /*backward=*/false, scratch, launcher);
  const QueryGradientParams params{map_queries(problem, problem.q, ready.packing, size.rows),
                                   map_queries(problem, keys.gradients.grad_out, ready.packing, size.rows),
                                   ready.maps,
                                   problem,
                                   keys.gradients,
                                   ready.schedule,
                                   ready.scratch.places,
                                   ready.scratch.ends,
                                   ready.packing,
                                   keys.statistics,
                                   tile_size<BackwardTiles>(problem.head_dim).rows,
                                   keys.schedule.inputs.num_query_blocks()};
  dispatch(problem,
           [&]<class Element, int kHeadDim>() { launcher.template queries<Element, kHeadDim>(params); });
}

template <class Launcher>
void attend_backward(const AttentionProblem& problem, const AttentionGradients& gradients, void* scratch,
                     Launcher& launcher) {
  const TileSize size = tile_size<BackwardTiles>(problem.head_dim);
  const Preparation ready = prepare(problem, size, /*backward=*/true, scratch, launcher);
  const BackwardParams params{map_queries(problem, problem.q, ready.packing, size.rows),
                              map_queries(problem, gradients.grad_out, ready.packing, size.rows),
                              ready.maps,
                              problem,
                              gradients,
                              ready.schedule,
                              ready.scratch.places,
                              ready.packing,
                              ready.scratch.statistics,
                              ready.scratch.grad_q};
  dispatch(problem,
           [&]<class Element, int kHeadDim>() { launcher.template backward<Element, kHeadDim>(params); });
  if (!problem.deterministic) return;
  attend_queries(problem, params, static_cast<std::byte*>(scratch) + key_scratch_bytes(problem), launcher);
}

}  // namespace espalier::cuda::hopper
