// SPDX-License-Identifier: Apache-2.0
// The elementwise operators on CUDA: tensor interface of kernels/cuda/pointwise/row_math.h. The kernels
// require contiguous tensors aligned to 16 bytes; others are copied. Rotary accepts strided heads, such as
// slices of a projection, and copies only if the elements of a head are not contiguous.
#include <ATen/ATen.h>

#include "espalier/ops/checks.h"
#include "espalier/ops/cuda_launch.h"
#include "espalier/ops/element_types.h"
#include "espalier/ops/elementwise/arguments.h"
#include "espalier/ops/elementwise/composed.h"
#include "espalier/ops/guarded_output.h"
#include "espalier/ops/kernel_choice.h"
#include "espalier/ops/kernels/cuda/pointwise/row_math.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::data_of;
using detail::ElementType;
using detail::for_element_of;
using detail::LaunchPlace;
using detail::mutable_data_of;

bool is_composed() {
  return !cuda_kernels().elementwise;
}

at::Tensor for_kernel(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const at::Tensor result = tensor.contiguous();
  const bool aligned = reinterpret_cast<uintptr_t>(result.const_data_ptr()) % 16 == 0;
  return aligned ? result : result.clone(at::MemoryFormat::Contiguous);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_cuda(const at::Tensor& x_in,
                                                             const TensorOrNone& addend_in,
                                                             const at::Tensor& weight_in, double eps) {
  if (is_composed()) return composed::rms_norm(x_in.contiguous(), addend_in, weight_in, eps);
  detail::check_rms_norm(x_in, addend_in, weight_in);
  const LaunchPlace place(x_in);
  const at::Tensor x = for_kernel(x_in), addend = for_kernel(addend_in), weight = for_kernel(weight_in);
  const at::Tensor y = output_like(x.sizes(), x.options());
  const at::Tensor sum = addend.defined() ? output_like(x.sizes(), x.options()) : at::Tensor();
  const at::Tensor inverse_rms = output_like(x.sizes().slice(0, x.dim() - 1),
                                             x.options().dtype(detail::accumulator_dtype(x.scalar_type())));
  for_element_of(x.scalar_type(), [&]<class Element>(ElementType<Element>) {
    cuda::rms_norm<Element>(
        {weight.size(0), eps, data_of<Element>(weight), data_of<Element>(x), data_of<Element>(addend),
         mutable_data_of<Element>(sum), mutable_data_of<Element>(y),
         mutable_data_of<AccumulatorOf<Element>>(inverse_rms)},
        inverse_rms.numel(), place.stream());
  });
  return {y, sum, inverse_rms};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_cuda(const at::Tensor& grad_y_in,
                                                          const TensorOrNone& grad_sum_in,
                                                          const at::Tensor& x_in, const at::Tensor& weight_in,
                                                          const at::Tensor& inverse_rms_in,
                                                          std::array<bool, 2> output_mask) {
  if (is_composed()) {
    return composed::rms_norm_backward(grad_y_in.contiguous(), grad_sum_in, x_in.contiguous(), weight_in,
                                       inverse_rms_in, output_mask);
  }
  detail::check_rms_norm(x_in, grad_y_in, weight_in);
  detail::check_rms_norm(x_in, grad_sum_in, weight_in);
  const LaunchPlace place(x_in);
  const at::Tensor grad_y = for_kernel(grad_y_in), grad_sum = for_kernel(grad_sum_in);
  const at::Tensor x = for_kernel(x_in), weight = for_kernel(weight_in);
  const at::Tensor inverse_rms = for_kernel(inverse_rms_in);
  const int64_t width = weight.size(0), num_rows = inverse_rms.numel();
  at::Tensor grad_x, grad_weight;
  for_element_of(x.scalar_type(), [&]<class Element>(ElementType<Element>) {
    using Scalar = AccumulatorOf<Element>;
    if (width > cuda::max_rms_norm_width<Element>()) {
      std::tie(grad_x, grad_weight) =
          composed::rms_norm_backward(grad_y, grad_sum_in, x, weight, inverse_rms, output_mask);
      return;
    }
    at::Tensor partials;
    if (output_mask[0]) grad_x = output_like(x.sizes(), x.options());
    if (output_mask[1]) {
      grad_weight = output_like({width}, inverse_rms.options());
      partials =
          output_like({cuda::rms_norm_partials<Element>(width, num_rows), width}, inverse_rms.options());
    }
    if (!output_mask[0] && !output_mask[1]) return;
    cuda::rms_norm_backward<Element>(
        {width, data_of<Element>(weight), data_of<Element>(x), data_of<Scalar>(inverse_rms),
         data_of<Element>(grad_y), data_of<Element>(grad_sum), mutable_data_of<Element>(grad_x),
         mutable_data_of<Scalar>(grad_weight)},
        num_rows, mutable_data_of<Scalar>(partials), place.stream());
  });
  return {grad_x, grad_weight};
}

at::Tensor rotary_cuda(const at::Tensor& x_in, const at::Tensor& cos_in, const at::Tensor& sin_in,
                       bool back) {
  if (is_composed()) return composed::rotary(x_in.contiguous(), cos_in, sin_in, back);
  detail::check_rotary(x_in, cos_in, sin_in);
  const LaunchPlace place(x_in);
  const at::Tensor x = x_in.stride(-1) == 1 ? x_in : x_in.contiguous();
  const at::Tensor cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const at::Tensor out = output_like(x.sizes(), x.options());
  for_element_of(x.scalar_type(), [&]<class Element>(ElementType<Element>) {
    using Scalar = AccumulatorOf<Element>;
    cuda::rotate<Element>({x.size(1), x.size(2) / 2, data_of<Element>(x), x.stride(0), x.stride(1),
                           data_of<Scalar>(cos), data_of<Scalar>(sin), back, mutable_data_of<Element>(out)},
                          x.size(0), place.stream());
  });
  return out;
}

at::Tensor swiglu_cuda(const at::Tensor& gate_in, const at::Tensor& up_in) {
  if (is_composed()) return composed::swiglu(gate_in.contiguous(), up_in.contiguous());
  detail::check_swiglu(gate_in, up_in);
  const LaunchPlace place(gate_in);
  const at::Tensor gate = for_kernel(gate_in), up = for_kernel(up_in);
  const at::Tensor out = output_like(gate.sizes(), gate.options());
  for_element_of(gate.scalar_type(), [&]<class Element>(ElementType<Element>) {
    cuda::swiglu(data_of<Element>(gate), data_of<Element>(up), mutable_data_of<Element>(out), out.numel(),
                 place.stream());
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward_cuda(const at::Tensor& grad_in, const at::Tensor& gate_in,
                                                        const at::Tensor& up_in) {
  if (is_composed()) {
    return composed::swiglu_backward(grad_in.contiguous(), gate_in.contiguous(), up_in.contiguous());
  }
  detail::check_swiglu(gate_in, up_in);
  detail::check_swiglu(gate_in, grad_in);
  const LaunchPlace place(gate_in);
  const at::Tensor grad = for_kernel(grad_in), gate = for_kernel(gate_in), up = for_kernel(up_in);
  const at::Tensor grad_gate = output_like(gate.sizes(), gate.options());
  const at::Tensor grad_up = output_like(up.sizes(), up.options());
  for_element_of(gate.scalar_type(), [&]<class Element>(ElementType<Element>) {
    cuda::swiglu_backward<Element>({data_of<Element>(grad), data_of<Element>(gate), data_of<Element>(up),
                                    mutable_data_of<Element>(grad_gate), mutable_data_of<Element>(grad_up)},
                                   grad.numel(), place.stream());
  });
  return {grad_gate, grad_up};
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CUDA, m) {
  m.impl("rms_norm", detail::kKernel<&rms_norm_cuda>);
  m.impl("rms_norm_backward", detail::kKernel<&rms_norm_backward_cuda>);
  m.impl("rotary", &rotary_cuda);
  m.impl("swiglu", &swiglu_cuda);
  m.impl("swiglu_backward", &swiglu_backward_cuda);
}

}  // namespace espalier
