// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/pointwise/rms_norm.cuh"

#include "espalier/ops/kernels/cuda/device.h"
#include "espalier/ops/kernels/cuda/launch.cuh"
#include "espalier/ops/kernels/cuda/pointwise/row_math.h"

namespace espalier::cuda {
namespace {

constexpr int64_t kSumBytes = 32 * 33 * sizeof(double);

template <class Element, int N>
__global__ void __launch_bounds__(kMaxTeam) forward(RmsNormWork<Element> work) {
  rms_norm_kernel<Element, N>(work);
}

template <class Element, int N>
__global__ void __launch_bounds__(kMaxTeam) backward(RmsNormBackwardWork<Element> work) {
  rms_norm_backward_kernel<Element, N>(work);
}

template <class Scalar>
__global__ void __launch_bounds__(1024) sum_partials(PartialSumsWork<Scalar> work) {
  sum_partials_kernel(work);
}

dim3 blocks_for(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

}  // namespace

template <class Element>
void rms_norm(const RmsNormForward<Element>& norm, int64_t num_rows, void* stream) {
  const RmsNormWork<Element> work{norm, num_rows, row_teams<Element>(norm.width)};
  const Launch how{blocks_for(num_rows, work.teams.per_block()), work.teams.threads,
                   kTeamBufferBytes<AccumulatorOf<Element>>, stream};
  launch("rms_norm", work.teams.vectors ? &forward<Element, kVectorSize<Element>> : &forward<Element, 1>, how,
         work);
}

template <class Element>
int64_t max_rms_norm_width() {
  using Scalar = AccumulatorOf<Element>;
  return (device_properties().shared_bytes - kTeamBufferBytes<Scalar>) / static_cast<int64_t>(sizeof(Scalar));
}

template <class Element>
int64_t rms_norm_partials(int64_t width, int64_t num_rows) {
  RmsNormBackward<Element> norm{};
  norm.width = width;
  return backward_work(norm, num_rows, static_cast<AccumulatorOf<Element>*>(nullptr)).blocks();
}

template <class Element>
void rms_norm_backward(const RmsNormBackward<Element>& norm, int64_t num_rows,
                       AccumulatorOf<Element>* partials, void* stream) {
  using Scalar = AccumulatorOf<Element>;
  const auto work = backward_work(norm, num_rows, norm.grad_weight == nullptr ? nullptr : partials);
  const Launch how{blocks_for(num_rows, work.rows_per_block()), work.teams.threads,
                   backward_shared_bytes(work), stream};
  launch("rms_norm_backward",
         work.teams.vectors ? &backward<Element, kVectorSize<Element>> : &backward<Element, 1>, how, work);
  if (norm.grad_weight == nullptr) return;
  const PartialSumsWork<Scalar> sums{partials, work.blocks(), norm.width, norm.grad_weight};
  launch("rms_norm_backward: sums", &sum_partials<Scalar>,
         {blocks_for(norm.width, 32), 1024, kSumBytes, stream}, sums);
}

#define ESPALIER_INSTANTIATE(Element)                                                \
  template void rms_norm<Element>(const RmsNormForward<Element>&, int64_t, void*);   \
  template int64_t max_rms_norm_width<Element>();                                    \
  template int64_t rms_norm_partials<Element>(int64_t, int64_t);                     \
  template void rms_norm_backward<Element>(const RmsNormBackward<Element>&, int64_t, \
                                           AccumulatorOf<Element>*, void*);
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(BFloat16)

}  // namespace espalier::cuda
