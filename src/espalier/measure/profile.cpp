// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/profile.h"

#include <ATen/ATen.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string_view>
#include <tuple>

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
constexpr std::string_view kForward = "forward", kBackward = "backward",
                           kGradientOfInput = "gradient of input", kGradientOfWeight = "gradient of weight";

// A kind of work. Nested events inherit it, unless it is only a default.
struct Kind {
  std::string_view work;
  std::string_view part;
  bool is_default = true;

  bool operator<(const Kind& other) const { return std::tie(work, part) < std::tie(other.work, other.part); }
};

constexpr Kind kOther{"other", ""}, kIdle{"idle", ""};

// Names of operators, of autograd nodes and of regions differ in case and underscores.
std::string simplified(std::string_view name) {
  std::string result;
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)))
      result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

Kind kind_of(const std::string& name, const Kind& outer) {
  struct Rule {
    std::string_view contained, work;
  };
  static constexpr Rule kRules[] = {
      {"treeattention", "attention"}, {"edgelogprobs", "head"},   {"headlogprobs", "head"},
      {"linear", "linear"},           {"rmsnorm", "norm"},        {"rotary", "rotary"},
      {"swiglu", "SwiGLU"},           {"embedding", "embedding"},
  };
  if (!outer.is_default) {
    if (outer.work == "linear" && name == kGradientOfWeight) return {"linear", kGradientOfWeight, false};
    return outer;
  }
  for (const std::string_view region : {"plan", "batch", "objective", "optimizer"}) {
    if (name == region) return {region, "", false};
  }
  if (name.starts_with("layer ")) return {"residual", kForward};
  if (name == "attention" || name == "mlp" || name == "head") return kOther;
  // Also sums gradients that reach a tensor on several paths.
  if (name.starts_with("autograd::engine::evaluate_function")) return {"residual", kBackward};
  const std::string simple = simplified(name);
  const bool backward = simple.find("backward") != simple.npos || simple.find("cppnode") != simple.npos;
  for (const Rule& rule : kRules) {
    if (simple.find(rule.contained) == simple.npos) continue;
    const bool linear = rule.work == "linear";
    return {rule.work, !backward ? kForward : linear ? kGradientOfInput : kBackward, false};
  }
  return outer;
}

using Events = std::vector<const kineto::KinetoEvent*>;

// Visits the nested events of one thread: enter(event, kind) for each event, and spend(kind, seconds) for
// each interval from `begin` on, with the kind of the innermost event.
template <class Enter, class Spend>
void walk_nested(Events events, uint64_t begin, const Enter& enter, const Spend& spend) {
  std::ranges::stable_sort(events, [](const auto* a, const auto* b) {
    return a->startNs() != b->startNs() ? a->startNs() < b->startNs() : a->endNs() > b->endNs();
  });
  struct Open {
    uint64_t end;
    Kind kind;
  };
  std::vector<Open> open;
  uint64_t now = begin;
  const auto pass = [&](uint64_t until) {
    if (!open.empty() && until > now) spend(open.back().kind, 1e-9 * static_cast<double>(until - now));
    now = std::max(now, until);
  };
  for (const kineto::KinetoEvent* event : events) {
    while (!open.empty() && open.back().end <= event->startNs()) {
      pass(open.back().end);
      open.pop_back();
    }
    pass(event->startNs());
    const Kind outer = open.empty() ? kOther : open.back().kind;
    const uint64_t end = open.empty() ? event->endNs() : std::min(event->endNs(), open.back().end);
    open.push_back({end, kind_of(event->name(), outer)});
    enter(*event, open.back().kind);
  }
  for (; !open.empty(); open.pop_back()) pass(open.back().end);
}

bool has_type(const kineto::KinetoEvent& event, std::initializer_list<libkineto::ActivityType> types) {
  return std::ranges::find(types, static_cast<libkineto::ActivityType>(event.activityType())) != types.end();
}

bool is_inside(const kineto::KinetoEvent& event, const kineto::KinetoEvent& step) {
  return event.startNs() >= step.startNs() && event.endNs() <= step.endNs() && !event.isAsync();
}

bool is_operator(const kineto::KinetoEvent& event) {
  return has_type(event, {libkineto::ActivityType::CPU_OP, libkineto::ActivityType::USER_ANNOTATION});
}

// Seconds of the calling thread by kind of work, without nested events of another kind.
std::map<Kind, double> host_seconds(const std::vector<kineto::KinetoEvent>& events,
                                    const kineto::KinetoEvent& step) {
  Events own;
  for (const kineto::KinetoEvent& event : events) {
    const bool counts = is_operator(event) && event.startThreadId() == step.startThreadId();
    if (counts && is_inside(event, step)) own.push_back(&event);
  }
  std::map<Kind, double> seconds;
  const auto spend = [&](const Kind& kind, double spent) { seconds[kind] += spent; };
  walk_nested(std::move(own), step.startNs(), [](const auto&, const Kind&) {}, spend);
  return seconds;
}

