// SPDX-License-Identifier: Apache-2.0
// espalier device: the CPU and GPUs of this machine and the kernels that run on them.
#include <ATen/Parallel.h>
#include <torch/version.h>

#include <memory>
#include <string_view>

#include <nlohmann/json.hpp>

#include "espalier/base/messages.h"
#include "espalier/base/units.h"
#include "espalier/commands/command.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/kernel_check.h"
#include "espalier/measure/product_decision.h"
#include "espalier/ops/kernel_choice.h"
#include "espalier/runtime/cuda_software.h"
#include "espalier/runtime/device.h"

namespace espalier::commands {
namespace {

using Json = nlohmann::ordered_json;

/// The stored calibrations of a device of this name.
Json rates_json(const std::string& name, bool is_cpu) {
  Json json = Json::array();
  for (const KeptRates& kept : kept_rates(cache_folder())) {
    if (kept.device == name && kept.is_cpu == is_cpu) json.push_back(to_json(kept));
  }
  return json;
}

Json cpu_json() {
  const ProductFeatures features = product_features();
  const ProductDecision products = decide_products(
      features, cache_folder(), [](const std::string& text) { log_line("espalier: {}", text); });
  return {{"name", device_name(at::kCPU)},    {"instruction_set", instruction_set_name(instruction_set())},
          {"threads", at::get_num_threads()}, {"matrix_products", to_string(products.choice)},
          {"chosen_by", products.reason},     {"rates", rates_json(device_name(at::kCPU), /*is_cpu=*/true)}};
}

/// Results of the kernel checks by family: those of attention, or all others.
Json verdict_json(const std::vector<qualify::Verdict>& verdicts, bool is_attention) {
  Json json = Json::object();
  for (const qualify::Verdict& verdict : verdicts) {
    if (attention_kind_named(verdict.family).has_value() != is_attention) continue;
    json[verdict.family] = !verdict.served         ? "not for this device"
                           : verdict.fault.empty() ? "passed"
                           : verdict.lasting       ? "FAILED: " + verdict.fault
                                                   : "not checked: " + verdict.fault;
  }
  return json;
}

Json device_json(const CudaDevice& device, int index) {
  return {{"device", fmt::format("cuda:{}", index)},
          {"name", device.name},
          {"compute_capability",
           fmt::format("{}.{}", device.compute_capability / 10, device.compute_capability % 10)},
          {"memory_bytes", device.memory_bytes},
          {"rates", rates_json(device.name, /*is_cpu=*/false)}};
}

Json or_null(const std::string& text) {
  return text.empty() ? Json() : Json(text);
}

Json cuda_json(const CudaDriver& driver, const LibTorchCuda& torch, bool again) {
  const std::string fault = cuda_fault(driver, torch);
  Json devices = Json::array();
  for (size_t i = 0; i < driver.devices.size(); ++i) {
    devices.push_back(device_json(driver.devices[i], static_cast<int>(i)));
    if (!fault.empty()) continue;
    const std::vector<qualify::Verdict> verdicts = kernel_verdicts(driver, torch, static_cast<int>(i), again);
    devices.back()["attention"] = verdict_json(verdicts, /*is_attention=*/true);
    devices.back()["operators"] = verdict_json(verdicts, /*is_attention=*/false);
    CudaKernels kernels = with_environment(proven_kernels(verdicts, "", 0).kernels);
    kernels.attention.push_back(AttentionKind::kMasked);
    devices.back()["taken"] = {
        {"attention", to_string(kernels.named_attention.value_or(kernels.attention.front()))}};
  }
  return {{"libtorch", TORCH_VERSION},
          {"libtorch_cuda", torch.found ? Json(torch.version.empty() ? "unknown" : torch.version) : Json()},
          {"driver", driver.found ? Json(driver.version.empty() ? "unknown" : driver.version) : Json()},
          {"driver_cuda", driver.found ? Json(cuda_version_text(driver.cuda)) : Json()},
          {"nvcc", or_null(ESPALIER_NVCC)},
          {"architectures", or_null(ESPALIER_CUDA_ARCHITECTURES)},
          {"fault", or_null(fault)},
          {"devices", std::move(devices)}};
}

struct DeviceArguments {
  bool requalify = false;
  std::string check, device = "cuda", finding;
};

Result run_device(const DeviceArguments& flags) {
  if (!flags.check.empty()) return {.status = run_check(flags.check, flags.device, flags.finding)};
  const CudaDriver driver = cuda_driver();
  const LibTorchCuda torch = libtorch_cuda();
  return {{{"cpu", cpu_json()},
           {"cuda", cuda_json(driver, torch, flags.requalify)},
           {"auto", automatic_device(driver, torch).device.str()}}};
}

}  // namespace

Command device_command(const Caller&) {
  const auto flags = std::make_shared<DeviceArguments>();
  Command command{.run = [flags](const OptionList&) { return run_device(*flags); }};
  OptionList& list = command.options;
  list.group("Checks");
  list.add("requalify", &flags->requalify, "Check the kernels again, even if results are stored");
  list.add("check", &flags->check,
           "Check one family of kernels in this process and print its faults: for attention library, ampere "
           "or masked (cpu with --device cpu), or head, distribution or products",
           {.shown = "NAME"});
  list.add("device", &flags->device, "Device for --check: cpu, cuda or cuda:N",
           {.shown = "cpu|cuda|cuda:N", .check = parse_device});
  list.add("finding", &flags->finding, "File for the result of --check", {.hidden = true});
  add_threads(&list);
  return command;
}

}  // namespace espalier::commands
