// SPDX-License-Identifier: Apache-2.0
// espalier device: the CPU and GPUs of this machine and the kernels that run on them.
#include <ATen/Parallel.h>
#include <torch/version.h>

#include <memory>
#include <string_view>

#include <nlohmann/json.hpp>

#include "espalier/base/output.h"
#include "espalier/base/units.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/product_decision.h"
#include "espalier/ops/kernels/cpu/instruction_set.h"
#include "espalier/runtime/cuda_software.h"
#include "espalier/runtime/device.h"

namespace espalier::cli {
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

Json cuda_json(const CudaDriver& driver, const LibTorchCuda& torch, bool again) {
  const std::string fault = cuda_fault(driver, torch);
  Json devices = Json::array();
  for (size_t i = 0; i < driver.devices.size(); ++i) {
    devices.push_back(device_json(driver.devices[i], static_cast<int>(i)));
    if (!fault.empty()) continue;
    const Json asked{{"index", i}, {"again", again}};
    devices.back().update(Json::parse(by_python("device", "verdicts", asked.dump())));
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
  bool json = false, requalify = false;
  std::string check, device = "cuda";
};

int run_device(const DeviceArguments& flags) {
  if (!flags.check.empty())
    python_command("device").pass_on({"--check", flags.check, "--device", flags.device});
  const CudaDriver driver = cuda_driver();
  const LibTorchCuda torch = libtorch_cuda();
  const Json report{{"cpu", cpu_json()},
                    {"cuda", cuda_json(driver, torch, flags.requalify)},
                    {"auto", automatic_device(driver, torch).device.str()}};
  print_output("{}", flags.json ? report.dump(2) + "\n" : by_python("device", "device", report.dump()));
  return 0;
}

}  // namespace

Command device_command() {
  const auto flags = std::make_shared<DeviceArguments>();
  Command command{
      .name = "device",
      .summary = kSummaryOfDevice,
      .closing =
          "Prints which implementation multiplies matrices on the CPU and why, or why no GPU can be used. "
          "Espalier's own kernels run on every GPU of compute capability 8.0 or later: as machine code on "
          "the architectures they were built for, on others as PTX, which the driver compiles.\n\n"
          "When a GPU is first used, its kernels are checked against float64. Each family runs in a separate "
          "process with a time limit: attention on a dozen difficult forests, the LM "
          "head (head; distribution: with temperatures, softcap, scale and bias) and matrix products. For "
          "attention, the first of library and ampere that passed is used, otherwise masked. `python -m "
          "espalier.kernels` prints which libraries are taken and why. Where kernels of head failed, operators "
          "of LibTorch are used. Distribution and products have no alternative; a warning is printed if they failed. The results are stored for the GPU, "
          "driver, LibTorch and build. ESPALIER_ATTENTION selects an implementation regardless of the "
          "results; so does ESPALIER_HEAD (kernels or composed).\n\n"
          "Measured rates are FLOP/s of forward and backward, for each model size that plan and train were "
          "calibrated for on this machine.",
      .run = [flags](const OptionList&) { return run_device(*flags); },
      .has_config = false};
  OptionList& list = command.options;
  list.group("Checks");
  list.add("requalify", &flags->requalify, "Check the kernels again, even if results are stored");
  list.add("check", &flags->check,
           "Check one family of kernels in this process and print its faults: for attention library, ampere "
           "or masked (cpu with --device cpu), or head, distribution or products",
           {.shown = "NAME"});
  list.add("device", &flags->device, "Device for --check: cpu, cuda or cuda:N",
           {.shown = "cpu|cuda|cuda:N", .check = parse_device});
  add_threads(&list);
  list.group(kOutputGroup);
  list.add("json", &flags->json, "Print JSON");
  return command;
}

}  // namespace espalier::cli
