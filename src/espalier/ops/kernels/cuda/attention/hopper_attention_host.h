// SPDX-License-Identifier: Apache-2.0
// Host code of attention on Hopper: scratch memory, schedules, maps and launches. `launcher` targets the GPU
// or the emulator, so that it is tested without a GPU:
//   Target target()
//   void schedule(schedule)                  lists its tiles, and what follows is of it:
//   void order_parts(schedule, parts)
//   void place_keys(params)                  a block of 32 threads for every key block
//   void write_maps(maps, to)                to the GPU's memory
//   void forward<Element, kHeadDim>(params), void backward<Element, kHeadDim>(params)
//   void queries<Element, kHeadDim>(params)  backward_queries
// Deterministic backward skips dQ in the kernel over key blocks (null grad_q in its parameters);
// backward_queries computes it.
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention_queries.h"
#include "espalier/ops/kernels/cuda/device.h"

namespace espalier::cuda::hopper {

/// The GPU of a call.
struct Target {
  DeviceProperties device;
  CutRule cuts;
};

/// Rows per tile of queries, and keys per tile.
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

/// The iteration space of a kernel.
struct Pass {
  TileSize size;
  HeadPacking packing;
  int32_t key_heads_at_once;
  bool backward;  // by key blocks
};

/// Number of items of `bytes` each to process at a time, so that they fit two thirds of the L2 cache. The
/// smallest number with the same number of rounds.
inline int32_t in_cache(int64_t bytes, int32_t count, const Target& target) {
  const int64_t fitting =
      std::clamp<int64_t>(target.device.cache_bytes * 2 / 3 / std::max<int64_t>(bytes, 1), 1, count);
  const int64_t rounds = (count + fitting - 1) / fitting;
  return static_cast<int32_t>((count + rounds - 1) / rounds);
}

/// Tiles of queries: the blocks of threads of a key head share its keys and values.
template <template <class, int> class Tiles>
Pass query_pass(const AttentionProblem& problem, const HeadPacking& packing, const Target& target) {
  int64_t keys = problem.num_tokens;
  for (int32_t i = 0; i < problem.num_rectangles; ++i) {
    keys += problem.host_rectangles[i].key_end - problem.host_rectangles[i].key_begin;
  }
  return {tile_size<Tiles>(problem.head_dim), packing,
          in_cache(keys * problem.head_dim * 2 * kElementBytes, problem.num_key_heads, target), false};
}
inline Pass forward_pass(const AttentionProblem& problem, const Target& target) {
  return query_pass<ForwardTiles>(problem, HeadPacking::of(problem.group()), target);
}

/// Key blocks: the thread blocks of a key head share all rows of Q, dO and the dQ accumulators of their
/// packed heads, so the number of packed heads is limited to what fits the cache.
inline Pass key_pass(const AttentionProblem& problem, const Target& target) {
  const int64_t sum_bytes = problem.deterministic ? 0 : int64_t{sizeof(float)};
  const int64_t head_bytes = int64_t{problem.num_tokens} * problem.head_dim * (2 * kElementBytes + sum_bytes);
  const HeadPacking packing = HeadPacking::of(problem.group(), in_cache(head_bytes, problem.group(), target));
  return {tile_size<BackwardTiles>(problem.head_dim), packing,
          in_cache(head_bytes * packing.packed(), problem.num_key_heads, target), true};
}
/// Runs after key_pass, whose statistics it reads.
inline Pass query_gradient_pass(const AttentionProblem& problem, const Target& target) {
  return query_pass<QueryGradientTiles>(problem, key_pass(problem, target).packing, target);
}

inline ScheduleInputs schedule_inputs(const AttentionProblem& problem, const Pass& pass) {
  ScheduleInputs inputs{problem.subtree_end,
                        problem.num_tokens,
                        problem.rectangles,
                        problem.num_rectangles,
                        0,
                        {pass.packing.tokens(pass.size.rows), pass.size.keys}};
  for (int32_t i = 0; i < problem.num_rectangles; ++i) {
    inputs.num_context_blocks += num_context_blocks(problem.host_rectangles[i], pass.size.keys);
  }
  return inputs;
}

inline PartInputs part_inputs(const AttentionProblem& problem, const Pass& pass, const Target& target) {
  return PartInputs::of(problem.num_key_heads, pass.key_heads_at_once, pass.packing.sets, target.cuts);
}

/// Data that depends only on forest, rectangles and sizes, in memory shared with later calls.
struct PassSchedule {
  TileSchedule tiles{};
  KeyPlace* places = nullptr;  // by key block
  int32_t* ends = nullptr;     // of a pass by queries, as is
  WorkCounter* taken = nullptr;
  KeyParts parts{};  // of one by keys; its sums are in scratch memory
};

/// Scratch of a call.
struct Scratch {
  simt::TensorMap* context_maps = nullptr;
  float* key_sums = nullptr;  // backward only, as the following
  float* statistics = nullptr;
  float* grad_q = nullptr;  // unless deterministic
};

inline void place_pass(const AttentionProblem& problem, const Pass& pass, const Target& target, Arena& arena,
                       PassSchedule* schedule) {
  const ScheduleInputs inputs = schedule_inputs(problem, pass);
  place_schedule(inputs, arena, &schedule->tiles);
  arena.place(schedule->places, inputs.num_key_blocks());
  if (pass.backward) {
    const int64_t key_floats = int64_t{pass.size.keys} * problem.head_dim;
    place_parts(part_inputs(problem, pass, target), inputs, key_floats, arena, &schedule->parts);
  } else {
    arena.place(schedule->ends, int64_t{inputs.num_key_blocks()} * pass.size.keys);
    arena.place(schedule->taken, 1);
  }
}

inline void place_scratch(const AttentionProblem& problem, const Pass& pass, const PassSchedule& schedule,
                          Arena& arena, Scratch* scratch) {
  arena.place(scratch->context_maps, 2 * int64_t{problem.num_rectangles});
  if (!pass.backward) return;
  const int64_t rows = int64_t{schedule.tiles.inputs.num_query_blocks()} * problem.num_key_heads *
                       pass.packing.sets * pass.size.rows;
  arena.place(scratch->key_sums, schedule.parts.num_sums());
  arena.place(scratch->statistics, 2 * rows);
  if (!problem.deterministic) arena.place(scratch->grad_q, rows * problem.head_dim);
}

inline AttentionMemory memory_of(const AttentionProblem& problem, const Pass& pass, const Target& target) {
  PassSchedule schedule;
  Scratch scratch;
  Arena schedules(nullptr), rest(nullptr);
  place_pass(problem, pass, target, schedules, &schedule);
  place_scratch(problem, pass, schedule, rest, &scratch);
  return {schedules.bytes(), rest.bytes()};
}

struct PlaceParams {
  TileSchedule schedule;
  int keys;
  KeyPlace* places;
  int32_t* ends;
  WorkCounter* taken;  // begins with nothing; or null
};
ESPALIER_KERNEL void place_keys(const PlaceParams& params) {
  if (params.taken != nullptr && simt::block_x() == 0 && simt::lane() == 0) *params.taken = {0, 0};
  place_keys(params.schedule, params.keys, params.places, params.ends);
}

/// The schedule, filled, and maps of its keys.
struct Preparation {
  PassSchedule schedule;
  Scratch scratch;
  KeyMaps maps{};
};

/// `problem.schedules` must belong to this pass.
template <class Launcher>
Preparation prepare(const AttentionProblem& problem, const Pass& pass, void* memory, Launcher& launcher) {
  Preparation result;
  PassSchedule& schedule = result.schedule;
  Arena schedules(problem.schedules), rest(memory);
  place_pass(problem, pass, launcher.target(), schedules, &schedule);
  place_scratch(problem, pass, schedule, rest, &result.scratch);
  if (!problem.scheduled) {
    launcher.schedule(schedule.tiles);
    launcher.place_keys(
        PlaceParams{schedule.tiles, pass.size.keys, schedule.places, schedule.ends, schedule.taken});
    if (pass.backward) launcher.order_parts(schedule.tiles, schedule.parts);
  }
  schedule.parts.sums = result.scratch.key_sums;
  const KeySource& own = problem.host_sources[0];
  result.maps = {map_keys(problem, own.k, 0, problem.num_tokens, pass.size.keys),
                 map_keys(problem, own.v, 0, problem.num_tokens, pass.size.keys),
                 result.scratch.context_maps};
  launcher.write_maps(map_context(problem, problem.host_sources, pass.size.keys),
                      result.scratch.context_maps);
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

inline AttentionMemory forward_memory(const AttentionProblem& problem, const Target& target) {
  return memory_of(problem, forward_pass(problem, target), target);
}
/// Memory of the kernels over key blocks; that of the dQ kernel follows.
inline AttentionMemory key_memory(const AttentionProblem& problem, const Target& target) {
  return memory_of(problem, key_pass(problem, target), target);
}
inline AttentionMemory backward_memory(const AttentionProblem& problem, const Target& target) {
  const AttentionMemory keys = key_memory(problem, target);
  if (!problem.deterministic) return keys;
  const AttentionMemory queries = memory_of(problem, query_gradient_pass(problem, target), target);
  return {keys.schedules + queries.schedules, keys.scratch + queries.scratch};
}

inline TileOrder tile_order(const AttentionProblem& problem, const Pass& pass, const TileSchedule& schedule) {
  const int32_t sets = pass.packing.sets;
  return {schedule.inputs.num_query_blocks(), problem.num_key_heads * sets, pass.key_heads_at_once * sets};
}

template <class Launcher>
void attend(const AttentionProblem& problem, const AttentionOutputs& outputs, void* scratch,
            Launcher& launcher) {
  const Pass pass = forward_pass(problem, launcher.target());
  const Preparation ready = prepare(problem, pass, scratch, launcher);
  const TileOrder order = tile_order(problem, pass, ready.schedule.tiles);
  const ForwardParams params{map_queries(problem, problem.q, pass.packing, pass.size.rows),
                             map_queries(problem, outputs.out, pass.packing, kRowsOfWarpgroup),
                             ready.maps,
                             problem,
                             outputs,
                             ready.schedule.tiles,
                             ready.schedule.places,
                             ready.schedule.ends,
                             pass.packing,
                             order,
                             lesser(order.blocks(), launcher.target().device.multiprocessors),
                             ready.schedule.taken};
  dispatch(problem,
           [&]<class Element, int kHeadDim>() { launcher.template forward<Element, kHeadDim>(params); });
}

/// Computes dQ only, after the kernels of `keys`.
template <class Launcher>
void attend_queries(const AttentionProblem& problem, const BackwardParams& keys, void* scratch,
                    Launcher& launcher) {
  const Pass pass = query_gradient_pass(problem, launcher.target());
  const Preparation ready = prepare(problem, pass, scratch, launcher);
  const QueryGradientParams params{
      map_queries(problem, problem.q, pass.packing, pass.size.rows),
      map_queries(problem, keys.gradients.grad_out, pass.packing, pass.size.rows),
      map_queries(problem, keys.gradients.grad_q, pass.packing, kRowsOfWarpgroup),
      ready.maps,
      problem,
      keys.gradients,
      ready.schedule.tiles,
      ready.schedule.places,
      ready.schedule.ends,
      pass.packing,
      tile_order(problem, pass, ready.schedule.tiles),
      keys.statistics,
      tile_size<BackwardTiles>(problem.head_dim).rows,
      keys.schedule.inputs.num_query_blocks()};
  dispatch(problem,
           [&]<class Element, int kHeadDim>() { launcher.template queries<Element, kHeadDim>(params); });
}

template <class Launcher>
void attend_backward(const AttentionProblem& problem, const AttentionGradients& gradients, void* scratch,
                     Launcher& launcher) {
  const Target target = launcher.target();
  const Pass pass = key_pass(problem, target);
  const Preparation ready = prepare(problem, pass, scratch, launcher);
  const BackwardParams params{map_queries(problem, problem.q, pass.packing, pass.size.rows),
                              map_queries(problem, gradients.grad_out, pass.packing, pass.size.rows),
                              ready.maps,
                              problem,
                              gradients,
                              ready.schedule.tiles,
                              ready.schedule.places,
                              pass.packing,
                              ready.schedule.parts,
                              ready.scratch.statistics,
                              ready.scratch.grad_q};
  dispatch(problem,
           [&]<class Element, int kHeadDim>() { launcher.template backward<Element, kHeadDim>(params); });
  if (!problem.deterministic) return;
  const AttentionMemory used = key_memory(problem, target);
  AttentionProblem rest = problem;
  rest.schedules = static_cast<std::byte*>(problem.schedules) + used.schedules;
  attend_queries(rest, params, static_cast<std::byte*>(scratch) + used.scratch, launcher);
}

}  // namespace espalier::cuda::hopper
