// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/profile.h"

#include <ATen/ATen.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/median.h"
#include "espalier/engine/cost.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

constexpr const char* kStep = "step";

// LibTorch can only write traces to a file, so a temporary one beside the final one is used.
std::string trace_text(kineto::ProfilerResult& recorded, const std::filesystem::path& trace) {
  const std::filesystem::path beside = fmt::format("{}.{}.tmp", trace.string(), ::getpid());
  recorded.save(beside.string());
  std::string text;
  std::error_code ignored;
  if (std::filesystem::exists(beside, ignored)) text = read_text(beside);
  std::filesystem::remove(beside, ignored);
  // LibTorch does not report incomplete writes.
  ESPALIER_CHECK(nlohmann::json::accept(text), "cannot write {}: the trace is incomplete (is the disk full?)",
                 trace.string());
  return text;
}

// FLOPs per second of a matrix product as in the model, without conversions.
double gemm_rate(at::ScalarType dtype, at::Device device) {
  const int64_t rows = device.is_cuda() ? 8192 : 2048, size = device.is_cuda() ? 8192 : 1024;
  constexpr int kRepeats = 7;
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::randn({rows, size}).to(device).to(dtype);
  const at::Tensor b = at::randn({size, size}).to(device).to(dtype);
  detail::affine(a, b, {});
  std::vector<double> seconds;
  for (int i = 0; i < kRepeats; ++i) {
    synchronize(device);
    const auto begin = std::chrono::steady_clock::now();
    detail::affine(a, b, {});
    synchronize(device);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return 2.0 * static_cast<double>(rows * size * size) / median(std::move(seconds));
}

// By the words of python/espalier/printed/profile.py.
nlohmann::json flops_by_kind(const ModelCost& model, const StepResult& result) {
  Work forward = result.work;
  forward += result.recomputed;
  const FlopCount forward_count = forward_flops(model, forward);
  const FlopCount once = forward_flops(model, result.work);
  const FlopCount backward_count = backward_flops(model, result.work);
  const double input_flops = model.frozen ? once.linear : backward_count.linear / 2;
  return {{"linear, forward", forward_count.linear},
          {"linear, gradient of input", input_flops},
          {"linear, gradient of weight", backward_count.linear - input_flops},
          {"attention, forward", forward_count.attention},
          {"attention, backward", backward_count.attention},
          {"head, forward", once.head},
          {"head, backward", backward_count.head}};
}

}  // namespace

Profiler::Profiler(const std::filesystem::path& trace, at::Device device, ProfileText text_of)
    : trace_(trace), device_(device), text_of_(std::move(text_of)), file_(trace) {
  // Otherwise LibTorch with CUDA warns on machines without a GPU.
  ::setenv("KINETO_LOG_LEVEL", "5", /*overwrite=*/0);
}

Profiler::~Profiler() {
  if (!step_) return;
  step_.reset();
  kineto::disableProfiler();
}

void Profiler::start() {
  ESPALIER_ASSERT(!step_);
  const ProfilerConfig config(ProfilerState::KINETO, /*report_input_shapes=*/true);
  std::set<ActivityType> activities{ActivityType::CPU};
  if (device_.is_cuda()) activities.insert(ActivityType::CUDA);
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(
      config, activities,
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
  step_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  step_->before(kStep);
}

std::string Profiler::stop(const Decoder& decoder, const StepResult& result) {
  ESPALIER_ASSERT(step_);
  synchronize(device_);
  step_.reset();
  const auto recorded = kineto::disableProfiler();
  const std::string trace = trace_text(*recorded, trace_);
  file_.write(trace);
  file_.commit();
  const double rate = gemm_rate(detail::product_dtype(decoder.lm_head().weight), device_);
  return text_of_({{"trace", trace_.string()},
                   {"on_gpu", device_.is_cuda()},
                   {"flops_per_second", rate},
                   {"flops", flops_by_kind(cost_of(decoder), result)}});
}

}  // namespace espalier
