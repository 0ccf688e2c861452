// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/key_parts.h"
#include "espalier/ops/kernels/cuda/launch.cuh"

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

struct PartParams {
  TileSchedule schedule;
  KeyParts parts;
};
__global__ void __launch_bounds__(kScheduleThreads) order_parts_kernel(const PartParams params) {
  order_parts(params.schedule, params.parts);
}

}  // namespace

void build_schedule(const TileSchedule& schedule, void* stream) {
  const ScheduleInputs& inputs = schedule.inputs;
  const auto grid = [&](int32_t warps) {
    return Launch{{static_cast<unsigned>(schedule_grid(warps)), 1, 1}, kScheduleThreads, 0, stream};
  };
  const int32_t blocks = inputs.num_key_blocks() + inputs.num_query_blocks();
  launch("list_key_blocks", list_key_blocks_kernel, grid(inputs.num_forest_blocks() + inputs.num_rectangles),
         schedule);
  launch("link_blocks", link_blocks_kernel, grid(blocks), schedule);
  launch("order_blocks", order_blocks_kernel, grid(inputs.num_query_blocks()), schedule);
}

void order_parts(const TileSchedule& schedule, const KeyParts& parts, void* stream) {
  const auto blocks = static_cast<unsigned>(schedule_grid(part_warps(schedule)));
  launch("order_parts", order_parts_kernel, {{blocks, 1, 1}, kScheduleThreads, 0, stream},
         PartParams{schedule, parts});
}

}  // namespace espalier::cuda
