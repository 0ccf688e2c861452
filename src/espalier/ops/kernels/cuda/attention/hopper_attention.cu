// SPDX-License-Identifier: Apache-2.0
// Attention for Hopper behind the interface of tree_attention.h.
#include "espalier/ops/kernels/cuda/attention/hopper_attention.cuh"
#include "espalier/ops/kernels/cuda/attention/hopper_attention_host.h"

namespace espalier::cuda::hopper {
namespace {

constexpr int kMapsAtOnce = 128;

/// Tensor maps are passed as kernel parameters, so no host memory has to outlive the call.
struct MapBatch {
  simt::TensorMap maps[kMapsAtOnce];
  simt::TensorMap* to;
  int32_t count;
};

__global__ void __launch_bounds__(kMapsAtOnce) write_maps_kernel(const __grid_constant__ MapBatch batch) {
  const int i = simt::thread();
  if (i < batch.count) batch.to[i] = batch.maps[i];
}

void write_maps(const std::vector<simt::TensorMap>& maps, simt::TensorMap* to, void* stream) {
  for (size_t begin = 0; begin < maps.size(); begin += kMapsAtOnce) {
    MapBatch batch;
    batch.to = to + begin;
    batch.count = static_cast<int32_t>(std::min<size_t>(kMapsAtOnce, maps.size() - begin));
    std::copy_n(maps.begin() + static_cast<int64_t>(begin), batch.count, batch.maps);
    launch("write_maps", write_maps_kernel, {{1, 1, 1}, kMapsAtOnce, 0, stream}, batch);
  }
}

__global__ void __launch_bounds__(simt::kWarpSize) place_keys_kernel(const PlaceParams params) {
  place_keys(params);
}

Target own_target() {
  const DeviceProperties& device = device_properties();
  return {device, {device.multiprocessors}};
}

struct GpuLauncher {
  void* stream;

  static Target target() { return own_target(); }

  void schedule(const TileSchedule& schedule) const { build_schedule(schedule, stream); }
  void order_parts(const TileSchedule& schedule, const KeyParts& parts) const {
    cuda::order_parts(schedule, parts, stream);
  }
  void place_keys(const PlaceParams& params) const {
    const unsigned blocks = params.schedule.inputs.num_key_blocks();
    launch("place_keys", place_keys_kernel, {{blocks, 1, 1}, simt::kWarpSize, 0, stream}, params);
  }
  void write_maps(const std::vector<simt::TensorMap>& maps, simt::TensorMap* to) const {
    hopper::write_maps(maps, to, stream);
  }
  template <class Element, int kHeadDim>
  void forward(const ForwardParams& params) const {
    launch_forward<Element, kHeadDim>(params, stream);
  }
  template <class Element, int kHeadDim>
  void backward(const BackwardParams& params) const {
    launch_backward<Element, kHeadDim>(params, stream);
  }
  template <class Element, int kHeadDim>
  void queries(const QueryGradientParams& params) const {
    launch_queries<Element, kHeadDim>(params, stream);
  }
};

constexpr int64_t kMostShared = 227 << 10;  // per thread block
static_assert(ForwardTiles<BFloat16, 64>::kSharedBytes <= kMostShared &&
              ForwardTiles<BFloat16, 128>::kSharedBytes <= kMostShared &&
              ForwardTiles<BFloat16, 256>::kSharedBytes <= kMostShared &&
              BackwardTiles<BFloat16, 64>::kSharedBytes <= kMostShared &&
              BackwardTiles<BFloat16, 128>::kSharedBytes <= kMostShared &&
              BackwardTiles<BFloat16, 256>::kSharedBytes <= kMostShared &&
              QueryGradientTiles<BFloat16, 64>::kSharedBytes <= kMostShared &&
              QueryGradientTiles<BFloat16, 128>::kSharedBytes <= kMostShared &&
              QueryGradientTiles<BFloat16, 256>::kSharedBytes <= kMostShared);

AttentionSupport support(ElementKind, int32_t head_dim, int compute_capability, int64_t shared_bytes) {
  const bool here = compute_capability == 90 && shared_bytes >= kMostShared &&
                    (head_dim == 64 || head_dim == 128 || head_dim == 256);
  return {here, here};
}

bool takes(const AttentionProblem& problem, bool) {
  return problem.host_sources != nullptr && problem.num_tokens > 0 && problem.softmax_scale > 0;
}

AttentionMemory forward_memory_on_gpu(const AttentionProblem& problem) {
  return forward_memory(problem, own_target());
}
AttentionMemory backward_memory_on_gpu(const AttentionProblem& problem) {
  return backward_memory(problem, own_target());
}

void attend_on_gpu(const AttentionProblem& problem, const AttentionOutputs& outputs, void* scratch,
                   void* stream) {
  GpuLauncher launcher{stream};
  attend(problem, outputs, scratch, launcher);
}
void attend_backward_on_gpu(const AttentionProblem& problem, const AttentionGradients& gradients,
                            void* scratch, void* stream) {
  GpuLauncher launcher{stream};
  attend_backward(problem, gradients, scratch, launcher);
}

}  // namespace
}  // namespace espalier::cuda::hopper

namespace espalier::cuda {

const AttentionImplementation& hopper_attention() {
  static const AttentionImplementation implementation{&hopper::support,
                                                      &hopper::takes,
                                                      &hopper::forward_memory_on_gpu,
                                                      &hopper::backward_memory_on_gpu,
                                                      &hopper::attend_on_gpu,
                                                      &hopper::attend_backward_on_gpu};
  return implementation;
}

}  // namespace espalier::cuda
