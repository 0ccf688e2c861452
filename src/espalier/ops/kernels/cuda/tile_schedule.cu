// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/launch.cuh"
#include "espalier/ops/kernels/cuda/tile_schedule.h"

namespace espalier::cuda {
namespace {

__global__ void __launch_bounds__(kScheduleThreads) list_key_blocks_kernel(const TileSchedule schedule) {
  list_key_blocks(schedule);
}
__global__ void __launch_bounds__(kScheduleThreads) link_blocks_kernel(const TileSchedule schedule) {
  link_blocks(schedule);
}
__global__ void __launch_bounds__(kScheduleThreads) order_blocks_kernel(const TileSchedule schedule) {
  order_blocks(schedule);
}

}  // namespace

TileSchedule build_schedule(const ScheduleInputs& inputs, void* memory, void* stream) {
  TileSchedule schedule;
  place_schedule(inputs, static_cast<std::byte*>(memory), &schedule);
  const auto grid = [&](int32_t warps) {
    return Launch{{static_cast<unsigned>(schedule_grid(warps)), 1, 1}, kScheduleThreads, 0, stream};
  };
  const int32_t blocks = inputs.num_key_blocks() + inputs.num_query_blocks();
  launch("list_key_blocks", list_key_blocks_kernel, grid(inputs.num_forest_blocks() + inputs.num_rectangles),
         schedule);
  launch("link_blocks", link_blocks_kernel, grid(blocks), schedule);
  launch("order_blocks", order_blocks_kernel, grid(blocks), schedule);
  return schedule;
}

}  // namespace espalier::cuda
