// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/pointwise/pointwise.cuh"

#include "espalier/ops/kernels/cuda/launch.cuh"
#include "espalier/ops/kernels/cuda/pointwise/row_math.h"

namespace espalier::cuda {
namespace {

template <class Element, int N>
__global__ void __launch_bounds__(kPointwiseThreads) rotate_entry(RotationWork<Element> work) {
  rotate_kernel<Element, N>(work, kPointwiseThreads);
}

template <class Element>
__global__ void __launch_bounds__(kPointwiseThreads) swiglu_entry(SwigluWork<Element> work) {
  swiglu_kernel(work);
}

template <class Element>
__global__ void __launch_bounds__(kPointwiseThreads) swiglu_backward_entry(SwigluBackwardWork<Element> work) {
  swiglu_backward_kernel(work);
}

bool whole_vectors(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

template <class Element>
bool takes_vectors(const Rotation<Element>& rotation) {
  constexpr int N = kVectorSize<Element>;
  return rotation.half % N == 0 && rotation.token_stride % N == 0 && rotation.head_stride % N == 0 &&
         whole_vectors(rotation.x) && whole_vectors(rotation.cos) && whole_vectors(rotation.sin) &&
         whole_vectors(rotation.out);
}

template <class Element, int N>
void rotate_by(const Rotation<Element>& rotation, int64_t num_tokens, void* stream) {
  const auto work = rotation_work<Element, N>(rotation, num_tokens);
  const int64_t blocks = (num_tokens + work.tokens_per_block - 1) / work.tokens_per_block;
  launch("rotary", &rotate_entry<Element, N>, {static_cast<unsigned>(blocks), kPointwiseThreads, 0, stream},
         work);
}

template <class Element>
Launch over_elements(int64_t count, void* stream) {
  return {static_cast<unsigned>(pointwise_blocks<Element>(count)), kPointwiseThreads, 0, stream};
}

}  // namespace

template <class Element>
void rotate(const Rotation<Element>& rotation, int64_t num_tokens, void* stream) {
  if (takes_vectors(rotation)) return rotate_by<Element, kVectorSize<Element>>(rotation, num_tokens, stream);
  rotate_by<Element, 1>(rotation, num_tokens, stream);
}

template <class Element>
void swiglu(const Element* gate, const Element* up, Element* out, int64_t count, void* stream) {
  launch("swiglu", &swiglu_entry<Element>, over_elements<Element>(count, stream),
         SwigluWork<Element>{gate, up, out, count});
}

template <class Element>
void swiglu_backward(const SwigluBackward<Element>& given, int64_t count, void* stream) {
  launch("swiglu_backward", &swiglu_backward_entry<Element>, over_elements<Element>(count, stream),
         SwigluBackwardWork<Element>{given, count});
}

#define ESPALIER_INSTANTIATE(Element)                                                      \
  template void rotate<Element>(const Rotation<Element>&, int64_t, void*);                 \
  template void swiglu<Element>(const Element*, const Element*, Element*, int64_t, void*); \
  template void swiglu_backward<Element>(const SwigluBackward<Element>&, int64_t, void*);
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(BFloat16)

}  // namespace espalier::cuda
