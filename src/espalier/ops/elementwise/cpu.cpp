// SPDX-License-Identifier: Apache-2.0
// The elementwise operators on the CPU: tensor interface of kernels/cpu/pointwise/row_math.h.
//
// Results do not depend on the partition over threads: rows are independent, elements without rows are
// processed in spans of fixed length, and sums over rows in blocks of a fixed number of rows.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "espalier/ops/checks.h"
#include "espalier/ops/element_types.h"
#include "espalier/ops/elementwise/arguments.h"
#include "espalier/ops/kernel_choice.h"
#include "espalier/ops/kernels/cpu/pointwise/row_math.h"
#include "espalier/ops/operator.h"

namespace espalier {
namespace {

using detail::data_of;
using detail::ElementType;
using detail::for_element_of;
using detail::mutable_data_of;

// Below this number of elements, starting threads does not pay off (as in ATen).
constexpr int64_t kParallelElements = at::internal::GRAIN_SIZE;
constexpr int64_t kSpanElements = 1 << 12;
// Small enough for float32 sums to be accurate; the sums of blocks are added in float64.
constexpr int64_t kBlockRows = 32;

/// Calls work(begin, end) on parts of [0, count), in all threads if worthwhile. `size`: elements per item.
template <class Work>
void in_parallel(int64_t count, int64_t size, const Work& work) {
  at::parallel_for(0, count, std::max<int64_t>(1, kParallelElements / std::max<int64_t>(1, size)), work);
}

at::Tensor contiguous(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.contiguous() : tensor;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_cpu(const at::Tensor& x_in,
                                                            const TensorOrNone& addend_in,
                                                            const at::Tensor& weight_in, double eps) {
  detail::check_rms_norm(x_in, addend_in, weight_in);
  const at::Tensor x = x_in.contiguous(), addend = contiguous(addend_in), weight = weight_in.contiguous();
  const auto dtype = detail::accumulator_dtype(x.scalar_type());
  const at::Tensor y = at::empty(x.sizes(), x.options());
  const at::Tensor sum = addend.defined() ? at::empty(x.sizes(), x.options()) : at::Tensor();
  const at::Tensor inverse_rms = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(dtype));
  for_element_of(x.scalar_type(), [&]<class Element>(ElementType<Element>) {
    const RowMath<Element>& math = row_math<Element>(chosen_instruction_set());
    const RmsNormForward<Element> norm{weight.size(0),
                                       eps,
                                       data_of<Element>(weight),
                                       data_of<Element>(x),
                                       data_of<Element>(addend),
                                       mutable_data_of<Element>(sum),
                                       mutable_data_of<Element>(y),
                                       mutable_data_of<AccumulatorOf<Element>>(inverse_rms)};
    in_parallel(inverse_rms.numel(), norm.width,
                [&](int64_t begin, int64_t end) { math.rms_norm(norm, begin, end); });
  });
  return {y, sum, inverse_rms};
}

/// Processes rows in blocks; each adds to its own row of `partials` [blocks, width], if defined.
template <class Element>
void run_blocks(const RmsNormBackward<Element>& norm, int64_t num_rows, const at::Tensor& partials) {
  const RowMath<Element>& math = row_math<Element>(chosen_instruction_set());
  auto* sums = mutable_data_of<AccumulatorOf<Element>>(partials);
  const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  in_parallel(num_blocks, kBlockRows * norm.width, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      RmsNormBackward<Element> given = norm;
      if (sums != nullptr) given.grad_weight = sums + block * norm.width;
      math.rms_norm_backward(given, block * kBlockRows, std::min((block + 1) * kBlockRows, num_rows));
    }
  });
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_cpu(const at::Tensor& grad_y_in,
                                                         const TensorOrNone& grad_sum_in,
                                                         const at::Tensor& x_in, const at::Tensor& weight_in,
                                                         const at::Tensor& inverse_rms_in,
                                                         std::array<bool, 2> output_mask) {
  detail::check_rms_norm(x_in, grad_y_in, weight_in);
  detail::check_rms_norm(x_in, grad_sum_in, weight_in);
  const at::Tensor x = x_in.contiguous(), weight = weight_in.contiguous();
  const at::Tensor grad_y = grad_y_in.contiguous(), grad_sum = contiguous(grad_sum_in);
  const at::Tensor inverse_rms = inverse_rms_in.contiguous();
  const int64_t num_rows = inverse_rms.numel(), width = weight.size(0);
  at::Tensor grad_x, grad_weight, partials;
  if (output_mask[0]) grad_x = at::empty(x.sizes(), x.options());
  if (output_mask[1]) {
    partials = at::zeros({(num_rows + kBlockRows - 1) / kBlockRows, width}, inverse_rms.options());
    grad_weight = at::zeros({width}, x.options().dtype(at::kDouble));
  }
  for_element_of(x.scalar_type(), [&]<class Element>(ElementType<Element>) {
    using Scalar = AccumulatorOf<Element>;
    const RmsNormBackward<Element> norm{width,
                                        data_of<Element>(weight),
                                        data_of<Element>(x),
                                        data_of<Scalar>(inverse_rms),
                                        data_of<Element>(grad_y),
                                        data_of<Element>(grad_sum),
                                        mutable_data_of<Element>(grad_x),
                                        nullptr};
    run_blocks(norm, num_rows, partials);
    if (!partials.defined()) return;
    add_partials(data_of<Scalar>(partials), partials.size(0), width, mutable_data_of<double>(grad_weight));
  });
  return {grad_x, grad_weight.defined() ? grad_weight.to(inverse_rms.scalar_type()) : grad_weight};
}

at::Tensor rotary_cpu(const at::Tensor& x_in, const at::Tensor& cos_in, const at::Tensor& sin_in, bool back) {
  detail::check_rotary(x_in, cos_in, sin_in);
  const at::Tensor x = x_in.stride(-1) == 1 ? x_in : x_in.contiguous();
  const at::Tensor cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const at::Tensor out = at::empty(x.sizes(), x.options());
  for_element_of(x.scalar_type(), [&]<class Element>(ElementType<Element>) {
    using Scalar = AccumulatorOf<Element>;
    const RowMath<Element>& math = row_math<Element>(chosen_instruction_set());
    const Rotation<Element> rotation{x.size(1),
                                     x.size(2) / 2,
                                     data_of<Element>(x),
                                     x.stride(0),
                                     x.stride(1),
                                     data_of<Scalar>(cos),
                                     data_of<Scalar>(sin),
                                     back,
                                     mutable_data_of<Element>(out)};
    in_parallel(x.size(0), x.size(1) * x.size(2),
                [&](int64_t begin, int64_t end) { math.rotate(rotation, begin, end); });
  });
  return out;
}

/// Calls work(begin, end) on spans of [0, count).
template <class Work>
void over_runs(int64_t count, const Work& work) {
  in_parallel((count + kSpanElements - 1) / kSpanElements, kSpanElements, [&](int64_t begin, int64_t end) {
    for (int64_t span = begin; span < end; ++span) {
      work(span * kSpanElements, std::min((span + 1) * kSpanElements, count));
    }
  });
}

at::Tensor swiglu_cpu(const at::Tensor& gate_in, const at::Tensor& up_in) {
  detail::check_swiglu(gate_in, up_in);
  const at::Tensor gate = gate_in.contiguous(), up = up_in.contiguous();
  const at::Tensor out = at::empty(gate.sizes(), gate.options());
  for_element_of(gate.scalar_type(), [&]<class Element>(ElementType<Element>) {
    const RowMath<Element>& math = row_math<Element>(chosen_instruction_set());
    over_runs(out.numel(), [&](int64_t begin, int64_t end) {
      math.swiglu(data_of<Element>(gate), data_of<Element>(up), mutable_data_of<Element>(out), begin, end);
    });
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward_cpu(const at::Tensor& grad_in, const at::Tensor& gate_in,
                                                       const at::Tensor& up_in) {
  detail::check_swiglu(gate_in, up_in);
  detail::check_swiglu(gate_in, grad_in);
  const at::Tensor grad = grad_in.contiguous(), gate = gate_in.contiguous(), up = up_in.contiguous();
  const at::Tensor grad_gate = at::empty(gate.sizes(), gate.options());
  const at::Tensor grad_up = at::empty(up.sizes(), up.options());
  for_element_of(gate.scalar_type(), [&]<class Element>(ElementType<Element>) {
    const RowMath<Element>& math = row_math<Element>(chosen_instruction_set());
    const SwigluBackward<Element> given{data_of<Element>(grad), data_of<Element>(gate), data_of<Element>(up),
                                        mutable_data_of<Element>(grad_gate),
                                        mutable_data_of<Element>(grad_up)};
    over_runs(grad.numel(), [&](int64_t begin, int64_t end) { math.swiglu_backward(given, begin, end); });
  });
  return {grad_gate, grad_up};
}

}  // namespace

TORCH_LIBRARY_IMPL(espalier, CPU, m) {
  detail::implement<&rms_norm_cpu, &rms_norm_backward_cpu>(m, "rms_norm");
  m.impl("rotary", &rotary_cpu);
  detail::implement<&swiglu_cpu, &swiglu_backward_cpu>(m, "swiglu");
}

}  // namespace espalier
