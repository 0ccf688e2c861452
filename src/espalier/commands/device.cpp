// SPDX-License-Identifier: Apache-2.0
// espalier device: the CPU and GPUs of this machine. Python adds the verdicts on kernels.
#include <ATen/Parallel.h>
#include <torch/version.h>

#include <nlohmann/json.hpp>

#include "espalier/base/messages.h"
#include "espalier/base/units.h"
#include "espalier/commands/command.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/product_decision.h"
#include "espalier/ops/kernels/cpu/instruction_set.h"
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

Json cuda_json(const CudaDriver& driver, const LibTorchCuda& torch) {
  const std::string fault = cuda_fault(driver, torch);
  Json devices = Json::array();
  for (size_t i = 0; i < driver.devices.size(); ++i) {
    devices.push_back(device_json(driver.devices[i], static_cast<int>(i)));
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

Result report() {
  const CudaDriver driver = cuda_driver();
  const LibTorchCuda torch = libtorch_cuda();
  return {{{"cpu", cpu_json()},
           {"cuda", cuda_json(driver, torch)},
           {"auto", automatic_device(driver, torch).device.str()}}};
}

}  // namespace

Command device_command(const Caller&) {
  Command command{.run = [](const OptionList&) { return report(); }};
  add_threads(&command.options);
  return command;
}

}  // namespace espalier::commands
