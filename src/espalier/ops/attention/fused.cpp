// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/fused.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <cstring>
#include <exception>
#include <limits>

#include "espalier/ops/attention/one_width.h"
#include "espalier/ops/attention/schedule_cache.h"
#include "espalier/ops/cuda_launch.h"
#include "espalier/ops/guarded_output.h"

#ifdef ESPALIER_CUDA_KERNELS
#include "espalier/ops/kernels/cuda/device.h"
#endif

namespace espalier::fused {

#ifdef ESPALIER_CUDA_KERNELS

bool serves(at::ScalarType dtype, int64_t head_dim) {
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  try {
    const cuda::DeviceProperties& device = cuda::device_properties();
    return cuda::serves_head_dim(static_cast<int32_t>(head_dim), device.compute_capability,
                                 device.shared_bytes);
  } catch (const std::exception&) {
    return false;  // no device
  }
}

Kernels cuda_kernels() {
  return {&cuda::forward_memory, &cuda::backward_memory, &cuda::attend, &cuda::attend_backward,
          &cuda::is_capturing};
}

#else

bool serves(at::ScalarType, int64_t) {
  return false;
}

Kernels cuda_kernels() {
  TORCH_CHECK(false, "fused attention: this build has no CUDA kernels");
}

#endif

namespace {

using cuda::TokenHeadsData;

// Requirements of the kernels on [tokens, heads, head_dim].
constexpr int64_t kAlignment = 16, kStrideElements = 8, kLargestStride = int64_t{1} << 22;

bool suits(const at::Tensor& tensor) {
  const auto stride_suits = [&](int64_t dim) {
    const int64_t stride = tensor.stride(dim);
    return (stride > 0 && stride % kStrideElements == 0) || tensor.size(dim) <= 1;
  };
  return tensor.stride(2) == 1 && stride_suits(0) && stride_suits(1) && tensor.stride(0) <= kLargestStride &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0;
}

at::Tensor for_kernel(const at::Tensor& tensor) {
  return suits(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

TokenHeadsData readable(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1)};
}
TokenHeadsData writable(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

std::vector<at::Tensor> all_keys(const at::Tensor& own, const std::vector<at::Tensor>& context) {
  std::vector<at::Tensor> all{for_kernel(own)};
  for (const at::Tensor& segment : context) all.push_back(for_kernel(segment));
  return all;
}

std::vector<ContextRectangle> sorted_rectangles(const AttentionContext& context, int64_t num_tokens) {
  std::vector<ContextRectangle> result = detail::context_rectangles(context, num_tokens);
  cuda::sort_rectangles(result.data(), static_cast<int32_t>(result.size()));
  return result;
}

/// Packs small arrays into one copy to the device.
class Upload {
 public:
  /// Adds an array; returns its offset.
  template <class T>
  int64_t add(const std::vector<T>& array) {
    const auto offset = static_cast<int64_t>(bytes_.size());
    const size_t bytes = array.size() * sizeof(T);
    bytes_.resize(offset + (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (bytes > 0) std::memcpy(bytes_.data() + offset, array.data(), bytes);
    return offset;
  }

  /// Copies from pinned memory, which its allocator keeps alive until the copy is done.
  void send(const at::Device& device) {
    const at::Tensor host = at::empty({static_cast<int64_t>(bytes_.size())},
                                      at::TensorOptions(at::kByte).pinned_memory(device.is_cuda()));
    if (!bytes_.empty()) std::memcpy(host.mutable_data_ptr(), bytes_.data(), bytes_.size());
    sent_ = host.to(device, /*non_blocking=*/true);
  }

  template <class T>
  const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>(static_cast<const std::byte*>(sent_.const_data_ptr()) + offset);
  }

 private:
  std::vector<std::byte> bytes_;
  at::Tensor sent_;
};

void* stream_of(const at::Device& device) {
  return device.is_cuda() ? detail::current_stream(device) : nullptr;
}

/// Arguments of forward or backward, and the tensors and arrays that the kernels point into.
struct Call {
  at::Tensor q, subtree_end, schedules;
  std::vector<at::Tensor> k, v;  // forest first, then each segment
  std::vector<cuda::KeySource> sources;
  std::vector<ContextRectangle> context;
  Upload upload;
  cuda::AttentionProblem problem{};

  Call(const detail::TreeAttentionArguments& arguments, const std::vector<cuda::KeyGradients>& gradients)
      : q(for_kernel(arguments.q)),
        subtree_end(arguments.tokens.subtree_end.contiguous()),
        k(all_keys(arguments.k, arguments.context.k)),
        v(all_keys(arguments.v, arguments.context.v)),
        context(sorted_rectangles(arguments.context, arguments.q.size(0))) {
    const AttentionOptions& options = arguments.options;
    TORCH_CHECK(options.softmax_scale > 0, "fused attention: expected a positive softmax_scale, received ",
                options.softmax_scale);
    TORCH_CHECK(options.sliding_window == 0 && !options.sinks.defined() && options.softcap == 0,
                "fused attention: expected neither sliding_window nor sinks nor softcap");
    TORCH_CHECK(q.size(0) <= std::numeric_limits<int32_t>::max(), "fused attention: too many tokens");
    for (size_t s = 0; s < k.size(); ++s) sources.push_back({readable(k[s]), readable(v[s])});
    const int64_t source_offset = upload.add(sources), context_offset = upload.add(context);
    gradient_offset_ = upload.add(gradients);
    upload.send(q.device());
    problem.element =
        q.scalar_type() == at::kBFloat16 ? cuda::ElementKind::kBFloat16 : cuda::ElementKind::kFloat16;
    problem.num_tokens = static_cast<int32_t>(q.size(0));
    problem.num_heads = static_cast<int32_t>(q.size(1));
    problem.num_key_heads = static_cast<int32_t>(k[0].size(1));
    problem.head_dim = static_cast<int32_t>(q.size(2));
    problem.softmax_scale = static_cast<float>(options.softmax_scale);
    problem.subtree_end = subtree_end.const_data_ptr<int32_t>();
    problem.q = readable(q);
    problem.sources = upload.at<cuda::KeySource>(source_offset);
    problem.host_rectangles = context.data();
    problem.rectangles = upload.at<ContextRectangle>(context_offset);
    problem.num_rectangles = static_cast<int32_t>(context.size());
    problem.deterministic = at::globalContext().deterministicAlgorithms();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const cuda::KeyGradients* gradients() const { return upload.at<cuda::KeyGradients>(gradient_offset_); }
  void* stream() const { return stream_of(q.device()); }

  /// Allocates scratch and sets the problem's schedules. Schedules are not shared between calls during graph
  /// capture or while output guards are active.
  at::Tensor prepare(const Kernels& kernels, const at::Tensor& given_subtree_end, bool backward) {
    const cuda::AttentionMemory bytes =
        backward ? kernels.backward_memory(problem) : kernels.forward_memory(problem);
    const ScheduleSource source{.subtree_end = given_subtree_end,
                                .rectangles = context,
                                .backward = backward,
                                .deterministic = problem.deterministic,
                                .num_heads = problem.num_heads,
                                .num_key_heads = problem.num_key_heads,
                                .head_dim = problem.head_dim,
                                .stream = stream()};
    const bool reusable = !outputs_have_guards() && !kernels.is_capturing(stream());
    const KeptSchedules kept = schedules_for(source, bytes.schedules, reusable);
    schedules = kept.memory;
    problem.schedules = schedules.mutable_data_ptr();
    problem.scheduled = kept.filled;
    return output_like({bytes.scratch}, q.options().dtype(at::kByte));
  }

 private:
  int64_t gradient_offset_ = 0;
};

/// A buffer for the gradient of all keys; kernels write only keys that are visible.
at::Tensor key_gradient(const at::Tensor& keys, bool all_are_seen) {
  return output_like(keys.sizes(), keys.options(), /*zeroed=*/!all_are_seen);
}

}  // namespace

detail::TreeAttentionResults tree_attention(const Kernels& kernels,
                                            const detail::TreeAttentionArguments& arguments) {
  if (!detail::has_one_width(arguments)) {
    return detail::narrowed(arguments, tree_attention(kernels, detail::in_one_width(arguments)));
  }
  Call call(arguments, {});
  const at::Tensor out = output_like(call.q.sizes(), call.q.options());
  const at::Tensor lse = output_like({call.q.size(1), call.q.size(0)}, call.q.options().dtype(at::kFloat));
  const at::Tensor scratch = call.prepare(kernels, arguments.tokens.subtree_end, /*backward=*/false);
  kernels.attend(call.problem, {writable(out), lse.mutable_data_ptr<float>()}, scratch.mutable_data_ptr(),
                 call.stream());
  return {out, lse};
}

detail::TreeAttentionGradients tree_attention_backward(const Kernels& kernels,
                                                       const detail::TreeAttentionArguments& arguments,
                                                       const at::Tensor& grad_out, const at::Tensor& out,
                                                       const at::Tensor& lse) {
  if (!detail::has_one_width(arguments)) {
    const detail::TreeAttentionBackward wide = detail::in_one_width({grad_out, out, lse, arguments});
    return detail::narrowed(arguments,
                            tree_attention_backward(kernels, wide.given, wide.grad_out, wide.out, lse));
  }
  const at::Tensor grad_q = output_like(arguments.q.sizes(), arguments.q.options());
  std::vector<at::Tensor> grad_k{key_gradient(arguments.k, true)}, grad_v{key_gradient(arguments.v, true)};
  for (const at::Tensor& segment : arguments.context.k) grad_k.push_back(key_gradient(segment, false));
  for (const at::Tensor& segment : arguments.context.v) grad_v.push_back(key_gradient(segment, false));
  std::vector<cuda::KeyGradients> gradients;
  for (size_t s = 0; s < grad_k.size(); ++s) gradients.push_back({writable(grad_k[s]), writable(grad_v[s])});
  Call call(arguments, gradients);
  const at::Tensor given = for_kernel(grad_out), result = for_kernel(out), statistics = lse.contiguous();
  const at::Tensor scratch = call.prepare(kernels, arguments.tokens.subtree_end, /*backward=*/true);
  kernels.attend_backward(call.problem,
                          {readable(given), readable(result), statistics.const_data_ptr<float>(),
                           writable(grad_q), call.gradients()},
                          scratch.mutable_data_ptr(), call.stream());
  return {
      grad_q, grad_k[0], grad_v[0], {grad_k.begin() + 1, grad_k.end()}, {grad_v.begin() + 1, grad_v.end()}};
}

}  // namespace espalier::fused