// Seconds of the GPU by kind of work. A kernel or copy counts as the operator that launched it, on any
// thread.
std::map<Kind, double> device_seconds(const std::vector<kineto::KinetoEvent>& events,
                                      const kineto::KinetoEvent& step) {
  using Type = libkineto::ActivityType;
  std::map<uint64_t, Events> by_thread;
  for (const kineto::KinetoEvent& event : events) {
    if (is_operator(event) && is_inside(event, step)) by_thread[event.startThreadId()].push_back(&event);
  }
  std::map<uint64_t, Kind> kind_of_operator;
  const auto enter = [&](const kineto::KinetoEvent& event, const Kind& kind) {
    kind_of_operator.emplace(event.correlationId(), kind);
  };
  for (auto& [thread, thread_events] : by_thread) {
    walk_nested(std::move(thread_events), step.startNs(), enter, [](const Kind&, double) {});
  }
  std::map<Kind, double> seconds;
  double busy = 0;
  for (const kineto::KinetoEvent& event : events) {
    const bool counts = has_type(event, {Type::CONCURRENT_KERNEL, Type::GPU_MEMCPY, Type::GPU_MEMSET});
    if (!counts || !is_inside(event, step)) continue;
    const auto launched = kind_of_operator.find(event.linkedCorrelationId());
    const double spent = 1e-9 * static_cast<double>(event.durationNs());
    seconds[launched == kind_of_operator.end() ? kOther : launched->second] += spent;
    busy += spent;
  }
  seconds[kIdle] = std::max(0.0, 1e-9 * static_cast<double>(step.durationNs()) - busy);
  return seconds;
}

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

std::map<Kind, double> flops_by_kind(const ModelCost& model, const StepResult& result) {
  Work forward = result.work;
  forward += result.recomputed;
  const FlopCount forward_count = forward_flops(model, forward);
  const FlopCount backward_count = backward_flops(model, result.work);
  const double input_flops =
      model.frozen ? forward_flops(model, result.work).linear : backward_count.linear / 2;
  return {{{"linear", kForward}, forward_count.linear},
          {{"linear", kGradientOfInput}, input_flops},
          {{"linear", kGradientOfWeight}, backward_count.linear - input_flops},
          {{"attention", kForward}, forward_count.attention},
          {{"attention", kBackward}, backward_count.attention},
          {{"head", kForward}, forward_flops(model, result.work).head},
          {{"head", kBackward}, backward_count.head}};
}

}  // namespace

double ProfileSummary::gemm_bound_seconds() const {
  double flops = 0;
  for (const ProfileRow& row : rows) flops += row.flops;
  return flops / gemm_flops_per_second;
}

std::string ProfileSummary::text() const {
  std::string text = fmt::format("profile of a step, {}\n{:32}{:>11}{:>8}{:>10}{:>9}\n", trace.string(),
                                 "work", "seconds", "share", "GFLOP/s", "of GEMM");
  for (const ProfileRow& row : rows) {
    text += fmt::format("{:32}{:11.6f}{:8.4f}", row.work + (row.part.empty() ? "" : ", ") + row.part,
                        row.seconds, row.seconds / seconds);
    const double rate = row.flops / row.seconds;
    if (row.flops > 0) text += fmt::format("{:10.4g}{:9.3f}", rate / 1e9, rate / gemm_flops_per_second);
    text += '\n';
  }
  return text + fmt::format(
                    "GEMM bound: a matrix product ran at {:.1f} GFLOP/s; at that rate the step would take "
                    "{:.4f} s. It took {:.4f} s: {:.3f}",
                    gemm_flops_per_second / 1e9, gemm_bound_seconds(), seconds,
                    gemm_bound_seconds() / seconds);
}

Profiler::Profiler(const std::filesystem::path& trace, at::Device device)
    : trace_(trace), device_(device), file_(trace) {
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

ProfileSummary Profiler::stop(const Decoder& decoder, const StepResult& result) {
  ESPALIER_ASSERT(step_);
  synchronize(device_);
  step_.reset();
  const auto recorded = kineto::disableProfiler();
  const std::string trace = trace_text(*recorded, trace_);
  file_.write(trace);
  file_.commit();

  const auto step = std::ranges::find(recorded->events(), kStep, &kineto::KinetoEvent::name);
  ESPALIER_ASSERT(step != recorded->events().end());
  ProfileSummary summary;
  summary.trace = trace_;
  summary.seconds = 1e-9 * static_cast<double>(step->durationNs());
  summary.gemm_flops_per_second = gemm_rate(detail::product_dtype(decoder.lm_head_weight()), device_);
  std::map<Kind, double> flops = flops_by_kind(cost_of(decoder), result);
  const auto seconds_by_kind =
      device_.is_cuda() ? device_seconds(recorded->events(), *step) : host_seconds(recorded->events(), *step);
  for (const auto& [kind, seconds] : seconds_by_kind) {
    summary.rows.push_back({std::string(kind.work), std::string(kind.part), seconds, flops[kind]});
  }
  std::ranges::sort(summary.rows, std::greater(), &ProfileRow::seconds);
  return summary;
}

}  // namespace espalier
